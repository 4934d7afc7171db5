"""Read binary tables: Parquet, a file or a folder of files, and the sheets of workbooks (Excel, OpenDocument).

A folder of Parquet files may be partitioned: it has files in folders `key=value`, as Spark, Hive, polars and pyarrow
write them; every key is a column. All files have the same columns.

Of a workbook, the values of one sheet are read, as a spreadsheet program saved them. A process of its own reads it
(`workbook_reader.py`), since two cells far apart can need any amount of memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from coterie.datasets import data_files
from coterie.datasets.data_files import is_image, losses_of, need_at_most, need_regular, shortened, suffix_of
from coterie.datasets.left_out import Loss
from coterie.datasets.records import NOT_NUMERIC
from coterie.datasets.schema import FileFormat
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import BadCell, Cell, Notation, as_text, composed
from coterie.datasets.text_tables import TITLES, Chunk, Problem, TableFile, names_settings

# Records that are read together, of a Parquet file and of a workbook.
_BATCH, _ROWS = 4096, 1024
_SUFFIX = ".parquet"
# A folder of a partition, the value of one without a value, and what programs write beside the records.
_PARTITION, _NO_VALUE = re.compile(r"([^=]+)=(.*)"), "__HIVE_DEFAULT_PARTITION__"
_METADATA = re.compile(r"_SUCCESS|_metadata|_common_metadata|_(committed|started)_\d+|\..*\.crc")
# Files of a split, as Hugging Face publishes them.
_SHARD = re.compile(r"^(train|test|validation)-\d+-of-\d+(?=[.-])")
# Folders of table formats whose files also hold records that were deleted or replaced.
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}
_READER = Path(__file__).with_name("workbook_reader.py")
# Memory of the process that reads a workbook, in bytes.
_MAX_MEMORY = 4 * 2**30
# Cells of an .xlsx file with an error, such as #REF!, and formulas without a saved value.
_NO_VALUES = re.compile(
    r"<P?c\s[^>]*\bt=.e\b|(?:</P?f>|<P?f(?:\s[^>]*)?/>)\s*(?:<P?v\s*/>|<P?v></P?v>)?\s*</P?c>".replace(
        "P?", r"(?:\w+:)?"
    ).encode()
)
# Length of a match of the pattern, at most, and bytes of a part of the file that are searched together.
_LONGEST, _BLOCK = 200, 2**20


@dataclass(frozen=True)
class _Part:
    """A Parquet file of a table.

    Attributes:
        keys: values of the partitions to which it belongs, by name.
        names, types: of its columns.
    """

    path: Path
    keys: Mapping[str, str | None] = field(default_factory=dict)
    names: Sequence[str] = ()
    types: Sequence[Any] = ()

    @property
    def columns(self) -> list[str]:
        """Names of all columns, those of the partitions last."""
        return [composed(name) for name in (*self.names, *self.keys)]


def is_parquet_folder(path: Path) -> bool:
    """Whether a path is a folder with Parquet files, in itself or in folders of partitions, and without images."""
    if not path.is_dir():
        return False
    entries = _entries(path)
    partitions = [entry for entry in entries if entry.is_dir() and _PARTITION.fullmatch(entry.name)]
    if not any(entry.suffix.lower() == _SUFFIX for entry in entries) and not any(map(is_parquet_folder, partitions)):
        return False
    below = (file for entry in entries if entry.is_dir() and entry not in partitions for file in entry.iterdir())
    return not any(map(is_image, entries)) and not any(map(is_image, below))


def parquet_table(path: Path) -> TableFile:
    """Read the column names and types of a Parquet file, or of a folder of such files.

    Raises:
        DataError: it is none, its files have different columns, or pyarrow is not installed.
    """
    losses: list[Loss] = []
    parts, splits = list[_Part](), set[str]()
    for part in _parts(path, path, {}, losses) if path.is_dir() else [_Part(path)]:
        with _valid(part.path):
            from pyarrow import parquet

            fields = list(parquet.read_schema(part.path))
        splits |= {*_SHARD.findall(part.path.name)}
        names = [field.name for field in fields]
        if both := [key for key in part.keys if key in names]:
            raise DataError(
                f"{part.path} has a column {both[0]!r}, but so has the name of its folder; remove one of them"
            )
        parts.append(_Part(part.path, part.keys, names, [field.type for field in fields]))
    if len(splits) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(splits))}; move each into a folder, train and test")
    for part in parts[1:]:
        _need_same_columns(part, parts[0])
    keys = [_type_of([part.keys[key] for part in parts]) for key in parts[0].keys]
    return TableFile(parts[0].columns, partial(_records, parts), [*parts[0].types, *keys], losses=losses)


def images_problem(data_type: Any) -> str:
    """Return what to do with a column of images, as Hugging Face's datasets write them; empty for other types."""
    from pyarrow import types

    if not types.is_struct(data_type) or {field.name for field in data_type} != {"bytes", "path"}:
        return ""
    return " holds images; write each one as a file in a folder of its class, such as train/0/17.png"


