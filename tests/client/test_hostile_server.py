"""A deployed client with a budget against a server that sends what it likes.

Every request is sent in two worlds whose data differ in one record. What leaves the client (a reply or an error, and
its text) and what the client charges must be the same in both; an update leaves only after a charge for it.
"""

import fcntl
import itertools
import json
import math
import os
import random
import re
import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from kit.deployed import RECORDS
from kit.hostile import changed
from scipy.stats import mannwhitneyu

from coterie.client.app import app, client_of
from coterie.client.budget import BUDGET_FILE
from coterie.client.state import ClientError
from coterie.datasets import DataError, own_shard
from coterie.engine.in_process import LocalGrid
from coterie.models import build_gan, initialise
from coterie.privacy.budget_files import reconcile, spending
from coterie.privacy.ledger_lines import count_events, read_ledger
from coterie.server import RunConfig
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.wire.messages import Layout, pack_models
from coterie.wire.requests import REQUESTS

SHAPE, CLASSES, N = (1, 4, 4), 2, 24
NAN = math.nan
CONFIG = RunConfig(RECORDS)
CONFIGURED = {**CONFIG.for_clients(), "round": 1}
(TERMS,) = json.loads(CONFIG.plan.record_plans)
LAYOUT = Layout.of(initialise("linear", SHAPE, CLASSES, 0))
BUDGET = {"epsilon": 5.0, "delta": 1e-4}
DECLARED = {"input-shape": "1x4x4", "num-classes": CLASSES}
GAN = {"gan": "gan-pendigits-gn", "labels": 2, "samples": 4, "average": 0.0}
GAN["feature-range"] = 1.0
CENTROIDS = {"local": "k-means", "local-centroids": 2, "feature-range": 1.0}
# Entries of a charge: its times, and its random head.
_VARYING = ("time", "uptime", "elapsed", "head")
LABEL = {"labels": 2, "encoder": "none", "release-counts": True}


def plans(**changes):
    """The run's terms with changes; None leaves a term out."""
    terms = {key: value for key, value in {**TERMS, **changes}.items() if value is not Ellipsis}
    return {"record-plans": json.dumps([terms])}


