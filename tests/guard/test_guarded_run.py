"""A guarded run: unmodified FedAvg, the ledger by site, the budget of the run, and replies that are not guarded."""

import json
import math
from collections import Counter

import pytest
from federation import BATCH, STEPS, TERMS, InProcess, N, client_app, context, dp_training, message, net
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from coterie.guard import Guard, GuardedServerApp, GuardError, certificate
from coterie.guard.report import GUARD, Report
from coterie.guard.server import GuardedGrid, RunLedger
from coterie.privacy import Event, LedgerError, epsilon

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
DELTA = TERMS["delta"]
EVENT = Event(BATCH / N, 1.0)


@pytest.fixture
def sites(tmp_path):
    """Three guarded sites."""
    return [(client_app(Guard()), TERMS | {"partition-id": i, "state-dir": str(tmp_path / "sites")}) for i in range(3)]


def run(sites, out, rounds=2, config=None, **budget):
    """Train by FedAvg; return its result, the grid, and the certificate."""
    grid, results = InProcess(sites), []
    app = GuardedServerApp(delta=DELTA, out=out, **budget)

    @app.main()
    def main(grid, context):
        strategy = FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2)
        train_config = ConfigRecord(config or {})
        results.append(strategy.start(grid, ArrayRecord(net().state_dict()), rounds, train_config=train_config))

    app(grid, context(run=9))
    return results[0], grid, json.loads((out / "guard.json").read_text())


def test_fedavg_runs_unmodified_and_is_certified(sites, tmp_path):
    result, _, document = run(sites, tmp_path / "run")
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert not result.evaluate_metrics_clientapp
    assert document["certified"], document["reasons"]
    assert [site["charges"] for site in document["sites"]] == [2, 2, 2]
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 2 * STEPS}, DELTA))
    for i in range(3):
        own = certificate(tmp_path / "sites" / f"client-{i}.ledger.jsonl")
        assert own["epsilon"] == document["epsilon"]
        assert own["certified"]
    assert document == certificate(tmp_path / "run" / "ledger.jsonl")


def test_the_run_states_its_worst_site(sites, tmp_path):
    def noisier(model, config):
        dp_training(model, {"noise": 2.0})

    sites[1] = (client_app(Guard(), noisier), sites[1][1])
    document = run(sites, tmp_path / "run")[2]
    costs = [site["epsilon"] for site in document["sites"]]
    assert costs[1] == pytest.approx(epsilon({Event(BATCH / N, 2.0): 2 * STEPS}, DELTA))
    assert costs[1] < costs[0] == costs[2] == document["epsilon"]


def test_a_site_that_spent_the_budget_of_the_run_is_left_out(sites, tmp_path):
    budget = epsilon({EVENT: 2 * STEPS}, DELTA) + 1e-6
    result, grid, document = run(sites, tmp_path / "run", rounds=4, epsilon=budget)
    assert Counter(node for node, kind in grid.sent if kind == "train") == {1: 2, 2: 2, 3: 2}
    assert document["certified"]
    assert document["epsilon"] <= document["epsilon_budget"] == budget
    assert result.arrays


def test_a_site_past_its_own_budget_drops_out_and_the_others_go_on(sites, tmp_path):
    sites[0] = (sites[0][0], sites[0][1] | {"epsilon": epsilon({EVENT: STEPS}, DELTA) + 1e-6})
    result, _, document = run(sites, tmp_path / "run")
    assert [site["charges"] for site in document["sites"]] == [1, 2, 2]
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_message_more_than_the_run_can_pay_is_not_certified(sites, tmp_path):
    document = run(sites, tmp_path / "run", rounds=1, epsilon=1.0)[2]  # the first message has no precedent
    assert not document["certified"]
    assert "above 1" in document["reasons"][0]


def test_replies_without_a_guard_do_not_reach_the_app(sites, tmp_path):
    app = client_app(Guard())
    bare = ClientApp()
    bare._registered_funcs = {
        name: lambda message, context, inner=inner: _without(inner(message, context))
        for name, inner in app._registered_funcs.items()
    }
    sites[0] = (bare, sites[0][1])
    result, grid, document = run(sites, tmp_path / "run", rounds=1)
    assert [site["site"] for site in document["sites"]] == ["2", "3"]
    assert len(grid.sent) == 6
    assert set(result.train_metrics_clientapp) == {1}
    ledger = RunLedger(tmp_path, math.inf, DELTA, "1")
    replies = GuardedGrid(InProcess(sites), ledger).send_and_receive([message(node=1), message(node=2)])
    ledger.close()
    assert [reply.has_error() for reply in replies] == [True, False]


def _without(reply):
    if reply.has_content():
        del reply.content[GUARD]
    return reply


def test_a_declared_site_is_not_certified(sites, tmp_path):
    declared = {"noise-multiplier": 1.0, "sampling-rate": BATCH / N, "steps": STEPS}
    sites[2] = (sites[2][0], sites[2][1] | declared)
    document = run(sites, tmp_path / "run")[2]
    assert not document["certified"]
    assert [reason[:3] for reason in document["reasons"]] == ["3: "]
    assert [site["verified"] for site in document["sites"]] == [True, True, False]
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 2 * STEPS}, DELTA))


def test_what_owners_allow_is_outside_the_certificate(sites, tmp_path):
    allowed = [(app, node | {"allow": "evaluate accuracy"}) for app, node in sites]
    result, _, document = run(allowed, tmp_path / "run")
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.75)
    assert "loss" not in result.evaluate_metrics_clientapp[2]
    for name in ("evaluate", "accuracy"):
        assert any(line.startswith(name) for line in document["outside"])
    assert not any(line.startswith("accuracy") for line in run(sites, tmp_path / "other")[2]["outside"])


