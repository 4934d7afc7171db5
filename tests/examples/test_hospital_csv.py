"""examples/hospital-csv, as its README describes it."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.datasets import TableSchema, read_table

HERE = Path(__file__).parents[2] / "examples" / "hospital-csv"
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", (HERE / "README.md").read_text(), re.MULTILINE)]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the five tables by the script that the README names."""

    def write(*options):
        folder = tmp_path / "-".join(["sites", *options])
        monkeypatch.setattr(sys, "argv", ["write_sites.py", *options, str(folder)])
        exec(compile((HERE / "write_sites.py").read_text(), "write_sites.py", "exec"), {"__name__": "__main__"})
        return folder

    return write


@pytest.fixture
def sites(write):
    return write()


def test_raw_tables_pass_with_their_parts_and_hold_what_the_plain_ones_do(coterie, write):
    sites, raw = write(), write("--raw")
    words = "data", "check", raw, "--schema", HERE / "schema.toml"
    status, out, _ = coterie(*words)
    assert status == 1
    wrong = [line for line in out.splitlines() if line.startswith("error: ")]
    assert [re.search(r"client-(\d)", line)[1] for line in wrong] == ["1", "2", "4", "3"]  # all sites at once
    for part in (HERE / "site-parts").iterdir():
        shutil.copy(part, raw)
    status, out, err = coterie(*words, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["errors"] == []
    assert {loss["effect"] for loss in report["left-out"]["losses"]} == {"clamped"}
    schema = TableSchema.load(HERE / "schema.toml")
    names = [column.name for column in schema.columns]
    clamped = 0
    for site in range(5):
        plain, ours = (read_table(folder / f"client-{site}.csv", schema) for folder in (sites, raw))
        np.testing.assert_array_equal(ours.y, plain.y)
        same = np.ones(plain.x.shape, bool)
        for name in ours.missing:
            same[:, names.index(name)] = ours.x[:, names.index(name)] != 0
        np.testing.assert_allclose(ours.x[same], plain.x[same], atol=1e-6)
        clamped += sum(note["count"] for note in report["files"][str(raw / f"client-{site}.csv")]["notes"])
        assert dict(ours.missing) == {3: {"worst concavity": 12}, 4: {"fractal dimension error": 113}}.get(site, {})
    assert clamped == 13  # as many as in the plain tables, but one in the absent column


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
