"""Flower's SuperNode restricted to one app: ``python -m coterie.deploy.supernode HASH FLAGS...``.

The SuperLink delivers a run's app, a FAB, to the SuperNode, which hands it to the ClientApp's process. There it is
installed, and its code runs instead of any package of the same name. ``HASH`` is SHA-256 of the one FAB that is
accepted; messages of any other run are answered with Flower's error INVALID_FAB, before their FAB is downloaded.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
import sys
from collections.abc import Callable
from logging import ERROR
from typing import Any

from flwr.app import Message
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION
from flwr.supercore import log
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import start_client_internal as flower

from coterie.deploy.app import checked_hash, describe
from coterie.deploy.errors import DeployError

#: What this module needs of Flower's function that receives a message and the app that it is for.
_NEEDED = {"state", "object_store", "receive", "get_run", "get_fab"}


class RefusedError(Exception):
    """A run's app is not the pinned one; the message names its hash."""


def pin(expected: str) -> None:
    """Restrict this process's SuperNode to one FAB.

    Args:
        expected: SHA-256 of the FAB, in hexadecimal.

    Raises:
        DeployError: this version of Flower is not supported.
    """
    pull = getattr(flower, "_pull_and_store_message", None)
    if pull is None or not set(inspect.signature(pull).parameters) >= _NEEDED:
        raise DeployError("--fab-hash: not supported with this version of flwr; install flwr 1.39")
    flower._pull_and_store_message = guarded(pull, expected)


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
            if (found := hashlib.sha256(fab.content).hexdigest()) != expected:
                raise RefusedError(f"the SuperLink sent a FAB with the hash {found} instead")
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


def main(arguments: list[str]) -> None:
    """Run the SuperNode."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    try:
        expected = checked_hash(arguments[0] if arguments else "")
        pin(expected)
        forget_installed(expected)
    except (DeployError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.argv = ["flower-supernode", *arguments[1:]]
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