def test_the_certificate_is_written_if_the_app_fails(sites, tmp_path):
    app = GuardedServerApp(delta=DELTA, out=tmp_path / "run")

    @app.main()
    def main(grid, context):
        list(grid.send_and_receive([message(node=1)]))
        raise KeyError("of the app")

    with pytest.raises(KeyError):
        app(InProcess(sites), context())
    assert json.loads((tmp_path / "run" / "guard.json").read_text())["sites"][0]["charges"] == 1


def test_a_run_without_replies_has_a_certificate_of_nothing(tmp_path):
    app = GuardedServerApp(delta=DELTA, out=tmp_path / "run")
    app.main()(lambda grid, context: None)
    app(InProcess([]), context())
    assert json.loads((tmp_path / "run" / "guard.json").read_text())["epsilon"] == 0


def test_a_folder_of_another_run_is_refused(sites, tmp_path):
    run(sites, tmp_path / "run", rounds=1)
    with pytest.raises(LedgerError, match="another plan"):
        RunLedger(tmp_path / "run", math.inf, DELTA, "10")


def test_messages_that_are_pushed_and_pulled_are_recorded_too(sites, tmp_path):
    inner, sent = InProcess(sites), []

    def pull(ids):
        for name, reply in zip(ids, inner.send_and_receive(sent), strict=True):
            reply.metadata.__dict__["_reply_to_message_id"] = name
            yield reply

    inner.push_messages = lambda messages: [sent.append(each) or f"id-{len(sent)}" for each in messages]
    inner.pull_messages = pull
    ledger = RunLedger(tmp_path, math.inf, DELTA, "1")
    grid = GuardedGrid(inner, ledger)
    replies = grid.pull_messages(grid.push_messages([message(node=1), message(node=2)]))
    ledger.close()
    assert all(GUARD not in reply.content for reply in replies)
    assert [site["site"] for site in certificate(tmp_path / "ledger.jsonl")["sites"]] == ["1", "2"]


def test_a_site_cannot_charge_another_one_or_reply_twice(sites, tmp_path):
    """src_node_id is under the control of the sender; which message a reply answers is verified by the SuperLink."""

    class Posing(InProcess):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                reply.metadata.__dict__["_src_node_id"] = 1
            return [*replies, *replies]

    ledger = RunLedger(tmp_path, math.inf, DELTA, "1")
    grid = GuardedGrid(Posing(sites), ledger)
    replies = grid.send_and_receive([message(node=1), message(node=2)])
    ledger.close()
    assert [reply.has_error() for reply in replies] == [False, False, True, True]
    sites_of = certificate(tmp_path / "ledger.jsonl")["sites"]
    assert [(site["site"], site["charges"]) for site in sites_of] == [("1", 1), ("2", 1)]


HONEST = dict(Report(N, Counter({EVENT: 5}), True, ("accuracy",)).record())


def test_a_report_survives_its_record():
    assert Report.parse(ConfigRecord(HONEST)) == Report(N, Counter({EVENT: 5}), True, ("accuracy",))


@pytest.mark.parametrize(
    "change",
    [
        {"num-examples": 0},
        {"num-examples": True},
        {"num-examples": 40.0},
        {"num-examples": 10**12},
        {"verified": 1},
        {"allow": "accuracy"},
        {"allow": ["a\nb"]},
        {"allow": ["a" * 65]},
        {"allow": ["a"] * 65},
        {"sampling-rate": [0.0]},
        {"sampling-rate": [1.5]},
        {"sampling-rate": [math.nan]},
        {"sampling-rate": [1e-300]},
        {"noise-multiplier": [1e300]},
        {"noise-multiplier": [0.01]},
        {"sampling-rate": [0.2] * 17, "noise-multiplier": [1.0] * 17, "count": [1] * 17},
        {"sampling-rate": [0.2, 0.2]},
        {"sampling-rate": 0.2},
        {"sampling-rate": ["0.2"]},
        {"noise-multiplier": [-1.0]},
        {"noise-multiplier": [math.inf]},
        {"noise-multiplier": [math.nan]},
        {"count": [0]},
        {"count": [-5]},
        {"count": [10**9]},
        {"count": [1.0]},
        *({name: None} for name in HONEST),
    ],
)
def test_a_malformed_report_is_refused(change):
    values = {name: value for name, value in (HONEST | change).items() if value is not None}
    with pytest.raises(GuardError):
        Report.parse(ConfigRecord(values))


def test_a_site_that_reports_an_enormous_cost_costs_the_server_no_time(tmp_path):
    ledger = RunLedger(tmp_path, 8.0, DELTA, "1")
    events = Counter({Event(0.5, 0.1 + i / 100): 10**6 for i in range(16)})
    for _ in range(3):
        ledger.record(1, Report.parse(Report(N, events, True).record()))
    assert not ledger.allows(1)
    assert ledger.allows(2)
    ledger.close()
    document = certificate(tmp_path / "ledger.jsonl")
    assert not document["certified"]
    assert document["epsilon"] > 1e6


@pytest.mark.parametrize("record", [None, ArrayRecord()])
def test_no_report(record):
    with pytest.raises(GuardError, match="not from a guarded site"):
        Report.parse(record)


@pytest.mark.parametrize("budget", [{"epsilon": 0.0}, {"epsilon": math.nan}, {"epsilon": -1.0}])
def test_bad_budgets(budget):
    with pytest.raises(GuardError, match="epsilon"):
        GuardedServerApp(delta=DELTA, **budget)
