"""Requests to nodes and their replies where messages are lost between a SuperNode and the SuperLink.

Flower's SuperNode drops a reply that the SuperLink did not accept, and forgets its message when it restarts; the
SuperLink then waits for a reply that never comes. A SuperNode handles its messages one after another: if a message that
was sent later has its reply and an earlier one has none, the earlier one is lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeAlias

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE

from coterie.flower.metadata import set_message_id, set_request
from coterie.wire.messages import CONFIG, IDENTITY, RECORD_PLANS, REPLY

_Key: TypeAlias = tuple[int, str, str, int]

# Seconds between two looks for replies, at least and at most; in between, a tenth of the time since the latest reply,
# or twice the time that the look took. A short round waits little for its replies, a long one rarely looks for them.
_MIN_POLL, _MAX_POLL = 0.2, 3.0
# Seconds without any reply after which silent nodes are probed, and after which a repeated request is sent again;
# doubled each time, up to the second number.
_PATIENCE, _MAX_PATIENCE = 30.0, 120.0
# The same, in units of these, before the first reply: every node may need that long.
_FIRST_REPLY = 4
# Seconds for a look for one reply, before the next one is looked for.
_POLL_SECONDS = 2.0
# Replies that are pulled at a time, which bounds their memory. One that takes longer than these seconds does not count:
# its node may have stopped in the middle.
_PULLS, _PULL_SECONDS = 3, 5.0
# Largest number of times that a lost request is sent.
_ATTEMPTS = 3


@dataclass
class _Request:
    """A message without a reply so far.

    Attributes:
        message: as the caller gave it; the reply is bound to it.
        ids: of its copies in the SuperLink, the latest last; empty: the SuperLink rejected it.
        due: when it is sent again if the caller repeats it, as ``time.monotonic``.
        pause: seconds between ``due`` and the time after it.
        attempts: number of times that it was sent, lost copies included.
        probes: ids of the messages that probe its node since then.
        passed: the reply to one of them: the node has finished with the request.
        probe_due: when the node may be probed.
        probe_pause: seconds from there to the next probe, which can be lost as well.
    """

    message: Message
    ids: list[str] = field(default_factory=list)
    due: float = 0.0
    pause: float = _PATIENCE
    attempts: int = 1
    probes: list[str] = field(default_factory=list)
    passed: Message | None = None
    probe_due: float = 0.0
    probe_pause: float = 2 * _PATIENCE


class Exchange:
    """``send_and_receive`` of a grid on which any message can be lost.

    - A request that the caller repeats (same node, type and content) is sent again after a pause; until then its reply
      is awaited. A late reply to any copy of a request counts.
    - If no reply has come for some time, silent nodes are probed: a node that has replied to the probe, and not to the
      request, has lost the request. The request is sent again, a bounded number of times, and then fails. A slow node
      does no work twice: the probe waits behind the request.

    At record level a second reply is a second release, unless the client replays the first one, as its reply to the
    probe declares; requests of other clients are not sent again. Nothing is logged: at client level the log would
    reveal participation.

    Args:
        push: sends messages, and returns their ids in order; None for one that the SuperLink does not accept.
        pull: the replies to some ids.
    """

    def __init__(
        self, push: Callable[[list[Message]], Iterable[str | None]], pull: Callable[[list[str]], Iterable[Message]]
    ) -> None:
        self._push, self._pull = push, _Pulls(pull)
        self._open: dict[_Key, _Request] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages now; their replies as they come.

        Args:
            messages: to nodes.
            timeout: seconds to wait for replies; None: until all are there.
        """
        now = time.monotonic()
        asked: dict[_Key, _Request] = {}
        for message in messages:
            metadata, content = message.metadata, message.content
            identity = id(content) if content else 0  # a repeated request has the same content
            key = metadata.dst_node_id, metadata.message_type, metadata.group_id, identity
            request = asked[key] = self._open.get(key) or _Request(message)
            if request.ids:
                set_message_id(message, request.ids[-1])
                request.message = message
        # Only introductions are repeated in later calls.
        for key in self._open.keys() - asked.keys():
            if key[1] != IDENTITY:
                self._pull.forget(self._open[key])
        self._open = {key: request for key, request in self._open.items() if key[1] == IDENTITY} | asked
        due = [request for request in asked.values() if now >= request.due]
        self._send([(request, request.message) for request in due], now)
        for request in due:
            request.due, request.pause = now + request.pause, min(2 * request.pause, _MAX_PATIENCE)
        return self._replies(asked, now, math.inf if timeout is None else timeout)

    def _send(self, sent: Sequence[tuple[_Request, Message]], now: float) -> None:
        """Send copies of requests, in one call."""
        if not sent:
            return
        ids = list(self._push([message for _, message in sent]))
        ids += [None] * (len(sent) - len(ids))
        for (request, _), message_id in zip(sent, ids, strict=True):
            request.ids += [message_id] if message_id else []
            request.probes, request.passed = [], None
            request.probe_due, request.probe_pause = now + _PATIENCE, 2 * _PATIENCE

    def _replies(self, asked: dict[_Key, _Request], started: float, timeout: float) -> Iterator[Message]:
        # When the latest reply came, and how long there may be none after it.
        latest, patience = started, _FIRST_REPLY * _PATIENCE
        while asked:
            looked = time.monotonic()
            # Before the requests: a request ahead of a probe that has its reply has one by then, or never will.
            self._look_for_probes(asked)
            for key, request in list(asked.items()):
                reply = self._reply(request)
                if reply is None and request.passed and not self._pull.busy(request.ids[-1]):
                    reply = self._lost(request, request.passed)
                if reply is not None:
                    set_request(reply, request.message.metadata.message_id)
                    latest, patience = time.monotonic(), _PATIENCE
                    del asked[key]
                    self._open.pop(key, None)
                    self._pull.forget(request)
                    yield reply
            now = time.monotonic()
            if not asked or now - started >= timeout:
                return
            if now - latest >= patience:
                self._send_probes(asked, now)
            pause = min(_MAX_POLL, max(_MIN_POLL, (now - latest) / 10, 2 * (now - looked)))
            time.sleep(min(pause, max(0.0, timeout - (now - started))))

    def _reply(self, request: _Request) -> Message | None:
        """The reply to any copy of a request; an error counts for the latest copy alone."""
        if not request.ids:
            return error_reply("", "the SuperLink did not accept the message", ErrorCode.NODE_UNAVAILABLE)
        for message_id in list(request.ids):
            for reply in self._pull(message_id):
                if not reply.has_error() or message_id == request.ids[-1]:
                    return reply
                request.ids.remove(message_id)
        return None

    def _send_probes(self, asked: dict[_Key, _Request], now: float) -> None:
        silent = [
            request
            for (_, message_type, *_), request in asked.items()
            if message_type != IDENTITY and now >= request.probe_due
        ]
        probes = [
            Message(RecordDict(), request.message.metadata.dst_node_id, IDENTITY, ttl=request.message.metadata.ttl)
            for request in silent
        ]
        if probes:
            for request, probe in zip(silent, self._push(probes), strict=False):
                request.probes += [probe] if probe else []
                request.probe_due, request.probe_pause = now + request.probe_pause, 2 * request.probe_pause

    def _look_for_probes(self, asked: dict[_Key, _Request]) -> None:
        for request in asked.values():
            for probe in list(request.probes):
                for reply in self._pull(probe):
                    request.probes.remove(probe)
                    if not reply.has_error():  # the SuperLink's own errors prove nothing about the request
                        request.passed = reply

    def _lost(self, request: _Request, probe: Message) -> Message | None:
        """Send a lost request again; returns an error reply if it cannot be sent again."""
        old = request.message
        config = old.content.get(CONFIG)
        paid = isinstance(config, ConfigRecord) and RECORD_PLANS in config
        declared = probe.content.get(REPLY) if probe.has_content() else None  # whether the client replays its reply
        replays = isinstance(declared, ConfigRecord) and declared.get("repeats") is True
        if request.attempts >= _ATTEMPTS or (paid and not replays):
            return error_reply("", "the message or its reply was lost", ErrorCode.MESSAGE_UNAVAILABLE)
        request.attempts += 1
        metadata = old.metadata
        copy = Message(
            old.content, metadata.dst_node_id, metadata.message_type, group_id=metadata.group_id, ttl=metadata.ttl
        )
        self._send([(request, copy)], time.monotonic())
        return None


