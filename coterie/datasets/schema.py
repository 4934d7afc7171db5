"""Public schemas of tables: which column is the label, and how each feature becomes numbers.

A schema is a TOML file (docs/tables.md):

    version = 1

    [label]                                  # or [target], of a regression, or [labels]
    column = "diagnosis"
    classes = ["benign", "malignant"]

    [[columns]]
    name = "age"
    type = "number"
    mean = 50
    scale = 15
    range = [0, 120]
    missing = "mean"

    [[columns]]
    name = "smoker"
    type = "category"
    values = ["no", "yes"]
    unknown = "drop"

    [unit]                                   # optional: a patient may have several records
    column = "patient"
    records = 16                             # that a step of training uses, at most

    [site]                                   # optional: one table holds the records of all clients of a simulation
    column = "hospital"
    values = ["Ankara", "Izmir"]             # clients 0, 1, ...

Nothing in it is computed from private records: a record is encoded from its own cells and these constants alone, as
record-level privacy requires. `label`, `target`, `unit` and `columns` form the contract that all sites of a run share.
`ignore`, `site` and `file` describe one file, and may differ.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from coterie.datasets.site_columns import SiteColumn
from coterie.datasets.sources import DataError
from coterie.datasets.table_cells import as_text, composed
from coterie.fields import FEATURE_RANGE
from coterie.fields.removed import removal
from coterie.files import FileError, read_text
from coterie.tasks import MAX_LABELS, Task, multi_label, task_of

#: Characters of a schema, and its numbers of columns, or sites, and of features.
MAX_CHARACTERS, MAX_COLUMNS, MAX_FEATURES = 2**20, 10_000, 100_000
#: Records of a unit in a step of training.
MAX_UNIT_RECORDS = 1000
#: Largest scaled value that is not called unscaled.
LARGEST = 30.0
#: Absolute value that features of scaled records hardly exceed.
TYPICAL = 3.0
_VERSION = 1
#: Values of a column of booleans.
BOOLEAN = ("false", "true")
_MAX_NAME = 200
_MISSING_VALUES = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
#: End of the name of a file that describes the table of one site beside it.
SITE_SUFFIX = ".site.toml"
#: Delimiters that are recognised.
DELIMITERS = (",", ";", "\t", "|")
#: Separators of thousands, and the last line that may be skipped.
THOUSANDS, MAX_SKIPPED = (",", ".", " ", "'"), 1000
# Python's text encodings that are not of files.
_NO_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")
# Errors in one message.
_SHOWN = 5


class SchemaError(DataError):
    """A schema with errors.

    Attributes:
        errors: all of them.
    """

    def __init__(self, where: str, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        more = f"; and {len(errors) - _SHOWN} more errors" if len(errors) > _SHOWN else ""
        super().__init__(f"{where}: {'; '.join(self.errors[:_SHOWN])}{more}")


@dataclass(frozen=True)
class FileFormat:
    """How one site writes its file.

    Attributes:
        delimiter: between cells; empty: the one of , ; tab and | that fits the first line, or that of a line `sep=;`.
        decimal: "." or ",".
        encoding: of the text, any of Python's; a byte order mark is skipped.
        missing_values: cells that mean a missing value.
        thousands: between groups of three digits; empty: none.
        skip_lines: numbers of lines that hold titles or units, from 1.
        trailing_delimiter: whether every record ends with a delimiter that the column names lack.
        sheet: of an Excel workbook; empty: the first visible one.
        columns: those that the site writes in another way, with their names in the schema.
    """

    delimiter: str = ""
    decimal: str = "."
    encoding: str = "utf-8"
    missing_values: tuple[str, ...] = _MISSING_VALUES
    thousands: str = ""
    skip_lines: tuple[int, ...] = ()
    trailing_delimiter: bool = False
    sheet: str = ""
    columns: tuple[tuple[str, SiteColumn], ...] = ()


@dataclass(frozen=True, slots=True)  # a table of plain numbers may have many
class Column:
    """A column and its rules.

    Attributes:
        name: in the first line of the file.
        kind: "number", "boolean" (a feature that is 0 or 1) or "category".
        mean, scale: public constants; a number x becomes (x - mean) / scale.
        span: range to which numbers are clamped before they are scaled; None: any.
        values: of a category; each becomes a feature that is 0 or 1.
        missing: of a missing value: "error", "drop" the record, "mean", "indicator" (a feature of its own), or "value".
        fill: the value that replaces it, of the file's unit.
        missing_values: further cells that mean a missing value.
        unknown: of other values of a category: "error", "drop", "ignore" (all zeros), or "indicator".
        censored: of numbers such as <5 and >90: "error", "drop" the record, "limit" (5 and 90), or "half" (2.5 and 90).
        unit: that may follow a number, such as mg/L.
    """

    name: str
    kind: str = "number"
    mean: float = 0.0
    scale: float = 1.0
    span: tuple[float, float] | None = None
    values: tuple[str, ...] = ()
    missing: str = "error"
    fill: float | str | None = None
    missing_values: tuple[str, ...] = ()
    unknown: str = "error"
    censored: str = "error"
    unit: str = ""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features of this column, in order."""
        names = [f"{self.name} = {value}" for value in self.values] if self.kind == "category" else [self.name]
        names += [f"{self.name} (other)"] if self.unknown == "indicator" else []
        return (*names, *([f"{self.name} (missing)"] if self.missing == "indicator" else []))

    @property
    def reach(self) -> float:
        """Largest absolute value after scaling, if a range is declared; otherwise 0."""
        return max(abs(end - self.mean) / self.scale for end in self.span) if self.span else 0.0

    def to_dict(self) -> dict[str, Any]:
        """What a TOML file would hold."""
        missing = {"value": self.fill} if self.missing == "value" else self.missing
        entries: dict[str, Any] = {"name": self.name, "type": self.kind}
        if self.kind == "number":
            entries |= {"mean": self.mean, "scale": self.scale}
            entries |= {"range": list(self.span)} if self.span else {}
            entries |= {"censored": self.censored} if self.censored != "error" else {}
            entries |= {"unit": self.unit} if self.unit else {}
        elif self.kind == "category":
            entries |= {"values": list(self.values), "unknown": self.unknown}
        entries |= {"missing-values": list(self.missing_values)} if self.missing_values else {}
        return entries | {"missing": missing}


