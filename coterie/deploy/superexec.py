"""Flower's SuperExec, which says how the processes of apps end; for a client, with a short start of the ClientApp.

With ``--server``, it starts Flower's programs alone.

Flower's SuperExec starts the program ``flwr-clientapp`` for every message, which imports Flower and PyTorch each time.
This one imports them once, and forks the process of a message (:mod:`coterie.deploy.clientapp`). A message still has a
process of its own, which ends with it: nothing of it is there for the next one, and a crash costs one message.

A SuperExec has threads, and a fork of a process with threads is not safe. A server process therefore does the forking:
it is itself forked before any thread starts, and receives the options of each ClientApp through an anonymous pipe,
which no other user can open. It shares its memory with the SuperExec, and ends with it.

The process of a first message reports which app it has installed. The server then forks a template process, which
imports the code of this app, and forks the processes of later messages. They import nothing; one whose message is for
another app forgets the code, installs its own app, and reports it: the template is replaced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from flwr.supercore import log
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

from coterie.deploy import clientapp
from coterie.deploy.clientapp import App, Loaded
from coterie.deploy.superexec_watch import how
from coterie.flower import check
from coterie.logs import write_once
from coterie.site.errors import DeployError

#: Flag of a SuperExec beside a SuperLink.
SERVER = "--server"
# Seconds between two requests to the SuperNode for a message, at least; Flower waits 1 s after each. The SuperNode of
# `coterie client` answers when there is one, or after 1 s.
_POLL_SECONDS = 0.5
_FORK = get_context("fork")
_INSTALLED, _LOADED = "installed", "loaded"  # reports


class ForkingExecutor(SubprocessExecutor):
    """Flower's executor, but ClientApps are forked. Create it before any thread starts."""

    def __init__(self) -> None:
        requests, self._requests = _FORK.Pipe(duplex=False)
        self._server = _FORK.Process(target=_serve, args=(requests, self._requests))
        self._server.start()
        requests.close()
        threading.Thread(target=self._wait_for_server, daemon=True).start()

    def _wait_for_server(self) -> None:
        self._server.join()
        _say_end("the process that forks ClientApps", self._server.exitcode or 0)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of a task: a program of Flower's for other apps, and if the server process has ended."""
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


class _ClientApps:
    """Processes of messages, forked by this process."""

    def __init__(self, loaded: Loaded | None, report: Connection, unused: Sequence[Connection]) -> None:
        self._given = loaded, report, unused
        self._processes: dict[int, tuple[str, BaseProcess]] = {}  # what they are, by their sentinels

    def fork(self, options: dict[str, Any]) -> None:
        """Start the process of a message."""
        process = _FORK.Process(target=_run, args=(options, *self._given))
        try:
            process.start()
        except OSError as error:  # out of memory; Flower reports the message as failed after a while
            log(ERROR, "cannot start the ClientApp: %s", error)
            return
        self.watch("the ClientApp of a message", process)

    def watch(self, what: str, process: BaseProcess) -> None:
        """Log the end of a process that was started, if it fails."""
        self._processes[process.sentinel] = what, process

    def wait(self, connections: Sequence[Connection]) -> list[Connection]:
        """Wait until there is something to receive; meanwhile, log how processes end that fail."""
        while True:
            ready = wait([*connections, *self._processes])
            for what, process in [self._processes.pop(each) for each in ready if isinstance(each, int)]:
                process.join()
                _say_end(what, process.exitcode or 0)
            if received := [connection for connection in connections if connection in ready]:
                return received


def _say_end(what: str, status: int) -> None:
    """Log the end of a process that failed."""
    memory = ": did the machine, or its container, run out of memory?" if status == -signal.SIGKILL else ""
    if status:
        log(ERROR, "%s ended (%s)%s", what, how(status), memory)


def _start(words: Sequence[str], **options: Any) -> None:
    """Start a program of Flower's, and log its end if it fails."""
    process = subprocess.Popen(words, **options)
    threading.Thread(target=lambda: _say_end(words[0], process.wait()), daemon=True).start()


