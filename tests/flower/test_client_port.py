"""The port for clients of a SuperLink over HTTP: what it passes on, what it receives, and how long it waits."""

import asyncio
import contextlib
import socket
import ssl
import time
from base64 import b64encode

import pytest
from kit.strangers import signed_headers
from kit.superlinks import secured_superlink
from kit.tables import for_rows

from coterie.flower.transport import nodes_speak_http

pytestmark = pytest.mark.skipif(not nodes_speak_http(), reason="nodes speak gRPC with Flower 1.39")
if nodes_speak_http():
    from flwr.supercore.error import FlowerError
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

    from coterie.deploy import client_port
    from coterie.deploy.client_port import MAX_MESSAGE, Gate

PATH = "/v1/fleet/push-messages"


def signed(key, shift=0.0, **replaced):
    """Headers of a node with a key, signed at a shifted time."""
    headers = signed_headers(key, shift) | replaced
    return [(name.encode(), value.encode()) for name, value in headers.items() if value is not None]


@pytest.fixture(scope="module")
def keys():
    """The key of a registered node, and another one."""
    return [generate_key_pairs()[0] for _ in range(2)]


class App:
    """An app that answers 200 once it has the body; the bodies that it has received, and how many wait at a time."""

    def __init__(self):
        self.bodies, self.open, self.most = [], 0, 0

    async def __call__(self, scope, receive, send):
        self.open += 1
        self.most = max(self.most, self.open)
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                self.bodies.append(None)
                break
            body, more = body + event.get("body", b""), event.get("more_body", False)
        else:
            self.bodies.append(body)
        self.open -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def gate(app, keys):
    return Gate(app, {public_key_to_bytes(keys[0].public_key())}.__contains__, {PATH}, {})


async def call(gate, headers, path=PATH, method="POST", length=5, receive=None):
    """Call the gate; return the status, the text, and whether the body was read."""
    read, sent = [], []
    if length is not None:
        headers = [*headers, (b"content-length", str(length).encode())]

    async def give():
        read.append(True)
        return {"type": "http.request", "body": b"12345"}

    async def send(event):
        sent.append(event)

    await gate({"type": "http", "method": method, "path": path, "headers": headers}, receive or give, send)
    return sent[0]["status"], sent[1]["body"].decode(), bool(read)


def asked(keys, headers, **how):
    return asyncio.run(call(gate(App(), keys), headers, **how))


@pytest.mark.parametrize(
    "replaced",
    [
        {"flwr-public-key": None},
        {"flwr-signature": None},
        {"flwr-timestamp": None},
        {"flwr-signature": "AAAA"},
        {"flwr-signature": "not base64"},
        {"flwr-public-key": b64encode(b"no key").decode()},
        {"flwr-timestamp": "yesterday"},
        {"flwr-timestamp": "2026-01-01T00:00:00"},
        {"flwr-timestamp": "2026-01-01T00:00:00+00:00"},
    ],
    ids=str,
)
def test_a_stranger_is_refused_before_the_body(keys, replaced):
    assert asked(keys, signed(keys[0], **replaced)) == (401, "Unauthorized", False)


def test_a_key_that_is_not_registered_is_refused(keys):
    assert asked(keys, signed(keys[1])) == (401, "Unauthorized", False)
    mixed = dict(signed(keys[1])) | {b"flwr-public-key": dict(signed(keys[0]))[b"flwr-public-key"]}
    assert asked(keys, list(mixed.items())) == (401, "Unauthorized", False)


def test_a_supernode_learns_why_it_may_not_start(keys):
    status, text, read = asked(keys, signed(keys[1]), path=client_port.ACTIVATE)
    assert (status, read) == (400, False)
    assert "not registered" in FlowerError.from_json(text).message


@pytest.mark.parametrize(("shift", "status"), [(0, 200), (-299, 200), (-306, 401), (4, 200), (6, 401), (-1e6, 401)])
def test_the_time_of_a_request(keys, shift, status):
    answer = asked(keys, signed(keys[0], shift))
    assert answer == ((200, "", True) if status == 200 else (401, "Invalid timestamp", False))


@pytest.mark.parametrize(
    "path", ["/", "/v1/control/list-runs", "/v1/fleet", PATH + "/", "/v1/fleet/../control/list-runs", "//v1/fleet"]
)
def test_no_other_path_is_passed_on(keys, path):
    assert asked(keys, signed(keys[0]), path=path) == (404, "Not Found", False)
    assert asked(keys, [], path=path) == (401, "Unauthorized", False)


def test_bodies_need_a_length_within_the_limit(keys):
    assert asked(keys, signed(keys[0]), length=None) == (411, "Length Required", False)
    assert asked(keys, signed(keys[0]), length=MAX_MESSAGE)[0] == 200
    assert asked(keys, signed(keys[0]), length=MAX_MESSAGE + 1)[0::2] == (413, False)
    assert asked(keys, signed(keys[0]), method="GET") == (404, "Not Found", False)


