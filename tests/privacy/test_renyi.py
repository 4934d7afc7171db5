"""Renyi divergences on arrays are dp-accounting's, where their series converge and where they do not."""

import math

import dp_accounting
import numpy as np
from dp_accounting.rdp import RdpAccountant
from kit.tables import for_rows

from coterie.privacy.renyi import poisson_gaussian_divergences

ORDERS = np.array(RdpAccountant().orders)


def library(noise, rate):
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)))
    return np.array(accountant.rdp)


RELEASES = [(1.1, 0.01), (0.3, 0.5), (0.05, 0.2), (20.0, 0.1), (300.0, 0.999), (2.0, 1 - 1e-9), (1.0, 1e-8), (0.7, 1.0)]


@for_rows(("noise", "rate"), RELEASES)
def test_divergences_are_those_of_dp_accounting(noise, rate):
    np.testing.assert_allclose(
        poisson_gaussian_divergences(noise, rate, ORDERS), library(noise, rate), rtol=1e-9, atol=1e-13
    )


def test_divergences_of_random_releases():
    rng = np.random.default_rng(0)
    for _ in range(10):
        noise, rate = 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(-5, 0)
        np.testing.assert_allclose(
            poisson_gaussian_divergences(noise, rate, ORDERS), library(noise, rate), rtol=1e-9, atol=1e-13
        )


def test_a_series_that_does_not_converge_gives_no_bound():
    divergences = poisson_gaussian_divergences(2000.0, 0.5, np.array([1.5, 2.0]))
    assert divergences[0] == math.inf == library(2000.0, 0.5)[list(ORDERS).index(1.5)]
    assert 0 < divergences[1] < 1e-6
