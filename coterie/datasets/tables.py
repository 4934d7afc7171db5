"""Read tables by a schema: every record is encoded from its own cells and public constants alone.

The header of a table of plain numbers implies its schema. The delimiter is found from the first line.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets import data_files
from coterie.datasets.binary_tables import images_problem, is_integer, is_parquet_folder, parquet_table, workbook_table
from coterie.datasets.data_files import (
    TABLE_SUFFIXES,
    WORKBOOK_SUFFIXES,
    need_at_most,
    need_regular,
    shortened,
    suffix_of,
)
from coterie.datasets.left_out import Finding, LeftOut
from coterie.datasets.records import Records, is_held_out
from coterie.datasets.schema import LARGEST, Column, FileFormat, TableSchema
from coterie.datasets.site_columns import as_in_schema
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import Notation, as_text, composed, integer, spellings
from coterie.datasets.table_encoder import Encoder, Table
from coterie.datasets.text_tables import MAX_PLAIN_COLUMNS, UNDECODABLE, ZERO, TableFile, text_table
from coterie.datasets.units import Units, is_held_out_unit

# Characters of a name and names in an error, and names among which a similar one is looked for.
_LONGEST, _NAMES, _COMPARED = 40, 8, 1000
#: Setting of `columns` for files whose names are not compared.
BY_POSITION = "by-position"
# Names of identifiers, and records that count up in an index: at least, and at most those that are compared.
_IDENTIFIER = re.compile(r"(unnamed: \d+|index|level_\d+|(.*[ _.-])?(id|uuid|mrn|nr))", re.IGNORECASE)
_RUN, _COUNTED = 10, 1000
#: Names of columns that may name persons, with several records each.
PERSON = re.compile(
    r"(.*[ _.-])?(id|uuid|mrn|nr|patient|subject|person|participant|case)([ _.-]?(id|no|nr|number))?", re.IGNORECASE
)
# Names of the column of labels or real targets in a table without a schema.
_TARGETS = ("label", "target")


def read_table(
    path: str | Path,
    schema: TableSchema,
    *,
    labelled: bool | None = True,
    units: bool = True,
    sites: bool | None = False,
) -> Table:
    """Read a text, parquet or spreadsheet file, or a folder of `.parquet` files.

    Args:
        path: the file or folder.
        schema: how to read it.
        labelled: whether to read labels or targets; otherwise their column may be absent. None: if it is there.
        units: whether to read the units of the schema; otherwise their column may be absent.
        sites: whether to read the sites of the schema; otherwise their column may be absent. None: if it is there.

    Raises:
        DataError: the file cannot be read, or has other columns than the schema.

    Examples:
        >>> schema = TableSchema.load("schema.toml")
        >>> read_table("patients.csv", schema).x
        array([[ 1.3 , -0.34],
               [-0.9 , -0.92],
               [ 0.6 ,  0.  ],
               [ 0.7 ,  2.08]], dtype=float32)
    """
    path = Path(path).expanduser()
    try:
        file, schema = _at_site(path, schema)
        with_label = all(one.name in file.names for one in schema.targets) if labelled is None else labelled
        columns = [*schema.columns, *(schema.targets if with_label else [])]
        named = [schema.unit.name] if schema.unit and units else []
        site = schema.site if sites or (schema.site and sites is None and schema.site.name in file.names) else None
        named += [site.name] if site else []
        _need_columns(path, file, schema, [*(column.name for column in columns), *named])
        position_of = {name: i for i, name in enumerate(file.names)}
        positions = [position_of[column.name] for column in columns]
        for i in positions if file.types else ():
            if file.types[i].num_fields:
                held = f" holds {str(file.types[i])[:_LONGEST]}; expected numbers or texts"
                raise DataError(f"{path}: column {file.names[i]!r}{images_problem(file.types[i]) or held}")
        table = _encoded(path, schema, with_label, file, positions)
        table = table if schema.unit is None or not units else _with_units(path, schema, schema.unit.name, table)
        return table if site is None else _with_sites(path, schema, site, table)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _with_units(path: Path, schema: TableSchema, column: str, table: Table) -> Table:
    """Return a table with the unit of each record; a record without one is dropped."""
    texts = column_texts(path, schema, column)
    units = np.array([texts[i] for i in table.index.tolist()], dtype=str)
    absent = np.isin(units, [*schema.file.missing_values, ""])
    finding = Finding(column, "no unit", "dropped", False, "the guarantee is for units: name one for every record")
    return _without(absent, finding, texts, replace(table, units=units), schema)


def _with_sites(path: Path, schema: TableSchema, site: Column, table: Table) -> Table:
    """Return a table with the site of each record; a record of none is dropped."""
    texts, positions = column_texts(path, schema, site.name), spellings(site.values)
    codes = dict.fromkeys((*schema.missing_values_of(site), ""), -1) | positions
    cells = [texts[i] for i in table.index.tolist()]
    sites = np.array([codes.get(text, positions.get(integer(text), -2)) for text in cells], np.int64)
    missing = Finding(site.name, "missing", "dropped", site.missing == "drop", "name the site of every record")
    unknown = Finding(site.name, "not one of its values", "dropped", site.unknown == "drop")
    table = _without(sites == -1, missing, texts, replace(table, sites=sites), schema)
    return _without(sites[sites != -1] == -2, unknown, texts, table, schema)


def _without(
    rows: npt.NDArray[np.bool_], finding: Finding, texts: Mapping[int, str], table: Table, schema: TableSchema
) -> Table:
    """Return a table without these of its records, and with the finding that names them; all if there are none."""
    if not rows.any():
        return table
    for i in table.index[rows].tolist():
        finding.add(i + 1, texts[i])
    lost = Counter(table.lost)
    if table.labelled and schema.num_classes:
        classes = table.y[rows].astype(np.int64).tolist()
        finding.by_class.update(schema.class_names[label] for label in classes)
        lost += finding.by_class
    arrays = {name: getattr(table, name) for name in ("x", "y", "index", "units", "sites")}
    kept = {name: array[~rows] for name, array in arrays.items() if array is not None}
    return replace(table, **kept, findings=(*table.findings, finding), lost=dict(lost))


def repeated_names(path: str | Path, schema: TableSchema) -> str:
    """Return a warning if a column that is not used seems to name patients with several records; otherwise empty.

    Raises:
        DataError: the file cannot be read.
    """
    path = Path(path).expanduser()
    if schema.unit is not None:
        return ""
    used = {column.name for column in (*schema.columns, *schema.targets)}
    for name in _at_site(path, schema)[0].names:
        if name in used or not PERSON.fullmatch(name):
            continue
        most = Counter(filter(None, column_texts(path, schema, name).values())).most_common(1)
        if most and most[0][1] > 1:
            return (
                f"{path}: column {name[:_LONGEST]!r} names up to {most[0][1]} records alike: if it names patients, "
                "privacy protects one record, not a patient, and records of one patient are both trained and tested "
                "on; declare it as [unit] (docs/tables.md)"
            )
    return ""


def rows_held_out(table: Table) -> npt.NDArray[np.bool_]:
    """Return which (n,) records are held out: by a hash of their unit, or else of their values."""
    if table.units is not None:
        return np.fromiter(map(is_held_out_unit, table.units.tolist()), bool, len(table.y))
    return np.fromiter(map(is_held_out, table.x, table.y), bool, len(table.y))


def column_texts(path: str | Path, schema: TableSchema, name: str) -> dict[int, str]:
    """Return the cells of one column as texts, by position of the record in the file, as :attr:`Table.index` has it.

    Args:
        path: as for :func:`read_table`.
        schema: how the file is written.
        name: of the column, which need not be in the schema.

    Raises:
        DataError: the file cannot be read, or has no such column or two of them.
    """
    path = Path(path).expanduser()
    file = _at_site(path, schema)[0]
    positions = [i for i, head in enumerate(file.names) if head == name]
    if len(positions) != 1:
        problem = "no" if not positions else "two"
        raise DataError(f"{path} has {problem} column {name!r}; its columns are {some_names(file.names)}")
    texts: dict[int, str] = {}
    first = 0
    for chunk in file.records(positions):
        texts |= {first + i: as_text(row[0]) for i, row in zip(chunk.positions, chunk.rows, strict=True)}
        first += len(chunk.rows) + len(chunk.problems)
    return texts


def table_records(
    path: Path, need_targets: bool, schema: TableSchema | None = None, columns: Sequence[str] | None = None
) -> Records:
    """Read the records of a text, parquet or spreadsheet file, or of a folder of `.parquet` files.

    Args:
        path: the file or folder.
        need_targets: whether its column of labels or targets may not be absent.
        schema: how to read it; None: one column is named `label`, or `target` for real targets, and all others are
            features; their cells are plain numbers.
        columns: names of the features of a table without a schema, in the order of the run; None: any.

    Raises:
        DataError: the file cannot be read, or has other columns.
    """
    if schema is None:
        return _plain_records(path, need_targets, columns)
    return _by_schema(path, schema, read_table(path, schema, labelled=need_targets or None))


def records_of_sites(path: Path, schema: TableSchema) -> tuple[Records, list[Records]]:
    """Read a table of all sites once: return all its records, and those of each site in the order of the schema.

    Problems are those of the table; its account and its warnings are with all records alone.

    Raises:
        DataError: the file cannot be read, or has other columns.
    """
    table = read_table(path, schema, sites=True)
    assert schema.site is not None
    assert table.sites is not None
    whole = _by_schema(path, schema, table)
    shared, parts = replace(whole, left_out=LeftOut(), warnings=()), []
    for i, name in enumerate(schema.site.values):
        rows, where = table.sites == i, f"{path}: {schema.site.name} = {name!r}"
        problems = whole.problems or (() if rows.any() else (f"{where}: no records",))
        parts.append(replace(shared.only(rows), where=where, problems=problems))
    return whole, parts


def _by_schema(path: Path, schema: TableSchema, table: Table) -> Records:
    more = "" if len(table.errors) < 2 else f" ({len(table.errors)} kinds of errors)"
    table = replace(table, y=table.y.astype(np.float32).astype(np.float64))
    records = _records(path, table, f"{more}; `coterie data check` lists all", not schema.task.real)
    units = None if table.units is None or schema.unit is None else Units.named(table.units, schema.unit.most)
    warning = repeated_names(path, schema)
    return replace(records, units=units, warnings=(warning,) if warning else ())


def table_columns(path: Path) -> tuple[str, ...]:
    """Return the names of the features of a table without a schema.

    Raises:
        DataError: the file cannot be read, or has no names.
    """
    file = open_table(path, FileFormat(), _TARGETS)
    return tuple(file.names[i] for i in _features(path, file.names, _target(path, file, needed=True)))


def _features(path: Path, names: Sequence[str], target: int | None, columns: Sequence[str] | None = None) -> list[int]:
    """Return the positions of the features of a table without a schema.

    Numbers are names if they are those of the run, or count the columns.

    Raises:
        DataError: the table has no names, or too many.
    """
    count = len(names) - (target is not None)
    if count > MAX_PLAIN_COLUMNS:
        raise DataError(f"{path} contains records of {count:,} numbers; the limit is {MAX_PLAIN_COLUMNS:,}")
    features = [i for i in range(len(names)) if i != target]
    if target is None and {*names} != {*(columns or ())}:
        numbers = {*map(Notation().number, names)}
        if None not in numbers and numbers not in ({*range(len(names))}, {*range(1, len(names) + 1)}):
            raise DataError(f"{path}: its first line holds numbers; expected column names: add a line of names")
    if unnamed := [i + 1 for i in features if not names[i]]:
        raise DataError(
            f"{path}: column {unnamed[0]} has no name, like the index that pandas writes; remove it (index=False), or "
            "name it"
        )
    return features


def _aligned(path: Path, names: Sequence[str], features: list[int], columns: Sequence[str] | None) -> list[int]:
    """Return the positions of the features in the order of the run.

    Raises:
        DataError: the file has other columns than the run.
    """
    if columns is None:
        return features
    found = {names[i]: i for i in features}
    if not columns:
        raise DataError(
            f"{path} has columns {some_names(list(found))}, but the run names none to compare: set columns = "
            f"{shortened(columns_text(found))!r} or {BY_POSITION!r}, or describe the table by a schema"
        )
    problem = ""
    if missing := [name for name in columns if name not in found]:
        problem = f"has no column {_with_near_names(missing, [name for name in found if name not in columns])}"
    elif others := [name for name in found if name not in columns]:
        problem = f"has columns that are not of the run: {some_names(others)}"
    elif len(found) < len(features):
        problem = "has two columns of one name"
    if problem:
        raise DataError(f"{path} {problem}; the columns of the run are {some_names(columns)}")
    return [found[name] for name in columns]


def columns_text(names: Iterable[str]) -> str:
    """Return names of columns as a setting, which `parse_columns` reads."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def parse_columns(text: str) -> tuple[str, ...] | None:
    """Return the names of columns of a setting; empty: none are given; None: columns are matched by position.

    Raises:
        DataError: the text is no list of distinct names.
    """
    if text == BY_POSITION:
        return None
    try:
        names = [composed(name.strip()) for name in next(csv.reader([text], skipinitialspace=True, strict=True), [])]
    except csv.Error as error:
        raise DataError(f"columns = {shortened(text)!r}: {error}; must be names, separated by commas") from None
    if not all(names) or len({*names}) < len(names):
        raise DataError(f"columns = {shortened(text)!r}: must be distinct names, separated by commas, or {BY_POSITION}")
    return tuple(names)


