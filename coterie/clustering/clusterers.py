"""Clustering algorithms by name, for any matrix of distances between clients (LCFL's C).

===============  ============================================  ==============================================
name             algorithm                                     number of clusters
===============  ============================================  ==============================================
k-medoids        FasterPAM (clustering/medoids.py)             given, or the best from 2 to 10
agglomerative    average linkage (SciPy)                       given, or the best from 2 to 10
dbscan           density, radius from the data (scikit-learn)  determined by the algorithm
hdbscan          density at every scale (scikit-learn)         determined by the algorithm
===============  ============================================  ==============================================

A clusterer of a user is a function (docs/extending.md): of distances and k, such as those that are given the number,
or of distances alone, such as those that determine it.

If the number is not given, every cluster must have a mean silhouette above 0.5, which Kaufman and Rousseeuw (Finding
Groups in Data, 1990) call a reasonable structure; otherwise all clients form one cluster. The best number of clusters
maximises the smallest mean silhouette of a cluster. Noise points of density-based algorithms, and singletons if the
number is not given, join the cluster with the smallest mean distance. Clients that differ only along a line may be
split in two, because the halves of a normal sample have silhouettes above 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.clustering.distances import FloatArray
from coterie.clustering.medoids import k_medoids
from coterie.fields.plugins import PluginError, load_function, provided

Labels = npt.NDArray[np.int64]

#: Largest number of clusters to try if the number is unknown.
MAX_CLUSTERS = 10
#: Minimum mean silhouette of a cluster if the number is unknown.
STRUCTURE = 0.5

# More clusters are cut than may remain, because singletons do not count as clusters.
_MAX_CUTS = 2 * MAX_CLUSTERS
# Number of neighbours of a dense point, and DBSCAN's radius in units of the median distance to the last of them.
_NEIGHBOURS = 5
_RADIUS = 2.0


@dataclass(frozen=True, eq=False)
class Clustering:
    """Clusters of n clients.

    Attributes:
        labels: (n,) in 0, 1, ..., numbered by the order of their first clients.
        silhouettes: smallest mean silhouette of a cluster, by number of clusters tried.
    """

    labels: Labels
    silhouettes: dict[int, float] = field(default_factory=dict)


def cluster(distances: FloatArray, clusterer: str, num_clusters: int | None) -> Clustering:
    """Cluster n clients by their (n, n) distances.

    Args:
        distances: symmetric, at least 0, with 0 on the diagonal.
        clusterer: a name in :data:`CLUSTERERS`; or a custom ``module:function``, or an entry point of the group
            ``coterie.clusterers``.
        num_clusters: k; None: it is determined.

    Raises:
        ValueError: the name is unknown, there are more clusters than clients, the distances are invalid, or a number
            is given for an algorithm that determines it; or a custom function breaks its contract.
    """
    check_clusterer(clusterer, num_clusters)
    told, automatic = _algorithms(clusterer)
    n = len(distances)
    if not (distances.shape == (n, n) and np.isfinite(distances).all() and distances.min(initial=0.0) >= 0):
        raise ValueError("distances must be finite numbers of shape (n, n), at least 0")
    if not np.allclose(distances, distances.T, rtol=1e-6, atol=0):
        raise ValueError("distances must be symmetric")
    if num_clusters is not None and not 1 <= num_clusters <= n:
        raise ValueError(f"num_clusters must lie between 1 and the number of clients, {n}, not {num_clusters}")
    one = np.zeros(n, np.int64)
    if num_clusters is not None:
        assert told is not None
        return Clustering(_in_order(told(distances, num_clusters)) if num_clusters > 1 else one)
    if told is not None:
        cuts = [told(distances, k) for k in range(2, min(_MAX_CUTS, n // 2) + 1)]
        tried = [labels for cut in cuts if (labels := _without_singletons(distances, cut)).max() < MAX_CLUSTERS]
    else:
        assert automatic is not None
        tried = [_in_order(automatic(distances))] if n > 2 else []
    silhouettes = {int(labels.max()) + 1: worst_silhouette(distances, labels) for labels in reversed(tried)}
    best = max(silhouettes, key=lambda k: silhouettes[k], default=1)
    if not silhouettes.get(best, 0.0) > STRUCTURE:
        return Clustering(one, silhouettes)
    return Clustering(next(labels for labels in tried if labels.max() == best - 1), silhouettes)


def check_clusterer(clusterer: str, num_clusters: int | None) -> None:
    """Reject an unknown name, and a number of clusters for an algorithm that determines it.

    A custom function is called once with the distances of twelve clients in two groups.

    Raises:
        ValueError: see :func:`cluster`.
    """
    told, _ = _algorithms(clusterer)
    if told is None and num_clusters is not None:
        raise ValueError(f"{clusterer} determines the number of clusters itself: set clusters to 0")


def worst_silhouette(distances: FloatArray, labels: Labels) -> float:
    """The smallest mean silhouette of a cluster. Singletons have 0, as does a single cluster of all clients."""
    from sklearn.metrics import silhouette_samples

    if not 2 <= len(np.unique(labels)) < len(labels):
        return 0.0
    silhouettes = silhouette_samples(distances, labels, metric="precomputed")
    return float(min(silhouettes[labels == label].mean() for label in np.unique(labels)))


def _k_medoids(distances: FloatArray, k: int) -> Labels:
    return np.asarray(distances[:, k_medoids(distances, k)].argmin(axis=1), np.int64)


def _agglomerative(distances: FloatArray, k: int) -> Labels:
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances, checks=False), "average")
    return np.asarray(cut_tree(tree, k)[:, 0], np.int64)


def _dbscan(distances: FloatArray) -> Labels:
    from sklearn.cluster import DBSCAN

    dense = _dense(len(distances))
    usual = float(np.median(np.sort(distances, axis=1)[:, dense - 1]))  # a point counts as its own neighbour
    if not usual > 0:
        usual = float(np.finfo(np.float32).tiny)
    estimator = DBSCAN(eps=_RADIUS * usual, min_samples=dense, metric="precomputed").fit(distances)
    return _with_noise(distances, estimator.labels_)


def _hdbscan(distances: FloatArray) -> Labels:
    from sklearn.cluster import HDBSCAN

    estimator = HDBSCAN(
        min_cluster_size=_dense(len(distances)), metric="precomputed", allow_single_cluster=True, copy=True
    )
    return _with_noise(distances, estimator.fit(distances).labels_)


def _dense(n: int) -> int:
    """Minimum number of points of a dense neighbourhood; smaller for few clients."""
    return min(_NEIGHBOURS, max(2, n // 8))


def _with_noise(distances: FloatArray, labels: Labels) -> Labels:
    """Assign noise (-1) to the cluster with the smallest mean distance, or all points to one if there is no cluster."""
    clusters = np.unique(labels[labels >= 0])
    if not len(clusters):
        return np.zeros(len(labels), np.int64)
    to_cluster = np.stack([distances[:, labels == label].mean(axis=1) for label in clusters], axis=1)
    return np.where(labels >= 0, labels, clusters[to_cluster.argmin(axis=1)])


def _without_singletons(distances: FloatArray, labels: Labels) -> Labels:
    """Assign singletons to other clusters."""
    alone = np.bincount(labels)[labels] == 1
    return _in_order(_with_noise(distances, np.where(alone, -1, labels)))


def _in_order(labels: Labels) -> Labels:
    """Renumber clusters by their first clients."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse], np.int64)


