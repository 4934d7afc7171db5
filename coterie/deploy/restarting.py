"""A SuperExec that is started again when it ends.

Flower starts one beside a SuperLink or a SuperNode, and does not look at it again: without it, a node stays online and
answers nothing, and a run stays pending.
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

#: Seconds between the end of a SuperExec and its next start; if its parent ends meanwhile, it is not started again.
PAUSE = 2.0
#: A parent ends when its SuperExec has ended so often within so many seconds.
MOST_ENDS, WITHIN = 5, 60.0


def restart_superexec(module: Any, command: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
    """Have a module of Flower start its SuperExec again when it ends.

    Args:
        module: Module that calls ``subprocess.Popen``.
        command: The words of the SuperExec in place of those of Flower.
    """

    def start(words: Sequence[str], **options: Any) -> RestartedProcess:
        return RestartedProcess(command(words), **options)

    vars(module)["subprocess"] = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)


class RestartedProcess:
    """A process that is started again when it ends, until it is terminated or this process is asked to end.

    Args:
        command: Its words.
        options: Those of :class:`subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._command, self._options = command, options
        self._ending = threading.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._end_with(number)
        self._process = subprocess.Popen(command, **options)
        threading.Thread(target=self._restart, name="superexec", daemon=True).start()

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

    def _end_with(self, number: int) -> None:
        """Let a signal that this process has a handler for end the restarts, too."""
        before = signal.getsignal(number)
        if callable(before):

            def end(*arguments: Any) -> None:
                self._ending.set()
                before(*arguments)

            signal.signal(number, end)

    def _restart(self) -> None:
        ends: deque[float] = deque(maxlen=MOST_ENDS)
        while True:
            status = self._process.wait()
            if self._ending.wait(PAUSE):
                return
            ends.append(time.monotonic())
            log(ERROR, "the SuperExec ended (%s) and is started again", _how(status))
            if len(ends) == MOST_ENDS and ends[-1] - ends[0] < WITHIN:
                log(ERROR, "the SuperExec ended %s times within %g s: see the lines above", MOST_ENDS, WITHIN)
                logging.shutdown()
                os._exit(1)
            self._process = subprocess.Popen(self._command, **self._options)


def _how(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"status {status}"
