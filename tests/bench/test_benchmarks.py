"""Every file of benchmarks/ runs, with tiny numbers; every folder of examples/ has a test."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TINY = {
    "absence.py": "--seeds 1 --rounds 5",
    "dpsgd.py": "--networks cnn --batches 4 --repeat 1",
    "growth.py": "--scale 0.001 --repeat 1",
    "masked_rounds.py": "--clients 10 20 --numbers 1000",
    "noise_surface.py": "--sizes 32 6600 --out .",
    "one_shot.py": "speed",
    "ray_nodes.py": "--clients 6 --rounds 2 --model linear --repeat 1",
    "private_scores.py": "--seeds 1 --rounds 2 --clients 300 --part runs",
    "streaming.py": "--replies 1 --parameters 1000 --workers 0",
}
#: The files whose tests are below, or in another file.
ELSEWHERE = {
    "cfl_splits.py": "bench/test_benchmarks.py",
    "gpu_check.py": "bench/test_benchmarks.py",
    "kills.py": "bench/test_benchmarks.py",
    "load.py": "test_documented_commands.py",
    "page.py": "bench/test_results.py",
    "robustness.py": "bench/test_benchmarks.py",
    "screenshots.py": "bench/test_benchmarks.py",
    "speed.py": "bench/test_benchmarks.py",
    "table_reading.py": "test_documented_commands.py",
}


def test_every_benchmark_and_example_has_a_test():
    assert TINY.keys() | ELSEWHERE.keys() == {path.name for path in BENCHMARKS.glob("*.py")}
    assert all(name.removesuffix(".py") in (ROOT / "tests" / file).read_text() for name, file in ELSEWHERE.items())
    examples = {folder.name.replace("-", "_") for folder in (ROOT / "examples").iterdir() if folder.is_dir()}
    assert examples == {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "examples").glob("test_*.py")}


def run(file, *words, folder, **variables):
    command = [sys.executable, BENCHMARKS / file, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Runs each file with its words, of JSON in standard input, in one process, because libraries load slowly.
IN_ONE = """
import contextlib, io, json, os, runpy, sys, traceback

outcomes = {}
for file, words in json.load(sys.stdin).items():
    before, sys.argv, out = os.environ.copy(), [file, *words], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(file, run_name="__main__")
        outcomes[file] = out.getvalue(), ""
    except BaseException:
        outcomes[file] = out.getvalue(), traceback.format_exc()
    os.environ.clear()
    os.environ.update(before)
