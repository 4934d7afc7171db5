"""Reports of runs: figures, an HTML page, and the result table in the terminal.

:func:`read_run` reads a run folder once; everything else uses the frozen :class:`Run` that it returns.
"""

from coterie.report.comparison import compare, read_runs
from coterie.report.evidence import Pairs, read_pairs, read_tree, similarity_files, split_rounds
from coterie.report.evidence_plots import draw_similarities, similarity_bar
from coterie.report.page import write_report
from coterie.report.plots import DASHED, GROUP_COLOURS, INK, MUTED, cycle, drawing_style, privacy_figure, save_figure
from coterie.report.result_table import result_table
from coterie.report.runs import ReportError, Run, read_run

__all__ = [
    "DASHED",
    "GROUP_COLOURS",
    "INK",
    "MUTED",
    "Pairs",
    "ReportError",
    "Run",
    "compare",
    "cycle",
    "draw_similarities",
    "drawing_style",
    "privacy_figure",
    "read_pairs",
    "read_run",
    "read_runs",
    "read_tree",
    "result_table",
    "save_figure",
    "similarity_bar",
    "similarity_files",
    "split_rounds",
    "write_report",
]
