"""From version 0.2.0: its run folders are read, and what cannot go on says why."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from kit.documented import ROOT
from kit.servers import free_port, open_port, running, until

from coterie.privacy import ClientLedger, Event, LedgerError
from coterie.privacy.budget_files import spending

BIN = Path(sys.executable).parent
#: The first commit whose package is 0.2.0 and complete.
OLD = "5ad22f6"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A checkout of version 0.2.0."""
    folder = tmp_path_factory.mktemp("old")
    made = subprocess.run(["git", "archive", OLD, "coterie"], cwd=ROOT, capture_output=True)
    if made.returncode:
        pytest.skip(f"this checkout does not have the commit {OLD}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=made.stdout, check=True)
    return folder


def variables(package, **more):
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {"PYTHONPATH": str(package), "PATH": path, "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", **more}


def command(package, *words, cwd):
    program = [sys.executable, "-P", "-m", "coterie.cli", *map(str, words)]
    done = subprocess.run(
        program, cwd=cwd, env=os.environ | variables(package), capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout + done.stderr


# Calls the command with each list of words of standard input, in one process.
CALLS = """
import json, sys
from coterie.cli import main

for words in json.load(sys.stdin):
    sys.argv = ["coterie", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture(scope="module")
def runs(old, tmp_path_factory):
    """Folder with a finished run and an unfinished one of version 0.2.0."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["run", "--clients", "12", "--set", "strategy=fedavg", "--set", "model=linear", "--set"]
    words += ["sampling-rate=0.5", "--rounds"]
    calls = [[*words, "1", "--out", "done"], [*words, "2", "--set", "stop-after=1", "--out", "stopped"]]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALLS],
        input=json.dumps(calls),
        cwd=folder,
        env=os.environ | variables(old),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert {path.parent.name for path in folder.glob("*/ledger.jsonl")} == {"done", "stopped"}
    return folder


@pytest.mark.parametrize("name", ["done", "stopped"])
def test_an_old_run_is_read_and_its_certificate_checked(coterie, runs, name):
    assert coterie("report", runs / name)[0] == 0
    status, *said = coterie("privacy", "check", runs / name)
    assert (status, "the certificate matches the ledger" in "".join(said)) == (0, True), said
    document = json.loads((runs / name / "privacy.json").read_text())
    document["epsilon"] /= 2
    (runs / name / "privacy.json").write_text(json.dumps(document))
    status, *said = coterie("privacy", "check", runs / name)
    assert (status, "privacy.json has epsilon" in "".join(said)) == (1, True), said


def test_an_old_run_is_continued_by_its_models_and_says_so(coterie, runs):
    before = (runs / "stopped" / "ledger.jsonl").read_bytes()
    status, *said = coterie("run", "--resume", "--out", runs / "stopped", "--set", "stop-after=0")
    assert status == 1
    assert "was written by another version of Coterie" in "".join(said)
    assert (runs / "stopped" / "ledger.jsonl").read_bytes() == before
    words = ["--from", runs / "done", "--clients", 12, "--rounds", 1, "--set", "strategy=fedavg"]
    words += ["--set", "model=linear", "--set", "sampling-rate=0.5", "--epsilon", 20, "--out", runs / "next"]
    status, *said = coterie("run", *words)
    assert status == 0, said


def test_an_old_budget_file_is_shown_but_not_continued(old, tmp_path):
    """No filter was fixed before its first charge."""
    code = """
import sys
from collections import Counter
from pathlib import Path
from coterie.privacy import ClientLedger, Event
ledger = ClientLedger(1e-5, 8.0, Path(sys.argv[1]))
for number in (1, 2):
    ledger.spend(number, Counter({Event(0.05, 2.0): 10}))
ledger.close()
"""
    path, anchors = tmp_path / "budget.jsonl", tmp_path / "client-0.anchors.jsonl"
    subprocess.run([sys.executable, "-P", "-c", code, path], env=os.environ | variables(old), check=True, timeout=100)
    before = path.read_bytes()
    with (
        closing(ClientLedger(1e-5, 8.0, path, anchors=anchors)) as own,
        pytest.raises(LedgerError, match=r"has charges of version 0\.2\.0.*new --budget-file"),
    ):
        own.spend(3, Counter({Event(0.05, 2.0): 10}))
    assert path.read_bytes() == before
    assert spending(path).charges == 2
    assert 0 < spending(path).epsilon < 8


def test_a_new_server_requires_certificates_that_an_old_client_does_not_have(old, tmp_path, monkeypatch):
    """The check of the new client says so of the old files."""
    assert command(old, "certs", "pki", "--nodes", 1, "--host", "localhost", cwd=tmp_path)[0] == 0
    pki = tmp_path / "pki"
    x = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(40) % 2)
    control, fleet = free_port(), free_port()
    server = [sys.executable, "-P", "-m", "coterie.cli", "superlink", "--ssl-ca-certfile", pki / "ca.crt"]
    server += ["--ssl-certfile", pki / "server.crt", "--ssl-keyfile", pki / "server.key", "--enable-supernode-auth"]
    server += ["--isolation", "subprocess", "--host", "127.0.0.1", "--port", control]
    server += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
    client = ["client", "--superlink", f"localhost:{fleet}", "--key", pki / "nodes" / "node-0.key"]
    client += ["--ca", pki / "ca.crt", "--data", tmp_path / "data.npz", "--state-dir", tmp_path / "state"]
    client += ["--epsilon", 8, "--delta", 1e-3, "--input-shape", "1x4x4", "--num-classes", 2]
    log = tmp_path / "superlink.log"
    with running(server, log, **variables(ROOT, FLWR_HOME=str(tmp_path / "flwr"))) as superlink:
        until(lambda: open_port(control) and open_port(fleet), superlink, log)
        status, said = command(ROOT, *client, "--check", cwd=tmp_path)
        assert (status, "requires a certificate" in said or "rejects the certificate" in said) == (1, True), said
