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

from coterie.fields import UNIT_SHARES
from coterie.privacy.clipping import clip_to_unit
from coterie.privacy.randomness import FloatArray

#: Number of bins.
BINS = 32
#: Numbers of a client: for each label, 0 and 1, those of all bins.
CELLS = 2 * BINS
#: C, the L2 norm of a client's counts at client level.
NORM = 5.0
#: Largest number of classes with histograms.
MAX_CLASSES = 10
# Largest count of a client.
_MOST = 1e9
# Logit of the last edge; between the edges -_LAST and _LAST, the width of a bin grows as the hyperbolic cosine.
_LAST = 8.0
# What a positive record counts at client level: positive ones are mostly fewer, and their noise matters most.
_POSITIVE = 2.0

#: (BINS - 1,) logits between the bins.
EDGES: FloatArray = np.sinh(np.linspace(-math.asinh(_LAST), math.asinh(_LAST), BINS - 1))
_WEIGHTS = np.repeat([1.0, _POSITIVE], BINS)


def count_scores(logits: npt.ArrayLike, labels: npt.ArrayLike, shares: npt.ArrayLike | None = None) -> FloatArray:
    """Return the (CELLS,) counts of records, negative ones first. A logit that is NaN counts as 0.

    Args:
        logits: (n,) of the positive class; n may be 0.
        labels: (n,) 1 for the positive class, otherwise 0.
        shares: (n,) what each record adds to its cell; None: 1.

    Examples:
        >>> counts = count_scores([-100.0, 0.1, 100.0], [0, 1, 1])
        >>> np.flatnonzero(counts).tolist()
        [0, 48, 63]
    """
    known = np.nan_to_num(np.asarray(logits, np.float64), nan=0.0, posinf=math.inf, neginf=-math.inf)
    cells = np.searchsorted(EDGES, known, side="right") + BINS * (np.asarray(labels) == 1)
    return np.bincount(cells, shares, minlength=CELLS).astype(np.float64)


def number_of_histograms(classes: int) -> int:
    """Return how many histograms there are: of class 1 if there are two, otherwise of each class against the others."""
    return 1 if classes == 2 else classes


def count_outputs(outputs: npt.NDArray[Any], labels: npt.ArrayLike) -> FloatArray:
    """Return the (h CELLS,) counts of records of all h histograms, one after the other.

    Args:
        outputs: (n, k) logits of the classes.
        labels: (n,) classes.

    Examples:
        >>> counts = count_outputs(np.array([[5.0, 0.0, 0.0], [0.0, 0.0, 9.0]]), [0, 2])
        >>> counts.shape, counts.reshape(3, 2, BINS).sum(axis=2).tolist()
        ((192,), [[1.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    """
    outputs, labels = np.asarray(outputs, np.float64), np.asarray(labels)
    if outputs.shape[1] == 2:
        return count_scores(outputs[:, 1] - outputs[:, 0], labels)
    others = [np.delete(outputs, c, axis=1) for c in range(outputs.shape[1])]
    with np.errstate(invalid="ignore"):
        logits = [outputs[:, c] - np.logaddexp.reduce(rest, axis=1) for c, rest in enumerate(others)]
    return np.concatenate([count_scores(logit, labels == c) for c, logit in enumerate(logits)])


def unit_counts(counts: Any, number: int = 1) -> FloatArray:
    """Return the weighted counts of a client in units of its largest norm, of L2 norm at most 1 and not negative.

    That norm is C of one histogram, and sqrt(h) C of h together, which are clipped as one vector of h CELLS numbers.

    All are zero if they are not that many numbers, or one of them is negative, not finite, or above a billion.

    Examples:
        >>> float(np.linalg.norm(unit_counts([100.0] * 64)).round(3))
        1.0
        >>> float(np.linalg.norm(unit_counts([float("nan")] * 64)))
        0.0
    """
    given = finite_counts(counts, number)
    if given is None or not (given >= 0).all():
        return np.zeros(number * CELLS)
    unit: FloatArray = clip_to_unit((given * np.tile(_WEIGHTS, number))[None], NORM * math.sqrt(number))[0]
    return unit


