"""Randomness: separate streams, secret by default, reproducible with a seed.

A run without a seed draws every stream from a counter-mode AES generator keyed by the operating system. A run
with a seed is reproducible and therefore never certified.
"""

from __future__ import annotations

import math
import secrets
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from randomgen import AESCounter

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Streams:
    """Independent random streams of the server.

    Attributes:
        seed: None for secret randomness from the operating system; an integer for a reproducible simulation.
    """

    seed: int | None = None

    @property
    def secret(self) -> bool:
        """Whether these streams are unpredictable and not reproducible."""
        return self.seed is None

    def stream(self, name: str, *key: int) -> np.random.Generator:
        """Return the generator ``name`` for ``key`` (round, attempt).

        With a seed, it is a function of (seed, name, key). Without, every call uses a new secret key.
        """
        if self.seed is None:
            # randomgen's bit generators implement NumPy's interface, but its stubs do not declare it.
            return np.random.Generator(AESCounter(key=secrets.randbits(128)))
        entropy = [self.seed, zlib.crc32(name.encode()), *key]
        return np.random.default_rng(np.random.SeedSequence(entropy))


def gaussian(rng: np.random.Generator, std: float, shape: tuple[int, ...]) -> FloatArray:
    """Gaussian noise in float64: half the sum of four draws, against attacks on gaps between floating-point numbers.

    This is a mitigation (Holohan and Braghin, arXiv:2107.10138, section 5), not a proof. ``std`` 0 gives zeros. Callers
    add noise in units of the sensitivity, so that ``std`` is a noise multiplier and never underflows.

    Raises:
        ValueError: ``std`` is negative or not finite.

    Examples:
        >>> noise = gaussian(np.random.default_rng(), std=2.0, shape=(3, 4))
        >>> noise.shape, noise.dtype
        ((3, 4), dtype('float64'))
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"the standard deviation of noise must be finite and at least 0, not {std}")
    total = np.zeros(shape)
    if std > 0:
        for _ in range(4):
            total += rng.standard_normal(shape)
    return np.asarray(total * (std / 2))
