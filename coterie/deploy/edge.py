"""Deployed client: checks before it starts, and its Flower SuperNode."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import socket
import ssl
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from urllib.request import getproxies, proxy_bypass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coterie.deploy.app_bundle import checked_hash, trusted_entities
from coterie.fields import MASKED_SUMS, RECORD_LEVEL, TRUSTED_SERVER
from coterie.flower.transport import nodes_speak_http
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.site.policy import Policy
from coterie.site.roster import SEEN_FILE, fingerprint, is_authority, read_authorities, read_newest
from coterie.site.signatures import read_file, read_private_key

#: Default port of a SuperNode's Runtime API; every SuperNode on a machine needs its own port.
RUNTIME_PORT = 9094
#: Command of the SuperExec (:mod:`coterie.deploy.superexec`); its flags follow.
SUPEREXEC = (sys.executable, "-P", "-m", "coterie.deploy.superexec")
_TIMEOUT = 10.0  # seconds, for each of connecting and the TLS handshake
#: Returns how this machine's clock differs from that of a SuperLink at an address, if it is rejected for it.
ClockError: TypeAlias = Callable[[str, Path, Path, tuple[Path, Path] | None], str | None]
#: Keys of the node configuration that have no option of their own.
_SET_KEYS = {"code", "min-cohort", "min-corrupt", "reply-seconds"}
# A call of the Fleet API over HTTP, which is answered by 401.
_UNSIGNED = (
    "POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/protobuf\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_GUARANTEES = {
    MASKED_SUMS: "the server learns noisy sums of masked vectors",
    RECORD_LEVEL: "the server gets noisy replies, which the budget pays for",
    TRUSTED_SERVER: "the server sees exact updates and scores",
}
_EXPIRED, _NOT_YET_VALID, _WRONG_NAMES = 10, 9, (62, 64)  # OpenSSL's X509_V_ERR_*


@dataclass(frozen=True, kw_only=True)
class Edge:  # large: the options of a command
    """Options of a client: SuperLink, keys, the app that may run, and the node configuration.

    Attributes:
        superlink: HOST:PORT of the Fleet API.
        key: private key of the node, an OpenSSH file.
        ca: certificate of the authority that signed the SuperLink's, a PEM file.
        certificate: certificate of the node for a SuperLink that requires one; None: node-I.crt beside node-I.key, if
            it and node-I.tls.key are there.
        certificate_key: its key; None: node-I.tls.key.
        roster: roster of the federation; None: it is not checked.
        node: the node configuration.
        settings: further keys of the node configuration, as TOML values or plain text.
        fab_hash: SHA-256 of the only app that may run; None: any.
        trusted_entities: YAML file of keys that must have signed the app.
        isolation: "subprocess", or "process" for a separate SuperExec.
        port: local port of the SuperNode's Runtime API.
        flags: passed to flower-supernode unchanged.

    Raises:
        DeployError: an option is invalid, or options conflict.
    """

    superlink: str
    key: Path
    ca: Path
    certificate: Path | None = None
    certificate_key: Path | None = None
    roster: Path | None = None
    node: NodeConfig
    settings: Mapping[str, str] = field(default_factory=dict)
    fab_hash: str | None = None
    trusted_entities: Path | None = None
    isolation: str = "subprocess"
    port: int = RUNTIME_PORT
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.certificate_key is None):
            raise DeployError("--certificate and --certificate-key belong together: give both, or neither")
        beside = self.key.with_suffix(".crt"), self.key.with_suffix(".tls.key")
        if self.certificate is None and all(path.exists() for path in beside):
            for name, path in zip(("certificate", "certificate_key"), beside, strict=True):
                object.__setattr__(self, name, path)
        for name in ("key", "ca", "certificate", "certificate_key", "roster", "trusted_entities"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, absolute(path))
        if self.fab_hash is not None:
            object.__setattr__(self, "fab_hash", checked_hash(self.fab_hash))
        if self.isolation not in ("subprocess", "process"):
            raise DeployError(f"--isolation {self.isolation}: must be subprocess or process")
        for key in self.settings:
            if key in NodeConfig.keys() - _SET_KEYS:
                raise DeployError(f"--set {key}: use --{key}")
            if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
                raise DeployError(f"--set {key}: keys may contain letters, digits, - and _ only")
        NodeConfig.from_record(self._record)

    @property
    def _record(self) -> dict[str, Any]:
        set_keys = {key: value for key, value in self.node.to_record().items() if value is not False}
        if self.node.server is None:
            # return what a client's records call its server: its address, and the begin of its authority's SHA-256
            try:
                authority = read_authorities(self.ca)[0].fingerprint(hashes.SHA256()).hex()[:16]
            except DeployError:
                authority = "unknown"
            set_keys["server"] = f"{self.superlink} {authority}"
        return set_keys | {key: _value(text) for key, text in self.settings.items()}

    @property
    def node_config(self) -> str:
        """Format for ``flower-supernode --node-config``: key=value separated by spaces, strings quoted."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in self._record.items())

    @property
    def state_dir(self) -> Path:
        """Folder of persistent state."""
        return Path(self.node.state_dir or default_state_dir(self.node.client_id))


