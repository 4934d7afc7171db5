"""A guarded run: unmodified FedAvg, the ledger by site, the budget of the run, and replies that are not guarded."""

import json
import math
from collections import Counter

import pytest
from federation import BATCH, QUIET, STEPS, TERMS, InProcess, N, client_app, context, dp_training, message, net
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from kit.tables import for_rows

from coterie.guard import Guard, GuardedServerApp, GuardError, certificate
from coterie.guard.report import GUARD, Report
from coterie.guard.server import GuardedGrid, RunLedger
from coterie.privacy import ClientLedger, Event, LedgerError, epsilon

pytestmark = QUIET
DELTA = TERMS["delta"]
EVENT = Event(BATCH / N, 1.0)
EPOCH = Counter({EVENT: STEPS})


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
    assert [site["site"] for site in document["sites"]] == ["1", "2"]
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
    assert [reason[:3] for reason in document["reasons"]] == ["2: "]
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
    assert [site["site"] for site in certificate(tmp_path / "ledger.jsonl")["sites"]] == ["0", "1"]


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
    assert [(site["site"], site["charges"]) for site in sites_of] == [("0", 1), ("1", 1)]


# ---- who is one site --------------------------------------------------------------------------------------------


def visits(out, sites, order, **budget):
    """Send a message to each node of ``order``, in turn; return the certificate, and which nodes got one."""
    grid = InProcess(sites)
    app = GuardedServerApp(delta=DELTA, out=out, **budget)

    @app.main()
    def main(grid, context):
        for node in order:
            list(grid.send_and_receive([message(node=node)]))

    app(grid, context(run=9))
    return json.loads((out / "guard.json").read_text()), [node for node, _ in grid.sent]


def deployed(tmp_path, ledger, **node):
    """A site as an owner deploys it: no number of a simulation."""
    return client_app(Guard()), TERMS | {"state-dir": str(tmp_path / ledger), "epsilon": 100.0} | node


@pytest.mark.parametrize("name", [{"site": "hospital-a"}, {}], ids=["named", "unnamed"])
def test_a_site_that_returns_with_new_keys_is_one_site(tmp_path, name):
    """Each restart has a new key, and with it a new node id."""
    restarts = [deployed(tmp_path, "a", **name)] * 4
    document, sent = visits(tmp_path / "run", restarts, [1, 2, 3, 4])
    assert sent == [1, 2, 3, 4]
    truth = certificate(tmp_path / "a" / "client-0.ledger.jsonl")
    assert truth["epsilon"] == pytest.approx(epsilon({EVENT: 4 * STEPS}, DELTA))
    assert document["epsilon"] == truth["epsilon"]
    (site,) = document["sites"]
    assert (site["charges"], site["nodes"]) == (4, 4)


def test_sites_with_names_are_certified_apart(tmp_path):
    sites = [deployed(tmp_path, "a", site="a"), deployed(tmp_path, "b", site="b")] * 2
    document, _ = visits(tmp_path / "run", sites, [1, 2, 3])
    assert [(site["site"], site["nodes"], site["charges"]) for site in document["sites"]] == [("a", 2, 2), ("b", 1, 1)]
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 2 * STEPS}, DELTA))
    assert document["notes"] == []
    assert any("one site name" in line for line in document["assumed"])
    assert document == certificate(tmp_path / "run" / "ledger.jsonl")


def test_nodes_without_a_name_are_composed_and_the_certificate_states_the_way_out(tmp_path):
    sites = [deployed(tmp_path, "a"), deployed(tmp_path, "b"), deployed(tmp_path, "c", site="c")]
    document, _ = visits(tmp_path / "run", sites, [1, 2, 3])
    assert [(site["nodes"], site["charges"]) for site in document["sites"]] == [(1, 1), (2, 2)]
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 2 * STEPS}, DELTA))
    assert document["certified"]
    (note,) = document["notes"]
    assert "2 nodes without a name" in note
    assert "set site in the node configuration" in note


def reported(tmp_path, *claims, budget=math.inf):
    """The ledger of a run with a report for each pair of a node and a name."""
    ledger = RunLedger(tmp_path, budget, DELTA, "1")
    for node, name in claims:
        ledger.record(node, Report(N, EPOCH, True, site=name))
    return ledger


def test_nodes_and_names_that_reports_connect_are_one_site(tmp_path):
    """A node has the records of one owner, and so has a name."""
    claims = [(1, "a"), (2, "b"), (1, "b"), (3, "b"), (4, "c"), (5, ""), (6, "d"), (5, "d")]
    reported(tmp_path, *claims).close()
    document = certificate(tmp_path / "ledger.jsonl")
    found = {site["site"]: (site["nodes"], site["charges"]) for site in document["sites"]}
    assert found == {"a, b": (3, 4), "c": (1, 1), "d, nodes without a name": (2, 3)}
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 4 * STEPS}, DELTA))


