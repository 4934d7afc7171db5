"""Flower's SuperLink with a longer database lock timeout, and a database for its user alone.

All threads of a SuperLink write to one SQLite file. Flower gives up after five seconds if the file stays locked, and
the SuperNode whose reply could not be stored drops it. The file holds requests, replies and public keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from coterie.files import PRIVATE

#: Seconds that a SuperLink waits for its locked database.
BUSY_SECONDS = 60


def wait_for_locks(seconds: float = BUSY_SECONDS) -> None:
    """Set the lock timeout of every SQLite connection in this process.

    Flower sets its own timeout when it creates a connection. This one is set on every checkout from the pool.
    """
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    def set_timeout(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    event.listen(Pool, "checkout", set_timeout)


def serve(flags: Sequence[str]) -> None:
    """Run Flower's SuperLink; ``flags`` are those of ``flower-superlink``."""
    from flwr.superlink.cli import flower_superlink

    os.umask(0o077)
    _close_to_others(flags)
    wait_for_locks()
    sys.argv = ["flower-superlink", *flags]
    flower_superlink()


def _close_to_others(flags: Sequence[str]) -> None:
    """Take access to an existing database from other users; new files are private by the umask."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    for name, value in pairwise(words):
        for suffix in ("", "-wal", "-shm") if name == "--database" else ():
            with suppress(OSError):
                os.chmod(value + suffix, PRIVATE)
