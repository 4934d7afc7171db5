"""k-means by scikit-learn, with the settings shared by all methods."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_RESTARTS = 10


def k_means(points: npt.ArrayLike, k: int, rng: np.random.Generator, *, start: FloatArray | None = None) -> FloatArray:
    """Return the (k, F) centroids of the best of ten k-means++ restarts, or of one run from ``start``.

    Args:
        points: (n, F), n at least k.
        k: number of clusters.
        rng: seeds the restarts.
        start: (k, F) initial centroids; None: k-means++.

    Raises:
        ValueError: there are fewer points than clusters.

    Examples:
        >>> sorted(k_means([[0.0], [0.2], [1.0], [1.2]], 2, np.random.default_rng(0)).round(1).tolist())
        [[0.1], [1.1]]
    """
    return np.asarray(_fit(points, k, rng, start).cluster_centers_, np.float64)


def k_means_labels(points: npt.ArrayLike, k: int, rng: np.random.Generator) -> IntArray:
    """Return the (n,) labels of :func:`k_means`; fewer than k if there are fewer distinct points.

    Examples:
        >>> labels = k_means_labels([[0.0], [0.2], [1.0], [1.2]], 2, np.random.default_rng(0))
        >>> bool(labels[0] == labels[1] != labels[2] == labels[3])
        True
    """
    return np.asarray(_fit(points, k, rng, None).labels_, np.int64)


def _fit(points: npt.ArrayLike, k: int, rng: np.random.Generator, start: FloatArray | None) -> KMeans:
    from sklearn.cluster import KMeans  # slow to import, and most clients do not cluster
    from sklearn.exceptions import ConvergenceWarning

    x = np.asarray(points)
    if not 1 <= k <= len(x):
        raise ValueError(f"the number of points, {len(x)}, must be at least the number of clusters, {k}")
    init, starts = ("k-means++", _RESTARTS) if start is None else (start.astype(x.dtype), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than k: some centroids are equal
        return KMeans(k, init=init, n_init=starts, random_state=int(rng.integers(2**31))).fit(x)
