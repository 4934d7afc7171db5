"""What apps write to Flower's log: one JSON object a line where COTERIE_LOG is json, and the line of a round.

``coterie status`` reads the latter back, in either form, from the log that a SuperLink keeps of a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

#: What a JSON line says beside time, level and message, where it is known; ``extra`` of a logging call may set it.
FIELDS = ("run", "round", "rounds", "client", "node", "epsilon", "accuracy", "replies", "reason")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ROUND = re.compile(
    r"round (?P<round>\d+)/(?P<rounds>\d+): epsilon (?P<epsilon>[0-9.]+|inf)(?:, accuracy (?P<accuracy>[0-9.]+) %)?"
    r"(?:, \d+ of \d+ replies, (?P<dropped>\d+) dropped)? \([0-9.]+ s\)$"
)
_TOTAL = re.compile(r"(\d+) replies could not be used$")


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

    def __init__(self, **known: Any) -> None:
        super().__init__()
        self.known = known

    def format(self, record: logging.LogRecord) -> str:
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


def install(**known: Any) -> None:
    """Have Flower's logger write JSON to standard error where COTERIE_LOG asks for it; ``known`` as in the formatter.

    Only what goes to a console changes. Called again, it replaces what is known.
    """
    wanted, logger = os.environ.get("COTERIE_LOG", ""), logging.getLogger("flwr")
    if wanted != "json":
        if wanted not in ("", "text"):
            logger.warning("COTERIE_LOG = %r: must be json or text; the log stays text", wanted)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(**known))
    for other in logger.handlers[:]:
        if isinstance(other, logging.StreamHandler) and not isinstance(other, logging.FileHandler):
            handler.setLevel(other.level)
            logger.removeHandler(other)
    logger.addHandler(handler)


def round_line(line: Mapping[str, Any], rounds: int) -> tuple[str, dict[str, Any]]:
    """The message of a finished round, and the ``extra`` that belongs to it.

    Args:
        line: of metrics.jsonl; ``replies`` is there only where who takes part is no secret.
        rounds: of the whole run.
    """
    text = f"round {line['round']}/{rounds}: epsilon {line['epsilon']:.3f}"
    if "accuracy" in line:
        text += f", accuracy {100 * line['accuracy']:.1f} %"
    if "replies" in line:
        replies = line["replies"]
        dropped = sum(replies["dropped"].values())
        text += f", {replies['accepted']} of {replies['asked']} replies, {dropped} dropped"
    known = {key: line[key] for key in ("round", "epsilon", "accuracy", "replies") if key in line}
    return f"{text} ({line['seconds']:.2f} s)", {"rounds": rounds, **known}


def read_rounds(log: str) -> dict[str, Any] | None:
    """How far a run has come, by its log; None before the end of its first round.

    Returns:
        ``round``, ``rounds``, ``epsilon`` (inf without privacy), ``accuracy`` (the latest; None: none yet), and
        ``dropped`` replies so far (None where that is secret until the end).
    """
    found: dict[str, Any] | None = None
    for text in log.splitlines():
        line = _read(_COLOURS.sub("", text).strip())
        if "round" in line:
            found = {"accuracy": None, "dropped": None} | (found or {})
            dropped = line.pop("dropped", None)
            found |= line
            if dropped is not None:
                found["dropped"] = (found["dropped"] or 0) + dropped
        elif found and "dropped" in line:
            found |= line
    return found


def _read(text: str) -> dict[str, Any]:
    """What one line says of a round, or at the end of all replies; empty where it is neither."""
    if text.startswith("{"):
        try:
            line = json.loads(text)
        except ValueError:
            return {}
        if not {"round", "rounds", "epsilon"} <= line.keys():
            text = str(line.get("message", ""))
        else:
            found = {key: line[key] for key in ("round", "rounds", "epsilon", "accuracy") if key in line}
            if found["epsilon"] is None:
                found["epsilon"] = math.inf
            if "replies" in line:
                found["dropped"] = sum(line["replies"]["dropped"].values())
            return found
    if match := _ROUND.search(text):
        kinds = {"epsilon": float, "accuracy": lambda value: float(value) / 100}
        return {key: kinds.get(key, int)(value) for key, value in match.groupdict().items() if value is not None}
    match = _TOTAL.search(text)
    return {"dropped": int(match[1])} if match else {}
