"""check_client passes Coterie's ClientApp, and finds planted bugs by the item that names them."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from kit.tables import for_rows

from coterie.client.app import app as coterie_s
from coterie.models import initialise
from coterie.privacy import RecordPlan, read_ledger
from coterie.server import RunConfig
from coterie.testing import ConformanceError, check_client
from coterie.testing.clients import CLIENT_ITEMS
from coterie.wire import TrainRequest, read_request
from coterie.wire.messages import Layout, pack_reply, unpack_models

INITIAL = ArrayRecord({"w": Array(np.ones((2, 2), np.float32)), "b": Array(np.zeros(2, np.float32))})
NODE = {"partition-id": 3}


class Good:
    """A client with a target vector; subclasses have a bug."""

    repeats = False

    def __init__(self):
        self.cache, self.charges = {}, 0

    def client(self, context):
        return context.node_config["partition-id"]

    def identity(self, message, context):
        return {"reply": ConfigRecord({"client-id": self.client(context), "repeats": self.repeats})}

    def read(self, content):
        request, models, layout = read_request("train", content)
        if layout != Layout.of(INITIAL):
            raise ValueError("other parameters")
        return request, models, layout

    def label(self, models, context):
        return int(((models - self.client(context)) ** 2).sum(1).argmin())

    def train(self, message, context):
        request, models, layout = self.read(message.content)
        self.charges += 1
        best = self.label(models, context)
        update = (0.3 * (self.client(context) - models[best])).astype(np.float32)
        label = best if request.cluster is None else request.cluster
        redrawn = request.redraw_label(label, np.random.default_rng())
        about = {"client_id": self.client(context), "round": request.round, "label": label, "redrawn_label": redrawn}
        return self.sent(pack_reply(update, layout, **about), models[best], layout)

    def sent(self, reply, model, layout):
        return reply

    def evaluate(self, message, context):
        request, models, _ = read_request("evaluate", message.content)
        cluster = self.label(models, context) if request.cluster is None else request.cluster
        return {"diagnostics": MetricRecord({"accuracy": 0.25, "cluster": cluster})}

    def losses(self, message, context):
        _, models, _ = read_request("query.losses", message.content)
        array = Array(((models - 1) ** 2).sum(1).astype(np.float32))
        reply = {"client-id": self.client(context), "round": 4, "label": 0, "redrawn-label": 0}
        return {"update": ArrayRecord({"losses": array}), "reply": ConfigRecord(reply)}

    def app(self):
        app = ClientApp()

        def handler(method):
            return lambda message, context: Message(RecordDict(method(message, context)), reply_to=message)

        app.query("identity")(handler(self.identity))
        app.query("losses")(handler(self.losses))
        app.train()(handler(self.train))
        app.evaluate()(handler(self.evaluate))
        return app


ALL = ("train", "evaluate", "query.losses")
PLAN = RecordPlan(num_examples=10, batch_size=5, rounds=9, epsilon=1e3, delta=1e-4, noise_multiplier=1.0)


def check(client, **more):
    check_client(client.app(), INITIAL, **{"node_config": NODE, "message_types": ALL, **more})


def test_a_client_that_conforms():
    check(Good())
    client = Good()
    check(client, record_plan=PLAN, charges=lambda: client.charges)


@pytest.mark.parametrize("budget", [False, True])
def test_the_client_of_coterie_conforms(tmp_path, budget):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.random((20, 3), np.float32), y=rng.integers(0, 2, 20))
    settings = {"dataset": "own", "input-shape": "3", "num-classes": 2, "model": "linear", "privacy-unit": "none"}
    config = RunConfig({**settings, "clusters": 2, "clients": 4}).for_clients()
    node = {"client-id": 1, "state-dir": str(tmp_path / "state"), "data": str(tmp_path / "mine.npz")}
    node |= {"input-shape": "3", "num-classes": 2} | ({} if budget else {"guarantee": "trusted-server"})
    more = {}
    if budget:
        node |= {"epsilon": 1e3, "delta": 1e-4, "budget-file": str(tmp_path / "budget.jsonl")}
        path = tmp_path / "budget.jsonl"
        more = {"record_plan": RecordPlan(**{**vars(PLAN), "num_examples": 20}), "message_types": ["train"]}
        more["charges"] = lambda: len(read_ledger(path)[1]) if path.exists() else 0
    other = {**node, "client-id": 2, "state-dir": str(tmp_path / "other"), "budget-file": str(tmp_path / "other.jsonl")}
    if not budget:
        del other["budget-file"]
    check_client(
        coterie_s,
        ArrayRecord({name: Array(value) for name, value in initialise("linear", (3,), 2, 0).items()}),
        train_config=config,
        node_config=node,
        other_node_config=other,
        skip=["redraw"] if budget else [],  # at record level no request has a redraw matrix
        **more,
    )


class NewIdentity(Good):
    calls = 0

    def identity(self, message, context):
        self.calls += 1
        return {"reply": ConfigRecord({"client-id": self.calls})}


class OwnChoice(Good):
    """Ignores the cluster that the server assigned."""

    def read(self, content):
        config = ConfigRecord({k: v for k, v in content["config"].items() if k != "cluster"})
        if content["config"].get("cluster", 0) < 0:
            raise ValueError("cluster")
        return super().read(RecordDict({**content, "config": config}))


class NoRedraw(Good):
    def read(self, content):
        super().read(content)
        config = ConfigRecord({k: v for k, v in content["config"].items() if k != "redraw"})
        return super().read(RecordDict({**content, "config": config}))


class Shared(Good):
    """Chooses by the data of every client in the process."""

    def label(self, models, context):
        seen = self.cache.setdefault("seen", set())
        seen.add(self.client(context))
        return len(seen) - 1


class Trusting(Good):
    """Takes whatever the message holds."""

    def read(self, content):
        models, layout = unpack_models(content["models"])
        return TrainRequest(**{k: v for k, v in content["config"].items() if k in ("round", "cluster")}), models, layout


class Broken(Good):
    def read(self, content):
        try:
            assert not self.cache, "broken by an earlier message"
            return super().read(content)
        except ValueError:
            self.cache["broken"] = True
            raise


class Declares(Good):
    """Declares repeats, and trains anew."""

    repeats = True

    def sent(self, reply, model, layout):
        return arrays(lambda name, value, received: value * self.charges)(self, reply, model, layout)


class Free(Good):
    def sent(self, reply, model, layout):
        self.charges = 0
        return reply


class Early(Good):
    """Charges before it reads."""

    def read(self, content):
        self.charges += 1
        return super().read(content)


class OneIdentity(Good):
    def client(self, context):
        return self.cache.setdefault("client", context.node_config["partition-id"])


def changed(**methods):
    """A client with other methods."""
    return type("Changed", (Good,), methods)


def fields(**values):
    """Changes fields of the reply."""
    values = {name.replace("_", "-"): value for name, value in values.items()}
    return changed(sent=lambda self, reply, *_: {**reply, "reply": ConfigRecord({**reply["reply"], **values})})


def arrays(change, prefix=""):
    """A method that changes every array of an update."""

    def sent(self, reply, model, layout):
        received = layout.split(model)
        values = {name: change(name, array.numpy(), received[name]) for name, array in reply["update"].items()}
        return {**reply, "update": ArrayRecord({prefix + name: Array(value) for name, value in values.items()})}

    return sent


def identity(**values):
    values = {name.replace("_", "-"): value for name, value in values.items()}
    return changed(
        identity=lambda self, message, context: {
            "reply": ConfigRecord({"client-id": 3 if self.client(context) == 3 else 4, **values})
        }
    )


def evaluation(accuracy, **records):
    return changed(evaluate=lambda *_: {"diagnostics": MetricRecord({"accuracy": accuracy}), **records})


CASES = [
    (changed(identity=lambda *_: {"reply": ConfigRecord({"client": 1})}), "identity"),
    (NewIdentity, "identity"),
    (OneIdentity, "identity-unique"),
    (identity(num_examples=17), "nothing-else"),
    (changed(label=lambda *_: 1 / 0), "answers"),
    (fields(client_id=0), "client-id"),
    (fields(round=1), "round"),
    (fields(label="0", redrawn_label="0"), "label"),
    (fields(label=2, redrawn_label=2), "label"),
    (OwnChoice, "assigned"),
    (NoRedraw, "redraw"),
    (changed(sent=arrays(lambda name, value, _: value, "net.")), "names"),
    (changed(sent=arrays(lambda name, value, _: value.astype(np.float64))), "arrays"),
    (changed(sent=arrays(lambda name, value, _: value.ravel())), "arrays"),
    (changed(sent=arrays(lambda name, value, _: value * np.float32(np.nan))), "finite"),
    (changed(sent=arrays(lambda name, value, received: received + np.float32(0.1) * value)), "update"),  # the model
    (changed(sent=lambda self, reply, *_: {"weights": reply["update"], "reply": reply["reply"]}), "parts"),
    (changed(sent=lambda self, reply, *_: {**reply, "metrics": MetricRecord({"num-examples": 17})}), "nothing-else"),
    (Shared, "row-wise"),
    (evaluation(float("nan")), "evaluate"),
    (evaluation(93.0), "evaluate"),
    (evaluation(0.5, update=INITIAL), "nothing-else"),
    (
        changed(
            losses=lambda self, *context: {
                **Good().losses(*context),
                "update": ArrayRecord({"losses": Array(np.ones(1, np.float32))}),
            }
        ),
        "losses",
    ),
    (Trusting, "malformed"),
    (Broken, "recovers"),
    (Declares, "idempotent"),
    (Free, "charges"),
    (Early, "charges"),
]


@for_rows(("client", "item"), CASES)
def test_a_planted_bug_is_found(client, item):
    made = client()
    more = {"record_plan": PLAN, "charges": lambda: made.charges} if item in ("idempotent", "charges") else {}
    with pytest.raises(ConformanceError) as caught:
        check(made, **more)
    assert item in {failure.item for failure in caught.value.failures}, str(caught.value)


def test_every_item_finds_a_bug():
    assert {item for _, item in CASES} == set(CLIENT_ITEMS)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="skip = redrow: must be some of identity, "):
        check(Good(), skip=["redrow"])
    with pytest.raises(ValueError, match="num_clusters must be at least 2"):
        check(Good(), num_clusters=1)