@dataclass(frozen=True)
class UnitColumn:
    """The column that names the unit of each record, all of whose records privacy protects together.

    Attributes:
        name: in the first line of the file.
        most: largest number of records of a unit that a step of training uses.
    """

    name: str
    most: int = 16


@dataclass(frozen=True)
class TableSchema:
    """A validated schema; see the module.

    Attributes:
        label: column of the labels, a category, or of real targets, a number.
        class_names: a name for every class, in the order of `label.values`, or for every label; empty for real targets.
        columns: columns of the features, in the order of the features.
        ignore: other columns that a file may have; None: any.
        file: how the file is written.
        more_targets: columns of further labels of a record, whose names are in `class_names`.
        unit: column that names the patient, or another unit, of each record; None: each record is its own.
        site: category that names the client of each record, for a table of all clients; None: there is none.
    """

    label: Column
    class_names: tuple[str, ...]
    columns: tuple[Column, ...]
    ignore: tuple[str, ...] | None = ()
    file: FileFormat = FileFormat()
    unit: UnitColumn | None = None
    more_targets: tuple[Column, ...] = ()
    site: Column | None = None

    @classmethod
    def load(cls, path: str | Path) -> TableSchema:
        """Read a TOML file.

        Raises:
            SchemaError: the file cannot be read or has errors.
        """
        try:
            return cls.parse(read_text(Path(path).expanduser()).removeprefix("\ufeff"), str(path))
        except FileError as error:
            raise SchemaError(str(path), [str(error).removeprefix(f"{path} ")]) from None

    @classmethod
    @lru_cache(maxsize=8)  # deployed clients parse the same text for every message
    def parse(cls, text: str, where: str = "table-schema") -> TableSchema:
        """Parse TOML, or the result of `str`.

        Raises:
            SchemaError: the text has errors; the message begins with ``where``.
        """
        if len(text) > MAX_CHARACTERS:
            raise SchemaError(where, [f"has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}"])
        try:
            content = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise SchemaError(where, [f"is not valid TOML: {str(error)[:_MAX_NAME]}"]) from None
        errors: list[str] = []
        schema = _schema(_Table(content, "", errors))
        if errors:
            raise SchemaError(where, errors)
        return schema

    def at_site(self, path: str | Path) -> TableSchema:
        """Return the schema of one file, with `ignore` and `file` of ``NAME.site.toml`` if it lies beside ``NAME.csv``.

        What that file does not set is that of the schema.

        Raises:
            SchemaError: that file cannot be read or has errors.
        """
        path = Path(path)
        site = path.with_name(f"{path.name.partition('.')[0]}{SITE_SUFFIX}")
        if not site.exists():
            return self
        try:
            content = tomllib.loads(read_text(site).removeprefix("\ufeff"))
        except (FileError, ValueError, RecursionError) as error:
            raise SchemaError(str(site), [f"cannot be read: {str(error)[:_MAX_NAME]}"]) from None
        errors: list[str] = []
        table = _Table({**content, "file": _over(content.get("file", {}), self._file)}, "", errors)
        schema = replace(self, ignore=_ignored(table, self.ignore), file=_file(table.table("file"), self))
        table.finish()
        _check_names(schema, table)
        if errors:
            raise SchemaError(str(site), errors)
        return schema

    @property
    def _file(self) -> dict[str, Any]:
        """How files are written, as a schema states it."""
        file: dict[str, Any] = {
            "delimiter": self.file.delimiter or "auto",
            "decimal": self.file.decimal,
            "encoding": self.file.encoding,
            "missing-values": list(self.file.missing_values),
            "thousands": self.file.thousands or "none",
            "skip-lines": list(self.file.skip_lines),
            "trailing-delimiter": self.file.trailing_delimiter,
        }
        file |= {"sheet": self.file.sheet} if self.file.sheet else {}
        columns = {name: column.to_dict() for name, column in self.file.columns}
        return file | ({"columns": columns} if columns else {})

    def __str__(self) -> str:
        """The schema as JSON on one line, which `parse` reads."""
        ignore, one = "others" if self.ignore is None else list(self.ignore), self.site
        rules = {"missing": one.missing, "unknown": one.unknown} if one else {}
        site = {"site": {"column": one.name, "values": list(one.values), **rules}} if one else {}
        return json.dumps({**self.contract, **site, "ignore": ignore, "file": self._file}, ensure_ascii=False)

    @property
    def contract(self) -> dict[str, Any]:
        """What all sites of a run have in common, as a JSON document."""
        label = self.label.to_dict()
        if self.more_targets:
            rules = {"missing": self.label.missing, "unknown": self.label.unknown}
            targets = {"labels": {"columns": list(self.class_names), **rules}}
        elif self.num_classes:
            entry = {"column": label["name"], "missing": label["missing"], "classes": label["values"]}
            targets = {"label": entry | {"names": list(self.class_names), "unknown": label["unknown"]}}
        else:
            keys = ("missing", "mean", "scale", "range", "censored", "unit")
            targets = {"target": {"column": label["name"], **{key: label[key] for key in keys if key in label}}}
        unit = {"unit": {"column": self.unit.name, "records": self.unit.most}} if self.unit else {}
        columns = [column.to_dict() for column in self.columns]
        return {"version": _VERSION, **targets, **unit, "columns": columns}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the contract, in hexadecimal digits; equal for sites whose records can be used together."""
        return hashlib.sha256(json.dumps(self.contract, sort_keys=True).encode()).hexdigest()

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a task without classes."""
        return 0 if self.more_targets else len(self.label.values)

    @cached_property
    def task(self) -> Task:
        """What models predict."""
        if self.more_targets:
            return multi_label(len(self.targets))
        return task_of(self.num_classes, self.label.mean, self.label.scale)

    @property
    def targets(self) -> tuple[Column, ...]:
        """Columns of what models predict."""
        return (self.label, *self.more_targets)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def reach(self) -> float:
        """Largest absolute value of a feature, at least 1; 0 if a column of numbers declares no range."""
        reaches = [column.reach for column in self.columns if column.kind == "number"]
        return min(max(1.0, *reaches), FEATURE_RANGE.high) if all(reaches) else 0.0

    @cached_property
    def num_features(self) -> int:
        """F, the number of features."""
        return sum(len(column.feature_names) for column in self.columns)

    def missing_values_of(self, column: Column) -> frozenset[str]:
        """Return the texts that mean a missing value in a column; a value of a category does not."""
        return frozenset((*self.file.missing_values, *column.missing_values)).difference(column.values)

    def warnings(self) -> list[str]:
        """Warnings about columns whose declared range is large after scaling, from the schema alone."""
        large = [column for column in (*self.columns, *self.targets) if column.reach > LARGEST]
        if not large:
            return []
        worst = max(large, key=lambda column: column.reach)
        others = f" ({len(large)} columns exceed {LARGEST:g})" if len(large) > 1 else ""
        return [
            f"table-schema: values of column {worst.name!r} reach {worst.reach:.3g} after scaling{others}; choose mean "
            "and scale, or a narrower range, such that most values are in [-3, 3]"
        ]


