"""Run the cells of a table in parallel, each in its own resumable run folder."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie.audit.printed  # noqa: F401 - adds the mechanisms of tables, also in worker processes
from coterie.bench.table import BenchError, Column, Row, Table
from coterie.files import FileError
from coterie.flower.generators import reseed_generators
from coterie.logs import ProgressCallback, drain_progress, ignore_progress
from coterie.results import Outcome

if TYPE_CHECKING:
    from coterie.server import RunConfig, RunFolder

_send: ProgressCallback = ignore_progress  # to the parent process, in a worker

# Polling interval for progress reports of runs, in seconds.
_POLL_SECONDS = 0.2


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
    def upload_key(self) -> str:
        """Key of the client uploads, equal for runs that only process them differently; empty if not shareable."""
        from coterie.strategies import OneShot
        from coterie.strategies.registry import STRATEGIES

        method = STRATEGIES.get(self.settings.get("strategy", ""))
        if self.central or method is None or not issubclass(method, OneShot):
            return ""
        if self.settings.get("privacy.privacy-unit") != "none":  # each run has its own privacy cost
            return ""
        before = {name: value for name, value in self.settings.items() if name not in method.server_settings}
        return json.dumps({**before, "seed": self.seed}, sort_keys=True)

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


@dataclass(frozen=True)
class Trial:
    """A trial of candidate settings for the row and column ``at``."""

    at: tuple[str, str]
    choice: Mapping[str, Any]
    cell: Cell


def run_all(
    table: Table,
    out: Path,
    *,
    places: Mapping[str, Any],
    jobs: int,
    seen: Callable[[Done, int], None] = lambda done, left: None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[list[Done], dict[tuple[str, str], dict[str, Any]]]:
    """Tune every row, then run every cell; finished runs are reused.

    Args:
        table: the table.
        out: its folder; runs are stored under ``runs/``.
        places: settings of data location and training device, which do not identify a cell.
        jobs: number of parallel runs.
        seen: called with every finished cell and the number of remaining ones.
        progress: called with progress reports of runs.

    Returns:
        The reported cells, and the tuned settings by (row, column of tuning).

    Raises:
        BenchError: another process uses ``out``.
    """
    with _alone(out):
        return _run_all(table, out, places, jobs, seen, progress)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BenchError(f"{out} is in use by another process: wait for it, or choose another --out") from None
        yield


def _run_all(
    table: Table,
    out: Path,
    places: Mapping[str, Any],
    jobs: int,
    seen: Callable[[Done, int], None],
    progress: ProgressCallback,
) -> tuple[list[Done], dict[tuple[str, str], dict[str, Any]]]:
    rows = {row.name: row for row in table.rows}
    wanted = sorted({(row.name, column.tuned_at) for row, column in table.pairs() if row.tune})
    trials = [
        Trial((row, column), choice, Cell(row, column, seed, settings, tuning=True))
        for row, column in wanted
        for choice in table.candidates(rows[row])
        for settings in [_settings(table, rows[row], table.column(column), choice, table.tuning_settings)]
        for seed in table.tuning_seeds
    ]
    left = itertools.count(len(trials) + len(table.pairs()) * len(table.seeds) - 1, -1)

    def each(cells: list[Cell]) -> dict[str, Done]:
        ended = {}
        for done in _run(cells, out, places, jobs, progress):
            ended[done.cell.key] = done
            seen(done, next(left))
        return ended

    tried = each([trial.cell for trial in trials])
    tuned = {at: _best([trial for trial in trials if trial.at == at], tried) for at in wanted}
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


def count(table: Table) -> int:
    """Return the number of runs of a table."""
    wanted = {(row.name, column.tuned_at): row for row, column in table.pairs() if row.tune}
    trials = sum(len(table.candidates(row)) for row in wanted.values()) * len(table.tuning_seeds)
    return trials + len(table.pairs()) * len(table.seeds)


def _best(trials: list[Trial], tried: Mapping[str, Done]) -> dict[str, Any]:
    """Return the candidate with the best mean accuracy on validation clients; the first in case of ties."""
    scores: dict[str, list[float]] = {}
    for trial in trials:
        accuracy = (tried[trial.cell.key].result or {}).get("accuracy")
        scores.setdefault(json.dumps(trial.choice), []).append(0.0 if accuracy is None else accuracy)
    best: dict[str, Any] = json.loads(max(scores, key=lambda text: sum(scores[text])))
    return best


def _settings(
    table: Table, row: Row, column: Column, choice: Mapping[str, Any], tuning: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    from coterie.server import applicable

    both = {**table.settings, **column.settings, **row.settings, **choice, **table.overrides, **(tuning or {})}
    settings = applicable(both)
    if "evaluation.evaluate-every" not in settings:  # only the end is reported
        settings["evaluation.evaluate-every"] = settings.get("rounds", 80)
    return settings


def _run(
    cells: list[Cell], out: Path, places: Mapping[str, Any], jobs: int, progress: ProgressCallback
) -> Iterable[Done]:
    """Yield every cell as soon as it finishes; identical runs execute once, and identical points are gathered once."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(cell.key, []).append(cell)
    waiting: list[tuple[Cell, Path]] = []
    gathered: dict[str, Path] = {}
    for key, same in alike.items():
        folder = out / "runs" / key
        if (outcome := _outcome(folder)) is not None:
            if same[0].upload_key:
                gathered[same[0].upload_key] = folder
            yield from (Done(cell, outcome.values, None, folder, reused=True) for cell in same)
        else:
            waiting.append((same[0], folder))
    if not waiting:
        return
    from coterie.engine.workers import start_server

    context = start_server("coterie.server")
    workers = max(1, min(jobs, len(_ready(waiting, gathered, ()))))
    reports = context.Queue()
    running: dict[Future[Any], tuple[Cell, Path]] = {}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(workers, reports)) as pool:
        try:
            while waiting or running:
                for cell, folder in _ready(waiting, gathered, [cell.upload_key for cell, _ in running.values()]):
                    waiting.remove((cell, folder))
                    future = pool.submit(_run_one, cell, folder, dict(places), gathered.get(cell.upload_key))
                    running[future] = cell, folder
                for future in _ended(running, reports, progress):
                    cell, folder = running.pop(future)
                    scores, error = future.result()
                    if scores and cell.upload_key:
                        gathered[cell.upload_key] = folder
                    yield from (Done(same, scores, error, folder) for same in alike[cell.key])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ended(running: Iterable[Future[Any]], reports: Any, progress: ProgressCallback) -> set[Future[Any]]:
    """Wait until a run ends, and pass on the progress of all meanwhile."""
    ended: set[Future[Any]] = set()
    while not ended:
        ended, _ = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
        for report in drain_progress(reports):
            progress(report)
    return ended


