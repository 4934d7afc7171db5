"""Tables: what their files say, that cells are kept and tuned on clients that were set aside, and what comes out."""

import fcntl
import io
import json

import numpy as np
import pytest
from kit.tables import for_rows
from rich.console import Console

from coterie.bench.cells import Done, _run_one, _settings, count, run_all
from coterie.bench.outcome import console_table, document, markdown
from coterie.bench.table import BenchError, read_table, table_names
from coterie.bench.table_figures import draw
from coterie.datasets.shifts import LINES
from coterie.rounds.averaging import Averaging
from coterie.server import RunConfig

TABLE = """
title = "Digits"
source = "nobody, Table 0"
seeds = [0, 1]
{extra}
[set]
clients = 30
samples-per-client = 8
clusters = 2
groups = "2"
rounds = 2
local-epochs = 4
epsilon = 8.0

[sets]
plain = {{ reseed-every = 0 }}

[[columns]]
name = "one"

[[columns]]
name = "two"
x = 2
set = {{ rounds = 3 }}
tuned-at = "one"

[[rows]]
name = "IFCA"
paper = [50.0, "-"]
with = "plain"
set = {{ privacy-unit = "none", lr = 0.3 }}
tune = ["lr"]

[[rows]]
name = "FedAvg"
columns = ["two"]
set = {{ strategy = "fedavg", clusters = 1, reseed-every = 0 }}

[[rows]]
name = "elsewhere"
columns = ["one"]
paper = [12.5]
set = {{ dataset = "mnist" }}

[[rows]]
name = "beyond reach"
columns = ["one"]
set = {{ mechanism = "paper", epsilon = 0.001 }}

[tuning]
seeds = [7]
set = {{ clients = 20, validation-clients = 10 }}
grid = {{ lr = [1e-6, 0.3] }}

[quick]
rows = ["IFCA"]
columns = ["two"]
set = {{ rounds = 1 }}
"""


def written(tmp_path, extra=""):
    path = tmp_path / "toy.toml"
    path.write_text(TABLE.format(extra=extra))
    return str(path)


@for_rows("quick", [False, True])
@for_rows("name", table_names())
def test_every_cell_of_every_table_is_a_configuration_that_can_run(name, quick):
    table = read_table(name, quick=quick)
    assert table.pairs()
    for row, column in table.pairs():
        config = RunConfig(_settings(table, row, column, {}))
        if config.privacy.mechanism == "paper":  # as printed: not the steps and averages that follow from the noise
            assert (config.server_lr, config.averaging) == (1.0, Averaging(0.0))
        for choice in table.candidates(row):
            RunConfig(_settings(table, row, table.column(column.tuned_at), choice, table.tuning_settings))
    assert not set(table.seeds) & set(table.tuning_seeds)


