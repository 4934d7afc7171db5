"""Requests and replies of a masked round: read as they were sent, bounded, and malformed ones are refused by name."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from kit.tables import for_rows

from coterie.privacy import Secure
from coterie.privacy.secure_aggregation import MaskedRound, NoiseLayers, Opening, SecureError, Shares, Surplus
from coterie.wire import RequestError
from coterie.wire.masked import (
    RELEASES,
    ROUND_REQUESTS,
    OpenRequest,
    SignedKey,
    SurvivorsRequest,
    UnmaskRequest,
    opened_fields,
    openings_for,
    pack_masked,
    pack_opening,
    pack_shares,
    pack_signature,
    read_masked,
    read_opening,
    read_shares,
    read_signature,
    task_digest,
)
from coterie.wire.messages import CONFIG, MASKED_STEPS, MODELS, REPLY, UPDATE, Layout, ReplyError, pack_models
from coterie.wire.requests import MaskedEvaluateRequest, MaskedTrainRequest, read_request

LAYERS = NoiseLayers.of(1e5, 3, 2, 0)
ROUND = MaskedRound(b"run", 2, 0, b"plan", (1, 4, 6), 2, 0, 5, LAYERS)
BOUND = {"run": "run", "round": 2, "attempt": 0}


@dataclass(frozen=True)
class Plan:
    corrupt: int = 0
    layers: NoiseLayers = LAYERS

    def threshold(self, number):
        return 2

    def vector_size(self, size, shared):
        return 2 * size + 2


def opening_of(client):
    boxes = {other: bytes([client, other]) * 46 for other in ROUND.cohort if other != client}
    return Opening(bytes([client]) * 32, bytes(32), b"signature", boxes)


OPEN = OpenRequest(
    **BOUND,
    release="training",
    plan="{}",
    parameters=10,
    shared=0,
    cohort=(1, 4, 6),
    node_keys=(b"a", b"b", b"c"),
    signing_keys=(b"d", b"e", b"f"),
    key_signatures=(b"g", b"h", b"i"),
    box_keys=(b"j", b"k", b"l"),
    box_signatures=(b"m", b"n", b"o"),
)
OPENED = opened_fields({client: opening_of(client) for client in ROUND.cohort}, 4)
TRAIN = MaskedTrainRequest(**BOUND, **OPENED)
EVALUATE = MaskedEvaluateRequest(**BOUND, **OPENED, private=True, histogram=True)
REQUESTS = [
    OPEN,
    TRAIN,
    EVALUATE,
    SurvivorsRequest(**BOUND, survivors=(1, 6), view_signatures=(b"v", b"w")),
    UnmaskRequest(**BOUND, signers=(1, 6), signatures=(b"x", b"y")),
]


def sent(content):
    """What arrives over a network."""
    return recorddict_from_proto(ProtoRecordDict.FromString(recorddict_to_proto(content).SerializeToString()))


@for_rows("request_", REQUESTS, ids=lambda request: request.message_type)
def test_a_request_is_read_as_it_was_sent_and_every_field_is_needed(request_):
    content = sent(RecordDict({CONFIG: ConfigRecord(request_.to_record())}))
    record = content.config_records[CONFIG]
    assert type(request_).from_record(record) == request_
    for key in request_.to_record().keys() - {
        "additive",
        "first-batch",
        "choice",
        "private",
        "histogram",
        "sampled",
        "counts-records",
    }:
        with pytest.raises(RequestError, match=f"{key} is missing"):
            type(request_).from_record({name: value for name, value in record.items() if name != key})


def test_every_type_of_request_is_read():
    second = [request.message_type for request in (MaskedTrainRequest, MaskedEvaluateRequest)]
    assert [*ROUND_REQUESTS] == ["train.open", "train.survivors", "train.unmask"]
    assert second == ["train.masked", "evaluate.masked"]
    assert MASKED_STEPS.keys() == {*ROUND_REQUESTS, *second}


def test_no_mask_of_a_round_that_trains_is_one_of_a_round_that_evaluates():
    plan = Secure(
        clients=10, num_clusters=2, rounds=3, sampling_rate=1.0, epsilon=8.0, delta=1e-4, clip_norm=1.0, corrupt=1,
        noise_multiplier=3.0, evaluations=1, histograms=1,
    )  # fmt: skip
    lists = {"cohort": tuple(range(10)), **OpenRequest.key_lists([SignedKey(*[b"k"] * 5)] * 10)}
    rounds = [replace(OPEN, release=release, **lists).masked_round(plan) for release in RELEASES]
    assert len({round.digest for round in rounds}) == len({round.plan for round in rounds}) == 3
    assert [round.size for round in rounds] == [23, 1, 64]
    assert [round.threshold for round in rounds] == [7, 7, 7]
    with pytest.raises(RequestError):
        OpenRequest.from_record({**OPEN.to_record(), "release": "updates"})


@pytest.mark.parametrize("change", [{"opened": [1, 4]}, {"record-plans": "[]"}, {"private": False}])
def test_a_malformed_request_to_evaluate_is_refused(change):
    with pytest.raises(RequestError):
        MaskedEvaluateRequest.from_record({**EVALUATE.to_record(), **change})


LONG = b"x" * 257
BAD = {
    "no run": {"run": 5},
    "a long run": {"run": "x" * 65},
    "round 0": {"round": 0},
    "attempt -1": {"attempt": -1},
    "a fraction": {"attempt": 0.5},
    "long terms": {"plan": "x" * 20_001},
    "no parameters": {"parameters": 0},
    "too many parameters": {"parameters": 2**23 + 1},
    "more shared parameters than there are": {"shared": 11},
    "a client twice": {"cohort": [1, 1, 6]},
    "clients in another order": {"cohort": [6, 4, 1]},
    "a negative client": {"cohort": [-1, 4, 6]},
    "a client that is no number": {"cohort": ["1", "4", "6"]},
    "one client too few": {"cohort": [1, 4]},
    "one key too few": {"signing-keys": [b"d", b"e"]},
    "one box key too few": {"box-keys": [b"j", b"k"]},
    "a long key": {"node-keys": [b"a", b"b", LONG]},
    "keys as text": {"signing-keys": ["d", "e", "f"]},
    "one key": {"signing-keys": b"def"},
    "too large a cohort": {"cohort": list(range(1001))},
}


@for_rows("name", BAD)
def test_a_malformed_opening_request_is_refused(name):
    with pytest.raises(RequestError):
        OpenRequest.from_record({**OPEN.to_record(), **BAD[name]})


@for_rows(
    "change",
    [
        {"opened": [1, 4]},
        {"opened": [1, 6, 4]},
        {"boxes": [LONG, b"", b""]},
        {"commitments": []},
        {"record-plans": "[]"},
    ],
)
def test_a_malformed_training_request_is_refused(change):
    with pytest.raises(RequestError):
        MaskedTrainRequest.from_record({**TRAIN.to_record(), **change})


def test_a_training_request_has_models_and_openings():
    layout = Layout(("w",), ((3,),))
    content = RecordDict(
        {CONFIG: ConfigRecord(TRAIN.to_record()), "models": pack_models(np.ones((2, 3), np.float32), layout)}
    )
    request, models, _ = read_request("train.masked", sent(content))
    assert request == TRAIN
    assert models.shape == (2, 3)
    openings = openings_for(request, 4)
    assert {client: one.public for client, one in openings.items()} == {c: bytes([c]) * 32 for c in ROUND.cohort}
    assert openings[1].boxes == {4: bytes([1, 4]) * 46}
    assert openings[4].boxes == {4: b""}


def test_both_halves_agree_on_the_round_and_its_digest_covers_the_keys():
    round = OPEN.masked_round(Plan())
    assert (round.run, round.number, round.cohort, round.threshold, round.size) == (b"run", 2, (1, 4, 6), 2, 22)
    keys = [{name: (*values[:2], b"z")} for name, values in vars(OPEN).items() if name.endswith(("keys", "signatures"))]
    assert len(keys) == 5
    for change in ({"plan": "{ }"}, {"parameters": 9}, {"shared": 1}, *keys):
        other = OpenRequest(**{**vars(OPEN), **change}).masked_round(Plan())
        assert other.digest != round.digest, change
    with pytest.raises(SecureError, match="2t > n"):
        OPEN.masked_round(Plan(corrupt=1))


# ---- replies ---------------------------------------------------------------------------------------------------------


def test_replies_are_read_as_they_were_sent():
    who = {"client_id": 4, "round": 2}
    read = {"client_id": 4, "round": ROUND}
    shares = Shares({1: bytes(32), 6: b"\x01" * 32}, {4: bytes(32)})
    assert read_opening(sent(GOOD), **read, key=KEY) == (signed_opening(), NEXT_KEY)
    assert read_signature(sent(pack_signature(b"signed", **who)), **read) == b"signed"
    assert read_shares(sent(pack_shares(shares, **who)), **read) == shares
    none_dropped = Shares({1: bytes(32)}, {})
    assert read_shares(sent(pack_shares(none_dropped, **who)), **read) == none_dropped
    with_surplus = replace(none_dropped, surplus=Surplus(bytes(32), b"\x01" * 32))
    assert read_shares(sent(pack_shares(with_surplus, **who)), **read) == with_surplus
    vector, signature = np.array([0, 1, 2**31, 2**32 - 1, 7], np.uint32), sign(ROUND.view_content(4, b"view"))
    masked, read_signature_of_view = read_masked(sent(pack_masked(vector, signature, **who)), **read, **VIEWED)
    np.testing.assert_array_equal(masked, vector)
    assert read_signature_of_view == signature


def changed(content, **values):
    record = ConfigRecord({**content.config_records[REPLY], **values})
    return RecordDict({**content, REPLY: record})


SIGNER = Ed25519PrivateKey.generate()


def sign(content):
    return SIGNER.sign(b"coterie masked round\n" + content)


def signed_key(box, client=4):
    signature = sign(b"box key%d:" % client + box)
    return SignedKey(b"node", SIGNER.public_key().public_bytes_raw(), b"signature", box, signature)


KEY, NEXT_KEY = signed_key(b"box"), signed_key(b"next")
VIEWED = {"key": KEY, "view": b"view"}


def signed_opening():
    opening = opening_of(4)
    return replace(opening, signature=sign(ROUND.opening_content(4, opening.public, opening.commitment)))


GOOD = pack_opening(signed_opening(), NEXT_KEY, client_id=4, round=2)
HOSTILE_OPENINGS = {
    "another client": changed(GOOD, **{"client-id": 1}),
    "another round": changed(GOOD, round=3),
    "no key": changed(GOOD, public=b""),
    "a long signature": changed(GOOD, signature=LONG),
    "text": changed(GOOD, commitment="x"),
    "a box for itself": changed(GOOD, **{"boxes-of": [1, 4]}),
    "a box too few": changed(GOOD, **{"boxes-of": [1], "boxes": [b"x"]}),
    "a box twice": changed(GOOD, **{"boxes-of": [1, 1]}),
    "a long box": changed(GOOD, boxes=[LONG, b"x"]),
    "boxes of text": changed(GOOD, boxes=["x", "y"]),
    "no list": changed(GOOD, boxes=5),
    "nothing": RecordDict(),
    "another key than the signed one": changed(GOOD, public=b"x" * 32),
    "a signature of nobody": changed(GOOD, signature=b"x" * 64),
    "no next box key": changed(GOOD, **{"box-key": b""}),
    "a next box key that is not signed": changed(GOOD, **{"box-key": b"other"}),
    "the next box key of another client": changed(GOOD, **{"box-signature": signed_key(b"next", 6).box_signature}),
}


@for_rows("name", HOSTILE_OPENINGS)
def test_malformed_openings_are_refused(name):
    with pytest.raises(ReplyError):
        read_opening(HOSTILE_OPENINGS[name], client_id=4, round=ROUND, key=KEY)


def vector_with(view=b"view", client=4, round=ROUND):
    signature = sign(round.view_content(client, view))
    return pack_masked(np.arange(5, dtype=np.uint32), signature, client_id=4, round=2)


VECTOR = vector_with()


def with_array(array, name="masked"):
    return RecordDict({**VECTOR, UPDATE: ArrayRecord({name: array})})


HOSTILE_VECTORS = {
    "floats": with_array(Array(np.zeros(5, np.float32))),
    "64 bits": with_array(Array(np.zeros(5, np.uint64))),
    "signed": with_array(Array(np.zeros(5, np.int32))),
    "another size": with_array(Array(np.zeros(6, np.uint32))),
    "another shape": with_array(Array(np.zeros((5, 1), np.uint32))),
    "another name": with_array(Array(np.zeros(5, np.uint32)), "update"),
    "floats that claim to be integers": with_array(
        Array("uint32", (5,), "numpy.ndarray", Array(np.zeros(5, np.float32)).data)
    ),
    "cut": with_array(Array("uint32", (5,), "numpy.ndarray", Array(np.zeros(5, np.uint32)).data[:-1])),
    "no array": changed(RecordDict({REPLY: VECTOR.config_records[REPLY]})),
    "another round": changed(VECTOR, round=1),
    "another view": vector_with(b"other"),
    "the view of another client": vector_with(client=6),
    "the view of another round": vector_with(round=replace(ROUND, number=3)),
    "no view": changed(VECTOR, **{"view-signature": b""}),
}


@for_rows("name", HOSTILE_VECTORS)
def test_vectors_of_another_shape_or_type_are_refused(name):
    with pytest.raises(ReplyError):
        read_masked(HOSTILE_VECTORS[name], client_id=4, round=ROUND, **VIEWED)


def test_the_task_of_a_round_is_all_that_its_clients_share():
    def content(receiver=4, value=1.0, **config):
        opened = opened_fields({client: opening_of(client) for client in ROUND.cohort}, receiver)
        record = {"lr": 0.1, "data-dir": f"place of {receiver}", **MaskedTrainRequest(**BOUND, **opened).to_record()}
        models = pack_models(np.full((2, 3), value, np.float32), Layout(("w",), ((3,),)))
        return RecordDict({CONFIG: ConfigRecord({**record, **config}), MODELS: models})

    task = task_digest(content())
    assert task == task_digest(sent(content(receiver=6)))  # other boxes, and another order of entries
    others = [content(value=1.0001), content(lr=0.2), content(commitments=[bytes(31)] * 3), content(more=1)]
    assert len({task, *map(task_digest, others)}) == 5


def test_shares_of_strangers_are_refused():
    with pytest.raises(ReplyError, match="outside the cohort"):
        read_shares(pack_shares(Shares({9: bytes(32)}, {}), client_id=4, round=2), client_id=4, round=ROUND)


def test_a_signed_key_is_read_from_an_identity_reply():
    key = SignedKey(b"node", b"signing key", b"signature", b"box key", b"box signature")
    assert SignedKey.from_record({"client-id": 3, **key.to_record()}) == key
    for bad in ({"signing-key": b""}, {"box-key": "key"}, {"key-signature": LONG}, {"node-key": None}):
        assert SignedKey.from_record({**key.to_record(), **bad}) is None
    assert SignedKey.from_record({"client-id": 3}) is None
