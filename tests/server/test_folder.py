"""The run folder: never overwrites, resumes what it stored, keeps released values only."""

import json
import re
import tomllib
from contextlib import closing

import numpy as np
import pytest
import tomli_w
from kit.commands import lines, tree
from safetensors.numpy import load_file

from coterie.privacy import BudgetError, Event, LedgerError, epsilon
from coterie.results import RoundRecord
from coterie.server import FolderError, RunConfig, RunFolder, planning
from coterie.strategies import Checkpoint
from coterie.wire.messages import Layout

SETTINGS = {"clients": 20, "clusters": 2, "rounds": 6, "epsilon": 4.0, "model": "linear"}
LAYOUT = Layout(("weight", "bias"), ((2, 3), (2,)))  # not in alphabetical order, as safetensors keeps them


def state(round=3, histogram=(4.25, -1.5), layout=LAYOUT, mean=None):
    models = np.random.default_rng(0).standard_normal((2, layout.size)).astype(np.float32)
    return Checkpoint(round, models, layout, None if histogram is None else np.array(histogram), mean)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def folder(path):
    folder = RunFolder.create(path, RunConfig(SETTINGS))
    yield folder
    folder.close()


def charge(folder, rounds):
    """Pay for rounds 1 to ``rounds``, as a run does before it has anything to keep."""
    for number in range(1, rounds + 1):
        folder.ledger.charge_round(number, Event(0.2, 30.0))


def power_cut(*args):
    raise OSError("power cut")


def test_config_toml_is_the_resolved_configuration(folder, path):
    document = tomllib.loads((path / "config.toml").read_text())
    assert RunConfig(document["config"]).values == RunConfig(SETTINGS).values
    assert {"flwr", "torch", "dp-accounting", "python", "coterie"} <= set(document["versions"])
    assert set(document["machine"]) == {"device", "cores", "git-commit"}


def test_create_refuses_an_existing_run_and_leaves_it_alone(folder, path):
    folder.checkpoint(state(), {"round": 3})
    folder.close()
    before = tree(path)
    with pytest.raises(FolderError, match="--resume"):
        RunFolder.create(path, RunConfig({"epsilon": 1.0}))
    assert tree(path) == before


