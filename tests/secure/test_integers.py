"""The integer grid keeps norms, and its noise has the law that the theorem is about."""

import math

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.secure_aggregation import discrete_gaussian, from_grid, to_grid, to_modulus


@for_rows("case", range(60))
def test_integers_have_a_norm_of_at_most_the_steps_and_err_by_half_a_step(case):
    rng = np.random.default_rng(case)
    n = int(rng.choice([1, 2, 5, 100, 5_000]))
    vector = rng.standard_normal(n) * 10.0 ** rng.integers(-8, 9)
    grid = to_grid(vector)
    assert sum(int(entry) ** 2 for entry in grid) <= STEPS**2
    norm = np.linalg.norm(vector)
    room = 1 - math.sqrt(n) / (2 * STEPS)
    np.testing.assert_allclose(grid / STEPS, vector * room / max(norm, 1), atol=0.5001 / STEPS)


@for_rows("entry", [1e308, 5e-324, -1e-300, 2.0**60])
def test_huge_and_tiny_entries_keep_the_norm(entry):
    grid = to_grid(np.full(1000, entry))
    assert sum(int(each) ** 2 for each in grid) <= STEPS**2


@for_rows("vector", [[math.nan], [math.inf], [1.0, -math.inf], [[1.0]]])
def test_what_is_no_vector_of_numbers_is_refused(vector):
    with pytest.raises(ValueError, match="finite entries"):
        to_grid(vector)


def test_a_vector_beyond_the_bound_of_rounding_is_refused():
    with pytest.raises(ValueError, match="at most"):
        to_grid(np.zeros(round((0.2 * 100) ** 2) + 1), steps=100)


def test_an_empty_vector_stays_empty():
    assert to_grid([]).tolist() == []


def test_sums_modulo_2_32_are_those_of_the_integers():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((400, 50)) / 10
    total = np.sum([to_modulus(to_grid(vector)) for vector in vectors], axis=0, dtype=np.uint32)
    np.testing.assert_allclose(from_grid(total), vectors.sum(axis=0), atol=400 * 1e-4)


def expected(std, reach):
    """Probabilities of -reach to reach, by the definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2))
    return weights / weights.sum()


@for_rows("std", [1.0, 1.5, 3.0, 32.0])
def test_noise_has_the_discrete_gaussian_s_probabilities(std):
    draws = discrete_gaussian(np.random.default_rng(3), std, 200_000)
    reach = math.ceil(8 * std)
    counts = np.bincount(draws + reach, minlength=2 * reach + 1)
    probable = expected(std, reach)
    kept = probable * len(draws) >= 20
    pulled = (counts[kept] - probable[kept] * len(draws)) ** 2 / (probable[kept] * len(draws))
    assert pulled.sum() < kept.sum() + 5 * math.sqrt(2 * kept.sum())


@pytest.mark.parametrize("std", [32.0, 7800.0])
def test_the_sum_of_70_clients_has_70_times_the_variance(std):
    rng = np.random.default_rng(4)
    sums = sum(discrete_gaussian(rng, std, 20_000) for _ in range(70))
    assert sums.var() == pytest.approx(70 * std**2, rel=0.04)
    assert abs(sums.mean()) < 5 * std * math.sqrt(70 / 20_000)
    inside = np.mean(np.abs(sums) <= std * math.sqrt(70))
    assert inside == pytest.approx(0.6827, abs=0.02)


@for_rows("std", [0.0, 0.99, -1.0, math.nan, math.inf, 2.0**29])
def test_standard_deviations_out_of_range_are_refused(std):
    with pytest.raises(ValueError, match="standard deviation"):
        discrete_gaussian(np.random.default_rng(), std, 3)
