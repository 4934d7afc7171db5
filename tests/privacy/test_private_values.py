"""Exact values of records and units have no exit but noisy sums (the type check: tests/test_typing.py)."""

import math
import operator

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy import PerRecord, PerUnit, PrivacyError
from coterie.privacy.score_histograms import CELLS, UnitCounts

VALUES = [PerRecord([[12345.0]]), PerUnit([[12345.0]]), UnitCounts(np.full(CELLS, 12345.0))]
EXITS = [float, int, len, list, sum, dict, vars, hash, bytes, memoryview, operator.index, np.sum, np.mean, np.asarray]
EXITS += [str, repr, abs, math.fsum, max, np.array, "{}".format, "%s".__mod__, lambda v: v[0], lambda v: v + 0]
EXITS += [lambda v: v == 12345.0, lambda v: v > 1, lambda v: np.float64(v), lambda v: v * 1.0]


@for_rows("value", VALUES, ids=lambda value: type(value).__name__)
@for_rows("exit", EXITS)
def test_nothing_converts_an_exact_value(value, exit):
    try:
        left = exit(value)
    except (TypeError, AttributeError):
        return
    assert "12345" not in str(left)
    assert left in (value, False) or isinstance(left, str | np.ndarray) or left == hash(value)
    assert not isinstance(left, np.ndarray) or left.dtype == object


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_the_only_public_methods_are_these(value):
    methods = {name for name in dir(value) if not name.startswith("_")}
    assert methods == {PerRecord: {"per_unit"}, PerUnit: {"noisy_sum"}, UnitCounts: {"noisy"}}[type(value)]


@pytest.mark.parametrize("others", [0, 1, 40])
def test_a_unit_of_many_records_moves_a_sum_by_at_most_one(others):
    """With the same noise; a patient's records have the largest loss, or none that is finite."""
    rng = np.random.default_rng(0)
    rest, units = rng.uniform(0, 4, (others, 3)), np.arange(others)

    def released(further, of):
        values = PerRecord(np.concatenate([rest, further])).per_unit(np.concatenate([units, of]))
        return values.noisy_sum(4.0, lambda shape: np.random.default_rng(1).normal(size=shape))

    without = released(np.zeros((0, 3)), np.zeros(0, np.int64))
    for value in (1e9, math.inf, math.nan, 4.0):
        for records in (1, 2, 9):
            moved = released(np.full((records, 3), value), np.full(records, others)) - without
            assert np.abs(moved).max() == pytest.approx(1)


def test_without_units_each_record_is_one():
    values = PerRecord([[1.0], [3.0]])
    assert values.per_unit(None).noisy_sum(4.0, np.zeros) == [1.0]
    assert values.per_unit(np.array([0, 0])).noisy_sum(4.0, np.zeros) == [0.5]
    assert PerRecord([[1.0], [3.0], [2.0], [2.0]]).per_unit(np.array([0, 1, 0, 0])).noisy_sum(5.0, np.zeros) == [
        14 / 15
    ]
    with pytest.raises(PrivacyError, match="bound of a record's loss"):
        values.per_unit(None).noisy_sum(math.nan, np.zeros)


def test_shares_of_units_have_the_noise_of_all_of_them():
    """A unit adds `share` to the counts before they are divided by it: the noise is divided, too."""
    rngs = [np.random.default_rng(0) for _ in range(3)]
    of_records = UnitCounts(np.zeros(CELLS)).noisy(0.01, rngs[0])
    of_units = UnitCounts(np.zeros(CELLS), 100).noisy(1.0, rngs[1])
    np.testing.assert_allclose(of_units, of_records / 100)
    moved = UnitCounts(100 * np.eye(CELLS)[3], 100).noisy(1.0, rngs[2]) - of_units
    np.testing.assert_allclose(moved, np.eye(CELLS)[3])
