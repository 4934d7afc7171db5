"""What a method asks for in a round, one type for each kind of release."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import RecordDict

from coterie.privacy import (
    Collected,
    Contributions,
    Gathered,
    Permit,
    Released,
    ReleasedPoints,
    ReleasedSums,
    ReleasedUpdates,
)
from coterie.rounds.run_state import Models, Run, StrategyError
from coterie.wire import Request, TrainRequest
from coterie.wire.messages import Layout, PointsSpec, Reply, ReplyError, parse, read_points, read_reply

C = TypeVar("C", bound=Contributions)
R = TypeVar("R", bound=Released)
IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Phase(ABC, Generic[C, R]):
    """A request to a cohort, whose replies are released together under one charge.

    Attributes:
        request: the request; the exchange fills in what all requests of a round have in common.
        models: (k, d) models for the clients.
        assignments: index of the one model that each client receives; other clients get no request. None: each
            receives all.
        clients: the recipients; None: a random cohort.
        joined_late: whether they joined after round 1: at record level they are charged in their own ledgers.
        reply_layout: layout of the replies; None: an update of a model.
    """

    request: Request
    models: Models
    assignments: Mapping[int, int] | None = None
    clients: Collection[int] | None = None
    joined_late: bool = False
    reply_layout: Layout | None = None

    def run(self) -> Generator[Phase[Any, Any], Any, R]:
        """Yield this phase; return its release."""
        released: R = yield self
        return released

    @abstractmethod
    def container(self, run: Run, cohort: IntArray, number: int) -> C:
        """The container for the replies of round ``number``.

        Raises:
            PrivacyError: the mechanism does not release them.
        """

    @abstractmethod
    def release(self, run: Run, permit: Permit, contributions: C, attempt: int) -> R:
        """Release the contributions against a permit from the ledger."""

    def read(self, run: Run, request: Request, client: int, content: RecordDict) -> Reply:
        """A valid reply; if it is the update of a model, no longer than the plan allows.

        Raises:
            ReplyError: the reply is invalid.
        """
        plan, layout = run.plan, self.reply_layout or run.state.layout
        training = request if isinstance(request, TrainRequest) else TrainRequest()
        k = plan.num_clusters
        reply = parse(
            read_reply,
            content,
            client_id=client,
            round=request.round,
            num_clusters=len(self.models),
            layout=layout,
            assigned=None if self.assignments is None else self.assignments[client],
            redraw=None if training.redraw is None else np.reshape(training.redraw, (k, k)),
            counts_norms=plan.clients_keep_ledgers and plan.clip_share > 0 and isinstance(request, TrainRequest),
        )
        if self.reply_layout is None:
            lr = float(run.state.config.get("lr", math.inf))
            optimizer = str(run.state.config.get("optimizer", "sgd"))
            limit = plan.max_update_norm(client, layout.size, lr, training.first_batch, optimizer)
            if limit < math.inf and (norm := float(np.linalg.norm(reply.update.astype(np.float64)))) > limit:
                raise ReplyError(f"the update has norm {norm:.4g}, expected at most {limit:.4g}")
        return reply

    def received(self, reply: Reply) -> None:
        """Called with every valid reply when it arrives."""


@dataclass(frozen=True)
class SumsPhase(Phase[Contributions, ReleasedSums]):
    """Sums of the updates of each cluster.

    Attributes:
        shared: number of leading coordinates that all clusters share.
    """

    shared: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.clients is not None:
            raise StrategyError("sums require a random cohort: a phase for chosen clients must be an UpdatesPhase")

    def container(self, run: Run, cohort: IntArray, number: int) -> Contributions:
        """Sums on arrival; single updates for an aggregator that reads them."""
        if run.aggregator.robust:
            return run.plan.collected(run.state.layout.size, cohort)
        return run.plan.of_round(number).contributions(run.state.layout.size, shared=self.shared)

    def release(self, run: Run, permit: Permit, contributions: Contributions, attempt: int) -> ReleasedSums:
        """Noisy sums, or what a robust aggregator makes of the updates."""
        plan = run.plan
        if not isinstance(contributions, Collected):
            return plan.release(permit, contributions, run.streams, attempt, run.state.redraw, run.mechanism_state)
        updates = plan.release_each(permit, contributions)
        return run.aggregator.aggregated(updates, plan.num_clusters, self.shared, counts=not plan.private)


@dataclass(frozen=True)
class UpdatesPhase(Phase[Collected, ReleasedUpdates]):
    """The updates of single clients, which few mechanisms release."""

    def container(self, run: Run, cohort: IntArray, number: int) -> Collected:
        """Single updates."""
        return run.plan.collected((self.reply_layout or run.state.layout).size, cohort)

    def release(self, run: Run, permit: Permit, contributions: Collected, attempt: int) -> ReleasedUpdates:
        """All of them."""
        return run.plan.release_each(permit, contributions)


@dataclass(frozen=True)
class PointsPhase(Phase[Gathered, ReleasedPoints]):
    """Points of single clients.

    Attributes:
        reply_spec: bounds of a reply.
        on_points_received: called with a client and its (n, *shape) points when they arrive.
    """

    reply_spec: PointsSpec = field(kw_only=True)
    on_points_received: Callable[[int, npt.NDArray[np.float32]], None] | None = field(default=None, kw_only=True)

    def container(self, run: Run, cohort: IntArray, number: int) -> Gathered:
        """Points by client."""
        return run.plan.gathered(cohort)

    def release(self, run: Run, permit: Permit, contributions: Gathered, attempt: int) -> ReleasedPoints:
        """All of them."""
        return run.plan.release_each(permit, contributions)

    def read(self, run: Run, request: Request, client: int, content: RecordDict) -> Reply:
        """Valid points."""
        expected = self.reply_spec
        points = parse(read_points, content, client_id=client, round=request.round, expected=expected)
        return Reply(client, 0, 0, points)

    def received(self, reply: Reply) -> None:
        """Pass the points on."""
        if self.on_points_received is not None:
            self.on_points_received(reply.client_id, reply.update)
