"""Processes of a trial on this machine: they end together, whatever ends first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.cli.console import interrupting
from coterie.deploy.trial import TRIAL, Trial, free_ports, processes_of, program
from coterie.site.errors import DeployError

#: Starts a process in a session of its own, which would survive the end of its parent's group.
PARENT = "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"

#: Ignores a request to end.
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def until(happened, seconds=10):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(folder):
    return sorted(processes_of(folder))


def test_all_processes_end_with_what_they_started(tmp_path):
    with Trial(tmp_path) as trial:
        trial.start("parent", [sys.executable, "-c", PARENT], os.environ)
        until(lambda: len(alive(tmp_path)) == 2)
    assert alive(tmp_path) == []


def test_a_process_that_ignores_a_request_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.deploy.trial._SECONDS", 0.3)
    with Trial(tmp_path) as trial:
        trial.start("stubborn", [sys.executable, "-c", STUBBORN], os.environ)
        until(lambda: "up" in trial.log("stubborn").read_text())
    assert alive(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["the guard", "the next supervisor"])
def test_a_killed_supervisor_leaves_nothing(tmp_path, waits):
    """Not even a process that ignores requests to end, or one in a session of its own."""
    code = f"""
import os, pathlib, sys, time
from coterie.deploy import trial
trial._SECONDS = 3
supervisor = trial.Trial(pathlib.Path({str(tmp_path)!r})).__enter__()
supervisor.start("stubborn", [sys.executable, "-c", {STUBBORN!r}], os.environ)
supervisor.start("parent", [sys.executable, "-c", {PARENT!r}], os.environ)
print("up", flush=True)
time.sleep(60)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert supervisor.stdout.readline() == b"up\n"
    until(lambda: len(alive(tmp_path)) == 3 and "up" in (tmp_path / "logs" / "stubborn.log").read_text())
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    if waits:
        until(lambda: alive(tmp_path) == [])
    with Trial(tmp_path):
        assert alive(tmp_path) == []


def test_one_supervisor_for_a_folder(tmp_path):
    with Trial(tmp_path), pytest.raises(DeployError, match="in use by another coterie poc"), Trial(tmp_path):
        pass
    with Trial(tmp_path):
        pass


def test_other_folders_are_left_alone(tmp_path):
    one, other = tmp_path / "a", tmp_path / "ab"
    for folder in (one, other):
        folder.mkdir()
    with Trial(one) as trial:
        trial.start("sleep", ["sleep", "60"], os.environ)
        until(lambda: alive(one))
        with Trial(other):
            pass
        assert len(alive(one)) == 1


def test_a_process_that_ends_is_named_with_its_log(tmp_path):
    with Trial(tmp_path) as trial:
        trial.start("client-0", [sys.executable, "-c", "import sys; print('port taken'); sys.exit(3)"], os.environ)
        with pytest.raises(DeployError, match=r"client-0 ended; .*client-0\.log:\nport taken"):
            trial.wait(lambda: False, 10, "nothing")
        assert trial.ended() == {"client-0": 3}
        trial.forget("client-0")
        assert trial.ended() == {}
        with pytest.raises(DeployError, match="nothing: not within 0 s"):
            trial.wait(lambda: False, 0, "nothing")


def test_a_process_starts_again_after_a_while(tmp_path):
    with Trial(tmp_path) as trial:
        trial.start("client-0", ["sh", "-c", "echo $0 $1; exit 1", "a b", "c"], os.environ)
        for number in (1, 2):
            until(trial.ended)
            assert trial.log("client-0").read_text() == "a b c\n" * number
            trial.start_again("client-0", 1)
            assert trial.ended() == {}


def test_logs_are_private_and_go_on(tmp_path):
    for _ in range(2):
        with Trial(tmp_path) as trial:
            trial.start("echo", ["sh", "-c", f"echo ${TRIAL}"], os.environ)
            until(trial.ended)
    assert trial.log("echo").read_text() == f"{tmp_path}\n" * 2
    assert trial.log("echo").stat().st_mode & 0o777 == 0o600
    assert trial.log("echo").parent.stat().st_mode & 0o777 == 0o700


def test_ports_differ_and_programs_are_those_of_this_python():
    assert len(set(free_ports(30))) == 30
    assert Path(program("flwr")).parent == Path(sys.executable).parent
    assert program("no-such-program") == "no-such-program"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_interrupt(number):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in jobs of the background
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupting(signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert signal.getsignal(number) == before