def is_integer(path: Path, name: str, data_type: Any) -> bool:
    """Return whether a column holds integers.

    Raises:
        DataError: it does not hold numbers.
    """
    from pyarrow import types

    data_type = data_type.value_type if types.is_dictionary(data_type) else data_type
    if not (types.is_integer(data_type) or types.is_floating(data_type)):
        problem = images_problem(data_type) or f": {shortened(data_type)} {NOT_NUMERIC}, or a schema (docs/tables.md)"
        raise DataError(f"{path}: column {shortened(name)!r}{problem}")
    return bool(types.is_integer(data_type))


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder that may hold records, in order."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "_")))


def _parts(folder: Path, home: Path, keys: Mapping[str, str | None], losses: list[Loss]) -> list[_Part]:
    """Return the files of a folder, and add what is not read to the losses."""
    parts, read = list[_Part](), set[Path]()
    for entry in _entries(folder):
        named = _PARTITION.fullmatch(entry.name)
        if entry.is_dir() and named and os.path.realpath(entry) not in map(os.path.realpath, entry.parents):
            key, value = map(unquote, named.groups())
            parts += _parts(entry, home, {**keys, key: None if value == _NO_VALUE else value}, losses)
        elif entry.suffix.lower() == _SUFFIX and not entry.is_dir():
            need_regular(entry)
            parts.append(_Part(entry, keys))
        else:
            continue
        read.add(entry)
    for entry in sorted(folder.iterdir()):
        if entry.name in _LOGS and entry.is_dir():
            raise DataError(
                f"{folder} is a table of {_LOGS[entry.name]}, whose files also hold deleted records; export it"
            )
        if entry not in read and not _METADATA.fullmatch(entry.name):
            losses += losses_of(entry, home)
    return parts


def _need_same_columns(part: _Part, first: _Part) -> None:
    """Reject a file that has other columns than the first one."""
    problems = []
    for what, these, those in (("has no", first, part), ("has", part, first)):
        names = Counter(these.columns) - Counter(those.columns)
        problems += [f"{what} column {shortened(next(iter(names)))!r}"] if names else []
    if not problems:
        kinds, expected = (dict(zip(each.columns, map(_kind, each.types), strict=False)) for each in (part, first))
        for name, kind in kinds.items():
            if "null" not in (kind, expected[name]) and kind != expected[name]:
                problems.append(f"has {kind} in column {shortened(name)!r} in place of {expected[name]}")
    if problems:
        raise DataError(f"{part.path} {' and '.join(problems[:2])}, unlike {first.path}; write the files again")


def _kind(data_type: Any) -> str:
    """Return what values of a type are, so that different types of one kind can be read together."""
    from pyarrow import types

    data_type = data_type.value_type if types.is_dictionary(data_type) else data_type
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_decimal(data_type):
        return "numbers"
    return "texts" if types.is_string(data_type) or types.is_large_string(data_type) else shortened(data_type)


def _type_of(values: Sequence[str | None]) -> Any:
    """Return the type of a partition: numbers if all of its values are."""
    import pyarrow

    numbers = [Notation().number(value) for value in values if value is not None]
    if not numbers or None in numbers:
        return pyarrow.string()
    whole = all(value is None or value.lstrip("+-").isdecimal() for value in values)
    return pyarrow.int64() if whole else pyarrow.float64()


