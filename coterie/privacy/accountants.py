"""Events, and the accountants of their cost that certificates use: ``pld``, the default, and ``rdp``.

Both are sound for both samplers and use ``dp-accounting``.
dp-accounting and SciPy take seconds to import: they are imported when an accountant composes its first event.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.privacy.discrete_gaussians import discrete_delta, gaussian_delta

FloatArray = npt.NDArray[np.float64]

# Privacy losses are rounded up to a grid, so a coarser grid can only increase the reported epsilon. _GRID is the
# coarsest step. If the standard deviation of a release's loss spans less than four steps, it is halved, at most
# _HALVINGS times.
_GRID = 1e-3
_HALVINGS = 11
# Minimum number of steps per standard deviation of a release's loss, and maximum number of steps of a refined grid.
_STEPS_PER_DEVIATION = 4
_MAX_STEPS = 2**16
# Bound on the probability mass moved by rounding errors of the Fourier transforms, per composed event.
_ROUND_OFF = 1e-16
# Mass of a privacy loss distribution that may be treated as infinite loss, per event.
_TAIL = 1e-15
# Share of delta above which these errors make the bound of another accountant worth computing.
_MAX_ERROR = 1e-2
# Epsilon above which exp(-epsilon) is not computed.
_LARGE = 600.0
#: Smallest useful noise multiplier; below it the grid of losses does not fit in memory.
MIN_NOISE = 0.05
#: Largest useful noise multiplier.
MAX_NOISE = 1e4

SAMPLERS = ("poisson", "fixed", "discrete")


class PrivacyError(ValueError):
    """A privacy parameter is invalid, or a target cannot be met."""


@dataclass(frozen=True)
class Event:
    """One subsampled Gaussian release on one cohort.

    Attributes:
        sampling_rate: q in (0, 1]: the probability that a client participates, or m / M.
        noise_multiplier: noise standard deviation / L2 sensitivity of the whole release; 0 means no noise.
        sampler: "poisson": clients are sampled independently; adjacency is add/remove one. "fixed": m of M clients
            without replacement; adjacency is to replace one client, or to make it absent. "discrete": all clients take
            part, and the noise is a sum of discrete Gaussians (mechanisms/secure.py); adjacency is to zero out one
            client's contributions.
        slot: public group of clients that alone contributes, from 0; None: all clients may.
        slots: number of such groups; 0: there are none.
    """

    sampling_rate: float
    noise_multiplier: float
    sampler: str = "poisson"
    slot: int | None = None
    slots: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate must lie in (0, 1], not {self.sampling_rate}")
        if not (0 <= self.noise_multiplier < math.inf):
            raise PrivacyError(f"noise multiplier must be finite and at least 0, not {self.noise_multiplier}")
        if self.sampler not in SAMPLERS:
            raise PrivacyError(f"sampler must be {' or '.join(SAMPLERS)}, not {self.sampler!r}")
        if self.sampler == "discrete" and self.sampling_rate != 1:
            raise PrivacyError(f"discrete noise has no amplification: the sampling rate is 1, not {self.sampling_rate}")
        if not (self.slots == 0 if self.slot is None else 0 <= self.slot < self.slots):
            raise PrivacyError(f"slot must lie in [0, {self.slots}), not {self.slot}")


def events_of_a_client(events: Mapping[Event, int]) -> Counter[Event]:
    """Return the most events, without slots, to which one client contributes.

    A client belongs to one slot. Of every event, the largest count over slots is taken, which is an upper bound, and
    exact if the slots' events are nested, as in a cyclic schedule. Slots of different numbers are unrelated: their
    counts add up.
    """
    totals: Counter[Event] = Counter()
    most: dict[tuple[Event, int], int] = {}
    for event, count in events.items():
        plain = replace(event, slot=None, slots=0)
        if event.slot is None:
            totals[plain] += count
        else:
            most[plain, event.slots] = max(most.get((plain, event.slots), 0), count)
    for (plain, _), count in most.items():
        totals[plain] += count
    return totals


class Accountant:
    """Epsilon of all composed events of one client. Composition is fast enough for use in every round."""

    samplers: ClassVar[tuple[str, ...]] = SAMPLERS
    source: ClassVar[str] = "dp-accounting"

    def __init__(self) -> None:
        self._unprotected = False
        self._sampler: str | None = None
        self._costs: dict[float, float] = {}  # epsilon of all events so far, by delta

    def compose(self, event: Event, count: int = 1) -> None:
        """Compose ``count`` further events.

        Raises:
            PrivacyError: this accountant does not support the event's sampler, an earlier event had another sampler,
                ``count`` is negative, or the event has a slot (:func:`events_of_a_client`).
        """
        if event.slot is not None:
            raise PrivacyError("events of a slot are composed per client: use events_of_a_client")
        if count < 0:
            raise PrivacyError(f"count must be at least 0, not {count}")
        if event.sampler not in self.samplers:
            raise PrivacyError(f"this accountant supports {' and '.join(self.samplers)} sampling, not {event.sampler}")
        if self._sampler not in (None, event.sampler):
            raise PrivacyError(f"{self._sampler} and {event.sampler} events have different adjacencies: no composition")
        self._sampler = event.sampler
        self._unprotected = self._unprotected or event.noise_multiplier < MIN_NOISE
        if count and not self._unprotected:
            self._compose(event, count)
            self._costs = {}

    def epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` of all events so far; inf if the noise of one is below ``MIN_NOISE``."""
        if self._unprotected:
            return math.inf
        if delta not in self._costs:
            self._costs[delta] = self._epsilon(delta)
        return self._costs[delta]

    def delta(self, epsilon: float) -> float:
        """Delta at ``epsilon`` of all events so far, by ``pld`` and ``rdp``; 1 if the noise of one is too small."""
        return 1.0 if self._unprotected else min(1.0, self._delta(epsilon))

    def with_rounds(self, event: Event, count: int) -> Accountant:
        """Return a copy with ``count`` further events composed."""
        other = copy.copy(self)
        other.compose(event, count)
        return other

    @classmethod
    def floor(cls, sampling_rate: float, rounds: int, delta: float) -> float:
        """Return the smallest epsilon of ``rounds`` rounds at any noise."""
        return 0.0

    def _compose(self, event: Event, count: int) -> None:
        raise NotImplementedError

    def _epsilon(self, delta: float) -> float:
        raise NotImplementedError

    def _delta(self, epsilon: float) -> float:
        raise NotImplementedError


