"""``coterie data``: check a table before a run, and draft its schema."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, group, print_json

if TYPE_CHECKING:
    from coterie.datasets import Finding, Table, TableSchema

app = group("Check private records, and draft schemas of tables.")
_PRIVATE = "this report is for the owner of the records alone"


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="DATA", help="A file, or a folder (docs/deployment.md).")],
    schema: Annotated[
        Path | None, typer.Option(metavar="SCHEMA", help="TOML file of the schema of tables (docs/tables.md).")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="1x28x28|16", help="Without a schema: shape of an example of the run.")
    ] = None,
    num_classes: Annotated[
        int | None,
        typer.Option(min=0, help="Without a schema: number of classes or labels of the run; 0: real targets."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="multi-label", help="Without a schema: what models predict.")
    ] = None,
    clamped: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the records that may be clamped in a column.")
    ] = 0.05,
    filled: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the records whose value a column may lack.")
    ] = 0.5,
    as_json: JsonFlag = False,
) -> None:
    """Report what a run can use, and all that is left out. The report is for the owner of the data alone.

    The exit status is 1 if there are errors, no usable records, or more values clamped or filled than allowed.
    """
    from coterie.datasets import DataError, Declared, report

    if schema is not None:
        _check_by_schema(file, schema, {"clamped": clamped, "filled": filled}, as_json)
        return

    if (input_shape is None) != (num_classes is None):
        raise DataError("--input-shape and --num-classes describe the run together; give both, or neither")
    if task is not None and input_shape is None:
        raise DataError("--task is for data of a shape: give --input-shape too")
    data_report = report(file, Declared.of(None, input_shape, num_classes, None, None, task))
    if as_json:
        print_json(data_report.to_json())
    else:
        _print_lines([f"{file}: {data_report.usable:,} usable records", *data_report.lines(), _PRIVATE])
    if not data_report.passes:
        raise typer.Exit(1)


def _check_by_schema(file: Path, schema: Path, allowed: dict[str, float], as_json: bool) -> None:
    """Check a table, or the tables of a folder."""
    from coterie.datasets import LeftOut, SchemaError, TableSchema
    from coterie.datasets.client_data import beside
    from coterie.datasets.left_out import unequal_losses
    from coterie.datasets.tables import repeated_names, unscaled

    try:
        loaded = TableSchema.load(schema)
    except SchemaError as error:
        for message in error.errors:
            print(f"error: {schema}: {message}", file=sys.stderr)
        raise typer.Exit(1) from None
    tables, unreadable = _read(file, loaded)
    reports = {path: _report(table, loaded) for path, table in tables.items()}
    accounts = [LeftOut.of_table(table) for table in tables.values()]
    left_out = sum(accounts, beside(file) if file.is_dir() and file not in tables else LeftOut())
    kept = sum((Counter(each.get("classes", {})) for each in reports.values()), Counter[str]())
    warnings = loaded.warnings()
    warnings += filter(None, (unscaled(table.x, table.y, loaded) for table in tables.values()))
    warnings += filter(None, (repeated_names(path, loaded) for path in tables))
    warnings += filter(None, [unequal_losses(kept, left_out.classes)])
    excess = unreadable + [
        f"{path}: {text}" for path, table in tables.items() for text in _excess(path, table, loaded, allowed)
    ]
    if as_json:
        files = {str(path): each for path, each in reports.items()}
        content = {"schema": loaded.fingerprint, "warnings": warnings, "errors": excess, "files": files}
        print_json(content | {"left-out": left_out.to_json()})
    else:
        lines = [line for path, table in tables.items() for line in _lines(path, table, reports[path], loaded)]
        lines += [f"left out: {loss}" for loss in left_out.losses if loss.unit != "record"]
        lines += [f"warning: {warning}" for warning in warnings] + [f"error: {error}" for error in excess]
        _print_lines([*lines, f"schema {loaded.fingerprint}; {_PRIVATE}"])
    if excess or any(table.errors for table in tables.values()) or not sum(len(table.y) for table in tables.values()):
        raise typer.Exit(1)


def _read(file: Path, schema: TableSchema) -> tuple[dict[Path, Table], list[str]]:
    """Return the tables of a file or folder, and why others of the folder cannot be read."""
    from coterie.datasets import DataError, read_table
    from coterie.datasets.client_data import is_table, parts

    tables, unreadable = {}, []
    paths = (parts(file) if file.is_dir() else []) or [file]
    if file.is_dir() and paths == [file] and not is_table(file):
        raise DataError(f"{file} contains neither train.csv nor train.parquet, nor client-0.csv and so on")
    for path in paths:
        try:
            tables[path] = read_table(path, schema, sites=None)
        except DataError as error:
            if len(paths) == 1:
                raise
            unreadable.append(str(error))
    return tables, unreadable


def _excess(path: Path, table: Table, schema: TableSchema, allowed: dict[str, float]) -> list[str]:
    """Return errors about columns in which too many values are clamped or missing; absent ones are declared."""
    absent = {name for name, column in schema.at_site(path).file.columns if column.absent}
    counts = {"clamped": Counter[str](), "filled": Counter(table.missing)}
    for finding in table.findings:
        counts["clamped"][finding.column] += finding.count * (finding.effect == "clamped")
    ways = {"clamped": "is its unit another one, or a number a code of missing values?", "filled": "is it recorded?"}
    return [
        f"column {name!r}: {count / table.records:.0%} of the records {effect}, more than {allowed[effect]:.0%}; "
        f"{ways[effect]} (docs/tables.md; --{effect} {math.ceil(100 * count / table.records) / 100:g} allows it)"
        for effect, of_columns in counts.items()
        for name, count in of_columns.items()
        if count > max(1, allowed[effect] * table.records) and name not in absent
    ]


@app.command()
def schema(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .csv, .parquet or .xlsx file; only column names are read.")
    ],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the labels.")] = None,
) -> None:
    """Draft a schema from the column names of a file. Means, scales and categories are for you to add.

    They must be public knowledge, since every site and the server see them: numbers computed from private records would
    reveal these.
    """
    from coterie.cli.drafts import draft

    print(draft(file, label), end="")


@app.command()
def site(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table; columns and encoding are looked at.")],
    schema: Annotated[Path, typer.Option(metavar="SCHEMA", help="TOML file of the schema (docs/tables.md).")],
) -> None:
    """Draft NAME.site.toml, which says how a site's table differs from the schema: check it, and save it beside FILE.

    It has title lines, delimiter, encoding, columns with similar names, and further columns to ignore.
    """
    from coterie.cli.drafts import site_draft
    from coterie.datasets import TableSchema

    print(site_draft(file, TableSchema.load(schema)), end="")


def _print_lines(lines: Iterable[str]) -> None:
    console = console_for(False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _lines(path: Path, table: Table, report: dict[str, Any], schema: TableSchema) -> Iterator[str]:
    """Yield the report on a table for people."""
    yield f"{path}: {table.records:,} records, {len(table.y):,} of them usable; {schema.num_features} features"
    if counts := report[schema.task.counted]:
        yield f"  {schema.task.counted}: " + ", ".join(f"{name} {n:,}" for name, n in counts.items())
    missing = ", ".join(f"{name} {count:,}" for name, count in report["missing"].items())
    yield f"  missing: {missing or 'none'}"
    if units := report.get("units"):
        named = f"{units['number']:,} values of {units['column']!r}, {units['held-out']:,} of them held out"
        unused = f"; a step uses no more than {units['most']} records of each" * (units["largest"] > units["most"])
        yield f"  units: {named}, with up to {units['largest']:,} records{unused}"
    if "sites" in report:
        named = ", ".join(f"{name} {count:,}" for name, count in report["sites"].items())
        yield f"  sites: {named or 'no column of the site, so these are the records of one client'}"
    for finding in table.findings:
        yield f"  {'note' if finding.expected else 'error'}: {finding}"


def _report(table: Table, schema: TableSchema) -> dict[str, Any]:
    """Return the report on a table as JSON values."""
    import numpy as np

    from coterie.datasets.units import is_held_out_unit

    units: dict[str, Any] = {}
    if schema.site:
        counts = () if table.sites is None else np.bincount(table.sites, minlength=len(schema.site.values)).tolist()
        units["sites"] = dict(zip(schema.site.values, counts, strict=False))
    if schema.unit:
        sizes = Counter(() if table.units is None else table.units.tolist())
        units["units"] = {
            "column": schema.unit.name,
            "number": len(sizes),
            "held-out": sum(map(is_held_out_unit, sizes)),
            "largest": max(sizes.values(), default=0),
            "most": schema.unit.most,
        }
    return {
        **units,
        "records": table.records,
        "usable": len(table.y),
        schema.task.counted: schema.task.counts(table.y, schema.class_names),
        "missing": table.missing,
        "errors": [_entry(finding) for finding in table.findings if not finding.expected],
        "notes": [_entry(finding) for finding in table.findings if finding.expected],
    }


def _entry(finding: Finding) -> dict[str, Any]:
    keys = ("column", "what", "effect", "hint", "count", "by_class", "rows", "values")
    return {key.replace("_", "-"): getattr(finding, key) for key in keys}
