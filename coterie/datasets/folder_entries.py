"""Files of a data folder that are not read: which of them count, and why they are left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from coterie.datasets.image_files import IMAGE_SUFFIXES, image_format
from coterie.datasets.left_out import MAX_EXAMPLES, Loss
from coterie.datasets.user_records import SUFFIXES, suffix_of

_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
# Files that a system or Coterie writes into folders of data; they hold no records.
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", ".ds_store")
_SYSTEM_PREFIXES = ("._", "~$", ".coterie-")
# Files that are counted in a folder that is not read.
_MAX_COUNTED = 100_000


def is_image(file: Path) -> bool:
    """Whether a file is read as an image: by its suffix, or without one, or with a number for one, by its content."""
    if file.name.startswith("."):
        return False
    suffix = file.suffix.lower()
    return suffix in IMAGE_SUFFIXES or ((not suffix or suffix[1:].isdecimal()) and bool(_format(file)))


def losses_of(file: Path, home: Path, class_name: str = "") -> list[Loss]:
    """Return the loss of a file, or of the files in a folder, that is not read; empty for files of the system.

    Args:
        file: the file or folder.
        home: folder to which the names of examples are relative.
        class_name: its class; empty if it is not known.
    """
    if file.is_dir():
        reason = "in a hidden folder" if file.name.startswith(".") else f"in a folder {file.name!r}"
        if class_name:
            reason = "in a folder below that of its class"
        return _of_folder(file, reason, home, class_name)
    if _is_of_system(file.name):
        return []
    return [Loss(_reason(file), "file", 1, "left out", (str(file.relative_to(home)),), _one(class_name))]


def _of_folder(folder: Path, reason: str, home: Path, class_name: str) -> list[Loss]:
    count = 0
    examples: list[str] = []
    for file in _files_below(folder):
        count += 1
        if len(examples) < MAX_EXAMPLES:
            examples.append(str(file.relative_to(home)))
        if count == _MAX_COUNTED:
            reason += ", at least"
            break
    if not count:
        return []
    return [Loss(reason, "file", count, "left out", tuple(examples), {class_name: count} if class_name else {})]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, without following links to folders."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as opened:
                entries = sorted(opened, key=lambda entry: entry.name)
        except OSError:
            continue
        folders += [Path(entry.path) for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
        yield from (
            Path(entry.path)
            for entry in entries
            if not entry.is_dir(follow_symlinks=False) and not _is_of_system(entry.name)
        )


def _reason(file: Path) -> str:
    suffix = file.suffix.lower()
    if file.name.startswith("."):
        return "hidden file"
    if not file.is_file():
        return "not a regular file"
    if suffix_of(file) in SUFFIXES:
        return f"{suffix_of(file)} file beside the data that are read"
    if suffix in _ARCHIVES:
        return f"archive {suffix}, which is not unpacked"
    if suffix in IMAGE_SUFFIXES:
        return "image in no folder of a class"
    name = f"file type {suffix}" if suffix else "file type (no suffix)"
    image = _format(file)
    return f"unsupported {name}" + (f" with the content of a {image} image" if image else "")


def _format(file: Path) -> str:
    """Return the format of an image by its content; empty for other files, and for those that cannot be read."""
    if not file.is_file():  # reading a named pipe may never end
        return ""
    try:
        with file.open("rb") as opened:
            return image_format(opened.read(16))
    except OSError:
        return ""


def _is_of_system(name: str) -> bool:
    return name.lower() in _SYSTEM_FILES or name.startswith(_SYSTEM_PREFIXES)


def _one(class_name: str) -> dict[str, int]:
    return {class_name: 1} if class_name else {}
