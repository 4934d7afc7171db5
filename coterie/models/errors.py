"""The error for networks and features that are unavailable."""

from __future__ import annotations


class ModelError(ValueError):
    """A network or a feature is unavailable; the message states the solution."""
