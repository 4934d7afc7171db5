"""Run the cells of a table in parallel, each in its own resumable run folder."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie.audit.printed  # noqa: F401 - adds the mechanisms of tables, also in worker processes
from coterie.bench.table import BenchError, Column, Row, Table
from coterie.files import FileError
from coterie.flower.generators import reseed_generators
from coterie.results import Outcome

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Cell:
    """A run of a table.

    Attributes:
        row, column: names of its row and setting.
        seed: seed of the run.
        settings: settings by full name.
        tuning: whether the run only tunes settings.
        reference: settings of the reference models; empty if there are none.
        central: method of centralised clustering; empty for a federated run.
    """

    row: str
    column: str
    seed: int
    settings: Mapping[str, Any]
    tuning: bool = False
    reference: Mapping[str, Any] = field(default_factory=dict)
    central: str = ""

    @property
    def title(self) -> str:
        """Human-readable name of the cell."""
        return f"{'tuning ' if self.tuning else ''}{self.row}, {self.column}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Name of the run folder, identical for identical runs of any table."""
        more: dict[str, Any] = {"reference": dict(self.reference)} if self.reference else {}
        more |= {"central": self.central} if self.central else {}
        text = json.dumps({**self.settings, "seed": self.seed, **more}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Done:
    """A finished cell.

    Attributes:
        cell: the cell.
        result: contents of its result.json and diagnostics.json; None if it failed.
        error: the reason for the failure.
        folder: its run folder.
        reused: whether it had finished before.
    """

    cell: Cell
    result: Mapping[str, Any] | None
    error: str | None
    folder: Path
    reused: bool = False


def run_all(
    table: Table,
    out: Path,
    *,
    places: Mapping[str, Any],
    jobs: int,
    seen: Callable[[Done, int], None] = lambda done, left: None,
) -> tuple[list[Done], dict[tuple[str, str], dict[str, Any]]]:
    """Tune every row, then run every cell; finished runs are reused.

    Args:
        table: the table.
        out: its folder; runs are stored under ``runs/``.
        places: settings of data location and training device, which do not identify a cell.
        jobs: number of parallel runs.
        seen: called with every finished cell and the number of remaining ones.

    Returns:
        The reported cells, and the tuned settings by (row, column of tuning).

    Raises:
        BenchError: another process uses ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BenchError(f"{out} is in use by another process: wait for it, or choose another --out") from None
        left = itertools.count(count(table) - 1, -1)

        def each(cells: list[Cell]) -> dict[str, Done]:
            ended = {}
            for done in _run(cells, out, places, jobs):
                ended[done.cell.key] = done
                seen(done, next(left))
            return ended

        tuned = _tuned(table, each)
        cells = [
            Cell(
                row.name,
                column.setting,
                seed,
                _settings(table, row, column, tuned.get((row.name, column.tuned_at), {})),
                reference=table.reference,
                central=row.central,
            )
            for row, column in table.pairs()
            for seed in table.seeds
        ]
        ended = each(cells)
    return [replace(ended[cell.key], cell=cell) for cell in cells], tuned


def _tuned(table: Table, each: Callable[[list[Cell]], Mapping[str, Done]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the candidate with the best mean accuracy on validation clients, by (row, column); the first of equals."""
    trials: dict[tuple[str, str], list[tuple[dict[str, Any], list[Cell]]]] = {}
    for row, column in table.pairs():
        if row.tune and (row.name, column.tuned_at) not in trials:
            trials[row.name, column.tuned_at] = [
                (choice, [Cell(row.name, column.tuned_at, seed, settings, tuning=True) for seed in table.tuning_seeds])
                for choice in table.candidates(row)
                for settings in [_settings(table, row, table.column(column.tuned_at), choice, table.tuning_settings)]
            ]
    tried = each([cell for place in sorted(trials) for _, cells in trials[place] for cell in cells])

    def score(trial: tuple[dict[str, Any], list[Cell]]) -> float:
        return sum((tried[cell.key].result or {}).get("accuracy") or 0.0 for cell in trial[1])

    return {place: max(candidates, key=score)[0] for place, candidates in trials.items()}


def count(table: Table) -> int:
    """Return the number of runs of a table."""
    wanted = {(row.name, column.tuned_at): row for row, column in table.pairs() if row.tune}
    trials = sum(len(table.candidates(row)) for row in wanted.values()) * len(table.tuning_seeds)
    return trials + len(table.pairs()) * len(table.seeds)


def _settings(
    table: Table, row: Row, column: Column, choice: Mapping[str, Any], tuning: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    from coterie.server import applicable

    both = {**table.settings, **column.settings, **row.settings, **choice, **table.overrides, **(tuning or {})}
    settings = applicable(both)
    if "evaluation.evaluate-every" not in settings:  # only the end is reported
        settings["evaluation.evaluate-every"] = settings.get("rounds", 80)
    return settings


def _run(cells: list[Cell], out: Path, places: Mapping[str, Any], jobs: int) -> Iterable[Done]:
    """Yield every cell as soon as it finishes; identical runs execute once."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(cell.key, []).append(cell)
    waiting: list[tuple[Cell, Path]] = []
    for key, same in alike.items():
        folder = out / "runs" / key
        try:
            outcome = Outcome.read(folder)
        except FileError as error:
            raise BenchError(f"{error}; delete {folder} to repeat the run") from None
        if outcome is not None:
            yield from (Done(cell, outcome.values, None, folder, reused=True) for cell in same)
        else:
            waiting.append((same[0], folder))
    if not waiting:
        return
    from coterie.engine.workers import start_server

    workers = max(1, min(jobs, len(waiting)))
    context = start_server("coterie.server")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(workers,)) as pool:
        try:
            running = {pool.submit(_run_one, cell, folder, dict(places)): (cell, folder) for cell, folder in waiting}
            for future in as_completed(running):
                cell, folder = running[future]
                scores, problem = future.result()
                yield from (Done(same, scores, problem, folder) for same in alike[cell.key])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare(jobs: int) -> None:
    """Divide the cores between workers."""
    import threading

    import torch

    from coterie.engine.workers import exit_with_parent

    reseed_generators()
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _run_one(cell: Cell, folder: Path, places: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Execute a run in this process; return its outcome or the error."""
    import torch

    from coterie.bench.central import cluster
    from coterie.bench.reference import compare
    from coterie.datasets import DataError
    from coterie.models import ModelError
    from coterie.privacy import LedgerError, PrivacyError
    from coterie.server import ConfigError, FolderError, RunConfig, RunError, RunFolder
    from coterie.server.simulate import prepare, simulate

    try:
        given = {**cell.settings, "seed": cell.seed, **places}
        if not any(name.rpartition(".")[2] == "evaluate-clients" for name in given):
            given["evaluate-clients"] = 0  # tables state the mean over all clients
        given.setdefault("evaluation.train-alone", 0)  # tables have rows of local models
        config = RunConfig(given)
        if cell.central:
            return cluster(cell.central, config, folder), None
        cores = torch.get_num_threads()  # this run's cores
        prepare(config, cores=cores)
        _ = config.plan
        try:
            run_folder = RunFolder.resume(folder, config.values)
        except (ConfigError, FolderError, LedgerError):  # nothing to resume
            shutil.rmtree(folder, ignore_errors=True)
            run_folder = RunFolder.create(folder, config)
        with closing(run_folder):
            outcome = simulate(run_folder, cores=cores)
            exact = outcome.diagnostics
            if cell.reference and exact is not None:
                gaps = compare(outcome.values, config, cell.reference, folder.parents[1] / "references")
                outcome = replace(outcome, diagnostics=replace(exact, other=gaps))
                run_folder.write_outcome(outcome)
            return outcome.values, None
    except (BenchError, ConfigError, DataError, ModelError, PrivacyError, RunError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return None, str(error)
