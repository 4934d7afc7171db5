"""The error for networks and features that are unavailable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """A network or a feature that is unavailable; the message states which and what to do."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not among `known`: the nearest one, then all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown {kind} '{name}'; did you mean '{nearest}'? Available: {', '.join(names)}"
