"""Clipping: what one client can add is bounded, whatever it sends."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coterie.privacy.accountants import PrivacyError

FloatArray = npt.NDArray[np.float64]

#: Range of clipping norms. Every ratio of noise to sensitivity is the same outside of it; nothing of use lives there.
LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-6, 1e6

# Room for the rounding of norms and sums below the clipping norm.
_MARGIN = 1e-6


def check_clip_norm(clip_norm: float) -> None:
    """Refuse a clipping norm outside of its range.

    Raises:
        PrivacyError: it is NaN, too small or too large.
    """
    if not LEAST_CLIP_NORM <= clip_norm <= MOST_CLIP_NORM:
        raise PrivacyError(f"clipping norm must lie in [{LEAST_CLIP_NORM:g}, {MOST_CLIP_NORM:g}], not {clip_norm:g}")


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
    rows = _finite_rows(updates)
    if math.isinf(clip_norm):
        return rows
    directions, lengths, _, long = _measured(rows, clip_norm)
    rows[long] = directions[long] * (clip_norm * (1 - _MARGIN) / lengths[long])[:, None]
    return rows


def clip_to_unit(updates: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """Every row of an (n, d) array, clipped to L2 norm ``clip_norm`` and divided by it: its norm is at most 1.

    A mechanism sums these rows, adds noise of standard deviation sigma, and multiplies by ``clip_norm`` afterwards. So
    the ratio of noise to sensitivity is sigma for every clipping norm, however small or large. With ``clip_norm`` inf
    finite rows stay as they are.
    """
    rows = _finite_rows(updates)
    if math.isinf(clip_norm):
        return rows
    directions, lengths, ratio, long = _measured(rows, clip_norm)
    directions *= np.where(long, (1 - _MARGIN) / lengths, ratio)[:, None]
    return directions


def _finite_rows(updates: npt.ArrayLike) -> FloatArray:
    """A float64 copy; rows with NaN or Inf are zero."""
    rows = np.array(updates, dtype=np.float64)
    rows[~np.isfinite(rows).all(axis=1)] = 0.0
    return rows


def _measured(rows: FloatArray, clip_norm: float) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Rows divided by their largest entry, the lengths of these, that entry over C, and which rows are too long.

    Squares of 1e200 overflow and those of 1e-200 vanish, so rows are divided by their largest entry first.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    directions = rows / np.where(largest > 0, largest, 1.0)[:, None]
    lengths = np.maximum(np.linalg.norm(directions, axis=1), 1.0)  # below 1 only where a row is zero
    with np.errstate(over="ignore"):
        ratio = largest / clip_norm  # inf is too long
        long = lengths * ratio > 1 - _MARGIN
    return directions, lengths, np.where(long, 1.0, ratio), long
