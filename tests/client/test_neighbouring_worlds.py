"""Every release of a client in two neighbouring worlds, with the same noise: only what is charged differs.

Neighbours differ in one record, in one patient with several records, or, at client level, in all data of the client.
*All* that leaves is compared: numbers, texts, sizes of messages, errors, log lines, charges and names of files. At
client level the server adds the noise, or masks hide the vector. How far what is charged moves is compared, too, where
a theorem bounds it.
"""

import copy
import csv
import json
import re
import shutil

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from kit.masked_sites import Server, Sites, plan_of
from kit.two_worlds import CLOCKS, LEVEL, Randomness, differing, distance, outputs_of, sizes_of
from test_hostile_server import WORLDS as RECORDS
from test_reply_sizes import KINDS, LABELLED, choices, node_of
from test_reply_sizes import worlds as clients_of_any_size

from coterie.client.app import app
from coterie.client.state import ClientError
from coterie.datasets import own_shard
from coterie.datasets.units import is_held_out_unit
from coterie.deploy.certificates import create
from coterie.engine.in_process import LocalGrid
from coterie.fields import PERSONAL_METHODS
from coterie.models import initialise
from coterie.privacy import read_ledger
from coterie.privacy.discrete_gaussians import STEPS
from coterie.server import RunConfig
from coterie.wire.messages import Layout, pack_models

ROUNDING = 1 + 1e-5
SCHEMA = 'version = 1\n[label]\ncolumn = "outcome"\nclasses = ["no", "yes"]\n[unit]\ncolumn = "patient"\n'
SCHEMA += "".join(f'[[columns]]\nname = "f{j}"\ntype = "number"\nmean = 0\nscale = 1\n' for j in range(3))


@pytest.fixture(autouse=True)
def sender():
    LocalGrid(1)  # messages have a sender


@pytest.fixture
def randomness(monkeypatch):
    return Randomness(monkeypatch)


class Site:
    """A client's machine in one world, and all that leaves it.

    Args:
        path: an empty folder.
        node: its node configuration.
        caplog: the log.
        randomness: of this world.
    """

    def __init__(self, path, node, caplog, randomness):
        self.path, self.node, self.caplog, self.left = path, node, caplog, {}
        caplog.clear()
        randomness.restart()

    def ask(self, name, verb, content):
        own_shard.cache_clear()
        message = Message(content, dst_node_id=1, message_type=verb)
        with self.caplog.at_level(LEVEL):
            try:
                reply = app(message, Context(1, 1, self.node, RecordDict(), {}))
            except ClientError as error:
                self.left[f"{name}.error"] = str(error), str(error.__cause__), error.kind
                return None
        self.left[f"{name}.size"] = sizes_of(reply)
        self.left |= {f"{name}.{key}": value for key, value in outputs_of(reply.content).items()}
        return reply.content

    @property
    def outputs(self):
        """All that has left so far, log lines, charges and files included."""
        lines = [(record.levelname, record.getMessage().replace(str(self.path), "")) for record in self.caplog.records]
        ledgers = sorted([*self.path.rglob("*.ledger.jsonl"), *self.path.rglob(".coterie-budget.jsonl")])
        charges = [
            {key: value for key, value in charge.items() if key not in CLOCKS}
            for ledger in ledgers
            for charge in read_ledger(ledger)[1]
        ]
        files = sorted(re.sub("[0-9a-f]{64}", "*", str(path.relative_to(self.path))) for path in self.path.rglob("*"))
        return {**self.left, "log": lines, "charges": charges, "files": files}


def of_neighbours(worlds, charged, bounds=(), power=True):
    """Check that worlds differ from the first one in nothing but what is charged.

    Args:
        worlds: outputs by name of the world.
        charged: prefixes of the names of outputs that are charged, or that the owner keeps.
        bounds: (prefix, order of the norm, largest distance).
        power: whether each prefix must differ in some world.
    """
    (_, base), *others = worlds.items()
    changed = set()
    for name, outputs in others:
        moved = differing(base, outputs)
        leaks = {key: (base.get(key), outputs.get(key)) for key in moved if not key.startswith(tuple(charged))}
        assert not leaks, (name, leaks)
        changed |= moved
        for prefix, order, most in bounds:
            assert distance(base, outputs, prefix, order) <= most * ROUNDING, (name, prefix)
    if power:
        assert {prefix for prefix in charged if any(key.startswith(prefix) for key in changed)} == set(charged)


# ---- plain messages ------------------------------------------------------------------------------------------------

