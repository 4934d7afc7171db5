"""Losses of other clients' models on a client's own records, released with noise (LCFL at record level).

Adding or removing one record changes the summed loss of each of m models by at most L, and all of them by at most
L sqrt(m) in L2 norm: a Gaussian mechanism (docs/privacy.md, theorem 3). Its cost is
:meth:`coterie.privacy.RecordPlan.losses`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.privacy.randomness import FloatArray, gaussian
from coterie.privacy.selection import unit_losses


def noisy_losses(
    losses: npt.ArrayLike, bound: float, deviation: float, num_examples: int, rng: np.random.Generator
) -> FloatArray:
    """Return the (m,) noisy mean losses of all models.

    Args:
        losses: (n, m) of every model on every record; clipped to [0, bound], NaN counts as ``bound``.
        bound: L, finite.
        deviation: of the noise on a sum, in units of L.
        num_examples: N, the public divisor of the sums; not n, which changes with a record.
        rng: the client's noise.

    Examples:
        >>> losses = np.array([[2.0, 0.5], [1.0, 0.5]])  # of two models on two records
        >>> noisy_losses(losses, bound=4.0, deviation=0.0, num_examples=2, rng=np.random.default_rng())
        array([1.5, 0.5])
    """
    units = unit_losses(losses, bound)
    noisy: FloatArray = (units.sum(axis=0) + gaussian(rng, deviation, units.shape[1:])) * (bound / num_examples)
    return noisy
