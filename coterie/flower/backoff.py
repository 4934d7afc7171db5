"""Pauses of Flower while it waits for the content of a message."""

from __future__ import annotations

from typing import Any

from flwr.supercore.inflatable import inflatable_utils

# Seconds before Flower asks again for content that its sender has announced and not sent yet. It doubles them each
# time, up to 10 s, and begins with 1 s by default.
_FIRST = 0.05


def shorten() -> None:
    """Shorten Flower's first pauses in this process."""
    for wait in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults: Any = wait.__kwdefaults__
        defaults["initial_backoff"] = _FIRST
