"""Encode the cells of a table as features by a schema: every record from its own cells and public constants alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.left_out import Finding, Loss
from coterie.datasets.schema import Column, TableSchema
from coterie.datasets.table_cells import BadCell, Cell, Notation, Positions, as_text, codes, integer, spellings
from coterie.datasets.text_tables import UNDECODABLE, ZERO, Chunk

# Records that are encoded together, at most, and their features.
_CHUNK, _CHUNK_FEATURES = 4096, 2**18


@dataclass(frozen=True, eq=False)
class Table:
    """A table that was read by a schema; all of it is private.

    Attributes:
        x: (n, F) float32 features, in the order of `TableSchema.feature_names`.
        y: (n,) float64 labels from 0, or scaled targets; zeros if the table was read without them.
        index: (n,) int64 position of each record among all records of the file, from 0.
        findings: what was dropped or clamped.
        missing: number of missing values by column, the label included, where there are any.
        labelled: whether the table was read with labels or targets.
        records: number of records of the file, including those that were dropped.
        lost: number of dropped records by class name, of those whose class is known.
        beside: what is not read beside the records.
        units: (n,) name of each record's unit, such as its patient; None: each record is its own.
        sites: (n,) int64 index of each record's site in the schema; None: they were not read.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float64]
    index: npt.NDArray[np.int64]
    findings: tuple[Finding, ...]
    missing: dict[str, int]
    labelled: bool
    records: int
    lost: dict[str, int] = field(default_factory=dict)
    beside: Sequence[Loss] = ()
    units: npt.NDArray[np.str_] | None = None
    sites: npt.NDArray[np.int64] | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the schema has no rule."""
        return tuple(finding for finding in self.findings if not finding.expected)


class Encoder:
    """Encodes chunks of rows, and counts what it drops and clamps.

    Args:
        schema: how to encode them.
        labelled: whether the cells of the label follow those of the features.

    Attributes:
        records: number of records so far.
    """

    def __init__(self, schema: TableSchema, labelled: bool, notation: Notation) -> None:
        self.records = 0
        self._schema, self._labelled, self._notation = schema, labelled, notation
        self._columns = [*schema.columns, *(schema.targets if labelled else [])]
        widths = [len(column.feature_names) for column in schema.columns]
        ones = [1] * (len(schema.targets) - 1)
        self._starts = np.cumsum([0, *widths, *ones])  # first feature of each column; targets come last
        self._numeric = [i for i, column in enumerate(self._columns) if column.kind == "number"]
        numbers = [self._columns[i] for i in self._numeric]
        self._mean, self._scale = (np.array([getattr(c, name) for c in numbers]) for name in ("mean", "scale"))
        spans = np.array([c.span or (-math.inf, math.inf) for c in numbers]).reshape(-1, 2)
        self._low, self._high = spans.T
        self._absent: dict[int, frozenset[str]] = {}
        self._known: dict[int, Positions] = {}
        shared = codes(schema.file.missing_values, notation)
        of_columns = (shared | codes(column.missing_values, notation) for column in numbers)
        self._codes = {j: texts for j, texts in enumerate(of_columns) if texts}
        self._missing: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._findings: dict[tuple[str, str], Finding] = {}
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []
        self._chunk = Chunk((), (), ())
        self._keep = np.ones(0, bool)
        self._dropped: list[tuple[Finding, int]] = []
        self._damaged: set[tuple[int, int]] = set()

    def add(self, chunk: Chunk) -> None:
        """Encode the next records."""
        for problem in chunk.problems:
            finding = self._finding("", problem.what, "dropped", False, problem.hint)
            finding.add(problem.number, problem.value)
            finding.by_class[""] += 1
        for note in chunk.notes:
            self._finding("", note.what, "kept", True, note.hint).add(note.number, note.value)
        for part in chunk.parts(max(1, min(_CHUNK, _CHUNK_FEATURES // max(1, self._schema.num_features)))):
            self._add(part)
        self.records += len(chunk.rows) + len(chunk.problems)

    def _add(self, chunk: Chunk) -> None:
        self._chunk, self._dropped, self._damaged = chunk, [], set()
        self._keep = np.ones(len(chunk.rows), bool)
        if not chunk.rows:
            return
        if chunk.damaged:
            self._drop_damaged()
        features = self._schema.num_features
        targets = len(self._columns) - len(self._schema.columns)
        x = np.zeros((len(chunk.rows), features + targets), np.float64)
        if self._numeric:
            self._add_numbers(x)
        for i, column in enumerate(self._columns):
            if column.kind == "number":
                continue
            positions = self._positions(i, column)
            if i >= len(self._schema.columns):
                x[:, self._starts[i]] = positions
                continue
            if column.kind == "boolean":
                positions = positions - 1  # false has no feature, and a missing value one of its own
            rows = np.flatnonzero(positions >= 0)
            x[rows, self._starts[i] + positions[rows]] = 1
        y = self._schema.task.encoded(x[:, features:]) if self._labelled else np.zeros(len(x))
        dropped = {i for _, i in self._dropped} if self._labelled and self._schema.num_classes else ()
        classes = {i: self._schema.class_names[int(y[i])] for i in dropped if y[i] >= 0}
        self._lost.update(classes.values())
        for finding, i in self._dropped:
            finding.by_class[classes.get(i, "")] += 1
        index = self.records + np.fromiter(chunk.positions, np.int64, len(chunk.rows))
        self._parts.append((x[self._keep, :features].astype(np.float32), y[self._keep], index[self._keep]))

    def table(self) -> Table:
        """Return all records that were not dropped."""
        empty = np.zeros((0, self._schema.num_features), np.float32), np.zeros(0), np.zeros(0, np.int64)
        x, y, index = (np.concatenate(parts) for parts in zip(empty, *self._parts, strict=True))
        order = {"": -1}
        if self._findings or self._missing:
            order |= {column.name: i for i, column in enumerate(self._columns)}
        findings = sorted(self._findings.values(), key=lambda finding: order[finding.column])
        missing = {name: self._missing[name] for name in sorted(self._missing, key=order.__getitem__)}
        return Table(x, y, index, tuple(findings), missing, self._labelled, self.records, dict(self._lost))

    def _drop_damaged(self) -> None:
        """Drop records with cells whose content is lost, whatever the rules for other values."""
        for i, row in enumerate(self._chunk.rows):
            for column, cell in enumerate(row):
                if isinstance(cell, BadCell) and str(cell) not in self._absent_of(column):
                    self._drop(column, cell.what, i, hint=cell.hint)
                elif isinstance(cell, str) and UNDECODABLE in cell:
                    what = f"bytes that are not {self._schema.file.encoding}"
                    self._drop(column, what, i, hint="set the encoding of the file")
                elif isinstance(cell, str) and ZERO in cell:
                    self._drop(column, "zero bytes", i)
                else:
                    continue
                self._damaged.add((i, column))

    def _add_numbers(self, x: npt.NDArray[np.float64]) -> None:
        """Write the features of all columns of numbers, scaled, and 0 where they are missing."""
        values = self._numbers()
        for j, i in np.argwhere(np.isnan(values).T).tolist():
            values[i, j] = self._fill(x, i, self._numeric[j])
        for j, i in np.argwhere(((values < self._low) | (values > self._high)).T).tolist():
            side = f"below {self._low[j]:g}" if values[i, j] < self._low[j] else f"above {self._high[j]:g}"
            number = self._numeric[j]
            finding = self._finding(self._columns[number].name, side, "clamped", True)
            finding.add(self._chunk.numbers[i], as_text(self._cell(i, number)))
        scaled = (np.clip(values, self._low, self._high) - self._mean) / self._scale
        with np.errstate(over="ignore"):
            large = np.isinf(scaled.astype(np.float32))
        for j, i in np.argwhere(large.T).tolist():
            self._drop(self._numeric[j], "too large", i)
        x[:, self._starts[self._numeric]] = np.where(large | np.isnan(scaled), 0.0, scaled)

    def _numbers(self) -> npt.NDArray[np.float64]:
        """Return the (n, k) numbers of k columns; NaN for other cells, and for codes of missing values, such as -9."""
        rows = self._chunk.rows
        if len(self._numeric) < len(self._columns):
            rows = [[cells[i] for i in self._numeric] for cells in rows]
        at_once = self._notation.numbers_at_once(list(chain.from_iterable(rows)))
        if at_once is None:
            columns = [self._notation.numbers(cells) for cells in zip(*rows, strict=True)]
            values = np.stack(columns, axis=1)
        else:
            values = at_once.reshape(len(rows), -1)
        for j, texts in self._codes.items():
            possible = np.isin(values[:, j], [self._notation.number(text) or 0.0 for text in texts])
            for i in np.flatnonzero(possible).tolist():
                values[i, j] = math.nan if as_text(rows[i][j]) in texts else values[i, j]
        return values

    def _fill(self, x: npt.NDArray[np.float64], i: int, column: int) -> float:
        """Return the value of a cell that is not a number; NaN if it is missing, or the record is dropped."""
        rule, text = self._columns[column], as_text(self._cell(i, column))
        if text not in self._absent_of(column):
            return self._measured(i, column, rule, text)
        self._gap(column, i)
        if rule.missing == "indicator":
            x[i, self._starts[column] + 1] = 1
        return float(rule.fill) if rule.missing == "value" and rule.fill is not None else math.nan

    def _measured(self, i: int, column: int, rule: Column, text: str) -> float:
        """Return the number of a cell with a unit or a limit; NaN if the record is dropped."""
        number, sign = self._notation.measured(text, rule.unit)
        if number is None or (sign and rule.censored == "error"):
            target = sign and column >= len(self._schema.columns)
            hint = 'a target that is censored can be left out by censored = "drop"' if target else ""
            self._drop(column, "not a number", i, hint=hint or self._notation.hint(text))
        elif sign and rule.censored == "drop":
            self._drop(column, "censored", i, expected=True)
        elif sign:
            effect = (
                "replaced by half the limit" if rule.censored == "half" and sign == "<" else "replaced by the limit"
            )
            self._finding(rule.name, f"censored ({sign})", effect, True).add(self._chunk.numbers[i], text)
            return number / 2 if rule.censored == "half" and sign == "<" else number
        else:
            return number
        return math.nan

    def _positions(self, number: int, column: Column) -> npt.NDArray[np.int64]:
        """Return the (n,) position of each value among the features of a category; -1 for none."""
        if number not in self._known:
            self._known[number] = Positions(spellings(column.values))
        positions = self._known[number].of([cells[number] for cells in self._chunk.rows])
        for i in np.flatnonzero(positions < -1).tolist():
            positions[i] = self._position(i, number, column)
        return positions

    def _position(self, i: int, number: int, column: Column) -> int:
        """Return the position of a value that is written in another way, missing, or not one of a category."""
        known, text = self._known[number], as_text(self._cell(i, number))
        last = len(column.values) + (column.unknown == "indicator")
        if text in known:
            return known[text]
        if text in self._absent_of(number):
            self._gap(number, i)
            return {"indicator": last, "value": known.get(as_text(column.fill), -1)}.get(column.missing, -1)
        if (whole := integer(text)) in known:
            return known[whole]
        if column.unknown in ("ignore", "indicator"):
            return len(column.values) if column.unknown == "indicator" else -1
        self._drop(number, "not one of its values", i, expected=column.unknown == "drop")
        return -1

    def _cell(self, i: int, column: int) -> Cell:
        return self._chunk.rows[i][column]

    def _absent_of(self, column: int) -> frozenset[str]:
        """Return the texts that mean a missing value in a column; a value of a category does not."""
        if column not in self._absent:
            self._absent[column] = self._schema.missing_values_of(self._columns[column])
        return self._absent[column]

    def _gap(self, column: int, i: int) -> None:
        """Count a missing value, and drop its record if the schema does not replace it."""
        rule = self._columns[column]
        self._missing[rule.name] += 1
        if rule.missing in ("error", "drop"):
            self._drop(column, "missing", i, expected=rule.missing == "drop")

    def _drop(self, column: int, what: str, i: int, *, expected: bool = False, hint: str = "") -> None:
        if (i, column) in self._damaged:
            return
        value = "" if what == "missing" else as_text(self._cell(i, column))
        finding = self._finding(self._columns[column].name, what, "dropped", expected, hint)
        finding.add(self._chunk.numbers[i], value)
        self._dropped.append((finding, i))
        self._keep[i] = False

    def _finding(self, column: str, what: str, effect: str, expected: bool, hint: str = "") -> Finding:
        return self._findings.setdefault((column, what), Finding(column, what, effect, expected, hint))
