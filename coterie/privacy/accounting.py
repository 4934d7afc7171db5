"""Privacy cost of a run, and calibration of noise.

An :class:`~coterie.privacy.accountants.Event` describes a release; an accountant computes its cost:

==== ============================================================ =========================
name method                                                       samplers
==== ============================================================ =========================
pld  privacy loss distributions on a grid, rounded up, or rdp     poisson, fixed, discrete
     where that is smaller, as at a tiny delta
rdp  Renyi orders 1.1 to 1024, converted by Canonne et al.        poisson, fixed, discrete
==== ============================================================ =========================
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from coterie.privacy.accountants import (
    MAX_NOISE,
    MIN_NOISE,
    Accountant,
    Event,
    PldAccountant,
    PrivacyError,
    RdpAccountant,
    events_of_a_client,
)

#: The event of a round without noise at full participation.
NO_PRIVACY = Event(1.0, 0.0)
#: Tolerance for the rounding of a budget that a calibration meets exactly.
SLACK = 1 + 1e-9
# Noise multiplier from which a search first asks whether any noise suffices.
_DOUBTFUL = 16.0
# Steps of interpolation after which the search for noise bisects.
_INTERPOLATIONS = 5
# Number of equal events up to which each further one is composed; above it, one composition serves about 1 % of them.
_EVERY_COUNT = 256

#: Accountants by name. Certificates may state the epsilon of these two; others are for comparison and added elsewhere.
ACCOUNTANTS: dict[str, type[Accountant]] = {"pld": PldAccountant, "rdp": RdpAccountant}


def make_accountant(name: str) -> Accountant:
    """Create an accountant by name.

    Raises:
        PrivacyError: the name is unknown.
    """
    if name not in ACCOUNTANTS:
        raise PrivacyError(f"unknown accountant {name!r}; available: {', '.join(ACCOUNTANTS)}")
    return ACCOUNTANTS[name]()


def accountant_title(name: str) -> str:
    """Return accountant and version, as stated in a certificate."""
    source = ACCOUNTANTS[name].source
    return f"{source} {version(source)}, {name.upper()}" if source == Accountant.source else source


def certifies(accountant: str) -> bool:
    """Whether certificates may state the epsilon of this accountant."""
    return accountant in ("pld", "rdp")


@dataclass(frozen=True)
class Budget:
    """A privacy budget, and the name of the accountant by which costs count.

    Attributes:
        epsilon: the budget; inf without privacy.
        delta: of the guarantee.
        accountant: a key of :data:`ACCOUNTANTS`.
    """

    epsilon: float
    delta: float
    accountant: str = "pld"

    def allows(self, cost: float) -> bool:
        """Whether an epsilon is within the budget; not NaN."""
        return cost <= self.epsilon * SLACK

    def covers(self, events: Mapping[Event, int]) -> bool:
        """Whether the cost of ``events``, fixed beforehand, is within the budget."""
        return self.allows(epsilon(events, self.delta, self.accountant))


def check_delta(delta: float) -> None:
    """Raise :class:`PrivacyError` unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie strictly between 0 and 1, not {delta}")


def composed(events: Iterable[Event] | Mapping[Event, int], accountant: str = "pld") -> Accountant:
    """Return an accountant that has composed all ``events``, an iterable or counts, of the client with the most.

    By ``pld``, the tails of one sum of losses are cut for each kind of event here, and for each event by
    :func:`composed_further`. The cost of a calibration is therefore never above that of the events one by one.

    Examples:
        >>> total = composed({Event(sampling_rate=0.1, noise_multiplier=1.0): 100}, "rdp")
        >>> round(total.epsilon(1e-5), 1)
        7.9
    """
    total = make_accountant(accountant)
    most = events_of_a_client(Counter(events))
    ordered = sorted(most.items(), key=lambda pair: (pair[0].sampling_rate, pair[0].noise_multiplier))
    for event, count in ordered:  # in a fixed order, so that rounding is reproducible
        total.compose(event, count)
    return total


