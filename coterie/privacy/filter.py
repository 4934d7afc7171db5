"""Which requests a budget still allows if each request is chosen by earlier replies (docs/privacy.md, Theorem 5).

A sum of privacy losses bounds events that are fixed beforehand. A server that reads replies may choose the kind of the
next request by them: two continuations that each fit the budget can cost more than the budget when the better one is
chosen. A filter therefore accepts events

- within those that the first request *pins*, in any order and number: privacy loss distributions bound them, whichever
  the server chooses, because all replies can be computed from one sample of each pinned event;
- beyond these, if the Renyi divergence of all events at *one order*, which the first request fixes, fits the rest of
  delta: a sum at a fixed order bounds adaptive choices (Feldman and Zrnic, arXiv:2008.11193).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from coterie.privacy.accountants import Event, PrivacyError, events_of_a_client, renyi_divergence, renyi_orders
from coterie.privacy.accounting import SLACK, delta_of, epsilon

#: Share of delta that a first request pins when it is repeated; the rest is for requests of other kinds.
PINNED_SHARE = 0.9
# Largest multiple of a first request, or of its plan, that is pinned.
_MAX_TIMES = 10_000
# Epsilon by RDP above which nothing else is computed, unless the budget is of this size: a server proposes the events,
# and PLD of little noise takes seconds and gigabytes.
_LARGEST_RDP = 100.0
# Number of events above which RDP alone decides how often a first request is pinned: PLD takes a second for each guess.
_MAX_PLD_EVENTS = 100_000


@dataclass(frozen=True)
class Filter:
    """A privacy filter for one budget.

    Attributes:
        epsilon: of the budget.
        delta: of the budget.
        pinned: events that are fixed beforehand.
        pinned_delta: delta of the pinned events at ``epsilon``.
        order: Renyi order for all other events.
    """

    epsilon: float
    delta: float
    pinned: Mapping[Event, int]
    pinned_delta: float
    order: float

    @classmethod
    def pin(
        cls,
        first: Mapping[Event, int],
        epsilon: float,
        delta: float,
        *,
        planned: Mapping[Event, int] | None = None,
        accountant: str = "pld",
    ) -> Filter | None:
        """Return the filter that a first request determines; None if it does not fit the budget.

        Args:
            first: events of the first request.
            epsilon: of the budget.
            delta: of the budget.
            planned: all events of its run. They are pinned as many times as they fit ``PINNED_SHARE`` of delta, or once
                if they fit delta. The same holds for ``first`` if there is no plan, or it does not fit.
            accountant: a further accountant that may show that the events fit.
        """
        plan = None if planned is None else frozenset(planned.items())
        return _pinned(frozenset(first.items()), plan, _Budget(epsilon, delta, accountant))

    @classmethod
    def parse(cls, entry: Any, epsilon: float, delta: float) -> Filter:
        """Return the filter of an :meth:`entry` of a ledger.

        Raises:
            PrivacyError: the entry is malformed.
        """
        try:
            pinned = parse_events(entry["events"])
            spent, order = entry["delta"], entry["order"]
            good = 0 <= spent <= delta and order in renyi_orders()
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise PrivacyError(f"the ledger does not state which events are pinned: {entry!r:.80}")
        return cls(epsilon, delta, pinned, spent, order)

    def entry(self) -> dict[str, Any]:
        """Return what a ledger stores; JSON-ready."""
        return {"events": events_entry(self.pinned), "delta": self.pinned_delta, "order": self.order}

    def accepts(self, events: Mapping[Event, int]) -> bool:
        """Whether all ``events`` together, earlier ones included, are allowed."""
        return is_within(events, self.pinned) or self.epsilon_of(events) <= self.epsilon * SLACK

    def epsilon_of(self, events: Mapping[Event, int]) -> float:
        """Return epsilon of ``events``, chosen adaptively, at the rest of delta and the filter's order."""
        return _converted(_divergence(events, self.order), self.order, self.delta - self.pinned_delta)


def events_entry(events: Mapping[Event, int]) -> list[list[Any]]:
    """Return counted events as JSON-ready lists; see :func:`parse_events`."""
    return [
        [event.sampling_rate, event.noise_multiplier, event.sampler, event.slot, event.slots, count]
        for event, count in events.items()
    ]


def parse_events(entry: Any) -> dict[Event, int]:
    """Return the counted events of :func:`events_entry`.

    Raises:
        TypeError, ValueError: it is malformed.
    """
    events = {Event(*event): count for *event, count in entry}
    if not all(type(count) is int and count >= 1 for count in events.values()):
        raise ValueError("a number of events is not a positive integer")
    return events


