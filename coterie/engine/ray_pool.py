"""The actors of the Ray engine: one that died is replaced. Only :mod:`coterie.engine.ray` imports this module."""

from __future__ import annotations

import threading
import time
from logging import WARNING
from typing import Any

import ray
from flwr.common.logger import log
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.exceptions import RayError, RayTaskError

# Seconds for idle actors to reply after another one died; Ray needs about two to find out.
_PING_SECONDS = 10.0
# Seconds without any working actor after which messages fail.
_NO_ACTOR_SECONDS = 120.0
_POLL_SECONDS = 0.2


class ReplacingActorPool(BasicActorPool):
    """Flower's pool of actors, without those that died.

    The message in progress at an actor that dies fails, and is not repeated: the client may have charged its ledger.
    Ray starts the replacement as soon as some node has room for it, also one that joins later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._changed = threading.Condition()
        self._starting: dict[Any, Any] = {}  # actor by the reference that becomes ready with it

    def submit(self, actor_fn: Any, job: tuple[Any, ...]) -> Any:
        """Submit a job to an idle actor, or to the next that becomes idle; return its future.

        Raises:
            RuntimeError: no actor has worked for two minutes.
        """
        with self._changed:
            actor = self._next_idle()
            future = actor_fn(actor, *job)
            self._future_to_actor[future] = actor
        return future

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> tuple[Any, Any]:
        """Return the result of a job.

        Raises:
            RayError: its actor died, or the job raised.
        """
        try:
            _, message, context = ray.get(future)
        except RayTaskError:  # the actor works, its client failed
            raise
        except RayError:
            with self._changed:
                actor = self._future_to_actor.pop(future)
            self._replace([actor, *self._unreachable()])
            raise
        self.add_actor_back_to_pool(future)
        return message, context

    def add_actor_back_to_pool(self, future: Any) -> None:
        """Return the actor of a job to the idle ones, unless it died."""
        with self._changed:
            if future in self._future_to_actor:
                self.pool.append(self._future_to_actor.pop(future))
                self._changed.notify_all()

    def _next_idle(self) -> Any:
        """Take an idle actor."""
        deadline = time.monotonic() + _NO_ACTOR_SECONDS
        while not self.pool:
            if self._future_to_actor:  # another one works
                deadline = time.monotonic() + _NO_ACTOR_SECONDS
            elif time.monotonic() > deadline:
                raise RuntimeError(f"no Ray actor has worked for {_NO_ACTOR_SECONDS:g} s")
            self._changed.wait(_POLL_SECONDS)
            self._add_started()
        return self.pool.pop()

    def _add_started(self) -> None:
        """Add the replacements that have started."""
        if not self._starting:
            return
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for reference in ready:
            actor = self._starting.pop(reference)
            if _succeeded(reference):
                self.pool.append(actor)

    def _unreachable(self) -> list[Any]:
        """Take the idle actors that do not reply out of the pool."""
        with self._changed:
            idle: list[Any] = self.pool
            self.pool = []
        pings = {actor.__ray_ready__.remote(): actor for actor in idle}
        ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_SECONDS) if pings else ([], [])
        replied = [pings[reference] for reference in ready if _succeeded(reference)]
        with self._changed:
            self.pool.extend(replied)
            self._changed.notify_all()
        return [actor for actor in idle if actor not in replied]

    def _replace(self, actors: list[Any]) -> None:
        """Give actors up, and ask Ray for as many new ones."""
        for actor in actors:
            log(WARNING, "a Ray actor died; Ray starts another one as soon as a node has room for it")
            ray.kill(actor)  # if its node returns, its core is free for another one
            new: Any = self.create_actor_fn()  # type: ignore[no-untyped-call]
            with self._changed:
                self._starting[new.__ray_ready__.remote()] = new


def _succeeded(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError:
        return False
    return True
