"""Quantiles of columns: what one unit can change, and how near they are."""

import numpy as np
import pytest

from coterie.privacy import calibrate
from coterie.privacy.quantiles import BINS, noisy_histograms, noisy_quantiles, unit_histograms


def rows(rng, n, d):
    """Shares of ranges, some outside of them or missing."""
    values = rng.uniform(-0.5, 1.5, (n, d))
    values[rng.random((n, d)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1.0])
    return values


@pytest.mark.parametrize("case", range(30))
def test_adding_a_record_moves_all_histograms_by_at_most_sqrt_d(case):
    rng = np.random.default_rng(case)
    d = int(rng.integers(1, 6))
    values = rows(rng, int(rng.integers(2, 20)), d)
    difference = unit_histograms(values) - unit_histograms(values[1:])
    assert np.linalg.norm(difference) <= np.sqrt(d) + 1e-9


@pytest.mark.parametrize("case", range(30))
def test_adding_a_unit_with_all_its_records_moves_them_by_no_more(case):
    rng = np.random.default_rng(case)
    d = int(rng.integers(1, 6))
    values = rows(rng, 40, d)
    units = rng.integers(0, 5, 40).astype(str)
    others = units != units[0]
    difference = unit_histograms(values, units) - unit_histograms(values[others], units[others])
    assert np.linalg.norm(difference) <= np.sqrt(d) + 1e-9


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_the_noise_is_the_multiplier_times_the_sensitivity(columns):
    rng, histograms = np.random.default_rng(columns), np.full((columns, BINS), 5.0)
    noise = [noisy_histograms(histograms, 3.0, rng) - histograms for _ in range(100)]
    assert np.std(noise) == pytest.approx(3.0 * np.sqrt(columns), rel=0.05)
    assert abs(np.mean(noise)) < 0.3


def test_quartiles_are_near_and_the_stated_error_is_that_of_the_median():
    rng, noise = np.random.default_rng(0), calibrate(1.0, 1e-6, 1.0, 1)
    values = np.clip(rng.normal([0.4, 0.6], 0.1, (1000, 2)), 0, 1)
    histograms = unit_histograms(values)
    found = [noisy_quantiles(histograms, noise, rng) for _ in range(60)]
    medians = np.array([one.values[:, 1] for one in found])
    np.testing.assert_allclose(medians.mean(axis=0), [0.4, 0.6], atol=0.02)
    spreads = np.array([one.values[:, 2] - one.values[:, 0] for one in found]) / 1.349
    np.testing.assert_allclose(spreads.mean(axis=0), 0.1, rtol=0.25)
    below = np.array([(values < median).mean(axis=0) for median in medians])
    assert np.median(np.abs(below - 0.5)) <= found[0].error.mean()


@pytest.mark.parametrize("count", [0.0, 1.0])
def test_almost_no_records_have_a_large_error_and_finite_values(count):
    for seed in range(20):
        found = noisy_quantiles(np.full((3, BINS), count / BINS), 10.0, np.random.default_rng(seed))
        assert np.isfinite(found.values).all()
        assert (np.diff(found.values, axis=1) >= 0).all()
        assert (found.error > 0.2).all()
