"""Worker processes of the local engine, with one thread each.

The content of a message is written once to a file in memory or on disk, and every worker reads it once.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flwr.app import RecordDict

from coterie.flower.generators import reseed_generators
from coterie.logs import ProgressCallback, colour_terminals_only, drain_progress, set_progress_sink

T = TypeVar("T")

# Seconds between polls for progress reports of workers.
_POLL = 0.2
# Trainings of clients from which workers save more time than their start takes.
_FEW = 500
# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def workers_for(trainings: float, device: str, cores: int) -> int:
    """Return the number of worker processes: 0 for short runs, a GPU or one core, otherwise one per core.

    Args:
        trainings: expected number of times that a client trains in the run.
        device: on which clients train; "auto" counts as "cpu".
        cores: of this machine.
    """
    return 0 if trainings < _FEW or device == "cuda" or cores < 2 else cores


def start_server(preload: str = "coterie.client.answer") -> ForkServerContext:
    """Start the process from which workers are forked, unless it runs; it imports `preload` once for all of them.

    Both ignore Ctrl-C: this process stops them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    resource_tracker.ensure_running()  # the server starts it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by what starts here
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class Pool(Protocol):
    """Workers of the local engine.

    Attributes:
        count: number of calls that are computed at a time.
    """

    count: int

    def submit(self, call: Callable[..., T], content: RecordDict, *arguments: Any) -> Future[T]:
        """Return the future result of ``call(content, *arguments)`` in a worker."""

    def result(self, future: Future[T]) -> T:
        """Wait for a result.

        Raises:
            BrokenProcessPool: a worker died.
        """

    def forget(self) -> None:
        """Delete the contents of all messages."""

    def close(self) -> None:
        """Stop the workers, also in the middle of a call."""


class Workers(Pool):
    """A pool of processes, which is started anew after one has died.

    Args:
        count: number of processes.
        progress: called with their progress reports.
    """

    def __init__(self, count: int, progress: ProgressCallback) -> None:
        self.count, self._progress = count, progress
        self._folder = tempfile.TemporaryDirectory(prefix="coterie-")
        self._contents: dict[int, tuple[RecordDict, Path]] = {}
        self._numbers = itertools.count()
        self._start()

    def _start(self) -> None:
        context = start_server()
        self._reports = context.Queue()
        reader, self._open = context.Pipe(duplex=False)
        shared = self._reports, context.Barrier(self.count), reader
        self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_prepare, initargs=shared)
        # All processes start now: if one dies while another one is started, Python's pool waits for the latter forever.
        for _ in range(self.count):
            self._pool.submit(os.getpid)
        # A pool waits forever for the rest of a result whose writer has died, as long as any process could write it.
        results: Any = self._pool._result_queue
        results._writer.close()
        self._processes = list(self._pool._processes.values())

    def submit(self, call: Callable[..., T], content: RecordDict, *arguments: Any) -> Future[T]:
        """Return the future result of ``call(content, *arguments)`` in a worker."""
        if id(content) not in self._contents:  # kept, so that no other object takes its id
            path = Path(self._folder.name, str(next(self._numbers)))
            with path.open("wb") as file:
                pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
            self._contents[id(content)] = content, path
        path = self._contents[id(content)][1]
        try:
            return self._pool.submit(_call, call, path, *arguments)
        except BrokenProcessPool:
            self._pool.shutdown()
            self._start()
            return self._pool.submit(_call, call, path, *arguments)

    def result(self, future: Future[T]) -> T:
        """Wait for a result, and pass on progress reports.

        Raises:
            BrokenProcessPool: a worker died.
        """
        while not wait([future], _POLL).done:
            if not all(process.is_alive() for process in self._processes):
                self._open.close()  # the others exit
            for report in drain_progress(self._reports):
                self._progress(report)
        return future.result()

    def forget(self) -> None:
        """Delete the published contents."""
        for _, path in self._contents.values():
            path.unlink()
        self._contents.clear()

    def close(self) -> None:
        """Stop the processes, also in the middle of a call."""
        self._open.close()
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


def _prepare(reports: Any, barrier: threading.Barrier, pool: Connection) -> None:
    import torch

    threading.Thread(target=exit_with_parent, args=(pool,), daemon=True).start()
    reseed_generators()
    barrier.wait()
    torch.set_num_threads(1)
    keep_freed_memory()
    gc.freeze()  # the libraries' objects stay in memory that all workers share
    reports.cancel_join_thread()  # the reader may be gone
    set_progress_sink(reports.put)
    colour_terminals_only()


def exit_with_parent(*others: Connection) -> None:
    """Exit with the parent process, or when it closes a pipe; the workers of a killed process would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel, *others])
    os._exit(1)


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of tensors of up to 32 MB; new pages cost up to a third of the time of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in other C libraries
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**28)


@lru_cache(maxsize=1)
def _content(path: Path) -> RecordDict:
    with path.open("rb") as file:
        content: RecordDict = pickle.load(file)
    return content


def _call(call: Callable[..., T], path: Path, *arguments: Any) -> T:
    return call(_content(path), *arguments)
