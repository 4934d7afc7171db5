"""Read Excel and OpenDocument tables: the values of one sheet, as a spreadsheet program saved them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from coterie.datasets import data_files
from coterie.datasets.data_files import need_at_most, shortened, suffix_of
from coterie.datasets.left_out import Loss
from coterie.datasets.schema import FileFormat
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import BadCell, Cell, as_text, composed
from coterie.datasets.table_files import Chunk, Problem, TableFile

# Records that are read together, and bytes of a part of the file that are searched together.
_BATCH, _BLOCK = 1024, 2**20
_READER = Path(__file__).with_name("workbook_reader.py")
# Memory of the process that reads a workbook, in bytes.
_MAX_MEMORY = 4 * 2**30
# Cells of an .xlsx file with an error, such as #REF!, and formulas without a saved value.
_NO_VALUES = re.compile(
    r"<P?c\s[^>]*\bt=.e\b|(?:</P?f>|<P?f(?:\s[^>]*)?/>)\s*(?:<P?v\s*/>|<P?v></P?v>)?\s*</P?c>".replace(
        "P?", r"(?:\w+:)?"
    ).encode()
)
# Length of a match of the pattern, at most.
_LONGEST = 200


def excel_table(path: Path, form: FileFormat) -> TableFile:
    """Read the column names of a sheet of a workbook: the one that `form` names, or the first visible one.

    Raises:
        DataError: it is no workbook, is too large, has no such sheet, or python-calamine is not installed.
    """
    losses = _checked(path)
    sheets = {composed(name.strip()): (name, visible, is_empty) for name, visible, is_empty in _lines(path)}
    visible = [name for name, visible, _ in sheets.values() if visible]
    if form.sheet and form.sheet not in sheets:
        raise DataError(f"{path} has no sheet {form.sheet!r}; its sheets are {shortened(', '.join(map(repr, sheets)))}")
    if not visible and not form.sheet:
        raise DataError(f"{path} has no visible sheet; name one by the key sheet of the schema")
    title = sheets[form.sheet][0] if form.sheet else visible[0]
    reason = f"sheets beside {title!r}, which is read"
    others = [name for name, _, is_empty in sheets.values() if name != title and not is_empty]
    losses += [Loss(reason, "sheet", 1, "left out", (name,), by_rule=bool(form.sheet)) for name in others]
    with closing(_rows(path, title, form)) as rows:
        first, cells = next(rows, (0, []))
    names = [" ".join(as_text(cell).split()) for cell in cells]
    while names and not names[-1]:
        names.pop()
    return TableFile(names, partial(_records, path, form, title, first, len(names)), losses=losses)


def _checked(path: Path) -> list[Loss]:
    """Check the size of a workbook, and return an account of the cells without a value that are not empty."""
    need_at_most(data_files.MAX_BYTES // 4, path.stat().st_size, str(path), "holds")
    count = 0
    if not zipfile.is_zipfile(path):  # .xls
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            need_at_most(data_files.MAX_BYTES // 4, sum(part.file_size for part in parts), str(path), "unpacks to")
            for part in parts:
                if part.filename.startswith("xl/worksheets/"):
                    with archive.open(part) as file:
                        count += _count(iter(partial(file.read, _BLOCK), b""))
    except DataError:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile say
        raise _broken(path, str(error)) from None
    what = "cell with an error such as #REF!, or a formula without a saved value"
    return [Loss(what, "cell", count, "read as missing")] if count else []


def _count(blocks: Iterator[bytes]) -> int:
    """Return the number of cells of a sheet that match the pattern, each once."""
    count, rest = 0, b""
    for block in blocks:
        text, end = rest + block, 0
        for found in _NO_VALUES.finditer(text):
            count, end = count + 1, found.end()
        rest = text[max(end, len(text) - _LONGEST) :]
    return count


def _lines(path: Path, *sheet: str) -> Iterator[Any]:
    """Yield what another process reads of a workbook, which this one stops when it needs no more.

    Raises:
        DataError: the process cannot read it, or needs too much memory.
    """
    if find_spec("python_calamine") is None:
        raise DataError(f"{path}: reading {suffix_of(path)} requires python-calamine: pip install 'coterie[excel]'")
    command = [sys.executable, "-P", str(_READER), str(_MAX_MEMORY), str(path.resolve()), *sheet]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if line.endswith(b"\n"):  # the process may end amid a line
                    yield json.loads(line)
            error = process.stderr.read().decode(errors="replace").strip()
            status = process.wait()
        finally:
            process.kill()
    if status < 0:
        raise DataError(
            f"{path} needs more than {_MAX_MEMORY:,} bytes of memory to read; remove cells that are far off"
        )
    if status > 0:
        raise _broken(path, error)


def _broken(path: Path, error: str) -> DataError:
    way = f"save it again, as {suffix_of(path)} and without a password"
    return DataError(f"{path} is not a valid {suffix_of(path)} file ({shortened(error)}); {way}")


def _rows(path: Path, title: str, form: FileFormat) -> Generator[tuple[int, list[Any]]]:
    """Yield number and cells of the rows that are neither blank nor skipped."""
    for number, cells in _lines(path, title):
        if number not in form.skip_lines:
            yield number, cells


def _records(
    path: Path, form: FileFormat, title: str, first: int, width: int, columns: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the records after the column names, by batches."""
    rows = (row for row in _rows(path, title, form) if row[0] > first)
    while batch := list(islice(rows, _BATCH)):
        yield _chunk(batch, width, columns)


def _chunk(batch: Sequence[tuple[int, list[Any]]], width: int, columns: Sequence[int]) -> Chunk:
    numbers, rows, positions, problems = list[int](), list[list[Cell]](), list[int](), list[Problem]()
    for i, (number, cells) in enumerate(batch):
        if beyond := [cell for cell in cells[width:] if as_text(_cell(cell))]:
            problems.append(Problem(number, f"cells beyond the {width} column names", as_text(_cell(beyond[0]))))
            continue
        numbers.append(number)
        positions.append(i)
        rows.append([_cell(cells[j]) if j < len(cells) else None for j in columns])
    damaged = any(BadCell in map(type, row) for row in rows)
    return Chunk(numbers, rows, positions, problems, damaged=damaged)


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return BadCell("part of merged cells", f"row {value[0]}", "unmerge the cells, and fill each")
    return value
