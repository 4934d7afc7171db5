"""The page of results says what the files of results hold."""

import json
import re
import runpy
from pathlib import Path

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
        assert document["command"].startswith("coterie bench ")
        assert "dirty" not in document["machine"]["git-commit"]
        assert not re.search(r"/(work|tmp|home|root)/", path.read_text()), path.name
