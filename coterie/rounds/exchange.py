"""One exchange: sample a cohort, send a request, validate the replies, charge, release.

At record level, where clients replay their replies to repeated requests, the charge precedes the messages: clients may
reply even if this server fails, and a server that resumes sends the same request without another charge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import WARNING
from typing import Any, Generic, Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from coterie.logs import printable
from coterie.privacy import Permit, Pricing, Summed
from coterie.rounds.phases import C, IntArray, Phase, R, SumsPhase
from coterie.rounds.run_state import Models, Run, StrategyError
from coterie.wire import Request, TrainRequest, digest
from coterie.wire.messages import (
    CHARGED_REQUESTS,
    CONFIG,
    HEAD,
    MODELS,
    REFUSALS,
    REPLY,
    ReplyError,
    head_of,
    pack_models,
)

#: Reason of every dropped reply of a certified client-level run, whose participants are secret.
WITHHELD = "withheld under client-level privacy: see the clients' logs"
#: Flower's transport errors: the node or its process is gone, or the time is over.
TRANSPORT_ERRORS = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
_KINDS = {code: kind for kind, code in REFUSALS.items()}


class MessageBatch:
    """One message for each registered client: all models, or the one assigned to it.

    Args:
        run: the run.
        request: completed.
        models: (k, d).
        assignments: index of the one model that each client receives; other clients get no message. None: each
            receives all.
        clients: the recipients; those without a node are left out.

    Raises:
        StrategyError: the configuration sets a field of the request, which no plan would price.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        models: Models,
        assignments: Mapping[int, int] | None,
        clients: Collection[int],
    ) -> None:
        self._run = run
        self.request: Any = request  # or a step of a masked round
        self._clients: dict[str, int] = {}  # by id of the message
        self.messages: dict[int, Message] = {}
        present = [client for client in clients if client in run.registry.nodes]
        if assignments is None:
            self._add(pack_models(models, run.state.layout), request, present)
            return
        for cluster, model in enumerate(models):
            members = [client for client in present if assignments.get(client) == cluster]
            self._add(pack_models(model[None], run.state.layout), replace(request, cluster=cluster), members)

    def _add(self, arrays: ArrayRecord, request: Request, clients: list[int]) -> None:
        message = message_content(self._run, arrays, request)
        self._run.statistics.sent(message, len(clients))
        self.messages |= {client: self._message(client, message) for client in clients}

    def _message(self, client: int, content: RecordDict) -> Message:
        head = self._run.heads.get(client)
        if head is not None and self.request.message_type in CHARGED_REQUESTS:
            content = RecordDict({**content, CONFIG: ConfigRecord({**content.config_records[CONFIG], HEAD: head})})
        return Message(
            content,
            dst_node_id=self._run.registry.nodes[client],
            message_type=self.request.message_type,
            group_id=str(self.request.round),
        )

    def repeat(self, clients: Collection[int]) -> list[Message]:
        """The same messages for those of ``clients`` that are registered, at their current nodes."""
        present = sorted(self._run.registry.nodes.keys() & clients)
        for client in present:
            self.messages[client] = self._message(client, self.messages[client].content)
            self._run.statistics.sent(self.messages[client].content)
        return [self.messages[client] for client in present]

    def replies(self, replies: Iterable[Message]) -> Iterator[tuple[int, RecordDict]]:
        """(client, content) of the first reply to each message; other replies are dropped."""
        answered: set[int] = set()
        for reply in replies:
            content = reply.content if reply.has_content() else None
            self._run.statistics.received(content)
            client = self.client_of(reply)
            if client is None or client in answered:
                self.drop(None, "it matches no open request, or is a duplicate")
                continue
            answered.add(client)
            if reply.has_error():
                refuse = self.drop if reply.error.code in TRANSPORT_ERRORS else self.reject
                refuse(client, self._refusal(client, reply.error))
            elif isinstance(content, RecordDict):
                yield client, content
            else:
                self.reject(client, f"its content is a {type(content).__name__}, expected a RecordDict")

    def _refusal(self, client: int, error: Error) -> str:
        """Return why a client sent an error, and note a client that refuses to be trained."""
        kind = _KINDS.get(error.code)
        if kind in (None, "failed"):
            return f"the client failed: {error.reason}"
        if self.request.message_type in CHARGED_REQUESTS and not self._withheld:
            self._run.statistics.refusing[client] = str(kind)
        return f"the client refuses ({kind}): {error.reason}"

    @property
    def _withheld(self) -> bool:
        """Whether participants are secret: in certified client-level runs."""
        return self._run.plan.private and self._run.streams.secret and not self._run.plan.clients_keep_ledgers

    def client_of(self, reply: Message) -> int | None:
        """The client whose message this replies to; None if there is none."""
        return self.recipient(reply.metadata.reply_to_message_id)

    def recipient(self, message_id: str) -> int | None:
        """The client that received a message; None if there is none of this id."""
        if message_id not in self._clients:  # Flower assigns ids when it sends messages
            self._clients = {message.metadata.message_id: client for client, message in self.messages.items()}
        return self._clients.get(message_id)

    @cached_property
    def unusable(self) -> set[int]:
        """Clients that replied with an error or an invalid reply: they are not missing, since data may decide this."""
        return set()

    def reject(self, client: int, reason: str) -> None:
        """Drop a reply that cannot be used; its client is not missing."""
        self.unusable.add(client)
        self.drop(client, reason)

    def drop(self, client: int | None, reason: str) -> None:
        """Count a reply as dropped. Certified client-level runs keep a total only."""
        reason, withheld = printable(reason), self._withheld
        self._run.statistics.drop(WITHHELD if withheld else reason)
        if not withheld:  # participation is public at record level
            fields = {"round": self.request.round, "client": client, "reason": reason}
            log(WARNING, "reply of client %s dropped: %s", "?" if client is None else client, reason, extra=fields)


