"""Accountants of RR-Cluster's tables. No certificate states their epsilon, and no run counts by them.

==================== =============================================================== =======
name                 method                                                          sampler
==================== =============================================================== =======
theorem-4.2          RR-Cluster, Theorem 4.2 with the conversion of its Theorem A.1  fixed
theorem-4.2-canonne  the same with the conversion of arXiv:2004.00010, Prop. 12      fixed
==================== =============================================================== =======

Importing this module adds them to :data:`coterie.privacy.ACCOUNTANTS`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

import numpy as np

from coterie.privacy import ACCOUNTANTS
from coterie.privacy.accountants import Accountant, Event, FloatArray


class TheoremAccountant(Accountant):
    """RR-Cluster, Theorem 4.2 as printed, with the conversion of Theorem A.1 (Mironov, arXiv:1702.07476, Prop. 3).

    eps_1(j) + eps_2(j) = j / (2 sigma^2), and infinite at j = infinity. The bound holds for *replace-one* adjacency
    and a mechanism of L2 sensitivity 1; Algorithm 2 has neither (docs/privacy.md). Its tail terms do not vanish for
    large noise, so its epsilon has a lower limit: :meth:`floor`.
    """

    samplers: ClassVar[tuple[str, ...]] = ("fixed",)
    source: ClassVar[str] = "RR-Cluster, Theorem 4.2"
    _canonne: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._rdp: FloatArray = np.zeros(len(_INTEGERS))

    def _compose(self, event: Event, count: int) -> None:
        self._rdp = self._rdp + count * _theorem_curve(event.sampling_rate, 1 / event.noise_multiplier**2)

    def _epsilon(self, delta: float) -> float:
        return self._convert(self._rdp, delta)

    @classmethod
    def _convert(cls, rdp: FloatArray, delta: float) -> float:
        bounds = rdp + math.log(1 / delta) / (_INTEGERS - 1)  # Theorem A.1
        if cls._canonne:
            bounds += np.log1p(-1 / _INTEGERS) - np.log(_INTEGERS) / (_INTEGERS - 1)
        return max(0.0, float(bounds.min()))

    @classmethod
    def floor(cls, sampling_rate: float, rounds: int, delta: float) -> float:
        """See :meth:`Accountant.floor`."""
        return cls._convert(rounds * _theorem_curve(sampling_rate, 0.0), delta)


class TheoremCanonneAccountant(TheoremAccountant):
    """Theorem 4.2 with the tighter conversion of Canonne, Kamath and Steinke (arXiv:2004.00010, Prop. 12)."""

    source: ClassVar[str] = "RR-Cluster, Theorem 4.2, converted by Canonne et al."
    _canonne: ClassVar[bool] = True


_INTEGERS = np.arange(2, 257, dtype=np.float64)


@lru_cache(maxsize=256)
def _theorem_curve(q: float, precision: float) -> FloatArray:
    """Return the Renyi curve of one round at orders 2 to 256; ``precision`` is 1 / sigma^2."""
    from scipy.special import gammaln

    j = _INTEGERS
    per_order = j * precision / 2  # eps_1(j) + eps_2(j)
    # Terms j >= 3; min{2, (exp(eps(infinity)) - 1)^j} is 2.
    terms = math.log(2) + j * math.log(q) + (j - 1) * per_order
    second = min(4 * math.expm1(min(precision, 700.0)), 2 * math.exp(min(precision, 700.0)))
    terms[0] = 2 * math.log(q) + (math.log(second) if second > 0 else -math.inf)
    alpha = j[:, None]
    with np.errstate(invalid="ignore"):
        binomials = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)
    logs = np.where(j <= alpha, binomials + terms, -math.inf)
    total = np.logaddexp(0.0, np.logaddexp.reduce(logs, axis=1))
    return np.asarray(total / (j - 1))


ACCOUNTANTS.update({"theorem-4.2": TheoremAccountant, "theorem-4.2-canonne": TheoremCanonneAccountant})
