"""Find a client's data, say of what kind they are, read them, report what is left out, and take their fingerprints.

A path refers to one of

- an `.npz` archive of arrays `x`, `y` and, for test data, `x_test`, `y_test`, or one of MedMNIST or Keras;
- a text, parquet or spreadsheet table with a column `label`, or `target` for real-valued targets; all other columns are
  features. With a schema (:mod:`coterie.datasets.schema`), it may have any columns;
- a folder of `.parquet` files, in itself or in folders `key=value`;
- a folder of images `CLASS/*.png` (or jpg, ...), where CLASS is an integer or a name listed in `classes.txt`, one per
  line. The list keeps class numbers consistent between clients that lack a class;
- a folder of images with a list `labels.csv`, if a record has several labels, or a real target;
- a folder with `train` and, for test data, `test`, each in one of these formats.

A report describes private records. It is for the owner of the data alone, and never sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.datasets.array_files import CLASSES, LIST_FILES, read_archive, read_images
from coterie.datasets.binary_tables import is_parquet_folder
from coterie.datasets.data_files import SUFFIXES, TABLE_SUFFIXES, losses_of, need_regular, suffix_of
from coterie.datasets.facts import Declared, Facts
from coterie.datasets.left_out import LeftOut, unequal_losses
from coterie.datasets.records import Records, labels
from coterie.datasets.schema import SITE_SUFFIX
from coterie.datasets.sources import DataError
from coterie.datasets.tables import columns_text, table_columns, table_records
from coterie.files import private_folder, write_atomic
from coterie.tasks import Task

# Clients of a simulation whose tables may name the columns.
_FIRST_CLIENTS = 20
#: Name of the report in the state folder of a deployed client.
REPORT_FILE = "data-report.json"
# Problems in a report; their numbers are in its account.
_MAX_PROBLEMS = 20
# Reasons why no record is left, in one message.
_MAX_REASONS = 3


def parts(folder: Path) -> list[Path]:
    """Return the training and test data of a folder; if it has none, the data `client-0` and so on of a simulation."""
    _need_files(folder)
    found = [path for name in ("train", "test") if (path := find(folder, name))]
    if found:
        return found
    clients = {int(name[1]) for entry in folder.iterdir() if (name := re.match(r"client-(\d+)\b", entry.name))}
    return [path for client in sorted(clients) if (path := find(folder, f"client-{client}"))]


def _need_files(folder: Path) -> None:
    """Reject a folder of Hugging Face's `save_to_disk`, whose files are not read."""
    load = f"for a file that is read, call datasets.load_from_disk({str(folder)!r})"
    if (folder / "dataset_dict.json").is_file():
        raise DataError(f"{folder} was saved by save_to_disk; {load}['train'].to_parquet('train.parquet')")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        raise DataError(f"{folder} was saved by save_to_disk; {load}.to_parquet('data.parquet')")


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
    paths = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").exists()]
    paths += [folder / stem] if (folder / stem).is_dir() else []
    if len(paths) > 1:
        raise DataError(f"{folder} contains {' and '.join(path.name for path in paths)}; keep one of them")
    return paths[0] if paths else None


def is_table(path: Path) -> bool:
    """Whether a path is a table: a file, or a folder of parquet files."""
    return is_parquet_folder(path) or (suffix_of(path) in TABLE_SUFFIXES and not path.is_dir())


def first_columns(folder: str | Path | None) -> str:
    """Return the names of the features of a simulation's tables, as a setting: those of the first client.

    Empty, if the first clients have no table.
    """
    if not folder:
        return ""
    home = Path(folder).expanduser()
    for client in range(_FIRST_CLIENTS):
        with suppress(DataError, OSError):
            path = find(home, f"client-{client}")
            path = (find(path, "train") or path) if path is not None and path.is_dir() else path
            if path is not None:
                return columns_text(table_columns(path)) if is_table(path) else ""
    return ""


def read(path: Path, known: Facts | None, *, need_targets: bool = True) -> tuple[Records, Records | None]:
    """Read the training records and, if present, the test records.

    Args:
        path: A file or a folder.
        known: What the records must be; None only inspects them.
        need_targets: Whether records must have labels or targets. Otherwise an archive may lack `y`, a table the
            column, and a folder may hold images without folders of classes.

    Raises:
        DataError: the path does not exist or cannot be read.
    """
    root = path.expanduser()
    try:
        _need_files(root)
        train, test = (find(root, part) if root.is_dir() else None for part in ("train", "test"))
        if train is None and test is None:
            return _read(root, root, known, need_targets)
        if train is None:
            raise DataError(f"{root} contains test data but no training data; add train.* or the folder train")
        records = _part(train, root, known)
        lists = () if _listed(known) is None else LIST_FILES
        records = replace(records, left_out=records.left_out + beside(root, lists))
        return records, None if test is None else _part(test, root, known)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror or error}") from None


def _listed(known: Facts | None) -> Task | None:
    """Return the task if a list may say what images have; otherwise folders are classes."""
    return known.task if known is not None and (known.task.real or known.task.num_cells > 1) else None


