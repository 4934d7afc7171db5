"""Files of a client's data: their kinds by name and content, limits of size, and an account of those not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from coterie.datasets.left_out import MAX_EXAMPLES, Loss
from coterie.datasets.sources import DataError

#: Suffixes of workbooks, of all tables, and of all files.
WORKBOOK_SUFFIXES = (".xlsx", ".xls", ".xlsb", ".ods")
TABLE_SUFFIXES = (".csv", ".parquet", ".tsv", ".csv.gz", ".tsv.gz", *WORKBOOK_SUFFIXES)
SUFFIXES = (".npz", *TABLE_SUFFIXES)
#: Largest uncompressed size of a file in bytes, checked before its data are loaded into memory.
MAX_BYTES = 4 * 2**30
#: Suffixes of images.
IMAGE_SUFFIXES = (*(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif"), *(".bmp", ".gif", ".tif", ".tiff", ".webp"))
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
# Files that a system or Coterie writes into folders of data; they hold no records.
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", ".ds_store")
_SYSTEM_PREFIXES = ("._", "~$", ".coterie-")
# Files that are counted in a folder that is not read.
_MAX_COUNTED = 100_000


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, such as `.csv` or `.csv.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def need_regular(path: Path) -> None:
    """Reject named pipes and devices: reading from them may never end."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; replace it by a regular file or a symbolic link to one")


def need_at_most(limit: int, size: int, where: str, action: str) -> None:
    """Reject a size in bytes above a limit."""
    if size > limit:
        raise DataError(f"{where} {action} {size:,} bytes, but the limit is {limit:,}; reduce its size")


def shortened(message: object) -> str:
    """Shorten an error message, which may contain parts of the file."""
    text = str(message)
    return text if len(text) <= 200 else f"{text[:200]}..."


def image_format(start: bytes) -> str:
    """Return the format of a file by its first 16 bytes, as "PNG"; empty if it is not an image."""
    signatures = (
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\xff\xd8\xff", "JPEG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
    )
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[:2] == b"BM" and start[6:10] == bytes(4):  # four reserved bytes
        return "BMP"
    return next((name for signature, name in signatures if start.startswith(signature)), "")


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
        count = 0
        examples: list[str] = []
        for count, below in enumerate(_files_below(file), 1):
            if len(examples) < MAX_EXAMPLES:
                examples.append(str(below.relative_to(home)))
            if count == _MAX_COUNTED:
                reason += ", at least"
                break
    else:
        count, reason, examples = int(not _is_of_system(file.name)), _reason(file), [str(file.relative_to(home))]
    if not count:
        return []
    return [Loss(reason, "file", count, "left out", tuple(examples), {class_name: count} if class_name else {})]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, without following links to folders."""
    for home, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(home, name))]
        yield from (Path(home, name) for name in sorted(names + links) if not _is_of_system(name))


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
