"""``coterie data``: check a table before a run, and draft its schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, print_json

if TYPE_CHECKING:
    from coterie.datasets import Finding, Table, TableSchema

app = typer.Typer(help="Check tables of private records by a public schema.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table, or a folder of train.* and test.*.")],
    schema: Annotated[Path, typer.Option(metavar="SCHEMA", help="TOML file of the schema (docs/tables.md).")],
    as_json: JsonFlag = False,
) -> None:
    """Report all errors of a table at once. The report describes private records: it is for their owner alone."""
    from coterie.datasets import SchemaError, TableSchema, read_table
    from coterie.datasets.table_findings import uneven_losses
    from coterie.datasets.tables import unscaled

    try:
        loaded = TableSchema.load(schema)
    except SchemaError as error:
        for message in error.errors:
            print(f"error: {schema}: {message}", file=sys.stderr)
        raise typer.Exit(1) from None
    tables = {path: read_table(path, loaded) for path in _parts(file)}
    warnings = loaded.warnings()
    for table in tables.values():
        warnings += filter(None, (unscaled(table.x, table.y, loaded), uneven_losses(table.lost, table.classes)))
    if as_json:
        reports = {str(path): _report(table) for path, table in tables.items()}
        print_json({"schema": loaded.fingerprint, "warnings": warnings, "files": reports})
    else:
        _print_text(tables, loaded, warnings)
    if any(table.errors for table in tables.values()):
        raise typer.Exit(1)


@app.command()
def schema(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .csv or .parquet file; only column names are read.")],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the labels.")] = None,
) -> None:
    """Draft a schema from the column names of a file. Means, scales and categories are for you to add.

    They must be public knowledge, since every site and the server see them: numbers computed from private records would
    reveal these.
    """
    from coterie.datasets.tables import draft

    print(draft(file, label), end="")


def _parts(path: Path) -> list[Path]:
    """Return the file, or the training and test files of a folder."""
    from coterie.datasets import DataError
    from coterie.datasets.user_files import find

    if not path.is_dir():
        return [path]
    paths = [file for name in ("train", "test") if (file := find(path, name))]
    if not paths:
        raise DataError(f"{path} contains neither train.csv nor train.parquet")
    return paths


def _print_text(tables: dict[Path, Table], schema: TableSchema, warnings: list[str]) -> None:
    """Print a report for people."""
    console = console_for(False)

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for path, table in tables.items():
        report = _report(table)
        line(f"{path}: {table.records:,} records, {len(table.y):,} of them usable; {schema.num_features} features")
        if schema.num_classes:
            line("  classes: " + ", ".join(f"{name} {count:,}" for name, count in report["classes"].items()))
        missing = ", ".join(f"{name} {count:,}" for name, count in report["missing"].items())
        line(f"  missing: {missing or 'none'}")
        for finding in table.findings:
            line(f"  {'note' if finding.expected else 'error'}: {finding}")
    for warning in warnings:
        line(f"warning: {warning}")
    line(f"schema {schema.fingerprint}; this report is for the owner of the records alone")


def _report(table: Table) -> dict[str, Any]:
    return {
        "records": table.records,
        "usable": len(table.y),
        "classes": table.classes,
        "left-out": table.lost,
        "missing": table.missing,
        "errors": [_entry(finding) for finding in table.findings if not finding.expected],
        "notes": [_entry(finding) for finding in table.findings if finding.expected],
    }


def _entry(finding: Finding) -> dict[str, Any]:
    keys = ("column", "what", "effect", "hint", "count", "by_class", "rows", "values")
    return {key.replace("_", "-"): getattr(finding, key) for key in keys}
