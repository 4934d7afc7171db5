"""Rebalancing (RR-Cluster, papers/rr_cluster): no cluster is left with fewer than B clients in expectation.

The paper moves particular clients from large to small clusters, which couples clients (docs/privacy.md). Here
every client redraws its own label from a row of a matrix that depends on released histograms alone, which
costs nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def redraw_matrix(histogram: npt.ArrayLike, minimum: float) -> FloatArray:
    """Row-stochastic (k, k) matrix that moves surplus above ``minimum`` to clusters below it.

    Client i with label c draws its new label from row c. The expected sizes h R reach min(B, sum(h) / k)
    in every cluster, where h are the released sizes with negative ones taken as zero.

    Args:
        histogram: (k,) released cluster sizes; noise may have made some of them negative.
        minimum: B, the smallest size wanted.
    """
    sizes = np.maximum(np.asarray(histogram, dtype=np.float64), 0.0)
    num_clusters = len(sizes)
    target = min(minimum, sizes.sum() / num_clusters)
    surplus = np.maximum(sizes - target, 0.0)
    deficit = np.maximum(target - sizes, 0.0)
    matrix = np.eye(num_clusters)
    if not deficit.sum() > 0:
        return matrix
    # The deficit never exceeds the surplus, since the target is at most the mean; every donor gives alike.
    leaving = np.divide(surplus, sizes, out=np.zeros(num_clusters), where=sizes > 0)
    leaving *= min(1.0, deficit.sum() / surplus.sum())
    matrix -= np.diag(leaving)
    matrix += np.outer(leaving, deficit / deficit.sum())
    return matrix
