"""Flower's grid where the SuperLink or a node may fail: calls are repeated, and a malformed reply costs one reply.

Flower's HTTP client waits for a SuperLink that is unavailable. It gives up, and the ServerApp with it, if the SuperLink
fails after storing an object and before acknowledging it (the second attempt is rejected, "the push session may have
expired"), in the middle of a TLS handshake, or if it replies with an error of its own.

Flower's HTTP client inflates all replies of a call together: one that is not what Flower expects loses the others. It
also takes the request that a reply belongs to from the reply, where the node can write anything; the SuperLink checked
the envelope. Replies are therefore pulled one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from coterie.logs import printable
from coterie.server.exchange import Exchange, error_reply

T = TypeVar("T")

# Seconds to wait before each further attempt.
_PAUSES = (1.0, 2.0, 4.0, 8.0)
# What a call raises if the SuperLink cannot be reached or fails; anything else is raised by what it received.
_OF_TRANSPORT = (httpx.HTTPError, OSError)


def persistent(grid: Grid) -> Grid:
    """The same grid; where a call of its fails that asks the SuperLink, it is made again, up to four times.

    To send messages again is safe: the SuperLink knows them by their ids, takes what it lacks, and delivers none twice.
    Replies that it had delivered before it failed are lost; it then returns errors, as for a node that is gone.

    A reply that cannot be inflated is an error reply to the message that it answers. Requests whose message or reply is
    lost are sent again (:class:`~coterie.server.exchange.Exchange`).

    Args:
        grid: Flower's.
    """
    over_http = isinstance(grid, HttpGrid)
    pull = _persist(_pull_safely(grid.pull_messages) if over_http else grid.pull_messages, "replies cannot be had")
    for name, call in (
        ("get_node_ids", _persist(grid.get_node_ids, "nodes cannot be listed")),
        ("push_messages", _persist(grid.push_messages, "messages cannot be sent")),
        ("pull_messages", _one_by_one(pull) if over_http else pull),
    ):
        setattr(grid, name, call)
    if over_http:  # in a simulation nothing is lost, and Flower looks for replies more often
        exchange = Exchange(grid.push_messages, grid.pull_messages)
        grid.send_and_receive = exchange.send_and_receive  # type: ignore[method-assign]
    return grid


def _one_by_one(pull: Callable[..., Iterable[Message]]) -> Callable[[Iterable[str]], list[Message]]:
    """Pull the reply to each message in a call of its own, and bind it to that message."""

    def pull_each(message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in list(message_ids):
            for reply in list(pull([message_id]))[:1]:
                reply.metadata.__dict__["_reply_to_message_id"] = message_id
                replies.append(reply)
        return replies

    return pull_each


def _pull_safely(pull: Callable[..., Iterable[Message]]) -> Callable[[list[str]], Iterable[Message]]:
    """Pull the reply to one message; one that cannot be inflated is an error reply."""

    def pull_one(message_ids: list[str]) -> Iterable[Message]:
        try:
            return pull(message_ids)
        except _OF_TRANSPORT:
            raise
        except Exception as error:
            reason = printable(f"the reply cannot be read: {type(error).__name__}: {error}")
            return [error_reply(message_ids[0], reason)]

    return pull_one


def _persist(call: Callable[..., T], failed: str) -> Callable[..., T]:
    def persist(*arguments: Iterable[object]) -> T:
        kept = [list(argument) for argument in arguments]
        for pause in _PAUSES:
            try:
                return call(*kept)
            except Exception as error:
                log(WARNING, "%s: %s; again in %g s", failed, printable(error), pause)
                time.sleep(pause)
        return call(*kept)

    return persist
