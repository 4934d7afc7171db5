"""Listings of strategies, data sets and models, and reports of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, listing, print_json, print_table
from coterie.fields.plugins import installed, origin

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.report.comparison import Comparison


def strategies(as_json: JsonFlag = False) -> None:
    """List the methods with their papers and supported privacy units."""
    from coterie.strategies.registry import STRATEGIES

    rows = {
        name: {
            "what": method.title,
            "paper": method.paper,
            "privacy-unit": ", ".join(method.units),
            "aggregators": "all" if method.robust else "mean",
            "rebalancing": "yes" if method.clustered and "client" in method.units else "-",
        }
        for name, method in sorted(STRATEGIES.items())
    }
    rows |= {
        name: {"what": origin(entry), "paper": "-", "privacy-unit": "-", "aggregators": "-", "rebalancing": "-"}
        for name, entry in installed("strategy").items()
        if name not in rows
    }
    listing("strategies (or module:Class)", rows, as_json)


def datasets(
    download: Annotated[str | None, typer.Option(metavar="NAME", help="Download a data set to --data-dir.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: COTERIE_DATA.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the data sets and the shifts that create hidden groups."""
    from coterie import datasets as data

    if download is not None:
        folder = data_dir or os.environ.get("COTERIE_DATA")
        if not folder:
            raise data.DataError("--download requires --data-dir DIR or COTERIE_DATA")
        console = console_for(as_json)
        console.print(f"{download} is in {data.download(download, str(folder))}")
        return
    rows = {
        name: {
            "what": info.title,
            "shape": "x".join(map(str, info.shape)),
            "classes": info.num_classes,
            "train": info.train_size,
            "test": info.test_size,
            "how to get it": info.obtain,
        }
        for name, info in sorted(data.DATASETS.items())
    }
    rows |= {
        name: {**dict.fromkeys(rows["digits"]), "what": origin(entry), "how to get it": "installed"}
        for name, entry in installed("dataset").items()
        if name not in rows
    }
    rows[data.OWN_DATA] = {
        "what": "each client's own data: an archive, a table or images",
        "shape": "input-shape",
        "classes": "num-classes",
        "train": None,
        "test": None,
        "how to get it": "DIR/client-0.npz (or .csv, .parquet, .xlsx, a folder), client-1.npz, ...: docs/deployment.md",
    }
    listing(f"data sets (shifts: {', '.join(sorted(data.SHIFTS))})", rows, as_json)


def models(as_json: JsonFlag = False) -> None:
    """List the networks, the GANs, and the fixed features that can precede a network."""
    from coterie import models as networks

    every: dict[str, networks.ModelInfo | networks.GANInfo] = {**networks.MODELS, **networks.GANS}
    rows = {name: {"what": info.title, "source": info.source} for name, info in sorted(every.items())}
    rows |= {
        name: {"what": origin(entry), "source": "-"} for name, entry in installed("model").items() if name not in rows
    }
    extra = [f"{name} = {origin(entry)}" for name, entry in installed("features").items()]
    listing(f"models (features: {', '.join([*sorted(networks.FEATURES), *extra])})", rows, as_json)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    csv: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="CSV file of the comparison; -: standard output.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write an HTML report of runs; compare several: mean and standard deviation over runs equal but for the seed."""
    from coterie.privacy import LedgerError
    from coterie.privacy.check import verified
    from coterie.report.comparison import compare, read_runs
    from coterie.report.page import write_report
    from coterie.report.result_table import result_table
    from coterie.report.runs import ReportError

    if as_json and csv == "-":
        raise ReportError("--json and --csv - both write to standard output; give --csv a file")
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
    page = write_report(loaded_runs, out, damaged)
    comparison = compare(loaded_runs, damaged)
    if csv is not None:
        _write_csv(comparison.csv(), csv)
    console = console_for(as_json or csv == "-")
    if as_json:
        print_json({**comparison.document(), "report": str(page)})
    elif len(runs) == 1:
        if loaded_runs[0].result is not None and loaded_runs[0].certificate:
            console.print(result_table(loaded_runs[0].result, loaded_runs[0].certificate))
    else:
        heads, rows = comparison.cells()
        print_table(console, heads, rows, right=len(comparison.scores) + 1)
    _print_remarks(console, comparison, several=len(runs) > 1)
    console.print(str(page), markup=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


def _write_csv(text: str, target: str) -> None:
    if target == "-":
        print(text, end="")
    else:
        Path(target).write_text(text, encoding="utf-8")


def _print_remarks(console: Console, comparison: Comparison, several: bool) -> None:
    """Print which runs are missing in a comparison, what its rows lack, and what the guarantee does not cover."""
    from coterie.report.comparison import OUTSIDE

    lines = [f"left out: {run}: {reason}" for run, reason in comparison.left_out]
    lines += [f"note: {run}: {note}" for run, note in comparison.notes]
    if several and any(row.exact for row in comparison.rows):
        lines.append(OUTSIDE)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