def _read(path: Path, home: Path, known: Facts | None, need_targets: bool) -> tuple[Records, Records | None]:
    """Read data of one kind; lists of images may lie in the folder `home`."""
    shape, schema, columns = (None, None, None) if known is None else (known.shape, known.schema, known.columns)
    listed = _listed(known)
    several = None if listed is None or listed.real else listed
    forms = (
        f"{', '.join(SUFFIXES if schema is None else TABLE_SUFFIXES)}, a folder of .parquet files, a folder of images, "
        "or a folder of train.* and test.*"
    )
    if not path.exists():
        raise DataError(f"{path} does not exist; supported data: {forms}")
    if path.is_dir() and not is_parquet_folder(path):
        return read_images(path, home, shape, need_targets, listed), None
    if is_table(path):
        if several and schema is None:
            raise DataError(
                f"{path}: a table of {several} needs a schema with [labels]: set table-schema (docs/tables.md)"
            )
        return table_records(path, need_targets, schema, columns), None
    if suffix_of(path) != ".npz" or schema is not None:
        raise DataError(f"{path}: unsupported file type {suffix_of(path) or '(no suffix)'}; supported data: {forms}")
    need_regular(path)
    return read_archive(path, need_targets, several)


def _part(path: Path, home: Path, known: Facts | None) -> Records:
    """Read `train` or `test` of the folder `home`."""
    records, more = _read(path, home, known, True)
    if more is not None:
        raise DataError(
            f"{path} contains x_test and y_test, but {home} has separate test data; keep only one of the two"
        )
    return records


class EmptySiteError(DataError):
    """A client has no training records: there are none, all are held out, or none can be used."""


class Parts(NamedTuple):
    """Training and test records of a client; the same object twice if nothing is held out.

    Attributes:
        train: training records.
        test: test records.
        given: whether the owner separated them; otherwise, records are held out.
    """

    train: Records
    test: Records
    given: bool

    @property
    def usable(self) -> int:
        """Number of records of both."""
        return len(self.train.y) + (0 if self.test is self.train else len(self.test.y))

    @property
    def left_out(self) -> LeftOut:
        """Account of both."""
        return self.train.left_out if self.test is self.train else self.train.left_out + self.test.left_out

    def problems(self) -> tuple[str, ...]:
        """Return the problems of both, each once."""
        return tuple(dict.fromkeys(self.train.problems + self.test.problems))


def usable_records(path: str | Path, declared: Declared, *, strict: bool, given: Records | None = None) -> Parts:
    """Return training and test records in the run's format.

    Args:
        path: See the module.
        declared: What the records must be.
        strict: Whether a record that cannot be used is an error.
        given: the records, if they were read before.

    Returns:
        the records; if none can be tested on, those for training twice.

    Raises:
        DataError: the data cannot be read or do not match the run.
        EmptySiteError: ``strict``, and no record is left for training.
    """
    train, test = read(Path(path), declared) if given is None else (given, None)
    if declared.schema is not None or declared.task.num_cells > 1:
        train = _with_names(train, declared)
        test = None if test is None else _with_names(test, declared)
    if strict and not len(train.y):
        raise EmptySiteError(_nothing_left(train))
    if strict and (problems := train.problems + (() if test is None or _is_empty(test) else test.problems)):
        raise DataError(problems[0])
    parts = Parts(*train.divided(), False) if test is None else Parts(train, test, True)
    alone = parts.test is parts.train
    fit = declared.shape, declared.task.num_targets, declared.span
    train = parts.train.fitted(*fit)
    test = train if alone else parts.test.fitted(*fit)
    if len(train.y) and not len(test.y):
        if not _is_empty(test):
            lost = train.left_out + test.left_out
            train = replace(train, problems=train.problems + test.problems, left_out=lost)
        test = train
    parts = Parts(train, test, parts.given and train is not test)
    if strict and not parts.usable:
        raise EmptySiteError(_nothing_left(train))
    if strict and parts.problems():
        raise DataError(parts.problems()[0])
    if strict and not len(train.y):
        raise EmptySiteError(f"{path}: {_all_held_out(parts)}")
    return parts


def _with_names(records: Records, known: Facts) -> Records:
    """Return records with names of labels and of all targets."""
    names = records.label_names if known.schema is None else known.schema.class_names
    names = names or tuple(map(str, range(known.task.num_outputs)))
    return replace(records, class_names=known.task.target_names(names), label_names=names)


def _nothing_left(train: Records) -> str:
    """Return why no training record is left."""
    reasons = train.problems or (f"{train.where}: all records are left out", *map(str, train.left_out.losses))
    return "; ".join(reasons[:_MAX_REASONS])


def _is_empty(records: Records) -> bool:
    """Whether there were no records at all, so that none was left out."""
    return not len(records.y) and not records.left_out


