"""Losses of other clients' models on a client's own records, released with noise (LCFL at record level).

Adding or removing one record changes the summed loss of each of m models by at most L, and all of them by at most
L sqrt(m) in L2 norm: a Gaussian mechanism (docs/privacy.md, theorem 3). Its cost is
:meth:`coterie.privacy.RecordPlan.losses`.
"""

from __future__ import annotations

import numpy as np

from coterie.privacy.private_values import PerUnit
from coterie.privacy.randomness import FloatArray, gaussian


def noisy_losses(
    losses: PerUnit, bound: float, deviation: float, num_examples: int, rng: np.random.Generator
) -> FloatArray:
    """Return the (m,) noisy mean losses of all models.

    Args:
        losses: (U, m) losses of every model on every unit. They are clipped to [0, bound], and NaN counts as ``bound``.
        bound: L, finite.
        deviation: of the noise on a sum, in units of L.
        num_examples: N, the public divisor of the sums; not U, which changes with a record.
        rng: the client's noise.

    Examples:
        >>> losses = PerUnit([[2.0, 0.5], [1.0, 0.5]])  # of two models on two records
        >>> noisy_losses(losses, bound=4.0, deviation=0.0, num_examples=2, rng=np.random.default_rng())
        array([1.5, 0.5])
    """
    return losses.noisy_sum(bound, lambda shape: gaussian(rng, deviation, shape)) * (bound / num_examples)
