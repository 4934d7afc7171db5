"""Progress reports of long-running tasks: to the log, or to the process that runs many clients on one machine."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging import INFO
from typing import Any

from flwr.common.logger import log


def _to_log(text: str) -> None:
    log(INFO, text)


_listener: Callable[[str], None] = _to_log


def tell(text: str) -> None:
    """Report progress."""
    _listener(text)


def heard(said: Any) -> Iterator[str]:
    """Drain the progress reports in this queue."""
    with suppress(queue.Empty):
        while True:
            yield said.get_nowait()


def tell_to(listener: Callable[[str], None] | None) -> None:
    """Report progress of this process to ``listener``; None: to the log."""
    global _listener
    _listener = listener or _to_log