class _Table:
    """Reads the keys of one table, and collects errors, so that all of them are reported at once."""

    def __init__(self, values: Any, where: str, errors: list[str]) -> None:
        self.where, self.errors = where, errors
        if not isinstance(values, Mapping):
            self.error(f"must be a table, not {_shown(values)}")
            values = {}
        self._values, self._known = values, set[str]()

    def error(self, problem: str) -> None:
        self.errors.append(f"{self.where}: {problem}" if self.where else problem)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        self._known.add(key)
        return self._values.get(key, default)

    def table(self, key: str) -> _Table:
        return _Table(self.get(key, {}), f"{self.where} {key}".strip() if self.where else f"[{key}]", self.errors)

    def finish(self) -> None:
        """Report keys that no one asked for."""
        for key in self._values:
            if key not in self._known:
                self.error(f"unknown key {_shown(key)}; known: {', '.join(sorted(self._known))}")

    def name(self, key: str) -> str:
        return self.text(key, "the name of a column, of")

    def text(self, key: str, what: str = "a text of") -> str:
        value = self.get(key)
        if not isinstance(value, str) or not 0 < len(value.strip()) <= _MAX_NAME:
            problem = f"{key} is missing" if value is None else f"{key} = {_shown(value)}"
            self.error(f"{problem}; must be {what} at most {_MAX_NAME} characters")
            return ""
        return composed(value.strip())

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.get(key, default)
        if value not in choices or not isinstance(value, str):
            problem = f"{key} is missing" if value is None else f"{key} = {_shown(value)}"
            self.error(f"{problem}; must be {' or '.join(map(repr, choices))}")
            return default or choices[0]
        return value

    def names(self) -> list[str]:
        """All keys, which are then known."""
        self._known.update(self._values)
        return list(self._values)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            self.error(f"{key} = {_shown(value)}; must be true or false")
        return value is True

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.get(key, default)
        number = _finite(value)
        if number is None or (positive and not number > 0):
            problem = f"{key} is missing" if value is None else f"{key} = {_shown(value)}"
            self.error(f"{problem}; must be a {'positive ' if positive else ''}finite number, from public knowledge")
            return 1.0
        return number

    def span(self, key: str) -> tuple[float, float] | None:
        value = self.get(key)
        if value is None:
            return None
        ends = [_finite(end) for end in value] if isinstance(value, list) else []
        if len(ends) != 2 or ends[0] is None or ends[1] is None or not ends[0] < ends[1]:
            self.error(f"{key} = {_shown(value)}; must be [minimum, maximum]")
            return None
        return ends[0], ends[1]

    def texts(self, key: str, default: Sequence[str] = (), *, at_least: int = 0) -> tuple[str, ...]:
        """A list of distinct strings, integers or booleans; where some are required, none may be empty."""
        value = self.get(key, list(default))
        right = isinstance(value, list) and all(type(entry) in (str, int, bool) for entry in value)
        texts = tuple(map(as_text, value)) if right else ()
        empty, twice = at_least > 0 and not all(texts), len(set(texts)) < len(texts)
        if not right or empty or twice or not at_least <= len(texts) <= MAX_FEATURES:
            least = f"at least {at_least} " if at_least else ""
            self.error(f"{key} = {_shown(value)}; must be a list of {least}distinct strings, integers or booleans")
            return tuple(default)
        if long := [text for text in texts if len(text) > _MAX_NAME]:
            self.error(f"{key}: {_shown(long[0])} has {len(long[0])} characters; the limit is {_MAX_NAME}")
        return texts


