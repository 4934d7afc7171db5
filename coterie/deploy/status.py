"""Nodes and runs of a SuperLink, through the Control API that ``flwr`` uses: their status, and new nodes."""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.deploy.edge import explain_verification_error, proxy_hint
from coterie.deploy.progress import read_progress
from coterie.site.errors import DeployError

if TYPE_CHECKING:
    from flwr.cli.typing import SuperLinkConnection
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.run_pb2 import Run as RunInfo
    from flwr.supercore.control import ControlHttpClient

#: Maximum number of listed runs, the latest first.
RUNS = 20
_TIMEOUT = 5.0  # seconds for the log of a run that has none yet: the stream stays silent then
_UNSTARTED = ("pending", "starting")


@dataclass(frozen=True)
class Node:
    """A registered SuperNode: the name of its registration, and its status.

    ``status`` is online, offline or registered (never online so far); ``last_seen`` is the seconds since the last
    heartbeat, or since the SuperLink marked the node as offline; ``online_since`` is None unless it is online.
    """

    id: int
    name: str
    status: str
    last_seen: float | None
    online_since: datetime | None


@dataclass(frozen=True)
class Run:
    """A run: ``status`` as in ``flwr list``, why (``detail``), when it ``started``, and for how many ``seconds``."""

    id: int
    app: str
    status: str
    detail: str
    started: datetime | None
    seconds: float


@dataclass(frozen=True)
class Status:
    """The state of a SuperLink: nodes, runs (the latest first), and the progress of the first of them.

    ``progress`` is what :func:`coterie.deploy.progress.read_progress` finds in the log of ``runs[0]``.
    """

    connection: str
    address: str
    nodes: tuple[Node, ...]
    runs: tuple[Run, ...]
    progress: dict[str, Any] | None


def query_status(connection: str | None = None, run: int | None = None) -> Status:
    """Query the SuperLink of a connection in Flower's configuration.

    Args:
        connection: name of the connection; None for the default.
        run: list only this run; None for the latest ones.

    Raises:
        DeployError: the connection or run does not exist, or the SuperLink is unreachable.
    """
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest

    with _control(connection, run) as (link, client):
        nodes = client.ListNodes(ListNodesRequest())
        runs = client.ListRuns(ListRunsRequest(run_id=run, limit=None if run is not None else RUNS))
        here = sorted(nodes.nodes_info, key=lambda node_info: node_info.registered_at)
        run_infos = sorted(runs.run_dict.values(), key=lambda run_info: run_info.pending_at, reverse=True)
        started = bool(run_infos) and run_infos[0].status.status not in _UNSTARTED
        log = _log(client, run_infos[0].run_id) if started else ""
    return Status(
        link.name,
        str(link.address),
        tuple(
            _node(node_info, datetime.fromisoformat(nodes.now)) for node_info in here if not node_info.unregistered_at
        ),
        tuple(_run(run_info, datetime.fromisoformat(runs.now)) for run_info in run_infos),
        read_progress(log),
    )


