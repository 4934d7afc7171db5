"""Flower's SuperNode with a short reaction time: ``python -m coterie.deploy.supernode [OPTIONS] FLAGS...``.

Options are ``--fab-hash HASH``, ``--certificate FILE`` and ``--certificate-key FILE``.

It starts :mod:`coterie.deploy.superexec` instead of Flower's SuperExec. For 15 s after a message, it polls the
SuperLink more often than Flower's SuperNode does. A request of the SuperExec for a task is answered when there is one,
and a reply is sent on as soon as the ClientApp has pushed it; Flower's programs poll each other for both.

The SuperLink delivers a run's app, a FAB, to the SuperNode, which hands it to the ClientApp's process. There it is
installed, and its code runs instead of any package of the same name. ``HASH`` is SHA-256 of the one FAB that is
accepted; messages of any other run are answered with Flower's error INVALID_FAB, before their FAB is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from logging import ERROR
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION, Status
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import start_client_internal as flower
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState

from coterie.deploy.app_bundle import checked_hash, describe
from coterie.deploy.edge import superexec_command
from coterie.deploy.superexec_watch import notice_silence, watch_superexec
from coterie.flower import backoff, check
from coterie.flower.transport import nodes_speak_http
from coterie.site.errors import DeployError

# Seconds between two requests to the SuperLink for a message, at least; and seconds that Flower's SuperNode waits. In
# between, a fifth of the time since the latest message, so that idle nodes do not load the SuperLink.
_MIN_POLL, _FLOWERS_POLL = 0.5, 3.0
# Seconds that a request of the SuperExec waits for a task; the end of the SuperNode waits for this request.
_LONG_POLL = 1.0


class RefusedError(Exception):
    """A run's app is not the pinned one; the message names its hash."""


def pin(expected: str) -> None:
    """Restrict this process's SuperNode to one FAB.

    Args:
        expected: SHA-256 of the FAB, in hexadecimal.
    """
    vars(flower)["_pull_and_store_message"] = guarded(flower._pull_and_store_message, expected)


def guarded(pull: Callable[..., int | None], expected: str) -> Callable[..., int | None]:
    """Wrap Flower's ``pull`` to reply with an error if the run's FAB is not the expected one."""

    def pull_pinned(
        *,
        receive: Callable[[], tuple[Message, Any] | None],
        get_run: Callable[[int], Run],
        get_fab: Callable[[str, int], Fab],
        **others: Any,
    ) -> int | None:
        received: list[Message] = []
        runs: list[Run] = []

        def receive_one() -> tuple[Message, Any] | None:
            if (pair := receive()) is not None:
                received.append(pair[0])
            return pair

        def get_one_run(run_id: int) -> Run:
            runs.append(get_run(run_id))
            return runs[-1]

        def get_pinned(fab_hash: str, run_id: int) -> Fab:
            if fab_hash != expected:
                raise RefusedError(f"its FAB has the hash {fab_hash}")
            fab = get_fab(fab_hash, run_id)
            if (digest := hashlib.sha256(fab.content).hexdigest()) != expected:
                raise RefusedError(f"the SuperLink sent a FAB with the hash {digest} instead")
            app = describe(fab.content)
            if (runs[-1].fab_id, runs[-1].fab_version) != (app.id, app.version):
                # Flower looks for an installed app by the names that the SuperLink gives
                raise RefusedError(f"the SuperLink names it {runs[-1].fab_id} {runs[-1].fab_version}")
            return fab

        try:
            return pull(receive=receive_one, get_run=get_one_run, get_fab=get_pinned, **others)
        except RefusedError as refused:
            (message,) = received
            run_id = message.metadata.run_id
            log(ERROR, "run %s rejected: %s; --fab-hash allows only %s", run_id, refused, expected)
            reply = Message(flower.FAB_VERIFICATION_ERROR, reply_to=message)
            flower._insert_message(reply, others["state"], others["object_store"])
            return run_id

    return pull_pinned


def forget_installed(expected: str) -> None:
    """Remove an installation named like the pinned app: Flower would reuse it, and names hold only 8 hash digits."""
    for folder in (get_flwr_home() / APP_DIR).glob(f"*.{expected[:FAB_HASH_TRUNCATION]}"):
        shutil.rmtree(folder)


def shorten_start() -> None:
    """Have Flower's subprocess be :mod:`coterie.deploy.superexec` instead of flower-superexec, and end with it."""
    watch_superexec(flower, most_ends=1, command=superexec_command())


def shorten_waits() -> None:
    """End the waits for a task and for a reply when there is one; Flower's ``_push_messages`` runs after the latter."""
    from flwr.supernode.servicer.runtime import runtime_handlers

    handlers, main = vars(runtime_handlers), vars(flower)
    task, pushed = threading.Event(), threading.Event()
    notice_silence(runtime_handlers)
    handlers["acquire_task"] = waiting(handlers["acquire_task"], task)
    main["_pull_and_store_message"] = announced(main["_pull_and_store_message"], task)
    for name in ("push_messages", "push_object"):
        handlers[name] = announced(handlers[name], pushed)
    main["time"] = SimpleNamespace(sleep=partial(_wait, pushed))


