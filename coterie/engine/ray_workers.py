"""Ray actors that replace the worker processes of the local engine. Each node merges the sums of its clients.

Only a program that runs on Ray imports this module.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from logging import WARNING
from typing import Any, ClassVar, NamedTuple, TypeVar

import ray
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from ray.exceptions import RayError, RayTaskError

from coterie.engine.in_process import NewSums, Replies, SummingGrid, answer
from coterie.logs import printable
from coterie.privacy import Summed
from coterie.rounds.batches import PartialSums

T = TypeVar("T")

# Seconds for actors to start; others may use the cluster as well.
_START_SECONDS = 60.0
# Seconds for idle actors to reply after another one died; Ray needs about two to find out.
_PING_SECONDS = 10.0
# Seconds without any working actor after which calls fail.
_NO_ACTOR_SECONDS = 120.0
_POLL_SECONDS = 0.2
# Sums that wait on a node before they are merged: bounds its memory.
_WAITING = 4


class RayWorkers:
    """Actors, each of which computes one call at a time; one that died is replaced.

    Ray starts the replacement as soon as some node has room for it, also on a node that joins later. The content of a
    message is sent to each node once.

    Args:
        count: number of actors.
        cpus: cores of each.
    """

    def __init__(self, count: int, cpus: int) -> None:
        self.count = count
        self._new: Any = ray.remote(num_cpus=cpus)(_Actor)
        self._cpus = cpus
        self._threads = ThreadPoolExecutor(count)  # each waits for an actor, and for its result
        self._contents: dict[int, tuple[RecordDict, Any]] = {}
        self._changed = threading.Condition()
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # actor by the reference that becomes ready with it
        self._busy: list[Any] = []
        self._closed = False
        self._start(count)
        ray.wait(list(self._starting), num_returns=count, timeout=_START_SECONDS)  # or the first one computes all calls

    def submit(self, call: Callable[..., T], content: RecordDict, *arguments: Any) -> Future[T]:
        """Return the future result of ``call(content, *arguments)`` in an actor.

        It raises BrokenProcessPool if the actor dies, and RuntimeError if no actor has worked for two minutes.
        """
        if id(content) not in self._contents:  # kept, so that no other object takes its id
            self._contents[id(content)] = content, ray.put(content)
        return self._threads.submit(self._call, call, self._contents[id(content)][1], arguments)

    def result(self, future: Future[T]) -> T:
        """Wait for a result."""
        return future.result()

    def forget(self) -> None:
        """Delete the published contents."""
        self._contents.clear()

    def close(self) -> None:
        """Stop the actors, also in the middle of a call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            actors = [*self._idle, *self._busy, *self._starting.values()]
        for actor in actors:
            ray.kill(actor)
        self._threads.shutdown(cancel_futures=True)  # before Ray ends: a call would start it again

    def _call(self, call: Callable[..., T], content: Any, arguments: Sequence[Any]) -> T:
        actor = self._take()
        try:
            result: T = ray.get(actor.call.remote(call, [content], *arguments))
        except RayTaskError as error:  # the actor works, its client failed
            self._give_back(actor, [actor])
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, Exception) else error from None
        except RayError as error:
            self._replace(actor)
            raise BrokenProcessPool(str(error)) from error
        self._give_back(actor, [actor])
        return result

    def _take(self) -> Any:
        """Wait for an idle actor."""
        deadline = time.monotonic() + _NO_ACTOR_SECONDS
        with self._changed:
            self._add_started()
            while not self._idle:
                if self._closed:
                    raise RuntimeError("the run has ended")
                if self._busy:  # another one works
                    deadline = time.monotonic() + _NO_ACTOR_SECONDS
                elif time.monotonic() > deadline:
                    raise RuntimeError(f"no Ray actor has worked for {_NO_ACTOR_SECONDS:g} s")
                self._changed.wait(_POLL_SECONDS)
                self._add_started()
            actor = self._idle.pop(0)  # the one that has waited longest
            self._busy.append(actor)
            return actor

    def _give_back(self, used: Any, idle: Sequence[Any]) -> None:
        with self._changed:
            self._busy.remove(used)
            self._idle += idle
            self._changed.notify_all()

    def _start(self, count: int) -> None:
        """Ask Ray for actors."""
        for _ in range(count):
            actor = self._new.remote(self._cpus)
            self._starting[actor.__ray_ready__.remote()] = actor

    def _add_started(self) -> None:
        """Add the actors that have started."""
        ready, _ = (
            ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0) if self._starting else ((), 0)
        )
        for reference in ready:
            actor = self._starting.pop(reference)
            if (error := _error(reference)) is None:
                self._idle.append(actor)
            else:
                log(WARNING, "a Ray actor did not start: %s", printable(error))
                self._start(1)

    def _replace(self, dead: Any) -> None:
        """Give up an actor that died in a call, and the idle ones that died with it."""
        with self._changed:
            if self._closed:
                return
            idle, self._idle = self._idle, []
        pings = {actor.__ray_ready__.remote(): actor for actor in idle}
        ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_SECONDS) if pings else ([], [])
        alive = [pings[reference] for reference in ready if _error(reference) is None]
        given_up = [dead, *(actor for actor in idle if actor not in alive)]
        log(
            WARNING, "%d of %d Ray actors died; Ray starts others as soon as a node has room", len(given_up), self.count
        )
        for actor in given_up:
            ray.kill(actor)  # if its node returns, its cores are free for another one
        with self._changed:
            self._start(len(given_up))
        self._give_back(dead, alive)


