"""Reads the progress of a run from its log, as :mod:`coterie.flower.run_log` writes it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TEXT = re.compile(r"(?P<level>[A-Z]+) [-0-9:, ]*: +(?P<message>.*)")
_PROGRESS = re.compile(r"progress (?P<json>\{.*\})")
_TOTAL = re.compile(r"(?P<dropped>[0-9]+) replies were dropped")


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
