"""A masked round: what travels in its four steps (:mod:`coterie.privacy.secure_aggregation.masking`).

====================  ======================================================================================
``train.open``        the plan, the cohort U0 and the signed keys of its clients, and whether the round releases updates
                      or an evaluation -> an :class:`Opening`, and the client's box key for a later round
``train.masked``      the content of ``train``, and the openings of U1 with the boxes for the receiver
                      (:class:`MaskedTrainRequest`) -> a masked vector of uint32, and a signature of the client's view
``evaluate.masked``   the same with the content of ``evaluate`` (:class:`MaskedEvaluateRequest`)
``train.survivors``   U2, whose vectors arrived, and the signatures of their views -> a signature of this list
``train.unmask``      the signatures of at least t clients -> shares of the seeds of U2, of the keys of U1 - U2,
                      and the surplus of the client's noise
====================  ======================================================================================

All four name the run, the round and its attempt. Replies hold a ConfigRecord ``reply`` with ``client-id`` and
``round``; a masked vector is the one entry ``masked`` of an ArrayRecord ``update``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Protocol

from flwr.app import ConfigRecord, RecordDict

from coterie.fields import MAX_COHORT, ROUNDS, SIZE, Bounds, Fields, Length, OneOf
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM, TRAINING, ScoreSum
from coterie.privacy.secure_aggregation import MaskedRound, NoiseLayers, Opening, Shares, Surplus
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, Vector, digest_of, is_signed
from coterie.privacy.secure_aggregation.masking import MAX_SIZE
from coterie.wire.messages import (
    CONFIG,
    MODELS,
    OPEN,
    PLACES_OF_CLIENTS,
    REPLY,
    SURVIVORS,
    UNMASK,
    UPDATE,
    ReplyError,
    check_sender,
    pack_integers,
    read_integers,
)
from coterie.wire.requests import MAX_ENTRY, MaskedRequest, RequestError, check_lists

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
    """Public keys of a client, which other clients verify.

    Attributes:
        node: Public key of the node, DER.
        signing: Ed25519 key with which the client signs in masked rounds.
        signature: Signature of the client and ``signing`` by the key of the node.
        box: X25519 key with which others seal boxes for the client in one round.
        box_signature: Signature of the client and ``box`` by ``signing``.
    """

    node: bytes
    signing: bytes
    signature: bytes
    box: bytes
    box_signature: bytes

    def has_signed(self, content: bytes, signature: bytes) -> bool:
        """Return whether a signature of this content in a masked round is by the client."""
        return _is_signed(self.signing, PURPOSE + content, signature)

    def has_signed_box(self, client: int) -> bool:
        """Return whether the client has signed its box key."""
        return self.has_signed(box_content(client, self.box), self.box_signature)

    def to_record(self) -> dict[str, bytes]:
        """Return the entries of an identity reply."""
        return {key: getattr(self, name) for name, key in _KEYS.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SignedKey | None:
        """Read an identity reply; None if an entry is missing or malformed."""
        values = [record.get(key) for key in _KEYS.values()]
        if not all(isinstance(value, bytes) and 0 < len(value) <= MAX_ENTRY for value in values):
            return None
        return cls(*(bytes(value or b"") for value in values))


#: Prefix of the bytes that a client signs in masked rounds. A signature made for another purpose is not valid for them.
PURPOSE = b"coterie masked round\n"
_KEYS = {
    "node": "node-key",
    "signing": "signing-key",
    "signature": "key-signature",
    "box": "box-key",
    "box_signature": "box-signature",
}
# Simulated clients of one process verify the same signatures.
_is_signed = lru_cache(maxsize=1 << 16)(is_signed)


def box_content(client: int, box: bytes) -> bytes:
    """Return the content of the signature of a client's box key."""
    return b"box key" + str(client).encode() + b":" + box


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
    """Step 1. The last five lists are of the clients of the cohort, in their order.

    Attributes:
        release: what the round releases, :data:`RELEASES`.
        plan: terms of the run's plan, JSON.
        parameters: d, of one model.
        shared: number of leading parameters that all clusters share.
        cohort: U0, ids of the clients, increasing.
        node_keys: Public keys of their nodes.
        signing_keys: Ed25519 keys of the clients.
        key_signatures: Signatures of the signing keys by the nodes.
        box_keys: X25519 keys of the clients for this round.
        box_signatures: Signatures of the box keys by the signing keys.
    """

    message_type: ClassVar[str] = OPEN

    release: Annotated[str, OneOf(RELEASES)]
    plan: Annotated[str, Length(_MAX_TERMS)]
    parameters: Annotated[int, Bounds(1, MAX_SIZE)]
    shared: Annotated[int, Bounds(0, MAX_SIZE)]
    cohort: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]
    node_keys: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    signing_keys: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    key_signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    box_keys: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]
    box_signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]

    def __post_init__(self) -> None:
        check_lists(self.cohort, *self._lists)
        if self.shared > self.parameters:
            raise RequestError(f"shared is {self.shared}; a model has {self.parameters} parameters")

    @property
    def _lists(self) -> tuple[tuple[bytes, ...], ...]:
        return self.node_keys, self.signing_keys, self.key_signatures, self.box_keys, self.box_signatures

    @staticmethod
    def key_lists(keys: Sequence[SignedKey]) -> dict[str, Any]:
        """Return the five lists of the keys of a cohort, as fields of a request."""
        names = ("node_keys", "signing_keys", "key_signatures", "box_keys", "box_signatures")
        return {name: tuple(getattr(key, entry) for key in keys) for name, entry in zip(names, _KEYS, strict=True)}

    @property
    def keys_of_clients(self) -> dict[int, SignedKey]:
        """The signed keys of every client of the cohort."""
        return {client: SignedKey(*row) for client, *row in zip(self.cohort, *self._lists, strict=True)}

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
        parts = [self.plan.encode(), about.encode(), *(entry for keys in self._lists for entry in keys)]
        digest = digest_of(*parts)
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


