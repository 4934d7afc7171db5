"""What an exchange needs of its run, and the counts of requests, replies and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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
    """

    def __init__(self) -> None:
        self.asked = 0
        self.accepted = 0
        self.dropped: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.labels: dict[int, int] = {}
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
        known = reason in self.dropped or len(self.dropped) < _MAX_REASONS
        self.dropped[reason if known else _OTHER_REASONS] += 1

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


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The collaborators of a run and its state at the start of an exchange.

    Attributes:
        plan: participation, release and cost.
        ledger: records charges.
        streams: the server's randomness.
        registry: the clients and their nodes.
        statistics: counts requests and replies.
        aggregator: of the updates of a cluster.
        layout: of one model.
        shared: number of leading coordinates that all clusters share.
        config: configuration for clients, with the step size of the round.
        histogram: (k,) running mean of released histograms; None before the first.
        rebalance_train: which model a client trains after rebalancing changed its label, "own" or "assigned".
        mechanism_state: of the plan (:meth:`~coterie.privacy.Plan.new_state`); in memory only.
    """

    plan: Plan
    ledger: Ledger
    streams: Streams
    registry: ClientRegistry
    statistics: Statistics
    aggregator: Aggregator
    layout: Layout
    shared: int
    config: Mapping[str, Any]
    histogram: FloatArray | None
    rebalance_train: str
    mechanism_state: object | None

    @cached_property
    def redraw(self) -> FloatArray | None:
        """(k, k) matrix by which clients redraw their labels in this round; None if they do not."""
        if not (self.plan.redraws and self.plan.rebalance_min and self.histogram is not None):
            return None
        return redraw_matrix(self.histogram, self.plan.rebalance_min)

    @property
    def attempt(self) -> int:
        """Number of the next charge."""
        return len(self.ledger.charges) + 1
