"""Servers on this machine, and programs that are ended with all that they start."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
import time

from coterie.flower.transport import nodes_speak_http

GRPC = not nodes_speak_http()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextlib.contextmanager
def listening(serve):
    """A server on this machine that serves every connection so; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            thread.join()


def tls(folder, grpc=GRPC, authority=None, status="401 Unauthorized"):
    """Serves server.crt of the folder, as a SuperLink does; clients need a certificate of an authority, if given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    if grpc:
        context.set_alpn_protocols(["h2"])

    def serve(connection):
        with context.wrap_socket(connection, server_side=True) as secure:
            if not grpc:
                secure.recv(1000)
            secure.sendall(
                bytes(9) if grpc else f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )  # a gRPC server speaks first
            secure.recv(1)

    return serve


@contextlib.contextmanager
def running(arguments, log, cwd=None, **variables):
    """A program with all that it starts, ended in the end; it is asked whether it lives."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in arguments],
            env=os.environ | variables,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=cwd,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(happened, process, log, seconds=90):
    """Wait until it has, as long as the process lives."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def open_port(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def fleet_connection(address, authority, key):
    """A connection of a node with a key to a SuperLink, as Flower's SuperNode makes it."""
    options = {"root_certificates": authority.read_bytes(), "authentication_keys": (key, key.public_key())}
    if nodes_speak_http():
        from flwr.supernode.fleet_http_connection import http_request_response

        return http_request_response(address, False, **options)
    from flwr.client.grpc_rere_client.connection import grpc_request_response
    from flwr.supercore.retry import make_simple_grpc_retry_invoker

    return grpc_request_response(address, False, make_simple_grpc_retry_invoker(), **options)