class _Actor:
    """Runs calls on a node of the cluster."""

    def __init__(self, cpus: int) -> None:
        import torch

        from coterie.engine.workers import keep_freed_memory

        torch.set_num_threads(cpus)
        keep_freed_memory()
        self._content: tuple[Any, Any] = None, None

    def call(self, call: Callable[..., T], content: Sequence[Any], *arguments: Any) -> T:
        """Return ``call(content, *arguments)``; the content of the last call is kept."""
        (reference,) = content
        if self._content[0] != reference:
            self._content = reference, ray.get(reference)
        return call(self._content[1], *arguments)

    def merge(self, first: Summed, *others: Summed) -> Summed:
        """Return the sum of sums."""
        total = copy.deepcopy(first)  # Ray's arrays cannot be written
        for sums in others:
            total.merge(sums)
        return total


class _OnNode(NamedTuple):
    """Sums that stay on a node of the cluster.

    Attributes:
        node: the node.
        actor: on this node.
        sums: a reference to them.
    """

    node: str
    actor: Any
    sums: Any


def _answer(content: RecordDict, *arguments: Any) -> Replies:
    """Call a handler, and keep the sums on this node."""
    replies, context = answer(content, *arguments), ray.get_runtime_context()
    if replies.sums is None:
        return replies
    kept: Any = _OnNode(context.get_node_id(), context.current_actor, ray.put(replies.sums))
    return replies._replace(sums=kept)


class RayGrid(SummingGrid):
    """A :class:`SummingGrid` on Ray: each node merges the sums of its calls, and sends k x d numbers in a round."""

    answer: ClassVar[Callable[..., Replies]] = staticmethod(_answer)

    def send_and_sum(self, messages: Iterable[Message], new_sums: NewSums) -> Iterator[Message | PartialSums]:
        """See :class:`coterie.rounds.batches.SupportsSums`. If sums are lost, their clients reply again, alone."""
        nodes: dict[str, tuple[list[_OnNode], list[Message]]] = {}
        for reply in super().send_and_sum(messages, new_sums):
            if isinstance(reply, Message):
                yield reply
                continue
            kept: Any = reply.sums
            waiting, summed = nodes.setdefault(kept.node, ([], []))
            waiting.append(kept)
            summed.extend(reply.messages)
            if len(waiting) >= _WAITING:
                waiting[:] = [_merged(waiting)]
        totals = [(_merged(waiting).sums, summed) for waiting, summed in nodes.values()]
        for total, summed in totals:
            try:
                yield PartialSums(ray.get(total), summed)
            except RayError as error:
                log(WARNING, "the sums of a Ray node are lost, its clients reply again: %s", printable(error))
                yield from map(self.alone, summed)


def _merged(waiting: Sequence[_OnNode]) -> _OnNode:
    """Merge sums of a node there."""
    node, actor, sums = waiting[-1]
    return _OnNode(node, actor, actor.merge.remote(*(kept.sums for kept in waiting)) if len(waiting) > 1 else sums)


def _error(reference: Any) -> RayError | None:
    """Return why a call failed; None: it succeeded."""
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None
