"""Fuzzy c-means (Dunn 1973, Bezdek 1981): every point belongs to every cluster to a degree.

minimise  sum_ij u_ij^m |x_i - c_j|^2,  sum_j u_ij = 1,  by alternating:
    u_ij <- |x_i - c_j|^(-2/(m-1)) / sum_l |x_i - c_l|^(-2/(m-1))
    c_j  <- sum_i u_ij^m x_i / sum_i u_ij^m
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MAX_ROUNDS = 300
# Rows per block of distances to all centroids.
_CHUNK = 8192


def fuzzy_c_means(
    points: npt.ArrayLike,
    k: int,
    rng: np.random.Generator,
    *,
    fuzzifier: float = 2.0,
    restarts: int = 3,
    tolerance: float = 1e-4,
) -> FloatArray:
    """Return the (k, F) centroids of the best of several restarts.

    Args:
        points: (n, F), n at least k.
        k: number of clusters.
        rng: seeds the k-means++ initialisation of each restart.
        fuzzifier: m, above 1; near 1 the clusters are hard, as in k-means.
        restarts: number of restarts.
        tolerance: a restart ends when no centroid moves by more than this share of the points' standard deviation.

    Raises:
        ValueError: there are fewer points than clusters, or the fuzzifier is at most 1.

    Examples:
        >>> sorted(fuzzy_c_means([[0.0], [0.2], [1.0], [1.2]], 2, np.random.default_rng(0)).round(1).tolist())
        [[0.1], [1.1]]
    """
    x = np.asarray(points, np.float64)
    if not 1 <= k <= len(x):
        raise ValueError(f"the number of points, {len(x)}, must be at least the number of clusters, {k}")
    if not fuzzifier > 1:
        raise ValueError(f"fuzzifier must be greater than 1, not {fuzzifier:g}")
    still = tolerance * float(np.sqrt(x.var(axis=0).mean()))
    runs = [_descend(x, k, rng, fuzzifier, still) for _ in range(restarts)]
    return min(runs, key=lambda run: run[1])[0]


def _descend(
    x: FloatArray, k: int, rng: np.random.Generator, fuzzifier: float, still: float
) -> tuple[FloatArray, float]:
    """Return the centroids of one restart, and their objective."""
    from scipy.spatial.distance import cdist
    from sklearn.cluster import kmeans_plusplus  # imported here: most clients do not cluster

    centroids, _ = kmeans_plusplus(x, k, random_state=int(rng.integers(2**31)))
    objective = np.inf
    for _ in range(_MAX_ROUNDS):
        sums, totals, objective = np.zeros_like(centroids), np.zeros(k), 0.0
        for begin in range(0, len(x), _CHUNK):
            chunk = x[begin : begin + _CHUNK]
            squares = cdist(chunk, centroids, "sqeuclidean")
            weights = memberships(squares, fuzzifier) ** fuzzifier
            sums += weights.T @ chunk
            totals += weights.sum(axis=0)
            objective += float((weights * squares).sum())
        moved = np.where(totals[:, None] > 0, sums / np.maximum(totals, 1e-300)[:, None], centroids)
        shift, centroids = float(np.linalg.norm(moved - centroids, axis=1).max()), moved
        if shift <= still:
            break
    return centroids, objective


def memberships(squares: FloatArray, fuzzifier: float) -> FloatArray:
    """(n, k) memberships u_ij from squared distances; a point on a centroid belongs to that cluster only.

    Logarithms avoid the overflow of powers for m near 1.

    Examples:
        >>> memberships(np.array([[1.0, 4.0], [1.0, 1.0]]), fuzzifier=2.0)
        array([[0.8, 0.2],
               [0.5, 0.5]])
    """
    logs = -np.log(np.maximum(squares, 1e-300)) / (fuzzifier - 1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
