"""Estimates from a released histogram of scores: post-processing, which costs nothing.

The raw counts are unbiased, but the noise of many empty cells adds up; a smooth density of each label, exp(cubic) in
the logit, has little noise, but may not fit. The estimate lies between both: near the smooth one where noise is large
against the misfit that a sample of this size has, and away from it where they differ by more than that explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.privacy.randomness import FloatArray
from coterie.privacy.score_histograms import BINS, EDGES, ScoreHistogram
from coterie.results import RoundRecord, ScoreEstimates

# Points in a bin at which a density is computed, and logits beyond the last edges to which it extends.
_POINTS, _BEYOND = 4, 3.0
_DEGREE, _SHRINK = 3, 0.05
# Logits are divided by it, so that coefficients have similar sizes.
_SCALE = 3.0
# Share of the sampling variance of an AUC by which a smooth one differs.
_MISFIT = 0.5
# Repetitions by which standard errors are estimated.
_REPETITIONS = 40
# Noise below which counts are as good as exact.
_NO_NOISE = 1e-3
# Bins of the calibration curve: neighbouring bins together, up to this many.
_CURVE = 8
_SPECIFICITY = 0.9

_BOUNDS = np.concatenate([[EDGES[0] - _BEYOND], EDGES, [EDGES[-1] + _BEYOND]])
_WIDTHS = np.diff(_BOUNDS)
_GRID = (_BOUNDS[:-1, None] + _WIDTHS[:, None] * (np.arange(_POINTS) + 0.5) / _POINTS).ravel()
_POWERS = np.stack([(_GRID / _SCALE) ** power for power in range(1, _DEGREE + 1)], axis=1)
_LOG_WIDTHS = np.log(np.repeat(_WIDTHS / _POINTS, _POINTS))
_CENTRES = _GRID.reshape(BINS, _POINTS).mean(axis=1)
#: (BINS,) probability of the positive class in the middle of each bin.
PROBABILITIES: FloatArray = 1 / (1 + np.exp(-_CENTRES))


def estimate(histogram: ScoreHistogram) -> ScoreEstimates | None:
    """Return the estimates of a histogram with the standard error of their noise; None if the noise hides all records.

    Args:
        histogram: as released.
    """
    smooth = _smooth(histogram)
    if smooth is None:
        return None
    counts = _between(histogram.counts, smooth, histogram.deviations)
    rng, repeated = np.random.default_rng(0), []
    for _ in range(_REPETITIONS if max(histogram.deviations) > _NO_NOISE else 0):
        noise = rng.standard_normal(counts.shape) * histogram.deviations[:, None]
        again = ScoreHistogram(np.maximum(counts, 0.0) + noise, histogram.deviations)
        if (other := _smooth(again)) is not None:
            repeated.append(_metrics(_between(again.counts, other, again.deviations)))
    metrics = _metrics(counts)
    errors = {name: float(np.std([others[name] for others in repeated])) if repeated else 0.0 for name in metrics}
    found: dict[str, Any] = {**metrics, "errors": errors, "calibration": _calibration(counts)}
    return ScoreEstimates(**found)


def estimated(evaluated: RoundRecord) -> ScoreEstimates | None:
    """Return the estimates of the histogram that an evaluation released; None without one."""
    if evaluated.score_histogram is None or evaluated.score_noise is None:
        return None
    counts, deviations = np.reshape(evaluated.score_histogram, (-1, 2, BINS)), np.array(evaluated.score_noise)
    estimates = [estimate(ScoreHistogram(one, deviations)) for one in counts]
    return estimates[0] if len(estimates) == 1 else _mean_of_classes(estimates)


def _mean_of_classes(estimates: Sequence[ScoreEstimates | None]) -> ScoreEstimates | None:
    """Return the means over classes, each against all others; None if noise hides the records of one.

    Their noise is independent. The Brier score is the sum, which is that of all classes.
    """
    known = [one for one in estimates if one is not None]
    if len(known) < len(estimates):
        return None
    errors = {name: math.hypot(*(one.errors[name] for one in known)) / len(known) for name in known[0].errors}
    means: dict[str, Any] = {name: float(np.mean([getattr(one, name) for one in known])) for name in known[0].errors}
    for values in (means, errors):
        values["brier"] *= len(known)
    return ScoreEstimates(**means, errors=errors, classes=len(known))


def _smooth(histogram: ScoreHistogram) -> FloatArray | None:
    """Return (2, BINS) counts of smooth densities; None if a label has no more records than noise explains."""
    totals = histogram.counts.sum(axis=1)
    if not (totals > histogram.deviations * np.sqrt(BINS) + 0.5).all():
        return None
    rows = zip(histogram.counts, histogram.deviations, strict=True)
    return np.stack([_fit(row, max(noise, 0.05)) for row, noise in rows])


@dataclass(frozen=True)
class _Density:
    """exp(polynomial) in the logit, scaled to a number of records, as least squares sees it.

    Attributes:
        counts: (BINS,) noisy counts.
        noise: their standard deviation.
        total: their sum.
    """

    counts: FloatArray
    noise: float
    total: float

    def shares(self, x: FloatArray) -> FloatArray:
        """Return the share of each point of the grid; x is the relative total, then the coefficients."""
        exponents = _POWERS @ x[1:] + _LOG_WIDTHS
        powers = np.exp(exponents - exponents.max())
        return np.asarray(powers / powers.sum())

    def expected(self, x: FloatArray) -> FloatArray:
        """Return the (BINS,) expected counts."""
        return np.asarray(x[0] * self.total * self.shares(x).reshape(BINS, _POINTS).sum(axis=1))

    def residuals(self, x: FloatArray) -> FloatArray:
        """Return the misfit in units of the noise, then the shrunk coefficients."""
        return np.concatenate([(self.expected(x) - self.counts) / self.noise, _SHRINK * x[3:]])

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Return the derivatives of the residuals."""
        shares = self.shares(x)
        moved = (shares[:, None] * (_POWERS - shares @ _POWERS)).reshape(BINS, _POINTS, _DEGREE).sum(axis=1)
        by_total = self.total * shares.reshape(BINS, _POINTS).sum(axis=1)
        rows = np.column_stack([by_total, x[0] * self.total * moved]) / self.noise
        return np.concatenate([rows, _SHRINK * np.eye(_DEGREE + 1)[3:]])


