"""examples/time-to-event, as its README describes it, on made-up patients: the trial's come with a package."""

import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parents[2] / "examples" / "time-to-event"
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", (HERE / "README.md").read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Five tables of 60 patients, the older ones with earlier events."""
    example, rng = runpy.run_path(str(HERE / "write_sites.py")), np.random.default_rng(0)
    patients = []
    for age in rng.integers(12, 70, 300).tolist():
        time, end = rng.exponential(2000 * np.exp((40 - age) / 10)), rng.uniform(300, 1200)
        record = dict.fromkeys(example["BASELINE"], "0") | {"age": str(age), "karnof": "90", "wtkg": "70"}
        patients.append(record | {"days": f"{min(time, end):.0f}", "cens": str(int(time <= end))})
    folder = tmp_path_factory.mktemp("survival") / "sites"
    example["main"](folder, patients)
    return folder


def test_the_commands_are_those_of_the_readme():
    assert [words[:2] for words in COMMANDS if words[0] == "coterie"] == [
        ["coterie", "data"], ["coterie", "run"], ["coterie", "predict"]
    ]  # fmt: skip


def test_tables_pass_and_a_short_run_orders_patients(coterie, sites, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    status, out, err = coterie("data", "check", sites, "--schema", "schema.toml", "--json")
    assert (status, err) == (0, "")
    assert sum(report["usable"] for report in json.loads(out)["files"].values()) == 300
    short = "--rounds", 10, "--set", "samples-per-client=48", "--set", "batch-size=24"
    run = tmp_path / "run"
    status, out, err = coterie("run", "--config", "run.toml", "--data-dir", sites, "--out", run, *short, "--json")
    assert status == 0, err
    assert json.loads(out)["certified"]
    assert json.loads((run / "diagnostics.json").read_text())["concordance"] > 0.6
    status, _, err = coterie("predict", run, sites / "client-0.csv", "--cluster", 0, "--out", tmp_path / "p.csv")
    assert status == 0, err
    assert (tmp_path / "p.csv").read_text().startswith("record,cluster,survival_180,")


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    example = runpy.run_path(str(HERE / "write_sites.py"))
    monkeypatch.setitem(example["patients"].__globals__, "distribution", missing)
    with pytest.raises(SystemExit, match="pip install --no-deps lifelines"):
        example["patients"]()


def missing(name):
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)
