"""Read tables by a schema: every record is encoded from its own cells and public constants alone.

The header of a table of plain numbers implies its schema. One line of a CSV file is one record, so that a damaged
record, such as one with an unclosed quote, changes no other. The delimiter is found from the first line.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from coterie.datasets import user_records
from coterie.datasets.left_out import LeftOut
from coterie.datasets.schema import DELIMITERS, LARGEST, Column, FileFormat, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.user_records import (
    NOT_NUMERIC,
    TABLE_SUFFIXES,
    Records,
    is_held_out,
    need_at_most,
    need_regular,
    shortened,
)

#: Length of a line in characters, and columns of a table without a schema.
MAX_LINE, MAX_PLAIN_COLUMNS = 8 * 2**20, 2**18
# Records that are encoded together, at most, and their features.
_CHUNK, _CHUNK_FEATURES = 4096, 2**18
# Rows and values that are kept of each kind of finding, characters of a value, names in an error, and names among which
# a similar one is looked for.
_FIRST, _LONGEST, _NAMES, _COMPARED = 5, 40, 8, 1000
# Names of the column of labels or real targets in a table without a schema.
_TARGETS = ("label", "target")

_DRAFT = """[[columns]]
{}type = "number"    # or "category", with values = ["...", "..."]
# mean =            # public knowledge, never computed from private records
# scale =
# range = [0, 1]
"""

#: A cell: text, or a value of a parquet file; None is missing.
Cell = Any


@dataclass(frozen=True)
class Row:
    """A row of a file.

    Attributes:
        number: 1 is the line of column names of a CSV file, or the first record of another file.
        cells: of the requested columns, in their order.
        problem: what is wrong with the whole row, such as "another number of cells"; empty: nothing.
        value: its value, such as "5 cells".
    """

    number: int
    cells: Sequence[Cell] = ()
    problem: str = ""
    value: str = ""


@dataclass(frozen=True)
class TableFile:
    """A file whose column names are known, and whose rows are still to be read.

    Attributes:
        names: of all columns, in their order.
        rows: yields the rows with the cells of the columns at these positions.
        types: of all columns of a parquet file; empty: its cells are text.
        delimiter: of a CSV file.
    """

    names: Sequence[str]
    rows: Callable[[Sequence[int]], Iterator[Row]]
    types: Sequence[Any] = ()
    delimiter: str = ""


@dataclass
class Finding:
    """A kind of problem of a table, and how often it occurs. It is for the owner of the table alone.

    Attributes:
        column: name of the column; empty: of whole rows.
        what: such as "not a number".
        effect: what happens to the record: "dropped" or "clamped".
        expected: whether the schema has a rule for it; otherwise it is an error.
        count: number of records.
        rows: the first rows; row 1 of a CSV file is the line of column names, row 1 of other files the first record.
        values: their values.
    """

    column: str
    what: str
    effect: str
    expected: bool
    count: int = 0
    rows: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def add(self, row: int, value: Cell) -> None:
        """Count a record."""
        self.count += 1
        if len(self.rows) < _FIRST:
            self.rows.append(row)
            self.values.append(_text(value)[:_LONGEST])

    def __str__(self) -> str:
        what = f"column {self.column!r}: {self.what}" if self.column else self.what
        records = f"{self.count:,} record{'s' * (self.count > 1)} {self.effect}"
        first = [f"{row} ({value})" if value else str(row) for row, value in zip(self.rows, self.values, strict=True)]
        more = ", ..." if self.count > len(first) else ""
        return f"{what}, {records}: row {', '.join(first)}{more}"


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
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float64]
    index: npt.NDArray[np.int64]
    findings: tuple[Finding, ...]
    missing: dict[str, int]
    labelled: bool
    records: int

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the schema has no rule."""
        return tuple(finding for finding in self.findings if not finding.expected)


