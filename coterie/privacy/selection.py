"""Private selection of a label: Gumbel noise on losses (record level), and noisy identifiers (rr-slot).

Both are exponential mechanisms and are accounted for as Gaussians: a mechanism whose privacy loss lies in an interval
of length e ("bounded range") is dominated by the Gaussian pair of shift

    mu(e) = 2 Phi^-1(1/2 + 1/2 tanh(e / 4)),

so a selection is ``Event(1, 1 / mu)`` in every accountant (docs/privacy.md, Lemma 3).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coterie.privacy.accountants import MAX_NOISE, MIN_NOISE, Event, PrivacyError
from coterie.privacy.private_values import PerUnit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def selection_event(epsilon: float) -> Event:
    """Event of one selection by :func:`noisy_argmin`, under adding or removing one record.

    Examples:
        >>> round(selection_event(epsilon=1.0).noise_multiplier, 3)
        1.603
    """
    if not 0 < epsilon < math.inf:
        raise PrivacyError(f"epsilon of a selection must be positive and finite, not {epsilon}")
    from scipy.special import expit, ndtri  # slow to import

    mu = -2 * float(ndtri(expit(-epsilon / 2)))  # 1/2 + 1/2 tanh(e / 4) = expit(e / 2), which loses precision near 1
    if not MIN_NOISE < 1 / max(mu, 1 / MAX_NOISE) < MAX_NOISE:
        raise PrivacyError(f"epsilon of a selection is {epsilon:g}, out of range; use 0.001 to 50")
    return Event(1.0, 1 / mu)


def noisy_argmin(losses: PerUnit, bound: float, epsilon: float, rng: np.random.Generator) -> int:
    """Select the model with the smallest loss privately: a private form of RC-DPFL's selection by loss.

    Adding or removing one record changes all summed losses in the same direction, by at most ``bound``. With Gumbel
    noise of scale ``bound / epsilon``, drawn in units of ``bound``, the privacy loss lies in an interval of length
    ``epsilon``.

    Args:
        losses: (U, k) losses of every model on every unit. They are clipped to [0, bound], and NaN counts as ``bound``.
        bound: L, finite.
        epsilon: epsilon of this selection; its event is :func:`selection_event`.
        rng: the client's noise.

    Returns:
        the index of a model.

    Examples:
        >>> losses = PerUnit([[2.0, 0.1], [1.9, 0.2]] * 50)  # of two models on 100 records
        >>> noisy_argmin(losses, bound=4.0, epsilon=5.0, rng=np.random.default_rng())
        1
    """
    selection_event(epsilon)
    return int(np.argmin(losses.noisy_sum(bound, lambda shape: -rng.gumbel(scale=1 / epsilon, size=shape))))


def noisy_labels(labels: IntArray, num_clusters: int, gap: float, rng: np.random.Generator) -> IntArray:
    """The exponential mechanism on one-hot identifiers: the true label has odds exp(gap) to each other label.

    Args:
        labels: any shape; for -1 (no reply) a label is drawn uniformly.
        num_clusters: k.
        gap: eta.
        rng: the noise.
    """
    truth = math.exp(gap) / (math.exp(gap) + num_clusters - 1)
    keep = rng.random(labels.shape) < np.where(labels >= 0, truth, 1 / num_clusters)
    other = rng.integers(1, max(num_clusters, 2), size=labels.shape)  # steps to one of the k - 1 other labels
    valid_labels = np.maximum(labels, 0)
    return np.asarray(np.where(keep, valid_labels, (valid_labels + other) % num_clusters), dtype=np.int64)


def identifier_mu(gap: float, num_clusters: int) -> float:
    """Shift of the Gaussian pair that dominates :func:`noisy_labels` if a label is replaced or removed."""
    from scipy.special import ndtri

    total = math.exp(gap) + num_clusters - 1
    return float(-ndtri((num_clusters - 1) / total) - ndtri(1 / total))


def identifier_gap(mu: float, num_clusters: int) -> float:
    """The largest eta whose :func:`identifier_mu` is at most ``mu``."""
    if num_clusters == 1:
        return 0.0
    most = 30.0  # labels are practically exact
    if identifier_mu(most, num_clusters) <= mu:
        return most
    from scipy.optimize import brentq

    gap = float(brentq(lambda eta: identifier_mu(eta, num_clusters) - mu, 0.0, most, xtol=1e-10))
    return max(0.0, gap - 1e-9)  # on the private side of the root's tolerance