def register_nodes(connection: str, keys: Mapping[str, Path]) -> None:
    """Register nodes; a node with the same name and another key is unregistered first.

    Args:
        connection: name of the connection in Flower's configuration.
        keys: public keys by the name of the node, files as of `coterie certs`.

    Raises:
        DeployError: the connection does not exist, or the SuperLink is unreachable or refuses a key.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    with _control(connection, None) as (_, client):
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
        registered = {node_info.name: node_info for node_info in nodes if not node_info.unregistered_at}
        for name, path in keys.items():
            key: Any = load_ssh_public_key(path.read_bytes())
            former, public_key = registered.get(name), public_key_to_bytes(key)
            if former is not None and former.public_key == public_key:
                continue
            if former is not None:
                client.UnregisterNode(UnregisterNodeRequest(node_id=former.node_id))
            client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))


def _connection(name: str | None) -> SuperLinkConnection:
    """Read a connection from config.toml in FLWR_HOME, without creating it if missing."""
    import click
    from flwr.cli.constant import FLOWER_CONFIG_FILE, LOCAL_SUPERLINK_HTTP_API_PORT
    from flwr.cli.flower_config import parse_superlink_connection, read_flower_config
    from flwr.cli.typing import SuperLinkConnection
    from flwr.supercore.utils import get_flwr_home

    path = get_flwr_home() / FLOWER_CONFIG_FILE
    remedy = "add [superlink.NAME] with address and root-certificates"
    if not path.exists():
        raise DeployError(f"{path}: does not exist: {remedy} (docs/deployment.md), or set FLWR_HOME")
    try:
        connections = read_flower_config()[0].get("superlink", {})
        wanted = connections.get("default") if name is None else name
        if wanted is None:
            raise DeployError(f"{path}: has no default connection: give CONNECTION, or add default to [superlink]")
        if not isinstance(connections.get(wanted), dict):
            there = ", ".join(key for key, value in connections.items() if isinstance(value, dict)) or "none"
            raise DeployError(f"{path}: has no connection {wanted} (available: {there}): {remedy}")
        link = parse_superlink_connection(connections[wanted], wanted)
    except DeployError:
        raise
    except (OSError, ValueError, click.ClickException) as error:
        raise DeployError(f"{path}: {error}") from None
    if link.address is None or link.address.startswith(":"):  # Flower would start a local SuperLink
        return SuperLinkConnection(wanted, f"127.0.0.1:{LOCAL_SUPERLINK_HTTP_API_PORT}", insecure=True)
    return link


@contextlib.contextmanager
def _control(name: str | None, run: int | None) -> Iterator[tuple[SuperLinkConnection, ControlHttpClient]]:
    """Connect to a Control API; its errors become one line with a solution."""
    link = _connection(name)
    import click
    import httpx
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.supercore.error import ApiErrorCode, FlowerError

    where = f"connection {link.name} ({link.address}):"
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Flower prints which SuperLink it uses
            client = init_http_client_from_connection(link)
        with client:
            yield link, client
    except httpx.HTTPStatusError as error:
        said = FlowerError.from_json(error.response.text)
        if said is not None and said.code == ApiErrorCode.RUN_ID_NOT_FOUND:
            raise DeployError(f"{where} run {run} not found: coterie status lists the latest runs") from None
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise DeployError(f"{where} unknown account: run flwr login {link.name}") from None
        detail = said.message if said is not None else "is this the SuperLink's Control API?"
        raise DeployError(f"{where} HTTP status {error.response.status_code}: {detail}") from None
    except httpx.RequestError as error:
        raise DeployError(f"{where} {_unreachable(error, link)}{proxy_hint(_host(link))}") from None
    except httpx.InvalidURL:
        raise DeployError(f"{where} address must be HOST:PORT, without a scheme") from None
    except ssl.SSLError:
        problem = f"{link.root_certificates} contains no certificate in PEM format: use ca.crt"
        raise DeployError(f"{where} {problem}") from None
    except click.ClickException as error:
        raise DeployError(f"{where} {error.message}") from None
    except ValueError as error:
        raise DeployError(f"{where} does not speak Flower's Control API ({error})") from None


def _host(link: SuperLinkConnection) -> str:
    return str(link.address).rpartition(":")[0]


def _unreachable(error: BaseException, link: SuperLinkConnection) -> str:
    """Explain the error by its first system-level cause."""
    host, port = _host(link), str(link.address).rpartition(":")[2]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return explain_verification_error(
                cause, host, link.root_certificates or "an authority that this machine trusts"
            )
        if isinstance(cause, ssl.SSLError):
            return f"TLS handshake failed ({cause.reason}): was the SuperLink started with --insecure?"
        if isinstance(cause, socket.gaierror):
            return f"cannot resolve host {host}: check the name and this machine's DNS"
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused: is the SuperLink running, with its Control API on port {port}?"
        if isinstance(cause, TimeoutError):
            return "no response: does a firewall block the connection?"
        cause = cause.__cause__ or cause.__context__
    if link.insecure:
        return f"no valid response ({error}): does the SuperLink use TLS? Then replace insecure by root-certificates"
    return f"no valid response ({error})"


def _log(client: ControlHttpClient, run: int) -> str:
    """Read the log of a run so far; the SuperLink sends it immediately and streams updates during the run."""
    from flwr.proto.control_pb2 import StreamLogsRequest

    answers: list[Any] = []

    def read() -> None:
        try:
            answers.append(next(client.StreamLogs(StreamLogsRequest(run_id=run)), None))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    answer = answers[0] if answers else None
    if isinstance(answer, Exception):
        raise answer
    return answer.log_output if answer is not None else ""


def _node(node: NodeInfo, now: datetime) -> Node:
    from flwr.common.constant import HEARTBEAT_PATIENCE

    seen = since = None
    if node.status == "online":
        seen = now.timestamp() - (node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval)
        since = _time(node.last_activated_at)
    elif gone := _time(node.last_deactivated_at):
        seen = (now - gone).total_seconds()
    return Node(node.node_id, node.name, node.status, None if seen is None else max(seen, 0.0), since)


def _run(run: RunInfo, now: datetime) -> Run:
    words = [word for word in (run.status.status, run.status.sub_status) if word]
    started, finished = _time(run.running_at), _time(run.finished_at)
    seconds = ((finished or now) - started).total_seconds() if started else 0.0
    return Run(run.run_id, f"{run.fab_id} {run.fab_version}", ":".join(words), run.status.details, started, seconds)


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
