"""A call to a SuperLink's Fleet API that shows whether the clock of a node is accepted, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

# Any call works. The node id of an empty request is invalid, and the SuperLink checks it after the signature and its
# time.
_CALL = "/flwr.proto.Fleet/PullMessages"
_WRONG_TIME = "Invalid timestamp"
# Differences of clocks that are tried, in minutes; a SuperLink accepts what is up to 5 minutes old or 5 seconds ahead.
_OFFSETS = (-5, 5, -60, 60, -24 * 60, 24 * 60)


def clock_error(
    address: str, authority: Path, key: Path, certificate: tuple[Path, Path] | None, timeout: float = 10.0
) -> str | None:
    """Return how the clock of this machine differs from the SuperLink's, if it rejects the node for it.

    Args:
        address: HOST:PORT of the Fleet API.
        authority: certificate of the authority, a PEM file.
        key: private key of the node, an OpenSSH file.
        certificate: certificate of the node and its key; None: the SuperLink requires none.
        timeout: seconds for each call.

    Returns:
        such as "up to 10 minutes behind"; None: the SuperLink accepts the time, or does not authenticate nodes.
    """
    with _channel(address, authority, certificate) as channel:
        if _reply(channel, key, timedelta(), timeout) != _WRONG_TIME:
            return None
        for minutes in _OFFSETS:
            if _reply(channel, key, timedelta(minutes=minutes), timeout) != _WRONG_TIME:
                return f"up to {2 * abs(minutes)} minutes {'ahead' if minutes < 0 else 'behind'}"
    return "more than a day ahead or behind, or set to another time zone"


@contextmanager
def _channel(address: str, authority: Path, certificate: tuple[Path, Path] | None) -> Iterator[Any]:
    import grpc

    chain, key = (None, None) if certificate is None else (path.read_bytes() for path in certificate)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes(), key, chain)
    with grpc.secure_channel(address, credentials) as channel:
        yield channel


def _reply(channel: Any, key: Path, offset: timedelta, timeout: float) -> str:
    """Return the error with which the SuperLink answers a call, signed at a shifted time."""
    import grpc
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    timestamp = (now() + offset).isoformat()
    metadata = (
        (PUBLIC_KEY_HEADER, public_key_to_bytes(private.public_key())),
        (TIMESTAMP_HEADER, timestamp),
        (SIGNATURE_HEADER, sign_message(private, timestamp.encode("ascii"))),
    )
    try:
        channel.unary_unary(_CALL)(b"", metadata=metadata, timeout=timeout)
    except grpc.RpcError as error:
        return str(error.details())
    return ""
