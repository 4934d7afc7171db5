"""What apps write to Flower's log, and progress reports of long-running tasks.

A line of the log is one JSON object where COTERIE_LOG is json. Progress goes to the log, to a callback, or to a queue
that another process drains.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

#: Called with one line of text for each report.
ProgressCallback = Callable[[str], None]
#: Fields of a JSON line beside time, level and message, where known; ``extra`` of a logging call may set it.
FIELDS = ("run", "round", "rounds", "client", "node", "epsilon", "accuracy", "replies", "reason")

_COUNT = re.compile(r"([0-9]{1,9}) of ([0-9]{1,9})$")
_NUMBERS = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")
# Kinds of warnings that are counted.
_MAX_KINDS = 1000


def printable(text: object, most: int = 200) -> str:
    """One line of text of another machine, for logs and terminals, of at most ``most`` characters.

    Control characters, line breaks and invisible characters, such as those that change the direction of text, are
    escaped.
    """
    whole = str(text)
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in whole[:most])
    return escaped if len(escaped) <= most and len(whole) <= most else escaped[: most - 1] + "…"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; infinity and NaN, which JSON lacks, are null. ``known`` holds for all records."""

    def __init__(self, **known: object) -> None:
        super().__init__()
        self.known = known

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage().strip(),
            **self.known,
        }
        line |= {field: getattr(record, field) for field in FIELDS if hasattr(record, field)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        tidy = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
            if value is not None
        }
        return json.dumps(tidy, default=str, ensure_ascii=False)


def install(**known: object) -> None:
    """Have Flower's logger write JSON to standard error where COTERIE_LOG asks for it; ``known`` as in the formatter.

    Only what goes to a console changes. Called again, it replaces what is known.
    """
    write_once()
    wanted, logger = os.environ.get("COTERIE_LOG", ""), logging.getLogger("flwr")
    if wanted != "json":
        if wanted not in ("", "text"):
            logger.warning("COTERIE_LOG = %r: must be json or text; using text", wanted)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(**known))
    for other in logger.handlers[:]:
        if isinstance(other, logging.StreamHandler) and not isinstance(other, logging.FileHandler):
            handler.setLevel(other.level)
            logger.removeHandler(other)
    logger.addHandler(handler)


def write_once() -> None:
    """Have the root logger write what other libraries report, but nothing of Flower's logger, which writes it itself.

    Opacus, when it is imported, and absl, when dp-accounting logs, configure a root logger that has no handler: every
    line of Flower's logger would appear twice.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    handler.addFilter(lambda record: record.name.partition(".")[0] != "flwr")
    root.addHandler(handler)


def colour_terminals_only() -> None:
    """Have Flower's logger write colours to terminals, not to files and pipes."""
    from flwr.supercore.logger import ConsoleHandler

    for handler in logging.getLogger("flwr").handlers:
        if isinstance(handler, ConsoleHandler):
            handler.colored = handler.colored and handler.stream.isatty()


class _FirstOfEach(logging.Filter):
    """Passes the first of the warnings that differ in numbers only, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is new; more than a number of kinds are passed, since clients choose their text."""
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        pattern = _NUMBERS.sub("#", text)
        if pattern in self.counts:
            self.counts[pattern] += 1
            return False
        if len(self.counts) < _MAX_KINDS:
            self.counts[pattern], self.first[pattern] = 0, text
        return True


@contextmanager
def collapsed_warnings() -> Iterator[None]:
    """Log warnings of Flower's logger that differ in numbers only once, and how many more there were at the end."""
    logger, repeated = logging.getLogger("flwr"), _FirstOfEach()
    logger.addFilter(repeated)
    try:
        yield
    finally:
        logger.removeFilter(repeated)
        for pattern, count in repeated.counts.items():
            if count:
                logger.warning("%s more like: %s", count, repeated.first[pattern])


def ignore_progress(text: str) -> None:
    """Drop a report; the default of every optional callback."""


def _to_log(text: str) -> None:
    from flwr.common.logger import log  # slow to import; commands without runs never log

    log(logging.INFO, text)


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