@pytest.mark.slow
def test_a_table_from_its_file_to_its_picture(tmp_path):
    table = read_table(written(tmp_path))
    assert count(table) == 2 + 2 * 5
    ended = []
    places = {"device": "cpu", "data-dir": str(tmp_path)}
    done, tuned = run_all(table, tmp_path / "out", places=places, jobs=1, seen=lambda one, left: ended.append(left))
    assert ended == list(range(11, -1, -1))
    assert tuned == {("IFCA", "one"): {"lr": 0.3}}  # 1e-6 cannot move a model

    result = document(table, done, tuned, command="coterie bench toy", device="cpu")
    json.dumps(result, allow_nan=False)
    rows = {row["name"]: row["cells"] for row in result["rows"]}
    first, second = rows["IFCA"]
    own = [100 * one.result["accuracy"] for one in done if (one.cell.row, one.cell.column) == ("IFCA", "one")]
    assert first["values"] == own
    assert first["mean"] == pytest.approx(sum(own) / 2)
    assert first["std"] == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
    assert first["difference"] == pytest.approx(first["mean"] - 50)
    assert first["tuned"] == second["tuned"] == {"lr": 0.3}
    assert (second["paper"], second["difference"]) == (None, None)
    assert rows["FedAvg"][0] is None
    assert "coterie datasets --download mnist" in rows["elsewhere"][0]["why"]
    assert "no noise reaches epsilon 0.001" in rows["beyond reach"][0]["why"]

    text = markdown(result)
    assert f"| IFCA | 50.00 → {first['mean']:.2f} ± {first['std']:.2f} ({first['difference']:+.2f}) |" in text
    assert "| elsewhere | 12.50 → – [1] |" in text
    assert "[2] no noise reaches" in text
    view, notes = console_table(result)
    assert (view.row_count, len(view.columns), len(notes)) == (4, 3, 2)
    cells = [[cell and {**cell, "paper": None} for cell in row["cells"]] for row in result["rows"]]
    unpublished = {**result, "rows": [{**row, "cells": own} for row, own in zip(result["rows"], cells, strict=True)]}
    assert "paper" not in console_table(unpublished)[0].title
    console = Console(width=30, file=io.StringIO())
    console.print(view)
    assert "…" not in console.file.getvalue()
    for plot in ("dots", "lines"):
        assert draw({**result, "plot": plot}, tmp_path / f"{plot}.png").stat().st_size > 5000

    with (tmp_path / "out" / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BenchError, match="is in use by another process"):
            run_all(table, tmp_path / "out", places=places, jobs=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    again, _ = run_all(table, tmp_path / "out", places=places, jobs=1)
    assert [one.result for one in again] == [one.result for one in done]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")} == before


def test_curves_are_drawn_from_every_round_that_was_evaluated(tmp_path, monkeypatch):
    def in_this_process(cells, out, places, jobs):
        for cell in cells:
            folder = out / "runs" / cell.key
            yield Done(cell, *_run_one(cell, folder, places), folder)

    monkeypatch.setattr("coterie.bench.cells._run", in_this_process)  # see test_cells.py
    table = read_table(written(tmp_path, 'plot = "curves"'), quick=True, seeds=[3])
    assert (table.quick, table.seeds, count(table)) == (True, (3,), 1)
    done, tuned = run_all(table, tmp_path / "out", places={"data-dir": str(tmp_path)}, jobs=1)
    result = document(table, done, tuned, command="", device="cpu")
    ((cell,),) = [row["cells"] for row in result["rows"]]
    assert cell["curve"] == [[1, pytest.approx(cell["mean"], abs=1e-3), 0.0]]
    assert draw(result, tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.slow
def test_lines_are_drawn_over_their_data(tmp_path):
    some = read_table("rr-table9", rows=["IFCA", "FedAvg"])
    assert [row.name for row in some.rows] == ["FedAvg", "IFCA"]
    with pytest.raises(BenchError, match="has no row 'IFCO'; available rows: 'FedAvg', 'IFCA'"):
        read_table("rr-table9", rows=["IFCO"])
    table = read_table("rr-table9", quick=True)
    from dataclasses import replace

    table = replace(table, columns=table.columns[:1], rows=table.rows[:2], settings={**table.settings, "rounds": 20})
    done, tuned = run_all(table, tmp_path / "out", places={}, jobs=1)
    result = document(table, done, tuned, command="", device="cpu")
    assert [len(row["cells"][0]["lines"]) for row in result["rows"]] == [1, 4]
    fitted = np.array(sorted(result["rows"][1]["cells"][0]["lines"]))
    np.testing.assert_allclose(fitted, sorted(LINES), atol=0.3)  # slope first
    assert len(result["columns"][0]["points"][0]) == 400
    assert draw(result, tmp_path / "pictures.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("seeds = [7]", "seeds = [1]"), "must not use the reported seeds"),
        (("validation-clients = 10", "epsilon = 8.0"), "test data must not be used"),
        (('tuned-at = "one"', 'tuned-at = "on"'), "unknown column"),
        (('tune = ["lr"]', 'tune = ["clip"]'), "tuned setting"),
        (("paper = [12.5]", "paper = [1, 2, 3]"), "3 published values for 1 columns"),
        (('title = "Digits"', ""), "title"),
        (('title = "Digits"', 'title = ""\nscore = "accuracy@end"'), "end"),
        (('title = "Digits"', 'title = ""\nscore = "accuracy@5"\nplot = "curves"'), "without '@'"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, change, complaint):
    path = tmp_path / "toy.toml"
    path.write_text(TABLE.format(extra="").replace(*change))
    with pytest.raises(BenchError, match=complaint):
        read_table(str(path))


def test_an_unknown_table_is_refused_with_the_nearest():
    with pytest.raises(BenchError, match="rr-table1"):
        read_table("rr-tabel1")
