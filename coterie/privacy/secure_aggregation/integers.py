"""Vectors on an integer grid modulo 2^32, and discrete Gaussian noise.

A vector of L2 norm at most 1 becomes integers of norm at most 2^16. Rounding to the nearest integer moves the norm by
at most sqrt(n) / 2 for n entries, so the vector is first made that much shorter: the bound is exact.

C. Canonne, G. Kamath, T. Steinke: The Discrete Gaussian for Differential Privacy (2020), Algorithm 3.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.secure_aggregation.keys import Vector

Integers = npt.NDArray[np.int64]


def to_grid(vector: npt.ArrayLike, steps: float = STEPS) -> Integers:
    """Return (n,) integers of norm at most `steps` for a vector of norm at most 1; one above is shortened.

    Raises:
        ValueError: an entry is not finite, or rounding would shorten the vector by more than a tenth.

    Examples:
        >>> to_grid([0.6, -0.8]).tolist()
        [39321, -52428]
    """
    values = np.asarray(vector, np.float64)
    most = round((0.2 * steps) ** 2)
    if values.ndim != 1 or len(values) > most or not np.isfinite(values).all():
        raise ValueError(f"a vector on a grid of {steps:g} steps has at most {most:,} finite entries")
    largest = float(np.abs(values).max(initial=0.0))
    norm = largest * float(np.linalg.norm(values / largest)) if largest else 0.0
    room = 1 - math.sqrt(len(values)) / (2 * steps) - 2.0**-40  # and the errors of float64
    grid: Integers = np.rint(values * (room / max(norm, 1.0)) * steps).astype(np.int64)
    return grid


def from_grid(total: Vector) -> npt.NDArray[np.float64]:
    """Return a sum modulo 2^32 in units of 1, read as signed integers.

    Examples:
        >>> from_grid(to_modulus(to_grid([0.5]) - 2 * to_grid([0.5]))).round(2).tolist()
        [-0.5]
    """
    signed: npt.NDArray[np.float64] = total.astype(np.uint32).view(np.int32) / STEPS
    return signed


def to_modulus(integers: Integers) -> Vector:
    """Return integers modulo 2^32."""
    return integers.astype(np.uint32)


def discrete_gaussian(rng: np.random.Generator, std: float, size: int) -> Integers:
    """Return (size,) integers, each x with a probability proportional to exp(-x^2 / (2 std^2)).

    Candidates are of a discrete Laplace distribution; acceptance is computed in float64.

    Raises:
        ValueError: `std` is not in [1, 2^28].

    Examples:
        >>> discrete_gaussian(np.random.default_rng(), 100.0, 4).shape
        (4,)
    """
    if not 1 <= std <= 2**28:
        raise ValueError(f"a standard deviation of {std} steps: it must lie in [1, 2^28]")
    scale = math.floor(std) + 1
    drawn: list[Integers] = []
    missing = size
    while missing > 0:
        many = int(1.5 * missing) + 64
        magnitude = rng.geometric(-math.expm1(-1 / scale), many).astype(np.int64) - 1
        negative = rng.integers(0, 2, many, dtype=np.int8).astype(bool)
        accepted = rng.random(many) < np.exp(-((magnitude - std**2 / scale) ** 2) / (2 * std**2))
        accepted &= ~(negative & (magnitude == 0))  # zero has one sign
        drawn.append(np.where(negative, -magnitude, magnitude)[accepted][:missing])
        missing -= len(drawn[-1])
    return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)