def _records(parts: Sequence[_Part], columns: Sequence[int]) -> Iterator[Chunk]:
    """Yield the records by batches, one file after another."""
    from pyarrow import parquet

    size = 0  # of all values in memory, at least that of a number each
    for part in parts:
        with _valid(part.path), parquet.ParquetFile(part.path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            num_rows = max(file.metadata.num_rows, sum(group.num_rows for group in groups))
            size += max(sum(group.total_byte_size for group in groups), 8 * num_rows * len(part.names))
    where = parts[0].path if len(parts) == 1 else Path(os.path.commonpath([part.path for part in parts]))
    need_at_most(data_files.MAX_BYTES, size, str(where), "unpacks to")
    names, first = parts[0].columns, 1
    for part in parts:
        same = part.columns == names  # also columns that share a name
        order = list(columns) if same else [part.columns.index(names[i]) for i in columns]
        for rows in _batches(part, order):
            yield Chunk(range(first, first + len(rows)), rows, range(len(rows)))
            first += len(rows)


def _batches(part: _Part, columns: Sequence[int]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a file, with the columns at these positions; those of partitions follow its own."""
    from pyarrow import parquet

    own = [i for i in columns if i < len(part.names)]
    everything = len(own) == len(part.names)
    wanted = [part.names[i] for i in own]
    constants = dict(enumerate(part.keys.values(), len(part.names)))
    # Equal texts are stored once: a small file could expand to any size otherwise.
    with _valid(part.path), parquet.ParquetFile(part.path, read_dictionary=wanted) as file:
        for batch in file.iter_batches(_BATCH, columns=None if everything else wanted):
            cells: dict[int, list[Any]] = {i: [value] * batch.num_rows for i, value in constants.items()}
            places = own if everything else map(batch.schema.get_field_index, wanted)
            for i, place in zip(own, places, strict=True):
                column = batch.column(place)
                if hasattr(column, "dictionary"):
                    distinct = column.dictionary.to_pylist()
                    cells[i] = [None if j is None else distinct[j] for j in column.indices.to_pylist()]
                else:
                    cells[i] = column.to_pylist()
            yield list(zip(*[cells[i] for i in columns], strict=True))


@contextmanager
def _valid(path: Path) -> Iterator[None]:
    """Turn whatever a broken file makes pyarrow say into an error."""
    try:
        yield
    except DataError:
        raise
    except ImportError:
        raise DataError(f"{path}: reading parquet requires pyarrow: pip install 'coterie[parquet]'") from None
    except Exception as error:
        raise DataError(f"{path} is not a valid parquet file ({shortened(error)}); write it again") from None


def workbook_table(path: Path, form: FileFormat, wanted: Collection[str]) -> TableFile:
    """Read the column names, most of which are wanted, of the sheet that `form` names, or the first visible one.

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
        lines = [(i, "", [" ".join(as_text(cell).split()) for cell in cells]) for i, cells in islice(rows, TITLES)]
    first, _, names = lines[0] if lines else (0, "", [])
    settings = names_settings(names, first, lines, wanted)
    while names and not names[-1]:
        names.pop()
    records = partial(_sheet_records, path, form, title, first, len(names))
    return TableFile(names, records, settings=settings, losses=losses)


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


def _rows(path: Path, title: str, form: FileFormat) -> Generator[tuple[int, list[Cell]]]:
    """Yield number and cells of the rows that are neither blank nor skipped."""
    for number, values in _lines(path, title):
        if number not in form.skip_lines:
            yield number, values


def _sheet_records(
    path: Path, form: FileFormat, title: str, first: int, width: int, columns: Sequence[int]
) -> Iterator[Chunk]:
    """Yield the records after the column names, by batches."""
    following = (row for row in _rows(path, title, form) if row[0] > first)
    while batch := list(islice(following, _ROWS)):
        numbers, rows, positions, problems = list[int](), list[list[Cell]](), list[int](), list[Problem]()
        for i, (number, cells) in enumerate(batch):
            if beyond := [cell for cell in cells[width:] if as_text(_cell(cell))]:
                problems.append(Problem(number, f"cells beyond the {width} column names", as_text(_cell(beyond[0]))))
                continue
            numbers.append(number)
            positions.append(i)
            rows.append([_cell(cells[j]) if j < len(cells) else None for j in columns])
        damaged = any(BadCell in map(type, row) for row in rows)
        yield Chunk(numbers, rows, positions, problems, damaged=damaged)


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return BadCell("part of merged cells", f"row {value[0]}", "unmerge the cells, and fill each")
    return value
