"""A run: what it is made of, its state, and the counts of requests, replies and bytes."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import RecordDict

from coterie.privacy import Ledger, Plan, Streams, redraw_matrix
from coterie.rounds.aggregation import Aggregator
from coterie.rounds.client_registry import ClientRegistry
from coterie.wire.messages import Layout, payload, update_payload

Models: TypeAlias = npt.NDArray[np.float32]
FloatArray: TypeAlias = npt.NDArray[np.float64]

# Largest number of distinct reasons for dropped replies that are counted.
_MAX_REASONS, _OTHER_REASONS = 100, "other reasons"


class StrategyError(ValueError):
    """A strategy cannot run as configured."""


class Statistics:
    """Counts over a run, and those of the current round.

    Attributes:
        asked: number of training requests.
        accepted: number of valid replies to them.
        dropped: numbers of dropped replies by reason: printable text, a bounded number of reasons.
        traffic: messages and bytes of arrays in this round, both ways, without introductions.
        labels: the latest label of each client, of updates that were released with their labels.
        evaluated: number of valid replies to evaluations.
        refusing: why each client refused the latest request to be trained, if it did: a key of
            :data:`~coterie.wire.messages.REFUSALS`. Empty where participants are secret.
        unevaluated: first reason why a reply to an evaluation could not be used; empty if all could.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.accepted = 0
        self.dropped: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.labels: dict[int, int] = {}
        self.refusing: dict[int, str] = {}
        self.evaluated = 0
        self.unevaluated = ""
        self._before = (0, 0, Counter[str]())

    def sent(self, content: RecordDict, count: int = 1) -> None:
        """Count the same message to ``count`` clients."""
        self.traffic["messages_down"] += count
        self.traffic["bytes_down"] += count * payload(content)

    def received(self, content: RecordDict | None) -> None:
        """Count a reply."""
        self.traffic["messages_up"] += 1
        self.traffic["bytes_up"] += payload(content) if isinstance(content, RecordDict) else 0

    def summed(self, count: int, layout: Layout) -> None:
        """Count valid replies, summed where their clients are simulated, as if each were a message."""
        self.traffic["messages_up"] += count
        self.traffic["bytes_up"] += count * update_payload(layout)
        self.accepted += count

    def drop(self, reason: str) -> None:
        """Count a dropped reply."""
        listed = reason in self.dropped or len(self.dropped) < _MAX_REASONS
        self.dropped[reason if listed else _OTHER_REASONS] += 1

    def next_round(self) -> dict[str, Any]:
        """Counts of the round, JSON-ready; the next round starts at zero."""
        asked, accepted, dropped = self._before
        counts: dict[str, Any] = dict(self.traffic)
        counts["replies"] = {
            "asked": self.asked - asked,
            "accepted": self.accepted - accepted,
            "dropped": dict(self.dropped - dropped),
        }
        self.traffic.clear()
        self._before = (self.asked, self.accepted, self.dropped.copy())
        return counts


@dataclass(frozen=True)
class RunState:
    """State of a run; whoever changes a part replaces the whole.

    Attributes:
        plan: participation, release and cost of the next exchange.
        layout: of one model.
        histogram: (k,) running mean of released histograms; None before the first.
        arrays: of the method between rounds; part of checkpoints.
        notes: of the method on the current round.
        config: configuration for clients, with the step size of the round.
        stopped: reason why the run ended before its last round; None otherwise.
    """

    plan: Plan
    layout: Layout = field(default_factory=lambda: Layout((), ()))
    histogram: FloatArray | None = None
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    stopped: str | None = None

    @cached_property
    def redraw(self) -> FloatArray | None:
        """(k, k) matrix by which clients redraw their labels in this round; None if they do not."""
        if not (self.plan.redraws and self.plan.rebalance_min and self.histogram is not None):
            return None
        return redraw_matrix(self.histogram, self.plan.rebalance_min)

    def resized(self, num_clusters: int) -> RunState:
        """With the number of clusters that the method found; sizes of other clusters have no meaning."""
        plan, histogram = self.plan, self.histogram
        if plan.num_clusters != num_clusters:
            plan = replace(plan, num_clusters=num_clusters)
        if histogram is not None and len(histogram) != num_clusters:
            histogram = None
        return replace(self, plan=plan, histogram=histogram)


@dataclass(kw_only=True)
class Run:
    """What a run is made of, and its state.

    Attributes:
        ledger: records charges.
        streams: the server's randomness.
        registry: the clients and their nodes.
        aggregator: of the updates of a cluster.
        rebalance_train: which model a client trains after rebalancing changed its label, "own" or "assigned".
        state: changes by replacement only.
        statistics: counts requests and replies.
        heads: at record level, head of the latest charge of each client (:data:`~coterie.wire.messages.HEAD`).
        masks: whether clients mask their vectors, so that the server sees their sum alone.
        name: of this session of the run, in masked rounds: random.
    """

    ledger: Ledger
    streams: Streams
    registry: ClientRegistry
    aggregator: Aggregator
    rebalance_train: str
    state: RunState
    statistics: Statistics = field(default_factory=Statistics)
    heads: dict[int, str] = field(default_factory=dict)
    masks: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def plan(self) -> Plan:
        """The plan of the next exchange."""
        return self.state.plan

    @property
    def attempt(self) -> int:
        """Number of the next charge, so that a repeated round draws fresh randomness."""
        return len(self.ledger.charges) + 1

    @cached_property
    def mechanism_state(self) -> object | None:
        """State of the plan's mechanism between rounds (:meth:`~coterie.privacy.Plan.new_state`); in memory only."""
        return self.plan.new_state()

    @cached_property
    def evaluation_order(self) -> list[int]:
        """All clients in an order drawn once, whose first evaluate where not all do."""
        order: list[int] = self.streams.stream("evaluation-clients").permutation(self.registry.clients).tolist()
        return order
