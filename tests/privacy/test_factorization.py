"""Matrices for correlated noise: their bands, their norms, and what the optimisation minimises."""

import itertools
import math

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy.mechanisms import factorization
from coterie.privacy.mechanisms.factorization import banded_matrix, dense, prefix_errors

SHAPES = [(1, 1), (2, 1), (2, 2), (5, 2), (12, 4), (12, 12), (23, 5), (80, 10)]


def sensitivity(matrix, slots):
    """The norm of C g over all clients of slots, all subsets of their rounds, and all signs of their updates."""
    rounds = len(matrix)
    squares = 0.0
    for slot in range(slots):
        own = range(slot, rounds, slots)
        for signs in itertools.product((-1, 0, 1), repeat=len(own)):
            shift = matrix[:, list(own)] @ np.array(signs, float)
            squares = max(squares, float(shift @ shift))
    return math.sqrt(squares)


@for_rows(("rounds", "bands"), SHAPES)
def test_it_is_lower_triangular_banded_and_has_unit_columns(rounds, bands):
    matrix = dense(banded_matrix(rounds, bands))
    apart = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    assert not matrix[(apart < 0) | (apart >= bands)].any()
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1, atol=1e-12)
    assert np.linalg.matrix_rank(matrix) == rounds


@for_rows("rounds", [3, 7, 10])
@for_rows("bands", [1, 2, 3])
def test_its_sensitivity_is_the_root_of_the_number_of_participations(rounds, bands):
    matrix = dense(banded_matrix(rounds, bands))
    assert sensitivity(matrix, bands) == pytest.approx(math.sqrt(math.ceil(rounds / bands)), rel=1e-6)


def test_the_brute_force_finds_one_band_too_many_and_a_column_that_is_too_long():
    wide = dense(banded_matrix(10, 3))
    assert sensitivity(wide, 2) > 1.1 * math.sqrt(5)
    long = dense(banded_matrix(10, 2))
    long[:, 4] *= 1.01
    assert sensitivity(long, 2) > math.sqrt(5) * (1 + 1e-3)


def test_the_gradient_is_that_of_finite_differences():
    rounds, bands = 9, 3
    error = factorization._error(rounds, bands)
    free = factorization._square_root(rounds, bands)
    free += 0.1 * np.random.default_rng(0).standard_normal(free.shape) * factorization._inside(rounds, bands)
    value, gradient = error(free)
    for place in np.argwhere(factorization._inside(rounds, bands)):
        moved = free.copy()
        moved[tuple(place)] += 1e-6
        assert (error(moved)[0] - value) / 1e-6 == pytest.approx(gradient[tuple(place)], abs=1e-4)


def test_the_objective_is_computed_as_defined():
    rounds, bands = 10, 3
    free = factorization._square_root(rounds, bands)
    inverse = np.linalg.inv(dense(factorization._normalised(free)))
    ones = np.tril(np.ones((rounds, rounds)))
    expected = (np.sum((ones @ inverse) ** 2) + np.sum(inverse**2)) / rounds
    expected += np.sum((ones[-1] @ inverse) ** 2)
    assert factorization._error(rounds, bands)(free)[0] == pytest.approx(expected)


@pytest.mark.parametrize(("rounds", "bands"), [(80, 5), (80, 10), (200, 10)])
def test_optimised_errors_are_below_those_of_the_square_root(rounds, bands):
    start = factorization._normalised(factorization._square_root(rounds, bands))
    best = prefix_errors(banded_matrix(rounds, bands))
    before = prefix_errors(start)
    assert best[-1] < 0.93 * before[-1]
    assert np.mean(best**2) < np.mean(before**2)
    # Independent noise has an error of sqrt(t).
    assert best[-1] < 0.5 * math.sqrt(rounds)


def test_a_long_run_uses_the_square_root(monkeypatch):
    rounds = factorization.MAX_OPTIMISED + 1
    found = banded_matrix(rounds, 4)
    np.testing.assert_allclose(found, factorization._normalised(factorization._square_root(rounds, 4)))
    np.testing.assert_allclose(found[100] / found[100, 0], [1, 1 / 2, 3 / 8, 5 / 16])


def test_a_step_to_a_singular_matrix_does_not_end_the_optimisation():
    value, gradient = factorization._error(400, 20)(np.full((400, 20), 1.0) * factorization._inside(400, 20) * 50)
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()
