"""Bundle of a site: the one file by which it joins a federation, opened by a passphrase that it gets apart from it.

It holds the key and the certificate of a node, ca.crt, the roster and the address of the SuperLink. The first line is a
JSON object that everybody can read: format, number of the node, when the certificate expires, and salt and nonce of the
encryption (AES-256-GCM, with the line as associated data, under a key of Scrypt, RFC 7914). The rest is encrypted.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import tempfile
from base64 import b32encode
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from coterie.fields import SIZE, Fields, Length
from coterie.files import FileError, parse_object, private_folder, read_bytes, write_new
from coterie.site.errors import DeployError
from coterie.site.roster import ROSTER_FILE

#: Environment variable of the passphrase, for starts without a terminal.
PASSPHRASE = "COTERIE_PASSPHRASE"
#: Folder of an opened bundle, in the state folder of a client.
OPENED = "site"
_FORMAT = 1
_LARGEST = 1 << 20
_OPENED_FROM, _SUPERLINK = "bundle.sha256", "superlink"


@dataclass(frozen=True, kw_only=True)
class Header(Fields):
    """What everybody can read of a bundle.

    Attributes:
        coterie_bundle: version of the format.
        node: number of the node, and id of the client.
        expires: when the node's certificate does, in ISO 8601.
        salt: of the key, in hexadecimal.
        nonce: of the encryption, in hexadecimal.
    """

    error = DeployError

    coterie_bundle: Annotated[int, SIZE]
    node: Annotated[int, SIZE]
    expires: Annotated[str, Length(40)]
    salt: Annotated[str, Length(32)]
    nonce: Annotated[str, Length(24)]


@dataclass(frozen=True)
class Site:
    """An opened bundle.

    Attributes:
        folder: of its files, named as in the folder of `coterie certs`.
        node: number of the node, and id of the client.
    """

    folder: Path
    node: int

    @property
    def key(self) -> Path:
        """Private key of the node; its certificate lies beside it."""
        return self.folder / f"node-{self.node}.key"

    @property
    def authority(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.crt"

    @property
    def roster(self) -> Path:
        """Who is who."""
        return self.folder / ROSTER_FILE

    @property
    def superlink(self) -> str:
        """HOST:PORT of the SuperLink."""
        return (self.folder / _SUPERLINK).read_text()


def seal(pki: Path, node: int, superlink: str) -> tuple[bytes, str]:
    """Return the bundle of a node and its passphrase, which is new and kept nowhere.

    Args:
        pki: folder of `coterie certs`.
        node: number of the node.
        superlink: HOST:PORT by which the site reaches the SuperLink.

    Raises:
        DeployError: a file is missing.
    """
    try:
        files = {name: _source(pki, name).read_text() for name in _names(node)} | {_SUPERLINK: superlink}
        expires = x509.load_pem_x509_certificate(files[f"node-{node}.crt"].encode()).not_valid_after_utc
    except OSError as error:
        raise DeployError(f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError:
        raise DeployError(f"{pki}/nodes/node-{node}.crt is no certificate: renew the node with --renew-node") from None
    letters = b32encode(secrets.token_bytes(15)).decode().lower()
    passphrase = "-".join(letters[place : place + 4] for place in range(0, len(letters), 4))
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    header = Header(coterie_bundle=_FORMAT, node=node, expires=expires.isoformat(), salt=salt.hex(), nonce=nonce.hex())
    line = json.dumps(header.to_record()).encode() + b"\n"
    return line + AESGCM(_key(passphrase, salt)).encrypt(nonce, json.dumps(files).encode(), line), passphrase


def read_header(bundle: Path) -> Header:
    """Return what everybody can read of a bundle.

    Raises:
        DeployError: it is no bundle, or one of a later version.
    """
    line = read_bytes(bundle, _LARGEST).partition(b"\n")[0].decode("utf-8", "replace")
    try:
        header = Header.from_record(parse_object(line, str(bundle)))
        bytes.fromhex(header.salt + header.nonce), datetime.fromisoformat(header.expires)
    except (ValueError, FileError, DeployError):
        raise DeployError(f"{bundle} is no bundle of coterie certs --bundle") from None
    if header.coterie_bundle != _FORMAT:
        raise DeployError(f"{bundle} is of a later version of Coterie: install the version of the server")
    return header


def opened(bundle: Path, state: Path) -> Site | None:
    """Return what was opened of this very bundle before, in the state folder of its client."""
    site = Site(state / OPENED, read_header(bundle).node)
    mark = site.folder / _OPENED_FROM
    same = mark.exists() and mark.read_text() == hashlib.sha256(read_bytes(bundle, _LARGEST)).hexdigest()
    return site if same else None


def unseal(bundle: Path, passphrase: str, state: Path) -> Site:
    """Open a bundle into the state folder of its client, and replace the one that was opened before.

    Raises:
        DeployError: it has expired, the passphrase is wrong, or it was changed.
    """
    header, content = read_header(bundle), read_bytes(bundle, _LARGEST)
    if datetime.fromisoformat(header.expires) <= datetime.now(UTC):
        raise DeployError(f"{bundle} expired on {header.expires:.10}: ask the operator for a new one")
    line, _, sealed = content.partition(b"\n")
    names = (*_names(header.node), _SUPERLINK)
    try:
        key = _key(passphrase.strip().lower(), bytes.fromhex(header.salt))
        files = json.loads(AESGCM(key).decrypt(bytes.fromhex(header.nonce), sealed, line + b"\n"))
        contents = {name: files[name].encode() for name in names}
    except (InvalidTag, ValueError, KeyError):
        raise DeployError(f"{bundle} does not open: the passphrase is another one, or the file was changed") from None
    contents[_OPENED_FROM] = hashlib.sha256(content).hexdigest().encode()
    folder = state / OPENED
    try:
        private_folder(state)
        stage = Path(tempfile.mkdtemp(prefix=".site-", dir=state))
        for name, text in contents.items():
            write_new(stage / name, text)
        shutil.rmtree(folder, ignore_errors=True)
        stage.rename(folder)
    except OSError as error:
        raise DeployError(f"--state-dir {state}: cannot be written: {error.strerror}") from None
    return Site(folder, header.node)


def _names(node: int) -> tuple[str, ...]:
    return "ca.crt", ROSTER_FILE, *(f"node-{node}.{end}" for end in ("key", "crt", "tls.key"))


def _source(pki: Path, name: str) -> Path:
    return pki / "nodes" / name if name.startswith("node-") else pki / name


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt, 32, n=2**15, r=8, p=1).derive(passphrase.encode())