@dataclass(frozen=True)
class DataReport:
    """Usable records of a client, and what is left out; for the owner of the data alone.

    Attributes:
        path: the data.
        summary: such as "1200 images of 1x28x28, classes 0..9, 240 held out".
        usable: number of usable records, test records included.
        training: number of those that are trained on.
        classes: number of usable records by class; empty for real targets.
        left_out: account of all that is left out or changed.
        problems: problems of records for which neither schema nor declaration has a rule, and what to do.
        warnings: what makes a model worse although the data can be used.
    """

    path: str
    summary: str
    usable: int
    training: int
    classes: Mapping[str, int]
    left_out: LeftOut
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """Whether all records can be used or are left out by rules, and there is one at least."""
        return bool(self.usable) and not self.problems

    def lines(self) -> list[str]:
        """Return the report as text: the summary, losses, the first problem, and warnings."""
        more = len(self.problems) - 1
        first = (
            f"the first problem is: {self.problems[0]}" + f" (and {more:,} more)" * (more > 0) if self.problems else ""
        )
        losses = [str(loss) for loss in self.left_out.losses]
        return [self.summary, *losses, *filter(None, [first]), *(f"warning: {text}" for text in self.warnings)]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, with the keys of the attributes."""
        return {
            "path": self.path,
            "summary": self.summary,
            "usable": self.usable,
            "training": self.training,
            "classes": dict(self.classes),
            "left-out": self.left_out.to_json(),
            "problems": list(self.problems[:_MAX_PROBLEMS]),
            "warnings": list(self.warnings),
        }

    def save(self, folder: str | Path) -> None:
        """Write `data-report.json` into the state folder of the client, for its user alone."""
        private_folder(Path(folder))
        write_atomic(Path(folder) / REPORT_FILE, json.dumps(self.to_json(), indent=1).encode() + b"\n", sync=False)


def report(path: str | Path, declared: Declared | None = None) -> DataReport:
    """Report on the local data of a client, as a run reads them.

    Args:
        path: See the module.
        declared: shape and classes to which the records are fitted; None: records of any shape are inspected.

    Raises:
        DataError: the data cannot be read or do not match the declaration.

    Examples:
        >>> report("patients.csv").classes
        {'0': 2, '1': 2}
    """
    if declared is None:
        train, test = read(Path(path), None)
        parts = Parts(*train.divided(), False) if test is None else Parts(train, test, True)
    else:
        parts = usable_records(path, replace(declared, columns=declared.columns or None), strict=False)
    train, test, task = parts.train, parts.test, declared.task if declared else None
    alone = test is train
    classes = Counter(train.counts()) + Counter({} if alone else test.counts())
    held_out = f"{len(test.y)} more for testing" if parts.given else f"{len(test.y)} held out"
    held_out = "none held out, so all are used for testing" if alone else held_out
    total = len(train.y) if parts.given else parts.usable
    y = train.y if alone else np.concatenate([train.y, test.y])
    several = task is not None and task.num_cells > 1
    targets = task.described(y, train.label_names) if task and several else labels(y, train.labelled)
    warnings = [*train.warnings, *test.warnings, unequal_losses(classes, parts.left_out.classes)]
    if parts.usable and not len(train.y):
        warnings.append(f"{_all_held_out(parts)}: until then, this client contributes nothing")
    return DataReport(
        str(path),
        f"{total} {train.what}, {targets}, {held_out}",
        parts.usable,
        len(train.y),
        dict(classes),
        parts.left_out,
        parts.problems(),
        tuple(filter(None, dict.fromkeys(warnings))),
    )


def describe(path: str | Path, declared: Declared | None = None) -> str:
    """Describe the local data of a client, such as "1200 images of 1x28x28, classes 0..9, 240 held out".

    The description includes all that is left out or changed, on the same line.

    Raises:
        DataError: the data cannot be read, or, without ``declared``, any record cannot.

    Examples:
        >>> describe("patients.csv")
        '4 records of 2 numbers, classes 0..1, none held out, so all are used for testing'
    """
    data_report = report(path, declared)
    if data_report.problems and declared is None:
        raise DataError(data_report.problems[0])
    return "; ".join(data_report.lines())


def _all_held_out(parts: Parts) -> str:
    return f"all {len(parts.test.y)} records are held out; add records or test data"


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files of a folder, as 64 hexadecimal digits.

    Files and folders whose names begin with a dot do not count: file managers write them.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        if not path.is_dir():
            return _digest(path)
        lines, seen = list[str](), set[str]()
        for name, folders, files in os.walk(path, followlinks=True):
            seen.add(os.path.realpath(name))
            folders[:] = [  # each folder once, since links may form a circle
                below
                for below in folders
                if not below.startswith(".") and os.path.realpath(os.path.join(name, below)) not in seen
            ]
            paths = [Path(name, file) for file in files if not file.startswith(".")]
            lines += [f"{_digest(file)} {file.relative_to(path)}" for file in paths]
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def fingerprints(folder: str | Path, clients: int) -> dict[str, str]:
    """Return the fingerprint of the data of every client of a simulation, by the name of its file or folder.

    Clients without data are left out. A table of all clients has one fingerprint.

    Raises:
        DataError: the data of a client cannot be read, or are in two formats.
    """
    home = Path(folder).expanduser()
    paths = [path for client in range(clients) if (path := find(home, f"client-{client}"))]
    return {path.name: fingerprint(path) for path in paths or [home] * is_table(home)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