def _schema(table: _Table) -> TableSchema:
    version = table.get("version")
    if version != _VERSION or type(version) is not int:
        problem = "version is missing" if version is None else f"version = {_shown(version)}"
        table.error(f"{problem}; this release reads version = {_VERSION}")
    kinds = {"label": _label, "target": _target, "labels": _labels}
    given = [kind for kind in kinds if kind in table]
    if len(given) != 1:
        removed = removal("[survival]") if "survival" in table else ""
        table.get("survival")
        table.error(
            removed
            or "must have one of [label], for classes, [target], for real targets, and [labels], for several labels"
        )
    kind = given[0] if given else "label"
    targets, names = kinds[kind](table.table(kind))
    listed = table.get("columns", [])
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_COLUMNS:
        table.error(f"columns must be 1 to {MAX_COLUMNS:,} tables [[columns]]")
        listed = []
    columns = []
    for i, entry in enumerate(listed, 1):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        column = _Table(entry, f"column {_shown(name) if isinstance(name, str) else i}", table.errors)
        columns.append(_COLUMNS[column.choice("type", tuple(_COLUMNS))](column, column.name("name")))
        column.finish()
    ignore = _ignored(table, ())
    unit = None
    if "unit" in table:
        entry = table.table("unit")
        unit = UnitColumn(entry.name("column"), entry.get("records", UnitColumn.most))
        if type(unit.most) is not int or not 1 <= unit.most <= MAX_UNIT_RECORDS:
            entry.error(f"records = {_shown(unit.most)}; must be an integer from 1 to {MAX_UNIT_RECORDS}")
        entry.finish()
    site = _site(table.table("site")) if "site" in table else None
    schema = TableSchema(targets[0], names, tuple(columns), ignore, unit=unit, more_targets=targets[1:], site=site)
    schema = replace(schema, file=_file(table.table("file"), schema))
    table.finish()
    _check_names(schema, table)
    return schema


