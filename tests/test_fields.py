"""Limits of fields: each is declared once, and holds for every object that is made."""

import math

import pytest
from kit.tables import for_rows

from coterie.client.dpsgd import DPSGD
from coterie.guard.terms import Declared, Terms
from coterie.privacy import Banded, Joint, RecordPlan, RRSlot
from coterie.rounds.aggregation import Aggregator
from coterie.strategies import StrategyOptions

_PLAN = {"clients": 20, "num_clusters": 2, "sampling_rate": 0.5, "rounds": 4, "epsilon": 8.0, "delta": 1e-3}
_PLAN |= {"clip_norm": 1.0, "noise_multiplier": 1.0, "identifier_share": 0.1}
MADE = [
    Joint(**_PLAN),
    RRSlot(**_PLAN),
    Banded(**_PLAN),
    RecordPlan(num_examples=100, batch_size=10, rounds=2, epsilon=8.0, delta=1e-3, noise_multiplier=1.0),
    DPSGD(num_examples=100, batch_size=10, epochs=1, lr=0.1, clip_norm=1.0, noise_multiplier=1.0),
    Declared(noise_multiplier=1.0, sampling_rate=0.1, steps=10),
    Terms(epsilon=8.0, delta=1e-3, num_examples=100, state_dir="/state"),
    Aggregator(),
    StrategyOptions(),
]


def beside(kind):
    """Values that a field does not allow."""
    yield from (True, b"1")
    if kind.choices:
        yield from ("", "other", 1)
        return
    yield from ("1", math.nan, math.inf, -math.inf)
    low, high = kind.bounds.low, kind.bounds.high
    yield from (low - 1, *([low] if kind.bounds.above else []), *([0.5 + max(low, 0)] if kind.types == (int,) else []))
    yield from (high + 1, *([high] if kind.bounds.below else [])) if math.isfinite(high) else ()


@for_rows("made", MADE)
def test_no_object_has_a_value_beyond_the_declared_limits(made):
    limits = made._limits()
    assert limits
    for name, kind in limits.items():
        for wrong in beside(kind):
            with pytest.raises(made.error, match=f"^{name.replace('_', '-')} must be "):
                type(made)(**{**vars(made), name: wrong})
        if not kind.optional:
            with pytest.raises(made.error, match=f"^{name.replace('_', '-')} must be "):
                type(made)(**{**vars(made), name: None})
