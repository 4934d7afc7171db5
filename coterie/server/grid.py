"""Flower's grid where the SuperLink may fail: what it loses once is asked for again, and the run goes on.

Flower's HTTP client waits for a SuperLink that is away. It gives up, and the ServerApp with it, where the SuperLink
dies at the wrong moment: after it has stored an object and before it says so (the second attempt is refused, "the push
session may have expired"), in the middle of a TLS handshake, or where it answers with an error of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import TypeVar

from flwr.common.logger import log
from flwr.serverapp import Grid

T = TypeVar("T")

# Seconds to wait before each further attempt.
_PAUSES = (1.0, 2.0, 4.0, 8.0)


def persistent(grid: Grid) -> Grid:
    """The same grid; where a call of its fails that asks the SuperLink, it is made again, up to four times.

    To send messages again is safe: the SuperLink knows them by their ids, takes what it lacks, and delivers none twice.
    Replies that it had handed out when it died are lost; it then says so in their place, as of a node that is gone.

    Args:
        grid: Flower's, whose ``send_and_receive`` goes by its other methods.
    """
    for name, failed in (
        ("get_node_ids", "nodes cannot be listed"),
        ("push_messages", "messages cannot be sent"),
        ("pull_messages", "replies cannot be had"),
    ):
        setattr(grid, name, _persist(getattr(grid, name), failed))
    return grid


def _persist(call: Callable[..., T], failed: str) -> Callable[..., T]:
    def persist(*arguments: Iterable[object]) -> T:
        kept = [list(argument) for argument in arguments]
        for pause in _PAUSES:
            try:
                return call(*kept)
            except Exception as error:
                log(WARNING, "%s: %s; again in %g s", failed, error, pause)
                time.sleep(pause)
        return call(*kept)

    return persist
