"""k-means, scikit-learn's, as every method here asks for it."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_RESTARTS = 10


def k_means(points: npt.ArrayLike, k: int, rng: np.random.Generator, *, start: FloatArray | None = None) -> FloatArray:
    """(k, F) centroids: of the best of ten k-means++ starts, or from ``start`` alone.

    Args:
        points: (n, F), n at least k.
        k: number of clusters.
        rng: seeds the starts.
        start: (k, F) first centroids.

    Raises:
        ValueError: fewer points than clusters.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    x = np.asarray(points)
    if not 1 <= k <= len(x):
        raise ValueError(f"{len(x)} points cannot make {k} clusters")
    init, starts = ("k-means++", _RESTARTS) if start is None else (start.astype(x.dtype), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than k: some centroids are equal
        found = KMeans(k, init=init, n_init=starts, random_state=int(rng.integers(2**31))).fit(x)
    return np.asarray(found.cluster_centers_, np.float64)