class PldAccountant(Accountant):
    """Privacy loss distributions (Doroshenko et al., arXiv:2207.04380): one convolution a round, about 4 ms.

    The grid is a function of the events, so the same events have the same cost in any order. If a further event
    changes the grid, all events are composed again.

    Where the grid cannot resolve the losses, or rounding errors amount to a share of delta, the cost is the smaller of
    this bound and that of :class:`RdpAccountant`, which has neither error. Elsewhere RDP is never tighter.

    Discrete Gaussian noise costs what Gaussian noise of the same deviation does, and a little more for the grid:
    :mod:`coterie.privacy.discrete_gaussians`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pld: Any = None
        self._grid = 0.0
        self._events: Counter[Event] = Counter()

    def _compose(self, event: Event, count: int) -> None:
        self._events = self._events + Counter({event: count})
        if event.sampler == "discrete":
            return
        grid = _grid_for(self._resolved())
        added = [(event, count)]
        if grid != self._grid:
            self._pld, self._grid = None, grid
            added = sorted(self._events.items(), key=lambda pair: (pair[0].sampling_rate, pair[0].noise_multiplier))
        from coterie.privacy.loss_distributions import on_arrays

        for event, count in added:
            one = on_arrays(self._one(event, grid))
            several = one.self_compose(count) if count > 1 else one
            self._pld = several if self._pld is None else self._pld.compose(several)

    def _epsilon(self, delta: float) -> float:
        if self._sampler == "discrete":
            most = self._renyi().epsilon(delta)
            return _smallest(lambda epsilon: discrete_delta(self._events, epsilon), delta, 0.0, most)
        if self._pld is None:
            return 0.0
        rounded = delta - _ROUND_OFF * self._events.total()
        cost = _epsilon_of(self._pld, rounded) if rounded > 0 else math.inf
        return min(cost, self._renyi().epsilon(delta)) if self._is_coarse(delta) else cost

    def _delta(self, epsilon: float) -> float:
        if self._sampler == "discrete":
            return min(discrete_delta(self._events, epsilon), self._renyi().delta(epsilon))
        if self._pld is None:
            return 0.0
        delta = float(self._pld.get_delta_for_epsilon(epsilon)) + _ROUND_OFF * self._events.total()
        return min(delta, self._renyi().delta(epsilon)) if self._is_coarse(delta) else delta

    def _is_coarse(self, delta: float) -> bool:
        """Whether the grid exceeds the standard deviation of the losses, or errors exceed a share of ``delta``."""
        if self._grid > _root_mean_square(self._events):
            return True
        return (_ROUND_OFF + _TAIL) * self._events.total() > _MAX_ERROR * delta

    def _renyi(self) -> Accountant:
        """Return the same events by RDP."""
        other = RdpAccountant()
        for event, count in self._events.items():
            other.compose(event, count)
        return other

    def _resolved(self) -> Mapping[Event, int]:
        """Return the releases whose losses the grid must resolve."""
        return self._events

    def _one(self, event: Event, grid: float) -> Any:
        return _pld_of(event, grid)


def _epsilon_of(pld: Any, delta: float) -> float:
    """Return epsilon at ``delta`` > 0 of a privacy loss distribution, by a search where exp(-epsilon) underflows."""
    if pld.get_delta_for_epsilon(_LARGE) <= delta:
        return float(pld.get_epsilon_for_delta(delta))
    if pld.get_delta_for_epsilon(math.inf) > delta:
        return math.inf
    low, high = _LARGE, 2 * _LARGE
    while pld.get_delta_for_epsilon(high) > delta:
        low, high = high, 2 * high
    return _smallest(pld.get_delta_for_epsilon, delta, low, high)


def _smallest(delta_of: Callable[[float], float], delta: float, low: float, high: float) -> float:
    """Return the smallest epsilon from ``low`` to ``high`` at which ``delta_of`` is at most ``delta``, or ``high``."""
    if delta_of(low) <= delta:
        return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


class VisibleAccountant(PldAccountant):
    """PLD against an adversary who observes participation: with probability q a full Gaussian release, else nothing.

    Sampling does not depend on data, so a round is the mixture of the two cases, and the observed participation
    reveals the case.
    """

    def _is_coarse(self, delta: float) -> bool:
        """Never: :class:`RdpAccountant` assumes that participation is secret."""
        return False

    def _resolved(self) -> Mapping[Event, int]:
        releases: Counter[Event] = Counter()
        for event, count in self._events.items():
            releases[replace(event, sampling_rate=1.0)] += count
        return releases

    def _one(self, event: Event, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as pld

        nothing = pld.identity(value_discretization_interval=grid)
        return _pld_of(replace(event, sampling_rate=1.0), grid).compute_mixture(nothing, event.sampling_rate)


def _grid_for(events: Mapping[Event, int]) -> float:
    """Return the step of the grid on which these events are composed: ``_GRID``, or a half, a quarter, ... of it.

    Rounding one loss up to a step of h adds about h^2 / 6 to its variance, so h is at most a quarter of the root mean
    square of the losses' standard deviations, unless this would require too many steps for the range of the losses.
    """
    least = max(_longest_loss(event) for event in events) / _MAX_STEPS
    step = max(_root_mean_square(events) / _STEPS_PER_DEVIATION, least, _GRID * 2.0**-_HALVINGS)
    return _GRID * 2.0 ** min(0, math.floor(math.log2(step / _GRID)))


def _root_mean_square(events: Mapping[Event, int]) -> float:
    """Return the root mean square of the approximate standard deviations of the losses of these events."""
    variance = math.fsum(count * _deviation(event) ** 2 for event, count in events.items()) / sum(events.values())
    return math.sqrt(variance)


def _deviation(event: Event) -> float:
    """Approximate standard deviation of the privacy loss of one event."""
    mu = 1 / event.noise_multiplier
    return min(mu, event.sampling_rate * math.sqrt(math.expm1(min(mu**2, 700.0))))


def _longest_loss(event: Event) -> float:
    """Approximate largest privacy loss of one event that is not treated as infinite."""
    mu = 1 / event.noise_multiplier
    return math.log1p(event.sampling_rate * math.expm1(min(10 * mu + mu**2 / 2, 700.0)))


@lru_cache(maxsize=256)
def _pld_of(event: Event, grid: float) -> Any:
    if event.sampler == "fixed":
        return _symmetrised_pld(event, grid)
    from coterie.privacy.loss_distributions import poisson_gaussian

    return poisson_gaussian(event.noise_multiplier, event.sampling_rate, grid)


def _symmetrised_pld(event: Event, grid: float) -> Any:
    """Replace-one PLD of fixed-size sampling: the worse profile in both directions (docs/privacy.md, theorem 2)."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    upper = 64
    while _replace_one_delta(event, np.array([upper * grid]))[0] > _TAIL:
        upper *= 2
    above = np.arange(0, upper + 1)
    deltas = _replace_one_delta(event, np.asarray(above * grid, np.float64))
    losses = -above[:0:-1] * grid  # delta(-e) = 1 - exp(-e) + exp(-e) delta(e) for a symmetric pair
    mirrored = -np.expm1(losses) + np.exp(losses) * deltas[:0:-1]
    both = np.minimum.accumulate(np.concatenate([mirrored, deltas]))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(grid, np.arange(-upper, upper + 1), both)
    return pld.PrivacyLossDistribution(pmf)


