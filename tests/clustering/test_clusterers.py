"""Clusterers: planted groups with and without their number, nothing where there is nothing, and what is refused."""

import numpy as np
import pytest
from kit.tables import for_rows
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score

from coterie.clustering.clusterers import CLUSTERERS, MAX_CLUSTERS, STRUCTURE, _with_noise, cluster, worst_silhouette

TOLD, FOUND = ("k-medoids", "agglomerative"), ("dbscan", "hdbscan")


def apart(points):
    points = np.asarray(points, float).reshape(len(points), -1)
    return cdist(points, points)


def planted(sizes, dimensions=3, seed=0, spread=0.15):
    """(n, n) distances of groups about the corners of a simplex of side sqrt(2), in random order, and the groups."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(range(len(sizes)), sizes))
    centres = np.eye(len(sizes), max(dimensions, len(sizes)))
    return apart(centres[groups] + rng.normal(0, spread, (len(groups), centres.shape[1]))), groups


@for_rows("sizes", [(10, 10, 10, 10), (6, 9, 15, 30)])
@for_rows("seed", [0, 1, 2])
@for_rows("clusterer", CLUSTERERS)
def test_planted_groups_are_found_without_their_number(clusterer, seed, sizes):
    distances, groups = planted(sizes, seed=seed)
    found = cluster(distances, clusterer, None)
    assert adjusted_rand_score(groups, found.labels) == 1
    assert found.silhouettes[4] == max(found.silhouettes.values()) > STRUCTURE


@for_rows("sizes", [(10, 10, 10, 10), (2, 5, 10, 30), (1, 1, 8, 8)])
@for_rows("clusterer", TOLD)
def test_planted_groups_are_found_with_their_number(clusterer, sizes):
    for seed in range(3):
        distances, groups = planted(sizes, seed=seed)
        found = cluster(distances, clusterer, 4)
        assert adjusted_rand_score(groups, found.labels) == 1
        assert found.silhouettes == {}


@pytest.mark.parametrize("clusterer", TOLD)
def test_as_many_clusters_as_told(clusterer):
    distances, _ = planted((10, 10, 10))
    for k in (1, 2, 3, 5, 30):
        assert set(cluster(distances, clusterer, k).labels) == set(range(k))


@for_rows("dimensions", [2, 5, 100])
@for_rows("clusterer", CLUSTERERS)
def test_clients_that_are_all_alike_are_one_cluster(clusterer, dimensions):
    for seed in range(4):
        points = np.random.default_rng(seed).normal(size=(40, dimensions))
        assert cluster(apart(points), clusterer, None).labels.tolist() == [0] * 40


@for_rows("clusterer", CLUSTERERS)
@for_rows("where", [0, 17])
def test_one_that_stands_alone_is_no_cluster_unless_the_number_is_told(clusterer, where):
    points = np.random.default_rng(0).normal(size=(30, 5))
    points[where] = 100
    assert cluster(apart(points), clusterer, None).labels.tolist() == [0] * 30
    if clusterer in TOLD:
        labels = cluster(apart(points), clusterer, 2).labels
        assert np.sum(labels == labels[where]) == 1


@for_rows("clusterer", CLUSTERERS)
@for_rows("where", [5, 20])
def test_one_that_stands_alone_joins_the_nearest_of_the_clusters(clusterer, where):
    """It is farther from its group than groups are from each other, so that it is cut off before they are."""
    groups = np.repeat([0, 1, 2], 12)
    groups[where] = 2 if where == 5 else 1
    points = np.eye(3)[groups] * 10 + np.random.default_rng(1).normal(0, 0.3, (36, 3))
    points[where] = np.eye(3)[groups[where]] * 40 + [3, 0, 0]
    distances = apart(points)
    found = cluster(distances, clusterer, None)
    assert found.labels.tolist() == (np.array([0, 2, 1])[groups] if where == 5 else groups).tolist()
    assert found.silhouettes[3] == pytest.approx(worst_silhouette(distances, groups))


def test_what_is_left_over_joins_the_cluster_that_is_nearest_in_the_mean():
    distances = np.zeros((6, 6))
    distances[4] = distances[:, 4] = [1, 9, 4, 4, 0, 8]  # the nearest point is in cluster 3, the nearer cluster is 7
    distances[5] = distances[:, 5] = [2, 2, 6, 6, 8, 0]
    labels = _with_noise(distances, np.array([3, 3, 7, 7, -1, -1]))
    assert labels.tolist() == [3, 3, 7, 7, 7, 3]
    assert _with_noise(distances, np.full(6, -1)).tolist() == [0] * 6


def test_agglomerative_links_by_the_mean_and_cuts_no_chain_at_its_end():
    # 0-1, 2.01-3.03, 4.06-5.1, 6.15-7.7 (1.55 against 1.57 to 4.06-5.1), then the first two pairs, then the last two
    points = [0, 1, 2.01, 3.03, 4.06, 5.1, 6.15, 7.7]
    assert cluster(apart(points), "agglomerative", 2).labels.tolist() == [0] * 4 + [1] * 4


def test_dbscan_s_radius_is_twice_the_usual_distance_to_the_nearest():
    # 1 among eight clients, so 2 does not bridge 2.5
    points = [0, 1, 2, 3, 5.5, 6.5, 7.5, 8.5]
    assert cluster(apart(points), "dbscan", None).labels.tolist() == [0] * 4 + [1] * 4


@for_rows("clusterer", CLUSTERERS)
@for_rows("n", [1, 2, 3])
def test_too_few_to_tell_are_one_cluster(clusterer, n):
    assert cluster(apart(np.arange(n) ** 3), clusterer, None).labels.tolist() == [0] * n


@for_rows("clusterer", CLUSTERERS)
def test_identical_clients(clusterer):
    assert cluster(np.zeros((20, 20)), clusterer, None).labels.tolist() == [0] * 20
    twice = cluster(apart([1, 0] * 10), clusterer, None)  # two points, each ten times
    assert twice.labels.tolist() == [0, 1] * 10


@for_rows("clusterer", CLUSTERERS)
def test_clusters_are_numbered_by_their_first_clients(clusterer):
    groups = np.array([2, 2, 0, 1, 0, 2, 1, 0] * 5)
    points = groups + np.random.default_rng(0).normal(0, 0.05, 40)
    expected = np.array([1, 2, 0])[groups]
    for k in (3, None) if clusterer in TOLD else (None,):
        assert cluster(apart(points), clusterer, k).labels.tolist() == expected.tolist()


def test_more_clusters_than_are_tried_are_never_found():
    groups = np.repeat(range(MAX_CLUSTERS + 2), 4)
    distances = apart(100 * np.eye(len(set(groups)))[groups])
    for clusterer in TOLD:
        found = cluster(distances, clusterer, None)
        assert max(found.silhouettes) == MAX_CLUSTERS
        assert found.labels.max() < MAX_CLUSTERS


def test_the_worst_silhouette_by_hand():
    # 0, 1 | 5: (5 - 1) / 5 and (4 - 1) / 4 in the first, 0 alone in the second
    assert worst_silhouette(apart([0, 1, 5]), np.array([0, 0, 1])) == 0
    # 0, 1 | 5, 7: (6 - 1) / 6, (5 - 1) / 5 against (4.5 - 2) / 4.5, (6.5 - 2) / 6.5
    found = worst_silhouette(apart([0, 1, 5, 7]), np.array([0, 0, 1, 1]))
    assert found == pytest.approx((2.5 / 4.5 + 4.5 / 6.5) / 2)
    assert worst_silhouette(apart([0, 1, 5]), np.zeros(3, int)) == 0
    assert worst_silhouette(apart([0, 1, 5]), np.arange(3)) == 0


@pytest.mark.parametrize("clusterer", TOLD)
def test_clusters_must_stand_out(clusterer):
    """Two pairs: silhouettes of one half and above, and below."""
    for gap, found in ((3.0, 2), (1.5, 1)):
        distances = apart([0, 1, 1 + gap, 2 + gap])
        # |0 - 1| = 1 against the mean of gap + 1 and gap + 2, and of gap and gap + 1: at gap 1.5 it is 2/3 and 1/2
        outer, inner = 1 - 1 / (gap + 1.5), 1 - 1 / (gap + 0.5)
        assert cluster(distances, clusterer, None).silhouettes == {2: pytest.approx((outer + inner) / 2)}
        weak = np.where(distances == 1, 1 if found == 2 else 1.6, distances)
        assert cluster(weak, clusterer, None).labels.max() + 1 == found


@for_rows(
    ("distances", "clusterer", "k", "complaint"),
    [
        (np.zeros((3, 3)), "k-medoids", 4, "num_clusters must lie between 1 and the number of clients, 3, not 4"),
        (np.zeros((3, 3)), "agglomerative", 0, "num_clusters must lie between 1 and the number of clients, 3, not 0"),
        (np.full((3, 3), np.nan), "k-medoids", 2, "finite numbers"),
        (np.full((3, 3), np.inf), "dbscan", None, "finite numbers"),
        (-np.ones((3, 3)), "k-medoids", 2, "at least 0"),
        (np.triu(np.ones((3, 3)), 1), "k-medoids", 2, "symmetric"),
        (np.zeros((3, 2)), "hdbscan", None, r"shape \(n, n\)"),
        (
            np.zeros((3, 3)),
            "k-means",
            2,
            "one of k-medoids, agglomerative, dbscan, hdbscan, or module:function, not 'k-means'",
        ),
        (np.zeros((3, 3)), "dbscan", 2, "dbscan determines the number of clusters itself: set clusters to 0"),
        (np.zeros((3, 3)), "hdbscan", 2, "hdbscan determines the number of clusters itself"),
    ],
)
def test_what_makes_no_sense(distances, clusterer, k, complaint):
    with pytest.raises(ValueError, match=complaint):
        cluster(distances, clusterer, k)
