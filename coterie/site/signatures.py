"""Private keys, and signatures of JSON objects: ECDSA with SHA-384, in Base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from coterie.site.errors import DeployError


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key of a node or a submitter, given as ``--key``.

    Raises:
        DeployError: it cannot be read, others can read it, or it is no ECDSA P-384 key without a passphrase.
    """
    content = read_file("--key", path)
    check_private("--key", path)
    try:
        key = load_ssh_private_key(content, None)
    except TypeError:
        raise DeployError(
            f"--key {path}: is protected by a passphrase, which a service cannot enter: create a key without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DeployError(
            f"--key {path}: not an ECDSA P-384 private key in OpenSSH format: use node-I.key of coterie certs, "
            "or ssh-keygen -t ecdsa -b 384"
        )
    return key


def check_private(option: str, path: Path) -> None:
    """Raise :class:`DeployError` if others than its owner can read the file of an option."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise DeployError(
            f"{option} {path}: mode {mode:04o} gives other users access: run chmod 600, or create a new key"
        )


def read_file(option: str, path: Path) -> bytes:
    """Read the file of an option.

    Raises:
        DeployError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DeployError(f"{option} {path}: does not exist") from None
    except OSError as error:
        raise DeployError(f"{option} {path}: cannot be read: {error.strerror}") from None


def sign(key: ec.EllipticCurvePrivateKey, purpose: str, content: Mapping[str, Any]) -> str:
    """Return a signature of an object.

    Args:
        key: signs it.
        purpose: what is signed begins with it, so that a signature for one purpose is none for another.
        content: the object, JSON-ready.
    """
    return base64.b64encode(key.sign(_signed(purpose, content), ec.ECDSA(hashes.SHA384()))).decode()


def is_signed(key: object, purpose: str, content: Mapping[str, Any], signature: object) -> bool:
    """Return whether ``signature`` is one of an object, of this purpose, by the private key of ``key``."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(signature, str):
        return False
    try:
        key.verify(base64.b64decode(signature, validate=True), _signed(purpose, content), ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _signed(purpose: str, content: Mapping[str, Any]) -> bytes:
    return f"{purpose}\n".encode() + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
