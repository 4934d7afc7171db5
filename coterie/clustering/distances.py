"""Distances between clients: by losses of each other's models, by parameters, and by directions of updates.

Models may be large and many: in addition to arguments and the (n, n) result, each function allocates a few million
numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Updates = npt.NDArray[np.float32] | Sequence[npt.NDArray[np.float32]]

# Numbers per block of columns.
_CHUNK = 1 << 20


def loss_distances(losses: FloatArray) -> FloatArray:
    """(n, n) |L_i(w_j) - L_i(w_i)| + |L_j(w_i) - L_j(w_j)|, LCFL's Equation (2).

    Args:
        losses: (n, n) L_i(w_j).
    """
    worse = np.abs(losses - losses.diagonal()[:, None])
    return np.asarray(worse + worse.T)


def profile_distances(losses: FloatArray) -> FloatArray:
    """(n, n) mean over landmarks of |L_i(w_l) - L_j(w_l)|; restricted to l in {i, j} it is LCFL's Equation (6).

    Args:
        losses: (n, L) L_i(w_l), the profiles of n clients.
    """
    from scipy.spatial.distance import pdist, squareform  # slow to import

    return np.asarray(squareform(pdist(losses, "cityblock")) / losses.shape[1])


def parameter_distances(updates: Updates) -> FloatArray:
    """(n, n) ||w_i - w_j||, LCFL's Equation (1), from the updates (n, d) of models with the same initial parameters."""
    products = gram(updates)
    squares = products.diagonal()
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0)))


def cosines(updates: Updates) -> FloatArray:
    """(n, n) cosine similarity of updates (n, d), CFL's Equation (4); of a zero update, 0 with all others."""
    products = gram(updates)
    norms = np.sqrt(products.diagonal())
    similarities = products / np.where(norms > 0, norms, 1.0) / np.where(norms > 0, norms, 1.0)[:, None]
    np.fill_diagonal(similarities, 1.0)
    return np.clip(similarities, -1.0, 1.0)


def gram(updates: Updates, *, centred: bool = False) -> FloatArray:
    """(n, n) inner products of updates (n, d), or of their deviations from the mean if ``centred``."""
    n, size = len(updates), len(updates[0])
    products = np.zeros((n, n))
    columns = max(_CHUNK // n, 1)
    for start in range(0, size, columns):
        chunk = np.array([update[start : start + columns] for update in updates], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            if centred:
                chunk -= chunk.mean(axis=0)
            products += chunk @ chunk.T
    return products
