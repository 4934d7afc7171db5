"""What strangers send to the port of the Fleet API: large messages, garbage and many connections."""

import contextlib
import os
import resource
import socket
import ssl

import grpc

CALL = "/flwr.proto.Fleet/PushMessages"
LARGE = 300 * 10**6


def send(pki, port, size, node=None):
    """Send one message of ``size`` bytes to the Fleet API; return the status of the call."""
    files = ("ca.crt", *(() if node is None else (f"nodes/node-{node}.tls.key", f"nodes/node-{node}.crt")))
    credentials = grpc.ssl_channel_credentials(*((pki / name).read_bytes() for name in files))
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"localhost:{port}", credentials, options) as channel:
        try:
            channel.unary_unary(CALL)(bytes(size), timeout=30)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


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
