"""The cost of discrete Gaussian noise: against exact sums over integers, and each step of its proof."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from coterie.privacy import Event, PrivacyError, Secure, epsilon
from coterie.privacy.accountants import MIN_NOISE
from coterie.privacy.discrete_gaussians import DIMENSIONS, STEPS, discrete_delta, gaussian_delta
from coterie.privacy.mechanisms.secure import MAX_PARAMETERS


def released(noise, count=1):
    return {Event(1.0, noise, "discrete"): count}


def exact_delta(deviation, shift, target):
    """Delta of a discrete Gaussian on the integers and its shift, by the sums of both beyond the best threshold."""
    points = np.arange(-math.ceil(15 * deviation), math.ceil(15 * deviation))
    law = np.exp(-0.5 * (points / deviation) ** 2)
    law /= law.sum()
    middle = target * deviation**2 / shift
    return law[points > middle - shift / 2].sum() - math.exp(target) * law[points > middle + shift / 2].sum()


@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("small", [1e-3, 1e-5, 1e-8])
def test_epsilon_is_the_exact_one_and_at_most_one_part_in_a_thousand_more(noise, small):
    """Of releases whose shift is in one entry; T of them are one with 1 / sqrt(T) of the noise."""
    bound = epsilon(released(noise), small)
    assert exact_delta(noise * STEPS, STEPS, bound) <= small
    assert exact_delta(noise * STEPS, STEPS, 0.999 * bound - 1e-6) > small
    for target in (0.0, 0.3, 1.0, 3.0):
        assert exact_delta(noise * STEPS, STEPS, target) <= discrete_delta(released(noise), target)


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_it_costs_what_gaussian_noise_does(count):
    for noise in (0.5, 1.5, 40.0):
        discrete = epsilon(released(noise * math.sqrt(count), count), 1e-5)
        gaussian = epsilon({Event(1.0, noise): 1}, 1e-5)
        assert gaussian - 1e-4 <= discrete <= gaussian * 1.001 + 1e-4
        assert discrete < 0.97 * epsilon(released(noise * math.sqrt(count), count), 1e-5, "rdp")


def test_any_events_in_any_order():
    first, second = released(1.0, 3), released(2.5, 7)
    both, square = {**first, **second}, 3 + 7 / 2.5**2
    least = float(gaussian_delta(math.sqrt(square), 2.0))
    assert least < discrete_delta(both, 2.0) < 1.01 * least
    assert discrete_delta(both, 2.0) == discrete_delta({**second, **first}, 2.0)
    assert epsilon(both, 1e-6) == epsilon({**second, **first}, 1e-6)


def test_too_many_releases_cost_what_renyi_divergences_say():
    for events in (released(0.05, 1000), released(1.0, 10**6)):
        assert discrete_delta(events, 1.0) == 1.0
        assert epsilon(events, 1e-5) == epsilon(events, 1e-5, "rdp")
    assert math.isinf(epsilon(released(0.9 * MIN_NOISE), 1e-5))
    assert epsilon({}, 1e-5) == 0.0
    with pytest.raises(PrivacyError, match="different adjacencies"):
        epsilon({Event(1.0, 1.0): 1, **released(1.0)}, 1e-5)


# ---- the proof --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [2.0, 9.0, 30.0])
def test_discrete_and_rounded_gaussian_noise_differ_by_these_factors(variance):
    """Lemma 3, on all integers up to 6 deviations."""
    deviation = math.sqrt(variance)
    points = np.arange(-math.ceil(40 * deviation), math.ceil(40 * deviation))
    discrete = np.exp(-0.5 * points**2 / variance)
    discrete /= discrete.sum()
    near = np.abs(points) <= 6 * deviation
    left = -np.abs(points[near])  # in the left tail, where differences are exact
    rounded = ndtr((left + 0.5) / deviation) - ndtr((left - 0.5) / deviation)
    ratios = np.log(discrete[near] / rounded)
    assert ratios.max() <= 1 / (24 * variance) + 1e-12
    assert ratios.max() >= 0.9 / (24 * variance)  # the bound is attained in the middle
    assert np.all(-ratios <= points[near] ** 2 / (24 * variance**2) + 1e-9)


def test_the_noise_of_the_largest_vector_is_rarely_longer_than_assumed():
    """The constant 1.04: lengths of chi-squared law (Laurent and Massart, 2000, Lemma 1), rounding, and the shift."""
    least, rare = (MIN_NOISE * STEPS) ** 2, -math.log(1e-40)
    length = 1 + 2 * math.sqrt(rare / DIMENSIONS) + 2 * rare / DIMENSIONS
    rounded = 1.01 * length + 101 * 0.5**2 / least
    assert 1.01 * rounded + 101 * STEPS**2 / (least * DIMENSIONS) <= 1.04


def test_no_vector_is_larger_than_the_proof_assumes():
    for num_clusters in (1, 3, 1000, MAX_PARAMETERS):
        size = MAX_PARAMETERS // num_clusters
        clients = max(num_clusters, 10)
        plan = object.__new__(Secure)  # the number of clusters is at most that of clients
        vars(plan).update(num_clusters=num_clusters, clients=clients)
        assert plan.vector_size(size) <= DIMENSIONS
