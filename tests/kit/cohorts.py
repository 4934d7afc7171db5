"""Small cohorts: networks by name with a start for each client, records for them, and generators."""

import numpy as np

from coterie.datasets import Shard, TestSet
from coterie.models import build, initialise
from coterie.wire.messages import Layout

CLASSES = 3
SHAPES = {"mlp-32": (1, 8, 8), "cnn-tiny": (1, 8, 8), "resnet18-gn": (3, 8, 8), "lstm-char": (10,)}


def shards_of(name, sizes=(4, 9, 6)):
    found = []
    for client, size in enumerate(sizes):
        rng = np.random.default_rng(client)
        x = rng.standard_normal((size, *SHAPES[name])).astype(np.float32)
        x = rng.integers(CLASSES, size=x.shape) if name == "lstm-char" else x
        y = rng.integers(CLASSES, size=size)
        found.append(Shard(client, 0, x, y, TestSet(x, y)))
    return found


def start_of(name, clients=3):
    drawn = [initialise(name, SHAPES[name], CLASSES, seed) for seed in range(clients)]
    layout = Layout.of(drawn[0])
    return build(name, SHAPES[name], CLASSES), layout, np.stack([layout.flatten(each) for each in drawn])


def rngs(seed=0, clients=3):
    return [np.random.default_rng([seed, client]) for client in range(clients)]
