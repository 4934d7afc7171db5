"""One exchange: sample a cohort, send a request, validate the replies, charge, release.

At record level, where clients replay their replies to repeated requests, the charge precedes the messages: clients may
reply even if this server fails, and a server that resumes sends the same request without another charge. The charge of
a masked round precedes them, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from logging import WARNING
from typing import Any, Generic, cast

import numpy as np
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.privacy import Collected, NothingReleasedError, Permit, Summed
from coterie.rounds.batches import TRANSPORT_ERRORS, MessageBatch, PartialSums, send
from coterie.rounds.masked_exchange import MaskedSum
from coterie.rounds.phases import C, Phase, R
from coterie.rounds.run_state import Run, StrategyError
from coterie.wire.messages import REPLY, ReplyError, head_of

# Attempts to receive a reply from silent clients, where too few replies come.
_ATTEMPTS = 3


class Exchange(Generic[C, R]):
    """One phase with one cohort: constructed (which may charge), performed, and released, once each.

    Args:
        run: state of the run.
        phase: what the method asks for.
        number: number of the round; a repeated round has another ``run.attempt``.

    Attributes:
        request: the completed request, which the plan prices and the clients execute.
        cohort: (m,) id of the client in every slot.
        batch: messages to the cohort; empty in a masked round, whose steps have their own.

    Raises:
        StrategyError: the configuration for clients sets a field of the request, or the method assigns clusters in a
            masked round.
        PrivacyError: the mechanism does not release what the phase asks for.
        BudgetError: the charge would exceed the budget.
    """

    def __init__(self, run: Run, phase: Phase[C, R], number: int) -> None:
        self._run, self._phase, self._attempt = run, phase, run.attempt
        masked = run.masks and phase.masked_release != ""
        if masked and phase.assignments is not None:
            raise StrategyError("mechanism secure hides labels from the server, and this method assigns them")
        self.request = phase.completed(run, number)
        if phase.clients is not None:
            self.cohort = np.array(sorted(phase.clients), np.int64)
        else:
            self.cohort = run.plan.sample(run.streams.stream("cohort", number, self._attempt), number)
        self._contributions = phase.container(run, self.cohort, number)
        self._below: list[float] = []  # of each client, its share of gradients below the threshold of norms
        self._permit: Permit | None = None
        if masked or phase.charged_first(run):
            self._permit = phase.charge(run, self.request, self.cohort, before_sending=True)
        else:
            charges = phase.charges(run, self.request, self.cohort)
            if len(charges) == 1:  # composed while replies arrive
                run.ledger.expect(*next(iter(charges.items())))
        clients = self.cohort.tolist()
        self._masked = None
        if masked:
            self.batch = MessageBatch(run, self.request, [])
            self._masked = MaskedSum(run, phase, self.request, self._attempt, clients)
        else:
            self.batch = MessageBatch.of_models(run, self.request, phase.models, phase.assignments, clients)
        if phase.trains:
            run.statistics.asked += len(run.registry.nodes.keys() & clients) if masked else len(self.batch.messages)

    def perform(self, grid: Grid, timeout: float, min_replies: float = 0.0) -> None:
        """Send the messages, and collect the replies.

        Args:
            grid: to the clients.
            timeout: seconds until messages expire.
            min_replies: share of the requested replies to train below which silent clients receive the request again;
                not at client level.

        Raises:
            StrategyError: too few replies after all attempts.
        """
        if self._masked is None:
            self.collect(self._replies(grid, timeout, min_replies))
            return
        masked = self._masked
        masked.collect(grid, timeout)
        self._count(masked.survivors, masked.missing)
        if not masked.missing:
            contributions = cast(Any, self._contributions)
            contributions.add_vectors(masked.total, masked.survivors, masked.unremoved)

    def collect(self, replies: Iterable[Message]) -> None:
        """Validate and add each reply on arrival; drop invalid ones with a reason."""
        slots = {client: slot for slot, client in enumerate(self.cohort.tolist())}
        statistics, valid = self._run.statistics, 0
        dropped = statistics.dropped.copy()
        for client, content in self.batch.replies(replies):
            try:
                reply = self._phase.read(self._run, self.request, client, content)
                if reply.records is not None:
                    cast(Collected, self._contributions).weights[slots[client]] = reply.records
                self._contributions.add(slots[client], reply.label, reply.redrawn_label, reply.update)
                self._phase.received(self._run, reply)
            except ReplyError as error:
                self.batch.reject(client, str(error))
                continue
            valid += 1
            if reply.below is not None:
                self._below.append(reply.below)
            if self._phase.trains:
                statistics.refusing.pop(client, None)
                self._note_head(client, content)
        for _ in self.batch.unusable:
            self._contributions.add_null()
        reason = next(iter(statistics.dropped - dropped), "no client replied")
        self._count(valid, reason if valid < len(self.batch.messages) else "")

    def release(self) -> R:
        """Charge, unless that is done, and release.

        Raises:
            BudgetError: the charge would exceed the budget.
            NothingReleasedError: a masked sum is not known, because too few clients answered a step, or is impossible.
        """
        permit = self._permit or self._phase.charge(self._run, self.request, self.cohort, before_sending=False)
        if self._masked is not None and self._masked.missing:
            permit.use()
            raise NothingReleasedError(self._masked.missing)
        released = self._phase.release(self._run, permit, self._contributions, self._attempt)
        if not self._below:
            return released
        middle = np.median if self._run.aggregator.robust else np.mean
        return cast(R, replace(cast(Any, released), below=float(middle(self._below))))

    def _count(self, valid: int, problem: str) -> None:
        """Count valid replies, and why others are missing."""
        statistics = self._run.statistics
        if self._phase.trains:
            statistics.accepted += valid
        else:
            statistics.evaluated += valid
            statistics.unevaluated = statistics.unevaluated or problem

    def _note_head(self, client: int, content: RecordDict) -> None:
        """Note the head of a client's charge; at client level it would show who takes part."""
        if self._run.plan.clients_keep_ledgers and (head := head_of(content.get(REPLY))) is not None:
            self._run.heads[client] = head

    def _replies(self, grid: Grid, timeout: float, min_replies: float) -> Iterator[Message]:
        """Replies in order of arrival; silent clients receive the request again if replies are too few.

        Partial sums of simulated clients are merged.
        """
        batch, number = self.batch, self.request.round
        messages, silent = list(batch.messages.values()), set(batch.messages)
        repeats = self._phase.trains and not self._run.plan.hides_clients
        required = math.ceil(min_replies * len(messages) - 1e-9) if repeats else 0
        for attempt in range(1, _ATTEMPTS + 1):
            for reply in send(grid, messages, timeout, self._contributions.partial):
                if isinstance(reply, PartialSums):
                    assert isinstance(self._contributions, Summed)
                    self._contributions.merge(reply.sums)
                    self._run.statistics.summed(len(reply.messages), self._run.state.layout)
                    silent -= {batch.recipient(message.metadata.message_id) for message in reply.messages}
                    continue
                if required and reply.has_error() and reply.error.code in TRANSPORT_ERRORS:
                    continue
                if (client := batch.recipient(reply.metadata.reply_to_message_id)) is not None:
                    silent.discard(client)
                yield reply
            missing = required - (len(batch.messages) - len(silent))
            if missing <= 0:
                return
            log(WARNING, "round %s, attempt %s: no reply from clients %s", number, attempt, sorted(silent))
            if attempt < _ATTEMPTS:
                self._run.registry.wait_for(grid, missing, among=silent)
                messages = batch.repeat(silent)
        raise StrategyError(
            f"round {number}: no reply from clients {sorted(silent)} after {_ATTEMPTS} attempts, with min-replies = "
            f"{min_replies:g}; completed rounds are saved: check the clients, then resume"
        )
