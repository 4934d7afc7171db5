"""The progress of a run in its log: what the ServerApp writes, and ``coterie status`` reads.

After each round the ServerApp logs a message for people and one in JSON, ``progress {...}``. ``coterie status`` reads
the latter from the log that a SuperLink keeps of a run. A client cannot forge one: text of clients never begins a
message, and :func:`coterie.logs.printable` escapes its line breaks.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from coterie.fields import finite

if TYPE_CHECKING:
    from coterie.results import RoundRecord

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TEXT = re.compile(r"(?P<level>[A-Z]+) [-0-9:, ]*: +(?P<message>.*)")
_PROGRESS = re.compile(r"progress (?P<json>\{.*\})")
_TOTAL = re.compile(r"(?P<dropped>[0-9]+) replies were dropped")


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
    """The message that :func:`read_progress` reads: round, rounds, epsilon (null: infinite), accuracy, dropped replies.

    Args:
        record: as for :func:`round_line`.
        rounds: number of rounds of the run.
        submitter: who has started it; None: that is not known.
    """
    values = {"round": record.round, "rounds": rounds, "epsilon": finite(record.epsilon)}
    more = {"accuracy": finite(record.mean_accuracy), "dropped": record.dropped, "submitter": submitter}
    return f"progress {json.dumps(values | {name: value for name, value in more.items() if value is not None})}"


def read_progress(log: str) -> dict[str, Any] | None:
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
