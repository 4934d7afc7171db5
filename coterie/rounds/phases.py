"""What a method asks for in a round, one type for each kind of release."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import RecordDict

from coterie.privacy import (
    Collected,
    Contributions,
    Event,
    Gathered,
    Permit,
    Pricing,
    ReleasedPoints,
    ReleasedSums,
    ReleasedUpdates,
)
from coterie.privacy.mechanisms.score_sums import TRAINING
from coterie.rounds.batches import message_content
from coterie.rounds.run_state import Models, Run, StrategyError
from coterie.wire import Request, TrainRequest, digest
from coterie.wire.messages import Layout, PointsSpec, Reply, ReplyError, pack_models, parse, read_points, read_reply

C = TypeVar("C", bound=Contributions)
R = TypeVar("R")
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

    #: Whether the replies are to train models, or to compute points for training.
    trains: ClassVar[bool] = True

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

    @property
    def masked_release(self) -> str:
        """What masked rounds call the release of this phase; empty: masks are not for it."""
        return ""

    def completed(self, run: Run, number: int) -> Request:
        """The request with the fields that all requests of a round share."""
        request = replace(self.request, round=number, record_plans=run.plan.record_plans)
        redraw = run.state.redraw
        if isinstance(request, TrainRequest):
            request = replace(request, counts_records=run.aggregator.by_records)
        if redraw is None or not isinstance(request, TrainRequest):
            return request
        assigned = None if run.rebalance_train == "own" else run.rebalance_train
        return replace(request, redraw=tuple(redraw.ravel().tolist()), rebalance_train=assigned)

    def charged_first(self, run: Run) -> bool:
        """Whether the charge precedes the messages: clients keep ledgers, and repeat their replies at no cost."""
        return run.plan.clients_keep_ledgers and run.registry.idempotent >= run.registry.nodes.keys()

    def charges(self, run: Run, request: Request, cohort: IntArray) -> Counter[Event]:
        """Events of the replies."""
        pricing: Pricing = run.plan
        return pricing.charges(request, cohort)

    def charge(self, run: Run, request: Request, cohort: IntArray, *, before_sending: bool) -> Permit:
        """Charge the replies; a request that is charged before it is sent, and repeated after a crash, is charged once.

        Args:
            run: the run.
            request: completed.
            cohort: (m,) clients.
            before_sending: whether no message has left yet.

        Raises:
            BudgetError: the charge would exceed the budget.
        """
        ledger, plan, number = run.ledger, run.plan, request.round
        if self.joined_late and plan.clients_keep_ledgers:  # charged by the clients only
            return ledger.uncharged_permit(number)
        charges = self.charges(run, request, cohort)
        if not charges:  # the release then needs a plan that allows it
            return ledger.uncharged_permit(number)
        details: dict[str, Any] = {"for": "training"}
        if not plan.clients_keep_ledgers:
            details["noise_multiplier_updates"] = plan.of_round(number).noise_multiplier_updates
            details["noise_multiplier_counts"] = plan.of_round(number).noise_multiplier_counts
        elif before_sending:
            message = message_content(run, pack_models(self.models, run.state.layout), request)
            pairs = None if self.assignments is None else sorted(self.assignments.items())
            question = hashlib.sha256(f"{digest(request.message_type, message)} {pairs}".encode()).hexdigest()
            if ledger.is_charged(number, charges, question):
                return ledger.replay_permit(number, next(iter(charges)))
            details["question"] = question
        for event, count in charges.items():
            permit = ledger.charge_round(number, event, count, **details)
        return permit

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
            counts_records=training.counts_records,
            counts_norms=plan.clients_keep_ledgers and plan.clip_share > 0 and isinstance(request, TrainRequest),
        )
        if self.reply_layout is None:
            lr = float(run.state.config.get("lr", math.inf))
            optimizer = str(run.state.config.get("optimizer", "sgd"))
            limit = plan.max_update_norm(client, layout.size, lr, training.first_batch, optimizer)
            if limit < math.inf and (norm := float(np.linalg.norm(reply.update.astype(np.float64)))) > limit:
                raise ReplyError(f"the update has norm {norm:.4g}, expected at most {limit:.4g}")
        return reply

    def received(self, run: Run, reply: Reply) -> None:
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

    @property
    def masked_release(self) -> str:
        """The sum of updates."""
        return TRAINING

    def received(self, run: Run, reply: Reply) -> None:
        """Note the label, which is released with the sums; not at client level."""
        if not run.plan.hides_clients:
            run.statistics.labels[reply.client_id] = reply.label

    def container(self, run: Run, cohort: IntArray, number: int) -> Contributions:
        """Sums on arrival; single updates for an aggregator that reads them."""
        if run.aggregator.collects:
            return run.plan.collected(run.state.layout.size, cohort)
        return run.plan.of_round(number).contributions(run.state.layout.size, shared=self.shared)

    def release(self, run: Run, permit: Permit, contributions: Contributions, attempt: int) -> ReleasedSums:
        """Noisy sums, or what an aggregator makes of the updates."""
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

    def received(self, run: Run, reply: Reply) -> None:
        """Pass the points on."""
        if self.on_points_received is not None:
            self.on_points_received(reply.client_id, reply.update)
