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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from coterie.logs import printable
from coterie.privacy import Secure
from coterie.privacy.secure_aggregation import SecureError, unmasked_sum
from coterie.privacy.secure_aggregation.integers import Integers
from coterie.rounds.batches import MessageBatch, send
from coterie.rounds.phases import Phase, SumsPhase
from coterie.rounds.run_state import Run
from coterie.wire import Request
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


class MaskedSum:
    """One masked round, and the sum that it gives.

    Args:
        run: the run.
        phase: what the round releases (:data:`coterie.wire.masked.RELEASES`), and the models for every client.
        request: to train or to evaluate, completed.
        attempt: of the round.
        cohort: clients, increasing.

    Attributes:
        missing: why there is no sum; empty if there is one.
        total: the sum over the survivors, signed.
        survivors: their number.
        unremoved: of those whose surplus of noise is in the sum.
    """

    def __init__(self, run: Run, phase: Phase[Any, Any], request: Request, attempt: int, cohort: Sequence[int]) -> None:
        self.missing = "the round was not finished"
        self.total: Integers = np.zeros(0, np.int64)
        self.survivors, self.unremoved = 0, 0
        self._run, self._phase, self._request, self._cohort = run, phase, request, cohort
        self._id: dict[str, Any] = {"run": run.name, "round": request.round, "attempt": attempt}
        plan = run.plan.of_round(request.round)
        assert isinstance(plan, Secure)
        self._plan, release = plan, phase.masked_release
        self._least = plan.threshold(request.round) if phase.trains else plan.scores(release).threshold

    def collect(self, grid: Grid, timeout: float) -> None:
        """Send the messages of each step, and read the replies to them, in any order."""
        request = self._open_request()
        if not self._enough(request.cohort, "have registered with their keys"):
            return
        round, keys = request.masked_round(self._plan), request.keys_of_clients
        ask = partial(self._step, grid, timeout)
        opened = ask(
            request,
            dict.fromkeys(request.cohort, self._content(request)),
            lambda content, client_id: read_opening(content, client_id=client_id, round=round, key=keys[client_id]),
        )
        openings = {client: opening for client, (opening, _) in opened.items()}
        self._run.registry.renew_keys({client: following for client, (_, following) in opened.items()})
        if not self._enough(openings, "opened the round"):
            return
        kind = MaskedTrainRequest if self._phase.trains else MaskedEvaluateRequest
        asked = {entry.name: getattr(self._request, entry.name) for entry in fields(self._request)} | self._id
        models, contents = pack_models(self._phase.models, self._run.state.layout), {}
        for client in openings:
            record = self._content(kind(**asked, **opened_fields(openings, client)))
            contents[client] = RecordDict({MODELS: models, **record})
        view = round.view(openings, task_digest(next(iter(contents.values()))))
        masked = ask(
            kind(**asked, **opened_fields({}, -1)),
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
        signed = ask(listed, dict.fromkeys(survivors, self._content(listed)), partial(read_signature, round=round))
        if not self._enough(signed, "signed the survivors"):
            return
        signers = tuple(sorted(signed))
        last = UnmaskRequest(**self._id, signers=signers, signatures=tuple(signed[client] for client in signers))
        shares = ask(last, dict.fromkeys(signers, self._content(last)), partial(read_shares, round=round))
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
        registry, phase = self._run.registry, self._phase
        cohort = tuple(client for client in self._cohort if client in registry.nodes and client in registry.keys)
        return OpenRequest(
            **self._id,
            release=phase.masked_release,
            plan=json.dumps(self._plan.terms()),
            parameters=self._run.state.layout.size,
            shared=phase.shared if isinstance(phase, SumsPhase) else 0,
            cohort=cohort,
            **OpenRequest.key_lists([registry.keys[client] for client in cohort]),
        )

    def _content(self, request: RoundRequest | MaskedRequest) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord({**self._run.state.config, **request.to_record()})})

    def _step(
        self,
        grid: Grid,
        timeout: float,
        request: RoundRequest | MaskedRequest,
        contents: Mapping[int, RecordDict],
        read: Callable[..., T],
    ) -> dict[int, T]:
        """Send the messages of one step; return the valid replies, by client.

        Args:
            grid: to the clients.
            timeout: seconds until messages expire.
            request: Request of the step.
            contents: Messages, by client.
            read: Reads a reply, given its content and ``client_id``.
        """
        batch = MessageBatch(self._run, request, [(content, [client]) for client, content in contents.items()])
        valid = {}
        for client, content in batch.replies(send(grid, batch.messages.values(), timeout)):
            try:
                valid[client] = parse(read, content, client_id=client)
            except ReplyError as error:
                batch.drop(client, str(error))
        return valid
