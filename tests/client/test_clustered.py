"""ClusteredClientApp puts an app of arrays in, arrays out under Coterie's strategies, and nothing else leaves."""

import bdb
import json
from dataclasses import asdict

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from kit.tables import for_rows

from coterie.client import ClusteredClientApp
from coterie.client.state import ClientError
from coterie.engine import InProcessGrid
from coterie.privacy import Joint, NoPrivacy, RecordPlan
from coterie.strategies import IFCA, LCFL, FedProx
from coterie.testing import check_client
from coterie.wire import EvaluateRequest, LossesRequest, TrainRequest
from coterie.wire.messages import Layout, pack_models, read_reply

LAYOUT = Layout(("w", "b"), ((3,), ()))
#: Models 0 and 1 of the two groups of clients, and one of nobody.
TRUE = np.array([[1, -2, 0.5, 0], [-1, 2, -0.5, 0], [9, 9, 9, 9]], np.float32)
SECRET = "patient 17 is 63 years old"


def points(client):
    rng = np.random.default_rng(client)
    x = rng.standard_normal((20 + client, 3)).astype(np.float32)
    return x, x @ TRUE[client % 2, :3]


def arrays_of(message):
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


def packed(arrays):
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in arrays.items()})


def example(train=lambda arrays: arrays, metrics=lambda metrics: metrics, seen=None, records=None, **options):
    """An app; ``train`` changes what it replies, ``metrics`` what it measures, ``seen`` gets every message."""
    app = ClusteredClientApp(**options)
    seen = [] if seen is None else seen

    @app.train()
    def _(message, context):
        seen.append(("train", message, context))
        context.state["trained"] = ConfigRecord({"times": 1 + len(context.state)})
        arrays, (x, y) = arrays_of(message), points(context.node_config["partition-id"])
        for _ in range(5):
            error = x @ arrays["w"] + arrays["b"] - y
            arrays = {"w": arrays["w"] - 0.1 * x.T @ error / len(y), "b": np.float32(arrays["b"] - 0.1 * error.mean())}
        reply = {"metrics": MetricRecord({"num-examples": len(y), "train_loss": float((error**2).mean())})}
        trained = packed(train(arrays))
        return Message(RecordDict(reply | (records(trained) if records else {"arrays": trained})), reply_to=message)

    @app.evaluate()
    def _(message, context):
        seen.append(("evaluate", message, context))
        context.state["evaluated"] = ConfigRecord({"times": 1})
        arrays, (x, y) = arrays_of(message), points(context.node_config["partition-id"])
        predicted = x @ arrays["w"] + arrays["b"]
        values = {"eval_loss": float(((predicted - y) ** 2).mean()), "num-examples": len(y)}
        values["eval_acc"] = float((np.sign(predicted) == np.sign(y)).mean())
        return Message(RecordDict({"metrics": MetricRecord(metrics(values))}), reply_to=message)

    return app


def content(request, models=TRUE, layout=LAYOUT, **config):
    record = ConfigRecord({"lr": 0.1, **config, **request.to_record()})
    return RecordDict({"models": pack_models(models, layout), "config": record})


def ask(app, request, models=TRUE, client=1, raise_errors=True, **config):
    grid = app if isinstance(app, InProcessGrid) else InProcessGrid(app, 4, raise_errors=raise_errors)
    made = request if isinstance(request, RecordDict) else content(request, models, **config)
    kind = getattr(type(request), "message_type", "train")
    (reply,) = grid.send_and_receive([Message(made, dst_node_id=client + 1, message_type=kind)])
    return reply


def update_of(reply, client=1, k=3, **more):
    return read_reply(reply.content, client_id=client, round=1, num_clusters=k, layout=LAYOUT, **more)


# ---- what it replies --------------------------------------------------------------------------------------


def test_it_conforms_to_the_contract_of_messages():
    initial = packed({"w": np.ones(3, np.float32), "b": np.zeros((), np.float32)})
    check_client(example(), initial, message_types=("train", "evaluate", "query.losses"))


