"""Signatures of JSON objects: ECDSA with SHA-384, in Base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec


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