def task_digest(content: RecordDict) -> bytes:
    """Return the digest of the part of a step 2 message that is equal for all receivers: all but their boxes."""
    config = content.config_records[CONFIG]
    entries = [f"{key}={config[key]!r}".encode() for key in sorted(config.keys() - {"boxes", *PLACES_OF_CLIENTS})]
    arrays = sorted(content.array_records[MODELS].items()) if MODELS in content.array_records else []
    for name, array in arrays:
        entries += [f"{name}: {array.dtype} {tuple(array.shape)}".encode(), hashlib.sha256(array.data).digest()]
    return digest_of(*entries)


@dataclass(frozen=True, kw_only=True)
class SurvivorsRequest(RoundRequest):
    """Step 3.

    Attributes:
        survivors: U2, ids of the clients whose vectors arrived, increasing.
        view_signatures: Signatures of their views.
    """

    message_type: ClassVar[str] = SURVIVORS

    survivors: Annotated[tuple[int, ...], Length(MAX_COHORT), SIZE]
    view_signatures: Annotated[tuple[bytes, ...], Length(MAX_COHORT)]

    def __post_init__(self) -> None:
        check_lists(self.survivors, self.view_signatures)

    @property
    def views(self) -> dict[int, bytes]:
        """The signature of every survivor's view."""
        return dict(zip(self.survivors, self.view_signatures, strict=True))


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


def pack_opening(opening: Opening, following: SignedKey, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 1, with the client's box key for a later round."""
    announced = {"box-key": following.box, "box-signature": following.box_signature}
    values = {"public": opening.public, "commitment": opening.commitment, "signature": opening.signature, **announced}
    return _reply(client_id, round, values, boxes=opening.boxes)


def read_opening(
    content: RecordDict, *, client_id: int, round: MaskedRound, key: SignedKey
) -> tuple[Opening, SignedKey]:
    """Read a reply to step 1; return the opening, and the client's keys for a later round.

    Args:
        content: The reply.
        client_id: Id of the client.
        round: The round.
        key: Keys of the client in this round.

    Raises:
        ReplyError: it is of another client or round, it lacks a box for a client, or a signature is wrong.
    """
    record = _record(content, client_id, round.number)
    boxes = _by_client("boxes", record)
    if boxes.keys() != set(round.cohort) - {client_id}:
        raise ReplyError("the boxes are not for the other clients of the cohort")
    public, commitment, signature = (_bytes(name, record) for name in ("public", "commitment", "signature"))
    if not key.has_signed(round.opening_content(client_id, public, commitment), signature):
        raise ReplyError("the opening is not signed by the key of the client")
    following = replace(key, box=_bytes("box-key", record), box_signature=_bytes("box-signature", record))
    if not following.has_signed_box(client_id):
        raise ReplyError("the next box key is not signed by the key of the client")
    return Opening(public, commitment, signature, boxes), following


def pack_masked(vector: Vector, view_signature: bytes, *, client_id: int, round: int) -> RecordDict:
    """The reply to step 2."""
    return RecordDict({UPDATE: pack_integers(vector), **_reply(client_id, round, {"view-signature": view_signature})})


def read_masked(
    content: RecordDict, *, client_id: int, round: MaskedRound, key: SignedKey, view: bytes
) -> tuple[Vector, bytes]:
    """Read a reply to step 2; return the masked vector, and the signature of the client's view.

    Args:
        content: The reply.
        client_id: Id of the client.
        round: The round.
        key: Keys of the client.
        view: View of the round, which all clients must have.

    Raises:
        ReplyError: it is of another client or round, the vector has another shape or type, or the view is another one.
    """
    vector = read_integers(content, client_id=client_id, round=round.number, size=round.size)
    signature = _bytes("view-signature", content.config_records[REPLY])
    if not key.has_signed(round.view_content(client_id, view), signature):
        raise ReplyError("the client has not signed the view of this round")
    return vector, signature


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