def _algorithms(clusterer: str) -> tuple[_Told | None, _Found | None]:
    """Return the algorithm of a name: one that is given the number of clusters, or one that determines it."""
    if clusterer in CLUSTERERS:
        return _TOLD.get(clusterer), _FOUND.get(clusterer)
    if not provided("clusterer", clusterer):
        raise ValueError(f"clusterer must be one of {', '.join(CLUSTERERS)}, or module:function, not {clusterer!r}")
    return _custom(clusterer)


@lru_cache(maxsize=4)
def _custom(clusterer: str) -> tuple[_Told | None, _Found | None]:
    """Return the algorithm of a user's function, checked on an example.

    Raises:
        ValueError: it cannot be imported, or breaks its contract.
    """
    try:
        function = load_function("clusterer", clusterer, ["distances", "num_clusters"])
        takes_number = True
    except PluginError as error:
        try:
            function = load_function("clusterer", clusterer, ["distances"])
            takes_number = False
        except PluginError:
            raise error from None

    def labels(distances: FloatArray, *k: int) -> Labels:
        return _checked(clusterer, function, distances, *k)

    apart = np.abs(np.subtract.outer(_EXAMPLE, _EXAMPLE))
    number = (2,) if takes_number else ()
    if not np.array_equal(labels(apart, *number), labels(apart, *number)):
        raise ValueError(
            f"clusterer '{clusterer}': two calls with equal distances return different labels; use a fixed seed"
        )
    return (labels, None) if takes_number else (None, labels)


def _checked(clusterer: str, function: Callable[..., Any], distances: FloatArray, *k: int) -> Labels:
    """Return the labels of a user's function if they are valid; noise (-1) joins the nearest cluster."""
    where, n = f"clusterer '{clusterer}'", len(distances)
    try:
        labels = np.asarray(function(distances.copy(), *k))
    except Exception as error:
        raise ValueError(f"{where}: the function fails for {n} clients: {type(error).__name__}: {error}") from error
    if labels.shape != (n,) or labels.dtype.kind not in "iu":
        raise ValueError(f"{where}: it returns {labels.dtype} {labels.shape} for {n} clients; expected integers ({n},)")
    least, most = (0, k[0] - 1) if k else (-1, n - 1)
    if not (labels.min() >= least and labels.max() <= most):
        raise ValueError(f"{where}: labels span {labels.min()}..{labels.max()}; allowed: {least}..{most}")
    return _with_noise(distances, labels.astype(np.int64))


_Told = Callable[[FloatArray, int], Labels]
_Found = Callable[[FloatArray], Labels]
# Twelve clients on a line, in two groups, on which a user's function is checked.
_EXAMPLE = np.concatenate([np.linspace(0, 1, 6), np.linspace(10, 11, 6)])

_TOLD: dict[str, _Told] = {"k-medoids": _k_medoids, "agglomerative": _agglomerative}
_FOUND: dict[str, _Found] = {"dbscan": _dbscan, "hdbscan": _hdbscan}

#: Names of all clusterers.
CLUSTERERS = (*_TOLD, *_FOUND)
