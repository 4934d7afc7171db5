"""Rebalancing (RR-Cluster, papers/rr_cluster): no cluster is left with fewer than B clients.

The paper moves particular clients from large to small clusters. Under ``joint`` every client redraws its own label
from a row of a matrix that depends on released histograms alone, which couples no clients and costs nothing
(:func:`redraw_matrix`); ``rr-slot`` and ``paper`` move members by slot (:func:`move_members`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def redraw_matrix(histogram: npt.ArrayLike, minimum: float) -> FloatArray:
    """Row-stochastic (k, k) matrix that moves surplus above ``minimum`` to clusters below it.

    Client i with label c draws its new label from row c. The expected sizes h R reach min(B, sum(h) / k)
    in every cluster, where h are the released sizes with negative ones taken as zero (docs/privacy.md, lemma 1).

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
    if not (deficit.sum() > 0 and surplus.sum() > 0):  # rounding alone can leave a deficit without a surplus
        return matrix
    # The deficit never exceeds the surplus, since the target is at most the mean; every donor gives alike.
    leaving = np.divide(surplus, sizes, out=np.zeros(num_clusters), where=sizes > 0)
    leaving *= min(1.0, deficit.sum() / surplus.sum())
    matrix -= np.diag(leaving)
    matrix += np.outer(leaving, deficit / deficit.sum())
    return matrix


def move_members(
    labels: IntArray, num_clusters: int, minimum: int, rng: np.random.Generator, *, protected: bool
) -> IntArray:
    """Members drawn uniformly at random from large clusters fill up those below ``minimum``.

    Algorithm 2, lines 12 and 13. A function of (labels, coins) alone.

    Args:
        labels: (draws, m) cluster of every member; -1 for slots without one, which stay so.
        num_clusters: k.
        minimum: B; 0 moves no client.
        rng: the coins.
        protected: clusters keep B members (rr-slot); otherwise every member of a cluster of at least B may be
            drawn (as printed).

    Returns:
        (draws, m) clusters after the moves.
    """
    if not minimum:
        return labels
    slots = labels.shape[1]
    clusters = np.arange(num_clusters)
    sizes = (labels[..., None] == clusters).sum(axis=1)  # (draws, k)
    missing = np.maximum(minimum - sizes, 0)
    if protected:
        # The order inside a cluster is random; from place B on, a member may go.
        order = np.argsort(labels + rng.random(labels.shape), axis=1)  # sorted by label, shuffled inside
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(slots), order.shape), axis=1)
        absent = (labels < 0).sum(axis=1, keepdims=True)
        begin = absent + np.cumsum(sizes, axis=1) - sizes
        place -= np.take_along_axis(begin, np.maximum(labels, 0), axis=1)
        movable = (labels >= 0) & (place >= minimum)
    else:
        movable = (labels >= 0) & np.take_along_axis(sizes >= minimum, np.maximum(labels, 0), axis=1)
    # The movable in random order; the first ones fill the first cluster's gap, the next the second's, ...
    keys = np.where(movable, rng.random(labels.shape), np.inf)
    order = np.argsort(keys, axis=1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(slots), order.shape), axis=1)
    ends = np.cumsum(missing, axis=1)
    taken = movable & (rank < ends[:, -1:])
    target = (rank[..., None] >= ends[:, None, :]).sum(axis=-1)
    return np.where(taken, np.minimum(target, num_clusters - 1), labels)
