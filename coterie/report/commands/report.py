"""``coterie report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json, print_table


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write; default: report.html in the run folder, or for several runs here."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write an HTML report of runs; compare several: mean and standard deviation over runs equal but for the seed."""
    from coterie.privacy import LedgerError
    from coterie.privacy.check import verified
    from coterie.report.comparison import OUTSIDE, compare, read_runs
    from coterie.report.page import write_report
    from coterie.report.result_table import result_table
    from coterie.report.runs import ReportError

    loaded_runs, damaged = read_runs(runs)
    for run in list(loaded_runs):
        try:
            verified(run.path)
        except LedgerError as error:
            if len(runs) == 1:
                raise
            loaded_runs.remove(run)
            damaged.append((str(run.path), str(error)))
    if not loaded_runs:
        raise ReportError(damaged[0][1])
    page = write_report(loaded_runs, out or Path(runs[0] if len(runs) == 1 else "", "report.html"), damaged)
    comparison = compare(loaded_runs, damaged)
    console = console_for(as_json)
    if as_json:
        print_json({**comparison.document(), "report": str(page)})
    elif len(runs) == 1:
        if loaded_runs[0].result is not None and loaded_runs[0].certificate:
            console.print(result_table(loaded_runs[0].result, loaded_runs[0].certificate))
    else:
        heads, rows = comparison.cells()
        print_table(console, heads, rows, right=len(comparison.scores) + 1)
    lines = [f"left out: {run}: {reason}" for run, reason in comparison.left_out]
    lines += [f"note: {run}: {note}" for run, note in comparison.notes]
    if len(runs) > 1 and any(row.exact for row in comparison.rows):
        lines.append(OUTSIDE)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(page), markup=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)
