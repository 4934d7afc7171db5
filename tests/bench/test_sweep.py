"""`coterie sweep`: combinations of settings on several seeds, in parallel, resumed, compared."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas
import pytest
from kit.commands import assert_refused, document
from kit.tables import for_rows

from coterie.bench.sweep import seeds_of, sweep
from coterie.bench.table import BenchError
from coterie.fields.settings import ConfigError

SMALL = ["--set", "clients=20", "--set", "rounds=1", "--set", "local-epochs=1", "--set", "sampling-rate=1"]


def test_rows_and_columns():
    table = sweep({"strategy": ["ifca", "fedavg"], "epsilon": ["1", "2", "4"], "rounds": "5"}, (0, 1))
    assert [row.name for row in table.rows] == ["strategy = ifca", "strategy = fedavg"]
    assert [(column.name, column.x) for column in table.columns] == [
        ("epsilon = 1", 1.0),
        ("epsilon = 2", 2.0),
        ("epsilon = 4", 4.0),
    ]
    assert (table.plot, table.axis, table.settings, table.seeds) == ("lines", "epsilon", {"rounds": "5"}, (0, 1))


def test_names_alone():
    table = sweep({"strategy": ["ifca", "fedavg"], "shift": ["rotation", "label-shift"]}, (0,))
    assert [row.settings for row in table.rows] == [{"strategy": "ifca"}, {"strategy": "fedavg"}]
    assert [column.settings for column in table.columns] == [{"shift": "rotation"}, {"shift": "label-shift"}]
    assert table.plot == "dots"


def test_a_setting_of_one_strategy():
    table = sweep({"strategy": ["ifca", "fedprox"], "fedprox.proximal-mu": ["0.1", "1"]}, (0,))
    assert (len(table.rows), len(table.columns)) == (2, 2)


def test_one_combination():
    table = sweep({"rounds": 5}, (0, 1, 2))
    assert ([row.name for row in table.rows], [column.name for column in table.columns]) == (["ifca"], ["accuracy"])


def test_seeds():
    assert seeds_of("0-2, 7,9-9") == (0, 1, 2, 7, 9)
    for text in ("", "a", "1-", "-1", "1..3", "4-2", "0-100000000"):
        with pytest.raises(BenchError, match="--seeds"):
            seeds_of(text)


@for_rows(
    ("settings", "seeds", "error", "message"),
    [
        ({"epsilno": ["1", "2"]}, (0,), ConfigError, "did you mean 'epsilon'"),
        ({"epsilon": ["1", "-2"]}, (0,), ConfigError, "epsilon = '-2'"),
        ({"strategy": ["ifca", "fedagv"]}, (0,), ConfigError, "did you mean 'fedavg'"),
        ({"strategy": ["ifca", "fedavg"], "fedprox.proximal-mu": "1"}, (0,), ConfigError, "no strategy of the sweep"),
        ({"epsilon": ["1", "1"]}, (0,), BenchError, "each value once"),
        ({"epsilon": []}, (0,), BenchError, "each value once"),
        ({"epsilon": "1"}, (0, 0), BenchError, "each seed once"),
        ({"epsilon": "1"}, (), BenchError, "each seed once"),
        ({"seed": ["1", "2"]}, (0,), BenchError, "seed: use --seeds"),
        ({"out": "here"}, (0,), BenchError, "out: use --seeds, --out"),
        ({"data.data-dir": "here"}, (0,), BenchError, "data.data-dir: use .* --data-dir"),
    ],
)
def test_what_cannot_be_swept(settings, seeds, error, message):
    with pytest.raises(error, match=message):
        sweep(settings, seeds)


def test_errors_come_before_the_runs(coterie, tmp_path):
    assert_refused(coterie("sweep", "--set", "epsilon"), "--set epsilon", "name=value")
    assert_refused(coterie("sweep", "nowhere.toml"), "nowhere.toml cannot be read")
    assert_refused(coterie("sweep", "--set", "rounds=1,many"), "rounds = 'many'")
    assert list(tmp_path.iterdir()) == []


def processes_of(session):
    """The processes of a session that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(path.parent.name)
    return found


@pytest.mark.slow
def test_a_killed_sweep_repeats_nothing(coterie, tmp_path):
    (tmp_path / "sweep.toml").write_text("strategy = ['ifca', 'fedavg']\n[privacy]\nepsilon = [2.0, 8.0]\n")
    words = ["sweep", "sweep.toml", *SMALL, "--seeds", "0-1", "--out", "out"]
    program = [sys.executable, "-c", "from coterie.cli import main; main()", *words]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("out/runs/*/result.json"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while left := processes_of(process.pid):
            assert time.monotonic() < deadline, f"{left} outlive the sweep"
            time.sleep(0.05)
    first = list(tmp_path.glob("out/runs/*/result.json"))
    written = {path: path.stat().st_mtime_ns for path in first}
    status, out, err = coterie(*words, "--json")
    assert status == 0, err
    assert {path: path.stat().st_mtime_ns for path in first} == written
    assert len(list(tmp_path.glob("out/runs/*/result.json"))) == 8

    found = document(out)
    runs = pandas.read_csv(tmp_path / "out" / "runs.csv")
    assert len(runs) == 8
    for row in found["rows"]:
        for column, cell in zip(found["columns"], row["cells"], strict=True):
            place = {**row["set"], **column["set"]}
            same = runs[(runs[list(place)].astype(str) == pandas.Series(place).astype(str)).all(axis=1)]
            values = 100 * same["accuracy"]
            assert sorted(same["seed"]) == [0, 1]
            assert cell["values"] == pytest.approx(list(values))
            assert (cell["mean"], cell["std"]) == pytest.approx((values.mean(), values.std()))
            for _, run in same.iterrows():
                result = json.loads((tmp_path / "out" / run["folder"] / "result.json").read_text())
                assert result["epsilon"] == run["epsilon spent"] <= float(place["privacy.epsilon"])
    assert (tmp_path / "out" / "table.png").exists()

    status, out, err = coterie("report", *sorted(tmp_path.glob("out/runs/*")), "--json")
    assert status == 0, err
    compared = document(out)
    assert compared["settings"] == ["strategy", "epsilon"]
    cells = [cell for row in found["rows"] for cell in row["cells"]]
    for name in ("mean", "std"):
        both = [100 * row["accuracy"][name] for row in compared["rows"]], [cell[name] for cell in cells]
        assert sorted(both[0]) == pytest.approx(sorted(both[1]))
