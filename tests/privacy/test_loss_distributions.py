"""Privacy loss distributions on arrays have every digit of dp-accounting's."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from kit.tiers import mark_slow

from coterie.privacy.accountants import Event, _symmetrised_pld
from coterie.privacy.loss_distributions import on_arrays, poisson_gaussian

DELTAS = (1e-12, 1e-9, 1e-5, 1e-3, 0.1, 0.5)
RELEASES = [
    (1.0, 1.0, 1e-3),
    (1.0, 0.3, 1e-3),
    (1.0, 50.0, 1e-3),  # few losses
    (1.0, 5000.0, 1e-6),
    (0.5, 0.8, 1e-3),
    (0.5, 0.3, 1e-3),
    (0.1, 1.0, 1e-3),
    (0.01, 0.7, 1e-3),
    (0.001, 4.0, 1e-4),  # few losses
    (1e-5, 1.0, 1e-3),
    (1 - 1e-9, 2.0, 1e-3),
    (0.999, 0.5, 1e-3),
]


def library(rate, noise, grid):
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=grid, neighboring_relation=relation
    )


def assert_equal(ours, theirs):
    for side in ("_pmf_remove", "_pmf_add"):
        one, other = (getattr(each, side).to_dense_pmf() for each in (ours, theirs))
        assert one._lower_loss == other._lower_loss
        np.testing.assert_array_equal(one._probs, other._probs)
        assert one._infinity_mass == other._infinity_mass
    for delta in DELTAS:
        assert ours.get_epsilon_for_delta(delta) == theirs.get_epsilon_for_delta(delta)
    for epsilon in (0.0, 0.5, 3.0, math.inf):
        assert ours.get_delta_for_epsilon(epsilon) == theirs.get_delta_for_epsilon(epsilon)


#: Releases with so many losses that a composition takes long.
MANY = [(1.0, 0.3, 1e-3), (0.5, 0.3, 1e-3), (0.999, 0.5, 1e-3)]


@pytest.mark.parametrize(("rate", "noise", "grid"), mark_slow(RELEASES, MANY))
def test_a_release_and_its_compositions(rate, noise, grid):
    ours, theirs = poisson_gaussian(noise, rate, grid), library(rate, noise, grid)
    assert_equal(ours, theirs)
    ours = on_arrays(ours)
    for count in (2, 3, 40):
        assert_equal(ours.self_compose(count), theirs.self_compose(count))
    assert_equal(ours.compose(ours), theirs.compose(theirs))
    assert_equal(ours.self_compose(5).compose(ours), theirs.self_compose(5).compose(theirs))
    assert_equal(ours.compose(ours.self_compose(5)), theirs.compose(theirs.self_compose(5)))


@pytest.mark.parametrize(("rate", "noise"), [(0.3, 0.7), (1.0, 2.0), (0.05, 20.0)])
def test_a_distribution_of_other_origin(rate, noise):
    theirs = _symmetrised_pld(Event(rate, noise, "fixed"), 1e-3)
    ours = on_arrays(theirs)
    assert_equal(ours.self_compose(10), theirs.self_compose(10))
    nothing = pld.identity(value_discretization_interval=1e-3)
    mixed = theirs.compute_mixture(nothing, 0.4)
    assert_equal(on_arrays(mixed).self_compose(7), mixed.self_compose(7))


def test_losses_beyond_a_double():
    theirs = library(1.0, 0.05, 1e-2)
    assert_equal(on_arrays(theirs).self_compose(4), theirs.self_compose(4))


def test_random_releases():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rate, noise = 10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-0.4, 2)
        ours, theirs = poisson_gaussian(noise, rate, 1e-3), library(rate, noise, 1e-3)
        count = int(rng.integers(2, 300))
        assert_equal(on_arrays(ours).self_compose(count), theirs.self_compose(count))