def absolute(path: Path) -> Path:
    """Return an absolute path, without links resolved."""
    return Path(os.path.abspath(path.expanduser()))


@dataclass(frozen=True)
class Check:
    """Result of a check; a failure states the problem and its solution."""

    subject: str
    passed: bool
    detail: str


def default_state_dir(client_id: int) -> Path:
    """$XDG_STATE_HOME/coterie/client-I, by default in ~/.local/state."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (home if home.is_absolute() else Path("~/.local/state").expanduser()) / "coterie" / f"client-{client_id}"


def checks(
    edge: Edge, describe: Callable[[str], str], describe_budget: Callable[[], str], clock_error: ClockError
) -> Iterator[Check]:
    """Check data, key, CA, roster, app, state, guarantee, policy, budget, port, SuperLink and clock, in this order.

    Args:
        edge: options of the client.
        describe: describes the data at a path, or raises ValueError or OSError.
        describe_budget: describes what is spent of the client's budget, if it has one, or raises RuntimeError.
        clock_error: see :func:`coterie.deploy.fleet.clock_error`.

    Nothing is started. The SuperLink is contacted with a valid CA only, and asked about the clock with a valid key.
    """
    passed: set[str] = set()
    needed = {"roster": {"key", "ca"}, "superlink": {"ca"}, "clock": {"key", "superlink"}}
    probes: tuple[tuple[str, Callable[[], str]], ...] = (
        ("data", lambda: _data(Path(edge.node.data or ""), describe)),
        ("key", lambda: _key(edge.key)),
        ("ca", lambda: _ca(edge.ca)),
        *((("roster", lambda: _in_roster(edge)),) if edge.roster else ()),
        ("app", lambda: _app(edge)),
        ("state", lambda: _state(edge.state_dir)),
        ("guarantee", lambda: _guarantee(edge.node)),
        *((("policy", lambda: _policy(edge)),) if edge.node.policy else ()),
        *((("budget", lambda: _budget(describe_budget)),) if edge.node.budget else ()),
        ("port", lambda: check_port("--port", edge.port)),
        ("superlink", lambda: _superlink(edge)),
        ("clock", lambda: _clock(edge, clock_error)),
    )
    for subject, probe in probes:
        if not needed.get(subject, set()) <= passed:
            continue
        try:
            check = Check(subject, True, probe())
            passed.add(subject)
        except DeployError as error:
            check = Check(subject, False, str(error))
        yield check


def command(edge: Edge) -> list[str]:
    """Return the command of the SuperNode (:mod:`coterie.deploy.supernode`), with the pinned app if there is one."""
    pinned = ["--fab-hash", edge.fab_hash] if edge.fab_hash else []
    certificate = ["--certificate", str(edge.certificate), "--certificate-key", str(edge.certificate_key)]
    signed = ["--trusted-entities", str(edge.trusted_entities)] if edge.trusted_entities else []
    return [
        *(sys.executable, "-P", "-m", "coterie.deploy.supernode", *pinned),
        *(certificate if edge.certificate else ()),
        *("--superlink", edge.superlink),
        *("--root-certificates", str(edge.ca)),
        *("--auth-supernode-private-key", str(edge.key)),
        *("--isolation", edge.isolation),
        *("--port", str(edge.port)),
        *("--node-config", edge.node_config),
        *signed,
        *edge.flags,
    ]


def environment(home: Path) -> dict[str, str]:
    """Return the environment of this process for a program of Flower's, which keeps its files in ``home``.

    Flower starts its helpers by name, so the folder of its scripts comes first in PATH.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "FLWR_HOME": str(home), "PATH": path}