def test_create_takes_an_empty_folder_and_refuses_others(tmp_path):
    for name in ("letters", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "letters" / "love.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = tree(tmp_path)
    for name in ("letters", "file"):
        with pytest.raises(FolderError, match="not an empty folder"):
            RunFolder.create(tmp_path / name, RunConfig(SETTINGS))
    assert tree(tmp_path) == before
    with closing(RunFolder.create(tmp_path / "empty", RunConfig(SETTINGS))) as folder:
        assert folder.resumed is None


@pytest.mark.parametrize("killed_at", ["ledger.jsonl", "local.json", "local.json.77.tmp", "config.toml.77.tmp"])
def test_create_takes_the_folder_of_a_run_that_was_killed_at_its_start(path, killed_at):
    RunFolder.create(path, RunConfig(SETTINGS)).close()
    (path / "config.toml").unlink()
    if killed_at != "ledger.jsonl":
        (path / killed_at).write_text("{")
    folder = RunFolder.create(path, RunConfig(SETTINGS))
    folder.close()
    assert folder.resumed is None
    assert not list(path.glob("*.tmp"))


def test_create_keeps_the_ledger_of_a_run_that_lost_its_settings(folder, path):
    charge(folder, 1)
    folder.close()
    (path / "config.toml").unlink()
    before = tree(path)
    with pytest.raises(FolderError, match="not an empty folder"):
        RunFolder.create(path, RunConfig(SETTINGS))
    assert tree(path) == before


MEAN = np.full((2, LAYOUT.size), 2.5, np.float32)


@pytest.mark.parametrize(
    "kept",
    [
        state(mean=MEAN),
        state(histogram=None),
        state(layout=Layout(("weight", "scale"), ((2,), ()))),
        Checkpoint(3, np.zeros((1, 0), np.float32), Layout((), ()), None),
    ],
    ids=["histogram", "none", "a scalar parameter", "no parameters"],
)
def test_checkpoint_round_trip(folder, path, kept):
    charge(folder, 4)
    folder.checkpoint(kept, {"round": 3, "epsilon": 1.5})
    folder.close()
    with closing(RunFolder.resume(path, {})) as again:
        read = again.resumed
    assert (read.round, read.layout, read.models.dtype) == (3, kept.layout, np.float32)
    np.testing.assert_array_equal(read.models, kept.models)
    for found, expected, kind in ((read.histogram, kept.histogram, np.float64), (read.mean, kept.mean, np.float32)):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert found.dtype == kind
            np.testing.assert_array_equal(found, expected)


def test_checkpoint_holds_models_and_the_released_histogram_only(folder, path):
    folder.checkpoint(state(), {"round": 3})
    tensors = load_file(path / "checkpoint" / "state.safetensors")
    assert set(tensors) == {f"{j}/{name}" for j in (0, 1) for name in LAYOUT.names} | {"histogram"}


def test_checkpoint_is_replaced_atomically(folder, path, monkeypatch):
    charge(folder, 4)
    folder.checkpoint(state(3), {"round": 3})
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", power_cut)
        with pytest.raises(FolderError, match="power cut"):
            folder.checkpoint(state(4), {"round": 4})
    folder.close()
    again = RunFolder.resume(path, {})
    assert again.resumed.round == 3
    again.checkpoint(state(4), {"round": 4})  # also over what the crash left behind
    again.close()
    assert [file.name for file in (path / "checkpoint").iterdir()] == ["state.safetensors"]
    last = RunFolder.resume(path, {})
    last.close()
    assert last.resumed.round == 4


def test_resume_refuses_changed_settings_and_names_them(folder, path):
    folder.close()
    before = tree(path)
    with pytest.raises(FolderError, match=r"epsilon was 4\.0, now 5\.0") as caught:
        RunFolder.resume(path, {"epsilon": "5", "seed": 3, "rounds": 6})
    assert "seed was 'auto', now 3" in str(caught.value)
    assert "rounds" not in str(caught.value)
    assert tree(path) == before


def test_resume_takes_settings_that_agree_and_the_places_that_are_named_now(folder, path):
    folder.close()
    with closing(RunFolder.resume(path, {"epsilon": "4", "clients": 20})) as again:
        assert again.config.values == folder.config.values
    with closing(RunFolder.resume(path, {"device": "cpu", "data-dir": "moved"})) as again:
        assert (again.config["device"], again.config["data-dir"]) == ("cpu", "moved")


def test_resume_takes_some_of_the_settings_again(path):
    """rebalance-min = 26 fits this run (qM/k = 30), though not the defaults (25)."""
    settings = {"clients": 60, "clusters": 2, "sampling-rate": 1, "rebalance-min": 26, "model": "linear"}
    RunFolder.create(path, RunConfig(settings)).close()
    RunFolder.resume(path, {"rebalance-min": 26}).close()


@pytest.mark.parametrize("content", [None, b"config = [", b"[versions]", b"\xff\xfe"])
def test_resume_without_a_run(path, content):
    path.mkdir()
    if content is not None:
        (path / "config.toml").write_bytes(content)
    before = tree(path)
    with pytest.raises(FolderError, match="no run to resume"):
        RunFolder.resume(path, {})
    assert tree(path) == before


def test_resume_waits_for_the_one_who_runs_it(folder, path):
    charge(folder, 1)
    folder.round_finished({"round": 1})
    before = tree(path)
    with pytest.raises(LedgerError, match="in use"):
        RunFolder.resume(path, {})
    assert tree(path) == before
    folder.close()
    RunFolder.resume(path, {}).close()


def test_rounds_after_the_checkpoint_are_forgotten(folder, path):
    charge(folder, 4)
    for number in (1, 2, 3, 4):
        folder.round_finished({"round": number, "epsilon": number / 10, "accuracy": 0.1 * number})
    folder.checkpoint(state(3), {"round": 3})
    folder.close()
    with (path / "diagnostics.jsonl").open("a") as file:
        file.write('{"round": 5, "acc')
    with closing(RunFolder.resume(path, {})) as again:
        assert [record.round for record in again.rounds()] == [1, 2, 3]
    third = {"round": 3, "epsilon": 0.3, "accuracy": 0.1 * 3}
    assert again.rounds()[2] == RoundRecord.of(third)  # the full line stays, not the checkpoint's
    assert [line["round"] for line in lines(path / "diagnostics.jsonl")] == [1, 2, 3]


def test_without_a_checkpoint_all_metrics_are_forgotten_but_no_charge(folder, path):
    folder.ledger.charge_round(1, Event(0.2, 3.0))
    folder.round_finished({"round": 1})
    folder.close()
    again = RunFolder.resume(path, {})
    again.close()
    assert again.rounds() == []
    assert len(again.ledger.charges) == 1


@pytest.mark.parametrize("torn", ["", '{"round": 3, "eps'])
def test_the_last_line_is_restored_from_the_checkpoint(folder, path, torn):
    charge(folder, 4)
    for number in (1, 2):
        folder.round_finished({"round": number})
    folder.checkpoint(state(3), {"round": 3, "epsilon": float("inf"), "seconds": 0.5, "histogram": [1.0, 2.0]})
    folder.close()
    with (path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    again = RunFolder.resume(path, {})
    again.close()
    assert [record.round for record in again.rounds()] == [1, 2, 3]
    assert again.rounds()[2] == RoundRecord(round=3, seconds=0.5, histogram=(1.0, 2.0))


def test_a_finished_round_is_a_line_and_reaches_the_observer(folder, path):
    seen = []
    folder.on_metrics = seen.append
    folder.round_finished({"round": 1, "epsilon": float("inf"), "accuracy": 0.5, "client_loss": [1.0]})
    text = (path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == RoundRecord(round=1).to_json()
    assert json.loads((path / "diagnostics.jsonl").read_text()) == {"round": 1, "accuracy": 0.5}
    assert [(record.round, record.mean_accuracy) for record in seen] == [(1, 0.5)]


def test_what_is_not_known_to_be_released_is_a_diagnostic(folder, path):
    folder.round_finished({"round": 1, "epsilon": 0.1, "notes": {"a": 1}, "something_new": 0.25})
    assert lines(path / "metrics.jsonl") == [RoundRecord(round=1, epsilon=0.1, notes={"a": 1}).to_json()]
    assert lines(path / "diagnostics.jsonl") == [{"round": 1, "something_new": 0.25}]


def test_a_private_accuracy_is_a_released_value(tmp_path):
    with closing(RunFolder.create(tmp_path / "run", RunConfig({"evaluate": "private"}))) as folder:
        folder.round_finished({"round": 1, "epsilon": 0.1, "accuracy": 0.5})
        assert folder.rounds() == [RoundRecord(round=1, epsilon=0.1, accuracy=0.5)]
        assert not (folder.path / "diagnostics.jsonl").exists()


def test_an_evaluation_that_a_crash_kept_back_is_added_once(folder, path):
    folder.round_finished({"round": 1, "epsilon": 0.1, "accuracy": 0.4})
    folder.round_finished({"round": 2, "epsilon": 0.2})
    for _ in range(2):
        folder.amend_last({"accuracy": 0.5, "client_loss": [1.0]})
    first, second = RoundRecord(round=1, epsilon=0.1), RoundRecord(round=2, epsilon=0.2)
    assert lines(path / "metrics.jsonl") == [first.to_json(), second.to_json()]
    assert lines(path / "diagnostics.jsonl") == [{"round": 1, "accuracy": 0.4}, {"round": 2, "accuracy": 0.5}]


def test_automatic_evaluation_is_resolved_once(tmp_path):
    RunFolder.create(tmp_path / "run", RunConfig({"clients": 2000, "rounds": 5}, deployed=True)).close()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["config"]
    assert stored["evaluation"]["evaluate"] == "private"
    folder = RunFolder.resume(tmp_path / "run", {"evaluate": "auto", "clients": 2000})
    folder.close()
    assert folder.config["evaluate"] == "private"
    with pytest.raises(FolderError, match="evaluate was 'private', now 'off'"):
        RunFolder.resume(tmp_path / "run", {"evaluate": "off"})


def test_evidence_is_kept_as_it_was_seen_and_replaced_atomically(folder, path, monkeypatch):
    seen = {"matrix": np.array([[0, np.nan], [0.5, 0]], np.float32), "clients": np.array([7, 3])}
    folder.save_artifact("zeros", {"matrix": np.zeros((500, 500), np.float32)})
    assert (path / "evidence" / "zeros.npz").stat().st_size < 10_000  # compressed
    (path / "evidence" / "zeros.npz").unlink()
    folder.save_artifact("distances", seen)
    folder.save_artifact("similarities-0010", seen)
    before = tree(path / "evidence")
    assert set(before) == {"distances.npz", "similarities-0010.npz"}
    assert len(set(before.values())) == 1  # equal arrays are equal files
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", power_cut)
        with pytest.raises(FolderError, match="power cut"):
            folder.save_artifact("distances", {"matrix": np.ones(3)})
    folder.close()
    with closing(RunFolder.resume(path, {})) as again:
        kept = again.load_artifact("distances")
        assert again.load_artifact("nothing") is None
    assert set(kept) == set(seen)
    for name, values in seen.items():
        assert kept[name].dtype == values.dtype
        np.testing.assert_array_equal(kept[name], values)


def test_a_resumed_run_may_wait_for_other_numbers_of_clients(path):
    """The first line of its ledger keeps what lay outside the guarantee when it was written."""
    RunFolder.create(path, RunConfig(SETTINGS)).close()
    folder = RunFolder.resume(path, {"min-clients": 3})  # nothing was charged yet
    folder.ledger.charge_round(1, folder.plan.event())
    stated = folder.certify()["outside"]
    folder.close()
    assert any("min-clients" in phrase for phrase in stated)
    for settings in ({}, {"min-clients": 5}):
        again = RunFolder.resume(path, settings)
        assert again.certify()["outside"] == stated
        again.close()


def test_runs_with_a_budget_file_charge_it_and_certify_what_all_have_spent(tmp_path):
    settings = {**SETTINGS, "budget-file": str(tmp_path / "budget.jsonl")}
    for name in ("a", "b"):
        with closing(RunFolder.create(tmp_path / name, RunConfig(settings))) as folder:
            for number in (1, 2, 3):
                folder.ledger.charge_round(number, folder.plan.event())
            stated = folder.certify()["shared_budget"]
    events = {folder.plan.event(): 6}
    together = pytest.approx(epsilon(events, folder.plan.delta), rel=1e-6)
    assert stated == {"other_charges": 3, "epsilon": together, "delta": folder.plan.delta, "epsilon_budget": 4.0}
    with pytest.raises(LedgerError, match="b uses a shared budget: set budget-file to its file"):
        RunFolder.resume(tmp_path / "b", {"budget-file": ""})
    with closing(RunFolder.resume(tmp_path / "b", {})) as folder, pytest.raises(BudgetError, match=r"budget\.jsonl"):
        folder.ledger.charge_round(4, folder.plan.event())


def test_a_folder_lacks_settings_that_a_later_version_adds(path, monkeypatch):
    now = planning.about

    def header(config):
        about = now(config)
        return about | {"tuned": {name: value for name, value in about["tuned"].items() if "aggregator" not in name}}

    with monkeypatch.context() as patched:
        patched.setattr(planning, "about", header)
        with closing(RunFolder.create(path, RunConfig(SETTINGS))) as before:
            charge(before, 3)
            before.checkpoint(state(), {"round": 3})
    document = tomllib.loads((path / "config.toml").read_text())
    del document["config"]["aggregation"]
    (path / "config.toml").write_text(tomli_w.dumps(document))
    with closing(RunFolder.resume(path, {})) as again:
        assert again.config["aggregator"] == "mean"
    with pytest.raises(FolderError, match="lr was"):
        RunFolder.resume(path, {"lr": 0.1})


def test_a_folder_of_an_earlier_version_is_refused(path):
    RunFolder.create(path, RunConfig(SETTINGS)).close()
    config = path / "config.toml"
    config.write_text(re.sub(r'coterie = ".*"', 'coterie = "0.1.0"', config.read_text()))
    with pytest.raises(FolderError, match=r"written by Coterie 0\.1\.0; .* start a new run with another --out"):
        RunFolder.resume(path, {})
