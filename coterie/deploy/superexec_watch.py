"""A SuperExec whose end is noticed.

Flower starts one beside a SuperLink or a SuperNode, and does not look at it again: without it, a run stays pending, and
a node stays online and answers nothing. That of a SuperLink is started again. A SuperNode ends with its own: it would
wait for ever for the reply to the message that was handled then; started again, it takes the message once more.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import ERROR
from types import SimpleNamespace
from typing import Any

from flwr.supercore import log

#: Seconds between the end of a SuperExec and what follows; nothing follows if its parent ends meanwhile.
PAUSE = 2.0
#: A SuperLink ends when its SuperExec has ended so often within so many seconds.
MOST_ENDS, WITHIN = 5, 60.0
# Seconds without a request for a task, which comes once or twice a second, after which a SuperExec counts as stopped.
_SILENCE = 30.0


def watch_superexec(
    module: Any, most_ends: int = MOST_ENDS, command: Callable[[Sequence[str]], Sequence[str]] = list
) -> None:
    """Have a module of Flower notice the end of its SuperExec, and start it again.

    Args:
        module: Module that calls ``subprocess.Popen``.
        most_ends: Number of ends within a minute with which this process ends, too, with status 1.
        command: Returns the command line to run, given that of Flower.
    """

    def start(words: Sequence[str], start_new_session: bool = False) -> WatchedProcess:
        return WatchedProcess(command(words), most_ends, start_new_session)

    vars(module)["subprocess"] = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)


class WatchedProcess:
    """A process that is started again when it ends, until it is terminated or this process is asked to end.

    Args:
        command: Its words.
        most_ends: See :func:`watch_superexec`.
        start_new_session: Whether signals to this process's group do not reach it.
    """

    def __init__(self, command: Sequence[str], most_ends: int, start_new_session: bool = False) -> None:
        self._command, self._most_ends, self._new_session = command, most_ends, start_new_session
        self._ending = threading.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._end_with(number)
        self._process = self._start()
        threading.Thread(target=self._watch, name="superexec", daemon=True).start()

    def terminate(self) -> None:
        """Ask it to end, for good."""
        self._ending.set()
        self._process.terminate()

    def kill(self) -> None:
        """End it, for good."""
        self._ending.set()
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process that runs now; return its status."""
        return self._process.wait(timeout)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, start_new_session=self._new_session)

    def _end_with(self, number: int) -> None:
        """Let a signal that this process has a handler for end the restarts, too."""
        before = signal.getsignal(number)
        if callable(before):

            def end(*arguments: Any) -> None:
                self._ending.set()
                before(*arguments)

            signal.signal(number, end)

    def _watch(self) -> None:
        ends: deque[float] = deque(maxlen=self._most_ends)
        while True:
            ending = how(self._process.wait())
            if self._ending.wait(PAUSE):
                return
            ends.append(time.monotonic())
            if len(ends) == self._most_ends and ends[-1] - ends[0] < WITHIN:
                log(ERROR, "the SuperExec ended (%s), and so does this process", ending)
                logging.shutdown()
                os._exit(1)
            log(ERROR, "the SuperExec ended (%s) and is started again", ending)
            self._process = self._start()


def notice_silence(handlers: Any) -> None:
    """Log when the SuperExec stops asking a module of handlers for tasks: one that is stopped has not ended."""
    acquire, asked = handlers.acquire_task, threading.Event()

    def acquire_task(*arguments: Any) -> Any:
        asked.set()
        return acquire(*arguments)

    def notice() -> None:
        asked.wait()
        while True:
            asked.clear()
            if not asked.wait(_SILENCE):
                log(ERROR, "the SuperExec has not asked for a task for %g s: is it stopped? Start it again", _SILENCE)
                asked.wait()
                log(ERROR, "the SuperExec asks again")

    handlers.acquire_task = acquire_task
    threading.Thread(target=notice, name="silence", daemon=True).start()


def how(status: int) -> str:
    """Return how a process ended: by which signal, or with which status."""
    if status < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def say_end(what: str, status: int) -> None:
    """Log the end of a process that failed."""
    memory = ": did the machine, or its container, run out of memory?" if status == -signal.SIGKILL else ""
    if status:
        log(ERROR, "%s ended (%s)%s", what, how(status), memory)
