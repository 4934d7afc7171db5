"""Processes of a deployment on one machine: a SuperLink, its clients and their run, which end together.

Every process is started in a session of its own, so that Ctrl-C reaches the supervisor alone, and with a variable that
names the folder of the deployment, so that what an earlier supervisor left is recognized. A guard, a process that does
nothing but wait for the end of the supervisor, ends what a killed supervisor leaves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from coterie.files import open_private, private_folder
from coterie.site.errors import DeployError

#: Environment variable of every process of a trial: the absolute path of its folder.
TRIAL = "COTERIE_TRIAL"
_SECONDS = 15.0  # until a process that was asked to end is killed
_LINES = 15  # of a log, in an error
_PROCESSES = Path("/proc")


class Trial:
    """A deployment in ``folder``, for one supervisor at a time; a context manager that ends all processes.

    Args:
        folder: an existing folder of the user's.

    Raises:
        DeployError: another supervisor uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._sizes: dict[str, int] = {}  # of logs, when their processes were started
        self._held = ExitStack()

    def __enter__(self) -> Trial:
        private_folder(self.folder / "logs")
        with ExitStack() as held:
            lock = held.enter_context(_locked(self.folder))
            end_processes_of(self.folder)
            held.enter_context(_guard(self.folder, lock))
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._held:
            self.stop()

    def log(self, name: str) -> Path:
        """The log of a process; a second start goes on in it."""
        return self.folder / "logs" / f"{name}.log"

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start a process with these environment variables; its output goes to its log."""
        self._started[name] = command, variables
        with open_private(self.log(name), "ab") as log:
            self._sizes[name] = log.tell()
            self._processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**variables, TRIAL: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def output(self, name: str) -> str:
        """What a process has written to its log since it was started."""
        with self.log(name).open("rb") as log:
            log.seek(self._sizes[name])
            return log.read().decode("utf-8", "replace")

    def ended(self) -> dict[str, int]:
        """Exit statuses of the processes that have ended, by name; negative: the signal that ended it."""
        statuses = {name: process.poll() for name, process in self._processes.items()}
        return {name: status for name, status in statuses.items() if status is not None}

    def forget(self, name: str) -> None:
        """Report the end of this process no longer."""
        self._end([self._processes.pop(name)])

    def start_again(self, name: str, seconds: int) -> None:
        """Start a process that has ended once more, after a while."""
        self.forget(name)
        command, variables = self._started[name]
        self.start(name, ["sh", "-c", f'sleep {seconds}; exec "$@"', "sh", *command], variables)
        self._started[name] = command, variables

    def failure(self, name: str) -> DeployError:
        """The error for a process that ended, with the last lines of its log."""
        lines = self.log(name).read_text("utf-8", "replace").splitlines()[-_LINES:]
        return DeployError("\n".join([f"{name} ended; the last lines of {self.log(name)}:", *lines]))

    def wait(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something has happened, while all processes live.

        Raises:
            DeployError: a process ended, or it has not happened in time.
        """
        deadline = time.monotonic() + seconds
        while not happened():
            for name in self.ended():
                raise self.failure(name)
            if time.monotonic() > deadline:
                raise DeployError(f"{what}: not within {seconds:g} s; see {self.folder / 'logs'}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End all processes, the last one first, with all that they started."""
        processes = [self._processes[name] for name in reversed(self._processes)]
        self._processes = {}
        self._end(processes)
        end_processes_of(self.folder)

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def processes_of(folder: Path) -> Iterator[int]:
    """Ids of the living processes of a trial, where the system has /proc; the processes are this user's."""
    wanted = f"{TRIAL}={folder}".encode()
    for entry in _PROCESSES.iterdir() if _PROCESSES.is_dir() else ():
        with suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def end_processes_of(folder: Path) -> None:
    """End all processes of a trial: they are asked to end, and killed if they have not after some seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _SECONDS / 3
        asked: set[int] = set()
        while (living := set(processes_of(folder))) and time.monotonic() < deadline:
            for process in living - asked:  # also those that others start in their last moments
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            asked |= living
            time.sleep(0.1)


def free_ports(number: int) -> list[int]:
    """Different ports of this machine on which nothing listens."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def listens(port: int) -> bool:
    """Whether something accepts connections on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program(name: str) -> str:
    """A program that was installed with this Python, such as ``flwr``."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


@contextmanager
def _locked(folder: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a trial.

    The guard of a killed supervisor holds its lock until it has ended the processes: that is waited for.

    Raises:
        DeployError: another supervisor holds it.
    """
    with open_private(folder / "logs" / "lock", "ab") as lock:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if _supervised(folder) or time.monotonic() > deadline:
                    raise DeployError(
                        f"{folder}: is in use by another coterie poc: end it with Ctrl-C, or choose another folder"
                    ) from None
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        yield lock


def _supervised(folder: Path) -> bool:
    """Whether the supervisor that holds the lock lives."""
    try:
        os.kill(int((folder / "logs" / "lock").read_text()), 0)
    except (ValueError, OSError):  # another user's process is not the supervisor
        return False
    return True


@contextmanager
def _guard(folder: Path, lock: IO[bytes]) -> Iterator[None]:
    """Run a guard, which holds the lock as well and reads a pipe that ends with this process."""
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "coterie.deploy.trial", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock.fileno()],
        start_new_session=True,
    )
    with guard:  # closes the pipe, and waits
        yield


if __name__ == "__main__":
    sys.stdin.read()
    end_processes_of(Path(sys.argv[1]))
