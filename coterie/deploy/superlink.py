"""Flower's SuperLink with a database that waits for its turn.

All threads of a SuperLink write to one SQLite file. Flower gives up after five seconds if others keep the file locked;
the SuperNode whose reply could not be stored then drops it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

#: Seconds that a SuperLink waits for its locked database.
BUSY_SECONDS = 60


def wait_for_locks(seconds: float = BUSY_SECONDS) -> None:
    """Let every SQLite connection of this process wait so long while another one holds the lock.

    Flower sets its own time when a connection is made. This is set whenever a connection is taken from its pool.
    """
    from sqlalchemy import event
    from sqlalchemy.pool import Pool

    def set_timeout(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    event.listen(Pool, "checkout", set_timeout)


def serve(flags: Sequence[str]) -> None:
    """Become Flower's SuperLink; ``flags`` are those of ``flower-superlink``."""
    from flwr.superlink.cli import flower_superlink

    wait_for_locks()
    sys.argv = ["flower-superlink", *flags]
    flower_superlink()
