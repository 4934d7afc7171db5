"""``coterie bench``: what it lists, refuses, prints and leaves."""

import io
from importlib import import_module
from pathlib import Path

import pytest
from kit.commands import assert_refused, document
from rich.console import Console

from coterie.bench.cells import Cell, Done
from coterie.bench.table import table_names

TABLE = """
title = "Two methods"
source = "nobody"
seeds = [0]

[set]
clients = 20
clusters = 2
groups = "2"
rounds = 2
sampling-rate = 0.5
local-epochs = 1
samples-per-client = 10
model = "linear"

[[columns]]
name = "ε = 8"

[[rows]]
name = "IFCA"
paper = [12.5]

[[rows]]
name = "FedPer"
set = { strategy = "fedper", clusters = 1, reseed-every = 0, model = "mlp-32" }
"""


def test_tables_are_listed(coterie):
    status, out, _ = coterie("bench", "--json")
    assert status == 0
    listed = document(out)
    assert list(listed) == table_names()
    assert {f"rr-table{n}" for n in (1, 2, 3, 4, 5, 9)} | {"rr-figure2", "rr-figure3"} < set(listed)


def test_a_table_of_one_s_own(coterie, tmp_path):
    (tmp_path / "mine.toml").write_text(TABLE)
    status, out, err = coterie("bench", "mine.toml", "--jobs", 1, "--out", "kept", "--json")
    assert status == 0, err
    result = document(out)
    assert document((tmp_path / "kept" / "table.json").read_text()) == result
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        *("lock", "runs", "table.json", "table.md", "table.png")
    }
    assert result["command"] == "coterie bench mine.toml"
    (ifca,), (fedper,) = (row["cells"] for row in result["rows"])
    assert ifca["difference"] == ifca["mean"] - 12.5
    assert 0 < fedper["epsilon"] <= 8
    assert "1/2" in err
    assert "2/2" in err

    status, out, _ = coterie("bench", "mine.toml", "--out", "kept", "--seeds", 1)
    assert status == 0
    assert "12.50 → " in out
    assert "kept/table.json" in out


def test_a_bar_counts_runs():
    module, screen = import_module("coterie.bench.commands.bench"), io.StringIO()
    runs = [Done(Cell("a", "b", 0, {}), None, "no data", Path(), reused) for reused in (True, False)]
    with module._progress(Console(file=screen, force_terminal=True), 2) as seen:
        for left, run in zip((1, 0), runs, strict=True):
            seen(run, left)
    assert "2/2" in screen.getvalue()


@pytest.mark.slow
def test_a_table_like_another_finds_its_runs(coterie, tmp_path):
    (tmp_path / "mine.toml").write_text(TABLE)
    other = (
        'like = "mine.toml"\ntitle = "Again"\nscore = "clustering_accuracy"\n[[rows]]\nname = "IFCA"\npaper = [90]\n'
    )
    (tmp_path / "other.toml").write_text(other)
    chosen = ("--jobs", 1, "--row", "IFCA", "--json")
    status, _, err = coterie("bench", "mine.toml", *chosen)
    assert status == 0, err
    status, out, _ = coterie("bench", "other.toml", *chosen, "--column", "ε =")
    assert status == 0
    assert document(out)["command"] == "coterie bench other.toml --row IFCA --column 'ε ='"
    assert document(out)["rows"][0]["cells"][0]["paper"] == 90
    assert document((tmp_path / "bench" / "mine" / "table.json").read_text())["columns"][0]["score"] == "accuracy"
    assert (tmp_path / "bench" / "other" / "table.json").exists()
    assert len(list((tmp_path / "bench").rglob("result.json"))) == 1
    assert_refused(coterie("bench", "other.toml", "--column", "no"), "has no column 'no'")


def test_what_is_no_table_is_refused(coterie, tmp_path):
    assert_refused(coterie("bench", "rr-tabel1"), "rr-tabel1", "did you mean 'rr-table1'?")
    (tmp_path / "mine.toml").write_text("rows = 3")
    assert_refused(coterie("bench", "mine.toml"), "mine.toml is not a valid table")


def test_a_result_names_no_folder_of_this_machine(coterie, tmp_path):
    (tmp_path / "mine.toml").write_text(TABLE.replace('model = "linear"', 'model = "linear"\ndataset = "emnist"'))
    (tmp_path / "none").mkdir()
    status, out, err = coterie("bench", "mine.toml", "--data-dir", tmp_path / "none", "--jobs", 1, "--json")
    assert status == 1  # nothing could run
    assert str(tmp_path / "none") in err  # whoever runs it is told where it looked
    reason = document(out)["rows"][0]["cells"][0]["why"]
    assert "DIR has no" in reason
    assert str(tmp_path) not in out