def is_within(events: Mapping[Event, int], pinned: Mapping[Event, int]) -> bool:
    """Whether replies to ``events`` can be computed from one sample of each of ``pinned``.

    Gaussians without sampling are interchangeable: their squared shifts add up, whatever their number.
    """
    left = _pooled(pinned)
    return all(amount <= left.get(event, 0.0) * SLACK for event, amount in _pooled(events).items())


def _pooled(events: Mapping[Event, int]) -> dict[Event, float]:
    total: dict[Event, float] = {}
    for event, count in events.items():
        pooled_event, amount = event, float(count)
        if event.sampling_rate == 1 and event.noise_multiplier > 0:
            pooled_event, amount = replace(event, noise_multiplier=1.0), count / event.noise_multiplier**2
        total[pooled_event] = total.get(pooled_event, 0.0) + amount
    return total


@lru_cache(maxsize=256)
def _pinned(
    first: frozenset[tuple[Event, int]], planned: frozenset[tuple[Event, int]] | None, budget: _Budget
) -> Filter | None:
    for unit in (dict(planned or ()), dict(first)):
        if not is_within(dict(first), unit) or (spent := budget.delta_of(unit)) > budget.delta:
            continue
        pinned = budget.extended(unit) if spent <= PINNED_SHARE * budget.delta else unit
        spent = budget.delta_of(pinned)
        order = _best_order(pinned, budget.epsilon, budget.delta - spent)
        return Filter(budget.epsilon, budget.delta, pinned, spent, order)
    return None


@dataclass(frozen=True)
class _Budget:
    """Events that are fixed beforehand, against a budget."""

    epsilon: float
    delta: float
    accountant: str

    def delta_of(self, events: Mapping[Event, int]) -> float:
        """Delta of ``events`` at epsilon: by RDP if they fit, otherwise by PLD if it is affordable."""
        by_rdp = delta_of(events, self.epsilon * SLACK, "rdp")
        if by_rdp <= self.delta or epsilon(events, self.delta, "rdp") > max(_LARGEST_RDP, 2 * self.epsilon):
            return by_rdp
        delta = min(by_rdp, delta_of(events, self.epsilon * SLACK, "pld"))
        if delta > self.delta and epsilon(events, self.delta, self.accountant) <= self.epsilon * SLACK:
            return self.delta
        return delta

    def extended(self, unit: Mapping[Event, int]) -> dict[Event, int]:
        """Return ``unit`` with as many times its events as fit the pinned share of delta; at least once."""
        share = PINNED_SHARE * self.delta

        def times(sixteenths: int) -> dict[Event, int]:
            return {event: count * sixteenths // 16 for event, count in unit.items()}

        def over(sixteenths: int, tightly: bool = True) -> bool:
            events = times(sixteenths)
            by_rdp = delta_of(events, self.epsilon * SLACK, "rdp")
            if by_rdp <= share or not tightly or self.epsilon > _LARGEST_RDP or sum(events.values()) > _MAX_PLD_EVENTS:
                return by_rdp > share
            return delta_of(events, self.epsilon * SLACK, "pld") > share

        # PLD is slow, and mostly allows a little more than RDP, so that a few steps suffice.
        below = max(
            16,
            15 + bisect_left(range(16, 16 * _MAX_TIMES), True, key=lambda sixteenths: over(sixteenths, tightly=False)),
        )
        above = below + 1 + below // 4
        while above < 16 * _MAX_TIMES and not over(above):
            below, above = above, 2 * above
        while above - below > 1 + below // 128:
            middle = (below + above) // 2
            below, above = (below, middle) if over(middle) else (middle, above)
        return times(below)


def _divergence(events: Mapping[Event, int], order: float) -> float:
    most = events_of_a_client(events)
    return math.fsum(count * renyi_divergence(event, order) for event, count in most.items())


def _best_order(pinned: Mapping[Event, int], epsilon: float, delta: float) -> float:
    """Return the order at which ``pinned`` takes the smallest share of the budget."""

    def share(order: float) -> float:
        allowed = -_converted(-epsilon, order, delta)
        return allowed / max(_divergence(pinned, order), 1e-300)

    return max(renyi_orders(), key=share)


def _converted(divergence: float, order: float, delta: float) -> float:
    """Epsilon of a Renyi divergence at one order (arXiv:2004.00010, Proposition 12)."""
    if not delta > 0:
        return math.inf
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
