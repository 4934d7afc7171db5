"""Histograms of scores by true label, from which a server estimates a pooled AUC, calibration and sensitivity.

A cell is a bin of the score and a label. The bins are public: the score of a record is the logit of the positive class,
class 1, and the edges are dense where most logits are. A client sends the counts of its held-out records.

At client level the server clips the counts of a client, as a vector in which positive records count double, to the L2
norm C. Adding or removing a client moves the sum of these vectors by at most C; replacing one moves it by at most
sqrt(2) C, since no entry is negative (docs/privacy.md, Theorem 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.privacy.clipping import clip_to_unit
from coterie.privacy.randomness import FloatArray

#: Number of bins.
BINS = 32
#: Numbers of a client: for each label, 0 and 1, those of all bins.
CELLS = 2 * BINS
#: C, the L2 norm of a client's counts at client level.
NORM = 5.0
# Logit of the last edge; between the edges -_LAST and _LAST, the width of a bin grows as the hyperbolic cosine.
_LAST = 8.0
# What a positive record counts at client level: positive ones are mostly fewer, and their noise matters most.
_POSITIVE = 2.0

#: (BINS - 1,) logits between the bins.
EDGES: FloatArray = np.sinh(np.linspace(-math.asinh(_LAST), math.asinh(_LAST), BINS - 1))
_WEIGHTS = np.repeat([1.0, _POSITIVE], BINS)


def count_scores(logits: npt.ArrayLike, labels: npt.ArrayLike) -> FloatArray:
    """Return the (CELLS,) counts of records, negative ones first. A logit that is NaN counts as 0.

    Args:
        logits: (n,) of the positive class; n may be 0.
        labels: (n,) 1 for the positive class, otherwise 0.

    Examples:
        >>> counts = count_scores([-100.0, 0.1, 100.0], [0, 1, 1])
        >>> np.flatnonzero(counts).tolist()
        [0, 48, 63]
    """
    known = np.nan_to_num(np.asarray(logits, np.float64), nan=0.0, posinf=math.inf, neginf=-math.inf)
    cells = np.searchsorted(EDGES, known, side="right") + BINS * (np.asarray(labels) == 1)
    return np.bincount(cells, minlength=CELLS).astype(np.float64)


def unit_counts(counts: Any) -> FloatArray:
    """Return the (CELLS,) weighted counts of a client in units of C, of L2 norm at most 1 and not negative.

    All are zero if they are not that many numbers, or one of them is negative or not finite.

    Examples:
        >>> float(np.linalg.norm(unit_counts([100.0] * 64)).round(3))
        1.0
        >>> float(np.linalg.norm(unit_counts([float("nan")] * 64)))
        0.0
    """
    try:
        given = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        return np.zeros(CELLS)
    if given.shape != (CELLS,) or not (np.isfinite(given) & (given >= 0)).all():
        return np.zeros(CELLS)
    with np.errstate(over="ignore"):  # what overflows counts as not finite
        unit: FloatArray = clip_to_unit((given * _WEIGHTS)[None], NORM)[0]
    return unit


def sum_of_clients(counts: Iterable[Any]) -> FloatArray:
    """Return the (CELLS,) sum of :func:`unit_counts` over clients."""
    total = np.zeros(CELLS)
    for client in counts:
        total += unit_counts(client)
    return total


@dataclass(frozen=True)
class ScoreHistogram:
    """A released histogram.

    Attributes:
        counts: (2, BINS) noisy counts of negative and of positive records; they may be negative.
        deviations: (2,) standard deviations of the noise in a cell, by label.
    """

    counts: FloatArray
    deviations: FloatArray

    @classmethod
    def of_units(cls, noisy: FloatArray, noise: float) -> ScoreHistogram:
        """Return that of a noisy sum of :func:`unit_counts`, with noise of this standard deviation."""
        scale = NORM / _WEIGHTS
        return cls((noisy * scale).reshape(2, BINS), noise * scale[[0, -1]])
