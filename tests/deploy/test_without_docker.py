"""docs/deploy-without-docker.md, command by command: a SuperLink and two sites on this machine."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.commands import lines
from kit.documented import ROOT, commands_of
from kit.servers import free_port, open_port, running, until

BIN = Path(sys.executable).parent


@pytest.fixture
def checkout(tmp_path):
    """What the commands need of the repository."""
    folder = tmp_path / "coterie"
    for name in ("coterie", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def stays(command):
    """Whether a command runs until it is ended."""
    return " coterie superlink" in command or (command.startswith("coterie client") and "--check" not in command)


@pytest.mark.slow
def test_every_command_in_order(checkout, tmp_path):
    ports = {name: free_port() for name in ("8000", "9092", "9094", "9095")}
    schema = checkout / "examples" / "hospital-csv" / "schema.toml"
    words = {"fl.example.org": "localhost", "OUT": str(tmp_path / "out"), "SCHEMA": str(schema)}
    words |= {**{k: str(v) for k, v in ports.items()}}
    variables = {
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path / ".flwr-coterie"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "",  # as in a new shell: nothing is installed all the same
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    printed, ended = [], os.environ | variables
    with ExitStack() as stack:
        for number, command in enumerate(commands_of(ROOT / "docs" / "deploy-without-docker.md")):
            for old, new in words.items():
                command = command.replace(old, new)
            if stays(command):
                log = tmp_path / f"{number}.log"
                process = stack.enter_context(running(["bash", "-c", command], log, cwd=checkout, **variables))
                port = next(port for name, port in ports.items() if f"--port {port}" in command)
                until(lambda port=port: open_port(port), process, log)
                continue
            done = subprocess.run(
                ["bash", "-c", command], cwd=checkout, env=ended, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            printed.append(done.stdout + done.stderr)
        again = ["flwr", "run", ".", "fl", "--run-config", "run.toml"]  # what the first run left is no part of the app
        done = subprocess.run(again, cwd=checkout, env=ended, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "report.html").exists()
    assert [line["replies"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [
        {"asked": 2, "accepted": 2, "dropped": {}}
    ] * 10
    assert "the certificate matches the ledger" in "".join(printed)
