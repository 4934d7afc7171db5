"""The keys with which a client takes part in masked rounds, and how it knows those of others.

A client has one long-term key, in its state folder, with which it signs in masked rounds, its box keys
(client/box_keys.py) included. The key of its node signs the public one once, when the client starts, so that the
processes that train need no access to the key of the node. The roster states the client of every node's key, so that a
server cannot hand out keys of its own. Simulated clients have keys that the engine makes.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from flwr.common.logger import log

from coterie.client.box_keys import BoxKeys, SimulatedBoxKeys, StoredBoxKeys
from coterie.client.state import ClientError
from coterie.files import FileError, open_private, private_folder, read_bytes, read_object, write_atomic
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, derive
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.site.roster import SEEN_FILE, Roster, authority_beside, fingerprint, read_newest
from coterie.site.signatures import read_private_key
from coterie.wire.masked import PURPOSE, SignedKey, box_content


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
        if node is None or len(signed.signing) != KEY_BYTES:
            return False
        try:
            if self.roster.member(node).client != client:
                return False
        except DeployError:
            return False
        return _has_signed(signed.node, _key_content(client, signed.signing), signed.signature)


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


def _key_content(client: int, public: bytes) -> bytes:
    return PURPOSE + b"signing key" + str(client).encode() + b":" + public


@dataclass(frozen=True)
class SimulatedNodes:
    """Keys are those that the engine has made, by client."""

    publics: Mapping[int, bytes] = field(repr=False)

    def vouches(self, client: int, signed: SignedKey) -> bool:
        """See :class:`Vouching`."""
        return self.publics.get(client) == signed.signing


@dataclass(frozen=True)
class MaskingKeys:
    """The keys of one client, which other processes can receive.

    Attributes:
        client: Id of the client.
        secret: Secret from which the signing key follows.
        node: Public key of the node, DER.
        signature: Signature of the public signing key by the node.
        boxes: Box keys of the client.
        nodes: States the keys of other clients.
    """

    client: int
    secret: bytes = field(repr=False)
    node: bytes
    signature: bytes
    boxes: BoxKeys = field(repr=False)
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
                if not path.exists():
                    write_atomic(path, secrets.token_bytes(KEY_BYTES))
                secret = read_bytes(path)
                if len(secret) != KEY_BYTES:
                    raise DeployError(f"{path} is damaged: remove it, and a new key is made")
                boxes = StoredBoxKeys(path.with_name(f"client-{client}.box-keys"))
                keys = cls(client, secret, *_read_signature(path), boxes, nodes)
                if not nodes.vouches(client, keys.signed):
                    der, signature = _sign(node, keys.signing)
                    keys = replace(keys, node=der, signature=signature)
                    if not nodes.vouches(client, keys.signed):
                        raise DeployError(f"the roster does not say that the key {node.key} is of client {client}")
                    entry = {"node": der.hex(), "signature": signature.hex()}
                    write_atomic(path.with_name(f"{path.name}.signed"), json.dumps(entry).encode())
        except (OSError, FileError) as error:
            raise DeployError(f"{path} cannot be used: {error}") from None
        return keys

    @property
    def signing(self) -> bytes:
        """The public key with which others verify signatures of the client."""
        return _signing_key(self.secret).public_key().public_bytes_raw()

    @property
    def signed(self) -> SignedKey:
        """The public keys, with the box key that is announced now."""
        box = self.boxes.announced().public_key().public_bytes_raw()
        box_signature = self.sign(box_content(self.client, box))
        return SignedKey(self.node, self.signing, self.signature, box, box_signature)

    def sign(self, content: bytes) -> bytes:
        """Return a signature of this content for masked rounds."""
        return _signing_key(self.secret).sign(PURPOSE + content)


def keys_or_none(node: NodeConfig) -> MaskingKeys | None:
    """Return the keys of a node configuration; None without them, for a reason that is in the client's own log."""
    try:
        return MaskingKeys.of(node)
    except DeployError as error:
        log(WARNING, "client %s takes part in no masked round: %s", node.client_id, error)
        return None


@lru_cache(maxsize=4096)
def _signing_key(secret: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derive(secret, b"signing key"))


def _read_signature(path: Path) -> tuple[bytes, bytes]:
    """Return the key of the node and its signature beside a secret; empty without a file that can be read."""
    try:
        entry = read_object(path.with_name(f"{path.name}.signed"))
        return bytes.fromhex(entry["node"]), bytes.fromhex(entry["signature"])
    except (FileError, KeyError, TypeError, ValueError):
        return b"", b""


def _sign(node: NodeConfig, public: bytes) -> tuple[bytes, bytes]:
    """Return the public key of the node, and its signature of a public signing key.

    Raises:
        DeployError: the key of the node cannot be read.
    """
    if node.key is None:
        raise DeployError("the keys for masked rounds are not signed: start the client by coterie client")
    key = read_private_key(Path(node.key))
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return der, key.sign(_key_content(node.client_id, public), ec.ECDSA(hashes.SHA384()))


def simulated_keys(clients: Sequence[int]) -> dict[int, MaskingKeys]:
    """Return fresh keys of simulated clients, which know each other."""
    made = {client: secrets.token_bytes(KEY_BYTES) for client in clients}
    publics = {client: _signing_key(secret).public_key().public_bytes_raw() for client, secret in made.items()}
    nodes, name = SimulatedNodes(publics), b"simulated"
    return {
        client: MaskingKeys(client, secret, name, name, SimulatedBoxKeys(secret), nodes)
        for client, secret in made.items()
    }


def check_keys(keys: MaskingKeys, of_clients: Mapping[int, SignedKey]) -> None:
    """Check that the keys of a cohort are those of its clients.

    Raises:
        ClientError: some are not, or those of this client are others than its own.
    """
    for client, signed in of_clients.items():
        if not keys.nodes.vouches(client, signed):
            raise ClientError(
                f"client {keys.client} rejects the request: its roster does not vouch for the keys of client {client}"
            )
        if not signed.has_signed_box(client):
            raise ClientError(f"client {keys.client} rejects the request: client {client} has not signed its box key")
    if keys.client in of_clients and of_clients[keys.client].signing != keys.signing:
        raise ClientError(f"client {keys.client} rejects the request: it states other keys of this client")
