"""Fingerprints of the data of a simulation, by which a resumed run knows the data with which it began."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coterie.datasets.client_data import find
from coterie.datasets.sources import DataError, Source


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files of a folder, as 64 hexadecimal digits.

    Files and folders whose names begin with a dot do not count: file managers write them.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        if not path.is_dir():
            return _digest(path)
        lines = sorted(f"{_digest(file)} {file.relative_to(path)}" for file in _files(path))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def source_fingerprint(source: Source) -> str:
    """Return the SHA-256 of the arrays of a data set, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in (source.train_x, source.train_y, source.test_x, source.test_y):
        digest.update(f"{array.dtype} {array.shape}".encode())
        if array.size:
            digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def fingerprints(folder: str | Path, clients: int) -> dict[str, str]:
    """Return the fingerprint of the data of every client of a simulation, by the name of its file or folder.

    Clients without data are left out.

    Raises:
        DataError: the data of a client cannot be read, or are in two formats.
    """
    home = Path(folder).expanduser()
    paths = (find(home, f"client-{client}") for client in range(clients))
    return {path.name: fingerprint(path) for path in paths if path is not None}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder; each folder once, since links may form a circle."""
    seen = set[str]()
    for name, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(name))
        folders[:] = [
            below
            for below in folders
            if not below.startswith(".") and os.path.realpath(os.path.join(name, below)) not in seen
        ]
        yield from (Path(name, file) for file in files if not file.startswith("."))