class _Pulls:
    """Pulls each reply in a call of its own, few at a time: a stalled upload delays no other reply for long.

    Args:
        pull: the replies to some ids.
    """

    def __init__(self, pull: Callable[[list[str]], Iterable[Message]]) -> None:
        self._pull = pull
        self._running: dict[str, tuple[Future[list[Message]], float]] = {}

    def busy(self, message_id: str) -> bool:
        """Whether a reply is being pulled, and has been for a short time only."""
        return message_id in self._running and time.monotonic() - self._running[message_id][1] < _PATIENCE

    def __call__(self, message_id: str) -> list[Message]:
        """The reply to a message; empty if it is not here yet."""
        seconds = 0.0
        if message_id not in self._running:
            begin = time.monotonic() - _PULL_SECONDS
            if sum(future.done() or started > begin for future, started in self._running.values()) >= _PULLS:
                return []  # so many replies are in memory, complete or in part
            self._running[message_id], seconds = (self._started(message_id), time.monotonic()), _POLL_SECONDS
        future, _ = self._running[message_id]
        if not wait([future], seconds).done:
            return []
        del self._running[message_id]
        return future.result()

    def forget(self, request: _Request) -> None:
        """Discard what is pulled for a request whose reply is no longer needed."""
        for message_id in (*request.ids, *request.probes):
            self._running.pop(message_id, None)

    def _started(self, message_id: str) -> Future[list[Message]]:
        future: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self._pull([message_id])))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=pull, daemon=True).start()
        return future


def error_reply(message_id: str, reason: str, code: int = ErrorCode.UNKNOWN) -> Message:
    """An error reply to a message, like those of Flower's grid for lost replies."""
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=message_id,
        group_id="",
        created_at=time.time(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
    )
    return make_message(metadata=metadata, error=Error(code, reason))
