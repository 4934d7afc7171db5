"""Scores of a round, and curves with their bands, from runs that are made up."""

import json
from pathlib import Path

import pytest

from coterie.bench.cells import Cell, Done
from coterie.bench.outcome import document, markdown
from coterie.bench.table import read_table
from coterie.bench.table_figures import _DRAWINGS
from coterie.report.plots import drawing_style

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = """
title = "Split"
source = "nobody"
plot = "curves"
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


@pytest.fixture
def told(tmp_path):
    (tmp_path / "mine.toml").write_text(TABLE)
    table = read_table(str(tmp_path / "mine.toml"))
    done = []
    for row, column in table.pairs():
        for seed in table.seeds:
            folder = tmp_path / f"{row.name}-{seed}"
            folder.mkdir()
            # Seed 4: 0.5, nothing, 0.7; seed 5: 0.1 more, and a second round for CFL.
            more = 0.1 * (seed - 4)
            shares = [0.5 + more, 0.25 if (row.name, seed) == ("CFL", 5) else None, 0.7 + more]
            lines = [{"round": number, "accuracy": share} for number, share in enumerate(shares, 1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps({"round": n}) + "\n" for n in (1, 2, 3)))
            (folder / "diagnostics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            result = {"accuracy": shares[-1], "epsilon": None, "delta": None, "notes": {}}
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
