"""A masked round: what travels in its four steps (:mod:`coterie.privacy.secure_aggregation.masking`).

====================  ======================================================================================
``train.open``        the plan, the cohort U0 and the signed keys of its clients, and whether the round releases updates
                      or an evaluation -> an :class:`Opening`
``train.masked``      the content of ``train``, and the openings of U1 with the boxes for the receiver
                      (:class:`MaskedTrainRequest`) -> a masked vector of uint32, and nothing else
``evaluate.masked``   the same with the content of ``evaluate`` (:class:`MaskedEvaluateRequest`)
``train.survivors``   U2, whose vectors arrived -> a signature of this list
``train.unmask``      the signatures of at least t clients -> shares of the seeds of U2, of the keys of U1 - U2,
                      and the surplus of the client's noise
====================  ======================================================================================

All four name the run, the round and its attempt. Replies hold a ConfigRecord ``reply`` with ``client-id`` and
``round``; a masked vector is the one entry ``masked`` of an ArrayRecord ``update``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from flwr.app import ConfigRecord, RecordDict

from coterie.fields import ROUNDS, SIZE, Bounds, Fields, Length, OneOf
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM, TRAINING, ScoreSum
from coterie.privacy.secure_aggregation import MaskedRound, NoiseLayers, Opening, Shares, Surplus
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, Vector
from coterie.privacy.secure_aggregation.masking import MAX_SIZE
from coterie.wire.messages import (
    OPEN,
    REPLY,
    SURVIVORS,
    UNMASK,
    UPDATE,
    ReplyError,
    check_sender,
    pack_integers,
    read_integers,
)
from coterie.wire.requests import MAX_COHORT, MAX_ENTRY, MaskedRequest, RequestError, check_lists

#: What a masked round may release.
RELEASES = (TRAINING, ACCURACY, HISTOGRAM)
_MAX_TERMS = 20_000


class MaskedPlan(Protocol):
    """What a plan states about a masked round."""

    @property
    def corrupt(self) -> int:
        """c, the number of clients that may work with the server."""

    def threshold(self, number: int) -> int:
        """Return t of a round, the survivors below which nothing is released."""

    @property
    def layers(self) -> NoiseLayers:
        """The layers of a client's noise."""

    def vector_size(self, size: int, shared: int) -> int:
        """Return the number of entries of a vector for d parameters, of which all clusters share the first ones."""

    def scores(self, release: str) -> ScoreSum:
        """Return the sum of a private evaluation."""


@dataclass(frozen=True)
class SignedKey:
    """A client's long-term public keys, signed by the key of its node.

    Attributes:
        node: public key of the node.
        public: an X25519 key, with which others seal boxes for the client, and an Ed25519 key, by which it signs what
            it says in a round.
        signature: of the client and ``public`` by the node's key.
    """

    node: bytes
    public: bytes
    signature: bytes

    @property
    def box(self) -> bytes:
        """The X25519 key."""
        return self.public[:KEY_BYTES]

    @property
    def signing(self) -> bytes:
        """The Ed25519 key."""
        return self.public[KEY_BYTES:]

    def to_record(self) -> dict[str, bytes]:
        """Entries of an identity reply."""
        return {"node-key": self.node, "public-keys": self.public, "key-signature": self.signature}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SignedKey | None:
        """Read an identity reply; None if it has no key, or a malformed one."""
        values = [record.get(key) for key in ("node-key", "public-keys", "key-signature")]
        if not all(isinstance(value, bytes) and 0 < len(value) <= MAX_ENTRY for value in values):
            return None
        node, public, signature = values
        return cls(bytes(node or b""), bytes(public or b""), bytes(signature or b""))


@dataclass(frozen=True, kw_only=True)
class RoundRequest(Fields):
    """What the requests of a masked round have in common.

    Attributes:
        run: name of the run.
        round: its number, from 1.
        attempt: of the round.
    """

    error = RequestError
    message_type: ClassVar[str]

    run: Annotated[str, Length(64)]
    round: Annotated[int, ROUNDS]
    attempt: Annotated[int, Bounds(0, ROUNDS.high)]