def _replace_one_delta(event: Event, losses: FloatArray) -> FloatArray:
    """delta(e) = q delta_Gauss(log(1 + (exp(e) - 1) / q)) for e >= 0 (Balle, Barthe, Gaboardi, arXiv:1807.01647)."""
    q, mu = event.sampling_rate, 1 / event.noise_multiplier
    inner = np.logaddexp(0.0, np.log(np.expm1(np.maximum(losses, 1e-300))) - math.log(q)) if q < 1 else losses
    return np.asarray(q * gaussian_delta(mu, inner))


class RdpAccountant(Accountant):
    """Renyi differential privacy (Mironov et al., arXiv:1908.10530; Wang et al., arXiv:1808.00087)."""

    def __init__(self) -> None:
        super().__init__()
        self._rdp: FloatArray | float = 0.0

    def _compose(self, event: Event, count: int) -> None:
        self._rdp = self._rdp + count * self._curve(event)

    def _epsilon(self, delta: float) -> float:
        if isinstance(self._rdp, float):
            return 0.0
        from dp_accounting.rdp import compute_epsilon

        with _quiet_absl():
            return float(compute_epsilon(_orders(), self._rdp, delta)[0])

    def _delta(self, epsilon: float) -> float:
        if isinstance(self._rdp, float):
            return 0.0
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        with _quiet_absl():
            return float(compute_delta(_orders(), self._rdp, epsilon)[0])

    def _curve(self, event: Event) -> FloatArray:
        return _rdp_of(event)