def _ready(
    waiting: Iterable[tuple[Cell, Path]], gathered: Mapping[str, Path], gathering: Iterable[str]
) -> list[tuple[Cell, Path]]:
    """Return the cells that do not wait for points gathered by another run."""
    busy, ready = set(gathering), []
    for cell, folder in waiting:
        if not cell.upload_key or cell.upload_key in gathered or cell.upload_key not in busy:
            ready.append((cell, folder))
            busy.add(cell.upload_key)
    return ready


def _prepare(jobs: int, reports: Any) -> None:
    """Divide the cores between workers, and send progress reports to the parent process."""
    import threading

    import torch

    from coterie.engine.workers import exit_with_parent

    global _send
    reseed_generators()
    threading.Thread(target=exit_with_parent, daemon=True).start()
    reports.cancel_join_thread()  # the parent process may have exited
    _send = reports.put
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _run_one(
    cell: Cell, folder: Path, places: Mapping[str, Any], gathered: Path | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """Execute a run in this process, reusing gathered points if available; return its outcome or the error."""
    import torch

    from coterie.bench.central import cluster
    from coterie.bench.reference import compare
    from coterie.datasets import DataError
    from coterie.models import ModelError
    from coterie.privacy import PrivacyError
    from coterie.server import ConfigError, RunConfig, RunError
    from coterie.server.simulate import prepare, simulate
    from coterie.strategies import OneShot

    def progress(text: str) -> None:
        _send(f"{cell.title}: {text}")

    try:
        given = {**cell.settings, "seed": cell.seed, **places}
        if not any(name.rpartition(".")[2] == "evaluate-clients" for name in given):
            given["evaluate-clients"] = 0  # tables state the mean over all clients
        given.setdefault("evaluation.train-alone", 0)  # tables have rows of local models
        config = RunConfig(given)
        if cell.central:
            return cluster(cell.central, config, folder, progress), None
        cores = torch.get_num_threads()  # this run's cores
        prepare(config, cores=cores)
        _ = config.plan
        with closing(_opened(folder, config)) as run_folder:
            if gathered:
                run_folder.take_evidence(gathered, OneShot.upload_artifacts)
            run_folder.on_progress = progress
            run_folder.on_metrics = lambda record: progress(f"round {record.round} of {config.run.rounds}")
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


def _outcome(folder: Path) -> Outcome | None:
    try:
        return Outcome.read(folder)
    except FileError as error:
        raise BenchError(f"{error}; delete {folder} to repeat the run") from None


def _opened(folder: Path, config: RunConfig) -> RunFolder:
    """Open the folder of an interrupted run to resume it; create a new one if that is impossible."""
    from coterie.privacy import LedgerError
    from coterie.server import ConfigError, FolderError, RunFolder

    try:
        return RunFolder.resume(folder, config.values)
    except (ConfigError, FolderError, LedgerError):
        shutil.rmtree(folder, ignore_errors=True)
        return RunFolder.create(folder, config)
