"""The box keys of a client: others seal shares for it in one masked round, whose key is forgotten afterwards.

The public key of a later round travels with every reply to step 1 and with the identity of the client. A private key is
removed once the boxes of its round are open, so that a stolen state folder opens no recorded round.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.files import FileError, open_private, private_folder, read_bytes, write_atomic
from coterie.privacy.secure_aggregation.errors import SecureError
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, private_key


class BoxKeys(Protocol):
    """Private keys of a client for the boxes of masked rounds."""

    def announced(self) -> X25519PrivateKey:
        """Return the key of the client's next round."""

    def use(self, public: bytes) -> X25519PrivateKey:
        """Return the private key of a public one, for a round that is opened; announce another key from now on.

        Raises:
            SecureError: the client has not announced the key, or has used it.
        """

    def forget(self, public: bytes) -> None:
        """Remove a key whose boxes are open."""


@dataclass(frozen=True)
class StoredBoxKeys:
    """Keys in a private file of the state folder: the announced one, and that of a round whose boxes are closed.

    Attributes:
        path: Path of the file.
    """

    path: Path

    def announced(self) -> X25519PrivateKey:
        """See :class:`BoxKeys`."""
        with self._lock():
            keys = self._read() or [X25519PrivateKey.generate()]
            self._write(keys)
            return keys[-1]

    def use(self, public: bytes) -> X25519PrivateKey:
        """See :class:`BoxKeys`; earlier keys are removed."""
        with self._lock():
            keys = self._read()
            numbers = [number for number, key in enumerate(keys) if _public(key) == public]
            if not numbers:
                raise SecureError("the box key is used, or not of this client: ask for its identity again")
            following = keys[numbers[0] + 1 :] or [X25519PrivateKey.generate()]
            self._write([keys[numbers[0]], *following])
            return keys[numbers[0]]

    def forget(self, public: bytes) -> None:
        """See :class:`BoxKeys`."""
        with self._lock():
            self._write([key for key in self._read() if _public(key) != public])

    @contextmanager
    def _lock(self) -> Iterator[None]:
        private_folder(self.path.parent)
        with open_private(self.path.with_name(f"{self.path.name}.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> list[X25519PrivateKey]:
        """Return the keys, the announced one last; a damaged file has none, since its keys are for later rounds."""
        try:
            content = read_bytes(self.path)
        except FileError:
            return []
        parts = [content[start : start + KEY_BYTES] for start in range(0, len(content), KEY_BYTES)]
        whole = all(len(part) == KEY_BYTES for part in parts)
        return [X25519PrivateKey.from_private_bytes(part) for part in parts] if whole else []

    def _write(self, keys: Sequence[X25519PrivateKey]) -> None:
        content = b"".join(key.private_bytes_raw() for key in keys)
        if not self.path.exists() or read_bytes(self.path) != content:
            write_atomic(self.path, content)


@dataclass(frozen=True)
class SimulatedBoxKeys:
    """One key of a simulated client for all rounds: its engine knows all secrets anyway.

    Attributes:
        secret: Secret from which the key follows.
    """

    secret: bytes = field(repr=False)

    def announced(self) -> X25519PrivateKey:
        """See :class:`BoxKeys`."""
        return private_key(self.secret, b"box key")

    def use(self, public: bytes) -> X25519PrivateKey:
        """See :class:`BoxKeys`."""
        return self.announced()

    def forget(self, public: bytes) -> None:
        """See :class:`BoxKeys`."""


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()
