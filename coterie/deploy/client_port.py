"""A port for clients alone, for SuperLinks of Flower 1.40 and newer.

Such a SuperLink serves its Fleet, Control and Runtime APIs on one HTTP port. Most calls of the last two need no
password, and a request is received before its sender is known. This port serves the Fleet API on a second socket of the
same process, for registered nodes:

    a connection                closed after 10 s without a request, and when 200 others wait for theirs
    the headers of a request    401 (400 with the reason at a SuperNode's start), unless they hold the key, time and
                                signature of a registered node
    any other API               404
    the body of a request       411 without its length, 400 with two or with a transfer coding, 413 above 32 MiB;
                                received once the checks are passed, at most 8 at a time from one node and 32 in all
    a body that is longer       the request ends; so does one whose body takes longer than 10 s and its length at
                                128 KiB/s, which costs its node one of the 8 requests at a time, all but the last
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import sys
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from importlib import import_module
from logging import INFO
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore import date, log
from flwr.supercore.address import parse_address
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from h11 import LocalProtocolError
from starlette.concurrency import run_in_threadpool
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coterie.deploy.fleet import http_headers
from coterie.deploy.superlink import MAX_MESSAGE

_KEY, _TIMESTAMP, _SIGNATURE = (name.encode() for name in http_headers())
#: Bytes of the largest headers.
MAX_HEADERS = 16 * 2**10
#: Seconds for the TLS handshake, for the headers of a first request, and between two parts of a body.
PATIENCE = 10.0
#: Bytes a second at which a whole body arrives at least.
SLOWEST = 128 * 2**10
#: Seconds in which the other side has to agree to the end of a TLS connection.
FAREWELL = 1.0
#: Connections that may wait for their first request.
WAITING = 200
#: Requests that are handled at a time, of one node and in all.
OF_ONE, IN_ALL = 8, 32
#: Seconds that a connection stays open after a request; Flower's clients close theirs after 5 s.
KEEP_ALIVE = 15

#: What a request is answered whose time is too far from that of the SuperLink.
WRONG_TIME = "Invalid timestamp"

#: The first call of a SuperNode, and what it is answered without a registered key: at 401, Flower's SuperNode ends
#: without a word and with status 0. The number is that of its exit code.
ACTIVATE = "/v1/fleet/activate-node"
UNKNOWN_NODE = json.dumps(
    {"code": 305, "detail": "the key of this SuperNode is not registered, or the time of its clock is wrong"}
)

# Not what strangers send, which uvicorn warns about. Flower's configuration resets levels, and keeps filters.
_LOGGER = logging.getLogger("uvicorn.error.fleet")
_LOGGER.addFilter(lambda record: record.levelno >= logging.ERROR)

Scope = MutableMapping[str, Any]


def open_with(address: str) -> None:
    """Let the SuperLink that this process starts serve the Fleet API at an address of its own.

    Args:
        address: HOST:PORT.
    """
    main: Any = import_module("flwr.superlink.main")
    create = main.create_app

    def create_app(config: Any, superlink_lifespan_class: Any) -> Any:
        app = create(config, superlink_lifespan_class)
        parsed = parse_address(address)
        if parsed is None:
            sys.exit(f"error: --fleet-api-address {address}: must be HOST:PORT")
        host, port, is_v6 = parsed
        try:
            family = socket.AF_INET6 if is_v6 else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            sys.exit(f"error: --fleet-api-address {address}: {error.strerror}")
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux keeps silent connections from this process
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(PATIENCE))
        lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan_with_port(app: Any) -> AsyncIterator[Mapping[str, Any]]:
            async with lifespan(app) as state, _serving(app, state or {}, config, listener):
                yield state

        app.router.lifespan_context = lifespan_with_port
        return app

    main.create_app = create_app


@asynccontextmanager
async def _serving(app: Any, state: Mapping[str, Any], config: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the Fleet API of ``app`` meanwhile."""
    factory = app.state.linkstate_factory

    def registered(key: bytes) -> bool:
        return factory.state().get_node_id_by_public_key(key) is not None

    paths = {route.path for route in import_module("flwr.superlink.routers.fleet.router").router.routes}
    options = Config(
        Gate(app, registered if config.enable_supernode_auth else None, paths, state),
        ws="none",
        proxy_headers=False,
        log_config=None,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certfile,
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    options.load()
    open_connections = ServerState()
    log(INFO, "The port for clients, of the Fleet API alone, is %s:%s.", *listener.getsockname()[:2])
    accepting = asyncio.create_task(_accept(listener, lambda: _Connection(options, open_connections, {}), options.ssl))
    try:
        yield
    finally:
        accepting.cancel()
        listener.close()
        for connection in list(open_connections.connections):
            connection.shutdown()


async def _accept(listener: socket.socket, create: Callable[[], _Connection], context: ssl.SSLContext | None) -> None:
    """Accept connections; the one that waits longest for its first request ends if too many others wait."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    waiting: dict[asyncio.Task[None], None] = {}
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError:  # such as: too many open files
            await asyncio.sleep(0.1)
            continue
        if len(waiting) >= WAITING:
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.cancel()
        task = loop.create_task(_connect(accepted, create, context))
        waiting[task] = None
        task.add_done_callback(lambda done: waiting.pop(done, None))


async def _connect(accepted: socket.socket, create: Callable[[], _Connection], context: ssl.SSLContext | None) -> None:
    """Wait for the TLS handshake and the first request of a connection."""
    loop = asyncio.get_running_loop()
    tls = {"ssl_handshake_timeout": PATIENCE, "ssl_shutdown_timeout": FAREWELL} if context else {}
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            connection = create()
            transport, _ = await loop.connect_accepted_socket(lambda: connection, accepted, ssl=context, **tls)
            try:
                await connection.asked.wait()
            except asyncio.CancelledError:
                transport.abort()
                raise


class _Connection(H11Protocol):
    """A connection; ``asked`` is set once its first request has come, or it has ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.logger, self.access_log = _LOGGER, False
        self.asked = asyncio.Event()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            self.asked.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.asked.set()
        super().connection_lost(exc)


class RefusedError(Exception):
    """A request that is not passed on."""

    def __init__(self, status: HTTPStatus, text: str | None = None) -> None:
        super().__init__(text or status.phrase)
        self.status = status


class Gate:
    """An ASGI app that passes on calls of the Fleet API by registered nodes.

    Args:
        app: the SuperLink's.
        registered: tells whether a public key is that of a registered node; None: the SuperLink does not authenticate.
        paths: paths of the Fleet API.
        state: lifespan state of ``app``.
    """

    def __init__(
        self, app: Any, registered: Callable[[bytes], bool] | None, paths: set[str], state: Mapping[str, Any]
    ) -> None:
        self._app, self._registered, self._paths, self._state = app, registered, paths, state
        self._of_one: defaultdict[bytes, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_ONE))
        self._in_all = asyncio.Semaphore(IN_ALL)
        self._lost: Counter[bytes] = Counter()  # turns of a node that late bodies have cost it

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on to ``app`` where a node may make it now, or refuse it."""
        with suppress(LocalProtocolError):  # garbage followed the request, so that no answer can be sent
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        key = b""
        try:
            if self._registered is not None:
                key = await run_in_threadpool(_authenticated, headers, self._registered)
            if scope["method"] != "POST" or scope["path"] not in self._paths:
                raise RefusedError(HTTPStatus.NOT_FOUND)
            if b"content-length" not in headers:
                raise RefusedError(HTTPStatus.LENGTH_REQUIRED)
            if b"transfer-encoding" in headers or [name for name, _ in scope["headers"]].count(b"content-length") > 1:
                raise RefusedError(HTTPStatus.BAD_REQUEST)
            if int(headers[b"content-length"]) > MAX_MESSAGE:
                raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except RefusedError as refused:
            if scope["path"] == ACTIVATE and refused.status == HTTPStatus.UNAUTHORIZED:
                refused = RefusedError(HTTPStatus.BAD_REQUEST, UNKNOWN_NODE)
            await _refuse(send, refused)
            return
        body = _Body(receive)
        await self._of_one[key].acquire()
        try:
            async with self._in_all:
                body.begin(int(headers[b"content-length"]))
                await self._app({**scope, "state": dict(self._state)}, body.receive, send)
        finally:
            if body.late and self._lost[key] < OF_ONE - 1:
                self._lost[key] += 1
            else:
                self._of_one[key].release()


class _Body:
    """The body of a request, which ends the request if it is longer than announced, or does not arrive in time.

    Attributes:
        late: whether it did not arrive in time.
    """

    def __init__(self, receive: Any) -> None:
        self._receive, self._left, self._deadline = receive, 0, 0.0
        self._complete = self.late = False

    def begin(self, length: int) -> None:
        """Count from now; the body is announced to have so many bytes."""
        self._left, self._deadline = length, time.monotonic() + PATIENCE + length / SLOWEST

    async def receive(self) -> Any:
        """Return the next part; after the last one, wait for the end of the connection as long as the reply takes."""
        if self._complete:
            return await self._receive()
        try:
            event = await asyncio.wait_for(self._receive(), min(PATIENCE, self._deadline - time.monotonic()))
        except TimeoutError:
            self.late = True
            return {"type": "http.disconnect"}
        self._left -= len(event.get("body", b""))
        self._complete = not event.get("more_body", False)
        return event if self._left >= 0 else {"type": "http.disconnect"}


def _authenticated(headers: Mapping[bytes, bytes], registered: Callable[[bytes], bool]) -> bytes:
    """Return the key of the registered node that signed the time of a request, or raise :class:`RefusedError`."""
    try:
        key, signature = (b64decode(headers[name], validate=True) for name in (_KEY, _SIGNATURE))
        timestamp = headers[_TIMESTAMP]
        age = (date.now() - datetime.fromisoformat(timestamp.decode("ascii"))).total_seconds()
        signed = verify_signature(bytes_to_public_key(key), timestamp, signature)
    except Exception:  # anything may be in the headers of a stranger
        signed = False
    if not signed:
        raise RefusedError(HTTPStatus.UNAUTHORIZED)
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise RefusedError(HTTPStatus.UNAUTHORIZED, WRONG_TIME)
    if not registered(key):
        raise RefusedError(HTTPStatus.UNAUTHORIZED)
    return key


async def _refuse(send: Any, refused: RefusedError) -> None:
    body = str(refused).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