def superexec_command(*flags: str) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return what starts :mod:`coterie.deploy.superexec` with these flags where Flower starts flower-superexec."""

    def command(words: Sequence[str]) -> Sequence[str]:
        return [*SUPEREXEC, *flags, *words[1:]] if words[0] == "flower-superexec" else words

    return command


def start(edge: Edge) -> NoReturn:
    """Create the private state folder and replace this process by the SuperNode. Raises :class:`DeployError`."""
    words = command(edge)
    home = Path(os.environ.get("FLWR_HOME") or edge.state_dir / "flwr")  # services have no home directory
    try:
        edge.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.execvpe(words[0], words, environment(home))
    except OSError as error:
        raise DeployError(f"{error.filename or words[0]}: {error.strerror}") from None


def _value(text: str) -> bool | int | float | str:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _quoted(value: bool | int | float | str) -> str:
    """Format as TOML. Quotation marks in strings are escaped as \\u0022, because Flower's parser stops at them."""
    if not isinstance(value, str):
        return str(value).lower()
    return '"' + json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', "\\u0022").replace("\x7f", "\\u007f") + '"'


def _data(path: Path, describe: Callable[[str], str]) -> str:
    if not os.path.exists(path):
        raise DeployError(f"--data {path}: does not exist, or this user cannot access its folder")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DeployError(f"--data {path}: this user has no read permission")
    try:
        return describe(str(path))
    except (OSError, ValueError) as error:
        raise DeployError(f"--data {path}: {error}") from None


def _key(path: Path) -> str:
    read_private_key(path)
    return f"ECDSA P-384, {path}"


def _ca(path: Path) -> str:
    content = read_file("--ca", path)
    try:
        every = x509.load_pem_x509_certificates(content)
    except ValueError:
        raise DeployError(f"--ca {path}: contains no certificate in PEM format: use ca.crt of coterie certs") from None
    authorities = [certificate for certificate in every if is_authority(certificate)]
    if not authorities:
        raise DeployError(
            f"--ca {path}: is a server certificate, not that of a certificate authority: use ca.crt of coterie certs"
        )
    now, end = datetime.now(UTC), max(certificate.not_valid_after_utc for certificate in authorities)
    if end <= now:
        raise DeployError(f"--ca {path}: expired on {end.date()}: obtain the SuperLink's new ca.crt")
    begin = min(certificate.not_valid_before_utc for certificate in authorities)
    if begin > now:
        raise DeployError(f"--ca {path}: is not valid before {begin:%Y-%m-%d %H:%M} UTC: correct this machine's clock")
    return f"valid until {end.date()}, {path}"


def _in_roster(edge: Edge) -> str:
    assert edge.roster is not None
    public = read_private_key(edge.key).public_key()
    try:
        roster = read_newest(edge.roster, edge.ca, edge.state_dir / SEEN_FILE if edge.state_dir.is_dir() else None)
        member = roster.member(fingerprint(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)))
    except DeployError as error:
        raise DeployError(f"--roster {edge.roster}: {error}: ask the operator for a new roster") from None
    if member.client != edge.node.client_id:
        raise DeployError(f"--roster {edge.roster}: this key is of client {member.client}: use that --client-id")
    return f"{member.name} is client {member.client} until {member.end:%Y-%m-%d}, roster {roster.number}"


