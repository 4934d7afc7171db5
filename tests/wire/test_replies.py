"""Evaluation replies: valid ones are read, every other one is a ReplyError that names the field."""

import pytest
from flwr.app import MetricRecord
from kit.tables import for_rows

from coterie.wire import EvaluationReply, LabelCounts, summary_of
from coterie.wire.messages import ReplyError

VALID = {"accuracy": 0.5, "loss": 1.25, "cluster": 1, "group": 3, "num-examples": 10}
COUNTS = {"classes": 2, "confusion": [5, 0, 1, 2**40 - 1, 0, 0]}


def evaluation(**changes):
    record = MetricRecord({key: value for key, value in (VALID | changes).items() if value is not None})
    return EvaluationReply.parse(record, client_id=7, num_clusters=2, num_clients=4)


def counts(**changes):
    return LabelCounts.parse(MetricRecord(COUNTS | changes), client_id=7, num_clusters=3, num_clients=4)


def test_a_valid_evaluation_is_read():
    expected = EvaluationReply(client_id=7, accuracy=0.5, loss=1.25, cluster=1, group=3, num_examples=10)
    assert evaluation() == expected
    assert evaluation(accuracy=1).accuracy == 1.0
    assert evaluation(loss=None, **{"num-examples": None}).loss is None


@pytest.mark.parametrize("claimed", [3, [1, 2], 0.5])
def test_the_client_is_the_one_that_was_asked(claimed):
    assert evaluation(**{"client-id": claimed}).client_id == 7
    assert (
        LabelCounts.parse({**COUNTS, "client-id": claimed}, client_id=7, num_clusters=3, num_clients=4).client_id == 7
    )


@for_rows(
    ("key", "value"),
    [
        *(("accuracy", value) for value in (None, -0.01, 1.01, float("nan"), float("inf"), [0.5], 2)),
        *(("loss", value) for value in (float("nan"), float("inf"), -float("inf"), [1.0])),
        *(("cluster", value) for value in (None, -1, 2, 9999, 1.0, [1])),
        *(("group", value) for value in (None, -1, 4, 9999, 2**62, 1.0, [1])),
        *(("num-examples", value) for value in (0, -1, 2**40, 1.5, [3])),
    ],
)
def test_an_invalid_field_of_an_evaluation_is_named(key, value):
    with pytest.raises(ReplyError, match=rf"^{key} is "):
        evaluation(**{key: value})


def test_the_cluster_is_the_one_that_the_server_assigned():
    record, run = MetricRecord(VALID), {"client_id": 7, "num_clusters": 2, "num_clients": 4}
    assert EvaluationReply.parse(record, assigned=1, **run).cluster == 1
    with pytest.raises(ReplyError, match="cluster is 1; the server assigned cluster 0"):
        EvaluationReply.parse(record, assigned=0, **run)


def test_valid_counts_are_read():
    assert counts() == LabelCounts(client_id=7, classes=2, confusion=(5, 0, 1, 2**40 - 1, 0, 0))


@for_rows(
    ("changes", "complaint"),
    [
        ({"classes": 0}, "classes is 0"),
        ({"classes": -2}, "classes is -2"),
        ({"classes": 10_001}, "classes is 10001"),
        ({"classes": 2.0}, "classes is 2.0"),
        ({"classes": 3}, "confusion has 6 entries; expected 3 clusters x 3 classes"),
        ({"confusion": []}, "confusion has 0 entries"),
        ({"confusion": [1, 2, 3]}, "confusion has 3 entries"),
        ({"confusion": 6}, "confusion must be a list"),
        ({"confusion": [1, 2, 3, 4, 5, -1]}, "confusion is -1"),
        ({"confusion": [1, 2, 3, 4, 5, 2**40]}, "confusion is 1099511627776"),
        ({"confusion": [1.0] * 6}, "confusion is 1.0"),
        ({"confusion": [1] * 1_000_001}, "confusion must be a list of at most 1000000 entries"),
    ],
)
def test_invalid_counts_are_named(changes, complaint):
    with pytest.raises(ReplyError, match=complaint):
        counts(**changes)


@pytest.mark.parametrize("kind", [EvaluationReply, LabelCounts])
def test_an_empty_record_is_rejected(kind):
    with pytest.raises(ReplyError, match="is missing"):
        kind.parse(MetricRecord(), client_id=7, num_clusters=3, num_clients=4)


def test_a_summary_knows_its_replies():
    @summary_of(EvaluationReply)
    def many(replies):
        return MetricRecord({"many": len(replies)})

    assert many.reply is EvaluationReply
    assert many([evaluation(), evaluation()]) == MetricRecord({"many": 2})