def _plain_records(path: Path, need_targets: bool, columns: Sequence[str] | None) -> Records:
    """Read a table of plain numbers by the schema that its header implies."""
    file = open_table(path, FileFormat(), _TARGETS)
    target = _target(path, file, need_targets)
    features = _aligned(path, file.names, _features(path, file.names, target, columns), columns)
    if not features:
        raise DataError(f"{path}: records without features; add columns of numbers")
    integers = [is_integer(path, name, type_) for name, type_ in zip(file.names, file.types, strict=False)]
    whole = all(integers[i] for i in features) if integers else True
    schema = TableSchema(Column("label"), (), tuple(Column(file.names[i]) for i in features))
    table = _encoded(path, schema, target is not None, file, features + ([] if target is None else [target]))
    hint = "; expected plain numbers: fix or remove the record, or describe the table by a schema (docs/tables.md)"
    labelled = None if target is None else file.names[target] == "label"
    records = _records(path, table, hint, labelled, whole)
    warnings = []  # of columns that are features all the same
    x = table.x[:_COUNTED]
    steps = np.diff(x, axis=0) if len(x) > _RUN else np.zeros((1, x.shape[1]))
    for i, counted in zip(features, (steps == 1).all(axis=0).tolist(), strict=True):
        name = file.names[i]
        if counted or _IDENTIFIER.fullmatch(name):
            what = "an index (its values count up)" if counted else "an identifier (by its name)"
            warnings.append(f"{path}: column {name[:_LONGEST]!r} looks like {what}, and is a feature; remove it if so")
    records = replace(records, warnings=tuple(warnings[:_NAMES]))
    return records.only_labels() if labelled else records


