"""Replies that differ in their values alone have the same bytes and objects, and are read as they were packed."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from kit.tables import for_rows

from coterie.flower import sizes
from coterie.flower.sizes import fix_size
from coterie.wire.messages import Layout, pack_reply, payload, read_reply

# Arrays of equal shapes and of several chunks (of 4096 bytes here); one is a number.
LAYOUT = Layout(tuple("abcdefg"), ((), (), (3,), (3,), (5000,), (5000,), (6024, 1)))
VALUES = {
    "zeros": np.zeros(LAYOUT.size),
    "negative zeros": np.full(LAYOUT.size, -0.0),
    "equal numbers": np.full(LAYOUT.size, -2.5),
    "numbers without NaN": np.nan_to_num(np.full(LAYOUT.size, np.nan)),
    "different numbers": np.arange(LAYOUT.size),
    "small numbers": np.random.default_rng(0).standard_normal(LAYOUT.size) * 1e-30,
}
LABELS = [0, 1, 63, 64, 127, 128, 8191, 8192, 9999]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 4096)
    monkeypatch.setattr(sizes, "_CHUNK", 4096)


def packed(values="zeros", label=0, redrawn=0, below=0.5):
    content = pack_reply(
        VALUES[values].astype(np.float32), LAYOUT, client_id=3, round=2, label=label, redrawn_label=redrawn, below=below
    )
    fix_size(content)
    return content


def sizes_of(content):
    """Bytes of the content, and kind and bytes of every object that Flower sends."""
    objects = [(type(each).__name__, len(each.deflate())) for each in get_all_nested_objects(content).values()]
    return len(recorddict_to_proto(content).SerializeToString()), objects


@for_rows("values", VALUES)
def test_the_size_of_an_update_does_not_depend_on_its_values(values):
    expected = sizes_of(packed("different numbers"))
    assert sizes_of(packed(values)) == expected
    kinds = [kind for kind, _ in expected[1]]
    assert (kinds.count("Array"), kinds.count("ArrayChunk")) == (7, 33)


def test_the_size_of_a_reply_does_not_depend_on_its_labels_or_share():
    found = [sizes_of(packed(label=label, redrawn=other)) for label in LABELS for other in LABELS[::3]]
    found += [sizes_of(packed(below=below)) for below in (0.0, -0.0, 1.0, -1e300, float("nan"))]
    assert found == [found[0]] * len(found)


@for_rows("value", [0, 1, -1, 63, 64, -64, -65, 2**31, 2**40, 2**62 - 1, -(2**63)])
def test_the_size_of_a_record_does_not_depend_on_its_integers(value):
    def sizes_with(value):
        content = RecordDict({"diagnostics": MetricRecord({"accuracy": 0.5, "cluster": value, "group": 0})})
        fix_size(content)
        return sizes_of(content)

    assert sizes_with(value) == sizes_with(5)


@for_rows("values", VALUES)
def test_no_value_changes(values):
    content = packed(values, label=1, redrawn=1)
    pushed = {object_id: each.deflate() for object_id, each in get_all_nested_objects(content).items()}
    plain = pack_reply(VALUES[values].astype(np.float32), LAYOUT, client_id=3, round=2, label=1)
    for received in (content, inflate_object_from_contents(content.object_id, pushed)):
        answer = read_reply(received, client_id=3, round=2, num_clusters=2, layout=LAYOUT, counts_norms=True)
        assert (answer.label, answer.redrawn_label, answer.below) == (1, 1, 0.5)
        assert answer.update.tobytes() == VALUES[values].astype(np.float32).tobytes()
        assert payload(received) == payload(plain)
        for name, array in received["update"].items():  # any other program reads NumPy's format, too
            np.testing.assert_array_equal(array.numpy(), plain["update"][name].numpy())


def test_our_arrays_are_read_without_parsing_their_headers(monkeypatch):
    content = packed()
    monkeypatch.setattr(np.lib.format, "read_magic", lambda stream: pytest.fail("parsed"))
    read_reply(content, client_id=3, round=2, num_clusters=2, layout=LAYOUT)
