"""Reproduce tables of papers: the published value, our mean and standard deviation, and the difference.

A table is a TOML file under ``benchmarks/tables`` (:mod:`coterie.bench.table`). Every cell is a run folder, so an
interrupted table can be resumed (:mod:`coterie.bench.cells`). The result is one document
(:mod:`coterie.bench.outcome`), plotted in :mod:`coterie.bench.table_figures`.
"""