@cache
def _orders() -> FloatArray:
    """Return the Renyi orders of dp-accounting."""
    from dp_accounting.rdp import RdpAccountant

    return np.array(RdpAccountant().orders)


@contextmanager
def _quiet_absl() -> Iterator[None]:
    # dp-accounting warns for every Renyi order that it omits, which is safe.
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def renyi_orders() -> list[float]:
    """Renyi orders of :class:`RdpAccountant`."""
    return [float(order) for order in _orders()]


def renyi_divergence(event: Event, order: float) -> float:
    """Renyi divergence of one event at an order of :func:`renyi_orders`; inf if its noise is below ``MIN_NOISE``."""
    if event.noise_multiplier < MIN_NOISE:
        return math.inf
    return float(_rdp_of(event)[renyi_orders().index(order)])


@lru_cache(maxsize=256)
def _rdp_of(event: Event) -> FloatArray:
    if event.sampler == "poisson":
        from coterie.privacy.renyi import poisson_gaussian_divergences

        return poisson_gaussian_divergences(event.noise_multiplier, event.sampling_rate, _orders())
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if event.sampler == "discrete":  # Canonne, Kamath and Steinke, arXiv:2004.00010, Theorem 4, in integer units
        return np.asarray(_orders() / (2 * event.noise_multiplier**2))
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    many = 10**12  # the bound depends on m / M only
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(many, round(event.sampling_rate * many), gaussian)
    accountant = RdpAccountant(orders=_orders(), neighboring_relation=relation)
    with _quiet_absl():
        accountant.compose(sampled)
    # At rates near 1, the bound for sampling without replacement exceeds the bound without sampling. Both hold,
    # because Renyi divergence is quasi-convex in the sample.
    return np.asarray(np.minimum(accountant.rdp, _orders() / (2 * event.noise_multiplier**2)))