def test_the_cluster_is_that_of_the_smallest_loss_and_the_update_a_difference():
    trained = []
    app = example(train=lambda arrays: trained.append(arrays) or arrays)
    for client, label in ((0, 0), (1, 1), (2, 0), (3, 1)):
        reply = update_of(ask(app, TrainRequest(round=1), TRUE + 0.1, client), client)
        assert (reply.label, reply.redrawn_label) == (label, label)
        np.testing.assert_allclose(reply.update, LAYOUT.flatten(trained[-1]) - TRUE[label] - 0.1, atol=1e-6)


@pytest.mark.parametrize("own", ["a model that is best", "the last one", "equal models"])
def test_the_order_of_models_does_not_matter(own):
    order = {"a model that is best": [1, 0, 2], "the last one": [2, 0, 1], "equal models": [1, 1, 1]}[own]
    reply = update_of(ask(example(), TrainRequest(round=1), TRUE[order]))
    assert reply.label == order.index(1)


def test_nothing_but_the_update_and_the_cluster_leaves():
    for kind, parts in (
        (TrainRequest(round=1), {"update", "reply"}),
        (LossesRequest(round=1, compared=3), {"update", "reply"}),
        (EvaluateRequest(round=1), {"diagnostics"}),
    ):
        made = ask(example(), kind).content
        assert set(made) == parts
        if "reply" in made:
            assert set(made["reply"]) == {"client-id", "round", "label", "redrawn-label", "padding"}
        else:
            assert set(made["diagnostics"]) == {"accuracy"}


def test_the_size_of_a_reply_does_not_depend_on_the_records():
    replies = [ask(example(), TrainRequest(round=1), np.tile(TRUE[:2], (40, 1)) + shift, client)
               for client, shift in ((0, 0.0), (1, 0.0), (1, 7.0))]  # fmt: skip
    sizes = {len(recorddict_to_proto(reply.content).SerializeToString()) for reply in replies}
    assert len(sizes) == 1


def test_an_assigned_cluster_is_trained_without_a_choice():
    seen = []
    reply = ask(example(seen=seen), TrainRequest(round=1, cluster=7), TRUE[:1])
    assert update_of(reply, k=8, assigned=7).label == 7
    assert [kind for kind, _, _ in seen] == ["train"]


def test_labels_are_redrawn_and_the_assigned_model_trained():
    matrix = np.roll(np.eye(3), 1, axis=1)
    seen = []
    request = TrainRequest(round=1, redraw=tuple(matrix.ravel().tolist()), rebalance_train="assigned")
    reply = update_of(ask(example(seen=seen), request), redraw=matrix)
    assert (reply.label, reply.redrawn_label) == (1, 2)
    np.testing.assert_array_equal(arrays_of(seen[-1][1])["w"], TRUE[2, :3])


def test_the_losses_alone_answer_lcfl():
    reply = ask(example(metrics=lambda m: m | {"eval_loss": float("nan")} if m["eval_loss"] > 50 else m),
                LossesRequest(round=1, compared=3))  # fmt: skip
    losses = reply.content["update"]["losses"].numpy()
    assert losses[1] == 0 < losses[0] < losses[2] == 1e6


def test_a_model_without_a_finite_loss_is_not_chosen():
    losses = iter([float("nan"), float("inf"), 3.0, 1.0])
    app = example(metrics=lambda metrics: metrics | {"eval_loss": next(losses)})
    assert update_of(ask(app, TrainRequest(round=1), np.repeat(TRUE[:1], 4, 0)), k=4).label == 3


def test_the_app_sees_what_it_would_see_under_fedavg():
    seen = []
    ask(example(seen=seen), TrainRequest(round=1), rate=3, samples=2)
    assert [kind for kind, _, _ in seen] == ["evaluate"] * 3 + ["train"]
    for kind, message, _ in seen:
        assert message.metadata.message_type == kind
        assert message.metadata.dst_node_id == 2
        assert set(message.content) == {"arrays", "config"}
        assert dict(message.content["config"]) == {"lr": 0.1, "rate": 3, "samples": 2, "server-round": 1}
        assert {name: array.dtype for name, array in message.content["arrays"].items()} == dict.fromkeys(
            "wb", "float32"
        )


