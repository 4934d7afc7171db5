"""A submitter signs a run, and a client with real processes answers that one and no other."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from kit.servers import free_port, open_port, running, until

from coterie.cli.audit_log import read_audit_log
from coterie.deploy.app_bundle import bundle
from coterie.deploy.certificates import add_submitter, create, state_app
from coterie.deploy.status import register_nodes
from coterie.privacy.ledger_lines import read_ledger

ROOT, BIN = Path(__file__).resolve().parents[2], Path(sys.executable).parent
RUN = {
    "strategy": "fedavg",
    "rounds": 2,
    "data": {"dataset": "own", "clients": 1, "input-shape": "1x4x4", "num-classes": 2, "samples-per-client": 30},
    "privacy": {"privacy-unit": "record", "epsilon": 4.0, "delta": 1e-3},
    "training": {"batch-size": 10, "model": "linear"},
    "deployment": {"min-clients": 1},
    "evaluation": {"evaluate": "off"},
}


@pytest.mark.slow
def test_a_client_answers_what_alice_has_signed_and_nothing_else(tmp_path, monkeypatch):
    pki = create(tmp_path / "pki", 1, ["superlink"]).folder
    add_submitter(pki, "alice")
    state_app(pki, bundle(ROOT).hash)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data" / "train.npz", x=rng.integers(0, 256, (40, 1, 4, 4)), y=np.arange(40) % 2)
    (tmp_path / "policy.toml").write_text('submitters = ["alice"]')
    (tmp_path / "run.toml").write_text(tomli_w.dumps(RUN))
    control, fleet, runtime = free_port(), free_port(), free_port()
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.fl]\naddress = "localhost:{control}"\nroot-certificates = "{pki}/ca.crt"\n'
    )
    monkeypatch.setenv("FLWR_HOME", str(home))
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    own |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "COTERIE_ROSTER": str(pki / "roster.json")}
    own |= {"COTERIE_RUNS": str(tmp_path / "runs"), "FLWR_HOME": str(home)}
    program = [sys.executable, "-P", "-m", "coterie.cli"]
    server = [*program, "superlink", "--ssl-ca-certfile", pki / "ca.crt", "--ssl-certfile", pki / "server.crt"]
    server += ["--ssl-keyfile", pki / "server.key", "--enable-supernode-auth", "--isolation", "subprocess"]
    server += ["--host", "127.0.0.1", "--port", control, "--fleet-api-address", f"127.0.0.1:{fleet}"]
    client = [*program, "client", "--superlink", f"localhost:{fleet}", "--key", pki / "nodes" / "node-0.key"]
    client += ["--ca", pki / "ca.crt", "--data", tmp_path / "data", "--state-dir", tmp_path / "state"]
    client += ["--port", runtime, "--epsilon", 8, "--delta", 1e-3, "--input-shape", "1x4x4", "--num-classes", 2]
    client += ["--guarantee", "record-level", "--roster", pki / "roster.json", "--policy", tmp_path / "policy.toml"]

    def called(*words):
        command = [str(word) for word in words]
        return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=200, cwd=ROOT)

    def submitted(settings):
        return called(BIN / "flwr", "run", ROOT, "fl", "--stream", "--run-config", settings).stdout

    budget, audit = tmp_path / "data" / ".coterie-budget.jsonl", tmp_path / "state" / "client-0.audit.jsonl"
    with contextlib.ExitStack() as stack:
        log = tmp_path / "superlink.log"
        superlink = stack.enter_context(running(server, log, **own))
        until(lambda: open_port(control) and open_port(fleet), superlink, log)
        register_nodes("fl", {"client-0": pki / "nodes" / "node-0.pub"})
        log = tmp_path / "client.log"
        process = stack.enter_context(running(client, log, **own | {"FLWR_HOME": str(tmp_path / "home")}))
        until(lambda: open_port(runtime), process, log)

        said = submitted(tmp_path / "run.toml")
        assert "the run has no signed request (coterie sign)" in said
        assert not budget.exists()
        words = ["sign", tmp_path / "run.toml", "--key", pki / "submitters" / "alice.key", "--app", ROOT]
        signed = called(*program, *words)
        assert signed.returncode == 0, signed.stderr
        said = submitted(tmp_path / "run.signed.toml")
        assert "results are in" in said, said + log.read_text()
        assert "progress" in said and '"submitter": "alice"' in said  # noqa: PT018
        text = (tmp_path / "run.signed.toml").read_text()
        (tmp_path / "more.toml").write_text(text.replace("epsilon = 4.0", "epsilon = 5.0"))
        assert "signed-request: it is for epsilon 4, not 5: sign the settings" in submitted(tmp_path / "more.toml")
    charges = read_ledger(budget)[1]
    assert [(charge["round"], charge["submitter"]) for charge in charges] == [(1, "alice"), (2, "alice")]
    decisions = [(entry["decision"], entry.get("submitter")) for entry in read_audit_log(audit)[0]]
    assert decisions[-2:] == [("answered", "alice")] * 2
    assert set(decisions[:-2]) == {("refused", None)}
    assert ", started by alice: epsilon" in log.read_text()
    started = [entry for entry in read_audit_log(tmp_path / "runs" / "audit.jsonl")[0] if entry["event"] == "start"]
    assert [entry.get("submitter") for entry in started] == [None, "alice"]
    assert json.loads((pki / "roster.json").read_text())["app"] == charges[0]["app"]
