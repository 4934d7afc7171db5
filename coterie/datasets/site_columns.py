"""Columns that one site writes in another way than the schema says: names, codes, units, dates, absent columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from coterie.datasets.table_cells import BadCell, Cell, Notation, as_text

if TYPE_CHECKING:
    from coterie.datasets.text_tables import Chunk, TableFile

_DAY = 86400.0


@dataclass(frozen=True)
class SiteColumn:
    """How one site writes a column of the schema.

    Attributes:
        name: in the file; empty: that of the schema.
        values: pairs of a text in the file and a value of the schema.
        missing_values: further texts that mean a missing value.
        factor, offset: a number x of the file is x * factor + offset in the schema.
        since: a column of dates; the number is the days from its date to that of this column, before `factor`.
        date_format: of both dates, as for `datetime.strptime`; empty: ISO 8601.
        absent: whether the file has no such column; its cells are missing values.
    """

    name: str = ""
    values: tuple[tuple[str, str], ...] = ()
    missing_values: tuple[str, ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    since: str = ""
    date_format: str = ""
    absent: bool = False

    @property
    def converts(self) -> bool:
        """Whether numbers are converted."""
        return bool(self.since) or (self.factor, self.offset) != (1.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return what a TOML file would hold."""
        entries: dict[str, Any] = {"name": self.name, "values": dict(self.values)}
        entries |= {"missing-values": list(self.missing_values), "since": self.since, "date-format": self.date_format}
        entries |= {"factor": self.factor} if self.factor != 1 else {}
        entries |= {"offset": self.offset} if self.offset else {}
        entries |= {"absent": True} if self.absent else {}
        return {key: value for key, value in entries.items() if value}


def as_in_schema(
    file: TableFile, columns: Mapping[str, SiteColumn], notation: Notation, missing: Mapping[str, frozenset[str]]
) -> TableFile:
    """Return a file as if it were written as the schema says.

    Args:
        file: of the site.
        columns: by name in the schema.
        notation: of numbers in the file.
        missing: texts that mean a missing value, by name in the schema.

    A column of dates that another one refers to, and that is no column of the schema, loses its name.
    """
    if not columns:
        return file
    renamed = {column.name: name for name, column in columns.items() if column.name}
    sources = {column.since for column in columns.values() if column.since}
    names = [renamed.get(name, "" if name in sources else name) for name in file.names]
    absent = [name for name, column in columns.items() if column.absent]
    origins = [*range(len(file.names)), *[-1] * len(absent)]
    convert: dict[int, Callable[[Sequence[Cell]], Cell]] = {
        len(names) + i: partial(_gap, missing[name]) for i, name in enumerate(absent)
    }
    names += absent
    since: dict[int, int] = {}
    for name, column in columns.items():
        if name not in names or column.absent:
            continue  # a missing column is reported as any other
        position = names.index(name)
        if column.since in file.names:
            since[position] = file.names.index(column.since)
        convert[position] = partial(_converted, column, notation, missing[name])
    records = partial(_records, file, origins, convert, since)
    types = file.types and [*file.types, *[file.types[0]] * len(absent)]
    return replace(file, names=names, records=records, types=types)


def _records(
    file: TableFile,
    origins: Sequence[int],
    convert: Mapping[int, Callable[[Sequence[Cell]], Cell]],
    since: Mapping[int, int],
    columns: Sequence[int],
) -> Iterator[Chunk]:
    """Yield the records with the cells of the columns at these positions, as the schema has them."""
    wanted = [origins[i] for i in columns if origins[i] >= 0] + [since[i] for i in columns if i in since]
    places = {origin: place for place, origin in enumerate(dict.fromkeys(wanted))}

    def cells(row: Sequence[Cell]) -> Iterator[Cell]:
        for i in columns:
            cell = row[places[origins[i]]] if origins[i] >= 0 else None
            yield convert[i]([cell, row[places[since[i]]] if i in since else None]) if i in convert else cell

    for chunk in file.records(list(places) or [0]):
        rows = [list(cells(row)) for row in chunk.rows]
        lost = any(isinstance(cell, BadCell) for row in rows for cell in row)
        yield replace(chunk, rows=rows, damaged=chunk.damaged or lost)


def _gap(missing: frozenset[str], pair: Sequence[Cell] = ()) -> Cell:
    """Return a cell without a value."""
    return None if "" in missing else min(missing, default=None)


def _converted(column: SiteColumn, notation: Notation, missing: frozenset[str], pair: Sequence[Cell]) -> Cell:
    """Return a cell as the schema has it; the second of the pair is the earlier date."""
    cell, text = pair[0], as_text(pair[0])
    if isinstance(cell, BadCell) or text in missing:
        return cell
    if text in column.missing_values:
        return _gap(missing)
    if text in (values := dict(column.values)):
        return values[text]
    if not column.converts:
        return cell
    number: float | None
    if column.since:
        earlier = as_text(pair[1])
        if earlier in missing or earlier in column.missing_values:
            return _gap(missing)
        try:
            first, last = (
                datetime.strptime(date, column.date_format) if column.date_format else datetime.fromisoformat(date)
                for date in (earlier, text)
            )
            number = (last - first).total_seconds() / _DAY
        except (ValueError, TypeError, OverflowError):  # no dates, or only one has a time zone
            written = column.date_format or "ISO 8601"
            return BadCell(f"no dates in {written}", f"{earlier} to {text}", "set date-format")
    else:
        number = notation.number(cell)
        if number is None:
            return BadCell("not a plain number, which factor could convert", text)
    return number * column.factor + column.offset