def test_the_state_of_training_is_kept_and_that_of_a_choice_dropped():
    grid = InProcessGrid(example(), 4)
    for _ in range(2):
        ask(grid, TrainRequest(round=1))
    ask(grid, EvaluateRequest(round=1))
    assert list(grid.contexts[2].state) == ["trained"]
    assert grid.contexts[2].state["trained"]["times"] == 2


def test_metrics_of_other_names_are_named():
    renamed = {"loss": "val/loss", "accuracy": "top-1"}
    values = lambda m: {"val/loss": m["eval_loss"], "top-1": m["eval_acc"]}  # noqa: E731
    app = example(metrics=values, **renamed)
    assert update_of(ask(app, TrainRequest(round=1))).label == 1
    assert ask(app, EvaluateRequest(round=1)).content["diagnostics"]["accuracy"] == 1


def test_a_client_that_is_not_evaluated_says_so():
    grid = InProcessGrid(example(accuracy=None), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1, message_type="query.identity")])
    assert (reply.content["reply"]["client-id"], reply.content["reply"]["evaluates"]) == (0, False)
    with pytest.raises(ClientError, match="answers no evaluation"):
        ask(example(accuracy=None), EvaluateRequest(round=1))


# ---- apps that break their contract -----------------------------------------------------------------------


def raises(error):
    def change(_):
        raise error

    return change


@for_rows(
    ("metrics", "text"),
    [
        (lambda m: {}, "evaluate replies no number 'eval_loss': name its metric, ClusteredClientApp(loss=...)"),
        (lambda m: {"loss": 1.0, SECRET: 2}, "no number 'eval_loss'"),
        (lambda m: {"eval_loss": [1.0, 2.0]}, "no number 'eval_loss'"),
        (raises(ValueError(SECRET)), "the app failed in evaluate; see the client's own log"),
        (raises(KeyError(SECRET)), "the app failed in evaluate"),
        (raises(ClientError(SECRET)), "the app failed in evaluate"),
        (lambda m: {"eval_loss": SECRET}, "the app failed in evaluate"),
    ],
)
def test_an_evaluation_without_a_loss_is_one_line(metrics, text):
    reply = ask(example(metrics=metrics), TrainRequest(round=1), raise_errors=False)
    assert text in reply.error.reason
    assert "\n" not in reply.error.reason
    assert SECRET not in reply.error.reason


OTHER_ARRAYS = [
    (lambda a: {"w": a["w"]}, "train replies no array 'b', which it has received"),
    (lambda a: {}, "train replies no array 'w'"),
    (lambda a: {"w": a["w"], "c": a["b"]}, "no array 'b'"),
    (lambda a: a | {SECRET: a["b"]}, "arrays that it has not received"),
    (lambda a: a | {"w": a["w"][:2]}, "the array 'w' in another shape"),
    (lambda a: a | {"b": a["b"].reshape(1)}, "the array 'b' in another shape"),
    (lambda a: a | {"w": a["w"].astype(np.int64)}, "the array 'w' as int64: only floating-point parameters"),
    (lambda a: a | {"w": a["w"] > 0}, "as bool"),
    (lambda a: a | {"w": a["w"] + 1j}, "as complex"),
    (lambda a: a | {"w": a["w"] * np.nan}, "training diverged"),
    (lambda a: a | {"w": a["w"].astype(np.float64) * 1e300}, "training diverged"),
    (lambda a: a | {"b": np.float32(np.inf)}, "training diverged"),
    (raises(RuntimeError(SECRET)), "the app failed in train; see the client's own log"),
]
OTHER_SCORES = [
    (lambda m: {"eval_loss": m["eval_loss"]}, "no number 'eval_acc': name its metric, ClusteredClientApp(accuracy="),
    (lambda m: m | {"eval_acc": 93.1}, "evaluate replies a metric 'eval_acc' outside [0, 1]"),
    (lambda m: m | {"eval_acc": float("nan")}, "outside [0, 1]"),
]
OTHER_RECORDS = [
    lambda trained: {},
    lambda trained: {"arrays": trained, "gradients": trained},
    lambda trained: {"config": ConfigRecord({"a": 1})},
]


