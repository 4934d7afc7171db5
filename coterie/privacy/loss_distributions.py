"""Privacy loss distributions of dp-accounting, computed on arrays: the same numbers several times as fast.

dp-accounting computes them by loops in Python over every loss of a grid. The formulas here are its own, in its order,
so that an epsilon has the same digits (``tests/privacy/test_loss_distributions.py``). Importing this module takes
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import fft, signal, special

FloatArray = npt.NDArray[np.float64]

# Largest order, of either sign, of the Chernoff bounds on the range of a sum of losses, times the number of losses.
_ORDERS = 20
# Bounds on that range whose difference, as a share of the range, is above this are not mistaken for one another.
_SLACK = 1e-9


class _FewLosses(pld_pmf.SparsePLDPmf):  # type: ignore[misc]
    """Probabilities of few losses; as soon as there are many, on arrays."""

    def compose(self, other: Any, tail_mass_truncation: float = 0) -> _FewLosses:
        composed = super().compose(other, tail_mass_truncation)
        return _few_losses(composed)

    def to_dense_pmf(self) -> _Losses:
        return _losses(super().to_dense_pmf())


class _Losses(pld_pmf.DensePLDPmf):  # type: ignore[misc]
    """Probabilities of losses on a grid, by their numbers of steps from a lowest one."""

    def compose(self, other: Any, tail_mass_truncation: float = 0) -> _Losses:
        self.validate_composable(other)
        probs = signal.fftconvolve(self._probs, other._probs)
        infinite = self._infinity_mass + other._infinity_mass - self._infinity_mass * other._infinity_mass
        first, probs, cut = _without_tails(probs, tail_mass_truncation)
        lowest = self._lower_loss + other._lower_loss + first
        return _Losses(self._discretization, lowest, probs, infinite + cut, self._pessimistic_estimate)

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> _Losses:
        first, last = _range_of_sum(self._probs, num_times, tail_mass_truncation)
        length = last - first + 1
        transform = fft.fft(self._probs, fft.next_fast_len(max(length, self.size)))
        probs = np.roll(np.real(fft.ifft(transform**num_times)), -first)[:length]
        infinite = tail_mass_truncation - math.expm1(num_times * math.log1p(-self._infinity_mass))
        lowest = self._lower_loss * num_times + first
        return _Losses(self._discretization, lowest, probs, infinite, self._pessimistic_estimate)

    def get_epsilon_for_delta(self, delta: float) -> float:
        if self._infinity_mass > delta:
            return math.inf
        probs = self._probs[::-1]
        highest = (self._lower_loss + self.size - 1) * self._discretization
        losses = np.cumsum(np.concatenate([[highest], np.full(self.size - 1, -self._discretization)]))
        above = np.cumsum(np.concatenate([[self._infinity_mass], probs]))  # of the losses before each one
        with np.errstate(all="ignore"):
            below = np.concatenate([[0.0], np.cumsum(np.exp(-losses) * probs)])
            enough = (above > delta) & (below > 0) & (np.log((above - delta) / below) >= np.append(losses, -math.inf))
        beyond = np.append(False, (above >= delta)[1:] & (below == 0)[1:])  # losses whose exp(-loss) is zero
        stop = int(np.argmax(enough | beyond)) if (enough | beyond).any() else self.size
        if beyond[stop] and not enough[stop]:
            return max(0, float(losses[stop - 1]))
        exponentials = np.fromiter(map(math.exp, (-losses[:stop]).tolist()), np.float64, stop)
        total = float(np.cumsum(np.append(0.0, exponentials * probs[:stop]))[-1])
        if above[stop] <= total + delta:
            return 0.0
        return math.log((above[stop] - delta) / total)


def _without_tails(probs: FloatArray, mass: float) -> tuple[int, FloatArray, float]:
    """Cut off at most half of ``mass`` at each end; return the number cut below, the rest, and the mass cut above.

    What is cut below counts as the lowest loss that is left.
    """
    if mass == 0:
        return 0, probs, 0.0
    first = _first_above(probs, mass / 2)
    last = max(len(probs) - _first_above(probs[::-1], mass / 2), first + 1)
    below, above = np.sum(probs[:first]), np.sum(probs[last:])
    kept = probs[first:last]
    kept[0] += below
    return first, kept, above


def _first_above(probs: FloatArray, mass: float) -> int:
    """Return the index of the first element up to which the sum exceeds ``mass``."""
    exceeded = np.cumsum(probs) > mass
    return int(np.argmax(exceeded)) if exceeded.any() else len(probs)


def _range_of_sum(probs: FloatArray, times: int, mass: float) -> tuple[int, int]:
    """Return bounds on the sum of ``times`` indices, outside of which lies at most ``mass`` (Chernoff)."""
    steps = len(probs)
    shares = np.arange(steps) / steps

    def bounds(moments: Mapping[int, float]) -> dict[int, float]:
        return {
            order: (times * math.log(moment) + math.log(2 / mass)) / order * steps
            for order, moment in moments.items()
            if 0 < moment < math.inf
        }

    def tightest(sign: int) -> Iterable[float]:
        """The bounds of one side that may be the tightest, as dp-accounting rounds them: mostly one."""
        roughly = bounds(_moments(probs, sign))
        best = min((sign * bound for bound in roughly.values()), default=0.0)
        near = [order for order, bound in roughly.items() if sign * bound <= best + _SLACK * times * steps]
        return bounds({order: float(np.exp(order * shares) @ probs) for order in near}).values()

    lower = max([0, *map(math.floor, tightest(-1))])
    return lower, min([(steps - 1) * times, *map(math.ceil, tightest(1))])


def _moments(probs: FloatArray, sign: int) -> dict[int, float]:
    """Return the moments at all orders of one sign, to rounding; shares of the length are the values."""
    factors, weighted, moments = np.exp(sign * np.arange(len(probs)) / len(probs)), probs, {}
    for order in range(1, _ORDERS + 1):
        weighted = weighted * factors
        moments[sign * order] = float(weighted.sum())
    return moments


def on_arrays(distribution: Any) -> Any:
    """Return a privacy loss distribution of dp-accounting whose compositions and epsilon are computed on arrays."""
    remove = _on_arrays(distribution._pmf_remove)
    return PrivacyLossDistribution(remove, None if distribution._symmetric else _on_arrays(distribution._pmf_add))


def _on_arrays(pmf: Any) -> Any:
    if isinstance(pmf, pld_pmf.SparsePLDPmf):
        return _few_losses(pmf)
    return _losses(pmf)


def _few_losses(pmf: Any) -> _FewLosses:
    return _FewLosses(pmf._loss_probs, pmf._discretization, pmf._infinity_mass, pmf._pessimistic_estimate)


def _losses(pmf: Any) -> _Losses:
    return _Losses(pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass, pmf._pessimistic_estimate)


def poisson_gaussian(noise_multiplier: float, sampling_rate: float, grid: float) -> Any:
    """Return the distribution of a Gaussian release of a Poisson sample, to add or remove one: rounded up to a grid."""
    remove = _poisson_gaussian(noise_multiplier, sampling_rate, grid, AdjacencyType.REMOVE)
    if sampling_rate == 1:
        return PrivacyLossDistribution(remove)
    add = _poisson_gaussian(noise_multiplier, sampling_rate, grid, AdjacencyType.ADD)
    return PrivacyLossDistribution(remove, add)


class _Gaussian(GaussianPrivacyLoss):  # type: ignore[misc]
    """The mechanism without what a distribution of scipy.stats checks and copies at every call."""

    def noise_cdf(self, x: Any) -> Any:
        return special.ndtr(np.divide(x, self._standard_deviation))

    def noise_log_cdf(self, x: Any) -> Any:
        return special.log_ndtr(np.divide(x, self._standard_deviation))


def _poisson_gaussian(noise_multiplier: float, sampling_rate: float, grid: float, adjacency: Any) -> Any:
    mechanism = _Gaussian(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=adjacency)
    bounds = mechanism.connect_dots_bounds()
    lowest, highest = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
    deltas = _deltas(mechanism, np.arange(lowest, highest + 1) * grid)
    if len(deltas) <= pld_pmf._MAX_PMF_SPARSE_SIZE:
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, lowest, highest, deltas)
    return _connected_dots(grid, lowest, deltas)


def _connected_dots(grid: float, lowest: int, deltas: FloatArray) -> _Losses:
    """Return the smallest distribution that has at least these deltas (arXiv:2207.04380, algorithm 1)."""
    if (np.diff(deltas) > pld_pmf._DELTA_DIFF_TOLERANCE).any():
        raise ValueError("deltas increase with epsilon by more than rounding")
    falling = np.minimum.accumulate(deltas)
    steps, factor = np.diff(falling), math.exp(grid)
    probs = np.zeros_like(falling)
    probs[0] = 1 - falling[0] + steps[0] / math.expm1(grid)
    probs[1:-1] = (steps[1:] - steps[:-1] * factor) / math.expm1(grid)
    probs[-1] = steps[-1] / math.expm1(-grid)
    return _Losses(grid, lowest, np.maximum(0.0, probs), falling[-1], True)


def _deltas(mechanism: Any, losses: FloatArray) -> FloatArray:
    """Delta at each of the losses: ``mechanism.get_delta_for_epsilon``."""
    q = mechanism.sampling_prob
    deltas, inside = np.zeros_like(losses), np.ones_like(losses, dtype=bool)
    if q < 1 and mechanism.adjacency_type == AdjacencyType.ADD:
        inside = losses < -math.log1p(-q)
    elif q < 1:
        inside = losses > math.log1p(-q)
        deltas[~inside] = -np.expm1(losses[~inside])
    points = _points(mechanism, losses[inside])
    lower = mechanism.mu_lower_log_cdf(points)
    deltas[inside] = mechanism.mu_upper_cdf(points) - np.exp(losses[inside] + lower)
    return np.clip(deltas, 0, 1)


def _points(mechanism: Any, losses: FloatArray) -> FloatArray:
    """Return the largest outputs at which the privacy loss is at least each of the losses."""
    q, adds = mechanism.sampling_prob, mechanism.adjacency_type == AdjacencyType.ADD
    sign = -1.0 if adds else 1.0
    full = losses
    if q < 1:  # of a release with the record: log(1 + (exp(loss) - 1) / q), or its negative
        scaled = sign * losses + np.log(1 / q)
        with np.errstate(all="ignore"):
            full = sign * (scaled + np.log1p(-np.exp(np.log(1 / q - 1) - scaled)))
        full[sign * losses == 0] = 0.0
        full[np.isclose(losses, sign * math.log(1 - q), rtol=1e-9, atol=0)] = math.inf * -sign
    points = -0.5 - full * mechanism._standard_deviation**2
    return np.asarray(1 + points if adds else points)
