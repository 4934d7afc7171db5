"""Read the list of an image folder that says what each image has: several labels, or a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coterie.datasets.schema import BOOLEAN, SITE_SUFFIX, Column, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.tables import column_texts, read_table
from coterie.tasks import Task

#: Name of the list.
LABELS = "labels.csv"
#: Files of a folder that belong to the list.
LIST_FILES = (LABELS, str(Path(LABELS).with_suffix(SITE_SUFFIX)))
# Column of the paths of images, relative to the folder of the list.
_FILE = "file"
# Column of a real target.
_REAL = "target"


@dataclass(frozen=True)
class ImageLabels:
    """What a list says of the images of a folder.

    Attributes:
        targets: target of each image, by its file.
        names: of the labels.
        named: all files that it names.
        problems: rows that name no image of the folder, or have no target, and what to do.
    """

    targets: Mapping[Path, float]
    names: tuple[str, ...]
    named: frozenset[Path]
    problems: tuple[str, ...]


def read_labels(folder: Path, home: Path, task: Task, names: list[str] | None) -> ImageLabels | None:
    """Read the list in a folder of images, or else in its home; None: there is none.

    Args:
        folder: of the images.
        home: folder that holds it.
        task: a multi-label task, or a regression.
        names: of the labels, in the order of the run; None: they are named 0, 1, ....

    Raises:
        DataError: the list cannot be read, has other columns, or the names are not those of the task.
    """
    base = next((base for base in (folder, home) if (base / LABELS).exists()), None)
    if base is None:
        return None
    path = base / LABELS
    columns = (_REAL,) if task.real else _label_names(path, task, names)
    schema = _schema(columns, task)
    table = read_table(path, schema)
    texts = column_texts(path, schema, _FILE)
    problems = [f"{path}: {finding}; {task.rule}: fix or remove these rows" for finding in table.errors]
    targets: dict[Path, float] = {}
    for i, target in zip(table.index.tolist(), table.y.tolist(), strict=True):
        file = base / PurePosixPath(texts[i])
        problem = _problem(texts[i], file, file in targets)
        if problem:
            problems.append(f"{path}: row {i + 2}: {problem}")
        elif base == folder or file.is_relative_to(folder):
            targets[file] = target
    named = frozenset(base / PurePosixPath(text) for text in texts.values())
    return ImageLabels(targets, () if task.real else columns, named, tuple(problems))


def no_labels(folder: Path, task: Task) -> str:
    """Return an error: a folder has no list, which the task needs."""
    columns = ",".join((_FILE, *map(str, range(task.num_outputs))))
    return (
        f"{folder} has no {LABELS}; for {task}, write one with the columns {columns} and one row for each image, such "
        "as a.png"
    )


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, in order, but those of the list and hidden ones."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from files_below(entry)
        elif entry.name not in LIST_FILES:
            yield entry


def _schema(columns: tuple[str, ...], task: Task) -> TableSchema:
    """Return how the list is read: as the targets of a table without features."""
    if task.real:
        return TableSchema(Column(columns[0]), (), (), None)
    first, *others = (Column(name, "boolean", values=BOOLEAN) for name in columns)
    return TableSchema(first, columns, (), None, more_targets=tuple(others))


def _label_names(path: Path, task: Task, names: list[str] | None) -> tuple[str, ...]:
    """Return the columns of the labels, in the order of the run."""
    if names is None:
        return tuple(map(str, range(task.num_outputs)))
    if len(names) != task.num_outputs:
        raise DataError(
            f"{path}: classes.txt lists {len(names)} labels, but the run has {task.num_outputs}; list those of the run"
        )
    return tuple(names)


def _problem(name: str, file: Path, is_twice: bool) -> str:
    """Return why a row gives no image a target; empty: it does."""
    if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{name!r} is no path of an image below the folder of the list; write one such as a.png"
    if is_twice:
        return f"{name!r} has a row already; keep one of them"
    if not file.is_file():
        return f"there is no image {name!r}; add it, or remove the row"
    return ""
