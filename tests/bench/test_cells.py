"""The processes that run the cells of a table."""

import os
import random
import time

import numpy as np
import pytest
import torch

from coterie.bench import cells
from coterie.bench.cells import Cell, Done
from coterie.bench.commands.bench import _summary


def draw(cell, folder, places):
    """Draw in each of two processes, instead of a run: neither returns before both have started."""
    (folder.parent / str(os.getpid())).touch()
    while len(list(folder.parent.iterdir())) < 2:
        time.sleep(0.01)
    return {"drawn": [random.random(), np.random.random(), torch.rand(()).item()]}, None


@pytest.mark.timeout(60)
def test_processes_do_not_share_random_generators(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "_run_one", draw)
    (tmp_path / "runs").mkdir()
    both = [Cell("row", "column", seed, {}) for seed in range(2)]
    one, other = [done.result["drawn"] for done in cells._run(both, tmp_path, {}, 2)]
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, False]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"accuracy": 0.9816, "rmse": 0.2, "epsilon": 8.0}, "R², at least 0 98.16 %"),
        ({"accuracy": 0.9, "epsilon": 8.0}, "accuracy 90.00 %"),
        ({"epsilon": 8.0}, "no accuracy"),
        (None, "RunError: no replies"),
    ],
)
def test_a_finished_run_is_told_with_the_measure_of_its_task(result, text, tmp_path):
    done = Done(Cell("IFCA", "easy", 0, {}), result, None if result else "RunError: no replies", tmp_path)
    assert _summary(done) == f"IFCA, easy, seed 0: {text}"
