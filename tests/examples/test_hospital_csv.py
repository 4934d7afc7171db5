"""examples/hospital-csv, as its README describes it."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "examples" / "hospital-csv"
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", (HERE / "README.md").read_text(), re.MULTILINE)]


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """The folder of the five tables, written by the script that the README names."""
    monkeypatch.setattr(sys, "argv", ["write_sites.py", str(tmp_path / "sites")])
    exec(compile((HERE / "write_sites.py").read_text(), "write_sites.py", "exec"), {"__name__": "__main__"})
    return tmp_path / "sites"


def test_the_readme_lists_the_commands():
    assert [words[:3] for words in COMMANDS if words[0] == "coterie"] == [
        ["coterie", "data", "check"],
        ["coterie", "run", "--config"],
        ["coterie", "privacy", "check"],
        ["coterie", "predict", "runs/hospital"],
    ]
    assert ["python", "write_sites.py", "sites"] in COMMANDS


def test_the_tables_are_without_errors_and_the_schema_clamps_what_it_says(coterie, sites, monkeypatch):
    monkeypatch.chdir(HERE)
    clamped = 0
    for site in range(5):
        check = next(words for words in COMMANDS if words[1:3] == ["data", "check"])
        words = [str(sites / f"client-{site}.csv") if word.startswith("sites/") else word for word in check[1:]]
        status, out, err = coterie(*words, "--json")
        assert (status, err) == (0, "")
        (report,) = json.loads(out)["files"].values()
        assert report["records"] == report["usable"] == (114 if site < 4 else 113)
        clamped += sum(note["count"] for note in report["notes"])
    assert clamped == 14  # the published ranges are rounded


@pytest.mark.slow
def test_raw_tables_reach_88_percent_at_record_level_in_certified_runs(coterie, sites, tmp_path, monkeypatch):
    """Three runs without a seed: 0.88 is six standard deviations of their mean below what README.md reports."""
    monkeypatch.chdir(HERE)
    run = next(words for words in COMMANDS if words[1] == "run")
    accuracies = []
    for number in range(3):
        words = [str(sites) if word == "sites" else word for word in run[1:]]
        words[words.index("--out") + 1] = str(tmp_path / f"run-{number}")
        status, out, err = coterie(*words, "--json")
        assert status == 0, err
        result = json.loads(out)
        assert result["certified"]
        assert 7.9 < result["epsilon"] <= 8
        assert result["delta"] == 1e-4
        accuracies.append(result["diagnostics"]["accuracy"])
        assert coterie("privacy", "check", tmp_path / f"run-{number}")[0] == 0
    assert sum(accuracies) / 3 >= 0.88
    status, out, err = coterie("predict", tmp_path / "run-0", sites / "client-0.csv")
    assert (status, len(out.splitlines()), out.splitlines()[1].split(",")[2]) == (0, 115, "malignant"), err
