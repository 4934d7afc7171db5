"""Estimates from histograms of scores: exact where there is no noise, and their errors where there is."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

from coterie.privacy.score_histograms import BINS, CELLS, ScoreHistogram, count_scores, sum_of_clients
from coterie.results import RoundRecord
from coterie.rounds.score_estimates import estimate, estimated
from coterie.tasks import performance

NAMES = ("roc_auc", "average_precision", "sensitivity_at_90", "brier")


def records(seed, number, share, area):
    """Labels, and logits that are calibrated."""
    rng, shift = np.random.default_rng(seed), np.sqrt(2) * norm.ppf(area)
    labels = (np.arange(number) < share * number).astype(int)
    logits = shift * (rng.normal(size=number) + shift * labels) - shift**2 / 2 + np.log(share / (1 - share))
    return labels, logits


def exact(labels, logits):
    return performance.of_classes(labels, np.stack([1 - expit(logits), expit(logits)], axis=1))


@pytest.mark.parametrize(("share", "area"), [(0.2, 0.7), (0.5, 0.85), (0.1, 0.95)])
def test_without_noise_only_bins_are_lost(share, area):
    labels, logits = records(0, 3000, share, area)
    histogram = ScoreHistogram(count_scores(logits, labels).reshape(2, BINS), np.zeros(2))
    found, true = estimate(histogram), exact(labels, logits)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(true, name), abs=0.02), name
    assert found.roc_auc == pytest.approx(true.roc_auc, abs=0.005)
    assert found.positive_share == pytest.approx(share, abs=1e-9)
    assert set(found.errors.values()) == {0.0}
    assert all(abs(mean - observed) < 0.15 for mean, observed, _ in found.calibration)


def test_clients_together_and_the_stated_errors():
    errors, stated = [], []
    for seed in range(8):
        labels, logits = records(seed, 6000, 0.2, 0.85)
        rng = np.random.default_rng(seed)
        places = np.array_split(rng.permutation(6000), 300)
        unit = sum_of_clients(count_scores(logits[some], labels[some]) for some in places)
        found = estimate(ScoreHistogram.of_units(unit + 2.0 * rng.standard_normal(CELLS), 2.0))
        errors.append(found.roc_auc - exact(labels, logits).roc_auc)
        stated.append(found.errors["roc_auc"])
    assert np.sqrt(np.mean(np.square(errors))) < 0.025
    assert 0.3 * np.std(errors) < np.mean(stated) < 3 * np.std(errors)


@pytest.mark.parametrize("counts", [np.zeros((2, BINS)), -np.ones((2, BINS)), np.eye(2, BINS) * 1e-3])
def test_noise_that_hides_all_records_gives_no_estimate(counts):
    assert estimate(ScoreHistogram(counts, np.ones(2))) is None


def test_an_evaluation_without_a_histogram_has_no_estimates():
    assert estimated(RoundRecord(round=1)) is None


def test_wild_histograms_give_numbers_in_range_or_none():
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e3, 1e12):
        found = estimate(ScoreHistogram(rng.normal(size=(2, BINS)) * scale + scale / 2, np.full(2, scale)))
        for name in NAMES if found else ():
            assert 0 <= getattr(found, name) <= 1
