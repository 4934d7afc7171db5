"""The app that a run sends to clients, a Flower App Bundle (FAB): its identity and trusted signing keys."""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from coterie.site.errors import DeployError

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Bundle:
    """A FAB: ``hash`` is SHA-256 of its bytes, ``id`` PUBLISHER/NAME, ``files`` maps each path to its SHA-256."""

    hash: str
    id: str
    version: str
    files: Mapping[str, str]


def bundle(path: Path) -> Bundle:
    """Return the FAB that ``flwr run PATH`` sends, or that of a file.

    Args:
        path: folder of a Flower app, such as a checkout of Coterie, or a ``.fab`` file.

    Raises:
        DeployError: it is neither.
    """
    from flwr.cli.build import build_fab_from_disk

    path = path.expanduser()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Flower's own imports
            content = build_fab_from_disk(path) if path.is_dir() else path.read_bytes()
        return describe(content)
    except OSError as error:
        raise DeployError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # of click, tomllib, zipfile and Flower's own checks
        reason = " ".join(str(error).split())
        raise DeployError(f"{path}: not a valid Flower app: {reason or type(error).__name__}") from None


def describe(content: bytes) -> Bundle:
    """Describe the contents of a FAB without unpacking it to disk."""
    from flwr.common.config import get_metadata_from_config

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in sorted(archive.namelist())}
        name, version = get_metadata_from_config(tomllib.loads(archive.read("pyproject.toml").decode()))
    return Bundle(hashlib.sha256(content).hexdigest(), name, version, files)


def checked_hash(text: str) -> str:
    """Return ``text`` in lower case. Raises :class:`DeployError` if it is not a hexadecimal SHA-256."""
    if not _HASH.fullmatch(text.lower()):
        raise DeployError(f"--fab-hash {text}: must be 64 hexadecimal digits, as printed by coterie fab-hash")
    return text.lower()


def trusted_entities(path: Path) -> dict[str, str]:
    """Read a YAML file of public keys by id, the format of ``flower-supernode --trusted-entities``.

    Flower skips verification if the file has no keys, so an empty file is an error here.

    Raises:
        DeployError: the file cannot be read, has no key, or has a key that is not Ed25519 in OpenSSH's format.
    """
    where = f"--trusted-entities {path}:"
    try:
        keys = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise DeployError(f"{where} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise DeployError(f"{where} not valid YAML; expected one line KEY-ID: ssh-ed25519 ... per key") from None
    if not isinstance(keys, dict) or not keys:
        raise DeployError(f"{where} contains no key; expected one line KEY-ID: ssh-ed25519 ... per key")
    for name, key in keys.items():
        try:
            public = load_ssh_public_key(key.encode()) if isinstance(name, str) and isinstance(key, str) else None
        except (ValueError, UnsupportedAlgorithm):
            public = None
        if not isinstance(public, ed25519.Ed25519PublicKey):
            raise DeployError(f"{where} {name!r} is not an Ed25519 public key in OpenSSH format")
    return keys
