"""What leaves a deployed client has the same bytes and objects whatever its data are."""

import json

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from kit.deployed import OWN, RECORDS

from coterie.client.app import app
from coterie.client.handlers import HANDLERS
from coterie.datasets import own_shard
from coterie.engine.in_process import LocalGrid
from coterie.models import build_gan, initialise
from coterie.models.autoencoder import Labeller
from coterie.server import RunConfig
from coterie.strategies.registry import strategy_class
from coterie.wire.messages import CENTROIDS, Layout, pack_models

SHAPE, CLASSES, N, K = (1, 4, 4), 2, 24, 100
LAYOUT = Layout.of(initialise("linear", SHAPE, CLASSES, 0))
CLIENT_LEVEL = RunConfig({**OWN, "clients": 1000, "clusters": 2, "strategy": "ifca"}).for_clients()
(TERMS,) = json.loads(RunConfig(RECORDS).plan.record_plans)
RECORD_LEVEL = RunConfig(RECORDS).for_clients()
GAN = {"gan": "gan-pendigits-gn", "labels": 2, "samples": 4, "average": 0.0}
GAN["feature-range"] = 1.0
LABELS = {"labels": 2, "encoder": "none", "release-counts": False}


def plans(**changes):
    return {"record-plans": json.dumps([TERMS | changes])}


def network(module=None):
    """The parameters of a network and their layout."""
    drawn = initialise("linear", SHAPE, CLASSES, 0)
    if module is not None:
        drawn = {name: value.detach().numpy() for name, value in module.named_parameters()}
    layout = Layout.of(drawn)
    return layout.flatten(drawn)[None], layout


def choices(best):
    """K models, of which one has the smallest loss where all labels are 0."""
    models = np.zeros((K, LAYOUT.size), np.float32)
    models[best, LAYOUT.sizes[0]] = 200.0  # bias of class 0: its gradient is zero
    return models, LAYOUT


def worlds(*, records=24):
    """(x, y) of clients whose updates, losses and numbers of records differ."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (records, *SHAPE), np.uint8)
    halves = np.arange(records) % 2
    return {
        "one class": (pixels, 0 * halves),
        "equal records of two classes": (0 * pixels, halves),
        "equal records": (0 * pixels + 255, 0 * halves),
        "other records": (255 - pixels, halves),
        "few records": (pixels[:7], halves[:7]),
        "many records": (np.tile(pixels, (30, 1, 1, 1)), np.tile(0 * halves, 30)),
    }


CHOICE = plans(selection="gumbel", selections=9, selection_epsilon=20.0, epsilon=100.0)
CHOICE |= {"choice": True, "loss-bound": 4.0}
ADAPTIVE = plans(clip_factor=0.5, clip_share=0.01)
LOSSES = {**plans(compared=4, models_per_message=4), "compared": 1, "loss-bound": 4.0}
REDRAW = {"redraw": np.roll(np.eye(K), 1, axis=1).ravel().tolist()}
KINDS = {
    "train": ("train", CLIENT_LEVEL, {}, choices),
    "train, redrawn": ("train", CLIENT_LEVEL, REDRAW, choices),
    "train, assigned": ("train", CLIENT_LEVEL, {"cluster": 64}, lambda best: network()),
    "train, records": ("train", RECORD_LEVEL, {**plans(), "counts-records": True}, lambda best: network()),
    "train, records, choice": ("train", RECORD_LEVEL, CHOICE, choices),
    "train, records, adaptive": ("train", RECORD_LEVEL, ADAPTIVE, lambda best: network()),
    "losses": ("query.losses", CLIENT_LEVEL, {"compared": K}, choices),
    "losses, records": ("query.losses", RECORD_LEVEL, LOSSES, lambda best: network()),
    "evaluate": ("evaluate", CLIENT_LEVEL, {}, choices),
    "gan": ("train.gan", RECORD_LEVEL, {**plans(), **GAN}, lambda best: network(build_gan(GAN["gan"], SHAPE, 2))),
    "label": ("query.label", RECORD_LEVEL, {**plans(), **LABELS}, lambda best: network(Labeller(SHAPE, 2, "none"))),
    "identity": ("query.identity", {}, {}, lambda best: network()),
}
LABELLED = [0, 1, 63, 64, 99]


def node_of(path):
    """The node configuration of a client with data in a folder."""
    place = {"data": str(path / "own.npz"), "state-dir": str(path / "state")}
    return {"client-id": 0, **place, "guarantee": "trusted-server"}


def reply(path, kind, data, best):
    own_shard.cache_clear()
    path.mkdir()
    np.savez(path / "own.npz", x=data[0], y=data[1])
    verb, config, extra, models = KINDS[kind]
    LocalGrid(1)  # messages have a sender
    content = {"models": pack_models(*models(best)), "config": ConfigRecord({**config, "round": 1, **extra})}
    message = Message(RecordDict(content), dst_node_id=1, message_type=verb)
    return app(message, Context(1, 1, node_of(path), RecordDict(), {}))


def test_the_replies_differ_in_what_could_change_their_size(tmp_path):
    def content(name, kind, data, best=0):
        return reply(tmp_path / name, kind, worlds()[data], best).content

    labels = [content(f"label {best}", "train", "one class", best)["reply"]["label"] for best in LABELLED]
    assert labels == LABELLED
    updates = [content(f"update of {world}", "train", world)["update"] for world in ("one class", "other records")]
    assert [any(array.numpy().any() for array in update.values()) for update in updates] == [False, True]
    scores = [content(f"scores {world}", "evaluate", world)["diagnostics"] for world in worlds()]
    assert len({score["num-examples"] for score in scores}) > 2
    assert len({score["accuracy"] for score in scores}) > 1


def test_every_verb_of_a_method_with_a_guarantee_is_here():
    assert set(HANDLERS) - {verb for verb, *_ in KINDS.values()} == {CENTROIDS}
    assert {strategy_class(name).units for name in ("kfed", "ffcm")} == {("none",)}
