"""What `coterie run` shows and writes when a run has ended."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from coterie.report.page import write_report
from coterie.report.result_table import result_table
from coterie.report.runs import read_run


def report(path: Path) -> list[RenderableType]:
    """Write the page of a run into its folder; return its table of results and where both are."""
    run = read_run(path)
    page = write_report([run], path / "report.html")
    table = [result_table(run.result, run.certificate)] if run.result is not None else []
    return [*table, f"run folder {path}/   report {page}"]
