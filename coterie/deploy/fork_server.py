"""The process that forks ClientApps: ``python -m coterie.deploy.fork_server FD``; FD is a pipe of requests.

It imports the libraries of a ClientApp and forks itself once, since the import starts threads, and a fork of a process
with threads is not safe. The child has none: it forks the process of each message (:mod:`coterie.deploy.clientapp`).

The process of a first message reports which app it has installed. The server then forks a template process, which
imports the code of this app, and forks the processes of later messages. They import nothing; one whose message is for
another app forgets the code, installs its own app, and reports it: the template is replaced.

The server ends with the other end of its pipe, and so do the processes of messages. If it receives None, they complete
their messages.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from logging import ERROR
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from flwr.supercore import log

from coterie.deploy import clientapp
from coterie.deploy.clientapp import App, Loaded
from coterie.deploy.superexec_watch import say_end
from coterie.logs import write_once

_FORK = get_context("fork")
_INSTALLED, _LOADED = "installed", "loaded"  # reports


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
                say_end(what, process.exitcode or 0)
            if received := [connection for connection in connections if connection in ready]:
                return received


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
        """Serve until the other end of ``requests`` is closed; then end all processes, unless the last one is None."""
        while True:
            ready = self._apps.wait([self._requests, self._reports])
            if self._reports in ready:
                self._on_report(*json.loads(self._reports.recv_bytes()))
                continue
            try:
                options = self._requests.recv()
            except EOFError:
                break
            if options is None:
                self._retire()
                return  # Python waits for the processes of messages
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


def _import_and_fork(app: App, requests: Connection, report: Connection, unused: Sequence[Connection]) -> None:
    """Import the app's code, report it, and fork the process of each message."""
    for connection in unused:
        connection.close()
    loaded = clientapp.load(app)
    if loaded is None:
        return
    gc.freeze()
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


def main() -> None:
    """Import the libraries, and run the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the SuperExec handles it, and closes its end
    write_once()
    requests = Connection(int(sys.argv[-1]), writable=False)
    clientapp.preload()
    gc.freeze()  # the collector would write to pages that processes share
    server = _FORK.Process(target=lambda: _Server(requests).serve())
    server.start()
    requests.close()
    server.join()
    if (status := server.exitcode or 0) < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