@dataclass(frozen=True, kw_only=True)
class OpenRequest(RoundRequest):
    """Step 1. The last three lists are of the clients of the cohort, in their order.

    Attributes:
        release: what the round releases, :data:`RELEASES`.
        plan: terms of the run's plan, JSON.
        parameters: d, of one model.
        shared: number of leading parameters that all clusters share.
        cohort: U0, ids of the clients, increasing.
        node_keys: of their nodes.
        public_keys: their X25519 and Ed25519 keys.
        key_signatures: of the latter.
    """

    message_type: ClassVar[str] = OPEN

    release: Annotated[str, OneOf(RELEASES)]
    plan: Annotated[str, Length(_MAX_TERMS)]
    parameters: Annotated[int, Bounds(1, MAX_SIZE)]
    shared: Annotated[int, Bounds(0, MAX_SIZE)]
    cohort: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]
    node_keys: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    public_keys: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    key_signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]

    def __post_init__(self) -> None:
        check_lists(self.cohort, self.node_keys, self.public_keys, self.key_signatures)
        if self.shared > self.parameters:
            raise RequestError(f"shared is {self.shared}; a model has {self.parameters} parameters")

    @property
    def keys_of_clients(self) -> dict[int, SignedKey]:
        """The signed key of every client of the cohort."""
        rows = zip(self.cohort, self.node_keys, self.public_keys, self.key_signatures, strict=True)
        return {client: SignedKey(*row) for client, *row in rows}

    def masked_round(self, plan: MaskedPlan) -> MaskedRound:
        """Return what all parties must agree on: both halves compute it from the same request.

        The digest of the plan covers its terms, the release, the number of parameters, and the keys of all clients. So
        no mask, box or signature of a round that trains is one of a round that evaluates.

        Args:
            plan: of the terms.

        Raises:
            SecureError: the threshold is too small, or the vector too large.
        """
        about = str((self.release, self.parameters, self.shared))
        parts = [self.plan.encode(), about.encode(), *self.node_keys, *self.public_keys]
        digest = hashlib.sha256(b"".join(len(entry).to_bytes(4, "big") + entry for entry in parts)).digest()
        threshold, size = plan.threshold(self.round), plan.vector_size(self.parameters, self.shared)
        layers = plan.layers
        if self.release != TRAINING:
            scores = plan.scores(self.release)
            threshold, size, layers = scores.threshold, scores.size, scores.layers
        return MaskedRound(
            self.run.encode(), self.round, self.attempt, digest, self.cohort, threshold, plan.corrupt, size, layers
        )


def opened_fields(openings: Mapping[int, Opening], receiver: int) -> dict[str, Any]:
    """Return the fields of :class:`MaskedRequest` for one receiver that state the openings of U1."""
    clients = sorted(openings)
    of = [openings[client] for client in clients]
    return {
        "opened": tuple(clients),
        "publics": tuple(opening.public for opening in of),
        "commitments": tuple(opening.commitment for opening in of),
        "signatures": tuple(opening.signature for opening in of),
        "boxes": tuple(opening.boxes.get(receiver, b"") for opening in of),
    }


def openings_for(request: MaskedRequest, receiver: int) -> dict[int, Opening]:
    """Return the openings of U1 in a request, with the boxes for its receiver."""
    rows = zip(request.opened, request.publics, request.commitments, request.signatures, request.boxes, strict=True)
    return {
        client: Opening(public, commitment, signature, {receiver: box})
        for client, public, commitment, signature, box in rows
    }


@dataclass(frozen=True, kw_only=True)
class SurvivorsRequest(RoundRequest):
    """Step 3.

    Attributes:
        survivors: U2, ids of the clients whose vectors arrived, increasing.
    """

    message_type: ClassVar[str] = SURVIVORS

    survivors: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]

    def __post_init__(self) -> None:
        check_lists(self.survivors)


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest(RoundRequest):
    """Step 4.

    Attributes:
        signers: ids of clients that signed U2, increasing.
        signatures: theirs.
    """

    message_type: ClassVar[str] = UNMASK

    signers: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]
    signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]

    def __post_init__(self) -> None:
        check_lists(self.signers, self.signatures)

    @property
    def signed(self) -> dict[int, bytes]:
        """The signature of every signer."""
        return dict(zip(self.signers, self.signatures, strict=True))


#: Requests of a masked round that hold no models, by message type.
ROUND_REQUESTS: dict[str, type[RoundRequest]] = {
    request.message_type: request for request in (OpenRequest, SurvivorsRequest, UnmaskRequest)
}


# ---- replies ---------------------------------------------------------------------------------------------------------


