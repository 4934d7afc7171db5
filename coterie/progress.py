"""Progress reports of long-running tasks: to the log, to a callback, or to a queue that another process drains."""

from __future__ import annotations

import queue
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


def throttled(callback: ProgressCallback, seconds: float) -> ProgressCallback:
    """Return a callback that drops reports within ``seconds`` of the last one that it passed on, or of this call."""
    last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            callback(text)
            last = time.monotonic()

    return report