HONEST = plans()
CHEAP = plans(noise_multiplier=6.0)
TRAIN_CHANGES = {
    # Numbers at which noise rounds to zero, infinity or NaN.
    **{
        f"clip norm {value}": plans(clip_norm=value) for value in (5e-324, 1e-300, 0.0, -1.0, 1e308, math.nan, math.inf)
    },
    **{f"noise {value}": plans(noise_multiplier=value) for value in (0.0, -1.0, 1e-320, 1e308, math.nan, math.inf)},
    **{f"lr {value}": {**HONEST, "lr": value} for value in (0.0, -1.0, 1e308, math.nan, math.inf)},
    **{f"budget {value}": plans(epsilon=value) for value in (0.0, -1.0, 1e308, math.nan, math.inf)},
    # Counts that are none.
    **{f"records {value}": plans(num_examples=value) for value in (0, -5, 10**12, 1.5, True, "24", None)},
    **{f"batch {value}": plans(batch_size=value) for value in (0, -1, 25, 1.5, 10**12)},
    **{f"epochs {value}": {**HONEST, "local-epochs": value} for value in (0, -1, 1.5, 10**9, "1")},
    **{f"epochs of the plan {value}": plans(local_epochs=value) for value in (0, 10**9, 1.5)},
    **{f"round {value}": {**HONEST, "round": value} for value in (-1, 1.5, 10**12, "1")},
    "a plan without noise": plans(noise_multiplier=...),
    "a plan with a further term": plans(secret=1),
    "no list of plans": {"record-plans": json.dumps(TERMS)},
    "an empty list of plans": {"record-plans": "[]"},
    "no JSON": {"record-plans": "]"},
    "deep JSON": {"record-plans": "[" * 100_000},
    "a number for plans": {"record-plans": 1},
    # Terms that nobody pays for.
    "no plan": {},
    "an exact choice": {**plans(selection="exact", selections=9), "choice": True, "loss-bound": 4.0},
    "a choice without a plan for it": {**HONEST, "choice": True, "loss-bound": 4.0},
    "a seed": {**HONEST, "seed": 3},
    "an unknown penalty": {**HONEST, "penalty": "none of them", "penalty-weight": 1.0},
    "a penalty without a weight": {**HONEST, "penalty": "proximal"},
    "a penalty of infinite weight": {**HONEST, "penalty": "proximal", "penalty-weight": math.inf},
    "constants that the network lacks": {**HONEST, "constants": "0" * 64},
    "constants that are no text": {**HONEST, "constants": 5},
    # A redraw row that fails for one label alone.
    "a redraw matrix with a bad row": {**HONEST, "redraw": [1.0, 0.0, 0.5, 0.4]},
    "a redraw matrix with NaN": {**HONEST, "redraw": [1.0, 0.0, math.nan, 1.0]},
    "a cluster below zero": {**HONEST, "cluster": -1},
    # Data that are not the declared ones.
    "another shape": {**HONEST, "input-shape": "1x5x5"},
    "another form": {**HONEST, "input-shape": "16"},
    "fewer classes": {**HONEST, "num-classes": 1},
    "more classes": {**HONEST, "num-classes": 10},
    "real targets": {**HONEST, "num-classes": 0},
    "another data set": {**HONEST, "dataset": "digits"},
    "code of the server": {**HONEST, "dataset": "os:system"},
    "a model of the server": {**HONEST, "model": "os:system"},
    "an unknown model": {**HONEST, "model": "none of them"},
    "unknown features": {**HONEST, "features": "none of them"},
    "an unknown device": {**HONEST, "device": "tpu"},
}
CHOICE = {**plans(selection="gumbel", selections=9), "choice": True}
LOSSES = plans(compared=4, models_per_message=4) | {"compared": 1}
BOUNDS = (math.inf, math.nan, 0.0, -1.0, 5e-324, 1e300)
REFUSED = (
    [("train", name, change) for name, change in TRAIN_CHANGES.items()]
    + [("train", f"loss bound {bound} of a choice", {**CHOICE, "loss-bound": bound}) for bound in BOUNDS]
    + [("train", "no loss bound of a choice", {**CHOICE, "loss-bound": ...})]
    + [("train", f"choice at epsilon {e}", plans(selection="gumbel", selection_epsilon=e) | {"choice": True})
       for e in (0.0, -1.0, 1e308, NAN)]
    + [("query.losses", f"loss bound {bound}", {**LOSSES, "loss-bound": bound}) for bound in BOUNDS]
    + [("query.losses", "no loss bound", {**LOSSES, "loss-bound": ...})]
    + [("query.losses", f"loss noise {z}", {**plans(compared=4, loss_noise=z), "compared": 1})
       for z in (0.0, 1e-320, 1e308, math.nan)]
    + [("query.losses", "losses without a plan for them", {**HONEST, "compared": 1})]
    + [("query.losses", "no plan", {"compared": 1})]
    + [("query.losses", f"{n} losses priced for one model", {**LOSSES, "compared": n}) for n in (..., 0, 2, 4)]
    + [("train.gan", "a GAN without a plan", GAN), ("train.gan", "an unknown GAN", {**HONEST, **GAN, "gan": "none"})]
    + [("train.gan", f"{n} samples", {**HONEST, **GAN, "samples": n}) for n in (-1, 10**12)]
    + [("train.centroids", "exact centroids", {**HONEST, **CENTROIDS}), ("evaluate", "exact scores", HONEST)]
    + [("query.label", "too many labels", {**HONEST, **LABEL, "labels": 10**9})]
)  # fmt: skip


