"""Strangers at the port of the Fleet API: what they send is not received, and registered nodes go on."""

import contextlib
import itertools
import pkgutil
import random
import re
import shutil
import socket
import ssl
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path

import flwr.proto
import grpc
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore import date
from kit.servers import free_port, running, until
from kit.strangers import LARGE, PATH, attack, send, send_over_grpc, signed_headers
from kit.superlinks import register, secured_superlink

from coterie.deploy.edge import Edge, checks
from coterie.deploy.fleet import clock_error
from coterie.deploy.superlink import MAX_MESSAGE
from coterie.flower.transport import nodes_speak_http
from coterie.site.node import NodeConfig

BIN = Path(sys.executable).parent
# Megabytes by which the memory of a SuperLink may grow while strangers attack; messages of 300 MB grew it by 1,650.
MOST = 64
# Over HTTP, the missing signature is noticed first.
TOO_LARGE = grpc.StatusCode.UNAUTHENTICATED if nodes_speak_http() else grpc.StatusCode.RESOURCE_EXHAUSTED


def memory(process):
    """Resident memory of a process, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def checked(pki, port, key, **certificate):
    """What `coterie client --check` says of the SuperLink."""
    node = NodeConfig(client_id=0, data=str(pki))
    edge = Edge(superlink=f"localhost:{port}", key=key, ca=pki / "ca.crt", node=node, **certificate)
    return next(check.detail for check in checks(edge, str, str, lambda *_: None) if check.subject == "superlink")


def attacked(server, port, pki):
    """Attack; return by how many MB the server grew at most."""
    before = memory(server)
    grown = attack(port, pki, lambda: memory(server)) - before
    assert server.poll() is None
    return grown


@pytest.mark.slow
def test_strangers_do_not_fill_the_memory(pki, tmp_path):
    with secured_superlink(pki, tmp_path) as (server, port, _, variables):
        assert attacked(server, port, pki) < MOST
        assert send(pki, port, MAX_MESSAGE + 1, node=0) == TOO_LARGE
        assert send(pki, port, 100) == grpc.StatusCode.UNAVAILABLE  # by the handshake
        assert send(pki, port, 100, node=0) == grpc.StatusCode.UNAUTHENTICATED
        assert "TLSv1.3" in checked(pki, port, pki / "nodes" / "node-0.key")
        shutil.copy(pki / "nodes" / "node-0.key", tmp_path / "mine.key")
        rejected = {"certificate": pki / "server.crt", "certificate_key": pki / "server.key"}  # for servers only
        assert "requires a certificate of this client" in checked(pki, port, tmp_path / "mine.key")
        assert "rejects the certificate" in checked(pki, port, tmp_path / "mine.key", **rejected)
        register(pki, 0, variables)
        log, node = tmp_path / "node.log", pki / "nodes" / "node-0"
        command = [sys.executable, "-P", "-m", "coterie.deploy.supernode", "--superlink", f"localhost:{port}"]
        command += ["--certificate", node.with_suffix(".crt"), "--certificate-key", node.with_suffix(".tls.key")]
        command += ["--root-certificates", pki / "ca.crt", "--auth-supernode-private-key", node.with_suffix(".key")]
        command += ["--isolation", "process", "--port", free_port(), "--node-config", "client-id=0"]
        with running(command, log, **variables) as supernode:
            until(lambda: "SuperNode ID" in log.read_text(), supernode, log)
            began = time.monotonic()
            assert attacked(server, port, pki) < MOST
            assert time.monotonic() - began < 120
            assert supernode.poll() is None
        assert "Traceback" not in (tmp_path / "superlink.log").read_text()


def methods():
    """Names of all calls of all services of Flower."""
    files = [import_module(f"flwr.proto.{module.name}") for module in pkgutil.iter_modules(flwr.proto.__path__)]
    services = [
        each for file in files if hasattr(file, "DESCRIPTOR") for each in file.DESCRIPTOR.services_by_name.values()
    ]
    return sorted({f"/{service.full_name}/{method.name}" for service in services for method in service.methods})


@pytest.mark.slow
@pytest.mark.skipif(nodes_speak_http(), reason="test_client_port.py has the routes of HTTP")
def test_no_call_is_answered_for_strangers(pki, tmp_path):
    every = methods()
    assert len(every) > 50
    credentials = grpc.ssl_channel_credentials(
        *((pki / name).read_bytes() for name in ("ca.crt", "nodes/node-0.tls.key", "nodes/node-0.crt"))
    )
    statuses = {}
    with (
        secured_superlink(pki, tmp_path) as (_, port, *_),
        grpc.secure_channel(f"localhost:{port}", credentials) as channel,
    ):
        for name in every:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(name)(b"", timeout=30)
            statuses.setdefault(refused.value.code(), []).append(name)
    assert {each.split("/")[1] for each in statuses.pop(grpc.StatusCode.UNAUTHENTICATED)} == {"flwr.proto.Fleet"}
    assert statuses.keys() == {grpc.StatusCode.UNIMPLEMENTED}  # not served here


@pytest.mark.slow
@pytest.mark.skipif(not nodes_speak_http(), reason="Flower 1.39 speaks gRPC alone")
def test_a_newer_superlink_speaks_grpc_if_it_is_told_to(pki, tmp_path):
    with secured_superlink(pki, tmp_path, FLWR_INTERNAL_GRPC_FLEET_API="1") as (_, port, *_):
        assert send_over_grpc(pki, port, 100, node=0) == grpc.StatusCode.UNAUTHENTICATED
        assert send_over_grpc(pki, port, MAX_MESSAGE + 1, node=0) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert send_over_grpc(pki, port, 100, node=None) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_a_clock_that_the_superlink_rejects(pki, tmp_path, monkeypatch):
    """A SuperLink accepts a time of up to five minutes ago, and five seconds ahead."""
    nodes = pki / "nodes"
    given = (pki / "ca.crt", nodes / "node-0.key", (nodes / "node-0.crt", nodes / "node-0.tls.key"))
    with secured_superlink(pki, tmp_path) as (_, port, *_):
        for seconds, error in (
            (0, "None"),
            (-240, "None"),
            (12, r"about (?P<s>\d+) s ahead"),
            (60, r"about (?P<s>\d+) s ahead"),
            (-500, r"about (?P<minutes>\d+) minutes behind"),
            (3600, r"about (?P<minutes>\d+) minutes ahead"),
            (-3600, r"about (?P<minutes>\d+) minutes behind"),
            (-3 * 86400, "more than a day ahead or behind, or set to another time zone"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(date, "now", lambda shift=seconds: datetime.now(UTC) + timedelta(seconds=shift))
                began = time.monotonic()
                told = re.fullmatch(error, str(clock_error(f"localhost:{port}", *given)))
            assert told, seconds
            for unit, number in told.groupdict().items():  # the server's clock gains what the calls take
                size = 60 if unit == "minutes" else 1
                tolerance = size + abs(seconds) / 20 + time.monotonic() - began
                assert abs(int(number) * size - abs(seconds)) <= tolerance, seconds
    assert "Unsupported" not in (tmp_path / "superlink.log").read_text()


#: Without it, the SuperLink does not receive the body.
PROTOBUF = "Content-Type: application/protobuf"


#: Lengths that a request announces, its transfer coding, and a header that is none or changes the connection.
LENGTHS = (["10"], ["10", "10"], ["10", "11"], [], ["+10"], ["-1"], ["1e3"], [str(2**64)], [str(LARGE)])
CODINGS = ("", "chunked", "\tChunked", "gzip, chunked", "identity")
OTHERS = ("X: a", "X-Folded: a\r\n b", "Host: other", "Expect: 100-continue", "Upgrade: h2c", "X: \x01")


def malformed(rng, lengths, coding, signed):
    """The head of a request whose lengths, coding and headers do not agree, and a part of its body."""
    lines = [PROTOBUF, *(f"Content-Length: {length}" for length in lengths), *signed]
    lines += [f"Transfer-Encoding: {coding}"] if coding else []
    lines += [rng.choice(OTHERS)] if rng.random() < 0.5 else []
    rng.shuffle(lines)
    head = "".join(f"{line}\r\n" for line in (f"POST {PATH} HTTP/1.1", "Host: localhost", *lines, ""))
    part = b"%x\r\n%b\r\n" % (10**6, bytes(10**6)) if coding else bytes(10**6)
    return head.encode("latin-1") * rng.choice([1, 1, 1, 3]), part


def answer_to(pki, port, head, part, megabytes):
    """The first line of the answer to a head and a body of at most so many parts; empty without one."""
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("localhost", port), 30) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        with contextlib.suppress(OSError):
            secure.sendall(head)
            for _ in range(megabytes):
                secure.sendall(part)
        return secure.recv(1000).partition(b"\r\n")[0].decode()
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not nodes_speak_http(), reason="nodes speak gRPC with Flower 1.39")
def test_malformed_requests_of_a_registered_node_do_not_fill_the_memory(pki, tmp_path):
    key = load_ssh_private_key((pki / "nodes" / "node-0.key").read_bytes(), None)

    def signed():
        return [f"{name}: {text}" for name, text in signed_headers(key).items()]

    with secured_superlink(pki, tmp_path) as (server, port, _, variables):
        register(pki, 0, variables)
        plain = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{PROTOBUF}\r\n" + "".join(
            f"{line}\r\n" for line in signed()
        )
        honest = f"{plain}Content-Length: 5\r\n\r\n".encode()
        first = answer_to(pki, port, honest, b"12345", 1)
        assert first
        assert "401" not in first  # it passes the gate
        before, largest = memory(server), 0.0
        rng = random.Random(0)
        for lengths, coding in itertools.product(LENGTHS, CODINGS):
            for megabytes in (rng.choice([0, 1]), 300 if coding else 40):
                answer = answer_to(pki, port, *malformed(rng, lengths, coding, signed()), megabytes)
                largest = max(largest, memory(server))
                assert "200" not in answer, (lengths, coding)
        assert largest - before < MOST
        began = time.monotonic()
        assert answer_to(pki, port, honest, b"12345", 1) == first
        assert time.monotonic() - began < 2
    assert "Traceback" not in (tmp_path / "superlink.log").read_text()
