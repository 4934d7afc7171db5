"""The error for networks and features that are unavailable."""

from __future__ import annotations

from collections.abc import Collection


class ModelError(ValueError):
    """A network or a feature is unavailable; the message states the solution."""


def few(names: Collection[str], most: int = 3) -> str:
    """Return the first names, for a message."""
    return ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")