def pack_opening(opening: Opening, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 1."""
    return _reply(
        client_id,
        round,
        {"public": opening.public, "commitment": opening.commitment, "signature": opening.signature},
        boxes=opening.boxes,
    )


def read_opening(content: RecordDict, *, client_id: int, round: MaskedRound) -> Opening:
    """Read a reply to step 1.

    Raises:
        ReplyError: it is of another client or round, or it lacks a box for a neighbour.
    """
    record = _record(content, client_id, round.number)
    boxes = _by_client("boxes", record)
    if boxes.keys() != set(round.holders(client_id)) - {client_id}:
        raise ReplyError("the boxes are not for the neighbours of the client in the cohort")
    return Opening(_bytes("public", record), _bytes("commitment", record), _bytes("signature", record), boxes)


def pack_masked(vector: Vector, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 2."""
    return RecordDict({UPDATE: pack_integers(vector), **_reply(client_id, round, {})})


def read_masked(content: RecordDict, *, client_id: int, round: MaskedRound) -> Vector:
    """Read a reply to step 2.

    Raises:
        ReplyError: it is of another client or round, or the vector has another shape or type.
    """
    return read_integers(content, client_id=client_id, round=round.number, size=round.size)


def pack_signature(signature: bytes, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 3."""
    return _reply(client_id, round, {"signature": signature})


def read_signature(content: RecordDict, *, client_id: int, round: MaskedRound) -> bytes:
    """Read a reply to step 3, which the clients verify.

    Raises:
        ReplyError: it is of another client or round, or has no signature.
    """
    return _bytes("signature", _record(content, client_id, round.number))


def pack_shares(shares: Shares, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 4."""
    surplus = {"surplus": shares.surplus.key, "surplus-digest": shares.surplus.digest}
    return _reply(client_id, round, surplus, seeds=shares.seeds, keys=shares.keys)


def read_shares(content: RecordDict, *, client_id: int, round: MaskedRound) -> Shares:
    """Read a reply to step 4; wrong shares, or a wrong surplus, are noticed when they are used.

    Raises:
        ReplyError: it is of another client or round, malformed, or of clients outside the cohort.
    """
    record = _record(content, client_id, round.number)
    seeds, keys = (_by_client(name, record) for name in ("seeds", "keys"))
    if not seeds.keys() | keys.keys() <= set(round.cohort):
        raise ReplyError("the shares are of clients outside the cohort")
    surplus = [record.get(name) for name in ("surplus", "surplus-digest")]
    if not all(isinstance(entry, bytes) and len(entry) in (0, KEY_BYTES) for entry in surplus):
        raise ReplyError(f"surplus and surplus-digest must have {KEY_BYTES} bytes, or none")
    return Shares(seeds, keys, Surplus(*surplus))  # type: ignore[arg-type]


def _reply(client_id: int, number: int, values: Mapping[str, bytes], **lists: Mapping[int, bytes]) -> RecordDict:
    record = ConfigRecord({"client-id": client_id, "round": number, **values})
    for name, by_client in lists.items():
        record[f"{name}-of"] = sorted(by_client)
        record[name] = [by_client[client] for client in sorted(by_client)]
    return RecordDict({REPLY: record})


def _record(content: RecordDict, client_id: int, number: int) -> ConfigRecord:
    check_sender(content, client_id, number)
    return content.config_records[REPLY]


def _bytes(key: str, record: ConfigRecord) -> bytes:
    value = record.get(key)
    if not isinstance(value, bytes) or not 0 < len(value) <= MAX_ENTRY:
        raise ReplyError(f"{key} must have from 1 to {MAX_ENTRY} bytes")
    return value


def _by_client(name: str, record: ConfigRecord) -> dict[int, bytes]:
    """Read a list of bytes and the list of its clients."""
    clients, entries = record.get(f"{name}-of"), record.get(name)
    if not isinstance(clients, list) or not isinstance(entries, list) or not len(clients) == len(entries) <= MAX_COHORT:
        raise ReplyError(f"{name} must be a list with one entry for every client of {name}-of")
    good = all(type(client) is int for client in clients) and len(set(clients)) == len(clients)
    if not good or not all(isinstance(entry, bytes) and len(entry) <= MAX_ENTRY for entry in entries):
        raise ReplyError(f"an entry of {name} is malformed")
    return dict(zip(clients, entries, strict=True))  # type: ignore[arg-type]
