"""`flwr run` bundles the app, runs it offline on Ray through a SuperLink of its own, and leaves a run folder."""

import json
import os
import tomllib

import numpy as np
import pytest
import tomli_w
from kit.superlinks import ROOT, flwr, latest, simulating_superlink
from safetensors.numpy import load_file

from coterie.fields.settings import flat, nested
from coterie.report.page import write_report
from coterie.server.resolution import SETTINGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A SuperLink with a home and port of its own, ended with everything that it started."""
    with simulating_superlink(tmp_path_factory.mktemp("superlink")) as variables:
        yield variables


def test_the_app_runs_in_flower_s_own_way(environment, tmp_path):
    out = tmp_path / "run"
    settings = f'data.clients=10 rounds=2 training.local-epochs=1 deployment.registration-timeout=600.0 out="{out}"'
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
    assert write_report([out], out).stat().st_size > 10_000  # the ServerApp writes no page


SMALL = {"seed": 3, "rounds": 2, "clusters": 2, "data.clients": 10, "data.groups": "2", "data.samples-per-client": 20}
RECORD = {"privacy.privacy-unit": "record", "privacy.epsilon": 20.0}
RUNS = {
    "rr-cluster": {**SMALL, "rr-cluster.base": "fedcam", "privacy.mechanism": "rr-slot"},
    "lcfl": {**SMALL, **RECORD, "lcfl.landmarks": 4},
    "kfed": {"seed": 3, "data.clients": 10},
}


@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_is_the_same_from_the_command_line_a_file_and_flwr_run(strategy, environment, coterie, tmp_path):
    settings = {"strategy": strategy, **RUNS[strategy]}
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(nested(settings)))
    by_words = [word for name, value in settings.items() for word in ("--set", f"{name.rpartition('.')[2]}={value}")]
    for source, words in {"words": by_words, "file": ["--config", str(tmp_path / "settings.toml")]}.items():
        status, _, err = coterie("run", *words, "--out", tmp_path / source)
        assert status == 0, err
    config = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config += f' deployment.registration-timeout=600.0 out="{tmp_path / "flwr"}"'
    federation = f"num-supernodes=10 client-resources-num-cpus={os.cpu_count()}"  # in one process, soon imported
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


def test_the_example_that_makes_a_quickstart_clustered(environment, tmp_path):
    """examples/flower-app; tests/examples/test_flower_app.py runs it in process."""
    folder, federation = (
        str(ROOT / "examples" / "flower-app"),
        f"num-supernodes=8 client-resources-num-cpus={os.cpu_count()}",
    )
    settings = f'clients=8 num-server-rounds=2 epsilon=100.0 out="{tmp_path / "out"}"'
    done = flwr(environment, "run", folder, "--stream", "--federation-config", federation, "--run-config", settings)
    assert latest(environment)["status"] == "finished:completed", done.stdout + done.stderr
    certificate = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert (certificate["certified"], certificate["charges"]) == (True, 2)
