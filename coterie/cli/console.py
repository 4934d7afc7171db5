"""Console output of all commands."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from coterie.logs import ProgressCallback, estimated, throttled

# Columns of output that is not a terminal.
_WIDE = 10_000

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def group(about: str) -> typer.Typer:
    """Create a group of commands, whose help fills lines and shows brackets."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode="markdown")


def console_for(as_json: bool) -> Console:
    """Console for human-readable output: standard output, or standard error if standard output carries JSON."""
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # another program reads it: nothing may be cut
        console.width = _WIDE
    return console


@contextmanager
def interrupting(*numbers: signal.Signals) -> Iterator[None]:
    """Raise KeyboardInterrupt on these signals too, with their number, in the main thread."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    handled = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def interruptible(way_out: str) -> Iterator[None]:
    """On Ctrl-C and SIGTERM, print the way out and exit with status 130 or 143, as shells do."""
    try:
        with interrupting(signal.SIGTERM):
            yield
    except KeyboardInterrupt as error:
        print(f"interrupted; {way_out}", file=sys.stderr)
        raise typer.Exit(128 + (signal.SIGTERM if error.args else signal.SIGINT)) from None


def plain_progress(console: Console, seconds: float) -> ProgressCallback:
    """Print progress reports as lines, at most one per ``seconds``, for output that is not a terminal."""
    return estimated(throttled(lambda text: console.print(text, markup=False, soft_wrap=True), seconds))


def print_json(document: Any) -> None:
    """Print one JSON document; it must not contain NaN or infinity."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_table(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str = "", right: int = 0
) -> None:
    """Print a table; if it is wider than the console, one block per row, so that nothing is cut or broken.

    Args:
        console: the console.
        heads: headings of the columns; the first column names the row.
        rows: cells; markup is not interpreted.
        title: of the table.
        right: number of last columns that are aligned to the right.
    """
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(heads):
        justify: JustifyMethod = "right" if number >= len(heads) - right else "left"
        table.add_column(Text(head), no_wrap=True, justify=justify, style="cyan" if number == 0 else "")
    for row in texts:
        table.add_row(*row)
    if title:
        console.print(Text(title, "italic"), soft_wrap=True)
    if console.measure(table, options=console.options.update(max_width=_WIDE)).maximum <= console.width:
        console.print(table)
        return
    indent = 2 + max(map(len, heads[1:]), default=0)
    for name, *cells in texts:
        console.print(Text.assemble(name, style="cyan"), soft_wrap=True)
        for head, cell in zip(heads[1:], cells, strict=True):
            console.print(Text.assemble("  ", (head.ljust(indent), "bold"), cell), soft_wrap=True)


def listing(title: str, rows: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Print rows by name, all with the same columns, as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    heads = ["name", *next(iter(rows.values()))]
    cells = [[name, *("–" if value is None else str(value) for value in row.values())] for name, row in rows.items()]
    print_table(console_for(False), heads, cells, title)


def answer(values: Mapping[str, Any], as_json: bool) -> None:
    """Print values by name, as two columns or as JSON, in which infinity is null."""
    if as_json:
        print_json({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in values.items():
        text = {True: "yes", False: "no", None: "–"}[value] if value is None or isinstance(value, bool) else str(value)
        if isinstance(value, float):
            text = "∞" if math.isinf(value) else f"{value:.6g}"
        table.add_row(key, Text(text))
    console_for(False).print(table)
