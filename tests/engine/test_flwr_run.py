"""`flwr run` bundles the app, runs it offline on Ray through a SuperLink of its own, and leaves a run folder."""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from coterie.server.config import SETTINGS
from coterie.settings import flat, nested

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A SuperLink with a home and port of its own, ended with everything that it started."""
    tmp_path = tmp_path_factory.mktemp("superlink")
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


def latest(environment):
    runs = json.loads(flwr(environment, "list", "--format", "json").stdout)["runs"]
    return max(runs, key=lambda run: run["pending-at"])


def test_the_app_runs_in_flower_s_own_way(environment, tmp_path):
    out = tmp_path / "run"
    settings = f'data.clients=10 rounds=2 training.local-epochs=1 deployment.registration-timeout=30.0 out="{out}"'
    federation = "num-supernodes=10 client-resources-num-cpus=1"
    done = flwr(environment, "run", ".", "--stream", "--federation-config", federation, "--run-config", settings)
    assert latest(environment)["status"] == "finished:completed", done.stdout + done.stderr
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


SMALL = {"seed": 3, "rounds": 2, "clusters": 2, "data.clients": 10, "data.groups": "2", "data.samples-per-client": 20}
RECORD = {"privacy.privacy-unit": "record", "privacy.epsilon": 20.0}
RUNS = {
    "rr-cluster": {**SMALL, "rr-cluster.base": "fedcam", "privacy.mechanism": "rr-slot"},
    "lcfl": {**SMALL, **RECORD, "lcfl.landmarks": 4},
    "kfed": {"seed": 3, "data.clients": 10},
}


@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_is_the_same_from_the_command_line_a_file_and_flwr_run(strategy, environment, tmp_path):
    settings = {"strategy": strategy, **RUNS[strategy]}
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(nested(settings)))
    by_words = [word for name, value in settings.items() for word in ("--set", f"{name.rpartition('.')[2]}={value}")]
    for source, words in {"words": by_words, "file": ["--config", str(tmp_path / "settings.toml")]}.items():
        done = subprocess.run(
            [BIN / "coterie", "run", *words, "--out", tmp_path / source], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    config = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config += f' deployment.registration-timeout=60.0 out="{tmp_path / "flwr"}"'
    federation = "num-supernodes=10 client-resources-num-cpus=1"
    done = flwr(environment, "run", ".", "--stream", "--federation-config", federation, "--run-config", config)
    assert latest(environment)["status"] == "finished:completed", done.stdout + done.stderr
    words, file, flower = (resolved(tmp_path / source) for source in ("words", "file", "flwr"))
    assert words == file == flower
    words, file, flower = (models(tmp_path / source) for source in ("words", "file", "flwr"))
    assert words.keys() == file.keys() == flower.keys() != set()
    for name, values in words.items():
        np.testing.assert_array_equal(file[name], values)
        np.testing.assert_allclose(flower[name], values, atol=1e-5, err_msg=str(name))


def resolved(folder):
    """Its configuration without its own path and timeouts."""
    values = flat(tomllib.loads((folder / "config.toml").read_text())["config"])
    return {name: value for name, value in values.items() if not SETTINGS[name].place}


def models(folder):
    files = sorted((folder / "models").glob("*.safetensors"))
    return {(file.name, key): values for file in files for key, values in load_file(file).items()}
