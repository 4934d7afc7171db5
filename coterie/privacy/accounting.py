"""What a run costs: epsilon of a list of events, and the noise that a target needs.

An :class:`Event` says what happened; the functions here say what it costs. Everything is client-level,
add/remove one client, at a fixed public number of clients. PLD is the accountant that certifies; RDP stands
beside it (Mironov, arXiv:1702.07476; Doroshenko et al., arXiv:2207.04380, through ``dp-accounting``).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant

# Privacy losses are rounded up to this grid: a coarser grid only ever reports a larger epsilon.
_GRID = 1e-3
# Below this noise the grid of losses no longer fits in memory; nothing of use lives there.
_LEAST_NOISE = 0.05
_MOST_NOISE = 1e4


class PrivacyError(ValueError):
    """A privacy parameter that makes no sense, or a target that cannot be met."""


@dataclass(frozen=True)
class Event:
    """One Poisson-subsampled Gaussian release on one cohort.

    Attributes:
        sampling_rate: probability q with which each client takes part, in (0, 1].
        noise_multiplier: noise standard deviation / L2 sensitivity of the whole release; 0 means no noise.
    """

    sampling_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate must lie in (0, 1], not {self.sampling_rate}")
        if not (0 <= self.noise_multiplier < math.inf):
            raise PrivacyError(f"noise multiplier must be finite and at least 0, not {self.noise_multiplier}")


#: The event of a round without noise at full participation.
NO_PRIVACY = Event(1.0, 0.0)


@lru_cache(maxsize=256)
def _pld_of(event: Event) -> Any:
    return pld.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sampling_rate,
        value_discretization_interval=_GRID,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


class LiveAccountant:
    """PLD of everything charged so far, one convolution per round (about 4 ms)."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._pld: Any = None
        self._unprotected = False
        for event, count in Counter(events).items():
            self.compose(event, count)

    def compose(self, event: Event, count: int = 1) -> None:
        """Add ``count`` further rounds of ``event``."""
        self._unprotected = self._unprotected or event.noise_multiplier < _LEAST_NOISE
        if self._unprotected or not count:
            return
        several = _pld_of(event).self_compose(count) if count > 1 else _pld_of(event)
        self._pld = several if self._pld is None else self._pld.compose(several)

    def epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` of all events so far; 0 before the first, inf once one had no noise."""
        if self._unprotected:
            return math.inf
        return 0.0 if self._pld is None else float(self._pld.get_epsilon_for_delta(delta))

    def with_rounds(self, event: Event, count: int) -> LiveAccountant:
        """A copy with ``count`` further rounds; this one stays as it is."""
        copy = LiveAccountant()
        copy._pld, copy._unprotected = self._pld, self._unprotected
        copy.compose(event, count)
        return copy


def _epsilon_pld(events: Counter[Event], delta: float) -> float:
    return LiveAccountant(events.elements()).epsilon(delta)


@contextmanager
def _quiet_absl() -> Any:
    # dp-accounting warns for every Renyi order that it leaves out; leaving one out is safe.
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _epsilon_rdp(events: Counter[Event], delta: float) -> float:
    if any(event.noise_multiplier < _LEAST_NOISE for event in events):
        return math.inf
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _quiet_absl():
        for event, count in events.items():
            gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian), count)
        return float(accountant.get_epsilon(delta))


#: Accountants by name: (events with their counts, delta) -> epsilon.
ACCOUNTANTS: dict[str, Callable[[Counter[Event], float], float]] = {"pld": _epsilon_pld, "rdp": _epsilon_rdp}


def accountant_name(accountant: str) -> str:
    """Accountant and version, as a certificate prints them."""
    return f"dp-accounting {version('dp-accounting')}, {accountant.upper()}"


def check_delta(delta: float) -> None:
    """Raise :class:`PrivacyError` unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie strictly between 0 and 1, not {delta}")


def epsilon(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """Epsilon at ``delta`` of all ``events`` together, add/remove one client.

    Raises:
        PrivacyError: delta outside (0, 1), or an unknown accountant.
    """
    check_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"unknown accountant {accountant!r}; there are {', '.join(sorted(ACCOUNTANTS))}")
    return ACCOUNTANTS[accountant](Counter(events), delta)


def calibrate(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    rounds: int,
    *,
    spent: Iterable[Event] = (),
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """The least noise multiplier (to ``tolerance``, relative) with which ``rounds`` further rounds fit.

    The answer always lies on the private side: ``spent`` plus ``rounds`` events of it cost at most
    ``target_epsilon``.

    Raises:
        PrivacyError: epsilon not positive, delta outside (0, 1), rounds below 1, or no noise suffices.
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(f"epsilon must be positive and finite, not {target_epsilon}")
    check_delta(delta)
    if rounds < 1:
        raise PrivacyError(f"rounds must be at least 1, not {rounds}")
    before = Counter(spent)
    so_far = LiveAccountant(before.elements())

    def cost(noise: float) -> float:
        event = Event(sampling_rate, noise)
        if accountant == "pld":
            return so_far.with_rounds(event, rounds).epsilon(delta)
        return epsilon((before + Counter({event: rounds})).elements(), delta, accountant)

    low, high = _LEAST_NOISE, 1.0
    while not cost(high) <= target_epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise PrivacyError(
                f"no noise reaches epsilon {target_epsilon} at delta {delta} with {rounds} rounds at sampling "
                f"rate {sampling_rate}{' after what was already spent' if before else ''}: "
                "ask for fewer rounds, a lower sampling rate, or a larger epsilon"
            )
    if low < high / 2:  # the first guess was enough: find a bracket below it, without costly tiny noise
        while high / 2 > _LEAST_NOISE and cost(high / 2) <= target_epsilon:
            high /= 2
        low = high / 2
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target_epsilon else (middle, high)
    return high
