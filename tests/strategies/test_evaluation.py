"""What one evaluation reply can do to the others and to the run: nothing."""

import logging
import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from kit.toy_grids import Kept, quiet
from test_base import CLIENTS, ZERO, Stub, nothing

from coterie.privacy import Streams
from coterie.results import RoundRecord
from coterie.rounds.evaluation import mean_of_clients
from coterie.server.metrics import summarise
from coterie.strategies import FedAvg

HONEST = {"accuracy": 0.5, "loss": 1.0, "cluster": 0, "group": 0, "num-examples": 5}


class Evaluated(Stub):
    """Clients that train and report HONEST; ``bad`` is the content of client 3's reply."""

    def __init__(self, bad=None):
        super().__init__()
        self.bad = bad

    def _answers(self, questions):
        for message in questions:
            if message.metadata.message_type != "evaluate":
                yield from super()._answers([message])
                continue
            client = message.metadata.dst_node_id - 1
            content = RecordDict({"diagnostics": MetricRecord({"client-id": client, **HONEST})})
            reply = Message(content, reply_to=message)
            if client == 3 and self.bad is not None:
                reply.__dict__["_content"] = self.bad  # an object that was inflated passes none of Flower's checks
            yield reply


def run(grid, **options):
    recorder = Kept()
    strategy = FedAvg(nothing(rounds=2), streams=Streams(0), registration_timeout=0.0, recorder=recorder, **options)
    result = strategy.start(grid, ZERO, 2)
    return result, strategy, recorder.lines


def reported(**changes):
    return RecordDict({"diagnostics": MetricRecord(HONEST | changes)})


BAD = {
    "accuracy above 1": reported(accuracy=1.5),
    "accuracy of another type": reported(accuracy=[0.5]),
    "NaN": reported(accuracy=float("nan")),
    "loss infinite": reported(loss=float("inf")),
    "cluster too large": reported(cluster=1),
    "cluster negative": reported(cluster=-1),
    "group too large": reported(group=CLIENTS),
    "group huge": reported(group=9999),
    "group a list": reported(group=[1, 2]),
    "examples": reported(**{"num-examples": 0}),
    "empty": RecordDict({"diagnostics": MetricRecord()}),
    "nothing": RecordDict(),
    "another record": RecordDict({"diagnostics": ConfigRecord({"accuracy": 0.5})}),
    "not a RecordDict": ArrayRecord({}),
}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_evaluation_costs_one_evaluation(kind):
    result, strategy, lines = run(Evaluated(BAD[kind]), evaluate_metrics_aggr_fn=summarise)
    assert [line["client_accuracy"] for line in lines] == [[0.5] * (CLIENTS - 1)] * 2
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert strategy.statistics.dropped.total() == 2


def test_an_evaluation_is_of_the_model_that_the_client_was_assigned():
    class Split(FedAvg):
        clustered = True

        def assignments(self, number):
            return dict.fromkeys(range(CLIENTS), 0)

    plan = nothing(num_clusters=2)  # so that cluster 1 is one of the run
    strategy = Split(plan, registration_timeout=0.0, evaluate_metrics_aggr_fn=summarise)
    grid = Evaluated(reported(cluster=1))
    strategy.configure_train(1, ZERO, ConfigRecord(), grid)
    messages = strategy.configure_evaluate(1, ZERO, ConfigRecord(), grid)
    metrics = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
    assert len(metrics["client_accuracy"]) == CLIENTS - 1
    assert strategy.statistics.dropped == {"cluster is 1; the server assigned cluster 0": 1}


@pytest.mark.parametrize("claimed", [0, [1, 2], 0.5])
def test_the_client_of_an_evaluation_is_the_one_that_was_asked(claimed):
    grid = Evaluated(reported(accuracy=1.0, **{"client-id": claimed}))
    result, strategy, _ = run(grid, evaluate_metrics_aggr_fn=summarise)
    accuracies = [0.5] * CLIENTS
    accuracies[3] = 1.0
    assert result.evaluate_metrics_clientapp[2]["client_accuracy"] == accuracies
    assert strategy.statistics.dropped == {}


def test_a_group_that_no_other_client_names_is_one_more_group():
    result, *_ = run(Evaluated(reported(group=2)), evaluate_metrics_aggr_fn=summarise)
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["group_accuracy"] == [0.5, 0.5]
    assert metrics["confusion"] == [CLIENTS - 1, 1]


def test_scalars_of_other_apps_are_averaged():
    result, *_ = run(Evaluated(RecordDict({"diagnostics": MetricRecord({"accuracy": 1.0, "f1": 0.25, "n": 2})})))
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["accuracy"] == pytest.approx((0.5 * 7 + 1) / 8)
    assert metrics["f1"] == 0.25
    assert metrics["n"] == 2


@pytest.mark.parametrize("key", sorted(RoundRecord.server_keys()))
def test_a_client_cannot_set_what_the_server_computes(key):
    _, _, honest = run(Evaluated())
    _, _, lines = run(Evaluated(reported(**{key: 0.001})))
    for line, expected in zip(lines, honest, strict=True):
        assert (key in line) == (key in expected)
        if key != "seconds" and key in expected:
            assert line[key] == expected[key]
        assert line.get(key) != 0.001


def test_keys_of_clients_are_bounded():
    def keys(*names):
        return mean_of_clients([RecordDict({"diagnostics": MetricRecord(dict.fromkeys(names, 1.0))})])

    assert dict(keys("a" * 100_050, "b\nround 9/9", "c\x1b[2J", "d\u202e", "e" * 101, "f")) == {"f": 1.0}
    assert len(keys(*(f"key {i}" for i in range(5000)))) == 100
    many = [{f"{client}-{i}": 1.0 for i in range(90)} | {"z": float(client)} for client in range(4)]
    means = mean_of_clients([RecordDict({"diagnostics": MetricRecord(each)}) for each in many])
    assert len(means) == 100
    assert means["z"] == 1.5  # the key of all clients stays


def test_numbers_that_are_not_finite_are_ignored():
    contents = [reported(accuracy=a, loss=loss) for a, loss in ((1.0, 1e308), (0.0, 1e308), (float("nan"), 1e308))]
    means = mean_of_clients(contents)
    assert means["accuracy"] == 0.5
    assert means["loss"] == pytest.approx(1e308)
    assert math.isfinite(means["loss"])
    assert dict(mean_of_clients([])) == {}


def test_an_aggregation_that_raises_costs_the_evaluation(caplog):
    def broken(contents):
        raise ZeroDivisionError("one\ntwo\x1b[2J")

    with caplog.at_level(logging.WARNING, "flwr"):
        result, strategy, lines = run(Evaluated(), evaluate_metrics_aggr_fn=broken)
    assert result.evaluate_metrics_clientapp == {}
    assert [line["round"] for line in lines] == [1, 2]
    assert strategy.statistics.accepted == 2 * CLIENTS
    (text, _) = [record.getMessage() for record in caplog.records if "evaluate_metrics_aggr_fn" in record.getMessage()]
    assert text.endswith(r"ZeroDivisionError: one\ntwo\x1b[2J")


def test_a_damaged_update_costs_one_reply():
    """Its shape is not even a list."""

    def spoil(client, content):
        if client == 3:
            content["update"]["output.bias"].__dict__["shape"] = 5
        return [content]

    strategy = FedAvg(nothing(), **quiet())
    result = strategy.start(Stub(spoil), ZERO, 1)
    assert strategy.statistics.accepted == CLIENTS - 1
    assert np.all(np.isfinite(next(iter(result.arrays.values())).numpy()))
