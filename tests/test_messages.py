"""The wire format: what goes in comes out, and what does not keep the contract is refused by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from coterie.messages import Layout, ReplyError, pack_models, pack_update, read_reply, unpack_models

LAYOUT = Layout(("weight", "bias", "scale"), ((2, 3), (3,), ()))


def reply(**changes):
    fields = {"client-id": 4, "round": 2, "label": 1, "redrawn-label": 0} | changes
    return RecordDict({"update": pack_update(np.arange(10, dtype=np.float32), LAYOUT), "reply": ConfigRecord(fields)})


def read(content):
    return read_reply(content, client_id=4, round=2, num_clusters=3, layout=LAYOUT)


def with_array(name, array):
    content = reply()
    content["update"][name] = array
    return content


def test_models_travel_and_come_back():
    models = np.random.default_rng(0).standard_normal((3, LAYOUT.size)).astype(np.float32)
    record = pack_models(models, LAYOUT)
    assert list(record)[:4] == ["0/weight", "0/bias", "0/scale", "1/weight"]
    back, layout = unpack_models(record)
    np.testing.assert_array_equal(back, models)
    assert layout == LAYOUT


def test_a_record_without_clusters_is_one_model():
    models, layout = unpack_models(ArrayRecord({"w": Array(np.ones((2, 2), np.float32))}))
    np.testing.assert_array_equal(models, np.ones((1, 4)))
    assert layout == Layout(("w",), ((2, 2),))


def test_a_model_without_parameters_travels_both_ways():
    nothing = Layout((), ())
    models, layout = unpack_models(pack_models(np.zeros((1, 0), np.float32), nothing))
    assert (models.shape, models.dtype, layout) == ((1, 0), np.float32, nothing)
    content = reply()
    content["update"] = pack_update(np.zeros(0, np.float32), nothing)
    answer = read_reply(content, client_id=4, round=2, num_clusters=3, layout=nothing)
    assert (answer.update.shape, answer.update.dtype) == ((0,), np.float32)
    with pytest.raises(ReplyError, match=r"parameters are \[\], expected \['weight'"):
        read(content)
    with pytest.raises(ReplyError, match=r"expected \[\]"):
        read_reply(reply(), client_id=4, round=2, num_clusters=3, layout=nothing)


@pytest.mark.parametrize("keys", [["0/w", "2/w"], ["0/w", "1/v"], ["1/w"]])
def test_clusters_must_be_whole(keys):
    with pytest.raises(ValueError, match="clusters 0, 1"):
        unpack_models(ArrayRecord({key: Array(np.ones(1, np.float32)) for key in keys}))


def test_a_good_reply_is_read():
    answer = read(reply())
    assert (answer.client_id, answer.label, answer.redrawn_label) == (4, 1, 0)
    np.testing.assert_array_equal(answer.update, np.arange(10))


def test_arrays_that_flower_made_are_read_alike():
    weight = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))  # another header, another order
    content = with_array("weight", Array(weight))
    content["update"]["bias"] = Array(np.ones(3, np.float32))
    np.testing.assert_array_equal(read(content).update, [*range(6), 1, 1, 1, 9])


def test_what_we_send_flower_reads():
    for array, expected in zip(reply()["update"].values(), LAYOUT.split(np.arange(10)).values(), strict=True):
        np.testing.assert_array_equal(array.numpy(), expected)
        assert (array.dtype, tuple(array.shape)) == ("float32", expected.shape)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"client-id": 5}, "client-id is 5, expected 4"),
        ({"round": 1}, "round is 1, expected 2"),
        ({"label": 3}, "label is 3"),
        ({"label": -1}, "label is -1"),
        ({"label": 1.0}, "label is 1.0"),
        ({"label": True}, "label is True"),
        ({"redrawn-label": "0"}, "redrawn-label is '0'"),
    ],
)
def test_wrong_words(changes, complaint):
    with pytest.raises(ReplyError, match=complaint):
        read(reply(**changes))


@pytest.mark.parametrize("record", ["reply", "update"])
def test_missing_records(record):
    content = reply()
    del content[record]
    with pytest.raises(ReplyError, match="it needs"):
        read(content)


GOOD = Array(np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("name", "array", "complaint"),
    [
        ("bias", Array(np.ones(4, np.float32)), r"bias is float32 \(4,\), expected float32 \(3,\)"),
        ("bias", Array(np.ones((3, 1), np.float32)), "bias is float32"),
        ("bias", Array(np.ones(3)), "bias is float64"),
        ("bias", Array(np.array([1, np.nan, 1], np.float32)), "NaN or Inf"),
        ("bias", Array(np.array([1, -np.inf, 1], np.float32)), "NaN or Inf"),
        ("extra", GOOD, "parameters are"),
        ("bias", Array("float32", (3,), "numpy.ndarray", b"garbage"), "bias cannot be read"),
        ("bias", Array("float32", (3,), "numpy.ndarray", Array(np.ones(3)).data), "bias cannot be read"),
        ("bias", Array("float32", (3,), "numpy.ndarray", Array(np.ones(9, np.float32)).data), "bias cannot be read"),
        ("bias", Array("float32", (3,), "numpy.ndarray", GOOD.data[:-4]), "bias cannot be read"),
        ("bias", Array("float32", (3,), "numpy.ndarray", GOOD.data + bytes(10_000)), "too many"),
        ("bias", Array("float32", (3,), "another", GOOD.data), "bias cannot be read"),
    ],
)
def test_wrong_arrays(name, array, complaint):
    with pytest.raises(ReplyError, match=complaint):
        read(with_array(name, array))


def test_a_header_that_claims_the_moon_sets_no_memory_aside():
    honest = Array(np.ones(3, np.float32)).data
    liar = honest.replace(b"(3,), }            ", b"(999999999999,), } ")
    assert liar != honest
    with pytest.raises(ReplyError, match=r"it holds float32 \(999999999999,\)"):
        read(with_array("bias", Array("float32", (3,), "numpy.ndarray", liar)))


def test_a_missing_parameter():
    content = reply()
    del content["update"]["scale"]
    with pytest.raises(ReplyError, match="parameters are"):
        read(content)
