"""Read folders of images, one folder per class, with an account of all files that are left out."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.datasets import folder_entries
from coterie.datasets.image_files import IMAGE_SUFFIXES, read_image
from coterie.datasets.image_labels import LABELS, ImageLabels, files_below, no_labels, read_labels
from coterie.datasets.left_out import LeftOut, Loss
from coterie.datasets.sources import DataError
from coterie.datasets.user_records import (
    SUFFIXES,
    Array,
    Records,
    Shape,
    is_held_out,
    need_at_most,
    need_regular,
    sizes_text,
)
from coterie.tasks import Task

#: List of the class names of a run.
CLASSES = "classes.txt"
_MAX_CLASSES_BYTES = 2**20


def read_images(
    folder: Path, home: Path, shape: Shape | None, need_targets: bool = True, task: Task | None = None
) -> Records:
    """Read the images of FOLDER/CLASS/*, or those of a list.

    If no targets are needed and there are no folders of classes, read FOLDER/*.

    Args:
        folder: of the images.
        home: folder with the names of the classes or labels.
        shape: (C, H, W) to which images are converted; None only inspects them.
        need_targets: whether images must have targets.
        task: what models predict, if a list says it, or may (real targets); None: folders are classes.

    Raises:
        DataError: a list cannot be read, or is missing.
    """
    suited = shape is None or (len(shape) == 3 and shape[0] in (1, 3))
    if shape is not None and not suited and any(map(folder_entries.is_image, _files(folder))):
        raise DataError(
            f"{folder} contains images, which have 1 or 3 channels, but the run expects {sizes_text(shape)}"
        )
    names = _class_names(home / CLASSES)
    if task is not None:
        listed = read_labels(folder, home, task, names)
        if listed is None and need_targets and not task.real:
            raise DataError(no_labels(folder, task))
        if listed is not None:
            return _Reader(folder, shape).listed(listed, task)
    entries = sorted(entry for entry in folder.iterdir() if entry.name != CLASSES)
    subfolders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    has_targets = need_targets or bool(subfolders)
    reader = _Reader(folder, shape)
    if has_targets:
        for subfolder in subfolders:
            reader.read_class(subfolder, names)
        reader.leave_out([entry for entry in entries if entry not in subfolders])
    else:
        reader.read_files(entries, 0)
    return reader.records(has_targets, tuple(names or ()))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and of those in it."""
    for entry in folder.iterdir():
        yield from entry.iterdir() if entry.is_dir() else [entry]


class _Reader:
    """Collects the images of a folder, and what it leaves out."""

    def __init__(self, folder: Path, shape: Shape | None) -> None:
        self._folder, self._shape = folder, shape
        self._x: list[Array] = []
        self._y: list[float] = []
        self._held_out: list[bool] = []
        self._sizes: set[Shape] = set()
        self._problems: list[str] = []
        self._losses: list[Loss] = []

    def read_class(self, subfolder: Path, names: list[str] | None) -> None:
        """Read a folder of one class; images of an unknown class are left out."""
        entries = sorted(subfolder.iterdir())
        try:
            label = _label(subfolder, names)
        except DataError as error:
            images = [entry for entry in entries if folder_entries.is_image(entry)]
            self._problems += [str(error)] * bool(images)
            self._losses += [Loss(f"unknown class {_name(subfolder)!r}", examples=self._named(file)) for file in images]
            self.leave_out([entry for entry in entries if entry not in images])
        else:
            self.read_files(entries, label, names[label] if names else str(label))

    def read_files(self, entries: list[Path], label: int, class_name: str = "") -> None:
        """Read images of one class."""
        for entry in entries:
            if folder_entries.is_image(entry):
                self._read(entry, label, class_name)
            else:
                self.leave_out([entry], class_name)

    def listed(self, of_list: ImageLabels, task: Task) -> Records:
        """Return the images that a list names; others are left out."""
        self._problems += of_list.problems
        names = task.target_names(of_list.names)
        for file in files_below(self._folder):
            if file in of_list.targets:
                target = of_list.targets[file]
                self._read(file, target, names[int(target)] if names else "")
            elif folder_entries.is_image(file):
                reason = (
                    f"image whose row in {LABELS} has an error"
                    if file in of_list.named
                    else f"image without a row in {LABELS}"
                )
                self._losses.append(Loss(reason, examples=self._named(file)))
            elif file.name != CLASSES:
                self.leave_out([file])
        nothing = f"{self._folder}: no image has a row in {LABELS}, such as a.png"
        return replace(self.records(True, names, nothing, not task.real), label_names=of_list.names)

    def leave_out(self, entries: list[Path], class_name: str = "") -> None:
        """Account for files and folders that are not read."""
        for entry in entries:
            self._losses += folder_entries.losses_of(entry, self._folder, class_name)

    def records(
        self, has_targets: bool, class_names: tuple[str, ...], nothing: str = "", labelled: bool = True
    ) -> Records:
        """Return all images that were read; with what to say if there are none, and whether targets are labels."""
        if not self._x:
            self._problems.append(
                nothing
                or f"{self._folder} contains neither images in one folder per class, such as {self._folder}/0/*.png "
                f"(supported: {', '.join(IMAGE_SUFFIXES)}), nor train{', train'.join(SUFFIXES)}, nor the folder train"
            )
        sizes = [sizes_text(size) for size in self._sizes]
        return Records(
            where=str(self._folder),
            what=f"images of {sizes[0]}" if len(sizes) == 1 else "images of different sizes",
            x=np.stack(self._x) if self._x else np.zeros((0, *(self._shape or (0,))), np.uint8),
            y=np.array(self._y, float),
            held_out=np.array(self._held_out, bool),
            whole=True,
            labelled=labelled if has_targets else None,
            problems=tuple(self._problems),
            has_targets=has_targets,
            left_out=LeftOut.of(self._losses),
            class_names=class_names,
        )

    def _read(self, file: Path, label: float, class_name: str) -> None:
        classes = {class_name: 1} if class_name else {}
        try:
            image = read_image(file, self._shape)
        except DataError as error:
            self._problems.append(str(error))
            self._losses.append(Loss("image that cannot be read", examples=self._named(file), classes=classes))
            return
        if image.is_dark:
            reason = "image of 16 bits without a value above 4,095 of 65,535"
            self._losses.append(Loss(reason, effect="nearly black", examples=self._named(file), classes=classes))
        self._x.append(image.pixels)
        self._y.append(label)
        self._held_out.append(is_held_out(image.original, label))
        self._sizes.add(image.original.shape)

    def _named(self, file: Path) -> tuple[str]:
        return (str(file.relative_to(self._folder)),)


def _class_names(path: Path) -> list[str] | None:
    """Return the names in `classes.txt`, in Unicode's composed form (NFC); None without that file."""
    if not path.exists():
        return None
    need_regular(path)
    need_at_most(_MAX_CLASSES_BYTES, path.stat().st_size, str(path), "holds")
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        lines = unicodedata.normalize("NFC", content.decode(encoding)).splitlines()
    except ValueError as error:
        raise DataError(f"{path} is not a text file ({error}); write one class name per line") from None
    names = [line.strip() for line in lines if line.strip()]
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} contains duplicate class names; each line is the name of one class, in the order 0, 1, ..."
        )
    return names


def _label(subfolder: Path, names: list[str] | None) -> int:
    name = _name(subfolder)
    if names is not None and name in names:
        return names.index(name)
    if names is None and name.isdecimal():
        return int(name)
    listed = "not found" if names is None else f"it lists {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    raise DataError(
        f"{subfolder}: unknown class {name!r}; name folders 0, 1, ..., or list all class names of the run, "
        f"one per line and in the same order for all clients, in {CLASSES} ({listed})"
    )


def _name(subfolder: Path) -> str:
    return unicodedata.normalize("NFC", subfolder.name)
