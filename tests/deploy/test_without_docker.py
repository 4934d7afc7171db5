"""docs/deploy-without-docker.md, command by command: a SuperLink and two sites on this machine."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.commands import lines
from kit.documented import ROOT, commands_of
from kit.servers import free_port, running, until

from coterie.deploy.certificates import renew_node
from coterie.deploy.commands.server import READY
from coterie.deploy.status import query_status

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
    return "coterie server" in command or (command.startswith("coterie client") and "--check" not in command)


@pytest.mark.slow
def test_every_command_in_order(checkout, tmp_path, monkeypatch):
    """Ports are others, and the passphrases are those that the server prints; then a node gets a new key."""
    control, fleet, *runtime = (free_port() for _ in range(4))
    schema, home = checkout / "examples" / "hospital-csv" / "schema.toml", tmp_path / "fl" / "flwr"
    words = {"fl.example.org": "localhost", "OUT": str(tmp_path / "out"), "SCHEMA": str(schema)}
    words |= {"2 --host": f"2 --port {fleet} --control-port {control} --host"}
    words |= {"coterie client": f"coterie client --port {runtime[0]}", "--port 9095": f"--port {runtime[1]}"}
    variables = {
        "HOME": str(tmp_path),
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "",  # as in a new shell: nothing is installed all the same
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    printed, ended, server = [], os.environ | variables, None
    with ExitStack() as stack:
        for number, command in enumerate(commands_of(ROOT / "docs" / "deploy-without-docker.md")):
            for old, new in words.items():
                command = command.replace(old, new)
            if site := re.search(r"node-\d.coterie", command) if command.startswith("coterie client") else None:
                variables["COTERIE_PASSPHRASE"] = re.search(rf"{site[0]}  passphrase (\S+)", server.read_text())[1]
            if stays(command):
                log = tmp_path / f"{number}.log"
                server, said = server or log, READY if server is None else "SuperNode ID"
                process = stack.enter_context(running(["bash", "-c", command], log, cwd=checkout, **variables))
                until(lambda log=log, said=said: said in log.read_text(), process, log)
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=checkout,
                env=ended | variables,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            printed.append(done.stdout + done.stderr)
        again = ["flwr", "run", ".", "coterie", "--run-config", "run.toml"]  # the first run left no part of the app
        done = subprocess.run(again, cwd=checkout, env=ended, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        monkeypatch.setenv("FLWR_HOME", str(home))
        before = {node.name: node.id for node in query_status().nodes}
        renew_node(tmp_path / "fl" / "pki", 1)
        until(lambda: server.read_text().count(READY) == 2, process, server)
        nodes = {node.name: node for node in query_status().nodes}
    assert (tmp_path / "out" / "report.html").exists()
    assert [line["replies"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [
        {"asked": 2, "accepted": 2, "dropped": {}}
    ] * 10
    assert "the certificate matches the ledger" in "".join(printed)
    assert nodes.keys() == before.keys() == {"node-0", "node-1"}
    assert (nodes["node-0"].id, nodes["node-1"].status) == (before["node-0"], "registered")  # never online so far
    assert nodes["node-1"].id != before["node-1"]
