"""The wire format: what goes in comes out, and what does not keep the contract is refused by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from kit.tables import for_rows

from coterie.wire.messages import (
    Layout,
    PointsSpec,
    ReplyError,
    pack_models,
    pack_points,
    pack_update,
    payload,
    read_points,
    read_reply,
    unpack_models,
)

LAYOUT = Layout(("weight", "bias", "scale"), ((2, 3), (3,), ()))


def reply(**changes):
    fields = {"client-id": 4, "round": 2, "label": 1, "redrawn-label": 1} | changes
    return RecordDict({"update": pack_update(np.arange(10, dtype=np.float32), LAYOUT), "reply": ConfigRecord(fields)})


def read(content, **request):
    return read_reply(content, client_id=4, round=2, num_clusters=3, layout=LAYOUT, **request)


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
    assert (answer.client_id, answer.label, answer.redrawn_label) == (4, 1, 1)
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


#: What is said of the sender and the round, and of them alone where the reply has points.
OTHERS = [
    ({"client-id": 5}, "client-id is 5, expected 4"),
    ({"client-id": "4"}, "client-id is '4', expected 4"),
    ({"round": 1}, "round is 1, expected 2"),
    ({"client-id": 4.0}, "client-id is 4.0, expected 4"),
    ({"round": 2.0}, "round is 2.0, expected 2"),
    ({"round": [2]}, r"round is \[2\], expected 2"),
]


@for_rows(
    ("changes", "complaint"),
    [
        *OTHERS,
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


@pytest.mark.parametrize("key", ["client-id", "round"])
def test_a_truth_value_is_no_number(key):
    content = reply(**{"client-id": 1, "round": 1, key: True})
    with pytest.raises(ReplyError, match=f"{key} is True, expected 1"):
        read_reply(content, client_id=1, round=1, num_clusters=3, layout=LAYOUT)


REDRAW = np.array([[0.5, 0.5, 0], [0, 1, 0], [0.25, 0, 0.75]])


@for_rows(("label", "redrawn"), [(label, redrawn) for label in range(3) for redrawn in range(3)])
def test_labels_are_those_that_the_request_allows(label, redrawn):
    content = reply(**{"label": label, "redrawn-label": redrawn})

    def check(allowed, **request):
        if not allowed:
            with pytest.raises(ReplyError, match="label"):
                read(content, **request)
            return
        answer = read(content, **request)
        assert (answer.label, answer.redrawn_label) == (label, redrawn)

    check(label == redrawn)
    check(REDRAW[label, redrawn] > 0, redraw=REDRAW)
    for placed in range(3):
        check(label == redrawn == placed, assigned=placed)


@pytest.mark.parametrize("shape", [(3.0,), (True, 3), [3, None]])
def test_sizes_of_a_shape_are_whole_numbers(shape):
    """As JSON may hold them, which Flower reads."""
    array = Array(np.ones(3, np.float32))
    array.__dict__["shape"] = shape
    with pytest.raises(ReplyError, match="bias is float32"):
        read(with_array("bias", array))


GOOD = Array(np.ones(3, np.float32))
FORTRAN = Array(np.ones((2, 3), np.float32, order="F")).data


@for_rows(
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
        ("bias", Array("float32", (3,), "numpy.ndarray", GOOD.data + b"more"), "bias cannot be read"),
        ("weight", Array("float32", (2, 3), "numpy.ndarray", FORTRAN + b"more"), "the array has 28 bytes, expected 24"),
        ("weight", Array("float32", (2, 3), "numpy.ndarray", FORTRAN[:-4]), "the array has 20 bytes, expected 24"),
    ],
)
def test_wrong_arrays(name, array, complaint):
    with pytest.raises(ReplyError, match=complaint):
        read(with_array(name, array))


def test_a_header_that_claims_the_moon_sets_no_memory_aside():
    honest = Array(np.ones(3, np.float32)).data
    liar = honest.replace(b"(3,), }            ", b"(999999999999,), } ")
    assert liar != honest
    with pytest.raises(ReplyError, match=r"the array is float32 \(999999999999,\)"):
        read(with_array("bias", Array("float32", (3,), "numpy.ndarray", liar)))


def test_a_missing_parameter():
    content = reply()
    del content["update"]["scale"]
    with pytest.raises(ReplyError, match="parameters are"):
        read(content)


# ---- points ----------------------------------------------------------------------------------------------------------

EXPECTED = PointsSpec((2, 3), max_points=5)
POINTS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 2, 3)


def points_reply(points=POINTS, **changes):
    said = {"client-id": 4, "round": 2} | changes
    return RecordDict({"update": pack_points(points), "reply": ConfigRecord(said)})


def points_of(content, expected=EXPECTED):
    return read_points(content, client_id=4, round=2, expected=expected)


def with_points(array, name="points"):
    content = points_reply()
    content["update"] = ArrayRecord({name: array})
    return content


def spoiled(value):
    points = POINTS.copy()
    points[1, 1, 1] = value
    return points


@for_rows("rows", [1, 4, 5])
@for_rows("exactly", [False, True])
def test_good_points_are_read(rows, exactly):
    points = np.resize(POINTS, (rows, 2, 3))
    expected = PointsSpec((2, 3), max_points=5, num_points=rows if exactly else 0)
    for array in (pack_points(points)["points"], Array(points)):
        found = points_of(with_points(array), expected)
        np.testing.assert_array_equal(found, points)
        assert found.dtype == np.float32


@for_rows(("changes", "complaint"), OTHERS)
def test_points_of_another_client_or_round(changes, complaint):
    with pytest.raises(ReplyError, match=complaint):
        points_of(points_reply(**changes))


@pytest.mark.parametrize("record", ["reply", "update"])
def test_missing_records(record):
    for content, reader in ((reply(), read), (points_reply(), points_of)):
        del content[record]
        with pytest.raises(ReplyError, match="expected a ConfigRecord"):
            reader(content)


def test_points_by_another_name_or_with_more():
    with pytest.raises(ReplyError, match=r"the arrays are \['samples'\], expected \['points'\]"):
        points_of(with_points(Array(POINTS), "samples"))
    content = points_reply()
    content["update"]["more"] = GOOD
    with pytest.raises(ReplyError, match="the arrays are"):
        points_of(content)
    content["update"] = ArrayRecord()
    with pytest.raises(ReplyError, match=r"the arrays are \[\]"):
        points_of(content)


def claims(shape, data=None):
    """An array that says it has this shape."""
    return Array("float32", shape, "numpy.ndarray", pack_points(POINTS)["points"].data if data is None else data)


@for_rows(
    ("array", "complaint"),
    [
        (Array(POINTS.reshape(4, 6)), r"the points have shape \(6,\), expected \(2, 3\)"),
        (Array(POINTS.reshape(4, 3, 2)), r"the points have shape \(3, 2\)"),
        (Array(POINTS[0]), r"the points have shape \(3,\)"),
        (Array(POINTS.reshape(4, 2, 3, 1)), r"the points have shape \(2, 3, 1\)"),
        (Array(np.array(1, np.float32)), r"the points have shape \(\)"),
        (Array(POINTS[:0]), "the number of points is 0, expected 1 to 5"),
        (Array(np.resize(POINTS, (6, 2, 3))), "the number of points is 6, expected 1 to 5"),
        (claims((2**60, 2, 3)), f"the number of points is {2**60}, expected 1 to 5"),
        (claims((-1, 2, 3)), "the number of points is -1"),
        (Array(POINTS.astype(float)), "points is float64"),
        (Array(POINTS.astype(np.float16)), "points is float16"),
        (Array(spoiled(np.nan)), "NaN or Inf"),
        (Array(spoiled(np.inf)), "NaN or Inf"),
        (Array(spoiled(1.001)), r"the points lie in \[-1, 1.001\], expected \[-1, 1\]"),
        (Array(spoiled(-1.001)), r"the points lie in \[-1.001, 1\], expected \[-1, 1\]"),
        (claims((4, 2, 3), b"garbage"), "points cannot be read"),
        (claims((4, 2, 3), pack_points(POINTS)["points"].data[:-1]), "points cannot be read"),
        (claims((4, 2, 3), Array(POINTS.astype(float)).data), "points cannot be read: the array is float64"),
        (claims((5, 2, 3)), r"points cannot be read: the array is float32 \(4, 2, 3\), expected float32 \(5, 2, 3\)"),
        (claims((4, 2, 3), bytes(1024 + 97)), "points has 1121 bytes, too many"),
    ],
)
def test_what_are_no_such_points(array, complaint):
    with pytest.raises(ReplyError, match=complaint):
        points_of(with_points(array))


def test_a_number_of_points_that_was_fixed():
    exact = PointsSpec((2, 3), max_points=5, num_points=3)
    for many in (2, 4):
        with pytest.raises(ReplyError, match=f"the number of points is {many}, expected 3"):
            points_of(points_reply(POINTS[:many]), exact)
    assert len(points_of(points_reply(POINTS[:3]), exact)) == 3


def test_points_in_another_range():
    unit = PointsSpec((2, 3), max_points=5, low=0.0, high=0.5)
    assert len(points_of(points_reply(np.abs(POINTS) / 2), unit)) == 4
    with pytest.raises(ReplyError, match=r"expected \[0, 0\.5\]"):
        points_of(points_reply(), unit)


def test_a_gigabyte_too_many_is_not_even_unpacked(monkeypatch):
    class Gigabyte(bytes):
        """Says it is long; whoever reads it fails."""

        def __len__(self):
            return 2**30

        def startswith(self, *_):
            raise AssertionError("it was read")

    array = claims((4, 2, 3))
    content = with_points(array)
    content["update"]["points"].__dict__["data"] = Gigabyte()
    with pytest.raises(ReplyError, match=f"points has {2**30} bytes, too many"):
        points_of(content)


def test_a_header_that_claims_a_moon_of_points():
    honest = pack_points(POINTS)["points"].data
    liar = honest.replace(b"(4, 2, 3), }" + 10 * b" ", b"(99999999999, 2, 3), }")
    assert liar != honest
    with pytest.raises(ReplyError, match=r"the array is float32 \(99999999999, 2, 3\)"):
        points_of(with_points(claims((4, 2, 3), liar)))


def test_the_payload_is_all_bytes_of_arrays():
    content = points_reply()
    assert payload(content) == len(content["update"]["points"].data) == 128 + 4 * 24
    content["models"] = ArrayRecord({"a": GOOD, "b": GOOD})
    assert payload(content) == 128 + 4 * 24 + 2 * (128 + 4 * 3)
    assert payload(RecordDict({"config": ConfigRecord({"words": "many"})})) == 0
