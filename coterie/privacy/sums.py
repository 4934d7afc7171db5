"""Sums of the charges of a client's ledger, by run, by signed request and by day, for limits of a policy.

A file in the client's state folder keeps them with a mark of the last charge that they contain, so that a limit is
checked in time that does not grow with the ledger. They follow from the ledger: without the file, or if the ledger does
not contain the mark, they are computed from all charges.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.files import FileError, read_object, write_atomic
from coterie.privacy.accountants import Event
from coterie.privacy.charge_times import elapsed_of
from coterie.privacy.filter import events_entry, parse_events
from coterie.privacy.ledger_lines import HELD_OUT, LedgerError, Mark, charges_since, count_of, event_of

#: What sums are by: an entry of charges, or the day of their elapsed time, from 0.
RUN, REQUEST, DAY = "run", "request", "day"
_KEYS = (RUN, REQUEST, DAY)


class Sums:
    """The sums of a ledger, which may be in use by this process.

    Args:
        path: file in which they are kept.
        ledger: the ledger.

    Raises:
        LedgerError: the ledger is missing or damaged, or the file cannot be written.
    """

    def __init__(self, path: Path, ledger: Path) -> None:
        self._mark, self._sums = _load(path)
        charges, mark, whole = charges_since(ledger, self._mark)
        if whole:
            self._sums = _empty()
        for charge in charges:
            if HELD_OUT in charge:
                continue
            event, count = event_of(charge), count_of(charge)
            for key in _KEYS:
                value = str(day_of(elapsed_of(charge))) if key == DAY else charge.get(key)
                if isinstance(value, str) and value:
                    self._sums[key][value][event] += count
        if charges:
            self._mark = mark
            try:
                write_atomic(path, self._content(), sync=False)
            except OSError as error:
                raise LedgerError(f"{path} cannot be written: {error.strerror or error}") from None

    def of(self, key: str, value: str) -> Counter[Event]:
        """Return the events of the charges with this run or request."""
        return Counter(self._sums[key].get(value, {}))

    def since(self, elapsed: float) -> Counter[Event]:
        """Return the events of the charges of an elapsed time in seconds and later ones, with those of its day."""
        first = day_of(elapsed)
        return sum((events for day, events in self._sums[DAY].items() if int(day) >= first), Counter[Event]())

    def _content(self) -> bytes:
        sums = {key: {value: events_entry(events) for value, events in self._sums[key].items()} for key in _KEYS}
        return json.dumps({"mark": self._mark, **sums}).encode()


def day_of(elapsed: float) -> int:
    """Return the day of an elapsed time in seconds."""
    return math.floor(elapsed / 86400)


def _empty() -> Mapping[str, dict[str, Counter[Event]]]:
    return {key: defaultdict(Counter) for key in _KEYS}


def _load(path: Path) -> tuple[Mark | None, Mapping[str, dict[str, Counter[Event]]]]:
    """Return the kept sums and their mark; none if the file is missing or damaged."""
    sums = _empty()
    try:
        kept: dict[str, Any] = read_object(path)
        for key in _KEYS:
            sums[key].update({value: Counter(parse_events(entry)) for value, entry in kept[key].items()})
        mark = Mark(*kept["mark"])
    except (FileError, KeyError, TypeError, ValueError, AttributeError):
        return None, _empty()
    good = [type(value) for value in mark] == [int, int, int, str] and 0 <= mark.start < mark.end
    good = good and all(map(str.isdecimal, sums[DAY]))  # version 0.2 had dates
    return (mark, sums) if good else (None, _empty())