def _app(edge: Edge) -> str:
    rules, runs = [], ""
    with suppress(DeployError):  # which the check of the roster names
        runs = read_newest(edge.roster, edge.ca).app if edge.roster else ""
    if edge.fab_hash and runs not in ("", edge.fab_hash):
        raise DeployError(
            f"--fab-hash {edge.fab_hash}: the roster names the app {runs}, which the operator runs: review and pin it"
        )
    if edge.fab_hash:
        rules.append(f"only {edge.fab_hash}" + (", as in the roster" if runs else ""))
    if edge.trusted_entities:
        rules.append(f"signed by one of {len(trusted_entities(edge.trusted_entities))} keys")
    named = f"; the roster names {runs}" if runs else ""
    return ", ".join(rules) or f"any app that the operator sends; --fab-hash restricts it to one{named}"


def _state(folder: Path) -> str:
    parent = folder
    while not os.path.exists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise DeployError(
            f"--state-dir {folder}: this user has no write permission for {parent}: choose another folder, or chown it"
        )
    return str(folder)


def _guarantee(node: NodeConfig) -> str:
    guarantee = node.declared_guarantee
    if guarantee is None:
        raise DeployError(
            f"--guarantee is not set, and without it the client answers nothing: set --roster for {MASKED_SUMS}, "
            f"--epsilon and --delta for {RECORD_LEVEL}, or --guarantee {TRUSTED_SERVER} if the server may see exact "
            "updates and scores"
        )
    return f"{guarantee}: {_GUARANTEES[guarantee]}" + "; exact scores as well (--diagnostics)" * node.diagnostics


def _policy(edge: Edge) -> str:
    path = edge.node.policy
    policy = Policy.read(Path(path or ""))
    if policy.limits_epsilon and not edge.node.budget:
        raise DeployError(f"--policy {path}: its limits of epsilon require --epsilon and --delta")
    if policy.submitters is not None and edge.roster is None:
        raise DeployError(f"--policy {path}: its submitters require --roster, which holds their keys")
    return f"{policy}, {path}"


