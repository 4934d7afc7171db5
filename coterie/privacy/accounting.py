"""What a run costs, and the noise that a target needs.

Events say what happened (:class:`~coterie.privacy.accountants.Event`); accountants say what it costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from coterie.privacy.accountants import (
    LEAST_NOISE,
    MOST_NOISE,
    Accountant,
    Event,
    PrivacyError,
    TheoremAccountant,
    make_accountant,
)

#: The event of a round without noise at full participation.
NO_PRIVACY = Event(1.0, 0.0)
#: Rounding of a budget that a calibration met exactly.
SLACK = 1 + 1e-9


def check_delta(delta: float) -> None:
    """Raise :class:`PrivacyError` unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie strictly between 0 and 1, not {delta}")


def composed(events: Iterable[Event] | Mapping[Event, int], accountant: str = "pld") -> Accountant:
    """An accountant that has composed all ``events``, given one by one or with their counts."""
    total = make_accountant(accountant)
    ordered = sorted(Counter(events).items(), key=lambda each: (each[0].sampling_rate, each[0].noise_multiplier))
    for event, count in ordered:  # in one order: rounding is the same whoever adds up
        total.compose(event, count)
    return total


def epsilon(events: Iterable[Event] | Mapping[Event, int], delta: float, accountant: str = "pld") -> float:
    """Epsilon at ``delta`` of all ``events`` together, for the adjacency of their sampler.

    Raises:
        PrivacyError: delta outside (0, 1), an unknown accountant, or one that does not cover the sampler.
    """
    check_delta(delta)
    return composed(events, accountant).epsilon(delta)


def affordable(events: Mapping[Event, int], budget: float, delta: float, accountant: str = "pld") -> Counter[Event]:
    """At least the events that a ledger with this budget accepts, in whatever order they are asked for.

    All of them where they fit together; else of each kind no more than fit alone. They fit where Renyi's bound does, or
    the ledger's own: a client's ledger takes either.
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
    """The least noise multiplier (to ``tolerance``, relative) with which ``rounds`` further rounds fit.

    The answer always lies on the private side: ``spent`` plus ``rounds`` events of it cost at most
    ``target_epsilon``. ``spent`` may as well be events that are still to come at a noise that is fixed, such as
    a first round of its own.

    Raises:
        PrivacyError: epsilon not positive, delta outside (0, 1), rounds below 1, or no noise suffices (the
            message gives the accountant's floor where it has one).
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(f"epsilon must be positive and finite, not {target_epsilon}")
    check_delta(delta)
    if rounds < 1:
        raise PrivacyError(f"rounds must be at least 1, not {rounds}")
    before = composed(spent, accountant)

    def fits(noise: float) -> bool:
        event = Event(sampling_rate, noise, sampler)
        return before.with_rounds(event, rounds).epsilon(delta) <= target_epsilon

    if isinstance(before, TheoremAccountant):
        floor = before.floor(sampling_rate, rounds, delta)
        if not floor < target_epsilon:
            raise PrivacyError(
                f"no noise reaches epsilon {target_epsilon:g} at delta {delta:g} by {accountant}: its bound for "
                f"{rounds} rounds at rate {sampling_rate:g} is at least {floor:.4g} however large the noise; "
                "increase epsilon, or use accountant rdp or pld"
            )
    noise = least_noise(fits, tolerance)
    if noise is None:
        raise PrivacyError(
            f"no noise reaches epsilon {target_epsilon:g} at delta {delta:g} with {rounds} rounds at sampling "
            f"rate {sampling_rate:g}{' after what was already spent' if Counter(spent) else ''}: "
            "use fewer rounds, a lower sampling rate, or a larger epsilon"
        )
    return noise


def least_noise(fits: Callable[[float], bool], tolerance: float = 1e-3) -> float | None:
    """The least noise multiplier that ``fits``, to ``tolerance`` and on the private side; None if none does.

    ``fits`` must be monotone: once true, true for any larger noise.
    """
    low, high = LEAST_NOISE, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            return None
    if low < high / 2:  # the first guess was enough: find a bracket below it, without costly tiny noise
        while high / 2 > LEAST_NOISE and fits(high / 2):
            high /= 2
        low = high / 2
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
