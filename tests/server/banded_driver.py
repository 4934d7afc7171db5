"""Whole runs of mechanism banded, killed and resumed until there were as many kills as asked; prints a JSON summary.

One parent imports everything once and forks a child for every attempt. A child kills itself with SIGKILL at the n-th
sync or replacement of a file, before or after it, or the parent kills it after a random time. Beside the run folder,
every child leaves the rows of its noise, so that the parent can look for them in the folder.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import torch

from coterie.engine.in_process import LocalGrid
from coterie.privacy import Banded, epsilon, read_ledger
from coterie.privacy.mechanisms.banded import CorrelatedNoise
from coterie.server import RunConfig, RunFolder, run

ROUNDS = 12
SETTINGS = {"clients": 20, "clusters": 2, "groups": "2", "rounds": ROUNDS, "mechanism": "banded", "sampling-rate": 0.25}
SETTINGS |= {"evaluate-every": 4, "samples-per-client": 10, "model": "linear", "local-epochs": 1}
SETTINGS |= {"noise-multiplier": 8.0, "delta": 1e-3}


def die_at(left: int, after: bool) -> None:
    """Kill this process at the ``left``-th call of os.fsync or os.replace."""
    calls = count(1)

    def wrap(call):
        def dangerous(*args, **options):
            now = next(calls) == left
            if now and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*args, **options)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)

        return dangerous

    os.fsync, os.replace = wrap(os.fsync), wrap(os.replace)


def watch_rows(folder: Path) -> None:
    """Write every row of noise beside the run folder."""
    draw = CorrelatedNoise.next

    def watched(self, fresh):
        row = draw(self, fresh)
        with (folder.parent / "rows").open("ab") as file:
            file.write(np.ascontiguousarray(row, np.float64).tobytes() + np.ascontiguousarray(fresh).tobytes())
        return row

    CorrelatedNoise.next = watched


def attempt(folder: Path) -> None:
    """One process: create or resume, and run to the end."""
    ready = (folder / "config.toml").exists()
    opened = RunFolder.resume(folder, {}) if ready else RunFolder.create(folder, RunConfig(SETTINGS))
    run(opened, LocalGrid(SETTINGS["clients"]))


def child(folder: Path, rng: random.Random) -> int | None:
    """Exit status of one attempt (None if it was killed)."""
    kind, at, delay = rng.choice(["before", "after", "time"]), rng.randrange(1, 40), rng.uniform(0.0, 0.5)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            watch_rows(folder)
            if kind != "time":
                die_at(at, kind == "after")
            attempt(folder)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    if kind == "time":
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def check(folder: Path) -> list[int]:
    """Every round is charged once, epsilon is the planned one, and no row is on disk; returns the skipped rounds."""
    header, charges = read_ledger(folder / "ledger.jsonl")
    plan = Banded(**{k: float("inf") if v is None else v for k, v in header["plan"].items() if k != "mechanism"})
    numbers = Counter(charge["round"] for charge in charges)
    assert numbers == Counter(range(1, ROUNDS + 1)), numbers
    assert {charge["noise_multiplier"] for charge in charges} == {plan.noise_multiplier}
    spent = epsilon(plan.planned(), plan.delta)
    guarantee = json.loads((folder / "privacy.json").read_text())
    assert guarantee["certified"], guarantee["reasons"]
    assert abs(guarantee["epsilon"] - spent) < 1e-9, (guarantee["epsilon"], spent)
    rows = np.fromfile(folder.parent / "rows", np.float64)
    rows = rows[rows != 0]
    assert len(rows) > 1000
    forms = {value.tobytes() for value in rows}
    forms |= {pair.tobytes() for pair in rows[: len(rows) // 2 * 2].astype(np.float32).reshape(-1, 2)}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found = {content[i : i + 8] for i in range(len(content) - 7)} & forms
            assert not found, path
    completed = {json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()}
    skipped = json.loads((folder / "result.json").read_text()).get("skipped_rounds", [])
    assert skipped == sorted(set(range(1, ROUNDS + 1)) - completed), (skipped, completed)
    return skipped


def main(root: Path, kills: int) -> None:
    torch.set_num_threads(1)
    plan = RunConfig(SETTINGS).plan
    plan.matrix, epsilon(plan.planned(), plan.delta)
    rng = random.Random(7)
    summary = {"kills": 0, "runs": 0, "skipped": 0}
    while summary["kills"] < kills:
        folder = root / str(summary["runs"]) / "run"
        folder.parent.mkdir()
        summary["runs"] += 1
        while (status := child(folder, rng)) is None:
            summary["kills"] += 1
        assert status == 0, status
        summary["skipped"] += len(check(folder))
    print(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