class _Server:
    """Forks the process of each message, or has the template of the current app do it."""

    def __init__(self, requests: Connection) -> None:
        self._requests = requests
        self._reports, self._report = _FORK.Pipe(duplex=False)  # by ClientApps and templates, of apps
        self._app: App | None = None
        self._template: Connection | None = None  # requests for the template of this app
        self._ready = False  # whether it has imported the code
        self._importer: BaseProcess | None = None
        self._apps = _ClientApps(None, self._report, [self._requests, self._reports])

    def serve(self) -> None:
        """Serve until the other end of ``requests`` is closed; then end all processes."""
        while True:
            ready = self._apps.wait([self._requests, self._reports])
            if self._reports in ready:
                self._on_report(*json.loads(self._reports.recv_bytes()))
                continue
            try:
                options = self._requests.recv()
            except EOFError:
                break
            self._launch(options)
        if self._template is not None:
            self._template.close()
        for process in active_children():
            if process is not self._importer:  # which ends its own children
                process.terminate()

    def _launch(self, options: dict[str, Any]) -> None:
        if self._template is not None and self._ready:
            try:
                self._template.send(options)
                return
            except OSError:  # it was killed
                self._retire()
        self._apps.fork(options)

    def _on_report(self, event: str, fab_hash: str, folder: str) -> None:
        app = App(fab_hash, folder)
        if event == _LOADED:
            self._ready |= app == self._app
        elif app != self._app:
            self._retire()
            requests, self._template = _FORK.Pipe(duplex=False)
            unused = [self._requests, self._reports, self._template]
            self._importer = _FORK.Process(target=_import_and_fork, args=(app, requests, self._report, unused))
            self._importer.start()
            self._apps.watch("the process that has imported the app", self._importer)
            requests.close()
            self._app = app

    def _retire(self) -> None:
        """Let the template end when its messages have."""
        if self._template is not None:
            with contextlib.suppress(OSError):
                self._template.send(None)
            self._template.close()
        self._app, self._template, self._importer, self._ready = None, None, None, False


def _serve(requests: Connection, other_end: Connection) -> None:
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the SuperExec handles it, and closes its end
    _Server(requests).serve()


def _import_and_fork(app: App, requests: Connection, report: Connection, unused: Sequence[Connection]) -> None:
    """Import the app's code, report it, and fork the process of each message."""
    for connection in unused:
        connection.close()
    loaded = clientapp.load(app)
    if loaded is None:
        return
    _send(report, _LOADED, app)
    apps = _ClientApps(loaded, report, [requests])
    while apps.wait([requests]):
        try:
            options = requests.recv()
        except EOFError:
            break
        if options is None:
            return  # Python waits for the processes of messages
        apps.fork(options)
    for process in active_children():
        process.terminate()


def _run(options: dict[str, Any], loaded: Loaded | None, report: Connection, unused: Sequence[Connection]) -> None:
    for connection in unused:
        connection.close()

    def installed(app: App | None) -> None:
        if app is not None:
            _send(report, _INSTALLED, app)
        report.close()

    clientapp.run(options, loaded, installed)


def _send(report: Connection, event: str, app: App) -> None:
    """Report as JSON: the code of an app runs in processes that hold this connection, and a pickle could be code."""
    report.send_bytes(json.dumps([event, app.fab_hash, app.folder]).encode())


def _executor_for(
    forking: Executor, others: Callable[..., Executor], executor_type: ExecutorType, *arguments: Any, **options: Any
) -> Executor:
    return forking if executor_type is ExecutorType.SUBPROCESS else others(executor_type, *arguments, **options)


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
    with contextlib.ExitStack() as stack:
        if not serves:
            os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(_POLL_SECONDS))
            vars(flower)["time"] = SimpleNamespace(sleep=Pace())
            if not {"--help", "--version"} & set(sys.argv):  # which answer at once
                clientapp.preload()
            executor = stack.enter_context(contextlib.closing(ForkingExecutor()))
            vars(flower)["get_executor"] = partial(_executor_for, executor, vars(flower)["get_executor"])
        vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)
        flower_superexec()


if __name__ == "__main__":
    main()
