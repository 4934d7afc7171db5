"""Copies of a server's or a client's files, and their restoration: never over newer ledgers, never over other files.

An archive is a tar file of mode 0600 with the files by their absolute paths, and ``manifest.json`` with the SHA-256 of
each. A database is copied by SQLite, which gives the state of one moment while a SuperLink writes; of a ledger, whole
lines are copied.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from coterie.files import PRIVATE, FileError, parse_object, private_folder, read_bytes, sync_folder, write_new
from coterie.logs import printable
from coterie.site.errors import DeployError

_MANIFEST = "manifest.json"
_DATABASE, _LEDGER = ".db", ".jsonl"
#: Endings of files that a copy leaves out: SQLite's own files, unfinished writes, locks, secrets of an open round, with
#: which a restored client could answer a step twice, and keys of one round, which would open its recorded messages.
_TRANSIENT = ("-wal", "-shm", "-journal", ".tmp", ".lock", ".open-round", ".box-keys")


@dataclass(frozen=True)
class Restored:
    """Files of an archive: ``written`` were missing, ``same`` were there with the same content."""

    written: tuple[str, ...]
    same: tuple[str, ...]


def back_up(archive: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """Copy files and folders into a new archive, which replaces an older one when it is complete.

    Args:
        archive: the tar file.
        paths: files and folders; links are followed only if they are given.

    Returns:
        the absolute paths of the copied files.

    Raises:
        DeployError: a path is missing, a file cannot be read, or the archive cannot be written.
    """
    target = archive.expanduser().absolute()
    files = list(_files(paths, target))
    if not files:
        raise DeployError(f"{', '.join(map(str, paths))}: contains no file to back up")
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        write_new(temporary, b"")
        digests = {}
        with tarfile.open(temporary, "w") as tar:
            for path in files:
                content = _content(path)
                digests[str(path)] = hashlib.sha256(content).hexdigest()
                _add(tar, str(path), content, stat.S_IMODE(path.stat().st_mode))
            _add(tar, _MANIFEST, json.dumps({"files": digests}, indent=1).encode(), PRIVATE)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except (OSError, FileError, sqlite3.Error) as error:
        raise DeployError(f"{archive}: the backup failed, and an older one is unchanged: {error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return tuple(map(str, files))


def restore(archive: Path, paths: Sequence[Path] = (), root: Path | None = None) -> Restored:
    """Write the files of an archive that are missing. Nothing is written if a file is there with another content.

    An archive is not signed, so that it alone does not decide where files are written: whoever restores it names the
    files and folders, or a folder for all.

    Args:
        archive: the tar file.
        paths: files and folders that may be written, as :func:`back_up` was called with.
        root: folder below which all files are written instead; None for the original paths.

    Raises:
        DeployError: the archive is damaged, a missing file is not below `paths`, a file is there with another content,
            or cannot be written.
    """
    contents = _read(archive)
    targets = {Path(root or "/", name.lstrip("/")): content for name, content in contents.items()}
    same = [
        path
        for path, (content, _) in targets.items()
        if path.exists() and (read_bytes(path) == content or (path.suffix != _DATABASE and _content(path) == content))
    ]
    for path in targets:
        if path.exists() and path not in same:
            content, current = targets[path][0], read_bytes(path)
            if path.suffix == _LEDGER and current.startswith(content):
                newer = current[len(content) :].count(b"\n")
                raise DeployError(
                    f"{path}: has {newer} lines that {archive} lacks: an older ledger would let its budget be spent "
                    "again. Keep it, and move the other files away"
                )
            raise DeployError(f"{path}: is there with another content: move it away first, nothing was restored")
    written = [path for path in targets if path not in same]
    allowed = [root] if root else list(map(_absolute, paths))
    if outside := [path for path in written if not any(map(path.is_relative_to, allowed))]:
        folders = ", ".join(sorted({str(path.parent) for path in outside}))
        raise DeployError(
            f"{archive}: has {len(outside)} missing files outside the given paths, in {printable(folders)}; nothing "
            "was restored: name files and folders as in coterie backup create, or a folder for all by --root"
        )
    try:
        for path in written:
            content, mode = targets[path]
            private_folder(path.parent)
            write_new(path, content, mode=mode)
    except OSError as error:
        raise DeployError(
            f"{error.filename}: cannot be written: {error.strerror}; correct this and try again"
        ) from None
    return Restored(tuple(map(str, written)), tuple(map(str, same)))


def _files(paths: Sequence[Path], archive: Path) -> Iterator[Path]:
    for given in paths:
        path = _absolute(given)
        if not path.exists():
            raise DeployError(f"{given}: does not exist")
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            regular = file.is_file() and (file == path or not file.is_symlink())
            if regular and file != archive and not file.name.endswith(_TRANSIENT):
                yield file


def _absolute(path: Path) -> Path:
    """Return the path in an archive, without ``..``; links stay where they can."""
    path = path.expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


def _content(path: Path) -> bytes:
    if path.suffix == _DATABASE:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy.db")
            with (
                closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)  # of one moment, with the write-ahead log
                target.execute("PRAGMA journal_mode=DELETE")
            return copy.read_bytes()
    content = read_bytes(path)
    return content[: content.rfind(b"\n") + 1] if path.suffix == _LEDGER else content


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))


def _read(archive: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and modes of the files of an archive, by absolute path."""
    try:
        with tarfile.open(archive, "r:") as tar:
            found = {}
            for member in tar:
                stream = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if stream is None or member.name in found:
                    raise ValueError(f"{member.name} is not a file of a backup")
                found[member.name] = stream.read(), member.mode & 0o755
        manifest = parse_object(found.pop(_MANIFEST)[0].decode(), _MANIFEST)["files"]
    except (OSError, tarfile.TarError, KeyError, ValueError, FileError):
        raise DeployError(f"{archive}: is not a complete backup of coterie backup create") from None
    if {name: hashlib.sha256(content).hexdigest() for name, (content, _) in found.items()} != manifest:
        raise DeployError(f"{archive}: is damaged: a file has another content than when it was copied")
    for path in map(Path, found):
        if ".." in path.parts or not path.is_absolute():
            raise DeployError(f"{archive}: contains {printable(path)}, and a backup has absolute paths without ..")
    return found
