"""The operator's signing key: Ed25519 in PEM, by which others know that what a run released is the operator's."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from coterie.site.errors import DeployError
from coterie.site.signatures import check_private, read_file

#: Names of the files of the key and of its public part, beside ca.key.
OPERATOR_KEY, OPERATOR_PUBLIC = "operator.key", "operator.pub"
_MAKE = "coterie certs makes operator.key and operator.pub"


def new_operator_key() -> dict[str, bytes]:
    """Return the contents of both files of a new key, by name."""
    key = Ed25519PrivateKey.generate()
    return {
        OPERATOR_KEY: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        OPERATOR_PUBLIC: public_pem(key.public_key()),
    }


def read_operator_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key given as ``--key``.

    Raises:
        DeployError: it cannot be read, others can read it, or it is no Ed25519 key without a passphrase.
    """
    content = read_file("--key", path)
    check_private("--key", path)
    try:
        key = load_pem_private_key(content, None)
    except TypeError:
        raise DeployError(f"--key {path}: is protected by a passphrase: give a key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise DeployError(f"--key {path}: not an Ed25519 private key in PEM format: {_MAKE}")
    return key


def read_operator_public(path: Path) -> Ed25519PublicKey:
    """Read the public key given as ``--public-key``.

    Raises:
        DeployError: it cannot be read, or is no Ed25519 public key.
    """
    try:
        key = load_pem_public_key(read_file("--public-key", path))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise DeployError(f"--public-key {path}: not an Ed25519 public key in PEM format: {_MAKE}")
    return key


def public_pem(key: Ed25519PublicKey) -> bytes:
    """Return a public key in PEM format."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def operator_fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key in DER format, hexadecimal: what OpenSSL and sha256sum give, too."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def verifies(key: Ed25519PublicKey, content: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` is one of ``content`` by the private key of ``key``."""
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True
