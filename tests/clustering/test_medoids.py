"""FasterPAM: its cost is that of the package kmedoids, and at least that of all sets of medoids; no swap lowers it."""

from itertools import combinations

import kmedoids
import numpy as np
import pytest
from kit.tables import for_rows
from scipy.spatial.distance import cdist

from coterie.clustering.medoids import k_medoids

KINDS = ("points", "no metric", "no metric, ties", "duplicates")


def distances(kind, n, rng):
    if kind == "points":
        points = rng.normal(size=(n, 3))
    elif kind == "duplicates":
        points = rng.integers(0, 4, (n, 2)).astype(float)
    else:
        half = rng.random((n, n)) if kind == "no metric" else rng.integers(0, 4, (n, n)).astype(float)
        return (half + half.T) * (1 - np.eye(n))
    return cdist(points, points, "cityblock" if kind == "duplicates" else "euclidean")


def cost(matrix, medoids):
    return matrix[:, medoids].min(axis=1).sum()


def cases(kind, most):
    """50 matrices with a number of clusters each; every fifth has k = 1, every fifth k = n."""
    rng = np.random.default_rng(KINDS.index(kind))
    for case in range(50):
        n = int(rng.integers(1, most + 1))
        k = {0: 1, 1: n}.get(case % 5, int(rng.integers(1, n + 1)))
        yield distances(kind, n, rng), k


@for_rows("kind", KINDS)
def test_the_cost_is_at_most_that_of_the_package_kmedoids(kind):
    for matrix, k in cases(kind, 40):
        theirs = kmedoids.fasterpam(matrix, k, init="build")
        assert cost(matrix, k_medoids(matrix, k)) <= cost(matrix, theirs.medoids.astype(int)) * (1 + 1e-12)


@for_rows("kind", KINDS)
def test_no_swap_lowers_the_cost(kind):
    for matrix, k in cases(kind, 12):
        found = k_medoids(matrix, k)
        assert len(set(found.tolist())) == k
        for out in range(k):
            for point in range(len(matrix)):
                swapped = [*np.delete(found, out), point]
                assert cost(matrix, found) <= cost(matrix, swapped) * (1 + 1e-12)


@for_rows("kind", KINDS)
def test_against_all_sets_of_medoids(kind):
    """A local minimum is the best of all sets for k = 1, k = n - 1 and k = n, and in most other cases."""
    best = []
    for matrix, k in cases(kind, 8):
        found = cost(matrix, k_medoids(matrix, k))
        least = min(cost(matrix, list(each)) for each in combinations(range(len(matrix)), k))
        assert least <= found * (1 + 1e-12)
        if k in (1, len(matrix) - 1, len(matrix)):
            assert found == pytest.approx(least, abs=1e-12)
        best.append(found <= least * (1 + 1e-12))
    assert np.mean(best) >= 0.9


def test_swaps_improve_on_build():
    """BUILD takes the point in the middle, then one next to it, at a cost of 10; one in each group costs 6."""
    points = np.array([[0.0], [1.0], [5.0], [9.0], [10.0]])
    matrix = cdist(points, points)
    assert cost(matrix, [2, 1]) == 10
    assert k_medoids(matrix, 1).tolist() == [2]
    assert cost(matrix, k_medoids(matrix, 2)) == 6


def test_it_is_deterministic_and_leaves_the_distances_unchanged():
    matrix = distances("no metric, ties", 30, np.random.default_rng(1))
    before = matrix.copy()
    np.testing.assert_array_equal(k_medoids(matrix, 4), k_medoids(matrix.copy(), 4))
    np.testing.assert_array_equal(matrix, before)


@pytest.mark.timeout(60)
def test_swaps_that_change_the_cost_by_rounding_errors_end():
    """Several of these are swapped without end if the computed changes alone decide."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        matrix = distances("duplicates", int(rng.integers(20, 60)), rng) * 0.1
        assert len(set(k_medoids(matrix, int(rng.integers(2, 6))))) > 1
