"""Read parquet tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.datasets import user_records
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import composed
from coterie.datasets.table_files import Chunk, TableFile
from coterie.datasets.user_records import NOT_NUMERIC, need_at_most, shortened

# Records that are read together.
_BATCH = 4096


def parquet_table(path: Path) -> TableFile:
    """Read the column names and types of a parquet file.

    Raises:
        DataError: it is none, or pyarrow is not installed.
    """
    try:
        from pyarrow import parquet

        fields = list(parquet.read_schema(path))
    except ImportError:
        raise DataError(f"{path}: reading parquet requires pyarrow: pip install 'coterie[parquet]'") from None
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise _invalid(path, error) from None
    names = [field.name for field in fields]
    types = [field.type for field in fields]
    return TableFile([composed(name) for name in names], partial(_records, path, names), types)


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


def _records(path: Path, names: Sequence[str], columns: Sequence[int]) -> Iterator[Chunk]:
    """Yield the records by batches."""
    from pyarrow import parquet

    everything = len(columns) == len(names)  # also columns that share a name
    wanted = [names[i] for i in columns]
    try:
        # Equal texts are stored once: a small file could expand to any size otherwise.
        with parquet.ParquetFile(path, read_dictionary=wanted) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            num_rows = max(file.metadata.num_rows, sum(group.num_rows for group in groups))
            size = max(sum(group.total_byte_size for group in groups), 8 * num_rows * len(wanted))
            need_at_most(user_records.MAX_BYTES, size, str(path), "unpacks to")
            first = 1
            for batch in file.iter_batches(_BATCH, columns=None if everything else wanted):
                order = columns if everything else map(batch.schema.get_field_index, wanted)
                rows = list(zip(*[_values(batch.column(i)) for i in order], strict=True))
                yield Chunk(range(first, first + len(rows)), rows, range(len(rows)))
                first += len(rows)
    except DataError:
        raise
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise _invalid(path, error) from None


def _invalid(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a valid parquet file ({shortened(error)}); write it again")


def _values(column: Any) -> list[Any]:
    if not hasattr(column, "dictionary"):
        values: list[Any] = column.to_pylist()
        return values
    distinct = column.dictionary.to_pylist()
    return [None if i is None else distinct[i] for i in column.indices.to_pylist()]
