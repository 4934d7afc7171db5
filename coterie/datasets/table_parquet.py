"""Read parquet tables: a file, or a folder of files, which may be partitioned.

A partitioned folder has files in folders `key=value`, as Spark, Hive, polars and pyarrow write them; every key is a
column. All files have the same columns.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from coterie.datasets import data_files
from coterie.datasets.data_files import is_image, losses_of, need_at_most, need_regular, shortened
from coterie.datasets.left_out import Loss
from coterie.datasets.records import NOT_NUMERIC
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import Notation, composed
from coterie.datasets.table_files import Chunk, TableFile

# Records that are read together.
_BATCH = 4096
_SUFFIX = ".parquet"
# A folder of a partition, the value of one without a value, and what programs write beside the records.
_PARTITION, _NO_VALUE = re.compile(r"([^=]+)=(.*)"), "__HIVE_DEFAULT_PARTITION__"
_METADATA = re.compile(r"_SUCCESS|_metadata|_common_metadata|_(committed|started)_\d+|\..*\.crc")
# Folders of table formats whose files also hold records that were deleted or replaced.
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}


@dataclass(frozen=True)
class _Part:
    """A parquet file of a table.

    Attributes:
        path: the file.
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
    """Whether a path is a folder with parquet files, in itself or in folders of partitions, and without images."""
    if not path.is_dir():
        return False
    entries = _entries(path)
    partitions = [entry for entry in entries if entry.is_dir() and _PARTITION.fullmatch(entry.name)]
    if not any(entry.suffix.lower() == _SUFFIX for entry in entries) and not any(map(is_parquet_folder, partitions)):
        return False
    below = (file for entry in entries if entry.is_dir() and entry not in partitions for file in entry.iterdir())
    return not any(map(is_image, entries)) and not any(map(is_image, below))


def parquet_table(path: Path) -> TableFile:
    """Read the column names and types of a parquet file, or of a folder of such files.

    Raises:
        DataError: it is none, its files have different columns, or pyarrow is not installed.
    """
    losses: list[Loss] = []
    parts = [_opened(part) for part in (_parts(path, path, {}, losses) if path.is_dir() else [_Part(path)])]
    for part in parts[1:]:
        _compare(part, parts[0])
    keys = [_type_of([part.keys[key] for part in parts]) for key in parts[0].keys]
    return TableFile(parts[0].columns, partial(_records, parts), [*parts[0].types, *keys], losses=losses)


def is_integer(path: Path, name: str, data_type: Any) -> bool:
    """Return whether a column holds integers.

    Raises:
        DataError: it does not hold numbers.
    """
    from pyarrow import types

    data_type = data_type.value_type if types.is_dictionary(data_type) else data_type
    if not (types.is_integer(data_type) or types.is_floating(data_type)):
        raise DataError(f"{path}: column {shortened(name)!r}: {shortened(data_type)} {NOT_NUMERIC}")
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


def _opened(part: _Part) -> _Part:
    """Read the schema of a file."""
    with _valid(part.path):
        from pyarrow import parquet

        fields = list(parquet.read_schema(part.path))
    names = [field.name for field in fields]
    if both := [key for key in part.keys if key in names]:
        raise DataError(f"{part.path} has a column {both[0]!r}, but so has the name of its folder; remove one of them")
    return _Part(part.path, part.keys, names, [field.type for field in fields])


def _compare(part: _Part, first: _Part) -> None:
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
    size = sum(map(_size, parts))
    where = parts[0].path if len(parts) == 1 else Path(os.path.commonpath([part.path for part in parts]))
    need_at_most(data_files.MAX_BYTES, size, str(where), "unpacks to")
    names, first = parts[0].columns, 1
    for part in parts:
        same = part.columns == names  # also columns that share a name
        order = list(columns) if same else [part.columns.index(names[i]) for i in columns]
        for rows in _batches(part, order):
            yield Chunk(range(first, first + len(rows)), rows, range(len(rows)))
            first += len(rows)


def _size(part: _Part) -> int:
    """Return the size of all values of a file in memory, at least that of a number each, in bytes."""
    from pyarrow import parquet

    with _valid(part.path), parquet.ParquetFile(part.path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        num_rows = max(file.metadata.num_rows, sum(group.num_rows for group in groups))
        return int(max(sum(group.total_byte_size for group in groups), 8 * num_rows * len(part.names)))


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
            places = own if everything else map(batch.schema.get_field_index, wanted)
            cells = {i: _values(batch.column(place)) for i, place in zip(own, places, strict=True)}
            cells |= {i: [value] * batch.num_rows for i, value in constants.items()}
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


def _values(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    distinct = column.dictionary.to_pylist()
    return [None if i is None else distinct[i] for i in column.indices.to_pylist()]
