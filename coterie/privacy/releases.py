"""What a round releases: it is charged, and anyone may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.privacy.randomness import FloatArray

IntArray = npt.NDArray[np.int64]


class NothingReleasedError(Exception):
    """A round, or an evaluation, was charged and releases nothing, for a public reason: it is skipped."""


@dataclass(frozen=True)
class MechanismOutput:
    """Output of one or more draws of a mechanism; the leading axis is ``draws``.

    ``scores`` and ``assigned`` are for the audit and never leave the server.

    Attributes:
        sums: (draws, k, d), noisy.
        histogram: (draws, k), noisy; None if sizes are not released.
        divisors: (draws, k) D_j of the update.
        below: (draws,) noisy sum of 1/2 or -1/2 per client, by whether its update is shorter than the plan's
            ``norm_threshold``; None if not released.
        scores: (draws, m, k) noisy identifiers by slot, if the mechanism has them.
        assigned: (draws, m) cluster of each slot's update, if the mechanism has slots.
    """

    sums: FloatArray
    histogram: FloatArray | None
    divisors: FloatArray
    below: FloatArray | None = None
    scores: FloatArray | None = None
    assigned: IntArray | None = None


@dataclass(frozen=True, kw_only=True)
class Released:
    """The release of one round, which is charged and may be used freely; each kind has a subclass.

    Attributes:
        charge: number of its charge in the ledger.
        epsilon: cost of all charges up to this release.
        below: noisy share of the updates, or at record level of the gradients, that are shorter than the plan's
            ``norm_threshold``; None if not released.
    """

    charge: int
    epsilon: float
    below: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReleasedSums(Released):
    """Sums of the updates of each cluster.

    Attributes:
        sums: (k, d) float64, noisy sums of clipped updates per cluster.
        histogram: (k,) float64, noisy numbers of clients that chose each cluster; None if not released.
        divisors: (k,) float64, D_j of the update, from public constants and released values.
        cohort: divisor of coordinates shared by all clusters: qM, or the sum of released sizes.
        noise: standard deviation of the noise in a coordinate of the sums, a public number; 0 if clients added it.
    """

    sums: FloatArray
    histogram: FloatArray | None
    divisors: FloatArray
    cohort: float
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReleasedUpdates(Released):
    """The updates of single clients.

    Attributes:
        clients: (n,) ids of the clients.
        labels: (n,) chosen or assigned clusters.
        assigned: (n,) clusters whose models the updates change; they differ from ``labels`` after redrawing.
        weights: (n,) public weights.
        updates: (n, d) float32.
    """

    clients: IntArray
    labels: IntArray
    assigned: IntArray
    weights: FloatArray
    updates: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class ReleasedPoints(Released):
    """Points of single clients.

    Attributes:
        points: (n, *shape) float32 points by client id.
    """

    points: Mapping[int, npt.NDArray[np.float32]]