LABELS = {"train.reply.label", "train.reply.redrawn-label"}
#: What each kind of message releases: the rest is the same in all worlds.
CHARGED = {
    "train": {"train.update.", *LABELS},
    "train, redrawn": {"train.update.", *LABELS},
    "train, assigned": {"train.update."},
    "train, records": {"train.update."},
    "train, records, choice": {"train.update.", *LABELS},
    "train, records, adaptive": {"train.update.", "train.reply.below"},
    "losses": {"query.losses.update."},
    "losses, records": {"query.losses.update."},
    "evaluate": {"evaluate.diagnostics."},
    "gan": {"train.gan."},
    "label": set(),
    "identity": set(),
}
#: Line of the client's own log about records that it leaves out.
INVALID = {"a label out of range", "a negative label", "a pixel out of range", "a negative pixel", "one record or none"}


def test_every_kind_of_message_is_here():
    assert CHARGED.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_differs_in_nothing_but_what_is_charged(tmp_path, caplog, randomness, kind):
    verb, config, extra, models = KINDS[kind]
    known = {}  # several pairs have the same records

    def left(data, best):
        key = id(data[0]), id(data[1]), best
        if key not in known:
            known[key] = answered(data, best)
        return known[key]

    def answered(data, best):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        np.savez(path / "own.npz", x=data[0], y=data[1])
        site = Site(path, node_of(path), caplog, randomness)
        content = {"models": pack_models(*models(best)), "config": ConfigRecord({**config, "round": 1, **extra})}
        site.ask(verb, verb, RecordDict(content))
        assert f"{verb}.error" not in site.left
        return site.outputs

    any_data = list(clients_of_any_size().items())[: 3 if kind == "gan" else None]  # GANs take long
    best_models = LABELLED if models is choices else LABELLED[:1]
    worlds = {f"label {best}": left(any_data[0][1], best) for best in best_models}
    of_neighbours(worlds | {name: left(data, 0) for name, data in any_data}, CHARGED[kind])
    for pair, (data, other) in RECORDS.items():
        if pair not in INVALID or "record-plans" in extra:
            kept = {"log"} if pair in INVALID else set()
            of_neighbours({pair: left(data, 0), "neighbour": left(other, 0)}, CHARGED[kind] | kept, power=False)


# ---- how far what is charged moves ---------------------------------------------------------------------------------

N, LR, CLIP, BOUND, MODELS = 24, 0.5, 0.7, 4.0, 3
OWN = {"dataset": "own", "model": "linear", "device": "cpu", "strategy": "fedavg", "clusters": 1, "clients": 3}
SETTINGS = {**OWN, "privacy-unit": "record", "samples-per-client": N, "batch-size": N, "rounds": 2, "epsilon": 8.0}
SETTINGS |= {"lr": LR, "delta": 1e-3, "local-epochs": 1}
MOVED, LOSSES = ("train.update.", 2, LR * CLIP / N), ("query.losses.update.", 2, BOUND * MODELS**0.5 / N)
COUNTS, SHORT = ("evaluate.diagnostics.score-counts", 1, 1.0), {"clip_share": 0.3, "clip_factor": 0.5}
OF_LOSSES = {"compared": MODELS, "models_per_message": MODELS}
HISTOGRAM = {"private": True, "histogram": True, "cluster": 0}
#: One step with all records: name, type of the message, number of models, terms of the plan, fields, charged outputs
#: with the order of their distance and how far one record, or patient, moves them.
STEPS_OF = {
    "gradients": ("train", 1, {}, {}, [MOVED]),
    "gradients and short ones": ("train", 1, SHORT, {}, [MOVED, ("train.reply.below", 1, 0.5 / N)]),
    "losses": ("query.losses", MODELS, OF_LOSSES, {"compared": MODELS}, [LOSSES]),
    "choice": ("train", MODELS, {"selection": "gumbel", "selections": 9}, {"choice": True}, []),
    "held-out histogram": ("evaluate", 1, {"held_out_epsilon": 2.0}, HISTOGRAM, [COUNTS]),
}
RELEASED = {"choice": {"train.update.", *LABELS}}


def rows_of(patients, change=None):
    """Records of patients by name: each has three, and one of label 0 or 1; and those of one that is changed."""
    rng = np.random.default_rng(0)
    rows = []
    for number, name in enumerate(patients):
        features = rng.normal(size=(3, 3)).round(3)
        if name == change:
            features, number = 20 * np.ones((3, 3)), number + 1
        rows += [[name, *values, ["no", "yes"][number % 2]] for values in features.tolist()]
    return rows


