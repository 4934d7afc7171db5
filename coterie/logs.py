"""What apps write to Flower's log: one JSON object a line where COTERIE_LOG is json, and the progress of a run.

After each round the ServerApp logs a message for people and one in JSON, ``progress {...}``. ``coterie status`` reads
the latter from the log that a SuperLink keeps of a run. A client cannot forge one: text of clients never begins a
message, and :func:`printable` escapes its line breaks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from coterie.files import finite
from coterie.results import RoundRecord

#: Fields of a JSON line beside time, level and message, where known; ``extra`` of a logging call may set it.
FIELDS = ("run", "round", "rounds", "client", "node", "epsilon", "accuracy", "replies", "reason")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TEXT = re.compile(r"(?P<level>[A-Z]+) [-0-9:, ]*: +(?P<message>.*)")
_PROGRESS = re.compile(r"progress (?P<json>\{.*\})")
_NUMBERS = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")
# Kinds of warnings that are counted.
_MAX_KINDS = 1000
_TOTAL = re.compile(r"(?P<dropped>[0-9]+) replies were dropped")


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


def round_line(record: RoundRecord, rounds: int) -> tuple[str, dict[str, Any]]:
    """The message of a finished round, and the ``extra`` that belongs to it.

    Args:
        record: the round, with ``replies`` only where participation is no secret.
        rounds: number of rounds of the run.
    """
    text = f"round {record.round}/{rounds}: epsilon {record.epsilon:.3f}"
    extra: dict[str, Any] = {"rounds": rounds, "round": record.round, "epsilon": record.epsilon}
    if (accuracy := record.mean_accuracy) is not None:
        text += f", accuracy {100 * accuracy:.1f} %"
        extra["accuracy"] = accuracy
    if (replies := record.replies) is not None:
        text += f", {replies['accepted']} of {replies['asked']} replies, {record.dropped} dropped"
        extra["replies"] = replies
    return f"{text} ({record.seconds or 0:.2f} s)", extra


def progress_message(record: RoundRecord, rounds: int, submitter: str | None = None) -> str:
    """The message that :func:`read_rounds` reads: round, rounds, epsilon (null: infinite), accuracy, dropped replies.

    Args:
        record: as for :func:`round_line`.
        rounds: number of rounds of the run.
        submitter: who has started it; None: that is not known.
    """
    values = {"round": record.round, "rounds": rounds, "epsilon": finite(record.epsilon)}
    more = {"accuracy": finite(record.mean_accuracy), "dropped": record.dropped, "submitter": submitter}
    return f"progress {json.dumps(values | {name: value for name, value in more.items() if value is not None})}"


def read_rounds(log: str) -> dict[str, Any] | None:
    """How far a run has come, by the progress messages of its log; None before the end of its first round.

    Returns:
        ``round``, ``rounds``, ``epsilon`` (inf without privacy), ``accuracy`` (the latest; None: none yet),
        ``dropped`` replies so far (None where that is secret until the end), and ``submitter`` if it is known.
    """
    progress: dict[str, Any] | None = None
    for text in log.split("\n"):
        level, message = _read(_COLOURS.sub("", text).strip())
        if level == "INFO" and (match := _PROGRESS.fullmatch(message)):
            line = json.loads(match["json"])
            progress = progress or {"accuracy": None, "dropped": None}
            if "dropped" in line:
                line["dropped"] += progress["dropped"] or 0
            progress |= line
            if progress["epsilon"] is None:
                progress["epsilon"] = math.inf
        elif progress and level == "WARNING" and (match := _TOTAL.fullmatch(message)):
            progress["dropped"] = int(match["dropped"])
    return progress


def _read(text: str) -> tuple[str, str]:
    """Level and message of one line of a log, in either form; empty if it is neither."""
    if text.startswith("{"):
        try:
            line = json.loads(text)
        except ValueError:
            return "", ""
        return str(line.get("level")), str(line.get("message"))
    match = _TEXT.fullmatch(text)
    return (match["level"], match["message"]) if match else ("", "")