def composed_further(
    before: Mapping[str, Accountant], events: Mapping[Event, int], event: Event, count: int, budget: Budget
) -> dict[str, Accountant]:
    """Return accountants, by name, of ``count`` further events.

    Events are composed one after the other, at little cost, unless this exceeds the budget, which a calibration of all
    events at once meets exactly: see :func:`composed`.

    The time of one composition grows as √T. From 257 equal events on, the result therefore contains up to 1.6 % more of
    them, which the next charges share. If this exceeds the budget, the result contains exactly all events.

    Args:
        before: accountants by name that have composed ``events``, or more from 257 equal ones on.
        events: the events so far.
        event: the further one; if it has a slot, the cost of the client with the most events may stay the same.
        count: number of further events.
        budget: its accountant is one of ``before``.
    """
    most = events_of_a_client(Counter(events) + Counter({event: count}))
    if event.slot is None and max(most.values(), default=0) <= _EVERY_COUNT:
        after = {name: accountant.with_rounds(event, count) for name, accountant in before.items()}
    else:
        more = frozenset((one, _rounded_up(times)) for one, times in most.items())
        after = {name: _composed_before(more, name) for name in before}
    if budget.allows(after[budget.accountant].epsilon(budget.delta)):
        return after
    return {name: composed(most, name) for name in before}


