"""k-means and fuzzy c-means on points: against a plain loop, against each other, and what they refuse."""

import warnings

import numpy as np
import pytest
from kit.tables import for_rows
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from coterie.clustering import fuzzy_c_means, k_means, k_means_labels, memberships

CORNERS = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]])


def blobs(spread=0.2, each=20, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate([corner + spread * rng.standard_normal((each, 2)) for corner in CORNERS])


def in_order(centroids):
    return centroids[np.lexsort(centroids.T)]


def rng():
    return np.random.default_rng(3)


def plain_memberships(x, centroids, m):
    """(n, k) by Bezdek's formula, a number at a time."""
    table = np.zeros((len(x), len(centroids)))
    for i, point in enumerate(x):
        for j, own in enumerate(centroids):
            ratios = [
                (np.linalg.norm(point - own) / np.linalg.norm(point - other)) ** (2 / (m - 1)) for other in centroids
            ]
            table[i, j] = 1 / sum(ratios)
    return table


def plain_fuzzy(x, centroids, m, rounds=200):
    """Both lines of the algorithm by turns."""
    for _ in range(rounds):
        weights = plain_memberships(x, centroids, m) ** m
        centroids = weights.T @ x / weights.sum(axis=0)[:, None]
    return centroids


@pytest.mark.parametrize("m", [1.5, 2.0, 3.0])
def test_fuzzy_c_means_is_the_plain_loop(m):
    x = blobs(spread=1.0, each=5)
    found = fuzzy_c_means(x, 3, rng(), fuzzifier=m, tolerance=1e-8)
    np.testing.assert_allclose(in_order(found), in_order(plain_fuzzy(x, CORNERS, m)), atol=1e-4)


@pytest.mark.parametrize("m", [1.1, 2.0])
def test_memberships_are_the_formula(m):
    x, centroids = blobs(each=2), CORNERS + 0.05
    squares = ((x[:, None] - centroids) ** 2).sum(axis=2)
    np.testing.assert_allclose(memberships(squares, m), plain_memberships(x, centroids, m), atol=1e-12)


def test_memberships_of_points_on_a_centroid_and_far_away():
    squares = np.array([[0.0, 1.0], [1e-200, 1e200], [5.0, 5.0]])
    assert memberships(squares, 1.01).tolist() == [[1, 0], [1, 0], [0.5, 0.5]]


def test_near_one_fuzzy_clusters_are_those_of_k_means():
    x = blobs()
    hard = k_means(x, 3, rng())
    means = np.stack([part.mean(axis=0) for part in np.split(x, 3)])
    np.testing.assert_allclose(in_order(hard), in_order(means), atol=1e-9)
    np.testing.assert_allclose(in_order(fuzzy_c_means(x, 3, rng(), fuzzifier=1.01)), in_order(hard), atol=1e-3)


def test_the_best_start_is_kept(monkeypatch):
    """Two starts that cannot move: the one with the smaller objective wins, wherever it stands."""
    x = blobs(spread=0.0, each=2)
    stuck = np.array([[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]])
    for starts in ([stuck, CORNERS], [CORNERS, stuck]):
        given = iter(starts)
        monkeypatch.setattr("sklearn.cluster.kmeans_plusplus", lambda *a, g=given, **k: (next(g), None))
        found = fuzzy_c_means(x, 3, rng(), restarts=2)
        np.testing.assert_allclose(in_order(found), in_order(CORNERS), atol=1e-6)


def test_parts_are_added_up(monkeypatch):
    x = blobs(spread=0.7)
    whole = fuzzy_c_means(x, 3, rng())
    monkeypatch.setattr("coterie.clustering.fuzzy._CHUNK", 7)
    np.testing.assert_allclose(fuzzy_c_means(x, 3, rng()), whole, atol=1e-9)


def test_a_generator_decides_alone():
    x = blobs(spread=2.0, each=7)
    for cluster in (k_means, fuzzy_c_means):
        np.testing.assert_array_equal(cluster(x, 4, rng()), cluster(x, 4, rng()))
        assert not np.array_equal(cluster(x, 4, rng()), cluster(x, 4, np.random.default_rng(4)))


def test_the_best_of_ten_starts_of_k_means():
    x = np.random.default_rng(0).random((60, 2))
    cost = [KMeans(9, n_init=1, random_state=seed).fit(x).inertia_ for seed in range(10)]
    for seed in range(6):
        found = k_means(x, 9, np.random.default_rng(seed))
        assert np.sum(((x[:, None] - found) ** 2).sum(axis=2).min(axis=1)) < np.quantile(cost, 0.3)


def test_k_means_goes_on_from_a_start():
    x = blobs()
    start = np.array([[2.0, 1.5], [40.0, 0.0], [41.0, 0.0]])  # the first one takes all
    with_start = k_means(x.astype(np.float32), 1, rng(), start=start[:1])
    np.testing.assert_allclose(with_start[0], x.mean(axis=0), atol=1e-5)
    kept = k_means(x, 3, rng(), start=CORNERS)
    np.testing.assert_allclose(kept, [part.mean(axis=0) for part in np.split(x, 3)])  # in the order of the start
    assert kept.dtype == np.float64


@for_rows("cluster", [k_means, fuzzy_c_means])
@for_rows("k", [0, 4])
def test_as_many_points_as_clusters_are_needed(cluster, k):
    with pytest.raises(ValueError, match=f"the number of points, 3, must be at least the number of clusters, {k}"):
        cluster(CORNERS, k, rng())
    np.testing.assert_allclose(in_order(cluster(CORNERS, 3, rng())), in_order(CORNERS))


@pytest.mark.parametrize("fuzzifier", [1.0, 0.5, float("nan")])
def test_a_fuzzifier_of_one_is_refused(fuzzifier):
    with pytest.raises(ValueError, match=r"fuzzifier must be greater than 1, not"):
        fuzzy_c_means(CORNERS, 2, rng(), fuzzifier=fuzzifier)


def test_labels_are_those_of_the_nearest_centroids():
    x = blobs()
    labels = k_means_labels(x, 3, rng())
    assert labels.dtype == np.int64
    np.testing.assert_array_equal(labels, ((x[:, None] - k_means(x, 3, rng())) ** 2).sum(axis=2).argmin(axis=1))


def test_labels_of_equal_points_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert (k_means_labels(np.zeros((5, 2)), 3, rng()) == 0).all()
        assert len(set(k_means_labels(np.array([[0.0], [0.0], [1.0], [1.0]]), 3, rng()))) == 2
