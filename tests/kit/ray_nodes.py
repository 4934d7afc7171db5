"""Nodes of Ray, as ``ray start`` starts them."""

import contextlib
import sys
from pathlib import Path

import pytest

from kit.servers import free_port, running, until

RAY = Path(sys.executable).parent / "ray"
_IGNORED = ("FutureWarning:ray", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
#: Marks of tests that start Ray, which leaves files open.
ON_RAY = [pytest.mark.ray, pytest.mark.slow, *(pytest.mark.filterwarnings(f"ignore::{each}") for each in _IGNORED)]


@contextlib.contextmanager
def node(log, *words, **variables):
    """A node, while the context lasts; its process leads a group of all that it starts.

    It is started up to three times: a node ends if its agents take more than 15 s to start, as on a busy machine.
    """
    words += ("--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats", "--object-store-memory=100000000")
    # Nodes on one machine share Ray's default range, and a driver ends if its port is taken.
    words += ("--min-worker-port=0", "--max-worker-port=0")
    for _ in range(3):
        with running([RAY, "start", *words], log, **{**variables, "PYTHONUNBUFFERED": "1"}) as process:
            until(lambda: process.poll() is not None or "Ray runtime started" in log.read_text(), Waiting, log, 240)
            if process.poll() is None:
                yield process
                return
    raise AssertionError(log.read_text())


class Waiting:
    """Stands for a process whose end is no error."""

    @staticmethod
    def poll():
        return None


@contextlib.contextmanager
def head(folder, *words, **variables):
    """The head of a cluster in a folder with a short path, as sockets need; its process and its address."""
    port, log = free_port(), folder / "head.log"
    words = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/ray", *words)
    with node(log, *words, **variables) as process:
        yield process, f"127.0.0.1:{port}"
