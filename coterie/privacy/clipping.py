"""Clipping: what one client can add is bounded, whatever it sends."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Room for the rounding of norms and sums below the clipping norm.
_MARGIN = 1e-6


def clip(update: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """``update`` in float64, scaled down to L2 norm at most ``clip_norm``; all zero if any entry is not finite.

    Args:
        update: array of any shape, 0-d and empty included.
        clip_norm: the bound C > 0; inf leaves finite updates as they are.
    """
    array = np.asarray(update, dtype=np.float64)
    return clip_rows(array.reshape(1, -1), clip_norm).reshape(array.shape)


def clip_rows(updates: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """:func:`clip` of every row of an (n, d) array."""
    rows = np.array(updates, dtype=np.float64)
    rows[~np.isfinite(rows).all(axis=1)] = 0.0
    if math.isinf(clip_norm):
        return rows
    limit = clip_norm * (1 - _MARGIN)
    largest = np.abs(rows).max(axis=1, initial=0.0)
    unit = rows / np.where(largest > 0, largest, 1.0)[:, None]  # first: squares of 1e200 overflow, of 1e-200 vanish
    lengths = np.linalg.norm(unit, axis=1)
    with np.errstate(over="ignore"):
        long = lengths * largest > limit  # an overflow to inf is too long
    rows[long] = unit[long] * (limit / lengths[long])[:, None]
    return rows
