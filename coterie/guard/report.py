"""What a guarded site tells the server with each reply: the events of this message, which are public."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from coterie.guard.owners import UNNAMED, is_name
from coterie.guard.terms import GuardError, checked_event
from coterie.privacy import Event

#: Name of the record in a reply.
GUARD = "coterie.guard"
# Limits, because a site is not trusted by the server.
_MAX_EVENTS, _MAX_COUNT, _MAX_EXAMPLES, _MAX_NAMES, _MAX_NAME = 16, 10**6, 10**9, 64, 64


@dataclass(frozen=True)
class Report:
    """One reply of a guarded site.

    Attributes:
        num_examples: N, the public number of records of the site.
        events: what the reply releases.
        verified: whether the guard executed these events itself; otherwise the site's owner declares them.
        allow: what else the owner allows to leave the site, which no event covers.
        site: name of the site, by which charges of a run are composed; empty: none.
    """

    num_examples: int
    events: Counter[Event]
    verified: bool
    allow: tuple[str, ...] = ()
    site: str = UNNAMED

    def record(self) -> ConfigRecord:
        """The record of a reply.

        Raises:
            GuardError: there are too many kinds of events.
        """
        events = list(self.events.items())
        if len(events) > _MAX_EVENTS:
            raise GuardError(f"the app uses {len(events)} noise multipliers in one message, more than {_MAX_EVENTS}")
        return ConfigRecord(
            {
                "num-examples": self.num_examples,
                "verified": self.verified,
                "allow": list(self.allow),
                "site": self.site,
                "sampling-rate": [event.sampling_rate for event, _ in events],
                "noise-multiplier": [event.noise_multiplier for event, _ in events],
                "count": [count for _, count in events],
            }
        )

    @classmethod
    def parse(cls, record: Any) -> Report:
        """Read the record of a reply.

        Raises:
            GuardError: it is missing, or a field is missing, of another type or out of bounds.
        """
        if not isinstance(record, ConfigRecord):
            raise GuardError("the reply is not from a guarded site")
        values: dict[str, Any] = dict(record)
        try:
            number, verified, names, site = (values[key] for key in ("num-examples", "verified", "allow", "site"))
            rates, noises, counts = (values[key] for key in ("sampling-rate", "noise-multiplier", "count"))
        except KeyError as missing:
            raise GuardError(f"the guard's record lacks {missing}") from None
        good = type(number) is int and 1 <= number <= _MAX_EXAMPLES and type(verified) is bool
        good = good and all(isinstance(field, list) for field in (names, rates, noises, counts))
        good = good and len(rates) == len(noises) == len(counts) <= _MAX_EVENTS and len(names) <= _MAX_NAMES
        good = good and all(type(count) is int and 1 <= count <= _MAX_COUNT for count in counts)
        good = good and all(isinstance(parameter, float) for parameter in (*rates, *noises))
        good = good and all(isinstance(name, str) and len(name) <= _MAX_NAME and name.isprintable() for name in names)
        if not (good and (site == UNNAMED or is_name(site))):
            raise GuardError("the guard's record has a field out of bounds")
        events: Counter[Event] = Counter()
        for rate, noise, count in zip(rates, noises, counts, strict=True):
            events[checked_event(rate, noise)] += count
        return cls(number, events, verified, tuple(names), site)