def _budget(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except RuntimeError as error:
        raise DeployError(f"--epsilon: {error}") from None


def check_port(option: str, port: int, host: str = "127.0.0.1") -> str:
    """Check that this user can listen on a port.

    Raises:
        DeployError: it is in use, or a privileged one.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise DeployError(
                    f"{option} {port}: is in use, perhaps by another of these programs: choose a free port"
                ) from None
            raise DeployError(
                f"{option} {port}: this user has no permission to listen on it: choose a port above 1023"
            ) from None
    return f"{port} is free"


def _superlink(edge: Edge) -> str:
    address, ca = edge.superlink, edge.ca
    host, port = _parsed(address)
    where, context = f"--superlink {address}:", _tls(edge)
    try:
        connection = socket.create_connection((host, port), _TIMEOUT)
    except socket.gaierror:
        raise DeployError(f"{where} cannot resolve host {host}: check the name and this machine's DNS") from None
    except ConnectionRefusedError:
        raise DeployError(
            f"{where} connection refused: is the SuperLink running, with its Fleet API on port {port}?"
        ) from None
    except TimeoutError:
        raise DeployError(f"{where} no response within {_TIMEOUT:g} s: does a firewall block the connection?") from None
    except OSError as error:
        raise DeployError(f"{where} cannot be reached: {error.strerror}") from None
    try:
        with connection, context.wrap_socket(connection, server_hostname=host) as secure:
            _check_protocol(where, secure.selected_alpn_protocol() == "h2")
            version = secure.version()
            # a client without the required certificate is refused after the handshake
            try:
                _check_fleet(edge, where, secure, host)
            except TimeoutError:
                pass
            except OSError as error:
                raise _rejected(edge, where, str(getattr(error, "reason", None) or error)) from None
            return f"{address}, {version}{proxy_hint(host)}"
    except ssl.SSLCertVerificationError as error:
        raise DeployError(f"{where} {explain_verification_error(error, host, ca)}") from None
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror or error
        if "ALERT" in str(why):
            raise _rejected(edge, where, str(why)) from None
        raise DeployError(f"{where} TLS handshake failed ({why}): was the SuperLink started with --insecure?") from None


def _check_fleet(edge: Edge, where: str, secure: ssl.SSLSocket, host: str) -> None:
    """Check the first bytes from the SuperLink: unprompted over gRPC, in response to a call over HTTP."""
    if nodes_speak_http():
        secure.sendall(_UNSIGNED.format(host=host).encode())
    said = secure.recv(100)
    if not said:
        raise _rejected(edge, where, "the connection was closed")
    if nodes_speak_http() and b" 401 " not in said:
        raise DeployError(f"{where} does not serve the Fleet API: use its port, 9092 by default")


def _check_protocol(where: str, grpc: bool) -> None:
    """Check that the SuperLink speaks as the SuperNode of this machine does."""
    if grpc and nodes_speak_http():
        raise DeployError(
            f"{where} speaks gRPC, as with Flower 1.39, but this client has Flower {metadata.version('flwr')}: install "
            "the version of the SuperLink"
        )
    if not grpc and not nodes_speak_http():
        raise DeployError(
            f"{where} supports TLS but not gRPC: use the port of the Fleet API, 9092 by default; a SuperLink of Flower "
            "1.40 or newer requires the same version here, or must be started with FLWR_INTERNAL_GRPC_FLEET_API=1"
        )


def _rejected(edge: Edge, where: str, why: str) -> DeployError:
    if edge.certificate is None:
        return DeployError(
            f"{where} requires a certificate of this client ({why}): give --certificate node-I.crt and "
            "--certificate-key node-I.tls.key of coterie certs, or keep them beside --key"
        )
    return DeployError(f"{where} rejects the certificate {edge.certificate} ({why}): make a new one with coterie certs")


def _clock(edge: Edge, clock_error: ClockError) -> str:
    certificate = None
    if edge.certificate is not None and edge.certificate_key is not None:
        certificate = edge.certificate, edge.certificate_key
    wrong = clock_error(edge.superlink, edge.ca, edge.key, certificate)
    if wrong is not None:
        raise DeployError(
            f"--superlink {edge.superlink}: rejects the time of this machine, whose clock is {wrong} (UTC): set it, "
            "for example by NTP"
        )
    return "as the SuperLink's"


def _tls(edge: Edge) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(edge.ca))
    context.set_alpn_protocols(["h2", "http/1.1"] if nodes_speak_http() else ["h2"])
    if edge.certificate is None:
        return context
    try:
        context.load_cert_chain(str(edge.certificate), str(edge.certificate_key))
    except OSError as error:
        raise DeployError(
            f"--certificate {edge.certificate}: not a certificate with the key {edge.certificate_key}: use node-I.crt "
            f"and node-I.tls.key of coterie certs ({getattr(error, 'reason', None) or error.strerror})"
        ) from None
    return context


def proxy_hint(host: str) -> str:
    """Return what to do about a proxy that connections to a host take; empty without one.

    The hint does not show the address of the proxy, which can hold a password.
    """
    if "https" not in getproxies() or proxy_bypass(host):
        return ""
    return f"; the environment sets a proxy: name {host} in no_proxy if the proxy does not lead there"


def explain_verification_error(error: ssl.SSLCertVerificationError, host: str, ca: Path | str) -> str:
    """Explain why a server certificate was rejected, and how to fix it."""
    code = error.verify_code
    if code in _WRONG_NAMES:
        return (
            f"its certificate is not valid for {host}: use a name in the certificate, or --renew-server --host {host}"
        )
    if code == _EXPIRED:
        return "its certificate has expired: run coterie certs --renew-server on the machine with ca.key"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet: correct this machine's clock"
    return f"its certificate is not signed by {ca} ({error.verify_message}): obtain the matching ca.crt"


def _parsed(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    bracketed = re.fullmatch(r"\[(.*)\]", host)
    try:
        if bracketed:
            host = str(ipaddress.IPv6Address(bracketed[1]))
        if not colon or not host or re.search(r"[/\s]", host) or (":" in host and not bracketed):
            raise ValueError
        number = int(port)
        if not 0 < number < 65536:
            raise ValueError
    except ValueError:
        raise DeployError(
            f"--superlink {address}: must be HOST:PORT without a scheme; write IPv6 addresses in brackets"
        ) from None
    return host, number
