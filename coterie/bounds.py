"""Bounds and choices of values that a run's settings and the requests to its clients share.

A client checks what a server asks, and the server checks its settings before the run starts. Each bound stands here
once, so that no setting passes the first check and fails the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """A closed range of finite numbers; ``above`` and ``below`` leave out its ends."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        least = self.low < value if self.above else self.low <= value  # NaN is not in it
        most = value < self.high if self.below else value <= self.high
        return least and most and (isinstance(value, int) or math.isfinite(value))

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{_text(self.low)}, {_text(self.high)}{')' if self.below else ']'}"

    @property
    def in_words(self) -> str:
        """The finite ends, such as "above 0 and at most 1"."""
        ends = {"above" if self.above else "at least": self.low, "below" if self.below else "at most": self.high}
        return " and ".join(f"{name} {_text(end)}" for name, end in ends.items() if math.isfinite(end))


def _text(end: float) -> str:
    return str(end) if isinstance(end, int) else f"{end:g}"


#: Characters of a text, and of the schema of tables.
MAX_TEXT, MAX_SCHEMA = 4096, 2**20
#: Record-level plans in one request.
MAX_PLANS = 10_000
MAX_CLUSTERS = 10_000
#: Clusters among which clients redraw their labels, whose matrix of probabilities is part of a request.
MAX_REDRAWN = 100

COUNT, SIZE = Bounds(1, 1_000_000_000), Bounds(0, 1_000_000_000)
ROUNDS = Bounds(1, 1_000_000)
SEED = Bounds(0, 2**63 - 1)
CLUSTERS = Bounds(1, MAX_CLUSTERS)
NUM_CLASSES = Bounds(0, 1_000_000)
LOCAL_EPOCHS = Bounds(1, 10_000)
LEARNING_RATE = Bounds(0, 1e3, above=True)
DIRICHLET_ALPHA = Bounds(0, 1e9)
NON_IID_LEVEL = Bounds(-1, 1)
CLIP_NORM = Bounds(1e-6, 1e6)
LOSS_BOUND = Bounds(1e-6, 1e6)
EPSILON = Bounds(0, 1e12, above=True)
PENALTY_WEIGHT = Bounds(0, 1e6)
GAN_SAMPLES = Bounds(0, 10_000_000)
EMA_DECAY = Bounds(0, 0.9999)
FUZZIFIER = Bounds(1, 100, above=True)

DEVICES = ("auto", "cpu", "cuda")
GPU_PRECISIONS = ("float32", "tf32", "bfloat16")
GAN_PRECISIONS = ("float32", "bfloat16")
#: Model that a client trains after rebalancing changed its label.
REBALANCE_TRAIN = ("own", "assigned")
