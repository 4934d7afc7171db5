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

if TYPE_CHECKING:
    from coterie.privacy.accountants import Event

#: D, the steps of the grid of masked sums in a vector of norm 1.
STEPS = 2**16
#: Largest number of entries of a vector.
DIMENSIONS = 2**22
# Probability of noise too long for the factor, for each release, and the share of A that both directions need.
_TAIL, _FACTOR = 1e-40, 2.05
# Relative width at which the search for epsilon ends.
_PRECISION = 1e-10


def delta(events: Mapping[Event, int], epsilon: float) -> float:
    """Return delta at ``epsilon`` of composed releases; 1 if the bound says nothing.

    Args:
        events: releases with discrete noise by their number, each of a noise multiplier above 0.
        epsilon: at least 0.
    """
    from coterie.privacy.accountants import gaussian_delta

    square = math.fsum(count / event.noise_multiplier**2 for event, count in events.items())
    distance = square * DIMENSIONS / (24 * STEPS**2)
    if not distance < 1:
        return 1.0
    gaussian = float(gaussian_delta(math.sqrt(square), epsilon - _FACTOR * distance)) if square else 0.0
    return min(1.0, math.exp(distance) * (gaussian + sum(events.values()) * _TAIL))


def epsilon(events: Mapping[Event, int], target: float) -> float:
    """Return the smallest epsilon at which :func:`delta` is at most ``target``; inf if there is none."""
    low, high = 0.0, 1.0
    if delta(events, low) <= target:
        return low
    while delta(events, high) > target:
        low, high = high, 2 * high
        if high > 2.0**20:
            return math.inf
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(events, middle) > target else (low, middle)
    return high
