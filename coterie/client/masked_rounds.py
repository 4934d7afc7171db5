"""A client's half of a masked round: it checks what the server asks for, adds its noise, and masks its vector.

The server is not trusted. The client computes noise, threshold and sensitivity from the plan's terms itself, takes the
cohort from the plan and keys from its roster, and charges its ledger before a vector leaves. Its reply is the same for
any data but for masked integers: no label, no norm, no accuracy, no error. A round trains, or it evaluates: what it
releases is stated in step 1, and part of every mask and signature.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from logging import ERROR, INFO
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, RecordDict
from flwr.common.logger import log
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from coterie.client.budget import events_of_run, number_of_charge, spend, who_asked
from coterie.client.cohort import Cohort
from coterie.client.handlers import train_without_dp
from coterie.client.identity import Client
from coterie.client.local_evaluation import reports
from coterie.client.masking_keys import MaskingKeys, check_keys
from coterie.client.round_state import Answer, RoundId, RoundState
from coterie.client.state import ClientError
from coterie.fields import EPSILON
from coterie.privacy import Event, PrivacyError, Secure, Streams
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM, TRAINING
from coterie.privacy.secure_aggregation import MaskedRound, MaskingClient, SecureError, to_modulus
from coterie.privacy.secure_aggregation.integers import Integers
from coterie.privacy.secure_aggregation.keys import Vector
from coterie.wire import RequestError, digest
from coterie.wire.masked import (
    ROUND_REQUESTS,
    OpenRequest,
    RoundRequest,
    SurvivorsRequest,
    UnmaskRequest,
    openings_for,
    pack_masked,
    pack_opening,
    pack_shares,
    pack_signature,
    task_digest,
)
from coterie.wire.messages import CONFIG, MASKED_STEPS, SCORE_COUNTS
from coterie.wire.requests import MaskedEvaluateRequest, MaskedRequest, MaskedTrainRequest

_MOST_CLIENTS = 1_000_000
# What the plan has of a client, by release.
_CHARGED = {TRAINING: "contributions", ACCURACY: "private evaluations", HISTOGRAM: "histograms of scores"}
_TYPES_OF_TERMS = get_type_hints(Secure)


def answers(message_type: str, content: RecordDict, clients: Sequence[Client]) -> list[RecordDict | ClientError]:
    """Return the replies of simulated clients to a message of a masked round."""
    replies: list[RecordDict | ClientError] = []
    for client in clients:
        first = MASKED_STEPS[message_type] == 1
        request = Cohort.of(message_type, content, [client]) if first else read_round_request(message_type, content)
        try:
            replies.append(answer(message_type, content, client, request))
        except ClientError as refusal:
            replies.append(refusal)
    return replies


def read_round_request(message_type: str, content: RecordDict) -> RoundRequest:
    """Read a request of a masked round that has no models.

    Raises:
        RequestError: a field is missing, has another type, or is out of bounds.
    """
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        raise RequestError(f"a request needs a ConfigRecord {CONFIG!r}")
    return ROUND_REQUESTS[message_type].from_record(config)


def answer(message_type: str, content: RecordDict, client: Client, parsed: Cohort | RoundRequest) -> RecordDict:
    """Return the reply of one client to a message of a masked round: the earlier one to an equal message.

    Args:
        message_type: one of :data:`~coterie.wire.messages.MASKED_STEPS`.
        content: the message.
        client: with its keys.
        parsed: the message; a cohort of this client alone if it is to train or to evaluate.

    Raises:
        ClientError: the client refuses it.
    """
    cohort = parsed if isinstance(parsed, Cohort) else None
    request = parsed.request if isinstance(parsed, Cohort) else parsed
    assert isinstance(request, RoundRequest | MaskedRequest)
    folder = content.config_records[CONFIG].get("clients-dir") if client.folder is None else client.folder
    if not isinstance(folder, str) or not folder:
        raise ClientError("masked updates require a state folder; set state-dir in the node configuration")
    step, asked = MASKED_STEPS[message_type], digest(message_type, content)
    state = RoundState(Path(folder), client.client_id, sync=client.deployed)
    with state.lock():
        half = _Half(client, Path(folder), state, RoundId(request.run, request.round, request.attempt))
        if step < len(made := state.answers(half.id)):
            if made[step].digest != asked:
                half.refuse(f"it has answered another message for step {step + 1} of this round")
            log(INFO, "client %s repeats its answer to a repeated request", client.client_id)
            return recorddict_from_proto(ProtoRecordDict.FromString(made[step].reply))
        if step and (state.open is None or state.open.id != half.id or len(made) != step):
            half.refuse(f"step {step + 1} is not the next one of a round that it has opened")
        try:
            return half.answer(request, content, cohort, asked)
        except SecureError as error:
            half.refuse(str(error))


@dataclass
class _Half:
    """A client, with its keys, in the round of one message; its state is read, and locked."""

    client: Client
    folder: Path
    state: RoundState
    id: RoundId

    def refuse(self, reason: str) -> NoReturn:
        """Raise a ClientError; its text follows from what the server knows."""
        raise ClientError(f"client {self.client.client_id} rejects the request: {reason}")

    @property
    def keys(self) -> MaskingKeys:
        """The keys of the client."""
        if self.client.keys is None:
            self.refuse("masked updates require a roster, keys that its node has signed, and a state folder")
        return self.client.keys

    def answer(
        self, request: RoundRequest | MaskedRequest, content: RecordDict, cohort: Cohort | None, asked: str
    ) -> RecordDict:
        """Return a new answer, which is on disk."""
        who: dict[str, Any] = {"client_id": self.client.client_id, "round": self.id.number}
        if isinstance(request, OpenRequest):
            return self._open(request, asked)
        assert self.state.open is not None
        masking = self._masking(self.opened)
        masking.restore(self.state.open.secrets)
        if isinstance(request, MaskedRequest):
            assert cohort is not None
            reply = pack_masked(*self._masked(masking, request, cohort, task_digest(content)), **who)
            self._keep(masking, asked, reply)
            self.keys.boxes.forget(masking.box_keys[self.client.client_id])
            return reply
        if isinstance(request, SurvivorsRequest):
            signature = masking.sign_survivors(request.survivors, request.views)
            return self._keep(masking, asked, pack_signature(signature, **who))
        assert isinstance(request, UnmaskRequest)
        reply = pack_shares(masking.unmask(request.signed), **who)
        self.state.finish(Answer(asked, _serialised(reply)))
        return reply

    def _keep(self, masking: MaskingClient, asked: str, reply: RecordDict) -> RecordDict:
        self.state.go_on(masking.to_bytes(), Answer(asked, _serialised(reply)))
        return reply

    def _open(self, request: OpenRequest, asked: str) -> RecordDict:
        is_open = self.state.open
        if self.state.is_over(self.id) or (is_open and is_open.id.run == self.id.run and is_open.id >= self.id):
            self.refuse("this round, or a later one of its run, was opened before")
        number, signed = self.client.client_id, request.keys_of_clients
        masking = self._masking(request)
        check_keys(self.keys, signed)
        opening = masking.open(self.keys.boxes.use(signed[number].box))
        reply = pack_opening(opening, self.keys.signed, client_id=number, round=self.id.number)
        stored = _serialised(RecordDict({CONFIG: ConfigRecord(request.to_record())}))
        self.state.begin(self.id, stored, masking.to_bytes(), Answer(asked, _serialised(reply)))
        return reply

    @cached_property
    def opened(self) -> OpenRequest:
        """The request by which the round was opened."""
        assert self.state.open is not None
        content = recorddict_from_proto(ProtoRecordDict.FromString(self.state.open.request))
        return OpenRequest.from_record(content.config_records[CONFIG])

    def _masking(self, request: OpenRequest) -> MaskingClient:
        round = self._accepted(request, read_plan(request.plan))
        signed = request.keys_of_clients

        def verify(client: int, content: bytes, signature: bytes) -> bool:
            return signed[client].has_signed(content, signature)

        boxes = {client: key.box for client, key in signed.items()}
        return MaskingClient(round, self.client.client_id, boxes, self.keys.sign, verify)

    def _accepted(self, request: OpenRequest, plan: Secure) -> MaskedRound:
        """Return what all parties must agree on, if it protects this client.

        Raises:
            ClientError, SecureError: it does not.
        """
        cohort, least = request.cohort, self.client.min_cohort
        if not 1 <= request.round <= plan.rounds:
            self.refuse(f"round {request.round} is none of the plan's {plan.rounds}")
        if request.release != TRAINING and not plan.planned_of_client[plan.scores(request.release).event]:
            self.refuse(f"the plan has no {_CHARGED[request.release]}")
        members = plan.members(request.round).tolist() if request.release == TRAINING else range(plan.clients)
        if not set(cohort) <= set(members):
            self.refuse(f"the cohort is not of the clients of round {request.round} of the plan")
        if self.client.client_id not in cohort:
            self.refuse("the cohort lacks this client")
        if len(cohort) < least:
            self.refuse(f"a cohort of {len(cohort)} clients is smaller than min-cohort = {least}")
        if plan.corrupt < (corrupt := self.client.min_corrupt):
            self.refuse(f"noise for corrupt = {plan.corrupt} clients is less than min-corrupt = {corrupt} demands")
        round = request.masked_round(plan)
        if 3 * round.threshold < 2 * len(cohort):
            self.refuse(f"a threshold of {round.threshold} is less than two thirds of {len(cohort)} clients")
        total = _event(plan, request.release).noise_multiplier * STEPS
        if not round.layers.suffice(total, len(cohort), round.threshold, round.corrupt):
            self.refuse("the noise of one client is too small")
        return round

    def _masked(
        self, masking: MaskingClient, request: MaskedRequest, cohort: Cohort, task: bytes
    ) -> tuple[Vector, bytes]:
        """Return the masked vector and the signed view; all is checked before the charge, nothing fails after it."""
        opened, plan = self.opened, read_plan(self.opened.plan)
        models, release = len(cohort.models), TRAINING
        if isinstance(request, MaskedEvaluateRequest):
            release = HISTOGRAM if request.histogram else ACCURACY
        if release != opened.release:
            self.refuse(f"the round was opened for {opened.release}, not for {release}")
        if cohort.layout.size != opened.parameters:
            self.refuse(f"a model has {cohort.layout.size} parameters, not {opened.parameters} as in step 1")
        if (models != 1 if request.cluster is not None else models > plan.num_clusters) or (
            (request.cluster or 0) >= plan.num_clusters
        ):
            self.refuse(f"the plan is for {plan.num_clusters} clusters")
        if isinstance(request, MaskedTrainRequest) and request.redraw is not None and len(request.redraw) != models**2:
            self.refuse(f"redraw has {len(request.redraw)} entries for {models} models")
        _ = cohort.layers  # a network that cannot be built, or has other parameters, fails before the charge
        view_signature = masking.receive(openings_for(request, self.client.client_id), task)
        self._charge(plan, cohort)
        seed = None if self.client.deployed else cohort.config.seed
        vector = self._contribution(plan, cohort) if release == TRAINING else self._scores(plan, cohort)
        vector += masking.noise(Streams(seed).stream("secure", self.id.number, self.client.client_id, self.id.attempt))
        return masking.masked(to_modulus(vector)), view_signature

    def _charge(self, plan: Secure, cohort: Cohort) -> None:
        """Charge one contribution, or evaluation, before data are read; once for an opening, whose vector may be lost.

        Raises:
            ClientError: the plan has no further one for this client, or its budget does not allow it.
        """
        if number_of_charge(self.client, self.folder, plan, self._opening) is not None:
            log(INFO, "client %s: the charge before a crash counts for this vector", self.client.client_id)
            return
        run, release, planned = self.client.run or self.id.run, self.opened.release, plan.planned_of_client
        event, made = _event(plan, release), events_of_run(self.client, self.folder, run)
        if made[event] >= planned[event] or made.total() >= planned.total():
            self.refuse(f"the plan has {planned[event]} {_CHARGED[release]} of a client, and all were made")
        details: dict[str, Any] = {
            "run": run,
            "masked": list(self.id),
            "for": release,
            **self._opening,
            **who_asked(self.client, cohort.config.strategy),
        }
        spend(self.client, self.folder, plan, self.id.number, Counter({event: 1}), planned=planned, **details)

    @property
    def _opening(self) -> dict[str, str]:
        """The entry of a charge that says for which opening it is, by secrets of this client: no server repeats it."""
        assert self.state.open is not None
        return {"opening": hashlib.sha256(self.state.open.answers[0].reply).hexdigest()}

    def _contribution(self, plan: Secure, cohort: Cohort) -> Integers:
        """Return the client's vector without noise: no update, and label 0, if training fails or diverges.

        An error would reveal something about the data.
        """
        label = redrawn = 0
        update: npt.NDArray[Any] = np.zeros(cohort.layout.size, np.float32)
        try:
            labels, redrawn_labels, updates = train_without_dp(cohort)
            if np.isfinite(updates[0]).all():
                label, redrawn, update = int(labels[0]), int(redrawn_labels[0]), updates[0]
        except Exception as error:
            self._note("training failed, and it contributes zeros", error)
        vector: Integers = plan.of_round(self.id.number).encode(update, label, redrawn, self.opened.shared)
        return vector

    def _note(self, failure: str, error: Exception) -> None:
        log(ERROR, "client %s: %s: %s", self.client.client_id, failure, error)

    def _scores(self, plan: Secure, cohort: Cohort) -> Integers:
        """Return the client's vector of an evaluation without noise: what stands for no accuracy if that fails."""
        value: Any = math.nan
        try:
            value = reports(cohort)[0].get(SCORE_COUNTS if self.opened.release == HISTOGRAM else "accuracy", math.nan)
        except Exception as error:
            self._note("the evaluation failed, and it adds noise alone", error)
        return plan.scores(self.opened.release).encode(value)


