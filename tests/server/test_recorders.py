"""Series in TensorBoard and MLflow: released values, the ledger's epsilon, no duplicates after a crash."""

import json
import math
import os
import socket
import sys
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from kit.commands import TINY, assert_refused, lines, settings
from kit.run_folders import run_in
from kit.tables import for_rows

from coterie.engine.in_process import LocalGrid
from coterie.server import ConfigError, RunConfig, RunFolder, recorders, run
from coterie.server.app import open_folder
from coterie.server.recorders import recording, values_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")  # of SQLAlchemy


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Every connection fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection to {args[1:]}")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COTERIE_RECORDERS", "tensorboard,mlflow")
    monkeypatch.setattr(socket.socket, "connect", refuse)


def config(**changes):
    given = {key.replace("_", "-"): value for key, value in changes.items()}
    return RunConfig(TINY | {"evaluate": "diagnostic"} | given)


@cache
def empty_database():
    """MLflow's tables, whose 50 migrations take a second."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.tracking import MlflowClient

    with TemporaryDirectory() as folder:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return Path(folder, "mlflow.db").read_bytes()


def train(path, **changes):
    with closing(RunFolder.create(path, config(**changes))) as folder:
        if "mlflow" in recorders.configured():
            (path / "mlflow.db").write_bytes(empty_database())
        return run(folder, LocalGrid(TINY["clients"]))


def tensorboard(path):
    """Values by name and round; every value once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    found = [
        ((name, e.step), make_ndarray(e.tensor_proto).item())
        for name in events.Tags()["tensors"]
        for e in events.Tensors(name)
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def mlflow(path, uri=None):
    """The only MLflow run, and its values by name and round; every value once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{path}/mlflow.db")
    (stored,) = client.search_runs([client.get_experiment_by_name("Coterie").experiment_id])
    found = [
        ((name, each.step), each.value)
        for name in stored.data.metrics
        for each in client.get_metric_history(stored.info.run_id, name)
    ]
    assert len(dict(found)) == len(found)
    return stored, dict(found)


def test_epsilon_is_the_ledgers_and_only_released_values_are_recorded(tmp_path, monkeypatch):
    empty_database()
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    train(tmp_path / "run", out=str(tmp_path / "run"))
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert is_telemetry_disabled()
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    ledger = lines(tmp_path / "run" / "ledger.jsonl")
    stored, of_mlflow = mlflow(tmp_path / "run")
    of_tensorboard = tensorboard(tmp_path / "run")
    assert of_mlflow == of_tensorboard == {v[:2]: v.value for line in metrics for v in values_of(line)}
    assert {number: of_mlflow["epsilon", number] for number in (1, 2)} == {c["round"]: c["epsilon"] for c in ledger}
    assert not [name for name, _ in of_mlflow if "accuracy" in name]
    certificate = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert stored.info.status == "FINISHED"
    assert json.loads(stored.data.tags["coterie.epsilon"]) == certificate["epsilon"]
    assert stored.data.params["privacy.epsilon"] == "8.0"
    everything = json.dumps([stored.data.params, stored.data.tags])
    assert str(tmp_path) not in everything


@pytest.mark.parametrize("unit", ["client", "none"])
def test_exact_scores_are_recorded_without_privacy_alone(tmp_path, monkeypatch, unit):
    monkeypatch.setenv("COTERIE_RECORDERS", "tensorboard")
    train(tmp_path / "run", privacy_unit=unit)
    found = tensorboard(tmp_path / "run")
    (exact,) = lines(tmp_path / "run" / "diagnostics.jsonl")
    assert found.get(("accuracy", 2)) == (None if unit == "client" else exact["accuracy"])
    assert ("epsilon", 2) in found if unit == "client" else ("epsilon", 2) not in found  # infinite
    assert not [name for name, _ in found if "/client_" in f"/{name}"]


def test_a_private_accuracy_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_RECORDERS", "tensorboard")
    train(tmp_path / "run", evaluate="private", evaluate_noise=0.5)
    kept = {line["round"]: line["accuracy"] for line in lines(tmp_path / "run" / "metrics.jsonl") if "accuracy" in line}
    found = tensorboard(tmp_path / "run")
    assert {number: value for (name, number), value in found.items() if name == "accuracy"} == kept != {}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["before metrics.jsonl", "after metrics.jsonl", "after the series"])
def test_a_resumed_run_continues_its_series_without_duplicates(tmp_path, monkeypatch, where):
    original = RunFolder.round_finished

    def dies(folder, line):
        if line["round"] == 2:
            if where == "after metrics.jsonl":
                folder.on_metrics = lambda line: None
            if where != "before metrics.jsonl":
                original(folder, line)
            raise Killed
        original(folder, line)

    monkeypatch.setattr(
        recorders._Recording,
        "finish",
        lambda self, status: self._series._writer.close() if hasattr(self._series, "_writer") else None,
    )
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "round_finished", dies)
        with pytest.raises(Killed):
            train(tmp_path / "run", rounds=3)
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    before = len(tensorboard(tmp_path / "run"))
    with file.open("ab") as events:
        events.write(b"\x18\x00\x00\x00")  # an incomplete event
    monkeypatch.undo()
    monkeypatch.setenv("COTERIE_RECORDERS", "tensorboard,mlflow")
    run_in(RunFolder.resume(tmp_path / "run", {}))
    expected = {v[:2]: v.value for line in lines(tmp_path / "run" / "metrics.jsonl") for v in values_of(line)}
    stored, found = mlflow(tmp_path / "run")
    assert found == expected == tensorboard(tmp_path / "run")
    assert {number for _, number in found} == {1, 2, 3}
    assert 0 < before < len(found)
    assert stored.info.status == "FINISHED"


def test_another_tracking_uri_gets_the_whole_series(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_RECORDERS", "mlflow")
    train(tmp_path / "run", stop_after=1)
    (tmp_path / "team.db").write_bytes(empty_database())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{tmp_path}/team.db")
    with closing(RunFolder.resume(tmp_path / "run", {"stop-after": 1})) as folder, recording(folder):
        pass
    assert mlflow(tmp_path, uri)[1] == mlflow(tmp_path / "run")[1]


def test_a_recorder_that_fails_does_not_stop_the_run(tmp_path, monkeypatch):
    write, calls = recorders._MLflow.write, []

    def fails_once(self, values):
        calls.append(len(values))
        if len(calls) == 1:
            raise OSError("no space")
        write(self, values)

    monkeypatch.setattr(recorders._MLflow, "write", fails_once)
    train(tmp_path / "run")
    assert mlflow(tmp_path / "run")[1] == tensorboard(tmp_path / "run")
    assert calls[1] > calls[0]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_library_is_told_before_there_is_a_folder(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("COTERIE_RECORDERS", name)
    with pytest.raises(ConfigError, match=rf"requires {name}.*pip install 'coterie\[{name}\]'"):
        open_folder(TINY | {"out": str(tmp_path / "run")}, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_tracking_server_that_cannot_be_reached(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/x.db")
    with (
        closing(RunFolder.create(tmp_path / "run", config())) as folder,
        pytest.raises(ConfigError, match="mlflow cannot be opened"),
    ):
        run(folder, LocalGrid(TINY["clients"]))


@for_rows("names", ["tensorbord", "mlflow,mlflow", "mlflow,", " "])
def test_names_of_recorders(monkeypatch, names):
    monkeypatch.setenv("COTERIE_RECORDERS", names)
    with pytest.raises(ConfigError, match=r"COTERIE_RECORDERS = .*tensorboard, mlflow"):
        recorders.configured()


def test_names_from_clients_and_numbers_that_are_none_are_left_out():
    line = {
        "round": 3,
        "epsilon": math.inf,
        "seconds": 1,
        "histogram": [1.5, math.nan],
        "replies": {"asked": 4, "dropped": {"any text of a client": 1}},
        "notes": {"a": 1},
        "flag": True,
        "text": "x",
    }
    found = {value.name: (value.round, value.value) for value in values_of(line)}
    assert found == {"seconds": (3, 1.0), "histogram/0": (3, 1.5), "replies/asked": (3, 4.0)}


def test_the_command(coterie, tmp_path):
    status, _, err = coterie("run", *settings(), "--recorders", "tensorboard", "--out", str(tmp_path / "run"))
    assert (status, tensorboard(tmp_path / "run") != {}) == (0, True), err
    assert_refused(coterie("run", *settings(), "--recorders", "wandb"), "COTERIE_RECORDERS", "tensorboard, mlflow")


def test_mlflow_has_the_settings_of_a_users_strategy(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_RECORDERS", "mlflow")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "own-strategy")
    train(tmp_path / "run", strategy="own_strategy:Momentum", **{"momentum.beta": 0.25})
    stored, _ = mlflow(tmp_path / "run")
    assert stored.data.params["momentum.beta"] == "0.25"
    assert "out" not in stored.data.params
