"""Console output of all commands."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.progress import ProgressCallback, throttled

# Columns of output that is not a terminal.
_WIDE = 10_000

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def console_for(as_json: bool) -> Console:
    """Console for human-readable output: standard output, or standard error if standard output carries JSON."""
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # another program reads it: nothing may be cut
        console.width = _WIDE
    return console


def plain_progress(console: Console, seconds: float) -> ProgressCallback:
    """Print progress reports as lines, at most one per ``seconds``, for output that is not a terminal."""
    return throttled(lambda text: console.print(text, markup=False, soft_wrap=True), seconds)


def print_json(document: Any) -> None:
    """Print one JSON document; it must not contain NaN or infinity."""
    print(json.dumps(document, indent=2, allow_nan=False))


def listing(title: str, rows: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Print rows by name, all with the same columns, as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True, style="cyan")
    for column in next(iter(rows.values())):
        table.add_column(column)
    for name, row in rows.items():
        table.add_row(name, *("–" if value is None else str(value) for value in row.values()))
    console_for(False).print(table)


def answer(values: Mapping[str, Any], as_json: bool) -> None:
    """Print values by name, as two columns or as JSON, in which infinity is null."""
    if as_json:
        print_json({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in values.items():
        table.add_row(key, _written(value))
    console_for(False).print(table)


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:.6g}"
    return str(value)
