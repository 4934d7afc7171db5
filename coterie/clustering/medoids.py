"""k-medoids of a matrix of distances: PAM's BUILD, then FasterPAM's swaps.

Schubert and Rousseeuw, "Fast and eager k-medoids clustering: O(k) runtime improvement of the PAM, CLARA, and CLARANS
algorithms" (Information Systems 101, 2021). The cost is the sum of all points' distances to their nearest medoids.
"""

from __future__ import annotations

import numpy as np

from coterie.clustering.distances import FloatArray, Indices


def k_medoids(distances: FloatArray, k: int) -> Indices:
    """(k,) medoids whose cost no swap of one of them with another point lowers.

    Points are tried in turn until none of n in a row lowers the cost. A swap is made at once: the point takes the
    place of the medoid for which the cost is lowest.

    Args:
        distances: (n, n), symmetric, at least 0, with 0 on the diagonal.
        k: from 1 to n.
    """
    medoids, n = _build(distances, k), len(distances)
    if k == 1:
        return medoids  # BUILD is optimal
    label, near, second = _nearest(distances, medoids)
    point, tries = 0, 0
    while tries < n:
        to_point = distances[point]
        gain = np.minimum(to_point - near, 0)
        loss = np.minimum(to_point, second) - near - gain  # of those whose medoid is removed
        changes = gain.sum() + np.bincount(label, loss, k)
        if changes.min() < 0:
            swapped = medoids.copy()
            swapped[changes.argmin()] = point
            assignment = _nearest(distances, swapped)
            if assignment[1].sum() < near.sum():  # changes have rounding errors
                medoids, (label, near, second), tries = swapped, assignment, 0
        point, tries = (point + 1) % n, tries + 1
    return medoids


def _build(distances: FloatArray, k: int) -> Indices:
    """PAM's BUILD: each medoid in turn is the point that lowers the cost most."""
    medoids = [int(distances.sum(axis=0).argmin())]
    near = distances[medoids[0]]
    while len(medoids) < k:
        gains = np.maximum(near[:, None] - distances, 0).sum(axis=0)
        gains[medoids] = -1  # below the gain of any point
        medoids.append(int(gains.argmax()))
        near = np.minimum(near, distances[medoids[-1]])
    return np.array(medoids, np.int64)


def _nearest(distances: FloatArray, medoids: Indices) -> tuple[Indices, FloatArray, FloatArray]:
    """Of every point: the position of its nearest medoid, and the distances to it and to the second nearest."""
    to_medoids = distances[medoids]
    near, second = np.partition(to_medoids, 1, axis=0)[:2]
    return to_medoids.argmin(axis=0), near, second
