"""Flower's SuperExec for a client, with a short start of the ClientApp.

Flower's SuperExec starts the program ``flwr-clientapp`` for every message, which imports Flower and PyTorch each time.
This one forks the process of a message from a server process that imported them once (:mod:`coterie.deploy.clientapp`).
A message still has a process of its own, which ends with it: nothing of it is there for the next one, and a crash costs
one message.

The server process is that of :mod:`multiprocessing.forkserver`. Its socket has mode 0600 in a folder of mode 0700. It
ends with this process and those of its messages, and is started again if it was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from flwr.supercore.constant import ExecutorType, TaskType
from flwr.supercore.superexec import run_superexec as flower
from flwr.supercore.superexec.executor import ExecutionSpec, Executor, LaunchResult, SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates

from coterie.deploy.clientapp import LIBRARIES, run

#: Runs `serve`; flags follow. Processes forked from the server process do not import a program given by -c again.
COMMAND = (sys.executable, "-P", "-c", "from coterie.deploy.superexec import serve; serve()")
# Seconds between two requests to the SuperNode for a message; Flower's default is 1.
_POLL_SECONDS = "0.25"


class ForkingExecutor(SubprocessExecutor):
    """Flower's executor that forks ClientApps, and starts programs for other tasks."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["coterie.deploy.clientapp", *LIBRARIES])
        self._processes: list[ForkServerProcess] = []
        forkserver.ensure_running()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task. Its token is not on a command line, where other users could read it."""
        if spec.task_type is not TaskType.CLIENT_APP:
            return super().launch(spec)
        process = self._context.Process(
            target=run,
            kwargs={
                "runtime_api_address": spec.runtime_api_address,
                "token": spec.token,
                "insecure": spec.insecure,
                "certificates": validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
                "parent_pid": spec.parent_pid,
                "runtime_dependency_install": spec.runtime_dependency_install,
            },
        )
        try:
            process.start()
        except (OSError, EOFError) as error:  # the server process was killed, or could not fork
            return LaunchResult.failed(f"cannot start the ClientApp: {error!r}")
        self._processes = [each for each in (*self._processes, process) if each.is_alive()]
        return LaunchResult.accepted()

    def close(self) -> None:
        """End the processes of all messages."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()


def _executor_for(original: Callable[..., Executor], kind: ExecutorType, *others: Any, **named: Any) -> Executor:
    return ForkingExecutor() if kind is ExecutorType.SUBPROCESS else original(kind, *others, **named)


def serve(flags: Sequence[str] | None = None) -> None:
    """Run Flower's SuperExec; ``flags`` are those of ``flower-superexec``, by default those of this program."""
    from flwr.supercore.cli.flower_superexec import flower_superexec

    flower.get_executor = partial(_executor_for, flower.get_executor)
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", _POLL_SECONDS)
    sys.argv = ["flower-superexec", *(sys.argv[1:] if flags is None else flags)]
    flower_superexec()
