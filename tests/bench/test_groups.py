"""Tables of several scores: fairness against central models, first updates in a plane."""

import json
from dataclasses import replace

import numpy as np
import pytest

from coterie.bench.cells import run_all
from coterie.bench.outcome import document, markdown
from coterie.bench.reference import compare
from coterie.bench.table import read_table
from coterie.bench.table_figures import draw
from coterie.server import RunConfig

pytestmark = pytest.mark.slow

TABLE = """
title = "Two groups"
source = "nobody"
plot = "groups"
scores = ["accuracy", "minority_accuracy", "f_acc", "f_loss", "clustering_accuracy"]
seeds = [0, 1]

[set]
clients = 9
groups = "1:2"
clusters = 2
samples-per-client = 40
rounds = 3
batch-size = 10
local-epochs = 1
epsilon = 20.0
delta = 0.001
clip-norm = 1.0
model = "linear"
evaluate-every = 1

[reference]
epochs = 5
lr = 0.2
batch-size = 10

[[columns]]
name = "rotated"

[[rows]]
name = "f-CDPFL"
set = { strategy = "f-cdpfl" }

[[rows]]
name = "Oracle"
set = { strategy = "oracle" }
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    (folder / "mine.toml").write_text(TABLE)
    table = read_table(str(folder / "mine.toml"))
    done, tuned = run_all(table, folder / "out", places={}, jobs=1)
    return table, done, document(table, done, tuned, command="", device="cpu"), folder


def test_scores_share_their_runs(result):
    _, done, told, folder = result
    assert len(done) == 4  # two methods on two seeds, whatever the number of scores
    assert [column["name"] for column in told["columns"]][:3] == ["accuracy", "minority accuracy", "F_acc"]
    assert [column["percent"] for column in told["columns"]] == [True, True, True, False, True]
    oracle = dict(zip([column["score"] for column in told["columns"]], told["rows"][1]["cells"], strict=True))
    assert oracle["clustering_accuracy"]["mean"] == 100
    assert len(oracle["clustering_accuracy"]["curve"]) == 3
    mean, spread = oracle["accuracy"]["groups"]
    assert len(mean) == len(spread) == 2
    results = [one.result for one in done if one.cell.row == "Oracle"]
    assert oracle["f_acc"]["values"] == [100 * each["f_acc"] for each in results]
    assert oracle["minority_accuracy"]["mean"] == pytest.approx(mean[0])  # the smaller group is the first
    assert "F_loss" in markdown(told)
    assert draw(told, folder / "groups.png").stat().st_size > 10000


def test_reference_models_are_trained_once_for_every_group_and_seed(result, monkeypatch):
    table, done, _, folder = result
    kept = sorted((folder / "out" / "references").glob("*.json"))
    assert len(kept) == 2  # one for each seed, whatever the method
    best = json.loads(kept[0].read_text())
    assert len(best["accuracy"]) == len(best["loss"]) == 9
    one = done[0]
    config = RunConfig({**one.cell.settings, "seed": one.cell.seed})
    monkeypatch.setattr("coterie.bench.reference.train", None)  # it must not be called again
    again = compare(one.result, config, table.reference, folder / "out" / "references")
    assert again == {key: one.result[key] for key in ("f_acc", "f_loss")}
    reference = next(
        best for path in kept if (best := json.loads(path.read_text())) and _unfair(one.result, best) == again["f_acc"]
    )
    for group in (0, 1):  # clients of a group share model and test set
        shared = np.array(reference["accuracy"])[np.array(one.result["client_group"]) == group]
        assert len(set(shared)) == 1
    assert min(reference["accuracy"]) > max(one.result["client_accuracy"]) - 0.05  # without privacy it is better
    unevaluated = {**one.result, "client_accuracy": None}
    assert compare(unevaluated, config, table.reference, folder) == {"f_acc": None, "f_loss": None}


def _unfair(result, best):
    return float(np.ptp(np.array(best["accuracy"]) - np.array(result["client_accuracy"])))


def test_first_updates_are_drawn_in_their_plane(tmp_path):
    table = read_table("rc-figure2")
    small = {
        "dataset": "digits",
        "model": "linear",
        "samples-per-client": 40,
        "epsilon": 20.0,
        "lr": 0.1,
        "clip-norm": 1.0,
    }
    columns = tuple(replace(column, settings=small) for column in table.columns[-2:])
    settings = {**table.settings, "clients": 12, "groups": "2", "clusters": 2, "rounds": 3, "batch-size": 10}
    rows = tuple(replace(row, settings={"first-batch-size": 10} if row.settings else {}) for row in table.rows)
    table = replace(table, columns=columns, rows=rows, settings=settings, seeds=(0,))
    done, tuned = run_all(table, tmp_path / "out", places={}, jobs=1)
    assert all(one.result["rounds"] == 1 for one in done)  # the noise is that of all
    told = document(table, done, tuned, command="", device="cpu")
    cell = told["rows"][1]["cells"][0]
    assert len(cell["projection"]) == len(cell["labels"]) == len(cell["groups"]) == 12
    assert sorted(set(cell["groups"])) == [0, 1]
    assert told["rows"][1]["cells"][1]["mean"] > 0  # MSS
    assert draw(told, tmp_path / "plane.png").stat().st_size > 5000
