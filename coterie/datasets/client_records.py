"""Usable records of one client, and a report of what is left out of its data.

A report describes private records. It is for the owner of the data alone, and never sent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.datasets.left_out import LeftOut, unequal_losses
from coterie.datasets.schema import TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.user_files import read
from coterie.datasets.user_records import Records, Shape, labels
from coterie.files import private_folder, write_atomic
from coterie.tasks import Task

if TYPE_CHECKING:
    from coterie.datasets.own import Declared

#: Name of the report in the state folder of a deployed client.
REPORT_FILE = "data-report.json"
# Problems in a report; their numbers are in its account.
_MAX_PROBLEMS = 20
# Reasons why no record is left, in one message.
_MAX_REASONS = 3


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


def usable_records(
    path: str | Path,
    shape: Shape,
    num_classes: int,
    schema: TableSchema | None,
    span: tuple[float, float] | None,
    *,
    strict: bool,
    columns: Sequence[str] | None = None,
    task: Task | None = None,
) -> Parts:
    """Return training and test records in the run's format.

    Args:
        path: see :mod:`coterie.datasets.own`.
        shape: see `Records.fitted`.
        num_classes: see `Records.fitted`.
        schema: of tables; None: their columns are numbers.
        span: see `Records.fitted`.
        strict: whether a record that cannot be used is an error.
        columns: names of the features of a table without a schema; see `table_records`.
        task: what models predict; None: classes or real targets.

    Returns:
        the records; if none can be tested on, those for training twice.

    Raises:
        DataError: the data cannot be read or do not match the run.
        EmptySiteError: ``strict``, and no record is left for training.
    """

    train, test = read(Path(path), shape, schema, columns=columns, task=task)
    if schema is not None or (task is not None and task.num_cells > 1):
        train = _with_names(train, schema, task)
        test = None if test is None else _with_names(test, schema, task)
    if strict and not len(train.y):
        raise EmptySiteError(_nothing_left(train))
    if strict and (problems := train.problems + (() if test is None or _is_empty(test) else test.problems)):
        raise DataError(problems[0])
    parts = Parts(*train.divided(), False) if test is None else Parts(train, test, True)
    alone = parts.test is parts.train
    train = parts.train.fitted(shape, num_classes, span)
    test = train if alone else parts.test.fitted(shape, num_classes, span)
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


def _with_names(records: Records, schema: TableSchema | None, task: Task | None) -> Records:
    """Return records with names of labels and of all targets."""
    task = task if schema is None else schema.task
    names = records.label_names if schema is None else schema.class_names
    if task is None:
        return records
    if not names:
        names = tuple(map(str, range(task.num_outputs)))
    return replace(records, class_names=task.target_names(names), label_names=names)


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
        path: see :mod:`coterie.datasets.own`.
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
        facts = declared.shape, declared.task.num_targets, declared.schema, declared.span
        parts = usable_records(path, *facts, strict=False, columns=declared.columns or None, task=declared.task)
    return _report(str(path), parts, declared.task if declared else None)


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


def _report(path: str, parts: Parts, task: Task | None) -> DataReport:
    train, test = parts.train, parts.test
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
        path,
        f"{total} {train.what}, {targets}, {held_out}",
        parts.usable,
        len(train.y),
        dict(classes),
        parts.left_out,
        parts.problems(),
        tuple(filter(None, dict.fromkeys(warnings))),
    )


def _all_held_out(parts: Parts) -> str:
    return f"all {len(parts.test.y)} records are held out; add records or test data"