def neighbours():
    """Pairs of (x, y) that differ in one record."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (N, *SHAPE)).astype(np.int64), np.arange(N) % 2

    def with_last(pixels=None, label=1):
        other, labels = x.copy(), y.copy()
        labels[-1] = label
        if pixels is not None:
            other[-1] = pixels
        return other, labels

    return {
        "another label": ((x, y), with_last(label=0)),
        "a label out of range": ((x, y), with_last(label=9)),
        "a negative label": ((x, y), with_last(label=-1)),
        "a pixel out of range": ((x, y), with_last(pixels=300)),
        "a negative pixel": ((x, y), with_last(pixels=-7)),
        "a record less": ((x, y), (x[:-1], y[:-1])),
        "one record or none": ((x[:1], y[:1]), (x[:0], y[:0])),
    }


WORLDS = neighbours()


class World:
    """One client's machine: its data, its state, and what leaves it."""

    def __init__(self, path, data, **node):
        path.mkdir()
        (path / "data").mkdir()
        np.savez(path / "data" / "train.npz", x=data[0], y=data[1])
        self.node = {"client-id": 0, "data": str(path / "data"), "state-dir": str(path / "state"), **BUDGET, **DECLARED}
        self.node |= node
        self.path, self.run = path, 1

    def ask_unread(self, verb, change):
        """Ask; the data must not be read, and nothing charged. Returns the kind and the text of the answer."""
        charges, data = self.charges, self.path / "data" / "train.npz"
        content = data.read_bytes()
        data.write_bytes(b"whoever reads this fails")
        try:
            kind, text, *_ = self.ask(verb, change)
        finally:
            data.write_bytes(content)
        assert self.charges == charges
        return kind, text

    def ask(self, verb, change, models=None, layout=LAYOUT):
        """What leaves the client in reply to a request of a run's configuration with changes."""
        config = {key: value for key, value in {**CONFIGURED, **change}.items() if value is not Ellipsis}
        models = np.zeros((1, LAYOUT.size), np.float32) if models is None else models
        return self.send(verb, RecordDict({"models": pack_models(models, layout), "config": ConfigRecord(config)}))

    def send(self, verb, content, finite=True):
        """The names and shapes of a reply, or the text of an error; ``head`` is random."""
        own_shard.cache_clear()
        message = Message(content, dst_node_id=1, message_type=verb)
        try:
            answer = app(message, Context(self.run, 1, self.node, RecordDict(), {})).content
        except ClientError as error:
            return "error", str(error), str(error.__cause__), error.__suppress_context__
        arrays = {name: array.shape for record in answer.array_records.values() for name, array in record.items()}
        sent = [array.numpy() for record in answer.array_records.values() for array in record.values()]
        assert not finite or all(np.isfinite(values).all() for values in sent)
        told = [dict(record) for record in answer.config_records.values()]
        (self.head,) = [record.pop("head", None) for record in told] or [None]
        return "reply", arrays, told, list(answer.metric_records)

    @property
    def charges(self):
        """What its budget has paid, without its times and the random heads."""
        path = self.path / "data" / BUDGET_FILE
        lines = read_ledger(path)[1] if path.exists() else []
        return [{key: value for key, value in line.items() if key not in _VARYING} for line in lines]


@pytest.fixture(autouse=True)
def sender():
    LocalGrid(1)  # messages have a sender


@pytest.mark.parametrize(("verb", "change"), [each[::2] for each in REFUSED], ids=[f"{v}: {n}" for v, n, _ in REFUSED])
def test_a_hostile_request_is_refused_alike_and_charges_nothing(tmp_path, verb, change):
    left = []
    for i, data in enumerate(WORLDS["a label out of range"] + WORLDS["one record or none"]):
        world = World(tmp_path / str(i), data)
        left.append(world.ask(verb, change))
        assert world.charges == []
    assert left[0][0] == "error"
    assert all(each == left[0] for each in left)


@pytest.mark.parametrize("verb", REQUESTS)
def test_a_changed_request_is_answered_alike_in_both_worlds_and_no_update_is_free(tmp_path, caplog, verb):
    """Sixty requests of the corpus; the worlds differ in a record that is not valid in one of them."""
    pair = enumerate(WORLDS["a label out of range"])
    worlds = [World(tmp_path / str(i), data, epsilon=500.0) for i, data in pair]
    models, layout = np.zeros((1, LAYOUT.size), np.float32), LAYOUT
    if verb == "train.gan":
        models, layout = drawn_gan()
    elif verb == "query.label":
        models, layout = np.zeros((1, 32), np.float32), Layout(("centroids",), ((2, 16),))
    terms = {"train": HONEST, "query.losses": LOSSES, "train.gan": {**HONEST, **GAN}, "train.centroids": CENTROIDS}
    terms |= {"query.label": {**HONEST, **LABEL}, "evaluate": HONEST}
    refused = 0
    for number in range(1, 61):  # a round each: a repeated request gets the same reply again
        config = ConfigRecord({**CONFIGURED, **terms[verb], "round": number})
        honest = RecordDict({"models": pack_models(models, layout), "config": config})
        before = worlds[0].charges
        requests = [changed(random.Random(f"{verb} {number}"), honest) for _ in worlds]
        finite = verb != "train.gan"  # points follow from a released model, whatever numbers were sent for it
        left = [world.send(verb, content, finite) for world, content in zip(worlds, requests, strict=True)]
        assert left[0] == left[1], number
        assert worlds[0].charges == worlds[1].charges
        charged = len(worlds[0].charges) > len(before)
        assert charged or left[0][0] == "error" or verb == "query.label", number
        refused += left[0][0] == "error"
    assert refused > 20
    assert (refused < 60) == (verb not in ("train.centroids", "evaluate"))  # which record level does not include
    assert "\x1b" not in caplog.text  # what the client's own log shows
    assert max(map(len, caplog.text.splitlines())) < 2000