def finite_counts(counts: Any, number: int = 1) -> FloatArray | None:
    """Return what a client sent of h histograms as (h CELLS,) numbers of at most a billion; None for anything else."""
    try:
        given = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        return None
    return given if given.shape == (number * CELLS,) and (np.abs(given) <= _MOST).all() else None


def sum_of_clients(counts: Iterable[Any], number: int = 1) -> FloatArray:
    """Return the (h CELLS,) sum of :func:`unit_counts` over clients."""
    total = np.zeros(number * CELLS)
    for client in counts:
        total += unit_counts(client, number)
    return total


class UnitCounts:
    """Exact counts of the scores of a client's held-out units of privacy, which leave the client with noise alone.

    There is no other exit: no conversion to an array, no item, no sum; see :mod:`coterie.privacy.private_values`.

    Args:
        counts: (CELLS,) of :func:`count_scores`.
        share: What a unit adds to them, at most: 1 if each record is a unit, otherwise the sum of its shares.
    """

    __slots__ = ("__counts", "__share")

    def __init__(self, counts: FloatArray, share: int = 1) -> None:
        self.__counts, self.__share = counts, share

    def noisy(self, epsilon: float, rng: np.random.Generator) -> FloatArray:
        """Return (CELLS,) counts of units with discrete Laplace noise: epsilon-private at delta 0 for a unit.

        Args:
            epsilon: Epsilon of the release.
            rng: The client's noise.
        """
        stop, shape = -math.expm1(-epsilon / self.__share), self.__counts.shape
        noise = rng.geometric(stop, shape) - rng.geometric(stop, shape)
        return np.asarray((self.__counts + noise) / self.__share, np.float64)


def deviation_of_counts(epsilons: Iterable[float], ones: int = 1) -> float:
    """Return the standard deviation of the noise in a cell of the sum of several clients' noisy counts.

    Args:
        epsilons: of the clients.
        ones: What a record or unit adds to :class:`UnitCounts`, at most.
    """
    steps = (epsilon / ones for epsilon in epsilons)
    return math.sqrt(math.fsum(1 / (2 * math.sinh(step / 2) ** 2) for step in steps)) / ones


def deviation_of_client(counts: FloatArray, epsilon: float) -> float:
    """Return the standard deviation of the noise in a cell of what a client sent: counts of records, or of units.

    Noisy counts of units are no integers.
    """
    return deviation_of_counts([epsilon], 1 if (counts == np.rint(counts)).all() else UNIT_SHARES)


@dataclass(frozen=True)
class ScoreHistogram:
    """A released histogram.

    Attributes:
        counts: (2, BINS) noisy counts of negative and of positive records, or (h, 2, BINS); they may be negative.
        deviations: (2,) standard deviations of the noise in a cell, by label.
    """

    counts: FloatArray
    deviations: FloatArray

    @property
    def accuracy(self) -> float:
        """The share of records whose more probable class is right, in [0, 1]; 1/2 if noise hides all records."""
        right = self.counts[0, : BINS // 2].sum() + self.counts[1, BINS // 2 :].sum()
        every = self.counts.sum()
        return float(np.clip(right / every, 0.0, 1.0)) if every >= 1 else 0.5

    @classmethod
    def of_units(cls, noisy: FloatArray, noise: float) -> ScoreHistogram:
        """Return that of a noisy sum of :func:`unit_counts`, with noise of this standard deviation."""
        number = len(noisy) // CELLS
        scale = NORM * math.sqrt(number) / np.tile(_WEIGHTS, number)
        shape = (2, BINS) if number == 1 else (number, 2, BINS)
        return cls((noisy * scale).reshape(shape), noise * scale[[0, -1]])
