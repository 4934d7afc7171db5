"""The page of results says what the files of results hold."""

import json
import re
import runpy
import tomllib
from pathlib import Path

from coterie.bench import table_figures
from coterie.bench.table import read_table, table_names

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_s_tables_are_those_of_the_files():
    page = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))
    text = page["PAGE"].read_text()
    shown = re.findall(r"<!-- ([\w-]+) -->\n", text)
    assert sorted(name for name in shown if name != "end") == sorted(path.stem for path in RESULTS)
    assert page["filled"](text) == text


def test_results_say_how_they_were_made_and_nothing_about_whose_machine_it_was():
    assert RESULTS
    for path in RESULTS:
        document = json.loads(path.read_text())
        assert document["command"].startswith(("coterie bench ", "python benchmarks/"))
        assert "dirty" not in document["machine"]["git-commit"]
        assert not re.search(r"/(work|tmp|home|root)/", path.read_text()), path.name


def test_rows_that_share_a_panel_have_different_colours():
    shared = [
        len(table.rows) for table in map(read_table, table_names()) if table.plot in ("lines", "curves", "groups")
    ]
    colours = [table_figures._colour(number) for number in range(max(shared))]
    assert max(shared) >= 9
    assert len(set(colours)) == len(colours)


def test_every_short_version_states_its_time():
    known = {name: read_table(name).quick_minutes for name in table_names()}
    assert all(minutes and 0 < minutes < 60 for minutes in known.values()), known


def test_reproductions_name_rows_of_results_that_have_published_figures():
    chosen = tomllib.loads((ROOT / "docs" / "hooks" / "reproductions.toml").read_text())
    for name, one in chosen.items():
        rows = {row["name"]: row for row in json.loads(by_name(one["table"]))["rows"]}
        assert any(cell and cell["paper"] is not None for cell in rows[one["printed"]]["cells"]), name
        assert one.get("certified", one["printed"]) in rows
    published = {row["set"]["strategy"] for path in RESULTS for row in printed_rows(path)}
    assert published - {"oracle"} <= chosen.keys()


def by_name(stem):
    return (ROOT / "benchmarks" / "results" / f"{stem}.json").read_text()


def printed_rows(path):
    """Rows with a published figure beside ours."""
    for row in json.loads(path.read_text())["rows"]:
        cells = [cell for cell in row["cells"] if cell and None not in (cell["paper"], cell["mean"])]
        if cells and "strategy" in row.get("set", {}):
            yield row
