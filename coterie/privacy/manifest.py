"""SHA256SUMS of a run folder: which certificate, ledger and models belong together; its signature binds them.

The file has the format of ``sha256sum``. SHA256SUMS.sig is an Ed25519 signature of its bytes. The card inside a model
also holds the SHA-256 of the certificate, and the number of the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.files import FileError, read_bytes

#: Names of the file and of its signature.
MANIFEST, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
CERTIFICATE, LEDGER, MODELS = "privacy.json", "ledger.jsonl", "models"
_LINE = re.compile(
    rf"([0-9a-f]{{64}})  ({CERTIFICATE}|{LEDGER}|{MODELS}/[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,200}})", re.ASCII
)
_NUMBERED = re.compile(r"cluster-(\d+)\.safetensors", re.ASCII)
_MAX_BYTES = 1 << 24


def manifest_of(run: Path) -> bytes:
    """Return the contents of SHA256SUMS for the certificate, the ledger and the models of a finished run.

    Raises:
        FileError: a file cannot be read.
    """
    names = [CERTIFICATE, LEDGER, *_models(run)]
    return "".join(f"{_digest(run / name)}  {name}\n" for name in names).encode()


def read_manifest(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in SHA256SUMS, by name.

    Raises:
        FileError: it cannot be read, it or its signature is a link, or a line is not of its format.
    """
    path = run / MANIFEST
    for name in (MANIFEST, SIGNATURE):
        if (run / name).is_symlink():
            raise FileError(f"{run / name} is a symbolic link: put the file itself there")
    content = read_bytes(path, _MAX_BYTES)
    digests: dict[str, str] = {}
    for line in content.decode("latin-1").removesuffix("\n").split("\n"):
        parts = _LINE.fullmatch(line)
        if parts is None or parts[2] in digests:
            raise FileError(f"{path} is damaged: no line of it may be {line[:80]!r}")
        digests[parts[2]] = parts[1]
    if not {CERTIFICATE, LEDGER} < digests.keys():
        raise FileError(f"{path} is damaged: it must name {CERTIFICATE}, {LEDGER} and models")
    return digests


def manifest_problems(run: Path) -> list[str]:
    """Return in which files a run folder differs from its SHA256SUMS; empty if in none, or without that file.

    A model must also name the certificate of the folder in its card, and its own number.
    """
    if not os.path.lexists(run / MANIFEST):
        return list(_foreign_models(run))
    try:
        digests = read_manifest(run)
    except FileError as error:
        return [str(error)]
    problems = [f"{name} is not in {MANIFEST}" for name in _models(run) if name not in digests]
    for name, digest in digests.items():
        try:
            if _digest(run / name) != digest:
                problems.append(f"{name} has another SHA-256 than in {MANIFEST}")
        except FileError as error:
            problems.append(str(error))
    return problems or list(_foreign_models(run))


def card_of(path: Path) -> dict[str, Any]:
    """Return the metadata inside a file of models, without its tensors; empty if it has none.

    Raises:
        FileError: the file is damaged.
    """
    size = int.from_bytes(read_bytes(path, 8), "little")
    try:
        metadata = json.loads(read_bytes(path, 8 + size)[8:]).get("__metadata__", {})
        card = json.loads(metadata.get("about", "{}"))
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        raise FileError(f"{path} is damaged: its metadata cannot be read") from None
    if not isinstance(card, Mapping):
        raise FileError(f"{path} is damaged: its metadata are not an object")
    return dict(card)


def _foreign_models(run: Path) -> Iterator[str]:
    """Yield which models are not those of the run's certificate, or have the number of another one."""
    digest = _digest(run / CERTIFICATE) if os.path.lexists(run / CERTIFICATE) else ""
    for name in _models(run) if digest else ():
        numbered = _NUMBERED.fullmatch(Path(name).name)
        try:
            card = card_of(run / name) if numbered else {}
            if numbered and card.get("certificate", digest) != digest:
                yield f"{name} is a model of a run with another {CERTIFICATE}, by its card"
            elif numbered and card.get("cluster", int(numbered[1])) != int(numbered[1]):
                yield f"{name} is the model of cluster {card['cluster']!r:.40}, by its card"
        except FileError as error:
            yield str(error)


def _models(run: Path) -> list[str]:
    """Return the names of all files in the folder of models, without those that a crash left unfinished."""
    folder = run / MODELS
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(f"{MODELS}/{file.name}" for file in files if file.suffix != ".tmp")


def _digest(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size that is in this folder itself.

    Raises:
        FileError: it cannot be read, or is a link.
    """
    if path.is_symlink() or (path.parent.name == MODELS and path.parent.is_symlink()):
        raise FileError(f"{path} is, or is in, a symbolic link: put the file itself there")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError(f"{path} cannot be read: it is not a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
