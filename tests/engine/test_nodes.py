"""InProcessGrid runs any ClientApp on any strategy, as Flower's simulation does."""

import bdb
import gc
import logging
import pdb
import random

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.server import ServerApp as OldServerApp
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from kit.tables import for_rows

from coterie.client import ClusteredClientApp
from coterie.engine import InProcessGrid
from coterie.privacy import NoPrivacy, Streams
from coterie.strategies import IFCA

ZERO = ArrayRecord([np.zeros(3, np.float32)])


def linear_app(mods=(), kind=ClientApp):
    """Clients that fit a line to points of their own by gradient descent, and evaluate it."""
    app = kind(mods=list(mods))

    def points(context):
        rng = np.random.default_rng(context.node_config["partition-id"])
        x = rng.standard_normal((20, 3)).astype(np.float32)
        return x, x @ np.array([1, -2, 0.5], np.float32) + 0.1 * rng.standard_normal(20).astype(np.float32)

    @app.train()
    def train(message, context):
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        x, y = points(context)
        for _ in range(context.run_config.get("local-steps", 3)):
            weights = weights - message.content["config"]["lr"] * x.T @ (x @ weights - y) / len(y)
        metrics = {"num-examples": len(y), "loss": float(((x @ weights - y) ** 2).mean())}
        content = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        x, y = points(context)
        metrics = {"num-examples": len(y), "eval_loss": float(((x @ weights - y) ** 2).mean())}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def run(grid, strategy=FedAvg, rounds=3, **options):
    random.seed(0)  # by which strategies of Flower order nodes
    result = strategy(**options).start(grid, ZERO, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1}))
    return result.arrays.to_numpy_ndarrays()[0], result


def ask(grid, kind="query", nodes=(1,), **config):
    messages = [Message(RecordDict({"config": ConfigRecord(config)}), dst_node_id=n, message_type=kind) for n in nodes]
    return list(grid.send_and_receive(messages))


def query_app(answer, mods=()):
    app = ClientApp(mods=list(mods))
    app.query()(answer)
    return app


def echo(message, context, **values):
    return Message(RecordDict({"reply": ConfigRecord(values)}), reply_to=message)


@for_rows("strategy", [FedAvg, FedMedian, FedAdam])
def test_strategies_of_flower_learn_and_repeat_exactly(strategy):
    outcomes = [run(InProcessGrid(linear_app(), 4), strategy, rounds=5) for _ in range(2)]
    np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
    losses = [metrics["eval_loss"] for metrics in outcomes[0][1].evaluate_metrics_clientapp.values()]
    assert losses[-1] < losses[0]


def test_the_run_configuration_arrives():
    few, many = (run(InProcessGrid(linear_app(), 2, run_config={"local-steps": n}))[0] for n in (1, 30))
    assert np.linalg.norm(many) > 2 * np.linalg.norm(few)


def test_node_configurations_are_those_of_a_simulation_or_as_given():
    def answer(message, context):
        return echo(message, context, **context.node_config)

    replies = ask(InProcessGrid(query_app(answer), 3), nodes=(1, 3))
    assert [dict(r.content["reply"]) for r in replies] == [
        {"partition-id": 0, "num-partitions": 3},
        {"partition-id": 2, "num-partitions": 3},
    ]
    replies = ask(InProcessGrid(query_app(answer), [{"site": "a"}, {"site": "b", "epsilon": 1.0}]), nodes=(2,))
    assert dict(replies[0].content["reply"]) == {"site": "b", "epsilon": 1.0}


def test_mods_wrap_the_app_in_order():
    def mod(name):
        def wrapped(message, context, call_next):
            message.content["config"]["seen"] = message.content["config"]["seen"] + name
            return call_next(message, context)

        return wrapped

    app = query_app(lambda m, c: echo(m, c, seen=m.content["config"]["seen"]), [mod("a"), mod("b")])
    (reply,) = ask(InProcessGrid(app, 1), seen="")
    assert reply.content["reply"]["seen"] == "ab"


def counting(message, context):
    count = context.state.get("count", ConfigRecord({"n": 0}))["n"] + 1
    context.state["count"] = ConfigRecord({"n": count})
    if message.content["config"].get("fail"):
        raise RuntimeError("after the state has changed")
    return echo(message, context, n=count)


def test_the_state_of_a_node_lasts_from_message_to_message():
    grid = InProcessGrid(query_app(counting), 2)
    counts = [reply.content["reply"]["n"] for nodes in ((1, 2), (1,), (1, 2)) for reply in ask(grid, nodes=nodes)]
    assert counts == [1, 1, 2, 3, 2]
    assert grid.contexts[1].state["count"]["n"] == 3


def test_a_failed_message_leaves_the_state_as_it_was():
    grid = InProcessGrid(query_app(counting), 1)
    ask(grid)
    (failed,) = ask(grid, fail=True)
    assert failed.has_error()
    assert ask(grid)[0].content["reply"]["n"] == 2


def test_nodes_share_no_object_with_the_server_or_with_each_other():
    kept = []

    def answer(message, context):
        before = message.content["config"]["value"]
        message.content["config"]["value"] = before + 1
        context.run_config["changed"] = True
        reply = echo(message, context, before=before, changed=len(context.run_config))
        kept.append(reply.content)
        return reply

    grid = InProcessGrid(query_app(answer), 3, run_config={"a": 1})
    content = RecordDict({"config": ConfigRecord({"value": 5})})
    replies = grid.send_and_receive([Message(content, dst_node_id=n, message_type="query") for n in (1, 2, 3)])
    kept[0]["reply"]["before"] = 99
    assert [reply.content["reply"]["before"] for reply in replies] == [5, 5, 5]
    assert [reply.content["reply"]["changed"] for reply in replies] == [2, 2, 2]
    assert content["config"]["value"] == 5


