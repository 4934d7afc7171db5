"""The times of charges, which pass no faster than real time, whatever the clock of the machine shows.

A charge states three times: the clock's; the uptime of the machine, which cannot be set; and the elapsed time, by which
a policy limits the charges of a month. Between two charges the elapsed time grows by the difference of the
clock or of the uptime, whichever is less. After a restart no more than the uptime has passed for certain: the time
between the last charge and the restart does not count, and a limit holds for longer.

A jump of the clock, in either direction and at any moment, therefore ends no month early. Changes to the ledger can end
one, as can the host of a virtual machine, which controls both clocks.
"""

from __future__ import annotations

import calendar
import math
import time
from collections.abc import Mapping
from typing import Any

#: Entry of a charge: seconds that have passed for certain since the first charge that states them.
ELAPSED = "elapsed"
_TIME, _UPTIME, _FORMAT = "time", "uptime", "%Y-%m-%dT%H:%M:%SZ"


def uptime() -> float:
    """Return the seconds since this machine was started, with those of sleep where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def clock_time() -> str:
    """Return the time of the clock (UTC)."""
    return time.strftime(_FORMAT, time.gmtime(time.time()))


def times_after(last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a charge that state when it is made.

    Args:
        last: the charge before it; empty if it is the first one. A charge of an older version states no elapsed time,
            and counts as made when the first one that does is.
    """
    now = uptime()
    return {_TIME: clock_time(), _UPTIME: now, ELAPSED: elapsed_of(last) + _passed(last, now)}


def elapsed_of(charge: Mapping[str, Any]) -> float:
    """Return the elapsed time of a charge in seconds; 0 if it states none."""
    value = charge.get(ELAPSED, 0.0)
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else 0.0


def _passed(last: Mapping[str, Any], now: float) -> float:
    """Return the seconds that have passed since a charge by both clocks."""
    try:
        before = float(last[_UPTIME])
        by_clock = time.time() - calendar.timegm(time.strptime(last[_TIME], _FORMAT))
    except (KeyError, TypeError, ValueError):
        return 0.0
    by_uptime = now - before if now >= before else now
    return max(0.0, min(by_clock, by_uptime))
