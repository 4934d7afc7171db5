"""Progress reports of long-running tasks: to the log, to a callback, or to a queue that another process drains."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging import INFO
from typing import Any

#: Called with one line of text for each report.
ProgressCallback = Callable[[str], None]


def ignore_progress(text: str) -> None:
    """Drop a report; the default of every optional callback."""


def _to_log(text: str) -> None:
    from flwr.common.logger import log  # slow to import; commands without runs never log

    log(INFO, text)


_COUNT = re.compile(r"([0-9]{1,9}) of ([0-9]{1,9})$")

_sink: ProgressCallback = _to_log


def report_progress(text: str) -> None:
    """Send a report to the sink of this process."""
    _sink(text)


def set_progress_sink(sink: ProgressCallback | None) -> None:
    """Send the reports of this process to ``sink``; None restores the log."""
    global _sink
    _sink = sink or _to_log


def drain_progress(reports: Any) -> Iterator[str]:
    """Take all reports from a queue, without waiting for more."""
    with suppress(queue.Empty):
        while True:
            yield reports.get_nowait()


def remaining(seconds: float) -> str:
    """Return a remaining time in words, such as "about 3 min left"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 90 else f"about {round(minutes / 60)} h left"


def estimated(callback: ProgressCallback) -> ProgressCallback:
    """Return a callback that adds the remaining time of a step to reports that end in "7 of 50".

    Reports with the same text before these numbers belong to one step, whose pace is that since its first report.
    """
    began: dict[str, tuple[float, int]] = {}

    def report(text: str) -> None:
        match = _COUNT.search(text)
        if match is not None:
            now, done, total = time.monotonic(), int(match[1]), int(match[2])
            start, first = began.setdefault(text[: match.start()], (now, done))
            if first < done < total:
                text += f", {remaining((now - start) / (done - first) * (total - done))}"
        callback(text)

    return report


def throttled(callback: ProgressCallback, seconds: float) -> ProgressCallback:
    """Return a callback that drops reports within ``seconds`` of the last one that it passed on, or of this call."""
    last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            callback(text)
            last = time.monotonic()

    return report
