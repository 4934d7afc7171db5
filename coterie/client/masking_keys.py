"""The keys with which a client takes part in masked rounds, and how it knows those of others.

A client has two long-term keys, which follow from a secret in its state folder: by one, others seal boxes for it; by
the other, it signs what it says in a round. The key of its node signs both once, when the client is started with it, so
that the processes that train need no access to it. The roster says which client a node's key is, so that a server
cannot hand out keys of its own. Simulated clients have keys that the engine makes.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from flwr.common.logger import log

from coterie.client.state import ClientError
from coterie.deploy.errors import DeployError
from coterie.deploy.node import NodeConfig
from coterie.deploy.roster import SEEN_FILE, Roster, authority_beside, fingerprint, read_newest
from coterie.deploy.signatures import read_private_key
from coterie.files import FileError, open_private, private_folder, read_bytes, read_object, write_atomic
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, derive
from coterie.wire.masked import SignedKey

_PURPOSE = b"coterie masked round\n"


class Vouching(Protocol):
    """Who says which client the long-term keys are of."""

    def vouches(self, client: int, signed: SignedKey) -> bool:
        """Whether these keys are of a client."""


@dataclass(frozen=True)
class NodesOfRoster:
    """Keys are those that a node has signed which the roster names, and whose entry has not expired."""

    roster: Roster = field(repr=False)

    def vouches(self, client: int, signed: SignedKey) -> bool:
        """See :class:`Vouching`."""
        node = _fingerprint(signed.node)
        if node is None or len(signed.public) != 2 * KEY_BYTES:
            return False
        try:
            if self.roster.member(node).client != client:
                return False
        except DeployError:
            return False
        return _has_signed(signed.node, _keys_said(client, signed.public), signed.signature)


@lru_cache(maxsize=4096)
def _fingerprint(node: bytes) -> str | None:
    """Return the fingerprint of a node's public key in DER, as rosters state it; None if it is no such key."""
    key = _node_key(node)
    return None if key is None else fingerprint(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


@lru_cache(maxsize=4096)
def _has_signed(node: bytes, content: bytes, signature: bytes) -> bool:
    """Whether a signature of this content is by a node's key; every step of a round asks for the same ones."""
    key = _node_key(node)
    try:
        if key is not None:
            key.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return key is not None


def _node_key(node: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        key = load_der_public_key(node)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def _keys_said(client: int, public: bytes) -> bytes:
    return _PURPOSE + b"keys" + str(client).encode() + b":" + public


@dataclass(frozen=True)
class SimulatedNodes:
    """Keys are those that the engine has made, by client."""

    publics: Mapping[int, bytes] = field(repr=False)

    def vouches(self, client: int, signed: SignedKey) -> bool:
        """See :class:`Vouching`."""
        return self.publics.get(client) == signed.public


@dataclass(frozen=True)
class MaskingKeys:
    """The keys of one client, which other processes can receive.

    Attributes:
        secret: from which both private keys follow.
        signed: both public keys, signed.
        nodes: says which keys others have.
    """

    secret: bytes = field(repr=False)
    signed: SignedKey
    nodes: Vouching = field(repr=False)

    @classmethod
    def of(cls, node: NodeConfig) -> MaskingKeys | None:
        """Return the keys of a node configuration; None without a roster or a state folder.

        The secret is made at the first start. The keys are signed if that is missing, or not by the node that the
        roster names now.

        Raises:
            DeployError: a file cannot be used; or the keys are not signed, and the key of the node is not this
                client's in the roster, or not there.
        """
        if node.roster is None or node.state_dir is None:
            return None
        folder, client = Path(node.state_dir), node.client_id
        authority = authority_beside(Path(node.roster), node.authority)
        nodes = NodesOfRoster(read_newest(Path(node.roster), authority, folder / SEEN_FILE))
        path = folder / f"client-{client}.masking-key"
        try:
            private_folder(folder)
            with open_private(path.with_name(f"{path.name}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                secret = _secret(path)
                signed = _read_signed(path, _public_keys(secret))
                if signed is None or not nodes.vouches(client, signed):
                    signed = _sign(node, _public_keys(secret))
                    if not nodes.vouches(client, signed):
                        raise DeployError(f"the roster does not say that the key {node.key} is of client {client}")
                    _write_signed(path, signed)
        except (OSError, FileError) as error:
            raise DeployError(f"{path} cannot be used: {error}") from None
        return cls(secret, signed, nodes)

    @property
    def box(self) -> X25519PrivateKey:
        """The key with which boxes for the client are opened."""
        return _private_keys(self.secret)[0]

    def sign(self, content: bytes) -> bytes:
        """Return a signature of what the client says in a round."""
        return _private_keys(self.secret)[1].sign(_PURPOSE + content)


def keys_or_none(node: NodeConfig) -> MaskingKeys | None:
    """Return the keys of a node configuration; None without them, for a reason that is in the client's own log."""
    try:
        return MaskingKeys.of(node)
    except DeployError as error:
        log(WARNING, "client %s takes part in no masked round: %s", node.client_id, error)
        return None


@lru_cache(maxsize=4096)
def _private_keys(secret: bytes) -> tuple[X25519PrivateKey, Ed25519PrivateKey]:
    box, signing = derive(secret, b"box key"), derive(secret, b"signing key")
    return X25519PrivateKey.from_private_bytes(box), Ed25519PrivateKey.from_private_bytes(signing)


def _public_keys(secret: bytes) -> bytes:
    return b"".join(key.public_key().public_bytes_raw() for key in _private_keys(secret))


def _secret(path: Path) -> bytes:
    if not path.exists():
        write_atomic(path, secrets.token_bytes(KEY_BYTES))
    secret = read_bytes(path)
    if len(secret) != KEY_BYTES:
        raise DeployError(f"{path} is damaged: remove it, and a new key is made")
    return secret


def _read_signed(path: Path, public: bytes) -> SignedKey | None:
    """Return the signed keys beside a secret; None if there are none, or of another secret."""
    try:
        entry = read_object(path.with_name(f"{path.name}.signed"))
        return SignedKey(bytes.fromhex(entry["node"]), public, bytes.fromhex(entry["signature"]))
    except (FileError, KeyError, TypeError, ValueError):
        return None


def _write_signed(path: Path, signed: SignedKey) -> None:
    entry = {"node": signed.node.hex(), "signature": signed.signature.hex()}
    write_atomic(path.with_name(f"{path.name}.signed"), json.dumps(entry).encode())


def _sign(node: NodeConfig, public: bytes) -> SignedKey:
    """Return public keys, signed by the key of the node.

    Raises:
        DeployError: it cannot be read.
    """
    if node.key is None:
        raise DeployError(
            "the keys for masked rounds are not signed: run coterie masking-keys, or start it by coterie client"
        )
    key = read_private_key(Path(node.key))
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SignedKey(der, public, key.sign(_keys_said(node.client_id, public), ec.ECDSA(hashes.SHA384())))


def simulated_keys(clients: Sequence[int]) -> dict[int, MaskingKeys]:
    """Return fresh keys of simulated clients, which know each other."""
    made = {client: secrets.token_bytes(KEY_BYTES) for client in clients}
    publics = {client: _public_keys(secret) for client, secret in made.items()}
    nodes = SimulatedNodes(publics)
    return {
        client: MaskingKeys(secret, SignedKey(b"simulated", publics[client], b"simulated"), nodes)
        for client, secret in made.items()
    }


def check_keys(keys: MaskingKeys, client_id: int, of_clients: Mapping[int, SignedKey]) -> None:
    """Check that the keys of a cohort are those of its clients.

    Raises:
        ClientError: some are not, or those of this client are others than its own.
    """
    for client, signed in of_clients.items():
        if not keys.nodes.vouches(client, signed):
            raise ClientError(
                f"client {client_id} rejects the request: its roster does not vouch for the keys of client {client}"
            )
    if client_id in of_clients and of_clients[client_id].public != keys.signed.public:
        raise ClientError(f"client {client_id} rejects the request: it states other keys of this client")


@lru_cache(maxsize=1 << 16)
def is_signed(signing: bytes, content: bytes, signature: bytes) -> bool:
    """Whether a client has said something in a round; simulated clients of a process verify the same signatures.

    Args:
        signing: its Ed25519 key.
        content: what it says.
        signature: by this key.
    """
    try:
        Ed25519PublicKey.from_public_bytes(signing).verify(signature, _PURPOSE + content)
    except (InvalidSignature, ValueError):
        return False
    return True