def _event(plan: Secure, release: str) -> Event:
    """Return what a client charges for a release."""
    return plan.event() if release == TRAINING else plan.scores(release).event


def read_plan(text: str) -> Secure:
    """Return the plan of a masked round that another machine describes: all terms but those that have a default.

    Raises:
        ClientError: a term is missing, unknown, of another type or out of range.
    """
    try:
        terms = json.loads(text)
        of_class = {field.name: field for field in fields(Secure)}
        needed = {name for name, field in of_class.items() if field.default is MISSING}
        if terms.pop("mechanism", None) != Secure.mechanism or not needed <= terms.keys() <= of_class.keys():
            raise PrivacyError(f"its terms are not those of mechanism {Secure.mechanism}")
        plan = Secure(**{name: _term(value, _TYPES_OF_TERMS[name]) for name, value in terms.items()})
        if plan.epsilon not in EPSILON or not plan.clients <= _MOST_CLIENTS:
            raise PrivacyError(f"epsilon must be in {EPSILON}, and clients at most {_MOST_CLIENTS:,}")
        return plan
    except PrivacyError as error:
        raise ClientError(f"the plan is refused: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise ClientError("the plan is refused: its terms are malformed") from None


def _term(value: Any, hint: Any) -> Any:
    """Return a term; None is infinity."""
    types = get_args(hint) or (hint,)
    if value is None and float in types:
        return math.inf
    if type(value) not in ((*types, int) if float in types else types):
        raise TypeError
    return value


def _serialised(content: RecordDict) -> bytes:
    serialise: Callable[[], bytes] = recorddict_to_proto(content).SerializeToString
    return serialise()
