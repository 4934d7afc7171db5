"""Keys of a round: X25519 agreement, HKDF, streams of AES-256 in counter mode, and sealed boxes.

Every key is derived for one purpose in one round, so that none is used twice. All primitives are those of the package
`cryptography`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.privacy.secure_aggregation.errors import SecureError

#: Bytes of a public key.
KEY_BYTES = 32
_NONCE_BYTES = 12
_ZEROS = bytes(1 << 18)  # a block whose keystream stays in the cache

Vector = npt.NDArray[np.uint32]


def derive(secret: bytes, *purpose: bytes) -> bytes:
    """Return a 32-byte key for one purpose."""
    return HKDF(SHA256(), 32, None, _joined(purpose)).derive(secret)


def digest_of(*parts: bytes) -> bytes:
    """Return the SHA-256 of several parts, each of them after its length: other parts have another digest."""
    return hashlib.sha256(_joined(parts)).digest()


def _joined(parts: Iterable[bytes]) -> bytes:
    """Return the parts, each of them after its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def private_key(secret: bytes, *purpose: bytes) -> X25519PrivateKey:
    """Return the X25519 key of a secret for one purpose."""
    return X25519PrivateKey.from_private_bytes(derive(secret, *purpose))


def agree(private: X25519PrivateKey, other: bytes, *purpose: bytes) -> bytes:
    """Return the key that two parties share for one purpose.

    Raises:
        SecureError: the other key is malformed, or of small order.
    """
    try:
        return derive(private.exchange(X25519PublicKey.from_public_bytes(other)), *purpose)
    except ValueError:
        raise SecureError("a public key is malformed, or of small order") from None


def add_mask(vector: Vector, key: bytes, *, subtract: bool = False) -> None:
    """Add a mask to a vector in place, modulo 2^32: the AES-256 keystream of the key, which has this use alone.

    Args:
        vector: (size,) integers.
        key: Key of the mask, 32 bytes.
        subtract: Whether the mask is subtracted instead.

    Examples:
        >>> vector = np.zeros(3, np.uint32)
        >>> add_mask(vector, bytes(32))
        >>> vector.tolist()
        [2021128412, 1371693987, 3095937185]
        >>> add_mask(vector, bytes(32), subtract=True)
        >>> vector.tolist()
        [0, 0, 0]
    """
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    keystream = np.empty(len(_ZEROS) + 15, np.uint8)  # update_into requires 15 bytes more
    for start in range(0, len(vector), len(_ZEROS) // 4):
        block = vector[start : start + len(_ZEROS) // 4]
        stream.update_into(memoryview(_ZEROS)[: block.nbytes], keystream.data)
        mask = keystream[: block.nbytes].view("<u4")
        (np.subtract if subtract else np.add)(block, mask, out=block)


def is_signed(public: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether a signature of this content is by an Ed25519 key.

    Args:
        public: Public key, 32 bytes.
        content: Signed bytes.
        signature: Signature of the content.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate; `context` is authenticated too, and not contained."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, context)


def unseal(key: bytes, box: bytes, context: bytes) -> bytes:
    """Return the content of a box.

    Raises:
        SecureError: it was sealed by another key, for another purpose, or changed.

    Examples:
        >>> unseal(bytes(32), seal(bytes(32), b"share", b"1 to 2"), b"1 to 2")
        b'share'
    """
    try:
        return ChaCha20Poly1305(key).decrypt(box[:_NONCE_BYTES], box[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError):
        raise SecureError("a box cannot be opened") from None
