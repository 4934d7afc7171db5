"""Records of a local file, prepared for trained models; not for clients, whose apps do without this module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.client_data import read
from coterie.datasets.facts import Facts
from coterie.datasets.federation import Transform, centred, fractions
from coterie.datasets.left_out import LeftOut
from coterie.datasets.sources import DataError
from coterie.datasets.tables import column_texts, read_table, rows_held_out


@dataclass(frozen=True, eq=False)
class LocalRecords:
    """Records of a local file, prepared for a trained model.

    Attributes:
        where: their location, for messages.
        x: (n, ...) prepared examples.
        y: (n,) labels or real targets; None if the file has none.
        unused: number of other records in the same file, for testing or for training, which are not read.
        index: (n,) position of each record in the file, if a schema dropped some; None: 0 to n - 1.
        left_out: account of all other records and files.
        ids: (n,) texts of the column that names the records, or their patients; None: it was not read.
    """

    where: str
    x: npt.NDArray[Any]
    y: npt.NDArray[Any] | None
    unused: int = 0
    index: npt.NDArray[np.int64] | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    ids: tuple[str, ...] | None = None

    @property
    def units(self) -> npt.NDArray[Any]:
        """(n,) id of each record, or its number."""
        return np.arange(len(self.x)) if self.ids is None else np.array(self.ids)


def local_records(
    path: str | Path, known: Facts, transform: Transform | None, ids: str | None = None, *, held_out: bool = False
) -> LocalRecords:
    """Read the records of a file and prepare them as for training.

    None is dropped or clamped, except by the rules of a schema. A table with a schema is read without its labels if one
    of them is missing or unknown, so that all of its records can be used.

    Args:
        path: of the file.
        known: public facts about the records.
        transform: fixed features of images.
        ids: column that names each record, of a table with a schema; None: there is none.
        held_out: return only the records on which a client tests: separate ones, or those that it holds out.

    Raises:
        DataError: the file cannot be read, a record does not match ``known``, or none is held out.

    Examples:
        >>> from coterie.datasets import facts
        >>> local_records("patients.csv", facts("own", "2", 2), None).x
        array([[ 63., 233.],
               [ 41., 204.],
               [ 56., 250.],
               [ 57., 354.]], dtype=float32)
    """
    if known.kind == "tokens":
        raise DataError("the models expect text, but files contain images or vectors; use coterie.load in Python")
    if known.schema is not None:
        return _table_records(path, known, ids, held_out)
    if ids is not None:
        raise DataError(
            f"column {ids!r} cannot name the records: only tables with a schema have columns beside features"
        )
    records, test = read(Path(path), replace(known, columns=known.columns or None), need_targets=False)
    unused = 0 if test is None else len(test.y)
    if held_out:
        _need_held_out(path, test is not None or bool(records.held_out.any()))
        records, unused = (records.divided()[1], 0) if test is None else (test, len(records.y))
    records = records.fitted(known.shape, known.task.num_targets)
    if records.problems:
        raise DataError(records.problems[0])
    x = centred(fractions(records.x), transform) if known.kind == "images" else records.x
    y = records.y if records.has_targets else None
    return LocalRecords(str(path), x, y, unused, left_out=records.left_out)


def _need_held_out(path: str | Path, some: bool) -> None:
    if not some:
        raise DataError(f"{path}: no record is held out, so that clients test on all of them; evaluate other records")


def _table_records(path: str | Path, data_facts: Facts, ids: str | None, held_out: bool) -> LocalRecords:
    schema = data_facts.schema
    assert schema is not None
    if data_facts.shape != (schema.num_features,) or data_facts.task != schema.task:
        raise DataError(f"the models expect {data_facts}, but their schema has {schema.num_features} features")
    table = read_table(path, schema, labelled=None, units=held_out)
    targets = {column.name for column in schema.targets}
    if any(finding.column in targets and finding.effect == "dropped" for finding in table.findings):
        table = read_table(path, schema, labelled=False, units=held_out)
    if table.errors:
        raise DataError(f"{path}: {table.errors[0]}; `coterie data check` lists all errors")
    if not len(table.x):
        raise DataError(f"{path}: no usable records")
    if held_out:
        kept = rows_held_out(replace(table, y=table.y.astype(np.float32).astype(np.float64)))
        _need_held_out(path, bool(kept.any()))
        table = replace(table, x=table.x[kept], y=table.y[kept], index=table.index[kept])
    y = table.y.astype(schema.task.dtype)
    texts = None if ids is None else column_texts(path, schema, ids)
    names = None if texts is None else tuple(texts[i] for i in table.index.tolist())
    labels = y if table.labelled else None
    return LocalRecords(str(path), table.x, labels, 0, table.index, LeftOut.of_table(table), names)
