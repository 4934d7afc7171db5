"""A paper's tables, run again: the paper's figure, ours with mean and standard deviation, and the difference.

A table is one TOML file under ``benchmarks/tables`` (:mod:`coterie.bench.table`); every cell is a run folder, so
nothing is lost when it is cut short (:mod:`coterie.bench.cells`); what comes out is one document
(:mod:`coterie.bench.outcome`), drawn in :mod:`coterie.bench.figures`.
"""

from coterie.bench.cells import Cell, Done, count, run_all
from coterie.bench.figures import draw
from coterie.bench.outcome import console_tables, document, markdown, write_csv
from coterie.bench.surface import surface
from coterie.bench.table import BenchError, Column, Row, Table, read_table, table_names

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
    "surface",
    "table_names",
    "write_csv",
]