json.dump(outcomes, sys.stdout)
"""


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path):
    given = {str(BENCHMARKS / file): words.split() for file, words in TINY.items()}
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE],
        input=json.dumps(given),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, BENCHMARKS)))},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == given.keys()
    for file, (output, error) in outcomes.items():
        assert output, f"{file}: no output; {error}"
        assert error == "", file


@pytest.mark.slow
def test_noise_over_batch_sizes_is_that_of_the_paper():
    benchmark = runpy.run_path(str(BENCHMARKS / "noise_surface.py"))
    document, (first, later, z) = benchmark["measure"]((32, 6600))
    assert document["set"]["parameters"] == 11_181_642
    assert z[:, 0] == pytest.approx([1.078, 1.309], rel=0.01)  # b = 32 everywhere, and full batches in round 1; RDP
    # Equation (2): K N lr^2 p c^2 z^2 / b^3
    assert 10 ** later[0, 0] == pytest.approx(6600 * 5e-4**2 * 11_181_642 * 9 * z[0, 0] ** 2 / 32**3)
    assert 5e6 < 10 ** (first[0, 0] - first[1, 0]) < 7e6  # what a full batch is worth


def test_splits_are_drawn_as_they_were(tmp_path):
    benchmark = runpy.run_path(str(BENCHMARKS / "cfl_splits.py"))
    folder = tmp_path / "runs" / "one"
    (folder / "evidence").mkdir(parents=True)
    (folder / "config.toml").write_text("[config]\nstrategy = 'cfl'\nseed = 4\nclients = 4\ngroups = '2'\n")
    (folder / "result.json").write_text(json.dumps({"notes": {"tree": [{"ended": 2, "why": "split"}]}}))
    clients = np.array([3, 0, 2, 1])  # similarity 0.1 i + 0.01 j of clients i > j; nothing between halves at the end
    similarity = np.array([[0.1 * max(i, j) + 0.01 * min(i, j) for j in clients] for i in clients])
    for number, matrix in ((2, similarity), (3, np.where(np.add.outer(clients, clients) % 2, np.nan, similarity))):
        np.savez(folder / "evidence" / f"similarities-{number:04d}.npz", matrix=matrix, clients=clients)
    run = benchmark["split_run"](tmp_path, 4)
    cell = {"curve": [[1, 20.0, 1.0], [3, 60.0, 2.0]]}
    left, right, *panels, _ = benchmark["draw"]({"title": "", "rows": [{"name": "CFL", "cells": [cell]}]}, run).axes
    dashed = [line for axes in (left, right) for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [2, 2]
    assert [axes.get_title("left") or axes.get_title() for axes in panels] == ["round 2", "round 3"]
    groups = benchmark["assign_groups"](4, [1, 1])
    order = np.argsort(groups, kind="stable")
    i, j = max(order[:2]), min(order[:2])
    assert panels[0].images[0].get_array()[0, 1] == pytest.approx(0.1 * i + 0.01 * j)
    assert np.ma.getmaskarray(panels[1].images[0].get_array()).sum() == 16 - 4


@pytest.mark.slow
def test_gans_of_real_records_are_measured(tmp_path, data_dir):
    words = ["gans", "--epochs", "1", "--clients", "1"]
    assert run("one_shot.py", *words, folder=tmp_path, COTERIE_DATA=data_dir)


@pytest.mark.slow  # a deployment
def test_a_deployment_with_a_killed_process_ends_its_run(tmp_path):
    out = run("kills.py", tmp_path / "kills", "--kills", "1", "--rounds", "2", folder=tmp_path)
    assert "rounds 2, complete True" in out
    assert out.count("rounds by number of charges {1: 2}") == 3


def compared(workload, *only, folder):
    words = ["--workload", workload, "--clients", "20", "--rounds", "2", "--repeat", "1", "--only", *only]
    return json.loads(run("speed.py", *words, folder=folder))["competitors"]


@pytest.mark.slow
def test_simulators_are_compared(tmp_path):
    """One that is not installed is skipped with a reason."""
    found = compared("mlp", "in process", "plain loop", "pfl", "fluke", folder=tmp_path)
    measured, others = {"coterie, in process", "plain loop", "plain loop, 2 processes"}, {"pfl", "fluke"}
    assert measured | others <= found.keys() <= measured | others | {"pfl, 2 processes"}
    assert all(found[name]["seconds_per_round"] > 0 for name in measured)
    assert all(row.keys() == {"skipped"} or row["seconds_per_round"] > 0 for row in found.values())


@pytest.mark.slow
def test_a_workload_without_other_simulators(tmp_path):
    found = compared("demo", "in process", folder=tmp_path)
    assert found.keys() == {"coterie, in process"}
    assert found["coterie, in process"]["seconds_per_round"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--private"]])
def test_a_cohort_trains_both_ways(more, tmp_path):
    words = ["--workload", "cohort", "--clients", "2", "--repeat", "1"]
    found = json.loads(run("speed.py", *words, *more, folder=tmp_path))
    assert found["largest_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["label-flip", "sign-flip"])
def test_one_run_of_the_robustness_table(attack):
    benchmark = runpy.run_path(str(BENCHMARKS / "robustness.py"))
    benchmark["BASE"]["rounds"] = 1
    cell = benchmark["Cell"]("none", "fedavg", "median", attack, 0.3, 0)
    assert 0 <= benchmark["measured"](cell) <= 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the check of a GPU runs for minutes: make gpu-check")
def test_gpu_check_needs_a_gpu(tmp_path):
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: PyTorch finds no GPU on this machine\n")


@pytest.mark.slow
def test_screenshots_import_what_they_need():
    """They take a minute and replace pictures of the documentation."""
    assert callable(runpy.run_path(str(BENCHMARKS / "screenshots.py"))["main"])


def test_growth_is_the_slope_after_the_first_rounds():
    growth = runpy.run_path(str(BENCHMARKS / "load.py"))["growth"]
    sizes = {n: {"superlink": 500.0 if n < 10 else 100 + 0.2 * n, "flwr-serverapp": 80.0} for n in range(1, 41)}
    del sizes[10]  # two rounds ended between two looks
    assert growth(sizes) == pytest.approx({"superlink": 2.0, "flwr-serverapp": 0.0}, abs=1e-9)
    assert growth({10: {"superlink": 1.0}}) == growth({}) == {}
