"""Scores of a round, curves with their bands, and how one setting's clients were split: from runs that are made up."""

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.bench.cells import Cell, Done
from coterie.bench.outcome import document, markdown
from coterie.bench.table import read_table
from coterie.bench.table_figures import _DRAWINGS, draw
from coterie.report.plots import drawing_style

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = """
title = "Split"
source = "nobody"
plot = "splits"
scores = ["accuracy@2", "accuracy"]
seeds = [4, 5]

[set]
clients = 4
groups = "2"
rounds = 3
privacy-unit = "none"

[[columns]]
name = "permuted"

[[rows]]
name = "FedAvg"
set = { strategy = "fedavg", clusters = 1 }

[[rows]]
name = "CFL"
"""
HALVES = [[0, 2], [1, 3]]  # the true groups


def node(number, parent, ended, why, clients, cluster):
    return {
        "node": number,
        "parent": parent,
        "born": 1,
        "ended": ended,
        "why": why,
        "clients": clients,
        "cluster": cluster,
        "similarity": None,
    }


TREE = [
    node(0, None, 2, "split", [0, 1, 2, 3], None),
    node(1, 0, None, None, HALVES[0], 0),
    node(2, 0, None, None, HALVES[1], 1),
]


def similarities(apart):
    """Client i with client j: 0.1 i + 0.01 j for i > j; between the groups less by 0.5, or nothing."""
    matrix = np.array([[0.1 * max(i, j) + 0.01 * min(i, j) for j in range(4)] for i in range(4)])
    other = np.add.outer(np.arange(4), np.arange(4)) % 2 == 1
    matrix[other] = np.nan if apart else matrix[other] - 0.5
    return {"matrix": matrix.astype(np.float32), "clients": np.arange(4), "labels": np.zeros(4, int)}


@pytest.fixture
def told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "coterie.bench.outcome.assign_groups", lambda clients, shares: np.array([0, 1] * (clients // 2))
    )
    (tmp_path / "mine.toml").write_text(TABLE)
    table = read_table(str(tmp_path / "mine.toml"))
    done = []
    for row, column in table.pairs():
        for seed in table.seeds:
            folder = tmp_path / f"{row.name}-{seed}"
            (folder / "evidence").mkdir(parents=True)
            # Seed 4: 0.5, nothing, 0.7; seed 5: 0.1 more, and a second round for CFL.
            more = 0.1 * (seed - 4)
            shares = [0.5 + more, 0.25 if (row.name, seed) == ("CFL", 5) else None, 0.7 + more]
            lines = [
                {"round": number, "accuracy": share, "group_accuracy": [share - 0.125, None] if share else None}
                for number, share in enumerate(shares, 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps({"round": n}) + "\n" for n in (1, 2, 3)))
            (folder / "diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            result = {"accuracy": shares[-1], "epsilon": None, "delta": None, "notes": {}}
            if row.name == "CFL":
                result["notes"] = {"tree": TREE}
                np.savez(folder / "evidence" / "similarities-0002.npz", **similarities(False))
                np.savez(folder / "evidence" / "similarities-0003.npz", **similarities(True))
            settings = {**table.settings, **row.settings}
            done.append(Done(Cell(row.name, column.setting, seed, settings), result, None, folder))
    return json.loads(json.dumps(document(table, done, {}, command="", device="cpu"), allow_nan=False))


def test_a_score_of_a_round_is_that_round_s(told):
    (fedavg, _), (cfl, _) = (row["cells"] for row in told["rows"])
    assert (fedavg["mean"], fedavg["values"]) == (None, [])
    assert (cfl["mean"], cfl["std"]) == (25, None)
    assert "curve" not in cfl
    text = markdown(told)
    assert "| method | accuracy after round 2 | accuracy |" in text
    assert "| FedAvg | – | 75.00 ± 7.07 |" in text


def test_curves_are_mean_and_deviation_over_seeds(told):
    assert told["rows"][1]["cells"][1]["curve"] == [[1, 55, 7.071], [2, 25, 0], [3, 75, 7.071]]
    with drawing_style():
        axes = _DRAWINGS["curves"](told).axes
    assert [each.get_title(loc="left") for each in axes] == ["permuted"]
    assert [line.get_label() for line in axes[0].lines] == ["FedAvg", "CFL"]
    assert axes[0].lines[1].get_ydata().tolist() == [55, 25, 75]
    band = axes[0].collections[1].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((25, 75 + 7.071))
    assert {round(y, 3) for x, y in band if x == 1} == {55 - 7.071, 55 + 7.071}


def test_the_document_holds_how_the_first_seed_s_clients_were_split(told):
    plain, cell = (row["cells"][1] for row in told["rows"])
    assert "similarities" not in plain
    assert (cell["seed"], cell["splits"], cell["groups"]) == (4, [2], [0, 0, 1, 1])
    assert cell["by group"] == [[1, 37.5, None], [3, 57.5, None]]
    whole, apart = cell["similarities"]  # clients in the order 0, 2, 1, 3
    assert whole == {"round": 2, "values": [[0.2], [-0.4, -0.29], [-0.2, -0.18, 0.31]]}
    assert apart == {"round": 3, "values": [[0.2], [None, None], [None, None, 0.31]]}


def test_splits_are_drawn_as_they_were(told, tmp_path):
    with drawing_style():
        figure = _DRAWINGS["splits"](told)
    left, right, first, second, _ = figure.axes
    names = [line.get_label() for line in left.lines if not line.get_label().startswith("_")]
    assert names == ["FedAvg", "CFL", "CFL: every true group, seed 4"]
    for axes in (left, right):
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [2]
    dots = {line.get_label(): line for line in right.lines if line.get_marker() == "o"}
    assert dots["of one group"].get_xdata().tolist() == [2, 2, 3, 3]
    assert dots["of one group"].get_ydata().tolist() == [0.2, 0.31, 0.2, 0.31]
    different = dots["of different groups"].get_ydata()
    assert sorted(different[:4]) == [-0.4, -0.29, -0.2, -0.18]
    assert np.isnan(different[4:]).all()
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["round 2", "round 3"]
    drawn = first.images[0].get_array()
    assert (drawn[0, 1], drawn[1, 0], drawn[0, 3]) == (0.2, 0.2, -0.2)
    assert np.ma.getmaskarray(second.images[0].get_array()).sum() == 16 - 4
    assert draw(told, tmp_path / "splits.png").stat().st_size > 10000
    alone = {**told, "rows": told["rows"][:1]}
    assert draw(alone, tmp_path / "alone.png").stat().st_size > 5000