def _records(path: Path, table: Table, hint: str, labelled: bool | None, whole: bool = False) -> Records:
    """Return the records of a table; the hint follows a description of each error."""
    problems = [f"{path}: {finding}{hint}" for finding in table.errors]
    if not table.records:
        problems.append(f"{path}: no records")
    return Records(
        where=str(path),
        what=f"records of {table.x.shape[1]} numbers",
        x=table.x,
        y=table.y,
        held_out=rows_held_out(table),
        whole=whole,
        labelled=labelled,
        problems=tuple(problems),
        has_targets=table.labelled,
        left_out=LeftOut.of_table(table),
    )


def _target(path: Path, file: TableFile, needed: bool) -> int | None:
    """Return the index of the label or target column; None if there is none, and none is needed."""
    names = file.names
    targets = [i for i, name in enumerate(names) if name in _TARGETS]
    if not targets and not needed:
        return None
    if len(targets) != 1:
        some = shortened(", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else ""))
        raise DataError(
            f"{path} must have one column named label, or target for real targets, but has {len(targets)}; its columns "
            f"are {some or 'none'}{file.hint and file.hint + ' of a schema'}"
        )
    return targets[0]


def _encoded(path: Path, schema: TableSchema, labelled: bool, file: TableFile, columns: Sequence[int]) -> Table:
    """Encode the columns of a schema, at their positions in the file, with the label as the last one."""
    notation = _notation(schema, file)
    encoder, num_features = Encoder(schema, labelled, notation), schema.num_features
    for chunk in file.records(columns):
        encoder.add(chunk)
        need_at_most(data_files.MAX_BYTES, 4 * num_features * encoder.records, str(path), "has features of")
    return replace(encoder.table(), beside=file.losses)


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


def _at_site(path: Path, schema: TableSchema) -> tuple[TableFile, TableSchema]:
    """Return a file as if it were written as the schema says, and the schema with what it says of this file."""
    schema = schema.at_site(path)
    columns, site = [*schema.columns, *schema.targets], dict(schema.file.columns)
    written = {name: column.name or name for name, column in site.items()}
    file = open_table(path, schema.file, {written.get(column.name, column.name) for column in columns})
    notation = _notation(schema, file)
    missing = {column.name: schema.missing_values_of(column) for column in columns}
    if schema.unit:
        missing[schema.unit.name] = frozenset(schema.file.missing_values)
    if schema.site:
        missing[schema.site.name] = schema.missing_values_of(schema.site)
    return as_in_schema(file, site, notation, missing), schema


def _notation(schema: TableSchema, file: TableFile) -> Notation:
    return Notation(schema.file.decimal, schema.file.thousands, comma_separated=file.delimiter == ",")


def open_table(path: Path, form: FileFormat, wanted: Collection[str]) -> TableFile:
    """Read the column names of a file, most of which are wanted."""
    if is_parquet_folder(path):
        return parquet_table(path)
    if suffix_of(path) not in TABLE_SUFFIXES:
        raise DataError(f"{path}: a schema is for tables; supported files: {', '.join(TABLE_SUFFIXES)}")
    if not path.exists():
        raise DataError(f"{path} does not exist")
    need_regular(path)
    if suffix_of(path) == ".parquet":
        return parquet_table(path)
    read = workbook_table if suffix_of(path) in WORKBOOK_SUFFIXES else text_table
    return read(path, form, wanted)


def _need_columns(path: Path, file: TableFile, schema: TableSchema, names: Sequence[str]) -> None:
    """Check the columns of a file; an error is about absent columns, or about repeated ones, or about further ones.

    Raises:
        DataError: a column is absent or occurs twice, or the file has others that are not ignored.
    """
    header, counts = file.names, Counter(file.names)
    problem, way = "", file.hint
    if missing := [name for name in names if name not in counts]:
        if not way and is_garbled(header):
            way = "; set encoding in [file], such as 'cp1252' or 'utf-16-le'"
        if not way and file.delimiter and len(header) == 1 < len(missing) == len(names):
            way = "; separate its cells by comma, semicolon, tab or |"
        listed = (
            some_names(missing) if way else _with_near_names(missing, [name for name in header if name not in names])
        )
        problem = f"has no column {listed}"
        if way or (len(missing) == len(names) and "?)" not in listed):
            problem += (
                f": its first line is {','.join(header)[:200]!r}; expected column names in {schema.file.encoding}"
            )
        else:
            filled = {column.name for column in schema.columns if column.missing not in ("error", "drop")}
            absent = ", or declare it absent there" if filled.issuperset(missing) and "?)" not in listed else ""
            way = f"; rename or add {'each' if missing[1:] else 'it'}, or give its name in [file.columns]{absent}"
    elif twice := [name for name in names if counts[name] > 1]:
        problem, way = f"has two columns {some_names(twice)}", "; rename or remove one"
    elif schema.ignore is not None:
        others = {column.name for column in (*schema.targets, schema.unit, schema.site) if column}
        expected = {*names, *others, *schema.ignore, ""}
        further = [name for name in header if name not in expected]
        problem = f"has columns that the schema does not name: {some_names(further)}" * bool(further)
        way = "; add them to ignore"
    if problem:
        raise DataError(f"{path} {problem}{way}")


def _with_near_names(missing: Sequence[str], others: Sequence[str]) -> str:
    """Return names of absent columns as text, with similar names in the file."""
    near = near_names(missing[:_NAMES], others)
    shown = [
        repr(name[:_LONGEST]) + (f" (is it {near[name][:_LONGEST]!r}?)" if name in near else "")
        for name in missing[:_NAMES]
    ]
    return ", ".join(shown) + (f" and {len(missing) - _NAMES} more" if len(missing) > _NAMES else "")


def near_names(missing: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return a similar name in the file of each absent column that has one."""
    folded = {name.casefold(): name for name in others[:_COMPARED]}
    matches = {name: difflib.get_close_matches(name.casefold(), folded, n=1) for name in missing}
    return {name: folded[match[0]] for name, match in matches.items() if match}


def is_garbled(names: Sequence[str]) -> bool:
    """Whether column names have bytes that are not of the encoding."""
    return any(UNDECODABLE in name or ZERO in name for name in names)


def some_names(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    shown = ", ".join(repr(name[:_LONGEST]) for name in names[:_NAMES])
    return shown + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
