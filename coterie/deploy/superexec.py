"""Flower's SuperExec for a client, with a short start of the ClientApp.

Flower's SuperExec starts the program ``flwr-clientapp`` for every message, which imports Flower and PyTorch each time.
This one imports them once, and forks the process of a message (:mod:`coterie.deploy.clientapp`). A message still has a
process of its own, which ends with it: nothing of it is there for the next one, and a crash costs one message.

A SuperExec has threads, and a fork of a process with threads is not safe. A server process therefore does the forking:
it is itself forked before any thread starts, and receives the options of each ClientApp through an anonymous pipe,
which no other user can open. It shares its memory with the SuperExec, and ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from logging import ERROR
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from typing import Any

from flwr.supercore import log
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import ExecutorType, TaskType
from flwr.supercore.superexec import run_superexec as flower
from flwr.supercore.superexec.executor import ExecutionSpec, Executor, LaunchResult, SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates

from coterie.deploy import clientapp

# Seconds between two requests to the SuperNode for a message; Flower's default is 1.
_POLL_SECONDS = "0.5"
_FORK = get_context("fork")


class ForkingExecutor(SubprocessExecutor):
    """Flower's executor, but ClientApps are forked. Create it before any thread starts."""

    def __init__(self) -> None:
        requests, self._requests = _FORK.Pipe(duplex=False)
        self._server = _FORK.Process(target=_fork_on_request, args=(requests, self._requests))
        self._server.start()
        requests.close()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task: a program of Flower's for other apps, and if the server process was killed."""
        if spec.task_type is not TaskType.CLIENT_APP:
            return super().launch(spec)
        options = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,  # on a command line, other users could read it
            "insecure": spec.insecure,
            "certificates": validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            "parent_pid": spec.parent_pid,
            "runtime_dependency_install": spec.runtime_dependency_install,
        }
        try:
            self._requests.send(options)
        except OSError:
            return super().launch(spec)
        return LaunchResult.accepted()

    def close(self) -> None:
        """End the server process and the processes of all messages."""
        self._requests.close()


def _fork_on_request(requests: Connection, other_end: Connection) -> None:
    """Fork a ClientApp for each request, until the other end is closed; then end those that run."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the SuperExec handles it, and closes its end
    while True:
        try:
            options = requests.recv()
        except EOFError:
            break
        try:
            _FORK.Process(target=_run, args=(requests, options)).start()
        except OSError as error:  # out of memory; Flower reports the message as failed after a while
            log(ERROR, "cannot start the ClientApp: %s", error)
    for process in active_children():
        process.terminate()


def _run(requests: Connection, options: dict[str, Any]) -> None:
    requests.close()
    clientapp.run(**options)


def _executor_for(
    forking: Executor, others: Callable[..., Executor], kind: ExecutorType, *arguments: Any, **options: Any
) -> Executor:
    return forking if kind is ExecutorType.SUBPROCESS else others(kind, *arguments, **options)


def main() -> None:
    """Run the SuperExec; the flags in ``sys.argv`` are those of ``flower-superexec``."""
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", _POLL_SECONDS)
    clientapp.preload()
    executor = ForkingExecutor()
    vars(flower)["get_executor"] = partial(_executor_for, executor, vars(flower)["get_executor"])
    sys.argv[0] = "flower-superexec"
    try:
        flower_superexec()
    finally:
        executor.close()


if __name__ == "__main__":
    main()
