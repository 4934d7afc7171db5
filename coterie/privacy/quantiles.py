"""Quantiles of bounded columns from noisy histograms: scales of columns for which no publication has any.

A record, or a unit such as a patient with all records, adds a weight of 1 in all to the histogram of each of d columns,
so that adding or removing it moves the d histograms together by at most sqrt(d) in the L2 norm. They are one Gaussian
release; what follows from them is post-processing (docs/privacy.md, "Scales of columns").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.privacy.randomness import FloatArray, gaussian

#: Bins of a column, of equal width.
BINS = 64
#: The quantiles.
LEVELS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class NoisyQuantiles:
    """Quantiles of columns, after the noise.

    Attributes:
        values: (d, 3) quantiles at `LEVELS`, increasing, as shares of each column's range.
        error: (d,) standard deviation that the noise gives to the share of units below a value in the middle of the
            range, for the number of units less two standard deviations; infinite where that leaves none.
    """

    values: FloatArray
    error: FloatArray


def unit_histograms(values: npt.ArrayLike, units: npt.NDArray[np.str_] | None = None) -> FloatArray:
    """Return the (d, BINS) histograms of (n, d) shares of ranges; a unit weighs 1, spread evenly over its records.

    Values outside [0, 1] count at its ends, and those that are NaN not at all.

    Examples:
        >>> unit_histograms([[0.0, 1.0], [0.0, 0.5]]).sum(axis=1).tolist()
        [2.0, 2.0]
        >>> unit_histograms([[0.0], [0.0], [1.0]], np.array(["a", "a", "b"]))[0, [0, -1]].tolist()
        [1.0, 1.0]
    """
    shares = np.asarray(values, np.float64)
    weights = np.ones(len(shares))
    if units is not None:
        _, of, sizes = np.unique(units, return_inverse=True, return_counts=True)
        weights = 1 / sizes[of]
    known = ~np.isnan(shares)
    bins = np.minimum(np.clip(np.nan_to_num(shares), 0, 1) * BINS, BINS - 1).astype(np.int64)
    return np.stack([
        np.bincount(bins[known[:, j], j], weights[known[:, j]], minlength=BINS) for j in range(shares.shape[1])
    ])  # fmt: skip


def noisy_histograms(histograms: FloatArray, noise_multiplier: float, rng: np.random.Generator) -> FloatArray:
    """Return the (d, BINS) histograms with noise of `noise_multiplier` times their sensitivity, sqrt(d)."""
    return histograms + math.sqrt(len(histograms)) * gaussian(rng, noise_multiplier, histograms.shape)


def noisy_quantiles(histograms: FloatArray, noise_multiplier: float, rng: np.random.Generator) -> NoisyQuantiles:
    """Release the quantiles of :func:`unit_histograms`; charge the event (sampling rate 1) before the call.

    Args:
        histograms: (d, BINS).
        noise_multiplier: noise standard deviation / sqrt(d).
        rng: a secret generator.

    Examples:
        >>> histograms = unit_histograms(np.linspace(0, 1, 6400)[:, None])
        >>> noisy_quantiles(histograms, 0.1, np.random.default_rng()).values.round(1).tolist()
        [[0.2, 0.5, 0.8]]
    """
    from sklearn.isotonic import IsotonicRegression

    columns = len(histograms)
    noisy = noisy_histograms(histograms, noise_multiplier, rng)
    edges = np.linspace(0, 1, BINS + 1)
    values, errors = np.empty((columns, len(LEVELS))), np.full(columns, math.inf)
    for column, counts in enumerate(noisy):
        below = np.concatenate([[0.0], np.cumsum(counts)])
        total = max(float(below[-1]), 0.0)
        rising = IsotonicRegression(y_min=0, y_max=total).fit_transform(edges, below) if total else edges
        values[column] = np.interp(np.array(LEVELS) * rising[-1], rising + 1e-9 * rising[-1] * edges, edges)
        deviation = noise_multiplier * math.sqrt(columns * BINS)
        if total > 2 * deviation:
            errors[column] = deviation / 2 / (total - 2 * deviation)
    return NoisyQuantiles(values, errors)