def read_table(path: str | Path, schema: TableSchema, *, labelled: bool | None = True) -> Table:
    """Read a `.csv` or `.parquet` file.

    Args:
        path: the file.
        schema: how to read it.
        labelled: whether to read labels or targets; otherwise their column may be absent. None: if it is there.

    Raises:
        DataError: the file cannot be read, or has other columns than the schema.
    """
    path = Path(path).expanduser()
    try:
        file = _opened(path, schema.file, {schema.label.name, *(column.name for column in schema.columns)})
        with_label = schema.label.name in file.names if labelled is None else labelled
        columns = [*schema.columns, *([schema.label] if with_label else [])]
        positions = _positions(path, file.names, schema, [column.name for column in columns])
        for i in positions if file.types else ():
            if file.types[i].num_fields:
                held = str(file.types[i])[:_LONGEST]
                raise DataError(f"{path}: column {file.names[i]!r} holds {held}; expected numbers or texts")
        return _encoded(path, schema, with_label, file.rows(positions))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def table_records(path: Path, need_targets: bool, schema: TableSchema | None = None) -> tuple[Records, None]:
    """Read the records of a `.csv` or `.parquet` file.

    Args:
        path: the file.
        need_targets: whether its column of labels or targets may not be absent.
        schema: how to read it; None: one column is named `label`, or `target` for real targets, and all others are
            features; their cells are plain numbers.

    Raises:
        DataError: the file cannot be read, or has other columns.
    """
    if schema is None:
        return _plain_records(path, need_targets), None
    table = read_table(path, schema, labelled=need_targets or None)
    more = "" if len(table.errors) < 2 else f" ({len(table.errors)} kinds of errors)"
    table = replace(table, y=table.y.astype(np.float32).astype(np.float64))
    return _records(path, table, f"{more}; `coterie data check` lists all", schema.num_classes > 0), None


def _plain_records(path: Path, need_targets: bool) -> Records:
    """Read a table of plain numbers by the schema that its header implies."""
    file = _opened(path, FileFormat(), _TARGETS)
    target = _target(path, file.names, need_targets)
    features = [i for i in range(len(file.names)) if i != target]
    if not features:
        raise DataError(f"{path}: records without features; add columns of numbers")
    if len(features) > MAX_PLAIN_COLUMNS:
        raise DataError(f"{path} contains records of {len(features):,} numbers; the limit is {MAX_PLAIN_COLUMNS:,}")
    integers = [_is_integer(path, name, type_) for name, type_ in zip(file.names, file.types, strict=False)]
    whole = all(integers[i] for i in features) if integers else True
    schema = TableSchema(Column("label"), (), tuple(Column(file.names[i]) for i in features))
    table = _encoded(path, schema, target is not None, file.rows(features + ([] if target is None else [target])))
    hint = "; expected plain numbers: fix or remove the record, or describe the table by a schema (docs/tables.md)"
    labelled = None if target is None else file.names[target] == "label"
    records = _records(path, table, hint, labelled, whole)
    return records.only_labels() if labelled else records


def _records(path: Path, table: Table, hint: str, labelled: bool | None, whole: bool = False) -> Records:
    """Return the records of a table; the hint follows a description of each error."""
    problems = [f"{path}: {finding}{hint}" for finding in table.errors]
    if not table.records:
        problems.append(f"{path}: no records")
    held_out = np.fromiter(map(is_held_out, table.x, table.y), bool, len(table.y))
    return Records(
        where=str(path),
        what=f"records of {table.x.shape[1]} numbers",
        x=table.x,
        y=table.y,
        held_out=held_out,
        whole=whole,
        labelled=labelled,
        problems=tuple(problems),
        has_targets=table.labelled,
        notes=tuple(str(finding) for finding in table.findings if finding.expected),
        left_out=LeftOut.of_findings(table.findings, table.records - len(table.y)),
    )


