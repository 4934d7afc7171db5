"""Flower's grid where the SuperLink or a node may fail: calls are repeated, and a malformed reply costs one reply.

Flower's HTTP client waits for a SuperLink that is unavailable. It gives up, and the ServerApp with it, if the SuperLink
fails after storing an object and before acknowledging it (the second attempt is rejected, "the push session may have
expired"), in the middle of a TLS handshake, or if it replies with an error of its own.

Flower's HTTP client inflates all replies of a call together: one that is not what Flower expects loses the others. It
also takes the request that a reply belongs to from the reply, where the node can write anything; the SuperLink checked
the envelope. Replies are therefore pulled one request at a time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any, TypeVar

import httpx
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from coterie.flower import backoff
from coterie.flower.lost_messages import Exchange, error_reply
from coterie.flower.metadata import set_request
from coterie.logs import printable

T = TypeVar("T")

# Seconds before each retry.
_PAUSES = (1.0, 2.0, 4.0, 8.0)
# Parameter of mallopt, from malloc.h.
_M_MMAP_THRESHOLD = -3
# Errors of the connection to the SuperLink; other errors come from the content of a reply.
_TRANSPORT_ERRORS = (httpx.HTTPError, OSError)


def with_retries(grid: Grid) -> Grid:
    """Make the grid retry failed calls to the SuperLink, up to four times, and return it.

    Sending messages again is safe: the SuperLink identifies them by their ids and delivers none twice. Replies that it
    delivered before a failure are lost; it then returns errors, as for a disconnected node.

    A reply that cannot be inflated becomes an error reply to its request. Requests whose message or reply is lost are
    sent again (:class:`~coterie.flower.lost_messages.Exchange`).

    Args:
        grid: of Flower; it is changed in place.
    """
    over_http = isinstance(grid, HttpGrid)
    listing = "get_nodes" if over_http else "get_node_ids"  # the call that the other one makes
    pull = _retried(_pull_safely(grid.pull_messages) if over_http else grid.pull_messages, "cannot pull replies")
    for name, call in (
        (listing, _retried(getattr(grid, listing), "cannot list nodes")),
        ("push_messages", _retried(grid.push_messages, "cannot send messages")),
        ("pull_messages", _one_by_one(pull) if over_http else pull),
    ):
        setattr(grid, name, call)
    if over_http:  # simulations lose no message, and Flower polls them more often
        backoff.shorten()
        if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # not in other C libraries
            mallopt(_M_MMAP_THRESHOLD, 2**20)  # large blocks of replies would remain with the threads that pull them
        exchange = Exchange(grid.push_messages, grid.pull_messages)
        grid.send_and_receive = exchange.send_and_receive  # type: ignore[method-assign]
    return grid


def with_check(grid: Grid, check: Callable[[], None]) -> Grid:
    """Make the grid call a function when the nodes are listed, before every round is charged, and return it.

    Args:
        grid: of Flower; it is changed in place.
        check: raises if no client can take part, which ends the run.
    """
    get_nodes = grid.get_nodes

    def checked() -> Iterable[Any]:
        check()
        return get_nodes()

    grid.get_nodes = checked  # type: ignore[method-assign]
    return grid


def _one_by_one(pull: Callable[..., Iterable[Message]]) -> Callable[[Iterable[str]], list[Message]]:
    """Pull the reply to each message in a separate call, and bind it to that message."""

    def pull_each(message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in list(message_ids):
            for reply in list(pull([message_id]))[:1]:
                set_request(reply, message_id)
                replies.append(reply)
        return replies

    return pull_each


def _pull_safely(pull: Callable[..., Iterable[Message]]) -> Callable[[list[str]], Iterable[Message]]:
    """Pull the reply to one message; one that cannot be inflated is an error reply."""

    def pull_one(message_ids: list[str]) -> Iterable[Message]:
        try:
            return pull(message_ids)
        except _TRANSPORT_ERRORS:
            raise
        except Exception as error:
            reason = printable(f"the reply cannot be parsed: {type(error).__name__}: {error}")
            return [error_reply(message_ids[0], reason)]

    return pull_one


def _retried(call: Callable[..., T], failed: str) -> Callable[..., T]:
    def retried(*arguments: Iterable[object]) -> T:
        repeatable = [list(argument) for argument in arguments]
        for pause in _PAUSES:
            try:
                return call(*repeatable)
            except Exception as error:
                log(WARNING, "%s: %s; retrying in %g s", failed, printable(error), pause)
                time.sleep(pause)
        return call(*repeatable)

    return retried