def message_content(run: Run, arrays: ArrayRecord, request: Request) -> RecordDict:
    """Content of a message to clients: models, and the run's configuration with the request.

    Raises:
        StrategyError: the configuration sets a field of the request, which no plan would price.
    """
    if taken := run.state.config.keys() & request.keys():
        names = ", ".join(sorted(taken))
        raise StrategyError(f"the client configuration must not set {names}: the strategy sets these fields")
    return RecordDict({MODELS: arrays, CONFIG: ConfigRecord({**run.state.config, **request.to_record()})})


def batch_digest(run: Run, request: Request, models: Models, assignments: Mapping[int, int] | None) -> str:
    """Digest of all messages of an exchange, whoever receives them."""
    message = message_content(run, pack_models(models, run.state.layout), request)
    pairs = None if assignments is None else sorted(assignments.items())
    return hashlib.sha256(f"{digest(request.message_type, message)} {pairs}".encode()).hexdigest()


@dataclass(frozen=True)
class PartialSums:
    """Sums of the updates of some clients, computed where they are simulated; never received over a network.

    Attributes:
        sums: of the clipped updates.
        messages: the requests that they reply to.
    """

    sums: Summed
    messages: Sequence[Message]


@runtime_checkable
class SupportsSums(Protocol):
    """A grid that simulates clients and sums their updates itself, so that k x d numbers come back, not n x d."""

    def send_and_sum(
        self, messages: Iterable[Message], new_sums: Callable[[], Summed]
    ) -> Iterator[Message | PartialSums]:
        """Yield partial sums, and the replies of clients that failed or whose updates are to be dropped.

        Args:
            messages: requests to train.
            new_sums: creates an empty container, in this or in another process.
        """