def _over(given: Any, defaults: Mapping[str, Any]) -> Any:
    """Return a table with the defaults that it does not set; what is no table stays, to be named as an error."""
    if not isinstance(given, dict):
        return given
    nested = {key: _over(given[key], defaults[key]) for key in given if isinstance(defaults.get(key), dict)}
    return {**defaults, **given, **nested}


def _ignored(table: _Table, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if table.get("ignore") == "others" else table.texts("ignore") if "ignore" in table else default


def _check_names(schema: TableSchema, table: _Table) -> None:
    seen: set[str] = set()
    named = (
        *(column.name for column in schema.targets),
        *(column.name for column in (schema.unit, schema.site) if column),
        *(column.name for column in schema.columns),
        *(schema.ignore or ()),
    )
    for name in filter(None, named):
        if name in seen:
            table.error(
                f"column {_shown(name)} is named twice; each column is the label, the unit, the site, a feature, or "
                "ignored"
            )
        seen.add(name)
    if schema.num_features > MAX_FEATURES:
        table.error(f"{schema.num_features:,} features; the limit is {MAX_FEATURES:,}")


def _label(table: _Table) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    name, classes = table.name("column"), table.texts("classes", at_least=2)
    names = table.texts("names", classes)
    if len(names) != len(classes):
        table.error(f"names has {len(names)} entries, but classes has {len(classes)}")
    missing, unknown = (table.choice(key, ("error", "drop"), "error") for key in ("missing", "unknown"))
    table.finish()
    return (Column(name, "category", values=classes, missing=missing, unknown=unknown),), names


def _labels(table: _Table) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    names = table.texts("columns", ("label 1", "label 2"), at_least=2)
    if len(names) > MAX_LABELS:
        table.error(f"columns has {len(names)} entries; the limit is {MAX_LABELS}")
    missing, unknown = (table.choice(key, ("error", "drop"), "error") for key in ("missing", "unknown"))
    table.finish()
    columns = (Column(name, "boolean", values=BOOLEAN, missing=missing, unknown=unknown) for name in names)
    return tuple(columns), names


def _site(table: _Table) -> Column:
    name, values = table.name("column"), table.texts("values", at_least=2)
    if len(values) > MAX_COLUMNS:
        table.error(f"values has {len(values):,} entries; the limit is {MAX_COLUMNS:,}")
    missing, unknown = (table.choice(key, ("error", "drop"), "error") for key in ("missing", "unknown"))
    table.finish()
    return Column(name, "category", values=values, missing=missing, unknown=unknown)


def _target(table: _Table) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    name, mean, scale = table.name("column"), table.number("mean", 0.0), table.number("scale", 1.0, positive=True)
    span, missing = table.span("range"), table.choice("missing", ("error", "drop"), "error")
    # A model would learn a limit as if it were a measured target.
    censored, unit = table.choice("censored", ("error", "drop"), "error"), _unit(table)
    table.finish()
    return (Column(name, "number", mean, scale, span, missing=missing, censored=censored, unit=unit),), ()


def _number(table: _Table, name: str) -> Column:
    mean, scale, span = table.number("mean"), table.number("scale", positive=True), table.span("range")
    missing, fill = _missing(table, ("error", "drop", "mean", "indicator"))
    if missing == "value":
        fill = _finite(fill)
        if fill is None:
            table.error("missing: value must be a finite number")
        elif span and not span[0] <= fill <= span[1]:
            table.error(f"missing: value {fill:g} is outside the range")
    censored = table.choice("censored", ("error", "drop", "limit", "half"), "error")
    codes = table.texts("missing-values")
    return Column(name, "number", mean, scale, span, (), missing, fill, codes, censored=censored, unit=_unit(table))


def _unit(table: _Table) -> str:
    return table.text("unit") if table.get("unit") is not None else ""


def _boolean(table: _Table, name: str) -> Column:
    missing, fill = _missing(table, ("error", "drop", "indicator"))
    if missing == "value" and not isinstance(fill, bool):
        table.error(f"missing: value {_shown(fill)} is neither true nor false")
    codes = table.texts("missing-values")
    return Column(name, "boolean", values=BOOLEAN, missing=missing, fill=fill, missing_values=codes)


def _category(table: _Table, name: str) -> Column:
    values = table.texts("values", at_least=1)
    unknown = table.choice("unknown", ("error", "drop", "ignore", "indicator"), "error")
    missing, fill = _missing(table, ("error", "drop", "indicator"))
    if missing == "value":
        fill = as_text(fill)
        if fill not in values:
            table.error(f"missing: value {_shown(fill)} is not one of values")
    codes = table.texts("missing-values")
    if both := set(codes) & set(values):
        table.error(f"missing-values: {_shown(min(both))} is also one of values")
    return Column(name, "category", values=values, missing=missing, fill=fill, missing_values=codes, unknown=unknown)


_COLUMNS = {"number": _number, "category": _category, "boolean": _boolean}


def _missing(table: _Table, choices: Sequence[str]) -> tuple[str, Any]:
    """Return the rule for missing values, and the value that replaces them."""
    rule = table.get("missing")
    if isinstance(rule, Mapping) and set(rule) == {"value"}:
        return "value", rule["value"]
    if isinstance(rule, Mapping):
        table.error(f"missing = {_shown(rule)}; must be {', '.join(map(repr, choices))} or {{value = ...}}")
        return "error", None
    return table.choice("missing", choices, "error"), None


def _file(table: _Table, schema: TableSchema) -> FileFormat:
    delimiter = table.choice("delimiter", ("auto", "tab", *DELIMITERS), "auto")
    file_format = FileFormat(
        {"auto": "", "tab": "\t"}.get(delimiter, delimiter),
        table.choice("decimal", (".", ","), "."),
        _encoding(table),
        table.texts("missing-values", _MISSING_VALUES),
        {"none": ""}.get(thousands := table.choice("thousands", ("none", *THOUSANDS), "none"), thousands),
        _skip_lines(table),
        table.flag("trailing-delimiter"),
        table.text("sheet", "a name of") if "sheet" in table else "",
        _site_columns(table.table("columns"), schema),
    )
    if file_format.decimal == file_format.delimiter:
        table.error("decimal and delimiter are both ','")
    if file_format.decimal == file_format.thousands:
        table.error(f"decimal and thousands are both {file_format.decimal!r}")
    table.finish()
    return file_format


def _site_columns(table: _Table, schema: TableSchema) -> tuple[tuple[str, SiteColumn], ...]:
    """Return the columns that one site writes in another way."""
    known = {column.name: column for column in (*schema.columns, *schema.targets)}
    known |= {schema.unit.name: Column(schema.unit.name, "unit")} if schema.unit else {}
    known |= {schema.site.name: schema.site} if schema.site else {}
    columns = []
    for name in table.names():
        entry = table.table(name)
        if name in known:
            columns.append((name, _site_column(entry, known[name], feature=known[name] in schema.columns)))
        else:
            entry.error("the schema has no such column")
    return tuple(columns)


def _site_column(table: _Table, column: Column, feature: bool) -> SiteColumn:
    values = table.get("values", {})
    if not isinstance(values, Mapping) or not all(type(value) in (str, int, bool) for value in values.values()):
        table.error("values must be a table: text in the file = value of the schema")
        values = {}
    values = {composed(text.strip()): as_text(value) for text, value in values.items()}
    allowed = ("true", "false") if column.kind == "boolean" else column.values
    for value in values.values():
        if value not in allowed:
            table.error(f"values: {_shown(value)} is no value of the column in the schema")
    site = SiteColumn(
        table.text("name") if "name" in table else "",
        tuple(values.items()),
        table.texts("missing-values"),
        table.number("factor", 1.0),
        table.number("offset", 0.0),
        table.text("since") if "since" in table else "",
        table.text("date-format") if "date-format" in table else "",
        table.flag("absent"),
    )
    table.finish()
    if site.converts and column.kind != "number":
        table.error("factor, offset and since are for columns of numbers")
    if site.date_format and not site.since:
        table.error("date-format requires since, a column of dates")
    if site.absent and not feature:
        table.error("absent = true: every record needs this column")
    elif site.absent and column.missing in ("error", "drop"):
        table.error(f"absent = true requires a rule that fills it; the schema has missing = {column.missing!r}")
    return site


def _encoding(table: _Table) -> str:
    name = table.get("encoding", "utf-8")
    try:
        right = isinstance(name, str) and codecs.lookup(name).name not in _NO_FILES
        b"a".decode(name if right else "", "replace")
    except (LookupError, ValueError):  # unknown, or no encoding of text
        right = False
    if not right:
        examples = "'utf-8', 'cp1252', 'gb18030' or 'utf-16'"
        table.error(f"encoding = {_shown(name)}; must be a text encoding of Python, such as {examples}")
    return str(name) if right else "utf-8"


def _skip_lines(table: _Table) -> tuple[int, ...]:
    value = table.get("skip-lines", [])
    lines = list(range(1, value + 1)) if type(value) is int and 0 <= value <= MAX_SKIPPED else value
    if not isinstance(lines, list) or not all(type(line) is int and 1 <= line <= MAX_SKIPPED for line in lines):
        table.error(f"skip-lines = {_shown(value)}; must be a number of first lines, or a list of lines from 1")
        return ()
    return tuple(sorted(set(lines)))


def _finite(value: Any) -> float | None:
    """Return a finite number as float; None for anything else."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