def failing_mod(message, context, call_next):
    return Message(Error(6, SECRET), reply_to=message)


@for_rows(
    ("request_", "options", "text"),
    [
        *((TrainRequest(round=1), {"train": train}, text) for train, text in OTHER_ARRAYS),
        *((EvaluateRequest(round=1), {"metrics": metrics}, text) for metrics, text in OTHER_SCORES),
        *((TrainRequest(round=1), {"records": records}, "expected the trained one") for records in OTHER_RECORDS),
        (TrainRequest(round=1), {"mods": [failing_mod]}, "the app failed in evaluate"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_an_app_that_breaks_its_contract_has_an_error_without_its_numbers(request_, options, text):
    reply = ask(example(**options), request_, raise_errors=False)
    assert text in reply.error.reason
    assert SECRET not in reply.error.reason
    assert "93" not in reply.error.reason


@pytest.mark.parametrize("train", [
    lambda a: dict(reversed(a.items())),
    lambda a: {name: values.astype(np.float64) for name, values in a.items()},
    lambda a: {name: values.astype(np.float16) for name, values in a.items()},
])  # fmt: skip
def test_order_and_precision_of_arrays_do_not_matter(train):
    expected = update_of(ask(example(), TrainRequest(round=1)))
    np.testing.assert_allclose(
        update_of(ask(example(train=train), TrainRequest(round=1))).update, expected.update, atol=2e-3
    )


@pytest.mark.parametrize("reply", [None, "text", 3])
def test_a_function_that_returns_no_message(reply):
    app = ClusteredClientApp()
    app.train()(lambda message, context: reply)
    with pytest.raises(ClientError, match="the app failed in train"):
        ask(app, TrainRequest(round=1, cluster=0), TRUE[:1])


@pytest.mark.parametrize("missing", ["train", "evaluate"])
def test_an_app_without_a_function(missing):
    app = example()
    del app._registered_funcs[f"{missing}.default"]
    with pytest.raises(ClientError, match=f"the app failed in {missing}"):
        ask(app, TrainRequest(round=1))


def test_an_introduction_holds_the_number_alone():
    def adds(message, context, call_next):
        reply = call_next(message, context)
        reply.content["more"] = MetricRecord({"num-examples": 17})
        return reply

    def fails(message, context, call_next):
        raise RuntimeError(SECRET)

    def introduce(mod):
        grid = InProcessGrid(example(mods=[mod]), 1)
        return next(iter(grid.send_and_receive([Message(RecordDict(), dst_node_id=1, message_type="query.identity")])))

    content = introduce(adds).content
    assert (set(content), content["reply"]["client-id"]) == ({"reply"}, 0)
    assert SECRET not in introduce(fails).error.reason


def test_a_client_of_flower_s_old_interface_is_refused():
    with pytest.raises(TypeError, match=r"use @app.train\(\)"):
        ClusteredClientApp(lambda context: None)


def test_the_reason_is_the_cause_of_the_error():
    with pytest.raises(ClientError) as failed:
        ask(example(train=raises(RuntimeError(SECRET))), TrainRequest(round=1))
    assert str(failed.value.__cause__) == SECRET


def test_leaving_the_debugger_ends_the_run():
    with pytest.raises(bdb.BdbQuit):
        ask(example(train=raises(bdb.BdbQuit())), TrainRequest(round=1), raise_errors=False)


@for_rows("node", [{}, {"partition-id": "x"}, {"client-id": ""}])
def test_a_node_without_a_number(node):
    grid = InProcessGrid(example(), [node])
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1, message_type="query.identity")])
    assert "set client-id in the node configuration" in reply.error.reason


@pytest.mark.parametrize("guarantee", ["masked-sums", "record-level"])
def test_a_node_whose_owner_declares_another_guarantee_gives_nothing(guarantee):
    grid = InProcessGrid(example(), [{"client-id": 0, "guarantee": guarantee}])
    for message_type in ("train", "evaluate", "query.losses"):
        message = Message(RecordDict(), dst_node_id=1, message_type=message_type)
        (reply,) = grid.send_and_receive([message])
        assert f"guarantee = {guarantee}, which this app does not give" in reply.error.reason


