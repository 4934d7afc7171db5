"""Read text tables: bytes to records of cells.

Records follow RFC 4180: a quoted cell may contain line breaks, and a record ends where its quotes do. A record has at
most `MAX_RECORD_LINES` lines and `MAX_LINE` characters. A file with a record that cannot be read, such as one with an
unclosed quote, is refused: where the next record begins would be a guess.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO, TypeVar

from coterie.datasets import data_files
from coterie.datasets.data_files import need_at_most, suffix_of
from coterie.datasets.left_out import Loss
from coterie.datasets.schema import DELIMITERS, FileFormat
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import Cell, composed

#: Characters of a line and of a record, lines of a record, and columns of a table without a schema.
MAX_LINE, MAX_RECORD_LINES, MAX_PLAIN_COLUMNS = 8 * 2**20, 1000, 2**18
#: What stands for bytes that are not of the file's encoding, and the zero byte of a damaged file.
UNDECODABLE, ZERO = "\N{REPLACEMENT CHARACTER}", "\0"
# Characters that are read together, and lines among which column names are looked for.
_BLOCK, TITLES = 2**18, 20
# Excel's first line.
_SEPARATOR = re.compile(r"\"?sep=([^\w\s\"]|\t)\"?[,;\t|]*", re.IGNORECASE)
_UNENDED = "no line end after the last record"
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """A record that cannot be read, or that may be wrong.

    Attributes:
        number: of its first line, from 1.
        what: such as "another number of cells than the 4 column names".
        value: its value, such as "5 cells".
        hint: which setting would help.
    """

    number: int
    what: str
    value: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Chunk:
    """Consecutive records.

    Attributes:
        numbers: of the rows, as in `Finding.rows`.
        rows: cells of the requested columns, for every record that can be read.
        positions: of the rows among the records of the chunk, from 0.
        problems: the other records.
        damaged: whether a cell may contain `UNDECODABLE` or `ZERO`, or be a `BadCell`.
        notes: records that are read, but may be wrong.
    """

    numbers: Sequence[int]
    rows: Sequence[Sequence[Cell]]
    positions: Sequence[int]
    problems: Sequence[Problem] = ()
    damaged: bool = False
    notes: Sequence[Problem] = ()

    def parts(self, size: int) -> Iterator[Chunk]:
        """Yield the rows in chunks of this size, the first of which has the problems."""
        for start in range(0, max(len(self.rows), 1), size):
            part = slice(start, start + size)
            problems = () if start else self.problems
            yield Chunk(self.numbers[part], self.rows[part], self.positions[part], problems, self.damaged)


@dataclass(frozen=True)
class TableFile:
    """A file whose column names are known, and whose records are still to be read.

    Attributes:
        names: of all columns, in their order.
        records: yields the records, with the cells of the columns at these positions.
        types: of all columns of a parquet file; empty: its cells have types of their own, or are text.
        delimiter: of a text file.
        settings: of `[file]`, with which it has wanted names, if its first line has few of them.
        losses: what is not read beside the records.
    """

    names: Sequence[str]
    records: Callable[[Sequence[int]], Iterator[Chunk]]
    types: Sequence[Any] = ()
    delimiter: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[Loss] = ()

    @property
    def hint(self) -> str:
        """What to set, as the end of an error; empty: nothing."""
        settings = " and ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        line = f"; line {self.settings['skip-lines'] + 1} has them" if "skip-lines" in self.settings else ""
        return f"{line}; set {settings} in [file]" if settings else ""


def text_table(path: Path, form: FileFormat, wanted: Collection[str]) -> TableFile:
    """Read the column names of a text file, most of which are wanted.

    Raises:
        DataError: the first line is too long, or the file contradicts its declared format.
    """
    with _opened(path, form) as file:
        lines = next(_blocks(file, path), [""])
    if len(lines[0]) > MAX_LINE:
        raise DataError(f"{path}: the first line has more than {MAX_LINE:,} characters; expected column names")
    lines[0] = lines[0].lstrip("\ufeff")
    first = next((i for i, line in enumerate(lines) if i + 1 not in form.skip_lines and line.strip()), 0)
    separator = ""
    if named := _SEPARATOR.fullmatch(lines[first].rstrip("\n")):
        first, separator = first + 1, named[1]
        if form.delimiter not in ("", separator):
            raise DataError(
                f"{path}: its line {named[0]!r} contradicts delimiter = {form.delimiter!r}; remove one of the two"
            )
    tabs = "\t" if suffix_of(path).startswith(".tsv") else ""
    candidates = form.delimiter or separator or tabs or DELIMITERS
    headers = {delimiter: _header(lines[first:], delimiter) for delimiter in candidates}
    delimiter = max(
        headers, key=lambda candidate: (len({*wanted}.intersection(headers[candidate][0])), len(headers[candidate][0]))
    )
    names, height = headers[delimiter]
    skipped = {*form.skip_lines, *range(1, first + height + 1)}
    records = partial(_records, path, form, delimiter, len(names), skipped)
    readings = (
        (number, "" if other in candidates else other, _header([line], other)[0])
        for number, line in enumerate(lines[first : first + TITLES], first + 1)
        for other in DELIMITERS
    )
    return TableFile(names, records, delimiter=delimiter, settings=names_settings(names, first + 1, readings, wanted))


def names_settings(
    names: Sequence[str], first: int, readings: Iterable[tuple[int, str, Sequence[str]]], wanted: Collection[str]
) -> dict[str, Any]:
    """Return settings that find more of the wanted names than the first line has, if it has few of them.

    Other readings are the number of a line, the delimiter to set, and the cells.
    """
    folded = {name.casefold() for name in wanted}

    def count(cells: Iterable[str]) -> int:
        return len(folded.intersection(map(str.casefold, cells)))

    if 2 * count(names) >= len(folded):
        return {}
    counts = [(count(names), first, ""), *((count(cells), number, delimiter) for number, delimiter, cells in readings)]
    _, number, delimiter = max(counts, key=itemgetter(0))
    settings: dict[str, Any] = {"skip-lines": number - 1} if number > first else {}
    return settings | ({"delimiter": "tab" if delimiter == "\t" else delimiter} if delimiter else {})


def _header(lines: Sequence[str], delimiter: str) -> tuple[list[str], int]:
    """Return the column names and their number of lines; no names if the quotes are misplaced."""
    reader = _reader(iter(lines[:MAX_RECORD_LINES]), delimiter)
    try:
        names: list[str] = next(reader, [])
    except csv.Error:
        return [], 1
    return [composed(" ".join(name.split())) for name in names], reader.line_num


def _records(
    path: Path, form: FileFormat, delimiter: str, width: int, skipped: Collection[int], columns: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the records after the column names, by blocks of the file."""
    need_at_most(data_files.MAX_BYTES // 4, path.stat().st_size, str(path), "holds")
    pick = _pick(columns, width)
    with _opened(path, form) as file:
        first, rest = 1, list[str]()
        blocks = _blocks(file, path)
        block: list[str] | None = next(blocks, [])
        while block is not None:
            following = next(blocks, None)
            lines = rest + block
            for number in skipped:
                if first <= number < first + len(lines):
                    lines[number - first] = "\n"
            chunk, end = _chunk(path, lines, first, delimiter, width + form.trailing_delimiter, following is None)
            if form.trailing_delimiter:
                chunk = _without_last(chunk)
            text = "".join(lines[:end])
            damaged = UNDECODABLE in text or ZERO in text
            unended = following is None and text.rstrip(" ") and not text.endswith("\n")
            notes = [Problem(first + end - 1, _UNENDED, hint="is the file complete?")] if unended else []
            yield replace(chunk, rows=pick(chunk.rows), damaged=damaged, notes=notes)
            first, rest, block = first + end, lines[end:], following


def _without_last(chunk: Chunk) -> Chunk:
    """Return the records without the empty cell after their last delimiter; one with text there is a problem."""
    wrong = {i for i, row in enumerate(chunk.rows) if row[-1].strip()}
    right = [i for i in range(len(chunk.rows)) if i not in wrong]
    problems = [Problem(chunk.numbers[i], "text after the last delimiter", chunk.rows[i][-1]) for i in sorted(wrong)]
    return Chunk(
        [chunk.numbers[i] for i in right],
        [chunk.rows[i][:-1] for i in right],
        [chunk.positions[i] for i in right],
        [*chunk.problems, *problems],
    )


def _pick(columns: Sequence[int], width: int) -> Callable[[Sequence[Sequence[Cell]]], Sequence[Sequence[Cell]]]:
    """Return what selects columns of rows."""
    if list(columns) == list(range(width)):
        return lambda rows: rows
    if len(columns) == 1:
        return lambda rows: [[row[columns[0]]] for row in rows]
    return lambda rows: list(map(itemgetter(*columns), rows))


def _opened(path: Path, form: FileFormat) -> TextIO:
    """Open a text file, which may be compressed, by its byte order mark or its declared encoding."""
    unpack = gzip.open if suffix_of(path).endswith(".gz") else open
    with unpack(path, "rb") as file:
        start = _read(path, lambda: file.read(4))
    marked = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    declared = codecs.lookup(form.encoding).name
    if marked and declared != "utf-8" and not declared.startswith(marked):
        raise DataError(
            f"{path} begins with the byte order mark of {marked}, which contradicts encoding = {form.encoding!r}; "
            "remove the encoding from the schema"
        )
    encoding = (marked or declared) if declared == "utf-8" else declared
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    return io.TextIOWrapper(io.BufferedReader(unpack(path, "rb")), encoding, "replace")


def _read(path: Path, read: Callable[[], T]) -> T:
    """Return what is read of a file.

    Raises:
        DataError: it is damaged as a whole.
    """
    try:
        return read()
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}); copy it again") from None
    except UnicodeError as error:
        raise DataError(f"{path}: {error}; set its encoding, such as 'utf-16-le', in the schema") from None


