"""A call to a SuperLink's Fleet API that shows whether the clock of a node is accepted, and changes nothing."""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from coterie.flower import find
from coterie.flower.transport import nodes_speak_http

# Any call works. The node id of an empty request is invalid, and the SuperLink checks it after the signature and its
# time.
_CALL, _PATH = "/flwr.proto.Fleet/PullMessages", "/v1/fleet/pull-messages"
_WRONG_TIME = "Invalid timestamp"
# Corrections of the clock that are tried, in minutes.
_OFFSETS = (-5, 5, -60, 60, -24 * 60, 24 * 60)
# Seconds by which a time may be ahead of a SuperLink's, and behind it.
_AHEAD, _BEHIND = 5.0, 300.0

#: Files of a certificate and its key.
Certificate: TypeAlias = tuple[Path, Path]


class Signed(NamedTuple):
    """The public key of a node, a time, and its signature of this time."""

    key: bytes
    timestamp: str
    signature: bytes


#: Sends a request; returns the error that answers it.
Call: TypeAlias = Callable[[Signed], str]


def clock_error(
    address: str, authority: Path, key: Path, certificate: Certificate | None, timeout: float = 10.0
) -> str | None:
    """Return how the clock of this machine differs from the SuperLink's, if it rejects the node for it.

    Args:
        address: HOST:PORT of the Fleet API.
        authority: certificate of the authority, a PEM file.
        key: private key of the node, an OpenSSH file.
        certificate: certificate of the node and its key; None: the SuperLink requires none.
        timeout: seconds for each call.

    Returns:
        such as "about 7 s ahead"; None: the SuperLink accepts the time, or does not authenticate nodes.
    """
    ask = _over_http if nodes_speak_http() else _over_grpc
    with ask(address, authority, certificate, timeout) as call:

        def accepts(seconds: float) -> bool:
            return call(_signed(key, timedelta(seconds=seconds))) != _WRONG_TIME

        if accepts(0):
            return None
        for minutes in _OFFSETS:
            if not accepts(60 * minutes):
                continue
            refused, accepted = 0.0, 60.0 * minutes
            while abs(accepted - refused) > max(1.0, abs(accepted) / 20):  # the least correction
                middle = (refused + accepted) / 2
                refused, accepted = (refused, middle) if accepts(middle) else (middle, accepted)
            seconds = abs(accepted) + (_AHEAD if minutes < 0 else _BEHIND)
            size = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
            return f"about {size} {'ahead' if minutes < 0 else 'behind'}"
    return "more than a day ahead or behind, or set to another time zone"


def http_headers() -> tuple[str, str, str]:
    """Return the names of the HTTP headers that hold a node's key, the time of a request, and its signature."""
    from flwr.common.constant import TIMESTAMP_HEADER

    key = find("flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER")
    return key, TIMESTAMP_HEADER, find("flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER")


def _signed(key: Path, offset: timedelta) -> Signed:
    """Return what proves to a SuperLink who sends a request, signed at a shifted time."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    timestamp = (now() + offset).isoformat()
    signature = sign_message(private, timestamp.encode("ascii"))
    return Signed(public_key_to_bytes(private.public_key()), timestamp, signature)


@contextmanager
def _over_grpc(address: str, authority: Path, certificate: Certificate | None, timeout: float) -> Iterator[Call]:
    import grpc
    from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER

    chain, key = (None, None) if certificate is None else (path.read_bytes() for path in certificate)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes(), key, chain)
    with grpc.secure_channel(address, credentials) as channel:

        def call(signed: Signed) -> str:
            names = (PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
            try:
                channel.unary_unary(_CALL)(b"", metadata=tuple(zip(names, signed, strict=True)), timeout=timeout)
            except grpc.RpcError as error:
                return str(error.details())
            return ""

        yield call


@contextmanager
def _over_http(address: str, authority: Path, certificate: Certificate | None, timeout: float) -> Iterator[Call]:
    import httpx

    key, timestamp, signature = http_headers()
    context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    with httpx.Client(verify=context, timeout=timeout) as client:

        def call(signed: Signed) -> str:
            headers = {
                "content-type": "application/protobuf",  # the SuperLink logs an error without it
                key: b64encode(signed.key).decode(),
                timestamp: signed.timestamp,
                signature: b64encode(signed.signature).decode(),
            }
            try:
                return client.post(f"https://{address}{_PATH}", headers=headers).text
            except httpx.HTTPError as error:
                return str(error)

        yield call