def _rounded_up(count: int) -> int:
    """Round a count above 256 up to seven significant bits."""
    if count <= _EVERY_COUNT:
        return count
    step = 1 << ((count - 1).bit_length() - 7)
    return -(-count // step) * step


@lru_cache(maxsize=16)
def _composed_before(events: frozenset[tuple[Event, int]], accountant: str) -> Accountant:
    """Same as :func:`composed`, with a cache for charges of the same cost."""
    return composed(dict(events), accountant)


def epsilon(events: Iterable[Event] | Mapping[Event, int], delta: float, accountant: str = "pld") -> float:
    """Epsilon at ``delta`` of all ``events`` together, for the adjacency of their sampler.

    Raises:
        PrivacyError: delta is outside (0, 1), or the accountant is unknown or does not support the sampler.

    Examples:
        >>> round(epsilon({Event(sampling_rate=0.1, noise_multiplier=1.0): 100}, delta=1e-5), 1)
        7.0
    """
    check_delta(delta)
    return _epsilon(frozenset(Counter(events).items()), delta, accountant)


@lru_cache(maxsize=1024)
def _epsilon(events: frozenset[tuple[Event, int]], delta: float, accountant: str) -> float:
    return composed(dict(events), accountant).epsilon(delta)


def delta_of(events: Mapping[Event, int], epsilon: float, accountant: str = "pld") -> float:
    """Delta at ``epsilon`` of all ``events`` together, by ``pld`` or ``rdp``."""
    return composed(events, accountant).delta(epsilon)


def affordable(events: Mapping[Event, int], budget: float, delta: float, accountant: str = "pld") -> Counter[Event]:
    """Return a superset of the events that a ledger with this budget accepts, in any order of requests.

    These are all events if they fit the budget together; otherwise, of each event, as many as fit without the others.
    Events fit if their cost by RDP or by ``accountant`` does, because a client's ledger accepts either.
    """

    def fit(some: Mapping[Event, int]) -> bool:
        return any(epsilon(some, delta, name) <= budget * SLACK for name in dict.fromkeys(("rdp", accountant)))

    def most(event: Event, count: int) -> int:
        return bisect_left(range(1, count + 1), True, key=lambda times: not fit({event: times}))

    if fit(events):
        return Counter(events)
    return +Counter({event: most(event, count) for event, count in events.items()})


def calibrate(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    rounds: int,
    *,
    sampler: str = "poisson",
    spent: Iterable[Event] | Mapping[Event, int] = (),
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """Return the smallest noise multiplier (to the relative ``tolerance``) at which ``rounds`` further rounds fit.

    The result is on the private side: ``spent`` plus ``rounds`` events at this noise cost at most ``target_epsilon``.
    ``spent`` may also contain future events with fixed noise, such as a first round with its own noise.

    Raises:
        PrivacyError: epsilon is not positive, delta is outside (0, 1), rounds is less than 1, or no noise suffices
            (the message states the accountant's lower limit, if it has one).

    Examples:
        >>> noise = calibrate(8.0, delta=1e-5, sampling_rate=0.1, rounds=100)
        >>> round(noise, 2), epsilon({Event(0.1, noise): 100}, delta=1e-5) <= 8.0
        (0.94, True)
    """
    return _calibrated(
        target_epsilon, delta, sampling_rate, rounds, sampler, frozenset(Counter(spent).items()), accountant, tolerance
    )


@lru_cache(maxsize=1024)
def _calibrated(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    rounds: int,
    sampler: str,
    spent: frozenset[tuple[Event, int]],
    accountant: str,
    tolerance: float,
) -> float:
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(f"epsilon must be positive and finite, not {target_epsilon}")
    check_delta(delta)
    if rounds < 1:
        raise PrivacyError(f"rounds must be at least 1, not {rounds}")
    before = composed(dict(spent), accountant)

    def cost(noise: float) -> float:
        return before.with_rounds(Event(sampling_rate, noise, sampler), rounds).epsilon(delta)

    floor = before.floor(sampling_rate, rounds, delta)
    if not floor < target_epsilon:
        raise PrivacyError(
            f"no noise reaches epsilon {target_epsilon:g} at delta {delta:g} by {accountant}: its bound for "
            f"{rounds} rounds at rate {sampling_rate:g} is at least {floor:.4g} however large the noise; "
            "increase epsilon, or use accountant rdp or pld"
        )
    noise = min_noise(cost, target_epsilon, tolerance)
    if noise is None:
        raise PrivacyError(
            f"no noise reaches epsilon {target_epsilon:g} at delta {delta:g} with {rounds} rounds at sampling "
            f"rate {sampling_rate:g}{' after what was already spent' if spent else ''}: "
            "use fewer rounds, a lower sampling rate, or a larger epsilon or delta"
        )
    return noise


def min_noise(cost: Callable[[float], float], target: float, tolerance: float = 1e-3) -> float | None:
    """Return the smallest noise multiplier of ``cost`` at most ``target``, to ``tolerance``; None if there is none.

    The cost at the returned value is at most ``target``. The search brackets the value within a factor of two, and
    finds it on a geometric grid by interpolation, since a cost is expensive to compute and smooth.

    Args:
        cost: decreasing in the noise multiplier.
        target: the budget.
        tolerance: relative step of the grid.
    """
    costs: dict[float, float] = {}

    def fits(noise: float) -> bool:
        costs[noise] = cost(noise)
        return costs[noise] <= target

    low, high = MIN_NOISE, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MAX_NOISE or (high == _DOUBTFUL and not fits(MAX_NOISE)):
            return None
    if low < high / 2:  # the first guess suffices: search a bracket below it, avoiding small noise, which is costly
        while high / 2 > MIN_NOISE and fits(high / 2):
            high /= 2
        low = high / 2
    steps = 1
    while (high / low) ** (1 / steps) > 1 + tolerance:
        steps *= 2
    grid = {0: low, steps: high}

    def at(index: int) -> float:
        if index not in grid:
            half = index & -index  # half the distance of the points between which bisection finds this one
            grid[index] = math.sqrt(at(index - half) * at(index + half))
        return grid[index]

    below, above, tried = 0, steps, 0
    while above - below > 1:
        index, tried = (below + above) // 2, tried + 1
        first, last = costs.get(at(below), math.inf), costs[at(above)]
        if tried <= _INTERPOLATIONS and first < math.inf and 0 < last < first:
            share = math.log(first / target) / math.log(first / last)
            index = min(max(below + math.ceil(share * (above - below)), below + 1), above - 1)
        below, above = (below, index) if fits(at(index)) else (index, above)
    return at(above)
