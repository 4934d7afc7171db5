"""Rows that are clustered in one place, tables that share runs, choosing columns, and runs that are continued."""

import json
import shutil

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from coterie.bench.cells import Cell, _run_one, count, run_all
from coterie.bench.central import cluster
from coterie.bench.outcome import console_table, document, markdown
from coterie.bench.table import BenchError, read_table
from coterie.bench.table_figures import draw
from coterie.server import RunConfig, RunFolder

pytestmark = pytest.mark.slow

TABLE = """
title = "Records"
source = "nobody, Table 3"
score = "nmi"
seeds = [0, 1]

[set]
clients = 10
clusters = 10
groups = "1"
shift = "none"
privacy-unit = "none"
rounds = 1

[[columns]]
name = "Digits, p = 0"
set = { label-skew = "non-iid:0" }

[[columns]]
name = "Digits, p = 0.5"
set = { label-skew = "non-iid:0.5" }

[[columns]]
name = "MNIST"
set = { dataset = "mnist", label-skew = "non-iid:0" }

[[rows]]
name = "KM"
central = "km"
paper = [0.7, 0.7, 0.5]
with = "together"

[[rows]]
name = "FedAvg"
columns = ["Digits, p = 0"]
paper = [0.1]
set = { strategy = "fedavg", clusters = 1 }

[sets]
together = { label-skew = "non-iid:0" }

[quick]
columns = ["Digits, p = 0"]
"""
LIKE = """
like = "{path}"
title = "Their other score"
source = "nobody, Table 4"
score = "kappa"

[[rows]]
name = "KM"
paper = [0.6, 0.6, 0.4]
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("central")
    (folder / "toy.toml").write_text(TABLE)
    table = read_table(str(folder / "toy.toml"))
    done, tuned = run_all(table, folder / "out", places={"device": "cpu", "data-dir": str(folder)}, jobs=1)
    return table, done, document(table, done, tuned, command="", device="cpu"), folder


def config(**changes):
    settings = {"clients": 10, "clusters": 10, "groups": "1", "shift": "none", "privacy-unit": "none"}
    settings |= {"label-skew": "non-iid:0", "seed": 0, "device": "cpu"}
    return RunConfig(settings | {name.replace("_", "-"): value for name, value in changes.items()})


def test_all_records_are_clustered_once_whatever_the_column(ran):
    _, done, _, folder = ran
    km = [one for one in done if (one.cell.row, one.cell.column) == ("KM", "Digits, p = 0")]
    again = [one for one in done if (one.cell.row, one.cell.column) == ("KM", "Digits, p = 0.5")]
    assert [one.folder for one in km] == [one.folder for one in again]
    assert km[0].folder != km[1].folder  # seeds
    assert len(list((folder / "out" / "runs").iterdir())) == 4  # two of them, and FedAvg's
    counts = np.array(km[0].result["confusion"])
    truth = load_digits().target
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(truth))  # every record of every class
    clusters, classes = (np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape))
    assert km[0].result["nmi"] == pytest.approx(normalized_mutual_info_score(classes, clusters))
    assert km[0].result["ari"] == pytest.approx(adjusted_rand_score(classes, clusters))
    assert 0.70 < km[0].result["nmi"] < 0.78  # k-means of scikit-learn's digits
    assert km[0].result["kappa"] < km[0].result["accuracy"]
    assert km[0].result["epsilon"] is None
    assert (km[0].result["strategy"], km[0].result["classes"]) == ("central km", 10)


def test_indices_are_numbers_of_four_decimals(ran, tmp_path):
    table, done, told, _ = ran
    assert [column["percent"] for column in told["columns"]] == [False] * 3
    cell = told["rows"][0]["cells"][0]
    own = [one.result["nmi"] for one in done if (one.cell.row, one.cell.column) == ("KM", "Digits, p = 0")]
    assert cell["values"] == own
    assert cell["mean"] == pytest.approx(sum(own) / 2)
    assert f"| 0.7000 → {cell['mean']:.4f} ± {cell['std']:.4f} ({cell['mean'] - 0.7:+.4f}) |" in markdown(told)
    view, _ = console_table(told)
    assert f"{cell['mean']:.4f}" in next(iter(view.columns[1].cells))
    assert "0.5000 → – [1]" in markdown(told)  # the others ran
    assert "coterie datasets --download mnist" in told["rows"][0]["cells"][2]["why"]
    assert draw(told, tmp_path / "dots.png").stat().st_size > 5000
    old = {**told, "columns": [{**column, "percent": True} for column in told["columns"]]}
    assert f"0.70 → {cell['mean']:.2f} ±" in markdown(old)  # what was published in percent stays so
    assert table.columns[0].name == "Digits, p = 0"


def test_what_was_clustered_is_kept(ran):
    table, done, _, folder = ran
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")}
    assert len(before) == 4
    again, _ = run_all(table, folder / "out", places={"data-dir": str(folder)}, jobs=1)
    assert [one.result for one in again] == [one.result for one in done]
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")} == before


def test_a_table_like_another_has_its_runs_and_figures_of_its_own(ran):
    table, done, _, folder = ran
    (folder / "other.toml").write_text(LIKE.format(path=folder / "toy.toml"))
    other = read_table(str(folder / "other.toml"))
    assert (other.title, other.columns[0].score, other.like) == ("Their other score", "kappa", "toy")
    assert [row.paper for row in other.rows] == [(0.6, 0.6, 0.4), (None, None, None)]
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")}
    again, tuned = run_all(other, folder / "out", places={"data-dir": str(folder)}, jobs=1)
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")} == before
    told = document(other, again, tuned, command="", device="cpu")
    assert told["rows"][0]["cells"][0]["values"] == [one.result["kappa"] for one in done[:2]]
    assert read_table(str(folder / "toy.toml")).like == table.name == "toy"
    assert count(read_table(str(folder / "other.toml"), quick=True)) == 2


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["Digits"], ["Digits, p = 0", "Digits, p = 0.5"]),
        (["Digits, p = 0"], ["Digits, p = 0"]),  # a whole name is that column alone
        (["MNIST", "Digits, p = 0.5"], ["Digits, p = 0.5", "MNIST"]),
    ],
)
def test_columns_are_chosen_by_how_their_names_begin(tmp_path, words, kept):
    (tmp_path / "toy.toml").write_text(TABLE)
    table = read_table(str(tmp_path / "toy.toml"), columns=words)
    assert [column.name for column in table.columns] == kept
    assert table.rows[0].paper == tuple({"MNIST": 0.5}.get(name, 0.7) for name in kept)


def test_columns_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "toy.toml").write_text(TABLE)
    with pytest.raises(BenchError, match="toy has no column 'p = 0'; available columns: 'Digits, p = 0', "):
        read_table(str(tmp_path / "toy.toml"), columns=["p = 0"])
    (tmp_path / "toy.toml").write_text(TABLE.replace('name = "MNIST"', 'name = "MNIST"\ntuned-at = "Digits, p = 0"'))
    with pytest.raises(BenchError, match="'MNIST' is tuned in column 'Digits, p = 0': add that column"):
        read_table(str(tmp_path / "toy.toml"), columns=["MNIST"])
    (tmp_path / "toy.toml").write_text(TABLE.replace('central = "km"', 'central = "kn"'))
    with pytest.raises(BenchError, match="kn"):
        read_table(str(tmp_path / "toy.toml"))


@pytest.mark.parametrize("method", ["fcm", "dcn"])
def test_other_references(monkeypatch, tmp_path, method):
    changes = {"pretrain_epochs": 2, "joint_epochs": 1, "dcn_noise": 0.5} if method == "dcn" else {}
    changes["strategy"] = "ppfc-gan" if method == "dcn" else "ffcm"
    seen = {}
    if method == "dcn":
        from coterie.clustering.dcn import DCN

        fit = DCN.fit
        monkeypatch.setattr(DCN, "fit", lambda self, x, **how: seen.setdefault("fit", (self, fit(self, x, **how)))[1])
    result = cluster(method, config(**changes), tmp_path / "run")
    released, exact = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("result", "diagnostics")
    )
    assert {**released, **exact} == result
    assert not released.keys() & {"accuracy", "nmi", "kappa", "ari", "confusion"}
    assert np.sum(result["confusion"]) == 1797
    assert result["nmi"] > (0.6 if method == "fcm" else 0.3)
    if method == "dcn":
        network, _ = seen["fit"]
        assert (network.k, network.pretrain_epochs, network.joint_epochs, network.noise) == (10, 2, 1, 0.5)
        assert (network.seed, network.device) == (0, "cpu")


def test_what_cannot_be_clustered_says_why(tmp_path):
    with pytest.raises(BenchError, match="real targets"):
        cluster("km", config(dataset="lines-easy", label_skew="none", model="regression"), tmp_path)
    result, why = _run_one(
        Cell("KM", "", 0, {**config(samples_per_client=1).values, "clusters": 0}, central="km"), tmp_path / "r", {}
    )
    assert result is None
    assert "clusters = 0" in why


def cell(**changes):
    settings = {"clients": 30, "groups": "2", "clusters": 2, "samples-per-client": 8, "rounds": 4, "evaluate-every": 4}
    return Cell("IFCA", "one", changes.pop("seed", 0), {**settings, **changes})


def seconds(folder):
    return [json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def cut_short(monkeypatch, folder, one, after):
    """Run ``one`` and kill it when so many rounds are finished."""
    finished = RunFolder.round_finished

    def killed(self, line):
        finished(self, line)
        if line["round"] == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "round_finished", killed)
        with pytest.raises(KeyboardInterrupt):
            _run_one(one, folder, {"device": "cpu"})
    assert not (folder / "result.json").exists()


def test_a_run_that_was_cut_short_goes_on_where_it_was(monkeypatch, tmp_path):
    whole, _ = _run_one(cell(), tmp_path / "whole", {"device": "cpu"})
    cut_short(monkeypatch, tmp_path / "cut", cell(), 2)
    before = seconds(tmp_path / "cut")
    result, why = _run_one(cell(), tmp_path / "cut", {"device": "cpu"})
    assert (why, result["accuracy"], result["rounds"]) == (None, whole["accuracy"], 4)
    assert seconds(tmp_path / "cut")[:2] == before[:2]  # these two were not run again


@pytest.mark.parametrize("spoilt", ["settings", "key", "config", "ledger"])
def test_a_run_that_cannot_go_on_starts_anew(monkeypatch, tmp_path, spoilt):
    whole, _ = _run_one(cell(), tmp_path / "whole", {"device": "cpu"})
    folder = tmp_path / "cut"
    cut_short(monkeypatch, folder, cell(seed=1) if spoilt == "settings" else cell(), 2)
    before = seconds(folder)
    text = (folder / "config.toml").read_text()
    if spoilt == "key":
        (folder / "config.toml").write_text(text.replace("[config]\n", "[config]\ngone = 3\n"))
    if spoilt == "config":
        (folder / "config.toml").write_text(text[:20])
    if spoilt == "ledger":
        (folder / "ledger.jsonl").write_text("{}\n")
    result, why = _run_one(cell(), folder, {"device": "cpu"})
    assert (why, result["accuracy"], result["rounds"]) == (None, whole["accuracy"], 4)
    assert seconds(folder)[:2] != before[:2]
    shutil.rmtree(folder)


def test_lines_have_a_panel_for_every_score_and_panel(tmp_path, monkeypatch):
    columns = [
        {
            "name": f"{panel}{x}{score}",
            "setting": f"{panel}{x}",
            "panel": panel,
            "score": score,
            "percent": False,
            "x": x,
        }
        for panel in ("p = 0", "p = 1")
        for x in (0.0, 0.5)
        for score in ("nmi", "kappa")
    ]
    cells = [{"mean": float(place), "std": None} for place in range(len(columns))]
    told = {"plot": "lines", "title": "T", "axis": "rate", "columns": columns, "rows": [{"name": "A", "cells": cells}]}
    drawn = []
    monkeypatch.setattr("coterie.bench.table_figures.save_figure", lambda figure, path: drawn.append(figure))
    draw(told, tmp_path / "lines.png")
    panels = [axes for axes in drawn[0].axes if axes.lines]
    assert [(axes.get_title("left"), axes.get_ylabel()) for axes in panels] == [
        *(("p = 0", "NMI"), ("p = 1", "NMI"), ("p = 0", "kappa"), ("p = 1", "kappa"))
    ]
    assert [axes.lines[0].get_ydata().tolist() for axes in panels] == [[0, 2], [4, 6], [1, 3], [5, 7]]