def test_a_node_has_few_requests_at_a_time(keys, monkeypatch):
    monkeypatch.setattr(client_port, "PATIENCE", 0.1)
    app = App()

    async def never():
        await asyncio.sleep(60)

    async def all_at_once():
        passed = gate(app, keys)
        await asyncio.gather(*(call(passed, signed(keys[0]), receive=never) for _ in range(20)))

    asyncio.run(all_at_once())
    assert app.most == client_port.OF_ONE
    assert app.bodies == [None] * 20  # each ends, so that the next one has its turn


@for_rows("name, value", [("transfer-encoding", "chunked"), ("transfer-encoding", "identity"), ("content-length", "5")])
def test_a_body_with_a_coding_or_two_lengths_is_refused(keys, name, value):
    """A server that follows the coding does not count the length, which is checked."""
    more = (name.encode(), value.encode())
    assert asked(keys, [*signed(keys[0]), more]) == (400, "Bad Request", False)


def parts(*bodies, seconds=0.0):
    """Receives a body in parts, and says after each that there is more."""
    left = list(bodies)

    async def receive():
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


@pytest.mark.parametrize(
    ("bodies", "received"), [((b"12", b"345"), b"12345"), ((b"12", b"3456"), None), ((b"1" * 9,), None)]
)
def test_a_body_that_is_longer_than_announced_ends_the_request(keys, bodies, received):
    app = App()
    asyncio.run(call(gate(app, keys), signed(keys[0]), receive=parts(*bodies)))
    assert app.bodies == [received]


def test_a_body_of_single_bytes_has_a_deadline_and_costs_its_node_a_turn(keys, monkeypatch):
    monkeypatch.setattr(client_port, "PATIENCE", 0.1)
    app = App()

    async def slow(requests, passed):
        bodies = [parts(*[b"1"] * 1000, seconds=0.01) for _ in range(requests)]
        await asyncio.gather(*(call(passed, signed(keys[0]), length=1000, receive=body) for body in bodies))

    async def attack():
        passed = gate(app, keys)
        began = time.monotonic()
        await slow(1, passed)
        assert time.monotonic() - began < 1
        await slow(20, passed)
        app.most = 0
        await slow(3, passed)
        assert app.most == 1  # the last turn stays
        return await call(passed, signed(keys[0]))

    assert asyncio.run(attack())[0] == 200
    assert app.bodies == [None] * 24 + [b"12345"]


def test_a_reply_may_take_longer_than_a_body(keys, monkeypatch):
    monkeypatch.setattr(client_port, "PATIENCE", 0.05)
    events = [{"type": "http.request", "body": b"12345"}]
    heard = []

    async def receive():
        if not events:
            await asyncio.sleep(60)
        return events.pop()

    async def slow(scope, receive, send):
        await receive()
        with contextlib.suppress(TimeoutError):
            heard.append(await asyncio.wait_for(receive(), 0.2))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b""})

    assert asyncio.run(call(gate(slow, keys), signed(keys[0]), receive=receive))[0] == 200
    assert heard == []  # no disconnect


def status_of(port, pki, method, path, *, through_control=False):
    """The status that a caller without credentials gets; None: the connection ends without an answer."""
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    context.load_cert_chain(pki / "nodes/node-0.crt", pki / "nodes/node-0.tls.key")
    with (
        socket.create_connection(("localhost", port), 10) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        secure.sendall(head.encode())
        with contextlib.suppress(OSError):
            return int(secure.recv(12)[9:12] or 0)


@pytest.mark.slow
def test_connections_without_a_request_end(pki, tmp_path):
    context = ssl.create_default_context(cafile=pki / "ca.crt")

    def silent(port):
        return context.wrap_socket(socket.create_connection(("localhost", port), 30), server_hostname="localhost")

    with secured_superlink(pki, tmp_path) as (_, port, *_), contextlib.ExitStack() as stack:
        first = stack.enter_context(silent(port))
        started = time.monotonic()
        assert first.recv(1) == b""
        assert time.monotonic() - started < client_port.PATIENCE + 5
        first = stack.enter_context(silent(port))
        for _ in range(client_port.WAITING):
            stack.enter_context(silent(port))
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""
        assert time.monotonic() - started < client_port.PATIENCE / 2  # it made room
        assert status_of(port, pki, "POST", PATH) == 401
    assert "Traceback" not in (tmp_path / "superlink.log").read_text()


def routes():
    """All routes of a SuperLink, with their methods."""
    from fastapi.routing import APIRoute, iter_route_contexts
    from flwr.superlink.main import create_app

    every = [context.route for context in iter_route_contexts(create_app().routes)]
    return sorted({(method, route.path) for route in every if isinstance(route, APIRoute) for method in route.methods})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_route_is_reachable_for_strangers(pki, tmp_path):
    every = routes()
    assert len(every) > 50
    with secured_superlink(pki, tmp_path) as (_, port, control, _):
        answers = {route: status_of(port, pki, *route) for route in every}
        assert answers.pop(("POST", client_port.ACTIVATE)) == 400
        assert set(answers.values()) == {401}
        # the check can fail: on the port of the operator, they are answered
        assert {200} <= {status_of(control, pki, *route) for route in every}