@pytest.mark.parametrize("pair", WORLDS)
@pytest.mark.parametrize(
    ("verb", "change"),
    [
        ("train", HONEST),
        ("train", {**CHOICE, "loss-bound": 4.0}),
        ("query.losses", LOSSES),
        ("query.label", {**HONEST, **LABEL}),
    ],
    ids=["train", "choice", "losses", "label"],
)
def test_whether_a_request_is_answered_and_what_it_costs_depends_on_no_record(tmp_path, verb, change, pair):
    models = np.zeros((2 if verb == "query.label" else 1, LAYOUT.size), np.float32)
    worlds = [World(tmp_path / str(i), data) for i, data in enumerate(WORLDS[pair])]
    for number in range(1, 4):  # the budget ends after a few
        left = [world.ask(verb, {**change, "round": number}, models) for world in worlds]
        assert left[0] == left[1]
        assert worlds[0].charges == worlds[1].charges
    if verb != "query.label":
        assert worlds[0].charges


def drawn_gan():
    """Parameters of a GAN that a server sends, and their layout."""
    drawn = {n: v.detach().numpy() for n, v in build_gan(GAN["gan"], SHAPE, GAN["labels"]).named_parameters()}
    layout = Layout.of(drawn)
    return layout.flatten(drawn)[None], layout


@pytest.mark.parametrize("verb", ["train", "train.gan"])
def test_data_are_read_after_the_charge_and_never_for_a_refused_request(tmp_path, monkeypatch, verb):
    change, sent = ({**HONEST, **GAN}, drawn_gan()) if verb == "train.gan" else (HONEST, ())
    world = World(tmp_path / "world", WORLDS["another label"][0])
    charges = []

    def unreadable(*_, **__):
        charges.append(len(world.charges))
        raise OSError("record 3 of the file cannot be read")

    monkeypatch.setattr("coterie.datasets.own.own_shard", unreadable)
    failed = world.ask(verb, change, *sent)
    assert failed[:2] == ("error", "client 0 failed; see its own log for details")
    assert charges == [1]  # the charge was on disk
    for number in range(2, 10):
        left = world.ask(verb, {**change, "round": number}, *sent)
    assert left[1] == "client 0 rejects the request: it exceeds the client's budget"
    assert len(charges) == len(world.charges) < 9


def test_a_request_of_the_owner_s_form_is_answered_and_charged(tmp_path):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    kind, arrays, *_ = world.ask("train", HONEST)
    assert kind == "reply"
    assert set(arrays) == set(LAYOUT.names)
    (charge,) = world.charges
    assert charge["noise_multiplier"] == TERMS["noise_multiplier"]
    assert charge["sampling_rate"] == pytest.approx(8 / N)


