"""Flower's SuperExec, which says how the processes of apps end; for a client, with a short start of the ClientApp.

With ``--server``, it starts Flower's programs alone.

Flower's SuperExec starts the program ``flwr-clientapp`` for every message, which imports Flower and PyTorch each time.
With this one, they are imported once, and the process of a message is forked (:mod:`coterie.deploy.clientapp`). A
message still has a process of its own, which ends with it: nothing of it is there for the next one, and a crash costs
one message.

A server process does so (:mod:`coterie.deploy.fork_server`). It receives the options of each ClientApp through an
anonymous pipe, which no other user can open. It ends with the SuperExec, and when it has had no message for a while:
what it has imported takes most of the memory of a client.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import ExecutorType, TaskType
from flwr.supercore.superexec import run_superexec as flower
from flwr.supercore.superexec.executor import (
    ExecutionSpec,
    Executor,
    LaunchResult,
    SubprocessExecutor,
    subprocess_executor,
)
from flwr.supercore.tls import validate_and_resolve_root_certificates

from coterie.deploy.superexec_watch import say_end
from coterie.flower import check
from coterie.logs import write_once
from coterie.site.errors import DeployError

#: Flag of a SuperExec beside a SuperLink.
SERVER = "--server"
# Seconds between two requests to the SuperNode for a message, at least; Flower waits 1 s after each. The SuperNode of
# `coterie client` answers when there is one, or after 1 s.
_POLL_SECONDS = 0.5
#: Command of the process that forks ClientApps; the descriptor of its requests follows.
FORK_SERVER = (sys.executable, "-P", "-m", "coterie.deploy.fork_server")
#: Seconds without a message after which the libraries of ClientApps are given up, until there is one.
IDLE_SECONDS = 300.0


class ForkingExecutor(SubprocessExecutor):
    """Flower's executor, but a server process forks ClientApps."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        requests, self._requests = Pipe(duplex=False)
        words = [*FORK_SERVER, str(requests.fileno())]
        self._server: subprocess.Popen[bytes] | None = subprocess.Popen(words, pass_fds=[requests.fileno()])
        self._latest = time.monotonic()
        requests.close()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task: a program of Flower's for other apps, and if the server process ends now."""
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
        self.reconcile()
        if self._server is None:
            self._start()
        self._latest = time.monotonic()
        try:
            self._requests.send(options)
        except OSError:
            return super().launch(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Log the end of the server process, or let one end that has not been needed for a while; often called."""
        if self._server is None:
            return
        if (status := self._server.poll()) is not None:
            say_end("the process that forks ClientApps", status)
        elif time.monotonic() - self._latest < IDLE_SECONDS:
            return
        else:
            with contextlib.suppress(OSError):
                self._requests.send(None)
        self.close()

    def close(self) -> None:
        """End the server process and the processes of all messages, but of a server that was not needed."""
        self._requests.close()
        self._server = None


def _start(words: Sequence[str], **options: Any) -> None:
    """Start a program of Flower's, and log its end if it fails."""
    process = subprocess.Popen(words, **options)
    threading.Thread(target=lambda: say_end(words[0], process.wait()), daemon=True).start()


def _executor_for(
    others: Callable[..., Executor], executor_type: ExecutorType, *arguments: Any, **options: Any
) -> Executor:
    if executor_type is ExecutorType.SUBPROCESS:
        return ForkingExecutor()
    return others(executor_type, *arguments, **options)


class Pace:
    """Sleeps until the given seconds have passed since it last returned."""

    def __init__(self) -> None:
        self._latest = -math.inf

    def __call__(self, seconds: float) -> None:
        """Sleep for what is left of ``seconds``."""
        time.sleep(max(0.0, self._latest + seconds - time.monotonic()))
        self._latest = time.monotonic()


def main() -> None:
    """Run the SuperExec; the flags in ``sys.argv`` are those of ``flower-superexec``."""
    try:
        check("deploy.superexec", "deploy.clientapp")
    except DeployError as error:
        sys.exit(f"error: {error}")
    write_once()
    serves, sys.argv = SERVER in sys.argv, ["flower-superexec", *(word for word in sys.argv[1:] if word != SERVER)]
    if not serves:
        os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(_POLL_SECONDS))
        vars(flower)["time"] = SimpleNamespace(sleep=Pace())
        vars(flower)["get_executor"] = partial(_executor_for, vars(flower)["get_executor"])
    vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)
    flower_superexec()


if __name__ == "__main__":
    main()
