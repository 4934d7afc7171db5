"""The keys with which a client takes part in masked rounds, and how it knows those of others.

A deployed client has a long-term X25519 key in its state folder, with which others seal boxes for it. It signs this
key, and what it says in a round, by the key of its node. The roster says which client a node's key is, so that a server
cannot hand out keys of its own. Simulated clients have keys that the engine makes.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from coterie.client.state import ClientError
from coterie.deploy.errors import DeployError
from coterie.deploy.node import NodeConfig
from coterie.deploy.roster import SEEN_FILE, Roster, authority_beside, fingerprint, read_newest
from coterie.deploy.signatures import read_private_key
from coterie.files import FileError, open_private, private_folder, read_bytes, write_atomic
from coterie.secure.keys import KEY_BYTES, derive
from coterie.wire.masked import SignedKey

_PURPOSE = b"coterie masked round\n"


class MaskingKeys(Protocol):
    """The keys of one client, and what it knows of others."""

    @property
    def box(self) -> X25519PrivateKey:
        """Its long-term key."""

    @property
    def node(self) -> bytes:
        """Public key of its node."""

    def sign(self, content: bytes) -> bytes:
        """Return a signature by the node's key."""

    def is_node_of(self, client: int, node: bytes) -> bool:
        """Whether a public key is that of a client's node."""

    def is_signed(self, node: bytes, content: bytes, signature: bytes) -> bool:
        """Whether a signature is by the key of a node."""


@dataclass(frozen=True)
class NodeKeys:
    """The keys of a deployed client.

    Attributes:
        box: X25519 key in its state folder.
        key: of its node, ECDSA.
        roster: which client each node is.
    """

    box: X25519PrivateKey = field(repr=False)
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    roster: Roster = field(repr=False)

    @classmethod
    def of(cls, node: NodeConfig) -> NodeKeys | None:
        """Return the keys of a node configuration; None without a roster, a key or a state folder.

        Raises:
            DeployError: a file of these cannot be used, or the roster says that the key is of another client.
        """
        if node.roster is None or node.key is None or node.state_dir is None:
            return None
        authority = authority_beside(Path(node.roster), node.authority)
        roster = read_newest(Path(node.roster), authority, Path(node.state_dir) / SEEN_FILE)
        keys = cls(_box_key(Path(node.state_dir), node.client_id), read_private_key(Path(node.key)), roster)
        if not keys.is_node_of(node.client_id, keys.node):
            raise DeployError(f"the roster does not say that the key {node.key} is of client {node.client_id}")
        return keys

    @property
    def node(self) -> bytes:
        """See :class:`MaskingKeys`."""
        return self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, content: bytes) -> bytes:
        """See :class:`MaskingKeys`."""
        return self.key.sign(_PURPOSE + content, ec.ECDSA(hashes.SHA384()))

    def is_node_of(self, client: int, node: bytes) -> bool:
        """See :class:`MaskingKeys`; an entry that has expired does not count."""
        key = _public_key(node)
        if key is None:
            return False
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        try:
            return self.roster.member(fingerprint(pem)).client == client
        except DeployError:
            return False

    def is_signed(self, node: bytes, content: bytes, signature: bytes) -> bool:
        """See :class:`MaskingKeys`."""
        key = _public_key(node)
        if key is None:
            return False
        try:
            key.verify(signature, _PURPOSE + content, ec.ECDSA(hashes.SHA384()))
        except (InvalidSignature, ValueError):
            return False
        return True


@lru_cache(maxsize=4096)
def _public_key(node: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        key = load_der_public_key(node)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def _box_key(folder: Path, client_id: int) -> X25519PrivateKey:
    """Return the long-term key in a state folder, made at the first start.

    Raises:
        DeployError: it cannot be read or written, or is damaged.
    """
    path = folder / f"client-{client_id}.box-key"
    try:
        private_folder(folder)
        with open_private(path.with_name(f"{path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                write_atomic(path, secrets.token_bytes(KEY_BYTES))
            content = read_bytes(path)
    except (OSError, FileError) as error:
        raise DeployError(f"{path} cannot be used: {error}") from None
    if len(content) != KEY_BYTES:
        raise DeployError(f"{path} is damaged: remove it, and a new key is made")
    return X25519PrivateKey.from_private_bytes(content)


@dataclass(frozen=True)
class SimulatedKeys:
    """The keys of a simulated client, which other processes can receive.

    Attributes:
        secret: from which both keys follow.
        nodes: public key of every client.
    """

    secret: bytes = field(repr=False)
    nodes: Mapping[int, bytes] = field(repr=False)

    @property
    def box(self) -> X25519PrivateKey:
        """See :class:`MaskingKeys`."""
        return X25519PrivateKey.from_private_bytes(derive(self.secret, b"box key"))

    @property
    def node(self) -> bytes:
        """See :class:`MaskingKeys`."""
        return _signing_key(self.secret).public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        """See :class:`MaskingKeys`."""
        return _signing_key(self.secret).sign(_PURPOSE + content)

    def is_node_of(self, client: int, node: bytes) -> bool:
        """See :class:`MaskingKeys`."""
        return self.nodes.get(client) == node

    def is_signed(self, node: bytes, content: bytes, signature: bytes) -> bool:
        """See :class:`MaskingKeys`."""
        try:
            Ed25519PublicKey.from_public_bytes(node).verify(signature, _PURPOSE + content)
        except (InvalidSignature, ValueError):
            return False
        return True


@lru_cache(maxsize=4096)
def _signing_key(secret: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derive(secret, b"signing key"))


def simulated_keys(clients: Sequence[int]) -> dict[int, SimulatedKeys]:
    """Return fresh keys of simulated clients, which know each other."""
    made = {client: secrets.token_bytes(KEY_BYTES) for client in clients}
    nodes = {client: _signing_key(secret).public_key().public_bytes_raw() for client, secret in made.items()}
    return {client: SimulatedKeys(secret, nodes) for client, secret in made.items()}


def signed_key(keys: MaskingKeys, client_id: int) -> SignedKey:
    """Return a client's long-term public key, signed."""
    box = keys.box.public_key().public_bytes_raw()
    return SignedKey(keys.node, box, keys.sign(_box_said(client_id, box)))


def checked_boxes(keys: MaskingKeys, client_id: int, of_clients: Mapping[int, SignedKey]) -> dict[int, bytes]:
    """Return the long-term public keys of a cohort, each signed by the node that the roster names.

    Raises:
        ClientError: one is not, or that of this client is another one than its own.
    """
    for client, signed in of_clients.items():
        if not keys.is_node_of(client, signed.node):
            raise ClientError(f"client {client_id} rejects the request: its roster has another key of client {client}")
        if not keys.is_signed(signed.node, _box_said(client, signed.box), signed.signature):
            raise ClientError(f"client {client_id} rejects the request: the key of client {client} is not signed")
    mine = of_clients.get(client_id)
    if mine is None or mine.box != keys.box.public_key().public_bytes_raw():
        raise ClientError(f"client {client_id} rejects the request: it states another key of this client")
    return {client: signed.box for client, signed in of_clients.items()}


def _box_said(client: int, box: bytes) -> bytes:
    return b"box key" + str(client).encode() + b":" + box
