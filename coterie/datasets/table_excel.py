"""Read Excel tables: the values of one sheet, as a spreadsheet program saved them.

openpyxl's read-only mode takes little memory, but shows neither formulas without a saved value nor merged cells nor
hidden rows: they would look like missing values, or like other records. `_Layout` finds them.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, time
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any
from xml.parsers import expat

from coterie.datasets import user_records
from coterie.datasets.left_out import Loss
from coterie.datasets.schema import FileFormat
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import BadCell, Cell, as_text, composed
from coterie.datasets.table_files import Chunk, Problem, TableFile
from coterie.datasets.user_records import need_at_most, shortened

# Records that are read together, rows of a sheet, and bytes of it that are searched together.
_BATCH, _MAX_ROWS, _BLOCK = 1024, 2**20, 2**20
# What a sheet holds if openpyxl hides something of it, or if its text has two bytes a letter; and their length.
_HIDES, _FORMULA, _LONGEST_HIDDEN = (b"hidden=", b"mergeCell", b"\0"), re.compile(rb"[<:]f[ >/]"), 16
# Programs that compute no formula ask Excel to do so; what they save as its value is none.
_WORKBOOK, _TO_COMPUTE = "xl/workbook.xml", re.compile(rb"<(?:\w+:)?calcPr\b[^>]*\bfullCalcOnLoad=.(?:1|true)\b")
# Texts of a number format, which may contain a percent sign that scales nothing.
_LITERAL = re.compile(r'"[^"]*"|\\.')
_PLACE = re.compile(r"\$?([A-Z]{1,3})\$?(\d{1,7})")


def excel_table(path: Path, form: FileFormat) -> TableFile:
    """Read the column names of a sheet of an Excel workbook: the one that `form` names, or the first visible one.

    Raises:
        DataError: it is none, has no such sheet, or openpyxl is not installed.
    """
    with _opened(path) as book:
        sheet = _sheet(path, book, form.sheet)
        others = [other.title for other in book.worksheets if other is not sheet and _first_row(path, other, ())]
        reason = f"sheets beside {sheet.title!r}, which is read"
        losses = [Loss(reason, "sheet", 1, "left out", (name,), by_rule=bool(form.sheet)) for name in others]
        first, cells = _first_row(path, sheet, form.skip_lines) or (0, ())
        names = [" ".join(as_text(cell.value).split()) for cell in cells]
        while names and not names[-1]:
            names.pop()
        layout = _Layout.of(book, sheet)
    return TableFile(names, partial(_records, path, form, sheet.title, first, len(names), layout), losses=losses)


@dataclass
class _Layout:
    """What openpyxl's read-only mode does not show of a sheet.

    Attributes:
        hidden: numbers of hidden rows, from 1.
        merged: first column and row, last column and row of each range of merged cells.
        formulas: rows and columns of formulas without a saved value.
    """

    hidden: set[int] = field(default_factory=set)
    merged: list[tuple[int, int, int, int]] = field(default_factory=list)
    formulas: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, book: Any, sheet: Any) -> _Layout:
        """Read the XML of a sheet; as a whole only if it holds something of the kind."""
        layout = cls()
        with sheet._get_source() as file:
            found = _hides_any(file)
        if found:
            workbook = book._archive.read(_WORKBOOK) if _WORKBOOK in book._archive.namelist() else b""
            reader = _LayoutReader(layout, computed=not _TO_COMPUTE.search(workbook))
            with sheet._get_source() as file:
                reader.read(file)
        return layout

    def of_rows(self, first: int, last: int) -> _Layout:
        """Return the part that concerns some rows."""
        if not self.merged:
            return self
        return replace(self, merged=[area for area in self.merged if area[1] <= last and first <= area[3]])

    def bad(self, row: int, column: int) -> BadCell | None:
        """Return why the value of a cell is not the one that its owner sees; None if it is."""
        if (row, column) in self.formulas:
            return BadCell("formula without a saved value", "=", "open the file in a spreadsheet program, and save it")
        for left, top, right, bottom in self.merged:
            if left <= column <= right and top <= row <= bottom and (row, column) != (top, left):
                return BadCell("part of merged cells", f"row {top}", "unmerge the cells, and fill each")
        return None


class _LayoutReader:
    """Reads a layout from the XML of a sheet."""

    def __init__(self, layout: _Layout, computed: bool) -> None:
        self._layout, self._computed = layout, computed
        self._row = self._column = 0
        self._formula = self._value = self._inside = False
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler, self._parser.EndElementHandler = self._start, self._end
        self._parser.CharacterDataHandler = self._text

    def read(self, file: IO[bytes]) -> None:
        """Read all of a file."""
        self._parser.ParseFile(file)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(":")[2]
        if name == "row":
            self._row, self._column = int(attributes.get("r", self._row + 1)), 0
            if attributes.get("hidden") in ("1", "true"):
                self._layout.hidden.add(self._row)
        elif name == "c":
            self._column = _place(attributes["r"])[0] if "r" in attributes else self._column + 1
            self._formula, self._value = False, attributes.get("t") == "str"  # a text may be empty
        elif name == "f":
            self._formula = True
        elif name == "v":
            self._inside = True
        elif name == "mergeCell":
            first, _, last = attributes["ref"].partition(":")
            self._layout.merged.append((*_place(first), *_place(last or first)))

    def _text(self, text: str) -> None:
        self._value |= self._inside

    def _end(self, tag: str) -> None:
        name = tag.rpartition(":")[2]
        if name == "v":
            self._inside = False
        elif name == "c" and self._formula and not (self._value and self._computed):
            self._layout.formulas.add((self._row, self._column))


def _place(text: str) -> tuple[int, int]:
    """Return column and row of a cell such as B7, from 1."""
    found = _PLACE.fullmatch(text)
    if not found:
        raise ValueError(f"no place of a cell: {shortened(text)}")
    column = 0
    for letter in found[1]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return column, int(found[2])


def _hides_any(file: IO[bytes]) -> bool:
    rest = b""
    for block in iter(partial(file.read, _BLOCK), b""):
        text = rest + block
        if any(mark in text for mark in _HIDES) or _FORMULA.search(text):
            return True
        rest = block[-_LONGEST_HIDDEN:]
    return False


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a workbook, and turn whatever a broken one makes openpyxl say into an error."""
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise DataError(f"{path}: reading .xlsx requires openpyxl: pip install 'coterie[excel]'") from None
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        texts = sum(part.file_size for part in parts if not part.filename.startswith("xl/worksheets/"))
        need_at_most(user_records.MAX_BYTES // 32, texts, str(path), "has texts and styles that unpack to")
        need_at_most(user_records.MAX_BYTES // 4, sum(part.file_size for part in parts), str(path), "unpacks to")
        with path.open("rb") as file:  # openpyxl closes none that it cannot read
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # styles and other parts that hold no values
                book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
            yield book
    except (DataError, OSError):
        raise
    except Exception as error:
        raise DataError(
            f"{path} is not a valid .xlsx file ({shortened(error)}); save it again, as .xlsx and without a password"
        ) from None


def _sheet(path: Path, book: Any, name: str) -> Any:
    sheets = {composed(sheet.title.strip()): sheet for sheet in book.worksheets}
    if name and name not in sheets:
        raise DataError(f"{path} has no sheet {name!r}; its sheets are {shortened(', '.join(map(repr, sheets)))}")
    visible = [sheet for sheet in sheets.values() if sheet.sheet_state == "visible"]
    if not visible and not name:
        raise DataError(f"{path} has no visible sheet; name one by the key sheet of the schema")
    return sheets[name] if name else visible[0]


def _rows(path: Path, sheet: Any) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the rows of a sheet with their numbers, blank rows included."""
    sheet.reset_dimensions()  # some programs write wrong ones, by which rows would be lost
    for number, row in enumerate(sheet.iter_rows(), 1):
        if number > _MAX_ROWS:
            raise DataError(f"{path}: sheet {sheet.title!r} has more than {_MAX_ROWS:,} rows")
        yield number, row


def _first_row(path: Path, sheet: Any, skipped: Sequence[int]) -> tuple[int, Sequence[Any]] | None:
    """Return the first row that is neither blank nor skipped, with its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = (row for row in _rows(path, sheet) if row[0] not in skipped and not all(map(_is_blank, row[1])))
        return next(found, None)


def _is_blank(cell: Any) -> bool:
    value = cell.value
    return value is None or (isinstance(value, str) and not value.strip())


def _records(
    path: Path, form: FileFormat, title: str, first: int, width: int, layout: _Layout, columns: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the records after the column names, by batches."""
    with _opened(path) as book:
        rows = (row for row in _rows(path, book[title]) if row[0] > first and row[0] not in form.skip_lines)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dates that are none; they are errors of their cells
                batch = list(islice(rows, _BATCH))
            if not batch:
                return
            yield _chunk(batch, width, layout, columns)


def _chunk(batch: Sequence[tuple[int, Sequence[Any]]], width: int, layout: _Layout, columns: Sequence[int]) -> Chunk:
    numbers, rows, positions, problems, notes = list[int](), list[list[Cell]](), list[int](), list[Problem](), []
    layout = layout.of_rows(batch[0][0], batch[-1][0])
    percent: dict[int, bool] = {}
    for number, cells in batch:
        values = [_value(cells[i], percent) if i < len(cells) else None for i in columns]
        if layout.merged or layout.formulas:
            values = [layout.bad(number, i + 1) or value for i, value in zip(columns, values, strict=True)]
        if all(map(_is_blank, cells)) and BadCell not in map(type, values):
            continue
        if len(cells) > width and (beyond := [cell for cell in cells[width:] if not _is_blank(cell)]):
            what = f"cells beyond the {width} column names"
            problems.append(Problem(number, what, as_text(beyond[0].value)))
            continue
        if number in layout.hidden:
            notes.append(Problem(number, "hidden row", hint="hidden and filtered rows are read; delete them if not"))
        numbers.append(number)
        positions.append(len(positions) + len(problems))
        rows.append(values)
    damaged = any(BadCell in map(type, row) for row in rows)
    return Chunk(numbers, rows, positions, problems, damaged=damaged, notes=notes)


def _value(cell: Any, percent: dict[int, bool]) -> Cell:
    """Return the value of a cell: percentages as they are shown, dates without the time of midnight.

    Args:
        cell: of openpyxl.
        percent: whether numbers of a style are shown as percentages, by the styles that were seen.
    """
    value = cell.value
    if cell.data_type == "e":
        return BadCell("an error of the spreadsheet", str(value))
    if type(value) in (int, float):
        style = cell._style_id
        if style not in percent:
            percent[style] = "%" in _LITERAL.sub("", cell.number_format)
        return f"{Decimal(repr(value)).scaleb(2).normalize():f}%" if percent[style] else value
    return value.date() if isinstance(value, datetime) and value.time() == time() else value