class Exchange(Generic[C, R]):
    """One phase with one cohort; it lives until the release.

    Args:
        run: the run.
        phase: what the method asks for.
        number: of the round.

    Attributes:
        request: the completed request, which the plan prices and the clients execute.
        cohort: (m,) client of every slot.
        batch: the messages.

    Raises:
        StrategyError: the configuration for clients sets a field of the request.
        PrivacyError: the mechanism does not release what the phase asks for.
        BudgetError: the charge would exceed the budget.
    """

    def __init__(self, run: Run, phase: Phase[C, R], number: int) -> None:
        self._run, self._phase, self._attempt = run, phase, run.attempt
        self.request = _completed(phase.request, number, run)
        self.cohort = self._sampled()
        self._contributions = phase.container(run, self.cohort, number)
        self._below: list[float] = []  # shares of short gradients, by client
        self._permit = self._charged_before_sending()
        if self._permit is None:
            self._expect_charge()
        self.batch = MessageBatch(run, self.request, phase.models, phase.assignments, self.cohort.tolist())
        run.statistics.asked += len(self.batch.messages)

    def collect(self, replies: Iterable[Message]) -> None:
        """Validate and add each reply on arrival; drop invalid ones with a reason."""
        slots = {client: slot for slot, client in enumerate(self.cohort.tolist())}
        for client, content in self.batch.replies(replies):
            try:
                reply = self._phase.read(self._run, self.request, client, content)
                self._contributions.add(slots[client], reply.label, reply.redrawn_label, reply.update)
                self._phase.received(reply)
                if reply.below is not None:
                    self._below.append(reply.below)
                if self._run.plan.unit != "client" and isinstance(self._phase, SumsPhase):
                    self._run.statistics.labels[client] = reply.label
                self._run.statistics.accepted += 1
                self._run.statistics.refusing.pop(client, None)
                self._note_head(client, content)
            except ReplyError as error:
                self.batch.reject(client, str(error))
        for _ in self.batch.unusable:
            self._contributions.add_null()

    def _note_head(self, client: int, content: RecordDict) -> None:
        """Note the head of a client's charge; at client level it would show who takes part."""
        if self._run.plan.clients_keep_ledgers and (head := head_of(content.get(REPLY))) is not None:
            self._run.heads[client] = head

    @property
    def new_sums(self) -> Callable[[], Summed] | None:
        """Creates an empty container, where the replies may be summed elsewhere; None: each must be collected."""
        return self._contributions.partial if isinstance(self._phase, SumsPhase) else None

    def merge(self, partial: PartialSums) -> set[int | None]:
        """Add the sums of some clients, as :meth:`collect` adds each of their replies; return the clients."""
        assert isinstance(self._contributions, Summed)
        self._contributions.merge(partial.sums)
        self._run.statistics.summed(len(partial.messages), self._run.state.layout)
        return {self.batch.recipient(message.metadata.message_id) for message in partial.messages}

    def release(self) -> R:
        """Charge, unless that is done, and release.

        Raises:
            BudgetError: the charge would exceed the budget.
        """
        permit = self._permit or self._charged()
        released = self._phase.release(self._run, permit, self._contributions, self._attempt)
        if not self._below:
            return released
        middle = np.median if self._run.aggregator.robust else np.mean
        return replace(released, below=float(middle(self._below)))

    def _sampled(self) -> IntArray:
        if self._phase.clients is not None:
            return np.array(sorted(self._phase.clients), np.int64)
        number = self.request.round
        return self._run.plan.sample(self._run.streams.stream("cohort", number, self._attempt), number)

    def _charged_before_sending(self) -> Permit | None:
        registry, phase = self._run.registry, self._phase
        if not self._run.plan.clients_keep_ledgers or not registry.idempotent >= registry.nodes.keys():
            return None
        return self._charged(batch_digest(self._run, self.request, phase.models, phase.assignments))

    def _expect_charge(self) -> None:
        pricing: Pricing = self._run.plan
        charges = pricing.charges(self.request, self.cohort)
        if len(charges) == 1:
            ((event, count),) = charges.items()
            self._run.ledger.expect(event, count)

    def _charged(self, request_digest: str = "") -> Permit:
        """Charge the replies; a repeated request, identified by its digest, is charged once."""
        ledger, plan, number = self._run.ledger, self._run.plan, self.request.round
        pricing: Pricing = plan
        if self._phase.joined_late and plan.clients_keep_ledgers:  # charged by the clients only
            return ledger.uncharged_permit(number)
        charges = pricing.charges(self.request, self.cohort)
        if not charges:  # the release then needs a plan that allows it
            return ledger.uncharged_permit(number)
        if request_digest and ledger.is_charged(number, charges, request_digest):
            return ledger.replay_permit(number, next(iter(charges)))
        details: dict[str, Any] = {"for": "training"}
        if not plan.clients_keep_ledgers:
            details["noise_multiplier_updates"] = plan.of_round(number).noise_multiplier_updates
            details["noise_multiplier_counts"] = plan.of_round(number).noise_multiplier_counts
        if request_digest:
            details["question"] = request_digest
        for event, count in charges.items():
            permit = ledger.charge_round(number, event, count, **details)
        return permit


def _completed(request: Request, number: int, run: Run) -> Request:
    """The request of a method, completed with the fields that all requests of a round share."""
    request = replace(request, round=number, record_plans=run.plan.record_plans)
    redraw = run.state.redraw
    if redraw is None or not isinstance(request, TrainRequest):
        return request
    assigned = None if run.rebalance_train == "own" else run.rebalance_train
    return replace(request, redraw=tuple(redraw.ravel().tolist()), rebalance_train=assigned)