def test_an_update_has_the_noise_that_was_charged_at_every_clipping_norm(tmp_path):
    """One record of N as public, full batches: an update over lr c / b is noise of the charged size, plus at most 1."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (1, *SHAPE)), np.array([1])
    for i, clip_norm in enumerate([1e-6, 1.0, 1e6]):
        world = World(tmp_path / str(i), data, epsilon=50.0)
        change = plans(clip_norm=clip_norm, batch_size=N, noise_multiplier=1.0, local_epochs=1)
        moved = []
        for number in range(1, 7):
            own_shard.cache_clear()
            config = {**CONFIGURED, **change, "round": number, "lr": 1.0}
            content = RecordDict(
                {"models": pack_models(np.zeros((1, LAYOUT.size), np.float32), LAYOUT), "config": ConfigRecord(config)}
            )
            message = Message(content, dst_node_id=1, message_type="train")
            update = app(message, Context(1, 1, world.node, RecordDict(), {})).content["update"]
            moved.append(np.concatenate([array.numpy().ravel() for array in update.values()]))
        units = np.stack(moved).astype(np.float64) * N / clip_norm
        # 6 x 34 normal draws: the sample deviation is within a third of 1 but once in 10^9 or so; data add at most 1.
        assert 0.66 < units.std(axis=0, ddof=1).mean() < 1.34
        assert np.linalg.norm(units.mean(axis=0)) < 1 + (np.sqrt(34) + 6.5) / np.sqrt(6)


def test_the_same_data_in_two_federations_share_one_budget(tmp_path):
    first = World(tmp_path / "first", WORLDS["another label"][0])
    other = World(tmp_path / "second", WORLDS["another label"][0])
    other.node |= {"client-id": 7, "data": first.node["data"]}
    answers = [world.ask("train", {**HONEST, "round": number})[0] for number in range(1, 9) for world in (first, other)]
    alone = World(tmp_path / "alone", WORLDS["another label"][0])
    by_itself = [alone.ask("train", {**HONEST, "round": number})[0] for number in range(1, 17)]
    assert 0 < answers.count("reply") == by_itself.count("reply") < 16
    assert other.charges == []  # its own data were never asked for
    assert len(first.charges) == answers.count("reply")


def test_a_refusal_does_not_tell_what_was_spent_elsewhere(tmp_path):
    texts = []
    for i, before in enumerate([2, 3]):
        world = World(tmp_path / str(i), WORLDS["another label"][0])
        for number in range(before):
            world.ask("train", {**plans(batch_size=4 + 4 * i), "round": number})
        for number in itertools.count(50):
            left = world.ask("train", {**plans(noise_multiplier=0.3), "round": number})
            if left[0] == "error":
                break
        texts.append(left)
    assert texts[0] == texts[1]
    assert texts[0][1] == "client 0 rejects the request: it exceeds the client's budget"


def test_charges_of_a_client_id_are_never_forgotten(tmp_path):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    world.ask("train", {**CHEAP, "round": 1})
    budget = tmp_path / "world" / "data" / BUDGET_FILE
    old = tmp_path / "world" / "state" / "client-0.ledger.jsonl"
    budget.rename(old)
    assert world.ask("train", {**CHEAP, "round": 2})[0] == "error"
    assert not budget.exists()


@pytest.mark.parametrize("damage", [lambda path: path.write_text("no ledger\n"), os.mkfifo, os.mkdir])
def test_a_damaged_old_ledger_is_not_ignored(tmp_path, damage):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    (tmp_path / "world" / "state").mkdir()
    damage(tmp_path / "world" / "state" / "client-0.ledger.jsonl")
    left = world.ask("train", HONEST)
    assert left[:2] == ("error", "client 0 cannot charge its budget; see its own log for details")
    assert world.charges == []


def test_a_rejected_request_takes_as_long_for_any_data(tmp_path):
    """Two hundred requests; the data of one client are ten thousand times those of the other, and are not read."""
    rng = np.random.default_rng(0)
    many = rng.integers(0, 256, (50_000, *SHAPE)), rng.integers(0, 2, 50_000)
    worlds = [World(tmp_path / str(i), data) for i, data in enumerate([(many[0][:5], many[1][:5]), many])]
    seconds = [[], []]
    for number in range(204):
        i = (number + number // 2) % 2  # in turn, each first as often
        began = time.perf_counter()
        left = worlds[i].ask("train", {**HONEST, "num-classes": 10, "round": number})
        taken = time.perf_counter() - began
        assert left[0] == "error"
        if number >= 4:
            seconds[i].append(taken)
    assert mannwhitneyu(*seconds).pvalue > 1e-10  # fails once in 10^10; of data that are read it is 1e-34
    began = time.perf_counter()
    assert worlds[1].ask("train", HONEST)[0] == "reply"
    assert time.perf_counter() - began > 5 * np.median(seconds[1])  # reading them would show


def test_replies_wait_where_the_owner_wants_it(tmp_path):
    world = World(tmp_path / "world", WORLDS["another label"][0], **{"reply-seconds": 0.5})
    for change in (HONEST, {}):
        began = time.perf_counter()
        world.ask("train", change)
        assert time.perf_counter() - began >= 0.5


@pytest.mark.parametrize(
    ("node", "complaint"),
    [
        ({"input-shape": ...}, "set both or neither"),
        ({"input-shape": ..., "num-classes": ...}, "epsilon requires input-shape and num-classes, or schema"),
        ({"input-shape": "4by4"}, "input-shape = '4by4': must be"),
        ({"num-classes": "two"}, "num-classes is 'two'; expected an integer"),
        ({"value-range": "1:0"}, "value-range = '1:0': must be"),
        ({"value-range": "0:nan"}, "value-range = '0:nan': must be"),
        ({"epsilon": 0.0}, "epsilon is 0.0; expected a finite number"),
        ({"epsilon": math.inf}, "epsilon is inf; expected a finite number"),
        ({"delta": 1.0}, "delta is 1.0; expected a finite number"),
        ({"delta": ...}, "set both or neither"),
        ({"budget-file": "budget.jsonl"}, "budget-file must be an absolute path"),
    ],
)
def test_a_node_configuration_that_makes_no_sense(tmp_path, node, complaint):
    world = World(tmp_path / "world", WORLDS["another label"][0], **node)
    world.node = {key: value for key, value in world.node.items() if value is not Ellipsis}
    assert world.ask("train", HONEST)[1] == "the node configuration has errors; see the client's own log"
    assert world.charges == []
    with pytest.raises((DeployError, DataError), match=re.escape(complaint)):
        client_of(NodeConfig.from_record(world.node))


def test_a_budget_file_in_use_by_another_process_is_refused(tmp_path):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    world.ask("train", CHEAP)
    with (tmp_path / "world" / "data" / BUDGET_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        left = world.ask("train", {**CHEAP, "round": 2})
    assert left[:2] == ("error", "client 0 cannot charge its budget; see its own log for details")
    assert len(world.charges) == 1
    assert world.ask("train", {**CHEAP, "round": 2})[0] == "reply"


def test_data_that_are_read_only_need_a_named_budget_file(tmp_path, monkeypatch, caplog):
    """Two federations with the same data would otherwise have two budgets."""
    monkeypatch.setattr("coterie.client.budget.os.access", lambda *_: False)
    node = {"budget-file": str(tmp_path / "budget.jsonl")}
    for federation in ("one", "other"):
        world = World(tmp_path / federation, WORLDS["another label"][0])
        left = world.ask("train", CHEAP)
        assert left[:2] == ("error", "client 0 cannot charge its budget; see its own log for details")
        assert "not writable, so the budget file of these data cannot be there: set budget-file" in caplog.text
        assert world.charges == []
        world.node |= node
        assert world.ask("train", CHEAP)[0] == "reply"
    assert len(read_ledger(tmp_path / "budget.jsonl")[1]) == 2


def test_a_budget_file_of_version_0_2_in_the_state_folder_must_be_named(tmp_path, caplog):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    world.ask("train", CHEAP)
    former = tmp_path / "world" / "state" / "budget-0123456789abcdef.jsonl"
    (tmp_path / "world" / "data" / BUDGET_FILE).rename(former)
    left = world.ask("train", {**CHEAP, "round": 2})
    assert left[:2] == ("error", "client 0 cannot charge its budget; see its own log for details")
    assert f"{former} contains charges for these data: set budget-file" in caplog.text
    world.node["budget-file"] = str(former)
    assert world.ask("train", {**CHEAP, "round": 2})[0] == "reply"
    assert len(read_ledger(former)[1]) == 2


def test_a_budget_file_that_lost_charges_is_refused_until_it_is_reconciled(tmp_path, caplog):
    """The losses are in tests/privacy/test_anchors.py."""
    world = World(tmp_path / "world", WORLDS["another label"][0])
    path, anchors = tmp_path / "world" / "data" / BUDGET_FILE, tmp_path / "world" / "state" / "client-0.anchors.jsonl"
    for number in (1, 2, 3):
        assert world.ask("train", {**CHEAP, "round": number})[0] == "reply"
    charged = count_events(world.charges)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    left = world.ask("train", {**CHEAP, "round": 4})
    assert left[:2] == ("error", "client 0 cannot charge its budget; see its own log for details")
    assert f"coterie budget reconcile {path} --anchors {anchors}" in caplog.text
    reconcile(path, anchors)
    assert world.ask("train", {**CHEAP, "round": 4})[0] == "reply"
    assert {event: 3 * count for event, count in count_events(world.charges).items()} == {
        event: 4 * count for event, count in charged.items()
    }


def test_a_charge_states_the_run_and_the_app_that_asked(tmp_path, monkeypatch):
    world = World(tmp_path / "world", WORLDS["another label"][0])
    world.ask("train", CHEAP)
    monkeypatch.setenv("COTERIE_APP_HASH", "ab" * 32)
    world.node["server"] = server = "fl.example.org:9092 0123456789abcdef"
    world.ask("train", {**CHEAP, "round": 2, "strategy": "ifca"})
    first, second = world.charges
    assert first["run"] == "1"
    assert not first.keys() & {"app", "server"}
    assert [second[key] for key in ("run", "app", "server", "strategy")] == ["1", "ab" * 32, server, "ifca"]
    assert spending(tmp_path / "world" / "data" / BUDGET_FILE).runs == "1: 2"
    assert world.ask("train", {**CHEAP, "round": 3, "strategy": "x" * 201})[0] == "error"
    assert len(world.charges) == 2
