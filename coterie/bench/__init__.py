"""Reproduce tables of papers: the published value, our mean and standard deviation, and the difference.

A table is a TOML file under ``benchmarks/tables`` (:mod:`coterie.bench.table`). Every cell is a run folder, so an
interrupted table can be resumed (:mod:`coterie.bench.cells`). The result is one document
(:mod:`coterie.bench.outcome`), plotted in :mod:`coterie.bench.table_figures`.
"""

from coterie.bench.cells import Cell, Done, count, run_all
from coterie.bench.outcome import console_tables, document, markdown, write_csv
from coterie.bench.surface import surface
from coterie.bench.sweep import seeds_of, sweep, write_runs
from coterie.bench.table import BenchError, Column, Row, Table, read_table, table_names
from coterie.bench.table_figures import draw

__all__ = [
    "BenchError",
    "Cell",
    "Column",
    "Done",
    "Row",
    "Table",
    "console_tables",
    "count",
    "document",
    "draw",
    "markdown",
    "read_table",
    "run_all",
    "seeds_of",
    "surface",
    "sweep",
    "table_names",
    "write_csv",
    "write_runs",
]