def waiting(acquire: Callable[..., Any], task: threading.Event) -> Callable[..., Any]:
    """Wrap Flower's ``acquire``: without a task, it waits for the event, at most 1 s, and looks once more."""

    def acquire_when_there(*arguments: Any) -> Any:
        task.clear()
        acquired = acquire(*arguments)
        return acquired if acquired.token or not task.wait(_LONG_POLL) else acquire(*arguments)

    return acquire_when_there


def announced(step: Callable[..., Any], event: threading.Event) -> Callable[..., Any]:
    """Wrap a function of Flower's to set the event when it returns anything but None."""

    @wraps(step)
    def step_and_announce(*arguments: Any, **options: Any) -> Any:
        if (result := step(*arguments, **options)) is not None:
            event.set()
        return result

    return step_and_announce


def _wait(event: threading.Event, seconds: float) -> None:
    event.wait(seconds)
    event.clear()


def shorten_polls() -> None:
    """Have Flower ask for messages more often during a run."""
    vars(flower)["_pull_and_store_message"] = eager(flower._pull_and_store_message)


def eager(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Wrap Flower's ``pull`` to repeat it sooner than Flower does while it returns no message."""
    latest = -math.inf

    def pull_soon(**options: Any) -> int | None:
        nonlocal latest
        while (run_id := pull(**options)) is None:
            pause = max(_MIN_POLL, (time.monotonic() - latest) / 5)
            if pause >= _FLOWERS_POLL:
                return None
            time.sleep(pause)
        latest = time.monotonic()
        return run_id

    return pull_soon


def answer_lost_messages(states: Any = InMemoryNodeState) -> None:
    """Have Flower's node state reply with an error to messages that no ClientApp can answer any more.

    Flower does so for a ClientApp that is killed while it handles a message. It waits for ever after one that was
    killed before it took the message, or that was asked to end.
    """
    finish, expired = states.finish_task, states._on_task_tokens_expired

    def finish_task(state: Any, task_id: int, *details: Any, **named: Any) -> bool:
        if finished := finish(state, task_id, *details, **named):
            _answer_lost(state, [state.task_store[task_id]])
        return bool(finished)

    def on_expired(state: Any, tasks: Sequence[Any]) -> None:
        expired(state, tasks)
        _answer_lost(state, tasks)

    states.finish_task, states._on_task_tokens_expired = finish_task, on_expired


def _answer_lost(state: Any, ended: Sequence[Any]) -> None:
    """Reply with an error to what is left of a run when the last of its ClientApps has ended.

    A message is stored after its task was created, and a reply before its task is finished. Tasks may be locked.
    """
    for run in {task.run_id for task in ended if task.type == TaskType.CLIENT_APP}:
        tasks = [task for task in list(state.task_store.values()) if task.run_id == run]
        if any(task.status.status != Status.FINISHED for task in tasks):
            continue
        with state.lock_msg_store:
            for entry in state.msg_store.values():
                metadata = entry.message.metadata
                if metadata.run_id == run and not metadata.reply_to_message_id and not entry.is_retrieved:
                    entry.is_retrieved = True
                    state.record_message_processing_start(metadata.message_id)
        state._store_error_replies({run}, CLIENT_APP_CRASHED_ERROR)


def present_certificate(certificate: Path, key: Path) -> None:
    """Let this process's connections to a SuperLink present a certificate, for one that requires it.

    Args:
        certificate: PEM file of the certificate.
        key: PEM file of its key.

    Raises:
        OSError: a file cannot be read, or holds no certificate with its key.
    """
    if nodes_speak_http():
        connection: Any = import_module("flwr.supernode.fleet_http_connection")
        ssl.create_default_context().load_cert_chain(certificate, key)

        class PresentingClient(connection.FleetHttpClient):  # type: ignore[misc]
            @classmethod
            def from_server_address(
                cls,
                server_address: str,
                insecure: bool,
                root_certificates: bytes | str | None,
                interceptors: Sequence[Any],
            ) -> Any:
                if insecure or root_certificates is None:
                    return super().from_server_address(server_address, insecure, root_certificates, interceptors)
                given = root_certificates
                text = given.decode("ascii") if isinstance(given, bytes) else Path(given).expanduser().read_text()
                context = ssl.create_default_context(cadata=text)
                context.load_cert_chain(certificate, key)
                return cls(f"https://{server_address}", interceptors=interceptors, verify=context)

        connection.FleetHttpClient = PresentingClient
        return
    import grpc

    create, pair = grpc.ssl_channel_credentials, (key.read_bytes(), certificate.read_bytes())
    grpc.ssl_channel_credentials = lambda root_certificates=None: create(root_certificates, *pair)


def main(arguments: list[str]) -> None:
    """Run the SuperNode; arguments other than those of this module are passed to Flower's."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--fab-hash")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--certificate-key", type=Path)
    options, flags = parser.parse_known_args(arguments)
    try:
        check("deploy.supernode", "flower.backoff")
        if options.certificate is not None and options.certificate_key is not None:
            present_certificate(options.certificate, options.certificate_key)
        if options.fab_hash is not None:
            expected = checked_hash(options.fab_hash)
            pin(expected)
            forget_installed(expected)
    except (DeployError, OSError) as error:
        sys.exit(f"error: {error}")
    shorten_start()
    answer_lost_messages()
    backoff.shorten()
    shorten_waits()
    shorten_polls()
    sys.argv = ["flower-supernode", *flags]
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
