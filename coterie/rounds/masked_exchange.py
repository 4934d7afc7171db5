"""An exchange whose vectors the server sees as one sum: the server's half of a masked round (secure/masking.py).

     1  open        every client of the cohort whose keys are known opens the round: U1
     2  train       U1 train, and reply with masked vectors: U2
     3  survivors   U2 sign the list of U2
     4  unmask      U2 receive the signatures, and reply with shares, from which the masks of the sum follow

The round is charged before step 1. If fewer than the threshold answer a step, nothing is released.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.logs import printable
from coterie.privacy import NothingReleasedError, Permit, ReleasedSums, Secure
from coterie.privacy.integer_sums import IntegerSums
from coterie.rounds.exchange import Exchange, MessageBatch
from coterie.rounds.phases import Phase, SumsPhase
from coterie.rounds.run_state import Run, StrategyError
from coterie.secure import MaskedRound, Opening, SecureError, unmasked_sum
from coterie.wire import TrainRequest
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
)
from coterie.wire.messages import CONFIG, MODELS, ReplyError, parse
from coterie.wire.requests import MaskedTrainRequest

T = TypeVar("T")
#: Yields the messages of a step, receives the replies to them.
MaskedSteps: TypeAlias = Generator[list[Message], Iterable[Message], None]


class _StepBatch(MessageBatch):
    """The messages of one step."""

    def __init__(self, run: Run, request: RoundRequest | MaskedTrainRequest, contents: Mapping[int, RecordDict]):
        self._run, self.request = run, request
        self._clients = {}
        self.messages = {client: self._message(client, content) for client, content in contents.items()}
        for content in contents.values():
            run.statistics.sent(content)


class MaskedExchange(Exchange[IntegerSums, ReleasedSums]):
    """One phase with one cohort, in four steps; see :class:`Exchange`.

    Raises:
        StrategyError: the method assigns clusters, which the server must not know.
    """

    def __init__(self, run: Run, phase: SumsPhase, number: int) -> None:
        if phase.assignments is not None:
            raise StrategyError("mechanism secure hides labels from the server, and this method assigns them")
        super().__init__(run, cast(Phase[IntegerSums, ReleasedSums], phase), number)
        self._shared = phase.shared
        plan = run.plan.of_round(number)
        assert isinstance(plan, Secure)
        self._plan = plan
        self._missing = "the round was not finished"

    def _charged_before_sending(self) -> Permit:
        return self._charged()

    @property
    def _id(self) -> dict[str, Any]:
        return {"run": self._run.name, "round": self.request.round, "attempt": self._attempt}

    def steps(self) -> MaskedSteps:
        """Yield the messages of each step, and receive the replies to them, in any order."""
        request = self._open_request()
        least = self._plan.threshold(request.round)
        if not self._enough(request.cohort, least, "have registered with their keys"):
            return
        round = request.masked_round(self._plan)
        asked = dict.fromkeys(request.cohort, self._content(request))
        openings = yield from self._step(request, asked, read_opening, round)
        if not self._enough(openings, least, "opened the round"):
            return
        trained = {client: self._train_content(client, openings) for client in openings}
        vectors = yield from self._step(self._train_request({}, -1), trained, read_masked, round)
        self._run.statistics.accepted += len(vectors)
        if not self._enough(vectors, least, "sent a vector"):
            return
        survivors = tuple(sorted(vectors))
        listed = SurvivorsRequest(**self._id, survivors=survivors)
        signed = yield from self._step(listed, dict.fromkeys(survivors, self._content(listed)), read_signature, round)
        if not self._enough(signed, least, "signed the survivors"):
            return
        signers = tuple(sorted(signed))
        last = UnmaskRequest(**self._id, signers=signers, signatures=tuple(signed[client] for client in signers))
        shares = yield from self._step(last, dict.fromkeys(signers, self._content(last)), read_shares, round)
        if not self._enough(shares, least, "sent shares"):
            return
        try:
            total = unmasked_sum(round, openings, vectors, shares)
        except SecureError as error:
            self._missing = printable(error)
            return
        self._contributions.add_vectors(total.view(np.int32).astype(np.int64), len(vectors))
        self._missing = ""

    def release(self) -> ReleasedSums:
        """Release the sum; see :meth:`Exchange.release`.

        Raises:
            NothingReleasedError: the sum is not known, because too few clients answered a step, or it is impossible.
        """
        if self._missing:
            assert self._permit is not None
            self._permit.use()
            raise NothingReleasedError(self._missing)
        return super().release()

    def _enough(self, clients: Iterable[int], least: int, did: str) -> bool:
        many = len(list(clients))
        self._missing = "" if many >= least else f"{many} clients {did}, of the {least} that mechanism secure requires"
        return many >= least

    def _open_request(self) -> OpenRequest:
        registry = self._run.registry
        cohort = tuple(c for c in self.cohort.tolist() if c in registry.nodes and c in registry.keys)
        keys = [registry.keys[client] for client in cohort]
        return OpenRequest(
            **self._id,
            plan=json.dumps(self._plan.terms()),
            parameters=self._run.state.layout.size,
            shared=self._shared,
            cohort=cohort,
            node_keys=tuple(key.node for key in keys),
            public_keys=tuple(key.public for key in keys),
            key_signatures=tuple(key.signature for key in keys),
        )

    def _content(self, request: RoundRequest) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord({**self._run.state.config, **request.to_record()})})

    def _train_request(self, openings: Mapping[int, Opening], receiver: int) -> MaskedTrainRequest:
        assert isinstance(self.request, TrainRequest)
        asked = {entry.name: getattr(self.request, entry.name) for entry in fields(self.request)}
        opened = opened_fields(openings, receiver)
        return MaskedTrainRequest(**asked, run=self._run.name, attempt=self._attempt, **opened)

    def _train_content(self, client: int, openings: Mapping[int, Opening]) -> RecordDict:
        record = self._train_request(openings, client).to_record()
        models = self.batch.messages[client].content[MODELS]
        return RecordDict({MODELS: models, CONFIG: ConfigRecord({**self._run.state.config, **record})})

    def _step(
        self,
        request: RoundRequest | MaskedTrainRequest,
        contents: Mapping[int, RecordDict],
        read: Callable[..., T],
        round: MaskedRound,
    ) -> Generator[list[Message], Iterable[Message], dict[int, T]]:
        """Send the messages of one step; return the valid replies, by client."""
        batch, valid = _StepBatch(self._run, request, contents), {}
        replies = yield list(batch.messages.values())
        for client, content in batch.replies(replies):
            try:
                valid[client] = parse(read, content, client_id=client, round=round)
            except ReplyError as error:
                batch.drop(client, str(error))
        return valid
