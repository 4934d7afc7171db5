"""Exchanges whose vectors the server sees as one sum: the server's half of a masked round (secure/masking.py).

     1  open        every client of the cohort whose keys are known opens the round: U1
     2  train       U1 train, or evaluate, and reply with masked vectors: U2
     3  survivors   U2 sign the list of U2
     4  unmask      U2 receive the signatures, and reply with shares, from which the masks of the sum follow, and with
                    the surplus of their noise

The round is charged before step 1. If fewer than the threshold answer a step, nothing is released.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from coterie.logs import printable
from coterie.privacy import NothingReleasedError, Permit, ReleasedSums, Secure
from coterie.privacy.integer_sums import IntegerSums
from coterie.privacy.mechanisms.score_sums import TRAINING
from coterie.privacy.secure_aggregation import Opening, SecureError, unmasked_sum
from coterie.privacy.secure_aggregation.integers import Integers
from coterie.rounds.exchange import Exchange, MessageBatch
from coterie.rounds.phases import Phase, SumsPhase
from coterie.rounds.run_state import Run, StrategyError
from coterie.wire import EvaluateRequest, TrainRequest
from coterie.wire.masked import (
    OpenRequest,
    RoundRequest,
    SurvivorsRequest,
    UnmaskRequest,
    opened_fields,
    read_masked,
    read_opening,
    read_shares,
    read_signature,
    task_digest,
)
from coterie.wire.messages import CONFIG, MODELS, ReplyError, pack_models, parse
from coterie.wire.requests import MaskedEvaluateRequest, MaskedRequest, MaskedTrainRequest

T = TypeVar("T")
#: Yields the messages of a step, receives the replies to them.
MaskedSteps: TypeAlias = Generator[list[Message], Iterable[Message], None]


class _StepBatch(MessageBatch):
    """The messages of one step."""

    def __init__(self, run: Run, request: RoundRequest | MaskedRequest, contents: Mapping[int, RecordDict]):
        self._run, self.request = run, request
        self._clients = {}
        self.messages = {client: self._message(client, content) for client, content in contents.items()}
        for content in contents.values():
            run.statistics.sent(content)


@dataclass
class MaskedSum:
    """One masked round, and the sum that it gives.

    Attributes:
        run: the run.
        request: to train or to evaluate, completed.
        release: what the round releases (:data:`coterie.wire.masked.RELEASES`).
        attempt: of the round.
        cohort: clients, increasing.
        models: Models that every client receives.
        shared: number of leading parameters that all clusters share.
        missing: why there is no sum; empty if there is one.
        total: the sum over the survivors, signed.
        survivors: their number.
        unremoved: of those whose surplus of noise is in the sum.
    """

    run: Run
    request: TrainRequest | EvaluateRequest
    release: str
    attempt: int
    cohort: Sequence[int]
    models: ArrayRecord
    shared: int = 0
    missing: str = field(default="the round was not finished", init=False)
    total: Integers = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    survivors: int = field(default=0, init=False)
    unremoved: int = field(default=0, init=False)

    @cached_property
    def plan(self) -> Secure:
        """The plan of the round."""
        plan = self.run.plan.of_round(self.request.round)
        assert isinstance(plan, Secure)
        return plan

    @property
    def _id(self) -> dict[str, Any]:
        return {"run": self.run.name, "round": self.request.round, "attempt": self.attempt}

    @property
    def _least(self) -> int:
        if self.release == TRAINING:
            return self.plan.threshold(self.request.round)
        return self.plan.scores(self.release).threshold

    def steps(self) -> MaskedSteps:
        """Yield the messages of each step, and receive the replies to them, in any order."""
        request = self._open_request()
        if not self._enough(request.cohort, "have registered with their keys"):
            return
        round = request.masked_round(self.plan)
        asked = dict.fromkeys(request.cohort, self._content(request))
        keys = request.keys_of_clients
        opened = yield from self._step(
            request,
            asked,
            lambda content, client_id: read_opening(content, client_id=client_id, round=round, key=keys[client_id]),
        )
        openings = {client: opening for client, (opening, _) in opened.items()}
        self.run.registry.renew_keys({client: following for client, (_, following) in opened.items()})
        if not self._enough(openings, "opened the round"):
            return
        contents = {client: self._content_of_vector(client, openings) for client in openings}
        view = round.view(openings, task_digest(next(iter(contents.values()))))
        masked = yield from self._step(
            self._request_of_vector({}, -1),
            contents,
            lambda content, client_id: read_masked(
                content, client_id=client_id, round=round, key=keys[client_id], view=view
            ),
        )
        vectors = {client: vector for client, (vector, _) in masked.items()}
        self.survivors = len(vectors)
        if not self._enough(vectors, "sent a vector"):
            return
        survivors = tuple(sorted(vectors))
        views = tuple(masked[client][1] for client in survivors)
        listed = SurvivorsRequest(**self._id, survivors=survivors, view_signatures=views)
        signed = yield from self._step(
            listed, dict.fromkeys(survivors, self._content(listed)), partial(read_signature, round=round)
        )
        if not self._enough(signed, "signed the survivors"):
            return
        signers = tuple(sorted(signed))
        last = UnmaskRequest(**self._id, signers=signers, signatures=tuple(signed[client] for client in signers))
        shares = yield from self._step(
            last, dict.fromkeys(signers, self._content(last)), partial(read_shares, round=round)
        )
        if not self._enough(shares, "sent shares"):
            return
        try:
            total, self.unremoved = unmasked_sum(round, openings, vectors, shares)
        except SecureError as error:
            self.missing = printable(error)
            return
        self.total = total.view(np.int32).astype(np.int64)
        self.missing = ""

    def _enough(self, clients: Iterable[int], did: str) -> bool:
        many = len(list(clients))
        short = f"{many} clients {did}, of the {self._least} that mechanism secure requires"
        self.missing = "the round was not finished" if many >= self._least else short
        return many >= self._least

    def _open_request(self) -> OpenRequest:
        registry = self.run.registry
        cohort = tuple(client for client in self.cohort if client in registry.nodes and client in registry.keys)
        keys = [registry.keys[client] for client in cohort]
        return OpenRequest(
            **self._id,
            release=self.release,
            plan=json.dumps(self.plan.terms()),
            parameters=self.run.state.layout.size,
            shared=self.shared,
            cohort=cohort,
            **OpenRequest.key_lists(keys),
        )

    def _content(self, request: RoundRequest) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord({**self.run.state.config, **request.to_record()})})

    def _request_of_vector(self, openings: Mapping[int, Opening], receiver: int) -> MaskedRequest:
        asked = {entry.name: getattr(self.request, entry.name) for entry in fields(self.request)}
        masked = MaskedTrainRequest if self.release == TRAINING else MaskedEvaluateRequest
        opened = opened_fields(openings, receiver)
        return masked(**asked, run=self.run.name, attempt=self.attempt, **opened)

    def _content_of_vector(self, client: int, openings: Mapping[int, Opening]) -> RecordDict:
        record = self._request_of_vector(openings, client).to_record()
        return RecordDict({MODELS: self.models, CONFIG: ConfigRecord({**self.run.state.config, **record})})

    def _step(
        self, request: RoundRequest | MaskedRequest, contents: Mapping[int, RecordDict], read: Callable[..., T]
    ) -> Generator[list[Message], Iterable[Message], dict[int, T]]:
        """Send the messages of one step; return the valid replies, by client.

        Args:
            request: Request of the step.
            contents: Messages, by client.
            read: Reads a reply, given its content and ``client_id``.
        """
        batch, valid = _StepBatch(self.run, request, contents), {}
        replies = yield list(batch.messages.values())
        for client, content in batch.replies(replies):
            try:
                valid[client] = parse(read, content, client_id=client)
            except ReplyError as error:
                batch.drop(client, str(error))
        return valid


class MaskedExchange(Exchange[IntegerSums, ReleasedSums]):
    """One phase with one cohort, in four steps; see :class:`Exchange`.

    Raises:
        StrategyError: the method assigns clusters, which the server must not know.
    """

    def __init__(self, run: Run, phase: SumsPhase, number: int) -> None:
        if phase.assignments is not None:
            raise StrategyError("mechanism secure hides labels from the server, and this method assigns them")
        super().__init__(run, cast(Phase[IntegerSums, ReleasedSums], phase), number)
        assert isinstance(self.request, TrainRequest)
        cohort = self.cohort.tolist()
        models = pack_models(phase.models, run.state.layout)
        self._sum = MaskedSum(run, self.request, TRAINING, self._attempt, cohort, models, phase.shared)

    def _charged_before_sending(self) -> Permit:
        return self._charged()

    def steps(self) -> MaskedSteps:
        """See :meth:`MaskedSum.steps`."""
        yield from self._sum.steps()
        self._run.statistics.accepted += self._sum.survivors
        if not self._sum.missing:
            self._contributions.add_vectors(self._sum.total, self._sum.survivors, self._sum.unremoved)

    def release(self) -> ReleasedSums:
        """Release the sum; see :meth:`Exchange.release`.

        Raises:
            NothingReleasedError: the sum is not known, because too few clients answered a step, or it is impossible.
        """
        if self._sum.missing:
            assert self._permit is not None
            self._permit.use()
            raise NothingReleasedError(self._sum.missing)
        return super().release()
