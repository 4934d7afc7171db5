"""Two worlds whose data differ in one record, unit or client, and all that leaves them, with the same randomness."""

from __future__ import annotations

import random
import secrets

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

LEVEL = 20  # INFO
#: Entries of charges that are clocks.
CLOCKS = ("time", "uptime", "elapsed")


class Randomness:
    """All secrets of a process, drawn from one seed, so that two worlds draw the same ones."""

    def __init__(self, monkeypatch):
        self._of_numpy = np.random.default_rng
        for name, draw in {
            "randbits": lambda bits: self._rng.getrandbits(bits),
            "randbelow": lambda below: self._rng.randrange(below),
            "token_bytes": lambda size=32: self._rng.randbytes(size),
            "token_hex": lambda size=32: self._rng.randbytes(size).hex(),
        }.items():
            monkeypatch.setattr(secrets, name, draw)
        monkeypatch.setattr(np.random, "default_rng", self._seeded)
        generated = staticmethod(lambda: X25519PrivateKey.from_private_bytes(self._rng.randbytes(32)))
        monkeypatch.setattr(X25519PrivateKey, "generate", generated)
        self.restart()

    def restart(self):
        """Draw the same again from now on."""
        self._rng = random.Random(0)

    def _seeded(self, seed=None):
        return self._of_numpy(self._rng.getrandbits(64) if seed is None else seed)


def sizes_of(message):
    """Bytes of the message, and kind and bytes of every object that Flower sends."""
    objects = [(type(each).__name__, len(each.deflate())) for each in get_all_nested_objects(message).values()]
    return len(message_to_proto(message).SerializeToString()), objects


def outputs_of(content):
    """Every number and text of a message, by the names of its record and entry; its padding shows in its size."""
    outputs = {}
    for record, entries in {**content.array_records, **content.metric_records, **content.config_records}.items():
        for name in entries.keys() - {"padding"}:
            value = entries[name]
            outputs[f"{record}.{name}"] = value.numpy() if hasattr(value, "numpy") else value
    return outputs


def differing(left, right):
    """The names of outputs that are not equal in two worlds, or are in one of them alone."""

    def equal(name):
        values = left[name], right[name]
        if all(isinstance(value, np.ndarray) for value in values):
            return values[0].dtype == values[1].dtype and np.array_equal(*values, equal_nan=True)
        return type(values[0]) is type(values[1]) and values[0] == values[1]

    return {name for name in left.keys() | right.keys() if name not in left or name not in right or not equal(name)}


def distance(left, right, prefix, order=2):
    """How far all numbers whose names begin with a prefix are apart."""
    names = [name for name in left if name.startswith(prefix)]
    moved = [np.subtract(right[name], left[name], dtype=np.float64).ravel() for name in names]
    return float(np.linalg.norm(np.concatenate(moved), order))