def patient_worlds():
    """Tables of neighbours, and how many patients come and go."""
    names = [f"P{i}" for i in range(60)]
    trained = [name for name in names if not is_held_out_unit(name)][:N]
    held = [name for name in names if is_held_out_unit(name)][:8]
    worlds = {}
    for name, victim in (("trained", trained[-1]), ("held out", held[-1])):
        every = rows_of([*trained, *held])
        without = [row for row in every if row[0] != victim]
        worlds[f"without one that is {name}"] = (every, without, 1)
        worlds[f"another one that is {name}"] = (every, rows_of([*trained, *held], victim), 2)
        worlds[f"without an outlier that is {name}"] = (rows_of([*trained, *held], victim), without, 1)
        worlds[f"fewer records of one that is {name}"] = (every, [*without, [victim, 9.0, -9.0, 9.0, "yes"]], 2)
    worlds["without the only one that is held out"] = (rows_of([*trained, held[0]]), rows_of(trained), 1)
    return worlds


def record_worlds():
    """Arrays of neighbours with held-out records, and how many records come and go."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (N + 8, 1, 4, 4)).astype(np.int64), np.arange(N + 8) % 2

    def world(train=slice(N), test=slice(N, None), **changed):
        arrays = {"x": x[train], "y": y[train], "x_test": x[test], "y_test": y[test]}
        for name, value in changed.items():
            arrays[name] = arrays[name].copy()
            arrays[name][-1] = value
        return arrays

    base = world()
    return {
        "a training record less": (base, world(train=slice(N - 1)), 1),
        "a held-out record less": (base, world(test=slice(N, -1)), 1),
        "another label": (base, world(y=0), 2),
        "another held-out label": (base, world(y_test=0), 2),
        "another image": (base, world(x=255), 2),
        "another held-out image": (base, world(x_test=255), 2),
    }


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("name", STEPS_OF)
def test_what_is_charged_moves_by_no_more_than_its_sensitivity(tmp_path, caplog, randomness, name, unit):
    verb, count, terms, fields, bounds = STEPS_OF[name]
    settings, node = {**SETTINGS, "input-shape": "1x4x4", "num-classes": 2}, {"input-shape": "1x4x4", "num-classes": 2}
    if unit == "patient":
        (tmp_path / "schema.toml").write_text(SCHEMA)
        settings, node = {**SETTINGS, "table-schema": str(tmp_path / "schema.toml")}, {}
        node["schema"] = str(tmp_path / "schema.toml")
    run = RunConfig(settings)
    (plan,) = json.loads(run.plan.record_plans)
    plan |= {"clip_norm": CLIP, "noise_multiplier": 1.0, "first_noise_multiplier": 1.0, "rounds": 1, "batch_size": N}
    drawn = initialise("linear", *run.examples, 0)
    layout = Layout.of(drawn)
    models = np.random.default_rng(1).normal(size=(count, layout.size)).astype(np.float32)
    config = {**run.for_clients(), "round": 1, "loss-bound": BOUND}

    def left(data, folder):
        (path := tmp_path / folder).mkdir()
        if unit == "patient":
            with (path / "own.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["patient", "f0", "f1", "f2", "outcome"], *data])
        else:
            np.savez(path / "own.npz", **data)
        (own,) = path.glob("own.*")
        place = {"client-id": 0, "data": str(own), "state-dir": str(path / "state")}
        site = Site(path, {**place, "epsilon": 1e3, "delta": 1e-3, **node}, caplog, randomness)
        plans = {"record-plans": json.dumps([{**plan, **terms, "epsilon": 500.0}])}
        if verb == "evaluate":  # what is held out is charged after training
            first = ConfigRecord({**config, **plans})
            assert site.ask("before", "train", RecordDict({"models": pack_models(models, layout), "config": first}))
            site.left.clear()
        asked = ConfigRecord({**config, **plans, **fields})
        assert site.ask(verb, verb, RecordDict({"models": pack_models(models, layout), "config": asked})), site.left
        return site.outputs

    changed = set()
    for pair, (data, other, times) in (patient_worlds() if unit == "patient" else record_worlds()).items():
        worlds = {pair: left(data, f"{pair} 0"), "neighbour": left(other, f"{pair} 1")}
        charged = RELEASED.get(name, {prefix for prefix, *_ in bounds})
        of_neighbours(worlds, charged, [(*bound[:2], times * bound[2]) for bound in bounds], power=False)
        changed |= differing(*worlds.values())
    assert all(any(key.startswith(prefix) for key in changed) for prefix, *_ in bounds)


# ---- masked rounds -------------------------------------------------------------------------------------------------

CLIENTS = 6


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return create(tmp_path_factory.mktemp("masked") / "pki", CLIENTS, ["superlink"]).folder


class WatchedSites(Sites):
    """Sites of which client 0 has other data in the other world; what all clients reply is kept."""

    def in_world(self, path, data):
        """These sites in a copy of their folder, where client 0 has other data."""
        shutil.copytree(self.path, path)
        np.savez(path / "site-0" / "data" / "train.npz", x=data[0], y=data[1])
        world = copy.copy(self)
        text = json.dumps(self.nodes).replace(str(self.path), str(path))
        world.path, world.nodes = path, {int(client): node for client, node in json.loads(text).items()}
        world.left = {}
        return world

    def ask(self, client, message_type, content):
        own_shard.cache_clear()
        message = Message(content, dst_node_id=1, message_type=message_type)
        reply = app(message, Context(self.run, 1, self.nodes[client], RecordDict(), {}))
        if hasattr(self, "left"):
            name = f"{client}.{message_type}"
            self.left[f"{name}.size"] = sizes_of(reply)
            self.left |= {f"{name}.{key}": value for key, value in outputs_of(reply.content).items()}
        return reply.content


@pytest.mark.parametrize("release", ["training", "accuracy", "histogram"])
def test_masked_rounds_differ_in_one_masked_vector(tmp_path, caplog, randomness, pki, release):
    """Client 0 has other data, or none that it can read; the vector moves by at most two norms of the grid."""
    scores = {} if release == "training" else {"evaluations": 1, "evaluation_noise": 0.5, "histograms": 1}
    sites, plan = WatchedSites(tmp_path / "sites", pki, CLIENTS), plan_of(CLIENTS, **scores)
    keys = {client: sites.key(client) for client in range(CLIENTS)}
    worlds = {}
    for name, data in clients_of_any_size().items():
        world = sites.in_world(tmp_path / name, data)
        randomness.restart()
        caplog.clear()
        server = Server(world, plan, keys=keys, release=release)
        with caplog.at_level(LEVEL):
            for step in (server.open, server.train, server.sign, server.unmask):
                step()
        lines = [record.getMessage().replace(str(world.path), "") for record in caplog.records]
        charges = [
            {key: value for key, value in charge.items() if key not in CLOCKS}
            for client in range(CLIENTS)
            for charge in world.charges(client)
        ]
        worlds[name] = {**world.left, "log": lines, "charges": charges}
    masked = f"0.{server.second}.update.masked"
    of_neighbours(worlds, {masked})
    for name, outputs in worlds.items():
        moved = (outputs[masked] - worlds["one class"][masked]).view(np.int32).astype(np.float64)
        assert np.linalg.norm(moved) <= 2 * STEPS, name


# ---- own models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "method"), [*(("client", name) for name in (None, *PERSONAL_METHODS)), ("record", "all")]
)
def test_own_models_and_local_reports_stay(tmp_path, caplog, randomness, method, level):
    """Worlds with and without an own model, a report, and one record more: replies, charges and names of files."""
    kind = {"client": "train", "record": "train, records"}[level]
    verb, config, extra, models = KINDS[kind]
    numbers = (1, 2) if method == "all" else (1,)  # a later reply depends on no own model either
    worlds = {}
    own = {} if method is None else {"personalize": method}
    for name, rows, node in (
        ("neither", 24, {}),
        ("own model", 24, own),
        ("own model and report", 24, {"local-report": True, **own}),
        ("a record less", 23, {"local-report": True, **own}),
    ):
        path = tmp_path / name
        path.mkdir()
        x, y = clients_of_any_size()["other records"]
        np.savez(path / "own.npz", x=x[:rows], y=y[:rows], x_test=x[:8], y_test=y[:8])
        site = Site(path, node_of(path) | node, caplog, randomness)
        for number in numbers:
            content = {"models": pack_models(*models(0)), "config": ConfigRecord({**config, "round": number, **extra})}
            assert site.ask(f"{verb} {number}", verb, RecordDict(content)) is not None
        outputs = site.outputs
        site.left["files"] = [file for file in outputs["files"] if "own-model" not in file and "report" not in file]
        worlds[name] = site.left | {"charges": outputs["charges"]}
    with_models = {key: value for key, value in worlds.items() if key != "a record less"}
    of_neighbours(with_models, set(), power=False)
    outputs = ("update.", "reply.label", "reply.redrawn-label")
    charged = {f"{verb} {number}.{output}" for number in numbers for output in outputs}
    of_neighbours({key: worlds[key] for key in ("neither", "a record less")}, charged, power=False)
