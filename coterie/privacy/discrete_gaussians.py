"""The privacy loss of discrete Gaussian noise on vectors of integers (docs/privacy.md, Theorem 9, part 2).

Discrete Gaussian noise is almost *rounded* Gaussian noise, and an integer with that is post-processing of the integer
with Gaussian noise: x + round(y) = round(x + y). For vectors of d entries and a variance V, probabilities of the two
noises differ by a factor of at most e^a, a = d / (24 V), in one direction, and of e^{1.04 a} in the other one but for
an event of probability 1e-40. With sensitivity D and V = (sigma_t D)^2 in release t,

    delta(epsilon) <= e^A (delta_G(epsilon - 2.05 A) + T 1e-40),   A = mu^2 d / (24 D^2),   mu^2 = sum of 1 / sigma_t^2,

where delta_G is the profile of the pair N(mu, 1), N(0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from coterie.privacy.accountants import Event

#: D, the steps of the grid of masked sums in a vector of norm 1.
STEPS = 2**16
#: Largest number of entries of a vector.
DIMENSIONS = 2**22
# Probability of noise too long for the factor, for each release, and the share of A that both directions need.
_TAIL, _FACTOR = 1e-40, 2.05


def gaussian_delta(mu: float, losses: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """delta at each loss of the pair N(mu, 1), N(0, 1) (Balle and Wang, arXiv:1805.06530, theorem 8)."""
    from scipy.special import log_ndtr

    losses = np.asarray(losses, dtype=np.float64)
    first, second = log_ndtr(mu / 2 - losses / mu), losses + log_ndtr(-mu / 2 - losses / mu)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def discrete_delta(events: Mapping[Event, int], epsilon: float) -> float:
    """Return delta at ``epsilon`` of composed releases; 1 if the bound says nothing.

    Args:
        events: releases with discrete noise by their number, each of a noise multiplier above 0.
        epsilon: at least 0.
    """
    square = math.fsum(count / event.noise_multiplier**2 for event, count in events.items())
    distance = square * DIMENSIONS / (24 * STEPS**2)
    if not distance < 1:
        return 1.0
    gaussian = float(gaussian_delta(math.sqrt(square), epsilon - _FACTOR * distance)) if square else 0.0
    return min(1.0, math.exp(distance) * (gaussian + sum(events.values()) * _TAIL))