def _fit(counts: FloatArray, noise: float) -> FloatArray:
    from scipy.optimize import least_squares  # slow to import

    total = max(float(counts.sum()), noise, 1.0)
    kept = np.maximum(counts - noise, 0.0) + 1e-9 * total
    mean = float(kept @ _CENTRES / kept.sum())
    variance = max(float(kept @ (_CENTRES - mean) ** 2 / kept.sum()), 0.1)
    start = np.zeros(_DEGREE + 1)
    start[:3] = 1.0, _SCALE * mean / variance, -(_SCALE**2) / (2 * variance)
    density = _Density(counts, noise, total)
    fitted = least_squares(density.residuals, start, jac=density.jacobian, max_nfev=50)
    return np.maximum(density.expected(fitted.x), 0.0)


def _between(raw: FloatArray, smooth: FloatArray, deviations: FloatArray) -> FloatArray:
    """Return counts between both, by how the noise of the raw AUC compares with the misfit of the smooth one.

    The misfit is at least a half of the sampling variance of an AUC (Hanley and McNeil 1982), since a smooth density
    does not follow the records, and at least what the difference of both shows beyond the noise.
    """
    negative, positive = smooth.sum(axis=1)
    below, above = _ranks(smooth)
    area = float(below @ smooth[1] / positive)
    variance = (deviations[1] / positive) ** 2 * np.sum((below - area) ** 2)
    variance += (deviations[0] / negative) ** 2 * np.sum((above - area) ** 2)
    twice, both = area / (2 - area), 2 * area**2 / (1 + area)
    sampling = area * (1 - area) + (positive - 1) * (twice - area**2) + (negative - 1) * (both - area**2)
    expected = variance + _MISFIT * max(float(sampling), 0.0) / (positive * negative)
    weight = variance / max(expected, (_area(raw) - area) ** 2, 1e-300)
    return np.asarray(raw + weight * (smooth - raw))


def _ranks(counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return for each bin the share of negative records below it and of positive ones above it, half of its own."""
    negative, positive = counts
    below = (np.cumsum(negative) - negative / 2) / negative.sum()
    return below, 1 - (np.cumsum(positive) - positive / 2) / positive.sum()


def _area(counts: FloatArray) -> float:
    below, _ = _ranks(counts)
    return float(np.clip(below @ counts[1] / counts[1].sum(), 0.0, 1.0))


def _metrics(counts: FloatArray) -> dict[str, float]:
    """Return the metrics of (2, BINS) counts, as :class:`~coterie.results.Performance` defines them."""
    negative, positive = counts
    every = counts.sum()
    prior = float(np.clip(positive.sum() / every, 0.0, 1.0))
    true = _monotone(np.cumsum(positive[::-1]) / positive.sum())
    false = _monotone(np.cumsum(negative[::-1]) / negative.sum())
    hits, misses = true * prior, false * (1 - prior)
    precision = hits / np.maximum(hits + misses, 1e-12)
    errors = positive @ (1 - PROBABILITIES) ** 2 + negative @ PROBABILITIES**2
    return {
        "roc_auc": _area(counts),
        "average_precision": float(np.diff(true, prepend=0.0) @ precision),
        "sensitivity_at_90": float(np.interp(1 - _SPECIFICITY, np.r_[0.0, false], np.r_[0.0, true])),
        "brier": float(np.clip(errors / every, 0.0, 1.0)),
        "positive_share": prior,
    }


def _monotone(shares: FloatArray) -> FloatArray:
    return np.asarray(np.maximum.accumulate(np.clip(shares, 0.0, 1.0)))


def _calibration(counts: FloatArray) -> tuple[tuple[float, float, float], ...]:
    """Return mean probability, share of positive records and share of all records, for bins with enough of these."""
    kept = np.maximum(counts, 0.0)
    sizes = kept.sum(axis=0)
    place = np.minimum((np.cumsum(sizes) - sizes / 2) / sizes.sum() * _CURVE, _CURVE - 1).astype(np.int64)
    sums = np.stack([np.bincount(place, values, _CURVE) for values in (sizes * PROBABILITIES, kept[1], sizes)])
    sums = sums[:, sums[2] > 0]
    return tuple((float(p / n), float(y / n), float(n / sizes.sum())) for p, y, n in sums.T)
