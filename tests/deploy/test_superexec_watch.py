"""A SuperExec that ends is started again, or ends its parent."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from kit.servers import until

from coterie.deploy import superexec_watch

#: Starts a process that writes its id to a file, and waits for it.
PARENT = """
import sys, time
from types import SimpleNamespace
from coterie.deploy import superexec_watch
superexec_watch.PAUSE = 0.05
flower = SimpleNamespace()
superexec_watch.watch_superexec(flower, int(sys.argv[3]), lambda words: [sys.executable, "-c", *words])
process = flower.subprocess.Popen([sys.argv[1], sys.argv[2]])
time.sleep(60)
"""
LIVES = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); time.sleep(60)"


@pytest.fixture
def parent(tmp_path):
    """Starts a parent whose process runs some code; returns it, and the ids that the process has had so far."""
    started = []

    def ids():
        return list(map(int, (tmp_path / "ids").read_text().split())) if (tmp_path / "ids").exists() else []

    def start(code, most_ends=superexec_watch.MOST_ENDS):
        with (tmp_path / "log").open("w") as log:
            command = [sys.executable, "-c", PARENT, code, tmp_path / "ids", str(most_ends)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return started[-1], ids

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_killed_process_is_started_again_and_named(parent, tmp_path, number):
    process, ids = parent(LIVES)
    until(lambda: len(ids()) == 1, process, tmp_path / "log")
    os.kill(ids()[0], number)
    until(lambda: len(ids()) == 2, process, tmp_path / "log")
    assert f"the SuperExec ended (signal {number.name}) and is started again" in (tmp_path / "log").read_text()
    os.kill(ids()[1], signal.SIGKILL)
    until(lambda: len(ids()) == 3, process, tmp_path / "log")
    os.kill(ids()[2], signal.SIGKILL)


@pytest.mark.parametrize("most_ends", [1, 5])
@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_always_ends_ends_its_parent(parent, tmp_path, status, most_ends):
    process, _ = parent(f"raise SystemExit({status})", most_ends)
    assert process.wait(30) == 1
    log = (tmp_path / "log").read_text()
    assert log.count(f"the SuperExec ended (status {status}) and is started again") == most_ends - 1
    assert f"the SuperExec ended (status {status}), and so does this process" in log


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_process_that_is_to_end_stays_ended(monkeypatch, tmp_path, end):
    monkeypatch.setattr(superexec_watch, "PAUSE", 0.05)
    flower = SimpleNamespace()
    superexec_watch.watch_superexec(flower)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        process = flower.subprocess.Popen([sys.executable, "-c", LIVES, tmp_path / "ids"])
        until(lambda: (tmp_path / "ids").exists(), process._process, tmp_path / "ids")
        getattr(process, end)()
        process.wait(10)
        with pytest.raises(flower.subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", "import time; time.sleep(9)"], timeout=0.5, check=False)
        assert len((tmp_path / "ids").read_text().split()) == 1
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
