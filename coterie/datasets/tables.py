"""Read tables by a schema: every record is encoded from its own cells and public constants alone.

One line of a CSV file is one record, so that a damaged record, such as one with an unclosed quote, changes no other.
The delimiter is found from the first line.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from coterie.datasets import files
from coterie.datasets.files import Records
from coterie.datasets.schema import DELIMITERS, LARGEST, Column, TableSchema
from coterie.datasets.sources import DataError

# Records that are encoded together, at most, and their features.
_CHUNK, _CHUNK_FEATURES = 4096, 2**22
# Rows and values that are kept of each kind of finding, characters of a value, names in an error, and names among which
# a similar one is looked for.
_FIRST, _LONGEST, _NAMES, _COMPARED = 5, 40, 8, 1000

_DRAFT = """[[columns]]
{}type = "number"    # or "category", with values = ["...", "..."]
# mean =            # public knowledge, never computed from private records
# scale =
# range = [0, 1]
"""

#: A cell: text, or a value of a parquet file; None is missing.
Cell = Any
#: The number of a row, and its cells in the order of the requested columns, or what is wrong with the row.
Row = tuple[int, Sequence[Cell] | str]


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
        missing: number of missing values of every column, the label included.
        records: number of records of the file, including those that were dropped.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.float64]
    index: npt.NDArray[np.int64]
    findings: tuple[Finding, ...]
    missing: dict[str, int]
    records: int

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which the schema has no rule."""
        return tuple(each for each in self.findings if not each.expected)


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
    readers: dict[str, Callable[..., Iterator[Row]]] = {".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: a schema is for tables; supported files: {', '.join(readers)}")
    try:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        files.need_regular(path)
        encoder = _Encoder(schema, schema.label.name in _column_names(path, schema) if labelled is None else labelled)
        rows = readers[path.suffix.lower()](path, schema, [column.name for column in encoder.columns])
        many = max(1, min(_CHUNK, _CHUNK_FEATURES // schema.num_features))
        while chunk := list(islice(rows, many)):
            encoder.add(chunk)
            size = 4 * schema.num_features * encoder.records
            files.need_at_most(files.MAX_BYTES, size, str(path), "has features of")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    return encoder.table()


def schema_readers(schema: TableSchema) -> dict[str, Callable[[Path, bool], tuple[Records, None]]]:
    """Return readers by suffix, in place of `files.READERS`, for tables that have this schema."""

    def read(path: Path, need_targets: bool) -> tuple[Records, None]:
        table = read_table(path, schema, labelled=need_targets or None)
        hint = "" if len(table.errors) < 2 else f" ({len(table.errors)} kinds of errors)"
        problems = [f"{path}: {each}{hint}; `coterie data check` lists all" for each in table.errors]
        if not table.records:
            problems.append(f"{path}: no records")
        held_out = np.fromiter(map(files.is_held_out, table.x, table.y), bool, len(table.y))
        what = f"records of {schema.num_features} numbers"
        classes = schema.num_classes > 0
        notes = tuple(str(each) for each in table.findings if each.expected)
        labelled = schema.label.name in table.missing
        return Records(
            str(path), what, table.x, table.y, held_out, False, classes, tuple(problems), labelled, notes
        ), None

    return dict.fromkeys((".csv", ".parquet"), read)


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

    delimiter, names = ",", []
    if path.suffix.lower() == ".parquet":
        names = [name for name, _ in _parquet_types(path)]
    else:
        try:
            files.need_regular(path)
            with path.open(encoding="utf-8-sig", errors="replace") as file:
                line = next(files.lines(file), None) or ""
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        delimiter = max(DELIMITERS, key=lambda each: len(_names(line, each)))
        names = [name for name in _names(line, delimiter) if name]
    if label is not None and label not in names:
        raise DataError(f"{path} has no column {label!r}; its columns are {_some(names) or 'none'}")
    named = tomli_w.dumps({"column": "NAME" if label is None else label})
    parts = ["version = 1\n", f'[label]\n{named}# classes = ["...", "..."]\n']
    parts += ['[file]\ndecimal = ","\n'] if delimiter == ";" else []
    return "\n".join(parts + [_DRAFT.format(tomli_w.dumps({"name": name})) for name in names if name != label])


# ---- cells to numbers ------------------------------------------------------------------------------------------------


class _Encoder:
    """Encodes chunks of rows, and counts what it drops and clamps.

    Attributes:
        columns: the columns to read: the features, then the label.
        records: number of records so far.
    """

    def __init__(self, schema: TableSchema, labelled: bool) -> None:
        self.columns: tuple[Column, ...] = (*schema.columns, *((schema.label,) if labelled else ()))
        self.records = 0
        self._schema, self._labelled = schema, labelled
        self._absent = {column.name: {*schema.file.missing_values, *column.missing_values} for column in self.columns}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._missing: Counter[str] = Counter()
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []
        self._rows: list[int] = []  # of the current chunk,
        self._keep = np.zeros(0, bool)  # and which of its records are not dropped

    def add(self, chunk: Sequence[Row]) -> None:
        """Encode some rows."""
        whole, index = [], []
        for i, (number, cells) in enumerate(chunk, self.records):
            if isinstance(cells, str):
                self._note("", cells, "dropped", False, number, None)
            else:
                whole.append((number, cells))
                index.append(i)
        self.records += len(chunk)
        if not whole:
            return
        self._rows, self._keep = [number for number, _ in whole], np.ones(len(whole), bool)
        columns = zip(*(cells for _, cells in whole), strict=True)
        parts = [self._features(column, cells) for column, cells in zip(self.columns, columns, strict=True)]
        y = parts.pop() if self._labelled else np.zeros(len(whole))
        x = np.concatenate(parts, axis=1, dtype=np.float32)
        self._parts.append((x[self._keep], y[self._keep], np.array(index, np.int64)[self._keep]))

    def table(self) -> Table:
        """Return all records that were not dropped."""
        empty = np.zeros((0, self._schema.num_features), np.float32), np.zeros(0), np.zeros(0, np.int64)
        x, y, index = (np.concatenate(parts) for parts in zip(empty, *self._parts, strict=True))
        missing = {column.name: self._missing[column.name] for column in self.columns}
        return Table(x, y, index, tuple(self._findings.values()), missing, self.records)

    def _features(self, column: Column, cells: Sequence[Cell]) -> npt.NDArray[np.float64]:
        """Return the (n, width) features of a column, or the (n,) labels or targets."""
        label = column is self._schema.label
        if column.kind == "number":
            values, absent = self._numbers(column, cells)
            columns = [values, absent] if column.missing == "indicator" else [values]
            return values if label else np.stack(columns, axis=1)
        positions = self._positions(column, cells)
        if label:
            return positions.astype(np.float64)
        one_hot: npt.NDArray[np.bool_] = positions[:, None] == np.arange(len(column.feature_names))
        return one_hot.astype(np.float64)

    def _numbers(
        self, column: Column, cells: Sequence[Cell]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return (n,) scaled numbers, 0 where they are missing, and (n,) whether they are missing, as 0 or 1."""
        decimal, absent = self._schema.file.decimal, self._absent[column.name]
        codes = {text for text in absent if _number(text, decimal) is not None}  # such as -9
        values, gaps = np.full(len(cells), np.nan), np.zeros(len(cells))
        at_once = None if codes else _numbers_at_once(cells, decimal)
        if at_once is not None:
            values = at_once
        for i, cell in enumerate(cells if at_once is None else ()):
            number = _number(cell, decimal)
            if number is not None and not (codes and _text(cell) in codes):
                values[i] = number
            elif _text(cell) in absent:
                gaps[i] = 1
                self._gap(column, i)
                if column.missing == "value":
                    values[i] = column.fill
            else:
                self._drop(column, "not a number" + _hint(_text(cell), decimal), i, cell)
        if column.span is not None:
            self._clamp(column, *column.span, values, cells)
        with np.errstate(over="ignore"):
            scaled = ((values - column.mean) / column.scale).astype(np.float32).astype(np.float64)
        for i in np.flatnonzero(np.isinf(scaled)).tolist():
            self._drop(column, "too large", i, cells[i])
        return np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0), gaps

    def _clamp(
        self, column: Column, low: float, high: float, values: npt.NDArray[np.float64], cells: Sequence[Cell]
    ) -> None:
        """Clamp numbers to the declared range, in place."""
        for i in np.flatnonzero((values < low) | (values > high)).tolist():
            side = f"below {low:g}" if values[i] < low else f"above {high:g}"
            self._note(column.name, side, "clamped", True, self._rows[i], cells[i])
        np.clip(values, low, high, out=values)

    def _positions(self, column: Column, cells: Sequence[Cell]) -> npt.NDArray[np.int64]:
        """Return the (n,) position of each value among the features of a category; -1 for none."""
        index = {value: i for i, value in enumerate(column.values)}
        absent, last = self._absent[column.name], len(column.feature_names) - 1
        replacement = {"indicator": last, "value": index.get(str(column.fill), -1)}.get(column.missing, -1)
        unknown = len(column.values) if column.unknown == "indicator" else -1
        positions = np.full(len(cells), -1)
        for i, cell in enumerate(cells):
            text = _text(cell)
            if text in index:
                positions[i] = index[text]
            elif text in absent:
                self._gap(column, i)
                positions[i] = replacement
            elif (number := _integer(text)) in index:
                positions[i] = index[number]
            elif column.unknown in ("ignore", "indicator"):
                positions[i] = unknown
            else:
                self._drop(column, "not one of its values", i, cell, expected=column.unknown == "drop")
        return positions

    def _gap(self, column: Column, i: int) -> None:
        """Count a missing value, and drop its record if the schema does not replace it."""
        self._missing[column.name] += 1
        if column.missing in ("error", "drop"):
            self._drop(column, "missing", i, None, expected=column.missing == "drop")

    def _drop(self, column: Column, what: str, i: int, value: Cell, *, expected: bool = False) -> None:
        self._note(column.name, what, "dropped", expected, self._rows[i], value)
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


def _numbers_at_once(cells: Sequence[Cell], decimal: str) -> npt.NDArray[np.float64] | None:
    """Return what `_number` returns for every cell, if all of them are texts of numbers; otherwise None."""
    try:
        text = "\n".join(cells)
        if "_" in text or not text.isascii() or (decimal == "," and "." in text):
            return None
        values = np.array([float(cell.replace(decimal, ".")) for cell in cells])
    except (TypeError, ValueError):
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


def _csv_rows(path: Path, schema: TableSchema, names: Sequence[str]) -> Iterator[Row]:
    """Yield the cells of these columns, line by line."""
    files.need_at_most(files.MAX_BYTES // 4, path.stat().st_size, str(path), "holds")
    with _opened(path, schema) as file:
        lines = files.lines(file)
        header, delimiter = _header(path, next(lines, ""), schema)
        wanted = _columns(path, header, schema, names)
        for number, line in enumerate(lines, 2):
            if line is None:
                yield number, f"a line of more than {files.MAX_LINE:,} characters"
            elif line.replace(delimiter, "").strip():
                cells = _cells(line, delimiter)
                if not isinstance(cells, str) and len(cells) == len(header):
                    yield number, [cells[i] for i in wanted]
                else:
                    other = f"another number of cells than the {len(header)} column names"
                    yield number, cells if isinstance(cells, str) else other


def _column_names(path: Path, schema: TableSchema) -> list[str]:
    """Return the names of all columns of a file."""
    if path.suffix.lower() == ".parquet":
        return [name for name, _ in _parquet_types(path)]
    with _opened(path, schema) as file:
        return _header(path, next(files.lines(file), ""), schema)[0]


def _opened(path: Path, schema: TableSchema) -> TextIO:
    encoding = "utf-8-sig" if schema.file.encoding == "utf-8" else schema.file.encoding
    return path.open(encoding=encoding, errors="replace")


def _cells(line: str, delimiter: str) -> list[str] | str:
    """Return the cells of a line, or what is wrong with it."""
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        return f"cells that cannot be read ({error})"


def _header(path: Path, line: str | None, schema: TableSchema) -> tuple[list[str], str]:
    """Return the column names and the delimiter, with which most names of the schema are found."""
    if line is None:
        raise DataError(f"{path}: the first line has more than {files.MAX_LINE:,} characters; expected column names")
    known = {schema.label.name, *(column.name for column in schema.columns)}
    best: tuple[list[str], str] = [], ""
    for delimiter in [schema.file.delimiter] if schema.file.delimiter else DELIMITERS:
        names = _names(line, delimiter)
        if not best[1] or len(known.intersection(names)) > len(known.intersection(best[0])):
            best = names, delimiter
    return best


def _names(line: str, delimiter: str) -> list[str]:
    """Return the column names of a first line; none if its quotes are misplaced."""
    cells = _cells(line, delimiter)
    return [] if isinstance(cells, str) else [name.strip() for name in cells]


def _columns(path: Path, header: Sequence[str], schema: TableSchema, names: Sequence[str]) -> list[int]:
    """Return the positions of the requested columns.

    Raises:
        DataError: a column is absent or occurs twice, or the file has others that are not ignored.
    """
    known = {*names, schema.label.name, *(schema.ignore or ()), ""}
    counts, positions = Counter(header), {name: i for i, name in enumerate(header)}
    missing = [name for name in names if name not in positions]
    others = [] if schema.ignore is None else [name for name in header if name not in known]
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


def _parquet_rows(path: Path, schema: TableSchema, names: Sequence[str]) -> Iterator[Row]:
    """Yield the cells of these columns, record by record."""
    types = _parquet_types(path)
    wanted = [types[i] for i in _columns(path, [name for name, _ in types], schema, names)]
    for name, kind in wanted:
        if kind.num_fields:
            raise DataError(f"{path}: column {name!r} holds {str(kind)[:_LONGEST]}; expected numbers or texts")
    from pyarrow import parquet

    try:
        # Equal texts are stored once: a small file could expand to any size otherwise.
        with parquet.ParquetFile(path, read_dictionary=list(names)) as file:
            about = file.metadata
            unpacked = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            size = max(unpacked, 8 * about.num_rows * len(names))
            files.need_at_most(files.MAX_BYTES, size, str(path), "unpacks to")
            number = 0
            for batch in file.iter_batches(_CHUNK, columns=list(names)):
                columns = [_values(batch.column(batch.schema.get_field_index(name))) for name in names]
                for cells in zip(*columns, strict=True):
                    number += 1
                    yield number, cells
    except DataError:
        raise
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise DataError(f"{path} is not a valid parquet file ({str(error)[:200]}); write it again") from None


def _parquet_types(path: Path) -> list[tuple[str, Any]]:
    """Return names and types of all columns."""
    try:
        from pyarrow import parquet

        return [(field.name, field.type) for field in parquet.read_schema(path)]
    except ImportError:
        raise DataError(f"{path}: reading parquet requires pyarrow: pip install 'coterie[parquet]'") from None
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise DataError(f"{path} is not a valid parquet file ({str(error)[:200]}); write it again") from None


def _values(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    distinct = column.dictionary.to_pylist()
    return [None if i is None else distinct[i] for i in column.indices.to_pylist()]
