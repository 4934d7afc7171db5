"""Clients that join, leave, or are replaced while their number M is fixed: who is asked, and what a run costs."""

import numpy as np
import pytest
from test_base import CLIENTS, Coming, nothing, private, start

from coterie.strategies import IFCA, FedAvg

ALL = list(range(1, CLIENTS + 1))


@pytest.mark.parametrize("method", [FedAvg, IFCA])
def test_a_client_that_leaves_for_ever_changes_neither_noise_nor_cost(method):
    """It contributes nothing; the divisor stays, so that what is left is the same sum without it."""
    full, without = Coming(ALL), Coming(ALL, ALL[:-1])
    _, complete = start(full, private(rounds=4), method, rounds=4)
    _, left = start(without, private(rounds=4), method, rounds=4)
    assert full.rounds == [ALL] * 4
    assert without.rounds == [ALL, *[ALL[:-1]] * 3]
    assert (len(left.ledger.charges), left.ledger.spent()) == (len(complete.ledger.charges), complete.ledger.spent())
    noises = [[each["noise_multiplier"] for each in run.ledger.charges] for run in (left, complete)]
    assert noises[0] == noises[1]


def test_a_client_that_leaves_is_missing_from_the_sum_alone():
    quiet = {"noise": 1e-6, "rounds": 1}
    complete, _ = start(Coming(ALL), private(**quiet))
    left, _ = start(Coming(ALL[:-2]), private(**quiet))
    np.testing.assert_allclose(left, complete * (CLIENTS - 2) / CLIENTS, atol=1e-4)


def test_the_last_client_leaves():
    grid = Coming([2], [])
    _, strategy = start(grid, private(rounds=3), rounds=3)
    assert grid.rounds == [[2]]  # nobody is there to be asked; the rounds are released, and paid for
    assert len(strategy.ledger.charges) == 3


def test_a_client_beyond_the_planned_number_is_never_asked(caplog):
    grid = Coming([2, 3], [2, 3, CLIENTS + 1], client_of=lambda node: node - 1)
    start(grid, nothing(rounds=3), rounds=3)
    assert grid.rounds == [[2, 3]] * 3
    assert f"ignoring node {CLIENTS + 1}: invalid client-id {CLIENTS}" in [r.getMessage() for r in caplog.records]