# ---- what it refuses of a server --------------------------------------------------------------------------

PLAN = RecordPlan(num_examples=10, batch_size=5, rounds=9, epsilon=1e3, delta=1e-4, noise_multiplier=1.0)


@for_rows(
    ("request_", "text"),
    [
        (TrainRequest(round=1, record_plans=json.dumps([asdict(PLAN)])), "train by Opacus under coterie.guard"),
        (TrainRequest(round=1, additive=True), "sets additive (fedcam)"),
        (TrainRequest(round=1, assign="nearest", clip=1.0), "sets assign (fesem)"),
        (TrainRequest(round=1, penalty="proximal", penalty_weight=1.0), "sets penalty (fedprox)"),
        (TrainRequest(round=1, first_batch=True), "sets first_batch (rc-dpfl)"),
        (EvaluateRequest(round=1, personalize="all"), "sets personalize"),
        (TrainRequest(round=1, cluster=0), "a request with a cluster has one model, not 3"),
        (TrainRequest(round=1, redraw=(1.0, 0.0, 0.0, 1.0)), "redraw has 4 entries for 3 models"),
        (LossesRequest(round=1, compared=2), "compared is 2; the message has 3 models"),
    ],
)
def test_what_an_app_cannot_do_is_refused_before_it_runs(request_, text):
    seen = []
    reply = ask(example(seen=seen), request_, raise_errors=False)
    assert text in reply.error.reason
    assert not seen


@for_rows("kind", ["train.gan", "train.centroids", "query.label", "query.secrets", "query"])
def test_other_messages_do_not_reach_the_app(kind):
    app, called = example(), []
    app.query("secrets")(lambda message, context: called.append(1))
    (reply,) = InProcessGrid(app, 1).send_and_receive(
        [Message(content(TrainRequest()), dst_node_id=1, message_type=kind)]
    )
    assert "no other type of message" in reply.error.reason
    assert not called


def test_strategies_of_flower_get_nothing():
    result = FlowerFedAvg(fraction_evaluate=0.0).start(
        InProcessGrid(example(), 2), packed({"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}), 1
    )
    assert not result.train_metrics_clientapp


# ---- whole runs -------------------------------------------------------------------------------------------


def joint(clients, rounds, **more):
    numbers = {"num_clusters": 2, "sampling_rate": 1.0, "clip_norm": 2.0, "epsilon": 50, "delta": 1e-3}
    return Joint.calibrated(clients=clients, rounds=rounds, **{**numbers, **more})


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"rebalance_min": 10.0}])
def test_a_certified_run_finds_the_groups(more):
    strategy = IFCA(joint(60, 10, **more), evaluate_every=0)
    start = pack_models(0.5 * TRUE[:2], LAYOUT)
    result = strategy.start(InProcessGrid(example(), 60), start, 10)
    certificate = strategy.certificate()
    assert certificate["certified"], certificate
    assert strategy.statistics.accepted == 600
    models = np.stack([LAYOUT.flatten({n: result.arrays[f"{j}/{n}"].numpy() for n in LAYOUT.names}) for j in (0, 1)])
    np.testing.assert_allclose(models, TRUE[:2], atol=0.4)


def plain(clients, k=2, rounds=2):
    return NoPrivacy(clients=clients, num_clusters=k, sampling_rate=1.0, rounds=rounds)


def test_lcfl_runs_and_fedprox_is_refused():
    lcfl = LCFL(plain(8, rounds=3))
    lcfl.start(InProcessGrid(example(), 8), pack_models(0.5 * TRUE[:1], LAYOUT), 3)
    assert lcfl.statistics.accepted
    prox = FedProx(plain(2, k=1))
    prox.start(InProcessGrid(example(), 2), pack_models(TRUE[:1], LAYOUT), 1)
    (reason,) = prox.statistics.dropped
    assert "fedprox" in reason