def _target(path: Path, names: Sequence[str], needed: bool) -> int | None:
    """Return the index of the label or target column; None if there is none, and none is needed."""
    targets = [i for i, name in enumerate(names) if name in _TARGETS]
    if not targets and not needed:
        return None
    if len(targets) != 1:
        some = shortened(", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else ""))
        raise DataError(
            f"{path} must have one column named label, or target for real targets, but has {len(targets)}; its columns "
            f"are {some or 'none'}"
        )
    return targets[0]


def _encoded(path: Path, schema: TableSchema, labelled: bool, rows: Iterator[Row]) -> Table:
    """Encode rows of the columns of a schema, with the label as the last one."""
    encoder, num_features = _Encoder(schema, labelled), schema.num_features
    while chunk := list(islice(rows, max(1, min(_CHUNK, _CHUNK_FEATURES // num_features)))):
        encoder.add(chunk)
        need_at_most(user_records.MAX_BYTES, 4 * num_features * encoder.records, str(path), "has features of")
    return encoder.table()


def unscaled(x: npt.NDArray[Any], y: npt.NDArray[Any], schema: TableSchema | None = None) -> str:
    """Return a warning, for the owner of the records alone, if features or real targets are plainly not scaled.

    Args:
        x: (n, F) features.
        y: (n,) integer labels, or real targets.
        schema: names the features; None: they have no names.
    """
    largest = np.abs(x).max(axis=0, initial=0)
    target = float(np.abs(y).max(initial=0)) if y.dtype.kind == "f" and not (schema and schema.num_classes) else 0.0
    if largest.max(initial=0) > LARGEST:
        worst = int(largest.argmax())
        name = repr(schema.feature_names[worst]) if schema else f"{worst}, counted from 0,"
        what, value = f"feature {name}", float(largest[worst])
    elif target > LARGEST:
        what, value = "the target", target
    else:
        return ""
    way = "change its mean and scale in the schema" if schema else "describe the table by a schema"
    return f"{what} reaches {value:.3g}; training needs numbers of about [-3, 3]: {way} (docs/tables.md)"


def draft(path: Path, label: str | None = None) -> str:
    """Return a schema to complete, from the column names of a file alone: means and scales must be public knowledge.

    Raises:
        DataError: the file cannot be read, or has no such label.
    """
    import tomli_w

    try:
        file = _opened(path, FileFormat(), ())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    names = [name for name in file.names if name]
    if label is not None and label not in names:
        raise DataError(f"{path} has no column {label!r}; its columns are {_some(names) or 'none'}")
    named = tomli_w.dumps({"column": "NAME" if label is None else label})
    parts = ["version = 1\n", f'[label]\n{named}# classes = ["...", "..."]\n']
    parts += ['[file]\ndecimal = ","\n'] if file.delimiter == ";" else []
    return "\n".join(parts + [_DRAFT.format(tomli_w.dumps({"name": name})) for name in names if name != label])


# ---- cells to numbers ------------------------------------------------------------------------------------------------


class _Encoder:
    """Encodes chunks of rows, and counts what it drops and clamps.

    Attributes:
        records: number of records so far.
    """

    def __init__(self, schema: TableSchema, labelled: bool) -> None:
        self.records = 0
        self._schema, self._labelled, self._decimal = schema, labelled, schema.file.decimal
        self._columns = [*schema.columns, *([schema.label] if labelled else [])]
        widths = [len(column.feature_names) for column in schema.columns]
        self._starts = np.cumsum([0, *widths])  # first feature of each column; the label comes last
        self._numeric = [i for i, column in enumerate(self._columns) if column.kind == "number"]
        numbers = [self._columns[i] for i in self._numeric]
        self._mean, self._scale = (np.array([getattr(c, name) for c in numbers]) for name in ("mean", "scale"))
        spans = np.array([c.span or (-math.inf, math.inf) for c in numbers]).reshape(-1, 2)
        self._low, self._high = spans.T
        self._absent: dict[int, frozenset[str]] = {}
        shared = _codes(schema.file.missing_values, self._decimal)
        of_columns = (shared | _codes(column.missing_values, self._decimal) for column in numbers)
        self._codes = {j: codes for j, codes in enumerate(of_columns) if codes}
        self._missing: Counter[str] = Counter()
        self._findings: dict[tuple[str, str], Finding] = {}
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []
        self._rows: list[Row] = []
        self._keep = np.ones(0, bool)

    def add(self, chunk: Sequence[Row]) -> None:
        """Encode the next rows."""
        for row in chunk:
            if row.problem:
                self._note("", row.problem, "dropped", False, row.number, row.value)
        index = np.array([self.records + i for i, row in enumerate(chunk) if not row.problem], np.int64)
        self.records += len(chunk)
        self._rows = [row for row in chunk if not row.problem]
        if not self._rows:
            return
        self._keep = np.ones(len(self._rows), bool)
        x = np.zeros((len(self._rows), self._schema.num_features + self._labelled), np.float64)
        if self._numeric:
            self._add_numbers(x)
        for i, column in enumerate(self._columns):
            if column.kind == "category":
                self._add_category(x, i, column)
        y = x[:, -1] if self._labelled else np.zeros(len(x))
        features = x[:, : self._schema.num_features].astype(np.float32)
        self._parts.append((features[self._keep], y[self._keep], index[self._keep]))

    def table(self) -> Table:
        """Return all records that were not dropped."""
        empty = np.zeros((0, self._schema.num_features), np.float32), np.zeros(0), np.zeros(0, np.int64)
        x, y, index = (np.concatenate(parts) for parts in zip(empty, *self._parts, strict=True))
        order = {"": -1}
        if self._findings or self._missing:
            order |= {column.name: i for i, column in enumerate(self._columns)}
        findings = sorted(self._findings.values(), key=lambda finding: order[finding.column])
        missing = {name: self._missing[name] for name in sorted(self._missing, key=order.__getitem__)}
        return Table(x, y, index, tuple(findings), missing, self._labelled, self.records)

    def _add_numbers(self, x: npt.NDArray[np.float64]) -> None:
        """Write the features of all columns of numbers, scaled, and 0 where they are missing."""
        values = self._numbers()
        for j, i in np.argwhere(np.isnan(values).T).tolist():
            values[i, j] = self._fill(x, i, self._numeric[j])
        for j, i in np.argwhere(((values < self._low) | (values > self._high)).T).tolist():
            side = f"below {self._low[j]:g}" if values[i, j] < self._low[j] else f"above {self._high[j]:g}"
            column = self._columns[self._numeric[j]]
            self._note(column.name, side, "clamped", True, self._rows[i].number, self._cell(i, self._numeric[j]))
        scaled = (np.clip(values, self._low, self._high) - self._mean) / self._scale
        with np.errstate(over="ignore"):
            large = np.isinf(scaled.astype(np.float32))
        for j, i in np.argwhere(large.T).tolist():
            self._drop(self._numeric[j], "too large", i)
        x[:, self._starts[self._numeric]] = np.where(large | np.isnan(scaled), 0.0, scaled)

    def _numbers(self) -> npt.NDArray[np.float64]:
        """Return the (n, k) numbers of k columns; NaN for other cells, and for codes of missing values, such as -9."""
        rows: Sequence[Sequence[Cell]] = [row.cells for row in self._rows]
        if len(self._numeric) < len(self._columns):
            rows = [[cells[i] for i in self._numeric] for cells in rows]
        at_once = _numbers_at_once(list(chain.from_iterable(rows)), self._decimal)
        if at_once is None:
            columns = [_numbers(cells, self._decimal) for cells in zip(*rows, strict=True)]
            values = np.stack(columns, axis=1)
        else:
            values = at_once.reshape(len(rows), -1)
        for j, codes in self._codes.items():
            for i, cells in enumerate(rows):
                values[i, j] = math.nan if _text(cells[j]) in codes else values[i, j]
        return values

    def _fill(self, x: npt.NDArray[np.float64], i: int, column: int) -> float:
        """Return the number in place of a cell that holds none; NaN if it is missing, or the record is dropped."""
        rule, text = self._columns[column], _text(self._cell(i, column))
        if text not in self._absent_of(column):
            self._drop(column, "not a number" + _hint(text, self._decimal), i)
            return math.nan
        self._gap(column, i)
        if rule.missing == "indicator":
            x[i, self._starts[column] + 1] = 1
        return float(rule.fill) if rule.missing == "value" and rule.fill is not None else math.nan

    def _add_category(self, x: npt.NDArray[np.float64], i: int, column: Column) -> None:
        """Write the features of a category, or the labels."""
        positions = self._positions(i, column)
        if i == len(self._schema.columns):
            x[:, -1] = positions
            return
        rows = np.flatnonzero(positions >= 0)
        x[rows, self._starts[i] + positions[rows]] = 1

    def _positions(self, number: int, column: Column) -> npt.NDArray[np.int64]:
        """Return the (n,) position of each value among the features of a category; -1 for none."""
        index = {value: i for i, value in enumerate(column.values)}
        absent, last = self._absent_of(number), len(column.feature_names) - 1
        replacement = {"indicator": last, "value": index.get(str(column.fill), -1)}.get(column.missing, -1)
        unknown = len(column.values) if column.unknown == "indicator" else -1
        positions = np.full(len(self._rows), -1)
        for i in range(len(self._rows)):
            text = _text(self._cell(i, number))
            if text in index:
                positions[i] = index[text]
            elif text in absent:
                self._gap(number, i)
                positions[i] = replacement
            elif (whole := _integer(text)) in index:
                positions[i] = index[whole]
            elif column.unknown in ("ignore", "indicator"):
                positions[i] = unknown
            else:
                self._drop(number, "not one of its values", i, expected=column.unknown == "drop")
        return positions

    def _cell(self, i: int, column: int) -> Cell:
        return self._rows[i].cells[column]

    def _absent_of(self, column: int) -> frozenset[str]:
        """Return the texts that mean a missing value in a column; a value of a category does not."""
        if column not in self._absent:
            rule = self._columns[column]
            texts = frozenset((*self._schema.file.missing_values, *rule.missing_values))
            self._absent[column] = texts.difference(rule.values)
        return self._absent[column]

    def _gap(self, column: int, i: int) -> None:
        """Count a missing value, and drop its record if the schema does not replace it."""
        rule = self._columns[column]
        self._missing[rule.name] += 1
        if rule.missing in ("error", "drop"):
            self._drop(column, "missing", i, expected=rule.missing == "drop")

    def _drop(self, column: int, what: str, i: int, *, expected: bool = False) -> None:
        value = None if what == "missing" else self._cell(i, column)
        self._note(self._columns[column].name, what, "dropped", expected, self._rows[i].number, value)
        self._keep[i] = False

    def _note(self, column: str, what: str, effect: str, expected: bool, row: int, value: Cell) -> None:
        self._findings.setdefault((column, what), Finding(column, what, effect, expected)).add(row, value)


def _number(cell: Cell, decimal: str) -> float | None:
    """Return a finite number; None for any other cell."""
    if isinstance(cell, str):
        text = cell.strip()
        if decimal == ",":
            text = text.replace(",", ".") if "." not in text else ""
        if "_" in text or not text.isascii():  # float accepts more than a table should hold
            return None
        cell = text
    elif cell is None or isinstance(cell, bool):
        return None
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _codes(texts: Sequence[str], decimal: str) -> frozenset[str]:
    """Return the texts for missing values that are numbers, such as -9."""
    return frozenset(text for text in texts if _number(text, decimal) is not None)


def _numbers(cells: Sequence[Cell], decimal: str) -> npt.NDArray[np.float64]:
    """Return the finite numbers; NaN for other cells."""
    values = _numbers_at_once(cells, decimal)
    if values is not None:
        return values
    numbers = (_number(cell, decimal) for cell in cells)
    return np.fromiter((math.nan if number is None else number for number in numbers), np.float64, len(cells))


def _numbers_at_once(cells: Sequence[Cell], decimal: str) -> npt.NDArray[np.float64] | None:
    """Return what `_number` returns for every cell, if all of them are numbers, or all texts of one; otherwise None."""
    types = set(map(type, cells))
    numbers: Iterator[Any] = iter(cells)
    if types == {str}:
        text = "".join(cells)
        if "_" in text or not text.isascii() or (decimal == "," and "." in text):
            return None
        numbers = map(float, cells if decimal == "." else (cell.replace(",", ".") for cell in cells))
    elif not types <= {int, float}:
        return None
    try:
        values = np.fromiter(numbers, np.float64, len(cells))
    except (ValueError, OverflowError):
        return None
    return values if np.isfinite(values).all() else None


def _text(cell: Cell) -> str:
    """Return a cell as a table would show it; whole numbers without a fraction."""
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell)


def _integer(text: str) -> str:
    """Return the text of a whole number without its fraction, such as 1 for 1.0; other texts unchanged."""
    whole, dot, fraction = text.partition(".")
    return whole if dot and whole.lstrip("-").isdecimal() and not fraction.strip("0") else text


def _hint(text: str, decimal: str) -> str:
    """Return why a cell may not be a number, if a setting of the file would help."""
    other = "," if decimal == "." else "."
    if text.count(other) == 1 and _number(text.replace(other, decimal), decimal) is not None:
        return f" with decimal = {decimal!r}"
    return ""


# ---- files to cells --------------------------------------------------------------------------------------------------


def _opened(path: Path, form: FileFormat, wanted: Collection[str]) -> TableFile:
    """Read the column names of a file, most of which are wanted."""
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(f"{path}: a schema is for tables; supported files: {', '.join(TABLE_SUFFIXES)}")
    if not path.exists():
        raise DataError(f"{path} does not exist")
    need_regular(path)
    return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path, form, wanted)


def _csv(path: Path, form: FileFormat, wanted: Collection[str]) -> TableFile:
    with _text_file(path, form) as file:
        first = next(_lines(file), "")
    if first is None:
        raise DataError(f"{path}: the first line has more than {MAX_LINE:,} characters; expected column names")
    headers = {delimiter: _names(first, delimiter) for delimiter in form.delimiter or DELIMITERS}
    delimiter = max(
        headers, key=lambda candidate: (len({*wanted}.intersection(headers[candidate])), len(headers[candidate]))
    )
    names = headers[delimiter]
    return TableFile(names, partial(_csv_rows, path, form, delimiter, len(names)), delimiter=delimiter)


def _csv_rows(path: Path, form: FileFormat, delimiter: str, width: int, positions: Sequence[int]) -> Iterator[Row]:
    """Yield rows line by line."""
    need_at_most(user_records.MAX_BYTES // 4, path.stat().st_size, str(path), "holds")
    everything = list(positions) == list(range(width))
    with _text_file(path, form) as file:
        lines = _lines(file)
        next(lines, None)
        for number, line in enumerate(lines, 2):
            if line is None:
                yield Row(number, problem=f"a line of more than {MAX_LINE:,} characters")
            elif line.replace(delimiter, "").strip():
                cells = _cells(line, delimiter)
                if isinstance(cells, str):
                    yield Row(number, problem=cells)
                elif len(cells) != width:
                    problem = f"another number of cells than the {width} column names"
                    yield Row(number, problem=problem, value=f"{len(cells)} cells")
                else:
                    yield Row(number, cells if everything else [cells[i] for i in positions])


def _text_file(path: Path, form: FileFormat) -> TextIO:
    encoding = "utf-8-sig" if form.encoding == "utf-8" else form.encoding
    return path.open(encoding=encoding, errors="replace")


def _lines(file: TextIO) -> Iterator[str | None]:
    """Yield the lines; None instead of a line that is too long."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while line and not line.endswith(("\n", "\r")):
            line = file.readline(MAX_LINE)
        yield None


def _cells(line: str, delimiter: str) -> list[str] | str:
    """Return the cells of a line, or what is wrong with it."""
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        return f"cells that cannot be read ({error})"


def _names(line: str, delimiter: str) -> list[str]:
    """Return the column names of a first line; none if its quotes are misplaced."""
    cells = _cells(line, delimiter)
    return [] if isinstance(cells, str) else [name.strip() for name in cells]


def _positions(path: Path, header: Sequence[str], schema: TableSchema, names: Sequence[str]) -> list[int]:
    """Return the positions of the requested columns.

    Raises:
        DataError: a column is absent or occurs twice, or the file has others that are not ignored.
    """
    expected_names = {*names, schema.label.name, *(schema.ignore or ()), ""}
    counts, positions = Counter(header), {name: i for i, name in enumerate(header)}
    missing = [name for name in names if name not in positions]
    others = [] if schema.ignore is None else [name for name in header if name not in expected_names]
    twice = [name for name in names if counts[name] > 1]
    problems = []
    if missing:
        near = difflib.get_close_matches(missing[0], header[:_COMPARED], n=1)
        hint = f" (is it {near[0]!r}?)" if near else ""
        problems.append(f"has no column {_some(missing)}{hint}")
    if others:
        problems.append(f"has columns that the schema does not name: {_some(others)}; add them to ignore")
    if twice:
        problems.append(f"has two columns {_some(twice)}")
    if len(missing) == len(names):
        problems.append(f"its first line is {','.join(header)[:200]!r}; expected column names in UTF-8")
    if problems:
        raise DataError(f"{path} {'; '.join(problems)}")
    return [positions[name] for name in names]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:_LONGEST]) for name in names[:_NAMES])
    return shown + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _parquet(path: Path) -> TableFile:
    try:
        from pyarrow import parquet

        fields = list(parquet.read_schema(path))
    except ImportError:
        raise DataError(f"{path}: reading parquet requires pyarrow: pip install 'coterie[parquet]'") from None
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise _invalid(path, error) from None
    names = [field.name for field in fields]
    return TableFile(names, partial(_parquet_rows, path, names), [field.type for field in fields])


def _parquet_rows(path: Path, names: Sequence[str], positions: Sequence[int]) -> Iterator[Row]:
    """Yield rows record by record."""
    from pyarrow import parquet

    everything = len(positions) == len(names)  # also columns that share a name
    wanted = [names[i] for i in positions]
    try:
        # Equal texts are stored once: a small file could expand to any size otherwise.
        with parquet.ParquetFile(path, read_dictionary=wanted) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            num_rows = max(file.metadata.num_rows, sum(group.num_rows for group in groups))
            size = max(sum(group.total_byte_size for group in groups), 8 * num_rows * len(wanted))
            need_at_most(user_records.MAX_BYTES, size, str(path), "unpacks to")
            number = 0
            for batch in file.iter_batches(_CHUNK, columns=None if everything else wanted):
                order = positions if everything else map(batch.schema.get_field_index, wanted)
                for cells in zip(*[_values(batch.column(i)) for i in order], strict=True):
                    number += 1
                    yield Row(number, cells)
    except DataError:
        raise
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise _invalid(path, error) from None


def _invalid(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a valid parquet file ({shortened(error)}); write it again")


def _is_integer(path: Path, name: str, data_type: Any) -> bool:
    """Return whether a parquet column holds integers.

    Raises:
        DataError: it does not hold numbers.
    """
    from pyarrow import types

    data_type = data_type.value_type if types.is_dictionary(data_type) else data_type
    if not (types.is_integer(data_type) or types.is_floating(data_type)):
        raise DataError(f"{path}: column {shortened(name)!r}: {shortened(data_type)} {NOT_NUMERIC}")
    return bool(types.is_integer(data_type))


def _values(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    distinct = column.dictionary.to_pylist()
    return [None if i is None else distinct[i] for i in column.indices.to_pylist()]
