"""Runs competitors as processes, and measures seconds, CPU seconds and memory of a process with its descendants."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


class Tree:
    """A process and its descendants, as /proc shows them."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu: dict[int, float] = {}  # by process, also of those that have ended

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes since they started."""
        for pid, stat in self._stats().items():
            self._cpu[pid] = sum(map(int, stat[11:13])) / _TICK
        return sum(self._cpu.values())

    def pss_mb(self) -> float:
        """Return the sum of the proportional set sizes, which count shared pages once."""
        total = 0
        for pid in self._stats():
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        return total / 1024

    def _stats(self) -> dict[int, list[str]]:
        """Return the fields after the name in /proc/PID/stat, of the root and its descendants."""
        stats: dict[int, list[str]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, IndexError):
                    stats[int(entry.name)] = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        found: dict[int, list[str]] = {}
        level = [self._root]
        while level:
            found |= {pid: stats[pid] for pid in level if pid in stats}
            level = [pid for pid, stat in stats.items() if int(stat[1]) in level and pid not in found]
        return found


class Watcher(threading.Thread):
    """Notes the peak of the memory of a process tree, and ends its process group above a limit."""

    def __init__(self, root: int, limit_mb: float, seconds: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self._root, self._limit, self._seconds, self._done = root, limit_mb, seconds, threading.Event()

    def run(self) -> None:
        tree = Tree(self._root)
        while not self._done.wait(self._seconds):
            self.peak = max(self.peak, tree.pss_mb())
            if self.peak > self._limit:
                _end(self._root)

    def stop(self) -> None:
        self._done.set()
        self.join()


@dataclass(frozen=True)
class Measured:
    """One run of a competitor.

    Attributes:
        seconds: of each round after the first one, which starts workers and warms caches up.
        first: seconds from the start of the process to the end of the first round.
        cpu_seconds: per round, after the first one.
        peak_pss_mb: largest sum of proportional set sizes.
        skipped: why it did not run; empty if it did.
    """

    seconds: tuple[float, ...] = ()
    first: float = 0.0
    cpu_seconds: float = 0.0
    peak_pss_mb: float = 0.0
    skipped: str = ""


def measure(
    command: Sequence[str], variables: dict[str, str], limit: float, *, least: int = 2, limit_mb: float = math.inf
) -> Measured:
    """Run a command that prints one line of JSON at the end of each round.

    Args:
        command: program and arguments.
        variables: added to the environment.
        limit: seconds after which it is ended.
        least: rounds that it must complete.
        limit_mb: memory above which it is ended.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            cwd=tempfile.gettempdir(),  # worker processes look for packages in it first
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        tree = Tree(process.pid)
        watcher, killer = Watcher(process.pid, limit_mb), threading.Timer(limit, _end, [process.pid])
        watcher.start()
        killer.start()
        times, cpu, skipped = [], [], ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                with suppress(ValueError, TypeError, KeyError):
                    message = json.loads(line)
                    skipped = message.get("skipped", skipped)
                    times += [time.perf_counter()] if message.get("round") else []
                    cpu += [tree.cpu_seconds()] if message.get("round") else []
            status = process.wait()
        finally:
            killer.cancel()
            watcher.stop()
            _end(process.pid)
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:]
    if watcher.peak > limit_mb:
        skipped = f"ended above {limit_mb:g} MB"
    if skipped or status or len(times) < least:
        skipped = skipped or f"failed with status {status}: {' '.join(last)[:300]}"
        return Measured(peak_pss_mb=watcher.peak, skipped=skipped)
    seconds = tuple(after - before for before, after in itertools.pairwise(times))
    cpu_seconds = (cpu[-1] - cpu[0]) / max(len(seconds), 1)
    return Measured(seconds, times[0] - began, cpu_seconds, watcher.peak)


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
