"""Drafts of a schema, and of what one site says about its table, from the names of the columns alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from coterie.datasets.schema import SITE_SUFFIX, FileFormat, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.tables import PERSON, is_garbled, near_names, open_table, some_names
from coterie.datasets.text_tables import ZERO, TableFile

# Names of columns of free text.
_TEXT = re.compile(
    r"(.*[ _.-])?(comments?|notes?|remarks?|text|description|(sur|last|first)?[ _-]?name)", re.IGNORECASE
)

_DRAFT_UNIT = """# a column that names patients with several records: remove it from ignore, and
# [unit]
# {}
"""
_DRAFT = """[[columns]]
{}type = "number"    # or "boolean", or "category", with values = ["...", "..."]
# mean =            # public knowledge, never computed from private records
# scale =
# range = [0, 1]
"""


def draft(path: Path, label: str | None = None) -> str:
    """Return a schema to complete, from the column names of a file alone: means and scales must be public knowledge.

    Raises:
        DataError: the file cannot be read, or has no such label.
    """
    try:
        file = open_table(path, FileFormat(), ())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    names = [name for name in file.names if name]
    if label is not None and label not in names:
        raise DataError(f"{path} has no column {label!r}; its columns are {some_names(names) or 'none'}")
    named = tomli_w.dumps({"column": "NAME" if label is None else label})
    ignored = [name for name in names if name != label and (PERSON.fullmatch(name) or _TEXT.fullmatch(name))]
    parts = ["version = 1\n", *([tomli_w.dumps({"ignore": ignored}, multiline_strings=False)] if ignored else [])]
    parts += [_DRAFT_UNIT.format(tomli_w.dumps({"column": ignored[0]}).strip())] if ignored else []
    parts += [f'[label]\n{named}# classes = ["...", "..."]\n']
    parts += ['[file]\ndecimal = ","\n'] if file.delimiter == ";" else []
    return "\n".join(
        parts + [_DRAFT.format(tomli_w.dumps({"name": name})) for name in names if name not in (label, *ignored)]
    )


def site_draft(path: Path, schema: TableSchema) -> str:
    """Return a TOML file to complete that says how a site's table differs from the schema.

    Raises:
        DataError: the file cannot be read.
    """
    wanted = [column.name for column in (*schema.targets, *schema.columns, schema.unit, schema.site) if column]
    form, settings = schema.file, dict[str, Any]()
    file = open_table(path, form, wanted)
    if _is_damaged(file):
        start = "".join(file.names)
        encoding = "utf-16-be" if start.startswith(ZERO) else "utf-16-le" if ZERO in start else "cp1252"
        decoded = open_table(path, replace(form, encoding=encoding), wanted)
        if not _is_damaged(decoded):
            form, file, settings = replace(form, encoding=encoding), decoded, {"encoding": encoding}
    if file.settings:
        settings |= file.settings
        skipped = range(1, settings.get("skip-lines", 0) + 1)
        delimiter = settings.get("delimiter", form.delimiter).replace("tab", "\t")
        file = open_table(path, replace(form, skip_lines=(*skipped, *form.skip_lines), delimiter=delimiter), wanted)
    settings |= {"decimal": ","} if file.delimiter == ";" and form.decimal == "." else {}
    others = [name for name in file.names if name not in (*wanted, "")]
    missing = [name for name in wanted if name not in file.names]
    near = near_names(missing, others)
    if missing:
        settings["columns"] = {name: {"name": near[name]} if name in near else {} for name in missing}
    content: dict[str, Any] = {"file": settings} if settings else {}
    unnamed = [name for name in others if name not in (*near.values(), *(schema.ignore or ()))]
    if schema.ignore is not None and unnamed:
        content = {"ignore": [*schema.ignore, *unnamed], **content}
    start = f"# {path.name.partition('.')[0]}{SITE_SUFFIX}: check all of it, and complete"
    return f'{start} empty tables by name = "..." or absent = true (docs/tables.md)\n{tomli_w.dumps(content)}'


def _is_damaged(file: TableFile) -> bool:
    """Whether a text file has bytes that are not of its encoding."""
    return bool(file.delimiter) and (is_garbled(file.names) or any(chunk.damaged for chunk in file.records([0])))
