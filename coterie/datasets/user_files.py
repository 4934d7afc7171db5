"""Read a user's file or folder: an archive, a table, a folder of images, or a folder of training and test data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from coterie.datasets.archives import read_archive
from coterie.datasets.folder_entries import losses_of
from coterie.datasets.image_folders import CLASSES, read_images
from coterie.datasets.image_labels import LIST_FILES
from coterie.datasets.left_out import LeftOut
from coterie.datasets.schema import SITE_SUFFIX, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.table_parquet import is_parquet_folder
from coterie.datasets.tables import table_records
from coterie.datasets.user_records import TABLE_SUFFIXES, Records, Shape, need_regular, suffix_of
from coterie.tasks import Task

#: Functions that read training and, if present, test records from a file, by suffix.
Readers: TypeAlias = "Mapping[str, Callable[[Path, bool], tuple[Records, Records | None]]]"

#: File readers by suffix.
READERS: dict[str, Callable[[Path, bool], tuple[Records, Records | None]]] = {
    ".npz": read_archive,
    **dict.fromkeys(TABLE_SUFFIXES, table_records),
}


def read(
    path: Path,
    shape: Shape | None,
    schema: TableSchema | None = None,
    *,
    need_targets: bool = True,
    columns: Sequence[str] | None = None,
    task: Task | None = None,
) -> tuple[Records, Records | None]:
    """Read the training records and, if present, the test records.

    Args:
        path: a file or a folder.
        shape: (C, H, W) to which images are converted, or (F,); None only inspects images.
        need_targets: whether records must have labels or targets. Otherwise an archive may lack `y`, a table the
            column, and a folder may hold images without folders of classes.
        columns: names of the features of a table without a schema; see `table_records`.
        schema: of the table; None: any format, and the columns of a table are numbers.
        task: what models predict; None: classes or real targets.

    Raises:
        DataError: the path does not exist or cannot be read.
    """
    root = path.expanduser()
    several = task if task is not None and task.num_cells > 1 else None
    listed = task if task is not None and task.real else several
    tables: Readers = dict.fromkeys(TABLE_SUFFIXES, partial(table_records, schema=schema, columns=columns))
    if schema is None and several is not None:
        tables = dict.fromkeys(TABLE_SUFFIXES, partial(_refused_table, task=several))
    readers: Readers = {".npz": partial(read_archive, task=several), **tables} if schema is None else tables
    try:
        train, test = (find(root, part) if root.is_dir() else None for part in ("train", "test"))
        if not root.is_dir() or (train is None and test is None and is_parquet_folder(root)):
            return _file(root, readers, need_targets)
        if train is None and test is None:
            return read_images(root, root, shape, need_targets, listed), None
        if train is None:
            raise DataError(f"{root} contains test data but no training data; add train.* or the folder train")
        records = _part(train, root, shape, readers, listed)
        records = replace(records, left_out=records.left_out + beside(root, LIST_FILES if listed else ()))
        return records, None if test is None else _part(test, root, shape, readers, listed)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror or error}") from None


def parts(folder: Path) -> list[Path]:
    """Return the training and test data of a folder; if it has none, the data `client-0` and so on of a simulation."""
    found = [path for name in ("train", "test") if (path := find(folder, name))]
    if found:
        return found
    clients = {int(name[1]) for entry in folder.iterdir() if (name := re.match(r"client-(\d+)\b", entry.name))}
    return [path for client in sorted(clients) if (path := find(folder, f"client-{client}"))]


def beside(folder: Path, lists: Sequence[str] = ()) -> LeftOut:
    """Return an account of what lies beside the data of a folder, and names of its list of labels."""
    used = {folder / name for name in (CLASSES, *lists)}
    for path in parts(folder):
        used |= {path, path.with_suffix(SITE_SUFFIX)}
    others = sorted(entry for entry in folder.iterdir() if entry not in used)
    return LeftOut.of(loss for entry in others for loss in losses_of(entry, folder))


def find(folder: Path, stem: str) -> Path | None:
    """Find the data named `stem` in a folder; None if there are none.

    Raises:
        DataError: there are several matches.
    """
    paths = [path for suffix in READERS if (path := folder / f"{stem}{suffix}").exists()]
    paths += [folder / stem] if (folder / stem).is_dir() else []
    if len(paths) > 1:
        raise DataError(f"{folder} contains {' and '.join(path.name for path in paths)}; keep one of them")
    return paths[0] if paths else None


def is_table(path: Path) -> bool:
    """Whether a path is a table: a file, or a folder of parquet files."""
    return is_parquet_folder(path) or (suffix_of(path) in TABLE_SUFFIXES and not path.is_dir())


def _file(path: Path, readers: Readers, need_targets: bool = True) -> tuple[Records, Records | None]:
    forms = f"{', '.join(readers)}, a folder of .parquet files, a folder of images, or a folder of train.* and test.*"
    if not path.exists():
        raise DataError(f"{path} does not exist; supported data: {forms}")
    if is_parquet_folder(path):
        return readers[".parquet"](path, need_targets)
    if suffix_of(path) not in readers:
        raise DataError(f"{path}: unsupported file type {suffix_of(path) or '(no suffix)'}; supported data: {forms}")
    need_regular(path)
    return readers[suffix_of(path)](path, need_targets)


def _refused_table(path: Path, need_targets: bool, task: Task) -> tuple[Records, None]:
    raise DataError(f"{path}: a table of {task} needs a schema with [labels]: set table-schema (docs/tables.md)")


def _part(path: Path, home: Path, shape: Shape | None, readers: Readers, task: Task | None) -> Records:
    """Read `train` or `test` of the folder `home`."""
    if path.is_dir() and not is_parquet_folder(path):
        return read_images(path, home, shape, task=task)
    records, more = _file(path, readers)
    if more is not None:
        raise DataError(
            f"{path} contains x_test and y_test, but {home} has separate test data; keep only one of the two"
        )
    return records
