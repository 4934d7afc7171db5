"""The roster: which client each key is, and who may submit runs, signed by the authority of ``coterie certs``.

The SuperLink authenticates a node by its key, and the node says which client it is. A roster takes that from the node:
it holds, for every key, the client, its name, its role and when it expires. The server asks the SuperLink for the keys
of its nodes, and a client finds its own key in the roster before it starts. It also holds the keys of submitters, who
sign requests for runs (:mod:`coterie.site.run_request`).

Rosters are numbered, and a machine keeps the largest number that it has used (:func:`read_newest`): who was removed or
replaced does not come back with an older roster.

The file is a JSON object of ``roster`` (the format), ``number`` (1, 2, ..., of every new version), ``members``, ``app``
(the SHA-256 of the app that runs, if it is stated) and ``signature``, which covers the rest.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from coterie.fields import SIZE, Fields, Length, OneOf
from coterie.files import FileError, open_private, private_folder, read_bytes, read_object
from coterie.site.errors import DeployError
from coterie.site.signatures import is_signed, sign

ROSTER_FILE = "roster.json"
#: Default name of a file of the largest numbers that were used.
SEEN_FILE = "rosters.seen"
_FORMAT = 1
_PURPOSE = "coterie roster"
CLIENT, SUBMITTER = "client", "submitter"
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Member(Fields):
    """A node, or a person who submits runs.

    Attributes:
        key: fingerprint of its public key.
        client: id of the client, 0 to the number of clients - 1; None for a submitter.
        name: of the client or the person.
        role: "client" or "submitter".
        expires: when that ends, in ISO 8601.
    """

    error = DeployError

    key: Annotated[str, Length(64)]
    client: Annotated[int | None, SIZE] = None
    name: Annotated[str, Length(64)]
    role: Annotated[str, OneOf((CLIENT, SUBMITTER))] = CLIENT
    expires: Annotated[str, Length(40)]

    def __post_init__(self) -> None:
        self.to_record()
        if not self.name.isprintable() or self.name.strip() != self.name or not self.name:
            raise DeployError(f"name {self.name!r} must be printable text without spaces around it")
        if (self.client is None) != (self.role == SUBMITTER):
            raise DeployError(f"{self.name} is a {self.role}: a client has a number, and a submitter has none")
        _ = self.end

    @property
    def end(self) -> datetime:
        """When the entry expires."""
        try:
            end = datetime.fromisoformat(self.expires)
        except ValueError:
            raise DeployError(f"expires is {self.expires!r}, expected a time in ISO 8601") from None
        return end if end.tzinfo else end.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Roster:
    """The members of a federation.

    Attributes:
        number: of this version; later versions have larger ones. 0: it was never signed.
        members: one for every client and submitter.
        app: SHA-256 of the app that the federation runs; empty: any.

    Raises:
        DeployError: two members have one key, client or name.
    """

    number: int
    members: tuple[Member, ...]
    app: str = ""

    def __post_init__(self) -> None:
        if self.app and not _HASH.fullmatch(self.app):
            raise DeployError(f"app is {self.app!r}, expected 64 hexadecimal digits")
        if self.number not in SIZE:
            raise DeployError(f"number is {self.number}; expected an integer in {SIZE}")
        for field in ("key", "client", "name"):
            values = [value for member in self.members if (value := getattr(member, field)) is not None]
            if twice := sorted({str(value) for value in values if values.count(value) > 1}):
                raise DeployError(f"the roster has {field} {', '.join(twice)} twice")

    def member(self, key: str, role: str = CLIENT) -> Member:
        """Return the valid member with this fingerprint and role.

        Raises:
            DeployError: there is none, or it has expired.
        """
        member = self._by_key.get(key)
        if member is None:
            raise DeployError("its key is not in the roster")
        if member.role != role:
            raise DeployError(f"its key is that of a {member.role} in the roster, {member.name}, not of a {role}")
        if member.end <= datetime.now(UTC):
            raise DeployError(f"its entry in the roster, {member.name}, expired on {member.end:%Y-%m-%d}")
        return member

    @cached_property
    def _by_key(self) -> dict[str, Member]:
        return {member.key: member for member in self.members}

    def client_of(self, public_key: bytes) -> tuple[int, str]:
        """Return the client of a node, and its name.

        Args:
            public_key: PEM, as the SuperLink stores it; empty without authentication of nodes.

        Raises:
            DeployError: the key is not that of a valid member.
        """
        if not public_key:
            raise DeployError("the SuperLink does not authenticate nodes (--enable-supernode-auth)")
        member = self.member(fingerprint(public_key))
        assert member.client is not None  # see Member
        return member.client, member.name

    def with_members(self, members: Iterable[Member]) -> Roster:
        """Return the next version, with these members."""
        return Roster(self.number + 1, tuple(members), self.app)

    def signed(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        """Return the content of the file, signed with the key of an authority: clients by number, then submitters."""

        def place(member: Member) -> tuple[bool, int, str]:
            return member.client is None, member.client or 0, member.name

        content = {
            "roster": _FORMAT,
            "number": self.number,
            **({"app": self.app} if self.app else {}),
            "members": [member.to_record() for member in sorted(self.members, key=place)],
        }
        return json.dumps({**content, "signature": sign(key, _PURPOSE, content)}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: Path, authorities: Iterable[x509.Certificate]) -> Roster:
        """Read a roster that one of these authorities has signed, which have not expired.

        Raises:
            DeployError: the file cannot be read, is no roster, or none of them has signed it.
        """
        try:
            content = read_object(path)
        except FileError as error:
            raise DeployError(str(error)) from None
        signature = content.pop("signature", None)
        now = datetime.now(UTC)
        keys = [each.public_key() for each in authorities if is_authority(each) and each.not_valid_after_utc > now]
        if not any(is_signed(key, _PURPOSE, content, signature) for key in keys):
            raise DeployError(
                f"{path} is not signed by this authority: sign it with coterie certs --sign-roster, or give the "
                "authority that has signed it"
            )
        try:
            return cls._parsed(content)
        except DeployError as error:
            raise DeployError(f"{path}: {error}") from None

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Roster:
        members = content.get("members")
        if content.get("roster") != _FORMAT or type(content.get("number")) is not int or not isinstance(members, list):
            raise DeployError(f"not a roster of format {_FORMAT}: update Coterie, or sign the roster again")
        if not all(isinstance(member, dict) for member in members):
            raise DeployError("members must be a list of objects")
        app = content.get("app", "")
        if not isinstance(app, str):
            raise DeployError("app must be a text")
        return cls(content["number"], tuple(Member.from_record(member) for member in members), app)


def read_newest(path: Path, authority: Path, seen: Path | None = None) -> Roster:
    """Read a roster that is not older than one that this machine has used.

    Args:
        path: the roster.
        authority: PEM file of the authorities that may sign it.
        seen: file of the largest number of rosters for each authority; None: there is none. It is made if it is
            missing, with its folder.

    Raises:
        DeployError: the roster cannot be used, or is older; or ``seen`` cannot be written.
    """
    authorities = read_authorities(authority)
    roster = Roster.read(path, authorities)
    if seen is not None:
        _check_seen(seen, path, roster, [each.fingerprint(hashes.SHA256()).hex() for each in authorities])
    return roster


def _check_seen(seen: Path, path: Path, roster: Roster, authorities: Sequence[str]) -> None:
    """Check the number of a roster, and note it for all authorities: one that is renewed continues the numbers.

    A line of the file is an authority and a number; an incomplete last line, which a crash left, is no line.
    """
    try:
        private_folder(seen.parent)
        with open_private(seen, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = file.read()
            lines = [line.split(" ") for line in content[: content.rfind("\n") + 1].splitlines()]
            used = {name: max(int(number) for other, number in lines if other == name) for name, _ in lines}
            newest = max((used.get(name, 0) for name in authorities), default=0)
            if roster.number < newest:
                raise DeployError(
                    f"{path} is an older roster, {roster.number}; this machine has used number {newest}: copy the "
                    "newest one, or sign it again (coterie certs --sign-roster) until its number is as large"
                )
            new = [name for name in authorities if used.get(name, 0) < roster.number]
            if new:
                file.truncate(content.rfind("\n") + 1)
                file.write("".join(f"{name} {roster.number}\n" for name in new))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise DeployError(f"{seen} cannot be written: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, DeployError):
            raise
        raise DeployError(f"{seen} is damaged: restore it, or remove it if {path} is the newest roster") from None


def fingerprint(public_key: bytes) -> str:
    """Return the SHA-256, in hexadecimal, of a public key in PEM or in OpenSSH's format.

    Raises:
        DeployError: it is neither.
    """
    try:
        load = load_pem_public_key if public_key.lstrip().startswith(b"-----") else load_ssh_public_key
        encoded = load(public_key).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm):
        raise DeployError("its public key cannot be read") from None
    digest = hashes.Hash(hashes.SHA256())
    digest.update(encoded)
    return digest.finalize().hex()


def read_authorities(path: Path) -> list[x509.Certificate]:
    """Return the certificates in a PEM file.

    Raises:
        DeployError: the file cannot be read, or contains none.
    """
    try:
        return x509.load_pem_x509_certificates(read_bytes(path))
    except FileError as error:
        raise DeployError(str(error)) from None
    except ValueError:
        raise DeployError(f"{path} contains no certificate in PEM format: use ca.crt of coterie certs") from None


def authority_beside(roster: Path, authority: str | None = None) -> Path:
    """Return the file of the authorities that may sign a roster: the given one, or ca.crt beside the roster."""
    return Path(authority) if authority else roster.with_name("ca.crt")


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


class RosterFile:
    """A roster that is read again when its file changes.

    Args:
        path: the file.
        authority: PEM file of the authorities that may sign it, one of which must have.
        seen: see :func:`read_newest`.

    Attributes:
        roster: the newest one that can be used.
        problem: why the present file is not used, although an earlier one is; empty if it is.

    Raises:
        DeployError: it cannot be used.
    """

    def __init__(self, path: Path, authority: Path, seen: Path | None = None) -> None:
        self._paths, self._seen = (path, authority), seen
        self._read = self._stamp()
        self.roster = read_newest(path, authority, seen)
        self.problem = ""

    def client_of(self, public_key: bytes) -> tuple[int, str]:
        """Return the client of a node, and its name, by the newest usable roster; see :meth:`Roster.client_of`."""
        if (stamp := self._stamp()) != self._read:
            self._read, self.problem = stamp, ""
            try:
                roster = read_newest(*self._paths, self._seen)
            except DeployError as error:
                self.problem = f"{error}; roster {self.roster.number} stays in use"
            else:
                if roster.number < self.roster.number:
                    used = f"{self.roster.number} stays in use"
                    self.problem = f"{self._paths[0]} is an older roster, {roster.number}; {used}"
                else:
                    self.roster = roster
        return self.roster.client_of(public_key)

    def _stamp(self) -> list[tuple[int, int] | None]:
        """Return what tells whether a file was changed, of both files; None for one that is missing."""
        stamps: list[tuple[int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                stamps.append(None)
        return stamps
