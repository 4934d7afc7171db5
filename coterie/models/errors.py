"""The error for networks and features that are unavailable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """A network or a feature is unavailable; the message states the solution."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for a name that is not in `known`, with the nearest one and all others."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown {kind} '{name}'; did you mean '{nearest}'? Available: {', '.join(names)}"
