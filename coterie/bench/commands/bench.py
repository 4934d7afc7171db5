"""``coterie bench``."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coterie.cli.console import JsonFlag, console_for, interruptible, listing, print_json

if TYPE_CHECKING:
    from coterie.bench.cells import Done
    from coterie.bench.table import Table


def bench(
    name: Annotated[str | None, typer.Argument(help="A table, or a TOML file; default: list all tables.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a short version: minutes instead of hours.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run seeds 0 to N-1 instead of the table's seeds.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Run this row only; repeatable.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Run columns with this prefix only; repeatable.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel runs; default: 1 per core, 1 on a GPU.")] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: COTERIE_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for runs and results; default: bench/NAME.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Reproduce a table of a paper: published values, ours, and the difference. Finished runs are reused."""
    from coterie.bench.table import read_table

    if name is None:
        _list_tables(as_json)
        return
    chosen_seeds = range(seeds) if seeds else ()
    table = read_table(name, quick=quick, seeds=chosen_seeds, rows=row or (), columns=column or ())
    folder, kept = (out or Path("bench") / (stem + ("-quick" if quick else "")) for stem in (table.name, table.like))
    options = ["--quick"] * quick + (["--seeds", str(seeds)] if seeds else [])
    options += [word for name_of_row in row or () for word in ("--row", name_of_row)]
    options += [word for prefix in column or () for word in ("--column", prefix)]
    command = shlex.join(["coterie", "bench", name, *options])
    run_table(table, folder, kept, command, jobs=jobs, device=device, data_dir=data_dir, as_json=as_json)


def run_table(
    table: Table,
    folder: Path,
    kept: Path,
    command: str,
    *,
    jobs: int | None,
    device: str,
    data_dir: Path | None,
    as_json: bool,
    finished: Callable[[Sequence[Done]], None] = lambda done: None,
) -> None:
    """Run a table, and write and show its results.

    Args:
        folder: of the results.
        kept: folder of the runs.
        command: the command that was given.
        device: of the clients.
        data_dir: folder of the data sets.
        as_json: print one JSON document.
        finished: called with all runs at the end.
    """
    from coterie.bench import cells, outcome
    from coterie.bench.table_figures import draw

    logging.getLogger("flwr").setLevel(logging.WARNING)
    console, started = console_for(as_json), time.perf_counter()
    places = {"device": device, "data-dir": str(data_dir) if data_dir else ""}
    with interruptible("run the same command again to continue"), _progress(console, cells.count(table)) as seen:
        folder.mkdir(parents=True, exist_ok=True)
        done, tuned = cells.run_all(
            table,
            kept,
            places=places,
            jobs=jobs or (1 if _device(device) != "cpu" else len(os.sched_getaffinity(0))),
            seen=seen,
        )
        document = outcome.document(table, done, tuned, command=command, device=_device(device))
    if source := str(data_dir or os.environ.get("COTERIE_DATA") or ""):  # results are published: without this folder
        document = json.loads(json.dumps(document).replace(json.dumps(source)[1:-1], "DIR"))
    document["minutes"] = round((time.perf_counter() - started) / 60, 1)
    finished(done)
    (folder / "table.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "table.md").write_text(outcome.markdown(document))
    picture = draw(document, folder / "table.png")
    if as_json:
        print_json(document)
    else:
        view, notes = outcome.console_table(document)
        console.print(view)
        for note in notes:
            console.print(note, markup=False, soft_wrap=True)
        console.print(f"{folder}/table.json, .md   figure {picture}", soft_wrap=True)
    if all(one.result is None for one in done):
        raise typer.Exit(1)


def _list_tables(as_json: bool) -> None:
    from coterie.bench.cells import count
    from coterie.bench.table import read_table, table_names

    tables = {table_name: read_table(table_name) for table_name in table_names()}
    rows = {
        n: {
            "what": t.title,
            "from": t.source,
            "runs": count(t),
            "quick": "unknown" if t.quick_minutes is None else f"{t.quick_minutes:g} min",
        }
        for n, t in tables.items()
    }
    listing("tables", rows, as_json)


def _device(name: str) -> str:
    import torch

    if name != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu"


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Done, int], None]]:
    """A callback for finished runs and the number of remaining ones: a progress bar on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield lambda done, left: console.print(
            f"{total - left:4d}/{total}  {_summary(done)}", markup=False, soft_wrap=True
        )
        return
    last = TextColumn("{task.fields[last]}", markup=False)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), last)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, last="")

        def show(done: Done, left: int) -> None:
            change = bar.reset if done.reused else bar.update  # reset also forgets the pace so far
            change(task, completed=total - left, last=_summary(done))

        yield show


def _summary(done: Done) -> str:
    from coterie.results import Diagnostics
    from coterie.tasks import of_metrics

    scores = Diagnostics.of(done.result or {})
    name = of_metrics(scores).score_name
    outcome = done.error or f"no {name}" if scores.accuracy is None else f"{name} {100 * scores.accuracy:.2f} %"
    return f"{done.cell.title}: {outcome}"
