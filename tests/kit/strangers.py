"""What strangers send to the port of the Fleet API: large messages, garbage and many connections."""

import contextlib
import os
import resource
import socket
import ssl
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import grpc

from coterie.deploy.fleet import http_headers
from coterie.flower.transport import nodes_speak_http

CALL = "/flwr.proto.Fleet/PushMessages"
PATH = "/v1/fleet/push-messages"
#: What an HTTP status is called over gRPC; no answer: the handshake ended the connection.
STATUS = {
    "": grpc.StatusCode.UNAVAILABLE,
    "200": grpc.StatusCode.OK,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "411": grpc.StatusCode.INVALID_ARGUMENT,
    "413": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
LARGE = 300 * 10**6


def signed_headers(key, shift=0.0):
    """Headers by which the node with a key authenticates a request over HTTP, signed at a shifted time."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    timestamp = (datetime.now(UTC) + timedelta(seconds=shift)).isoformat()
    values = (public_key_to_bytes(key.public_key()), timestamp, sign_message(key, timestamp.encode()))
    texts = (value if isinstance(value, str) else b64encode(value).decode() for value in values)
    return dict(zip(http_headers(), texts, strict=True))


def send(pki, port, size, node=None):
    """Send one message of ``size`` bytes to the Fleet API; return the status of the call."""
    return (send_over_http if nodes_speak_http() else send_over_grpc)(pki, port, size, node)


def send_over_grpc(pki, port, size, node):
    files = ("ca.crt", *(() if node is None else (f"nodes/node-{node}.tls.key", f"nodes/node-{node}.crt")))
    credentials = grpc.ssl_channel_credentials(*((pki / name).read_bytes() for name in files))
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"localhost:{port}", credentials, options) as channel:
        try:
            channel.unary_unary(CALL)(bytes(size), timeout=30)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def send_over_http(pki, port, size, node, path=PATH, headers=""):
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    if node is not None:
        context.load_cert_chain(pki / f"nodes/node-{node}.crt", pki / f"nodes/node-{node}.tls.key")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {size}\r\n\r\n"
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("localhost", port), 30) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        with contextlib.suppress(OSError):
            secure.sendall(head.encode())
            for _ in range(0, size, 10**6):
                secure.sendall(bytes(min(size, 10**6)))
        answer = secure.recv(1000)
    return STATUS[answer[9:12].decode()]


def connect(port, pki, garbage):
    """Open a connection and send garbage, before or after a TLS handshake."""
    connection = socket.create_connection(("127.0.0.1", port), 5)
    if garbage:
        with contextlib.suppress(OSError):
            connection.sendall(os.urandom(4096))
        return connection
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError):
        connection = context.wrap_socket(connection, server_hostname="localhost")
        connection.sendall(os.urandom(4096))
    return connection


def attack(port, pki, measure, talking=50, silent=500):
    """Attack with large messages, garbage and many connections at once; return the largest measure."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(most, talking + silent + 500)), hard))
    measured = []
    for _ in range(4):
        assert send(pki, port, LARGE) != grpc.StatusCode.OK
        measured.append(measure())
    connections = [connect(port, pki, number % 2 == 0) for number in range(talking)]
    connections += [socket.create_connection(("127.0.0.1", port), 5) for _ in range(silent)]
    measured.append(measure())
    for connection in connections:
        connection.close()
    return max(measured)