def _blocks(file: TextIO, path: Path) -> Iterator[list[str]]:
    """Yield the lines by blocks, with their ends; a line that is too long is cut, and stays too long."""
    rest, size = "", 0
    for text in iter(partial(_read, path, partial(file.read, _BLOCK)), ""):
        size += len(text)
        need_at_most(data_files.MAX_BYTES // 4, size, str(path), "holds text of")
        if len(rest) > MAX_LINE and "\n" not in text:
            continue
        whole, end, rest = (rest + text).rpartition("\n")
        if end:
            yield io.StringIO(whole + end, newline="\n").readlines()
    if rest:
        yield [rest]


def _chunk(path: Path, lines: Sequence[str], first: int, delimiter: str, width: int, final: bool) -> tuple[Chunk, int]:
    """Return the records of some lines, and the number of lines that they have; the others are part of a record.

    Raises:
        DataError: a record cannot be read.
    """
    with suppress(csv.Error):
        rows = list(_reader(iter(lines), delimiter))
        plain = len(rows) == len(lines) and max(map(len, lines), default=0) <= MAX_LINE
        if plain and set(map(len, rows)) <= {width} and all(map(any, rows)):
            return Chunk(range(first, first + len(rows)), rows, range(len(rows))), len(lines)
    return _one_by_one(path, lines, first, delimiter, width, final)


def _one_by_one(
    path: Path, lines: Sequence[str], first: int, delimiter: str, width: int, final: bool
) -> tuple[Chunk, int]:
    """Do what `_chunk` does for lines with blank lines, quoted line breaks, or other numbers of cells."""
    cursor = _Cursor(lines)
    reader = _reader(cursor, delimiter)
    numbers, rows, positions, problems = list[int](), list[list[str]](), list[int](), list[Problem]()
    while (start := cursor.begin()) < len(lines):
        number = first + start
        try:
            cells = next(reader)
        except csv.Error as error:
            if cursor.ended and not final:
                break
            raise _unreadable(path, number, str(error)) from None
        if not lines[start].replace(delimiter, "").strip():
            continue
        if len(cells) == width:
            numbers.append(number)
            positions.append(len(positions) + len(problems))
            rows.append(cells)
            continue
        if cursor.position - start > 1:  # an open quote may have joined several records
            raise _unreadable(path, number, f"{len(cells)} cells in {cursor.position - start} lines, expected {width}")
        more = len(cells) == width + 1 and not cells[-1]
        hint = "every record may end with a delimiter with trailing-delimiter = true" if more else ""
        what = f"another number of cells than the {width} column names"
        problems.append(Problem(number, what, f"{len(cells)} cells", hint))
    return Chunk(numbers, rows, positions, problems), start


def _unreadable(path: Path, number: int, problem: str) -> DataError:
    return DataError(
        f"{path}: the record that begins in line {number:,} cannot be read ({problem}); close every quote, and double "
        "those within a quoted cell"
    )


def _reader(lines: Iterator[str], delimiter: str) -> Any:
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)


class _Cursor:
    """Yields lines, and limits those of a record.

    Attributes:
        position: of the next line.
        ended: whether a line after the last one was requested.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.position, self.ended = 0, False
        self._lines, self._start, self._size = lines, 0, 0

    def begin(self) -> int:
        """Begin a record, and return its first line."""
        self._start, self._size, self.ended = self.position, 0, False
        return self.position

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> str:
        if self.position == len(self._lines):
            self.ended = True
            raise StopIteration
        line = self._lines[self.position]
        self.position += 1
        self._size += len(line)
        if self._size > MAX_LINE:
            what = "line" if self.position - self._start == 1 else "record"
            raise csv.Error(f"a {what} of more than {MAX_LINE:,} characters")
        if self.position - self._start > MAX_RECORD_LINES:
            raise csv.Error(f"a record of more than {MAX_RECORD_LINES:,} lines")
        return line