def test_the_budget_counts_what_nodes_and_names_connect(tmp_path):
    ledger = reported(tmp_path, (1, "a"), (2, "b"), budget=epsilon({EVENT: 3 * STEPS}, DELTA) + 1e-6)
    assert ledger.allows(ledger.site(1))
    assert ledger.allows(ledger.site(2))
    ledger.record(1, Report(N, EPOCH, True, site="b"))
    assert ledger.site(1) == ledger.site(2)
    assert not ledger.allows(ledger.site(1))
    ledger.close()
    again = RunLedger(tmp_path, epsilon({EVENT: 3 * STEPS}, DELTA) + 1e-6, DELTA, "1")
    assert again.site(1) == again.site(2) != again.site(3)
    again.close()


@pytest.mark.parametrize("report", [(1, "b"), (2, "a")], ids=["of another name", "of another node"])
def test_an_evaluation_keeps_what_is_known_of_a_site(tmp_path, report):
    """The latest training message of a site is the measure of its next one."""
    node, name = report
    ledger = reported(tmp_path, (1, "a"), budget=TWICE)
    ledger.record(node, Report(N, Counter(), True, site=name))
    assert ledger.allows(ledger.site(1))
    assert not ledger.allows(ledger.site(1), under_way=1)
    ledger.close()


def test_ledgers_of_runs_before_sites_had_names_are_of_one_site(tmp_path):
    ledger = ClientLedger(DELTA, 8.0, tmp_path / "ledger.jsonl", about={"guard": "run", "run": "1"})
    for node in ("1", "2"):
        guard = {"site": node, "num_examples": N, "verified": True, "allow": []}
        ledger.record(1, EPOCH, guard=guard)
    ledger.close()
    document = certificate(tmp_path / "ledger.jsonl")
    assert document["epsilon"] == pytest.approx(epsilon({EVENT: 2 * STEPS}, DELTA))
    assert len(document["notes"]) == 1


TWICE = epsilon({EVENT: 2 * STEPS}, DELTA) + 1e-6


def test_the_budget_of_a_run_is_per_site_and_not_per_node(tmp_path):
    sites = [deployed(tmp_path, "a", site="a")] * 2 + [deployed(tmp_path, "b", site="b")]
    document, sent = visits(tmp_path / "run", sites, [1, 2, 1, 2, 3, 3, 3], epsilon=TWICE)
    assert sent == [1, 2, 3, 3]
    assert document["certified"]


def test_nodes_without_a_name_share_the_budget_of_a_run_also_new_ones(tmp_path):
    sites = [deployed(tmp_path, str(i)) for i in range(3)]
    document, sent = visits(tmp_path / "run", sites, [1, 2, 3, 1], epsilon=TWICE)
    assert sent == [1, 2]
    assert document["certified"]


def test_messages_that_are_under_way_count(tmp_path):
    """Two nodes of one site: only one more message fits the budget."""
    sites = [deployed(tmp_path, "a", site="a")] * 2 + [deployed(tmp_path, "b", site="b")]
    inner = InProcess(sites)
    inner.push_messages = lambda messages: [each.metadata.message_id for each in messages]
    ledger = reported(tmp_path, (1, "a"), (2, "a"), (3, "b"), budget=epsilon({EVENT: 3 * STEPS}, DELTA) + 1e-6)
    grid = GuardedGrid(inner, ledger)
    assert len(list(grid.push_messages([message(node=1, kind="evaluate")]))) == 1  # costs nothing
    assert len(list(grid.push_messages([message(node=1), message(node=2), message(node=3)]))) == 2
    assert len(list(grid.push_messages([message(node=2), message(node=3)]))) == 1
    assert len(list(grid.push_messages([message(node=3), message(node=2, kind="evaluate")]))) == 1
    ledger.close()


def test_a_message_that_was_answered_is_no_longer_under_way(tmp_path):
    inner = InProcess([deployed(tmp_path, "a", site="a")])
    failed, sent = [], []
    inner.push_messages = lambda messages: [sent.append(each) or each.metadata.message_id for each in messages]
    inner.pull_messages = lambda ids: [
        Message(Error(0, "the node failed"), reply_to=each) for each in sent if each.metadata.message_id in ids
    ]
    ledger = reported(tmp_path, (1, "a"), budget=TWICE)
    grid = GuardedGrid(inner, ledger)
    for _ in range(3):
        ids = list(grid.push_messages([message(node=1)]))
        assert len(ids) == 1
        failed += grid.pull_messages(ids)
    assert [reply.has_error() for reply in failed] == [True] * 3
    ledger.close()


HONEST = dict(Report(N, Counter({EVENT: 5}), True, ("accuracy",), "hospital-a").record())


@for_rows(
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
        {"site": 1},
        {"site": "a\nb"},
        {"site": " a"},
        {"site": "a" * 65},
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
        ledger.record(1, Report.parse(Report(N, events, True, site="a").record()))
    assert not ledger.allows(ledger.site(1))
    assert ledger.allows(ledger.site(2))
    ledger.close()
    document = certificate(tmp_path / "ledger.jsonl")
    assert not document["certified"]
    assert document["epsilon"] > 1e6


@for_rows("record", [None, ArrayRecord()])
def test_no_report(record):
    with pytest.raises(GuardError, match="not from a guarded site"):
        Report.parse(record)


@for_rows("budget", [{"epsilon": 0.0}, {"epsilon": math.nan}, {"epsilon": -1.0}])
def test_bad_budgets(budget):
    with pytest.raises(GuardError, match="epsilon"):
        GuardedServerApp(delta=DELTA, **budget)
