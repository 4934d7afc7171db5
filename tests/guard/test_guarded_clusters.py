"""ClusteredClientApp with the guard among its mods: clusters at the server, record level at the sites, one ledger."""

import json

import numpy as np
import pytest
import torch
from federation import BATCH, QUIET, N, dp_training, net
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from coterie.client import ClusteredClientApp
from coterie.engine import InProcessGrid
from coterie.guard import Guard, GuardedServerApp, certificate
from coterie.guard.report import GUARD
from coterie.privacy import Event, NoPrivacy, epsilon
from coterie.strategies import CFL, IFCA, KMCDPFL
from coterie.wire import EvaluateRequest, TrainRequest
from coterie.wire.messages import Layout, pack_models

pytestmark = QUIET
DELTA, STEPS = 1e-3, N // BATCH
LAYOUT = Layout.of(net().state_dict())
MODELS = np.stack([LAYOUT.flatten(net().state_dict())] * 2) + np.array([[0.0], [0.2]], np.float32)


def app(folder, allow=(), train=dp_training, budget=8.0):
    made = ClusteredClientApp(
        mods=[Guard(epsilon=budget, delta=DELTA, num_examples=N, state_dir=folder, allow=allow)], loss="loss"
    )

    def load(message):
        model = net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model

    @made.train()
    def _(message, context):
        model = load(message)
        train(model, {})
        metrics = MetricRecord({"num-examples": 17, "train_loss": 0.125})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    @made.evaluate()
    def _(message, context):
        with torch.no_grad():
            loss = float(sum(values.square().sum() for values in load(message).parameters()))
        return Message(RecordDict({"m": MetricRecord({"loss": loss, "eval_acc": 0.5})}), reply_to=message)

    return made


def ask(made, request, models=MODELS):
    grid = InProcessGrid(made, 3)
    content = RecordDict({"models": pack_models(models, LAYOUT), "config": ConfigRecord(request.to_record())})
    message = Message(content, dst_node_id=2, message_type=type(request).message_type)
    (reply,) = grid.send_and_receive([message])
    return reply


def ledgers(folder):
    return sorted(folder.glob("*.ledger.jsonl"))


def guarded_run(folder, made, strategy, rounds=2, budget=float("inf")):
    """Run a strategy, and return the certificate of the run."""
    server = GuardedServerApp(delta=DELTA, epsilon=budget, out=folder / "run")

    @server.main()
    def _(grid, context):
        strategy.start(grid, ArrayRecord(net().state_dict()), rounds)

    server(InProcessGrid(made, strategy.plan.clients), Context(1, 1, {}, RecordDict(), {}))
    return json.loads((folder / "run" / "guard.json").read_text())


def plain(clients=4, k=2, rounds=2):
    return NoPrivacy(clients=clients, num_clusters=k, sampling_rate=1.0, rounds=rounds)


def test_an_assigned_cluster_is_trained_and_charged(tmp_path):
    reply = ask(app(tmp_path), TrainRequest(round=1, cluster=1), MODELS[1:])
    assert set(reply.content) == {"update", "reply", GUARD}
    assert reply.content["reply"]["label"] == 1
    assert reply.content[GUARD]["count"] == [STEPS]
    assert reply.content[GUARD]["site"] == "1"
    (path,) = ledgers(tmp_path)
    assert certificate(path)["epsilon"] == pytest.approx(epsilon({Event(BATCH / N, 1.0): STEPS}, DELTA))


def test_a_choice_by_loss_is_refused_before_it_costs_anything(tmp_path):
    reply = ask(app(tmp_path), TrainRequest(round=1))
    assert "the app failed in evaluate" in reply.error.reason
    assert not ledgers(tmp_path)


@pytest.mark.parametrize("allow", [["evaluate"], ["loss"], ["evaluate", "eval_acc"]])
def test_half_a_permission_is_none(tmp_path, allow):
    assert ask(app(tmp_path, allow), TrainRequest(round=1)).has_error()
    assert not ledgers(tmp_path)


def test_an_owner_may_allow_the_choice_which_the_certificate_lists(tmp_path):
    reply = ask(app(tmp_path, ["evaluate", "loss"]), TrainRequest(round=1))
    assert reply.content["reply"]["label"] == 0  # the smaller parameters
    (path,) = ledgers(tmp_path)
    outside = certificate(path)["outside"]
    assert {"evaluate, by permission of the owner", "loss, by permission of the owner"} <= set(outside)


def test_the_accuracy_leaves_by_permission_alone(tmp_path):
    request = EvaluateRequest(round=1, cluster=0)
    assert ask(app(tmp_path), request, MODELS[:1]).has_error()
    content = ask(app(tmp_path, ["evaluate", "eval_acc"]), request, MODELS[:1]).content
    assert dict(content["diagnostics"]) == {"accuracy": 0.5}


def test_training_that_is_not_private_is_refused(tmp_path):
    def exact(model, config):
        nn.init.constant_(model[0].weight, 0.5)

    assert ask(app(tmp_path, train=exact), TrainRequest(round=1, cluster=0), MODELS[:1]).has_error()


@pytest.mark.parametrize("strategy", [KMCDPFL, CFL])
def test_clusters_at_the_server_are_certified_by_one_ledger(tmp_path, strategy):
    made = strategy(plain(), evaluate_every=0)
    document = guarded_run(tmp_path, app(tmp_path / "sites"), made)
    assert document["certified"], document["reasons"]
    assert [site["site"] for site in document["sites"]] == ["0", "1", "2", "3"]
    assert made.statistics.accepted == 8
    expected = epsilon({Event(BATCH / N, 1.0): 2 * STEPS}, DELTA)
    assert document["epsilon"] == pytest.approx(expected)
    assert [certificate(path)["epsilon"] for path in ledgers(tmp_path / "sites")] == pytest.approx([expected] * 4)


def test_ifca_needs_the_owner_s_permission(tmp_path):
    made = IFCA(plain(), evaluate_every=0)
    guarded_run(tmp_path, app(tmp_path / "sites"), made, 1)
    assert made.statistics.accepted == 0
    made = IFCA(plain(), evaluate_every=0)
    document = guarded_run(tmp_path / "two", app(tmp_path / "two" / "sites", ["evaluate", "loss"]), made, 1)
    assert made.statistics.accepted == 4
    assert "loss, by permission of the owner" in document["outside"]


def test_the_site_s_budget_ends_the_run_for_it(tmp_path):
    one = epsilon({Event(BATCH / N, 1.0): STEPS}, DELTA)
    made = KMCDPFL(plain(rounds=3), evaluate_every=0)
    document = guarded_run(tmp_path, app(tmp_path / "sites", budget=1.01 * one), made, 3)
    assert made.statistics.accepted == 4
    assert document["epsilon"] == pytest.approx(one)


def test_the_introduction_of_a_guarded_site_is_from_its_terms(tmp_path):
    for allow, evaluates in (((), False), (["evaluate"], True)):
        grid = InProcessGrid(app(tmp_path, allow), 3)
        (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=3, message_type="query.identity")])
        assert (reply.content["reply"]["client-id"], reply.content["reply"]["evaluates"]) == (2, evaluates)
        assert reply.content[GUARD]["count"] == []
