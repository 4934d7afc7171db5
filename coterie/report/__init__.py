"""Reports of runs: figures, an HTML page, and the result table in the terminal.

:func:`coterie.report.runs.read_run` reads a run folder once; everything else uses the frozen
:class:`~coterie.report.runs.Run` that it returns.
"""
