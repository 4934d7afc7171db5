"""How far clients are apart: by losses of each other's models, by parameters, by directions of updates.

Models may be large and many, so nothing here holds more than a few million numbers beside what it is given and the
n x n numbers that it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist, squareform

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Updates = npt.NDArray[np.float32] | Sequence[npt.NDArray[np.float32]]

# Numbers of a pass over columns.
_CHUNK = 1 << 20


def loss_distances(losses: FloatArray) -> FloatArray:
    """(n, n) |L_i(w_j) - L_i(w_i)| + |L_j(w_i) - L_j(w_j)|, LCFL's Equation (2).

    Args:
        losses: (n, n) L_i(w_j).
    """
    worse = np.abs(losses - losses.diagonal()[:, None])
    return np.asarray(worse + worse.T)


def profile_distances(losses: FloatArray) -> FloatArray:
    """(n, n) mean over landmarks of |L_i(w_l) - L_j(w_l)|; for l in {i, j} alone it is LCFL's Equation (6).

    Args:
        losses: (n, L) L_i(w_l), the profiles of n clients.
    """
    return np.asarray(squareform(pdist(losses, "cityblock")) / losses.shape[1])


def parameter_distances(updates: Updates) -> FloatArray:
    """(n, n) ||w_i - w_j|| of models that began at one, LCFL's Equation (1); from updates (n, d)."""
    products = gram(updates)
    squares = products.diagonal()
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0)))


def cosines(updates: Updates) -> FloatArray:
    """(n, n) cosine similarity of updates (n, d), CFL's Equation (4); an update of zero is like none, itself apart."""
    products = gram(updates)
    norms = np.sqrt(products.diagonal())
    found = products / np.where(norms > 0, norms, 1.0) / np.where(norms > 0, norms, 1.0)[:, None]
    np.fill_diagonal(found, 1.0)
    return np.clip(found, -1.0, 1.0)


def gram(updates: Updates, *, centred: bool = False) -> FloatArray:
    """(n, n) inner products of updates (n, d), or of what sets them apart from their mean."""
    n, size = len(updates), len(updates[0])
    products = np.zeros((n, n))
    columns = max(_CHUNK // n, 1)
    for start in range(0, size, columns):
        part = np.array([update[start : start + columns] for update in updates], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            if centred:
                part -= part.mean(axis=0)
            products += part @ part.T
    return products