class OddError(Exception):
    """Raised by an app."""


def fails(error):
    def answer(message, context):
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (fails(OddError("no data")), ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "OddError'>:<'no data'>"),
        (fails(ImportError("no module")), ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no module"),
        (fails(SystemExit(3)), ErrorCode.CLIENT_APP_CRASHED, "SystemExit"),
        (lambda m, c: None, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "returned NoneType, expected a Message"),
        (lambda m, c: m, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "pass reply_to=message"),
    ],
)
def test_what_an_app_raises_becomes_an_error_reply(answer, code, text, caplog):
    logging.getLogger("flwr").propagate = True
    app = query_app(lambda m, c: answer(m, c) if c.node_config["partition-id"] == 1 else echo(m, c, ok=True))
    one, failed, three = ask(InProcessGrid(app, 3), nodes=(1, 2, 3))
    assert one.content["reply"]["ok"]
    assert three.content["reply"]["ok"]
    assert failed.error.code == code
    assert text in failed.error.reason
    assert failed.metadata.src_node_id == 2
    with pytest.raises((OddError, ImportError, SystemExit, TypeError, ValueError)):
        ask(InProcessGrid(app, 3, raise_errors=True), nodes=(2,))


def test_an_unknown_node_or_message_type_is_an_error_reply():
    grid = InProcessGrid(query_app(echo), 2)
    (reply,) = ask(grid, nodes=(3,))
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
    assert "nodes are 1 to 2" in reply.error.reason
    (reply,) = ask(grid, "train")
    assert "No train function" in reply.error.reason


def test_strategies_go_on_without_a_failed_node():
    app = linear_app([lambda m, c, call: call(m, c) if c.node_config["partition-id"] else fails(OddError("x"))(m, c)])
    weights, _ = run(InProcessGrid(app, 3))
    assert np.isfinite(weights).all()
    assert weights.any()


def test_the_debugger_stops_in_this_process_and_leaving_it_ends_the_run(monkeypatch):
    commands = iter(["p secret", "q"])
    printed = []
    monkeypatch.setattr("builtins.input", lambda prompt="": next(commands))

    class Debugger(pdb.Pdb):
        def message(self, text):
            printed.append(text)

    def answer(message, context):
        secret = 41 + 1
        Debugger(nosigint=True).set_trace()
        return echo(message, context, secret=secret)

    with pytest.raises(bdb.BdbQuit):
        ask(InProcessGrid(query_app(answer), 1))
    assert "42" in printed


def test_pushed_messages_are_pulled_once():
    grid = InProcessGrid(query_app(lambda m, c: echo(m, c, node=c.node_id)), 2)
    ids = list(grid.push_messages([grid.create_message(RecordDict(), "query", n, "") for n in (1, 2)]))
    assert [r.content["reply"]["node"] for r in grid.pull_messages(ids[::-1])] == [2, 1]
    assert list(grid.pull_messages([*ids, "unknown"])) == []


@for_rows("nodes", [0, -2, [], ()])
def test_a_grid_needs_nodes_and_a_client_app(nodes):
    with pytest.raises(ValueError, match="nodes must be"):
        InProcessGrid(linear_app(), nodes)
    with pytest.raises(TypeError, match="not module"):
        InProcessGrid(random, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_apps_of_flowers_old_interface_run():
    class Client(NumPyClient):
        def fit(self, parameters, config):
            return [parameters[0] + 1], 10, {}

        def evaluate(self, parameters, config):
            return float(parameters[0].sum()), 10, {}

    def server(context):
        from flwr.common import ndarrays_to_parameters
        from flwr.server import ServerAppComponents

        strategy = OldFedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(2)]))
        histories.append(strategy)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

    histories = []
    app = ClientApp(lambda context: Client().to_client())
    OldServerApp(server_fn=server)(InProcessGrid(app, 3), Context(1, 1, {}, RecordDict(), {}))
    assert histories


def by_ifca(grid):
    """Run Coterie's IFCA with two models; return them."""
    plan = NoPrivacy(clients=4, num_clusters=2, sampling_rate=1.0, rounds=3)
    strategy = IFCA(plan, streams=Streams(5), evaluate_every=0, registration_timeout=600.0)
    result = strategy.start(grid, ZERO, 3, train_config=ConfigRecord({"lr": 0.1}))
    assert strategy.statistics.accepted == 12
    return np.stack(result.arrays.to_numpy_ndarrays())


def by_fedavg(grid):
    """Run Flower's FedAvg; return the model."""
    return run(grid, min_train_nodes=4, min_evaluate_nodes=4)[0]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:ray")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("train", "kind"), [(by_fedavg, ClientApp), (by_ifca, ClusteredClientApp)])
def test_flowers_simulation_gives_the_same_models(train, kind):
    from flwr.simulation import run_simulation

    server, theirs = ServerApp(), []

    @server.main()
    def main(grid, context):
        theirs.append(train(grid))

    run_simulation(
        server, linear_app(kind=kind), num_supernodes=4, backend_config={"client_resources": {"num_cpus": 1}}
    )
    gc.collect()
    ours = [train(InProcessGrid(linear_app(kind=kind), 4)) for _ in range(2)]
    np.testing.assert_array_equal(*ours)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    assert np.abs(ours[0]).max() > 0.1
