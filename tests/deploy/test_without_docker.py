"""docs/deploy-without-docker.md, command by command: a SuperLink and two sites on this machine."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from commands import lines
from documented import ROOT, commands_of
from servers import free_port, open_port, running, until

BIN = Path(sys.executable).parent


@pytest.fixture
def checkout(tmp_path):
    """What `flwr run .` needs of the repository, and two tables."""
    folder, rng = tmp_path / "coterie", np.random.default_rng(0)
    shutil.copytree(ROOT / "coterie", folder / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "sites").mkdir()
    for site in range(2):
        x = rng.normal(size=(110, 30)).clip(-1, 1)
        table = np.column_stack([x, x[:, 0] > 0])
        names = ",".join([*(f"f{i}" for i in range(30)), "label"])
        np.savetxt(folder / f"sites/client-{site}.csv", table, "%.4g", ",", header=names, comments="")
    return folder


def stays(command):
    """Whether a command runs until it is ended."""
    return command.startswith("coterie superlink") or (
        command.startswith("coterie client") and "--check" not in command
    )


@pytest.mark.slow
def test_every_command_in_order(checkout, tmp_path):
    ports = {name: free_port() for name in ("8000", "9092", "9094", "9095")}
    words = {"fl.example.org": "localhost", "OUT": str(tmp_path / "out"), **{k: str(v) for k, v in ports.items()}}
    variables = {
        "FLWR_HOME": str(checkout / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
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
                ["bash", "-c", command], cwd=checkout, env=ended, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            printed.append(done.stdout + done.stderr)
    assert (tmp_path / "out" / "report.html").exists()
    assert [line["replies"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [
        {"asked": 2, "accepted": 2, "dropped": {}}
    ] * 3
    assert "the certificate matches the ledger" in "".join(printed)
