"""Clipping, which bounds the contribution of any client."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coterie.fields import CLIP_NORM
from coterie.privacy.accountants import PrivacyError

FloatArray = npt.NDArray[np.float64]

#: Range of useful clipping norms. The ratio of noise to sensitivity does not depend on the clipping norm.
MIN_CLIP_NORM, MAX_CLIP_NORM = CLIP_NORM.low, CLIP_NORM.high

# Margin below the clipping norm for the rounding of norms and sums.
_MARGIN = 1e-6


def check_clip_norm(clip_norm: float) -> None:
    """Check that a clipping norm is in its range.

    Raises:
        PrivacyError: it is NaN, too small or too large.

    Examples:
        >>> check_clip_norm(1.0)
        >>> check_clip_norm(0.0)
        Traceback (most recent call last):
        coterie.privacy.accountants.PrivacyError: clipping norm must lie in [1e-06, 1e+06], not 0
    """
    if not MIN_CLIP_NORM <= clip_norm <= MAX_CLIP_NORM:
        raise PrivacyError(f"clipping norm must lie in [{MIN_CLIP_NORM:g}, {MAX_CLIP_NORM:g}], not {clip_norm:g}")


def clip(update: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """Return ``update`` in float64, scaled to L2 norm at most ``clip_norm``; zero if any entry is not finite.

    Args:
        update: array of any shape, including 0-d and empty ones.
        clip_norm: the bound C > 0; inf leaves finite updates unchanged.

    Examples:
        >>> clip([3.0, 4.0], clip_norm=1.0).round(3)
        array([0.6, 0.8])
        >>> clip([3.0, float("nan")], clip_norm=1.0)
        array([0., 0.])
    """
    array = np.asarray(update, dtype=np.float64)
    return clip_rows(array.reshape(1, -1), clip_norm).reshape(array.shape)


def clip_rows(updates: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """Apply :func:`clip` to every row of an (n, d) array.

    Examples:
        >>> clip_rows([[3.0, 4.0], [0.3, 0.4]], clip_norm=1.0).round(3)
        array([[0.6, 0.8],
               [0.3, 0.4]])
    """
    rows = _finite_rows(updates)
    if math.isinf(clip_norm):
        return rows
    directions, lengths, _, long = _measured(rows, clip_norm, is_float32=_is_float32(updates))
    rows[long] = directions[long] * (clip_norm * (1 - _MARGIN) / lengths[long])[:, None]
    return rows


def clip_to_unit(updates: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """Clip every row of an (n, d) array to L2 norm ``clip_norm`` and divide it by ``clip_norm``: its norm is at most 1.

    A mechanism sums these rows, adds noise of standard deviation sigma, and multiplies by ``clip_norm`` afterwards.
    Thus the ratio of noise to sensitivity is sigma for every clipping norm. If ``clip_norm`` is inf, finite rows are
    unchanged.
    """
    rows = _finite_rows(updates)
    if math.isinf(clip_norm):
        return rows
    directions, lengths, ratio, long = _measured(rows, clip_norm, is_float32=_is_float32(updates))
    directions *= np.where(long, (1 - _MARGIN) / lengths, ratio)[:, None]
    return directions


def _finite_rows(updates: npt.ArrayLike) -> FloatArray:
    """Return a float64 copy with zeros in rows that contain NaN or Inf."""
    given = np.asarray(updates)
    rows = np.array(given, dtype=np.float64)
    rows[~np.isfinite(given).all(axis=1)] = 0.0
    return rows


def _measured(
    rows: FloatArray, clip_norm: float, *, is_float32: bool
) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return rows divided by their scale, their norms, the ratio of that scale to C, and which rows exceed C.

    The squares of 1e200 overflow and those of 1e-200 vanish, so rows are divided by their largest entry first. Those
    of float32 numbers, 1e-90 to 1e77, do neither: the scale is 1.
    """
    scale = np.ones(len(rows)) if is_float32 else np.abs(rows).max(axis=1, initial=0.0)
    directions = rows if is_float32 else rows / np.where(scale > 0, scale, 1.0)[:, None]
    lengths = np.sqrt(np.einsum("ij,ij->i", directions, directions))
    with np.errstate(over="ignore"):
        ratio = scale / clip_norm  # inf counts as too long
        long = lengths * ratio > 1 - _MARGIN
    return directions, np.where(long, lengths, 1.0), np.where(long, 1.0, ratio), long


def _is_float32(updates: npt.ArrayLike) -> bool:
    return isinstance(updates, np.ndarray) and updates.dtype == np.float32
