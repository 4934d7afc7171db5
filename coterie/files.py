"""File access: bounded reads of regular files with one-line errors, JSON, and atomic writes.

New files have mode 0600 and new folders 0700, regardless of the umask. Existing folders, and files that are appended
to, keep their modes, so that their owner may share them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

#: Bytes of the largest file that is read.
MAX_FILE_BYTES = 1 << 30

#: Mode of a new file.
PRIVATE = 0o600

_KINDS: Mapping[int, str] = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileError(RuntimeError):
    """A file cannot be read; the message names it and states why."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without ever waiting for another process.

    Args:
        path: the file.
        flags: as for :func:`os.open`.

    Returns:
        its descriptor.

    Raises:
        FileError: it cannot be opened, or it is a directory, a FIFO, a device or a socket, or too large.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    except OSError as error:
        what = "read" if flags == os.O_RDONLY else "written"
        raise FileError(f"{path} cannot be {what}: {error.strerror or error}") from None
    file_status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(file_status.st_mode):
        problem = f"it is {_KINDS.get(stat.S_IFMT(file_status.st_mode), 'not a file')}, not a regular file"
    elif file_status.st_size > MAX_FILE_BYTES:
        problem = f"its size of {file_status.st_size:,} bytes exceeds the limit of {MAX_FILE_BYTES:,}"
    if problem:
        os.close(descriptor)
        raise FileError(f"{path} cannot be read: {problem}")
    return descriptor


def open_private(path: Path, mode: str) -> IO[Any]:
    """:func:`open`, where a new file is for its user alone."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE))


def private_folder(path: Path) -> None:
    """Make a folder for its user alone, and what is missing above it; leave it as it is if it exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_atomic(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a file by a new one of mode 0600; a crash leaves the old content or the new, never a part.

    Args:
        path: the file; its folder must exist.
        content: what the file holds afterwards.
        sync: whether the file and its folder are synced to disk before this returns.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a crash
        write_new(temporary, content, sync=sync)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def write_json(path: Path, document: Mapping[str, Any], *, sync: bool = True) -> None:
    """:func:`write_atomic` of a JSON document."""
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode(), sync=sync)


def write_new(path: Path, content: bytes, *, mode: int = PRIVATE, sync: bool = True) -> None:
    """Write a file that does not exist yet, with this mode, and sync its content to disk."""
    with open_private(path, "xb") as file:
        os.fchmod(file.fileno(), mode)  # regardless of the umask
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk, so that a new name in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """The first ``most`` bytes of a regular file.

    Raises:
        FileError: see :func:`open_regular`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """A regular file of UTF-8 text.

    Raises:
        FileError: see :func:`open_regular`; or it is not text.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{path} cannot be read: it is not text") from None


def spreadsheet_cell(value: Any) -> Any:
    """Return a value of a CSV file; a text that a spreadsheet would run as a formula gets an apostrophe before it."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def read_object(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """A file with one JSON object; if ``strict``, without NaN and Infinity, which Python reads and JSON lacks.

    Raises:
        FileError: see :func:`open_regular`; or it is not a JSON object.
    """
    return parse_object(read_text(path), str(path), strict=strict)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file with a JSON object on every line; a last line without its end, which a crash leaves, is left out.

    Raises:
        FileError: see :func:`open_regular`; or a line is not a JSON object.
    """
    text = read_text(path)
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [parse_object(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def parse_object(text: str, name: str, *, strict: bool = False) -> dict[str, Any]:
    """A JSON object; ``name`` is what errors call it. See :func:`read_object`.

    Raises:
        FileError: the text is not a JSON object.
    """
    try:
        content = json.loads(text, parse_constant=_refuse if strict else None)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise FileError(f"{name} contains a {type(content).__name__}; expected a JSON object")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
