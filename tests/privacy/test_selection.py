"""Private choices: drawn as the exponential mechanism, and charged as a Gaussian that dominates it."""

import math
from collections import Counter

import numpy as np
import pytest
from kit.tables import for_rows
from scipy.special import ndtri, softmax
from scipy.stats import chisquare

from coterie.privacy import Event, PerUnit, PrivacyError, RecordPlan, noisy_argmin, selection_event
from coterie.privacy.discrete_gaussians import gaussian_delta
from coterie.privacy.selection import identifier_gap, identifier_mu, noisy_labels
from coterie.wire import TrainRequest

LOSSES = np.array([[0.2, 0.9, 0.5], [0.1, 0.4, 0.6], [0.7, 0.2, 0.9]])


def test_the_choice_follows_the_exponential_mechanism():
    rng = np.random.default_rng(0)
    chosen = np.bincount([noisy_argmin(PerUnit(LOSSES), 1.0, 2.0, rng) for _ in range(20_000)], minlength=3)
    expected = softmax(-2.0 * LOSSES.sum(axis=0))
    # Over fresh seeds this fails once in 1,000 runs.
    assert chisquare(chosen, 20_000 * expected).pvalue > 1e-3


@for_rows("wild", [1e9, math.inf, -math.inf, -5.0, math.nan])
def test_one_record_moves_a_choice_by_the_bound_at_most(wild):
    record = np.array([[wild, 0.5, 0.0]])
    clipped = np.clip(np.nan_to_num(record, nan=1.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    for seed in range(50):
        both = [
            noisy_argmin(PerUnit(np.concatenate([LOSSES, extra])), 1.0, 1.0, np.random.default_rng(seed))
            for extra in (record, clipped)
        ]
        assert both[0] == both[1]


@for_rows("epsilon", [0.001, 0.02, 0.5, 1.0, 3.0, 8.0])
def test_the_gaussian_dominates_every_pair_of_bounded_range(epsilon):
    """The corner of the two-point pair with losses t and t - e lies on a Gaussian curve of no larger shift."""
    mu = 1 / selection_event(epsilon).noise_multiplier
    corner = []
    for t in np.linspace(0, epsilon, 402)[1:-1]:
        under = (1 - math.exp(t - epsilon)) / (math.exp(t) - math.exp(t - epsilon))
        corner.append(ndtri(math.exp(t) * under) - ndtri(under))
    assert max(corner) <= mu * (1 + 1e-6)
    assert max(corner) == pytest.approx(mu, rel=1e-3)  # and is no larger than it must be


def test_a_small_choice_costs_a_little_more_than_its_zcdp():
    assert selection_event(0.02).noise_multiplier == pytest.approx(2 / 0.02 * 0.798, rel=0.001)  # sqrt(2 / pi)


def test_noisy_labels_keep_the_truth_with_its_odds():
    rng, gap, k = np.random.default_rng(0), 1.2, 4
    drawn = noisy_labels(np.full(40_000, 2), k, gap, rng)
    weights = np.array([1, 1, math.exp(gap), 1])
    assert chisquare(np.bincount(drawn, minlength=k), 40_000 * weights / weights.sum()).pvalue > 1e-3
    nobody = noisy_labels(np.full(40_000, -1), k, gap, rng)
    assert chisquare(np.bincount(nobody, minlength=k)).pvalue > 1e-3


def hockey_stick(p, q, loss):
    return float(np.maximum(p - math.exp(loss) * q, 0).sum())


@for_rows("k", range(2, 9))
@for_rows("gap", [0.01, 0.5, 2.0, 6.0])
def test_the_gaussian_dominates_replaced_and_withdrawn_labels(k, gap):
    mu, total = identifier_mu(gap, k), math.exp(gap) + k - 1
    one, other = np.ones(k), np.ones(k)
    one[0] = other[1] = math.exp(gap)
    one, other, nobody = one / total, other / total, np.full(k, 1 / k)
    for loss in np.linspace(0, gap + 0.1, 40):
        most = max(hockey_stick(p, q, loss) for p, q in ((one, other), (one, nobody), (nobody, one)))
        assert most <= gaussian_delta(mu, loss) + 1e-12


@for_rows("k", [2, 4, 10])
@for_rows("mu", [1e-4, 0.1, 0.45, 2.0, 5.0])
def test_the_gap_is_the_largest_that_mu_pays_for(k, mu):
    gap = identifier_gap(mu, k)
    assert identifier_mu(gap, k) <= mu
    assert identifier_mu(gap, k) == pytest.approx(mu, rel=1e-3)


def test_ends():
    assert identifier_gap(1.0, 1) == 0.0
    assert identifier_gap(1e3, 4) == 30.0
    assert selection_event(50.0).noise_multiplier == pytest.approx(1 / 13.316, rel=1e-3)
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="epsilon of a selection must be positive"):
            selection_event(epsilon)
    for epsilon in (1e-16, 1e3):
        with pytest.raises(PrivacyError, match="out of range"):
            selection_event(epsilon)
    with pytest.raises(PrivacyError, match="bound of a record's loss"):
        noisy_argmin(PerUnit(LOSSES), 0.0, 1.0, np.random.default_rng(0))


def test_a_reply_pays_for_the_choice_that_its_request_asks_for():
    numbers = {"num_examples": 60, "batch_size": 10, "rounds": 3, "epsilon": 5.0, "delta": 1e-5, "local_epochs": 2}
    plan = RecordPlan(**numbers, noise_multiplier=1.5, selection="gumbel", selections=7, selection_epsilon=0.3)
    steps = Counter({Event(1 / 6, 1.5): 12})
    assert plan.charges(TrainRequest()) == steps
    assert plan.charges(TrainRequest(choice=True)) == steps + Counter({selection_event(0.3): 1})
