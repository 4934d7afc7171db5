"""`flwr run` bundles the app, runs it offline on Ray through a SuperLink of its own, and leaves a run folder."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def environment(tmp_path):
    """A SuperLink with a home and port of its own, ended with everything that it started."""
    port = free_port()
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    variables = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    arguments = ["--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    arguments += ["--port", str(port)]
    with (tmp_path / "superlink.log").open("w") as log:
        superlink = subprocess.Popen(
            [BIN / "flower-superlink", *arguments], env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            for _ in range(120):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert superlink.poll() is None, (tmp_path / "superlink.log").read_text()
                time.sleep(0.5)
            yield variables
        finally:
            superlink.terminate()
            try:
                superlink.wait(20)
            except subprocess.TimeoutExpired:
                superlink.kill()
                superlink.wait()


def flwr(environment, *words, timeout=240):
    return subprocess.run(
        [BIN / "flwr", *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def test_the_app_runs_in_flower_s_own_way(environment, tmp_path):
    out = tmp_path / "run"
    settings = f'data.clients=10 rounds=2 training.local-epochs=1 deployment.registration-timeout=30.0 out="{out}"'
    federation = "num-supernodes=10 client-resources-num-cpus=1"
    done = flwr(environment, "run", ".", "--stream", "--federation-config", federation, "--run-config", settings)
    listing = flwr(environment, "list", "--format", "json")
    (run,) = json.loads(listing.stdout)["runs"]
    assert run["status"] == "finished:completed", done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["rounds"] == 2
    assert result["evaluate"] == "diagnostic"  # auto, in a simulation
    assert json.loads((out / "diagnostics.json").read_text())["accuracy"] > 0
    certificate = json.loads((out / "privacy.json").read_text())
    assert certificate["certified"] is True
    assert certificate["epsilon"] <= 8
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 1 + 2
    assert {p.name for p in (out / "models").iterdir()} == {f"cluster-{j}.safetensors" for j in range(4)}
    assert (out / "report.html").stat().st_size > 10_000
