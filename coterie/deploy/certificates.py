"""Private certificate authority and its certificates. For N nodes, a folder contains:

=======================  ==================================================================================
ca.crt, ca.key           the authority; every certificate below is signed by it
server.crt, server.key   TLS of the SuperLink, for its names and this machine's
superexec.secret         what SuperLink and SuperExec share
nodes/node-I.key, .pub   ECDSA P-384 in OpenSSH's format, by which the SuperLink knows SuperNode I
nodes/node-I.crt         TLS of SuperNode I: of its own Runtime API, for ``supernode-I`` and this machine, and to the
                         SuperLink
nodes/node-I.tls.key     its key
roster.json              which client each node's key is, signed by the authority (:mod:`coterie.site.roster`)
submitters/NAME.key,     by which NAME signs requests for runs, in the same format as a node's; only if asked for
.pub
operator.key, .pub       Ed25519 in PEM, by which the operator signs what runs released
=======================  ==================================================================================

After the authority is renewed, ca.crt also contains the certificates of earlier ones, after its own.

Private files have mode 0600, public ones 0644, folders 0700, whatever the umask. All PEM, keys not encrypted.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.files import PRIVATE, write_new
from coterie.site.errors import DeployError
from coterie.site.operator_keys import OPERATOR_KEY, OPERATOR_PUBLIC, new_operator_key
from coterie.site.roster import ROSTER_FILE, SUBMITTER, Member, Roster, fingerprint, read_authorities

#: Default validity of server and node certificates in days; the authority is valid for longer, for renewals.
DAYS, AUTHORITY_DAYS = 825, 3650
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NODE_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_CLOCK_SKEW = timedelta(hours=1)  # clocks of edge machines may be slow
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS_NAME = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*(?![0-9]+$){_LABEL}")
_NODE_FILE = re.compile(r"node-(\d+)\.")
_SUBMITTER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")


@dataclass(frozen=True)
class CreatedCertificates:
    """Files written by a call: ``files`` (within ``folder``) for ``nodes`` (numbers), and their expiry dates (UTC).

    ``names`` are the names in the server certificate, if it was created; ``authority_expires`` is the expiry date of
    ca.crt, ``expires`` that of all other certificates.
    """

    folder: Path
    files: tuple[str, ...]
    nodes: tuple[int, ...]
    names: tuple[str, ...]
    expires: datetime
    authority_expires: datetime


def create(folder: Path, nodes: int, hosts: Sequence[str], days: int = DAYS) -> CreatedCertificates:
    """Create an authority with a server and nodes 0 to ``nodes`` - 1 in a new or empty ``folder``.

    ``hosts`` are the DNS names or IP addresses by which clients reach the SuperLink; its own machine is always
    included. The operation is atomic. Raises :class:`DeployError`.
    """
    if not hosts:
        raise DeployError("--host is required: the name or IP address by which clients reach the SuperLink")
    names = _with_loopback(hosts)
    if folder.exists() and not folder.is_dir():
        raise DeployError(f"{folder} is a file: choose a folder that does not exist yet")
    if folder.is_dir() and any(folder.iterdir()):
        raise DeployError(
            f"{folder} is not empty, and existing keys are never overwritten: add nodes with --more, "
            "renew the server's certificate with --renew-server, or choose another folder"
        )
    authority = _Authority.new(max(days, AUTHORITY_DAYS))
    expires = authority.end(days)
    node_files = _node_files(authority, range(nodes), expires)
    files = {
        "ca.crt": authority.certificate.public_bytes(Encoding.PEM),
        "ca.key": _pem(authority.key),
        "superexec.secret": secrets.token_hex(32).encode(),
        **authority.issue("server", "Coterie SuperLink", names, expires, key_name="server.key"),
        **node_files,
        ROSTER_FILE: Roster(1, _members(node_files, expires)).signed(authority.key),
        **new_operator_key(),
    }
    target = folder.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staged(target.parent, files) as stage:
            stage.rename(target)  # fails if another process created it first
    except OSError as error:
        raise DeployError(
            f"{folder} cannot be created: {error.strerror}; choose a folder that does not exist yet"
        ) from None
    return CreatedCertificates(
        folder, tuple(files), tuple(range(nodes)), names, expires, authority.certificate.not_valid_after_utc
    )


def add_nodes(folder: Path, nodes: int, days: int = DAYS) -> CreatedCertificates:
    """Add ``nodes`` nodes, numbered after the existing ones, signed by the authority of ``folder``.

    Raises :class:`DeployError`, also if ca.key is missing or the authority has expired.
    """
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, days)
    there = [int(match[1]) for path in folder.glob("nodes/*") if (match := _NODE_FILE.match(path.name))]
    there += [member.client for member in roster.members if member.client is not None]
    first = max(there, default=-1) + 1
    return _issue_nodes(folder, authority, roster, range(first, first + nodes), days)


def renew_node(folder: Path, node: int, days: int = DAYS) -> CreatedCertificates:
    """Replace keys and certificate of a node; the roster then holds its new key alone, for the same client.

    Raises :class:`DeployError`, also if ``folder`` has no such node.
    """
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, days)
    _find(roster, node, folder)
    return _issue_nodes(folder, authority, roster, [node], days)


def remove_node(folder: Path, node: int) -> CreatedCertificates:
    """Remove a node from the roster, and its files from ``folder``.

    Raises :class:`DeployError`, also if ``folder`` has no such node.
    """
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, DAYS)
    member = _find(roster, node, folder)
    made = _sign(folder, authority, roster, [other for other in roster.members if other is not member])
    for path in folder.glob(f"nodes/node-{node}.*"):
        path.unlink()
    return made


def sign_roster(folder: Path, days: int = DAYS) -> CreatedCertificates:
    """Sign a roster of the nodes in ``folder``: those of the present one, and every other nodes/node-I.pub.

    Raises :class:`DeployError`, also if a public key cannot be read.
    """
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, days)
    return _sign(folder, authority, roster, roster.members)


def state_app(folder: Path, app: str) -> CreatedCertificates:
    """State in the roster which app the federation runs, by its SHA-256; empty: any.

    Raises :class:`DeployError`, also if it is no SHA-256.
    """
    authority = _Authority.read(folder)
    roster = replace(_roster(folder, authority, DAYS), app=app)
    return _sign(folder, authority, roster, roster.members)


def add_submitter(folder: Path, name: str, days: int = DAYS) -> CreatedCertificates:
    """Make a key by which a person signs requests for runs, and a roster with it; it replaces a former key.

    Args:
        folder: of the authority.
        name: of the person.
        days: validity of the key.

    Raises :class:`DeployError`, also if the name is no file name, or that of a node.
    """
    if not _SUBMITTER.fullmatch(name):
        raise DeployError(
            f"--submitter {name!r}: must be at most 64 letters, digits, and any of _ . @ -, without spaces"
        )
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, days)
    expires = authority.end(days)
    files = _key_pair(f"submitters/{name}", name)
    others = [member for member in roster.members if (member.name, member.role) != (name, SUBMITTER)]
    files[ROSTER_FILE] = roster.with_members((*others, *_members(files, expires))).signed(authority.key)
    return _replace(folder, authority, files, expires)


def remove_submitter(folder: Path, name: str) -> CreatedCertificates:
    """Remove a submitter from the roster, and the files from ``folder``.

    Raises :class:`DeployError`, also if ``folder`` has no such submitter.
    """
    authority = _Authority.read(folder)
    roster = _roster(folder, authority, DAYS)
    others = [member for member in roster.members if (member.name, member.role) != (name, SUBMITTER)]
    if len(others) == len(roster.members):
        raise DeployError(f"{folder} has no submitter {name!r}")
    made = _sign(folder, authority, roster, others)
    for end in ("key", "pub"):
        (folder / "submitters" / f"{name}.{end}").unlink(missing_ok=True)
    return made


def add_operator_key(folder: Path) -> CreatedCertificates:
    """Make the operator's signing key in a folder without one, such as one of an earlier version.

    Raises :class:`DeployError`, also if there is one: what it has signed is verified by its public part.
    """
    authority = _Authority.read(folder)
    for name in (OPERATOR_KEY, OPERATOR_PUBLIC):
        if (folder / name).exists():
            raise DeployError(
                f"{folder / name} exists and is never overwritten: to replace the key, move {OPERATOR_KEY} and "
                f"{OPERATOR_PUBLIC} elsewhere, and keep the public one for what it has signed"
            )
    return _replace(folder, authority, new_operator_key())


def renew_authority(folder: Path, days: int = DAYS) -> CreatedCertificates:
    """Replace the key of the authority, and sign everything in ``folder`` anew, for the same keys.

    ca.crt then contains the new authority and the earlier ones, so that its holders trust both.

    Raises :class:`DeployError`.
    """
    former = _Authority.read(folder)
    roster = _roster(folder, former, days)
    authority = _Authority.new(max(days, AUTHORITY_DAYS))
    expires = authority.end(days)
    files = {
        "ca.crt": b"".join(
            certificate.public_bytes(Encoding.PEM)
            for certificate in (authority.certificate, *read_authorities(folder / "ca.crt"))
        ),
        "ca.key": _pem(authority.key),
        ROSTER_FILE: roster.with_members(roster.members).signed(authority.key),
    }
    for path in (folder / "server.crt", *sorted(folder.glob("nodes/node-*.crt"))):
        if path.exists():
            files[str(path.relative_to(folder))] = authority.reissue(path, expires)
    return _replace(folder, authority, files, expires)


def retire_authorities(folder: Path) -> CreatedCertificates:
    """Remove the earlier authorities from ca.crt: what they have signed is valid no longer.

    Raises :class:`DeployError`.
    """
    authority = _Authority.read(folder)
    return _replace(folder, authority, {"ca.crt": authority.certificate.public_bytes(Encoding.PEM)})


def _issue_nodes(
    folder: Path, authority: _Authority, roster: Roster, nodes: Sequence[int], days: int
) -> CreatedCertificates:
    """Make keys and certificates of nodes, and a roster with them."""
    expires = authority.end(days)
    files = _node_files(authority, nodes, expires)
    new = {member.client: member for member in _members(files, expires)}
    for member in roster.members:
        if member.client in new:
            new[member.client] = replace(new[member.client], name=member.name)
    members = {member.client: member for member in roster.members} | new
    files[ROSTER_FILE] = roster.with_members(members.values()).signed(authority.key)
    return _replace(folder, authority, files, expires, nodes)


def _members(files: Mapping[str, bytes], expires: datetime) -> tuple[Member, ...]:
    """Return the members of public keys, by file name: node I is client I, and submitters/NAME is NAME."""
    members = []
    for path in map(PurePath, files):
        if path.suffix != ".pub":
            continue
        try:
            key, end = fingerprint(files[str(path)]), expires.isoformat()
        except DeployError as error:
            raise DeployError(f"{path} cannot be used: {error}") from None
        if path.parent.name == "submitters":
            members.append(Member(key=key, name=path.stem, role=SUBMITTER, expires=end))
            continue
        match = _NODE_FILE.fullmatch(f"{path.stem}.")
        assert match is not None  # see _roster
        members.append(Member(key=key, client=int(match[1]), name=path.stem, expires=end))
    return tuple(members)


def _roster(folder: Path, authority: _Authority, days: int) -> Roster:
    """Return the roster in a folder, with every public key there that it does not have."""
    path = folder / ROSTER_FILE
    roster = Roster.read(path, [authority.certificate]) if path.exists() else Roster(0, ())
    members = {_seat(member): member for member in roster.members}
    nodes = (path for path in folder.glob("nodes/node-*.pub") if _NODE_FILE.fullmatch(f"{path.stem}."))
    files = {str(path): path.read_bytes() for path in (*nodes, *folder.glob("submitters/*.pub"))}
    for member in _members(files, authority.end(days)):
        former = members.setdefault(_seat(member), member)
        if former.key != member.key:
            members[_seat(member)] = replace(member, name=former.name)
    return replace(roster, members=tuple(members.values()))


def _seat(member: Member) -> int | str:
    """Return what identifies a member whatever its key: the number of a client, the name of a submitter."""
    return member.name if member.client is None else member.client


def _find(roster: Roster, node: int, folder: Path) -> Member:
    for member in roster.members:
        if member.client == node:
            return member
    raise DeployError(f"{folder} has no node {node}")


def _sign(folder: Path, authority: _Authority, roster: Roster, members: Iterable[Member]) -> CreatedCertificates:
    return _replace(folder, authority, {ROSTER_FILE: roster.with_members(members).signed(authority.key)})


def renew_server(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> CreatedCertificates:
    """Renew certificate and key of the server with the authority of ``folder``; keep its names unless ``hosts``.

    Raises :class:`DeployError`, also if ca.key is missing or the authority has expired.
    """
    authority = _Authority.read(folder)
    names = _with_loopback(hosts or names_of(folder / "server.crt"))
    expires = authority.end(days)
    files = authority.issue("server", "Coterie SuperLink", names, expires, key_name="server.key")
    return _replace(folder, authority, files, expires, names=names)


def names_of(certificate: Path) -> list[str]:
    """Return the names in the certificate of a server, the first one first.

    Raises :class:`DeployError`.
    """
    try:
        server = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        raise DeployError(f"{certificate} cannot be read: renew it with --renew-server --host NAME") from None
    return [str(name.value) for name in names]


def nodes_of(folder: Path) -> list[int]:
    """Return the numbers of the nodes whose public keys are in ``folder``."""
    found = (_NODE_FILE.match(path.name) for path in folder.glob("nodes/node-*.pub"))
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True)
class _Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, days: int) -> _Authority:
        key = ec.generate_private_key(ec.SECP384R1())
        name = _named("Coterie CA")
        extensions = {
            x509.BasicConstraints(ca=True, path_length=0): True,
            _key_usage(key_cert_sign=True, crl_sign=True): True,
        }
        end = datetime.now(UTC) + timedelta(days=days)
        return cls(key, _certificate(name, key.public_key(), name, key, end, extensions))

    @classmethod
    def read(cls, folder: Path) -> _Authority:
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except FileNotFoundError as error:
            raise DeployError(
                f"{error.filename} does not exist: restore ca.crt and ca.key of the certificate authority in {folder}, "
                "or create a new authority, without --more and --renew-server"
            ) from None
        except OSError as error:
            raise DeployError(f"{error.filename} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError):
            raise DeployError(
                f"ca.crt and ca.key in {folder} are not a certificate and a key in PEM format: restore them"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise DeployError(f"{folder}/ca.key is not the key of {folder}/ca.crt: restore the matching pair")
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            day = certificate.not_valid_after_utc.date()
            raise DeployError(f"{folder}/ca.crt expired on {day}: create a new authority in another folder")
        return cls(key, certificate)

    def end(self, days: int) -> datetime:
        """Return the expiry date in ``days`` days, at most that of the authority."""
        end = min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)
        return end.replace(microsecond=0)

    def reissue(self, path: Path, end: datetime) -> bytes:
        """Sign a certificate anew, for its key, names and usages, which an earlier authority has signed."""
        try:
            former = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            raise DeployError(f"{path} cannot be read: restore or remove it") from None
        kept = {
            extension.value: extension.critical
            for extension in former.extensions
            if not isinstance(extension.value, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier)
        }
        key = former.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        issuer = self.certificate.subject
        return _certificate(former.subject, key, issuer, self.key, end, kept).public_bytes(Encoding.PEM)

    def issue(
        self,
        stem: str,
        name: str,
        names: Sequence[str],
        end: datetime,
        key_name: str,
        usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.SERVER_AUTH,),
    ) -> dict[str, bytes]:
        """Sign ``stem``.crt for a new key, which is stored in ``key_name``."""
        key = ec.generate_private_key(ec.SECP384R1())
        extensions = {
            x509.BasicConstraints(ca=False, path_length=None): True,
            _key_usage(digital_signature=True): True,
            x509.ExtendedKeyUsage(list(usages)): False,
            x509.SubjectAlternativeName([_general_name(host) for host in names]): False,
        }
        certificate = _certificate(_named(name), key.public_key(), self.certificate.subject, self.key, end, extensions)
        return {f"{stem}.crt": certificate.public_bytes(Encoding.PEM), key_name: _pem(key)}


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime,
    extensions: Mapping[x509.ExtensionType, bool],
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(**uses: bool) -> x509.KeyUsage:
    every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{use: uses.get(use, False) for use in every})


def _node_files(authority: _Authority, numbers: Sequence[int], end: datetime) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for number in numbers:
        stem, name = f"nodes/node-{number}", f"supernode-{number}"
        files |= _key_pair(stem, f"node-{number}")
        files |= authority.issue(stem, name, (name, *_LOOPBACK), end, f"{stem}.tls.key", _NODE_USAGES)
    return files


def _key_pair(stem: str, name: str) -> dict[str, bytes]:
    """Return ``stem``.key and ``stem``.pub of a new key, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return {
        f"{stem}.key": key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        f"{stem}.pub": public + f" {name}\n".encode(),
    }


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _with_loopback(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the normalised host names, including those of the local machine."""
    return tuple(dict.fromkeys(str(_general_name(host).value) for host in (*hosts, *_LOOPBACK)))


def _general_name(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    name = host.lower()
    if len(name) > 253 or not _DNS_NAME.fullmatch(name):
        raise DeployError(f"--host {host}: must be a DNS name or an IP address, without scheme and port")
    return x509.DNSName(name)


def _replace(
    folder: Path,
    authority: _Authority,
    files: Mapping[str, bytes],
    expires: datetime | None = None,
    nodes: Sequence[int] = (),
    names: tuple[str, ...] = (),
) -> CreatedCertificates:
    """Move each file into place atomically; without ``expires``, what it says is valid as long as the authority."""
    try:
        with _staged(folder, files) as stage:
            for name in files:
                (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
                (stage / name).rename(folder / name)
    except OSError as error:
        raise DeployError(f"{folder} cannot be written: {error.strerror}") from None
    end = authority.certificate.not_valid_after_utc
    return CreatedCertificates(folder, tuple(files), tuple(nodes), names, expires or end, end)


@contextmanager
def _staged(parent: Path, files: Mapping[str, bytes]) -> Iterator[Path]:
    """Write the files with their modes to a temporary folder in ``parent``, synced to disk and removed afterwards."""
    stage = Path(tempfile.mkdtemp(prefix=".certs-", dir=parent))
    try:
        for folder in (stage, *{(stage / name).parent for name in files} - {stage}):
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
        for name, content in files.items():
            write_new(stage / name, content, mode=0o644 if name.endswith((".crt", ".pub", ".json")) else PRIVATE)
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
