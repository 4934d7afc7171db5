"""The Ray engine: Flower's simulation of the same ServerApp and ClientApp, on this machine or on a Ray cluster.

Flower's simulation keeps one Ray actor for each client that the cluster can run at a time. If an actor dies, because
its node fails or a client kills its process, Flower returns it to the idle ones, where it fails every later message.
:func:`run_on_ray` uses a pool that replaces such actors, so that only the replies in progress are lost.
"""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from coterie.wire.messages import payload

# Seconds to wait for the head of a cluster to accept a connection.
_CONNECT_SECONDS = 10.0
# Cores that Flower reserves for a client by default.
_FLOWERS_CPUS = 2
# Bytes of the messages in progress, and seconds between two looks for replies.
_IN_PROGRESS = 1 << 28
_POLL_SECONDS = 0.05
# Seconds to wait for all Ray nodes to look for the run folder.
_NODE_SECONDS = 60.0


class EngineError(RuntimeError):
    """An engine is not installed, or its cluster cannot be used."""


def run_on_ray(
    main: Callable[[Grid], None],
    clients: int,
    *,
    address: str = "",
    client_cpus: int | None = None,
    folder: str | Path | None = None,
) -> None:
    """Call ``main`` with a grid of ``clients`` simulated nodes; its exceptions propagate.

    Args:
        main: the run.
        clients: M.
        address: ``host:port`` of a running Ray cluster; empty: that in RAY_ADDRESS, otherwise Ray on this machine.
        client_cpus: CPU cores of a client, which determine how many run at a time; None: Flower's default, 2.
        folder: run folder, in which clients keep their state and their ledgers; every node of a cluster must have it.

    Raises:
        EngineError: Ray is not installed, there is no cluster at the address, or a node does not have the folder.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("the Ray engine requires Ray: pip install 'coterie[simulation]', or use --engine local")
    from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
    from flwr.simulation import run_simulation

    from coterie.client.app import app as client_app

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_cluster = bool(address) or "RAY_ADDRESS" in os.environ
    if on_cluster:
        _connect(address, None if folder is None else Path(folder))
    cores = _cores() if on_cluster else os.cpu_count() or 1
    at_once = math.ceil(cores / (client_cpus or _FLOWERS_CPUS))

    server_app = ServerApp()

    @server_app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(stream_replies(grid, 2 * at_once))

    settings: BackendConfig = {"client_resources": {"num_cpus": client_cpus}} if client_cpus else {}
    with warnings.catch_warnings(), _replacing_actors():
        # Flower recommends `flwr run`, which needs a SuperLink and an app folder, and runs the same simulation.
        warnings.simplefilter("ignore", DeprecationWarning)
        run_simulation(server_app, client_app, num_supernodes=clients, backend_config=settings)


def stream_replies(grid: Grid, at_least: int) -> Grid:
    """Make a grid yield replies as they arrive, and keep few large messages in progress; return it.

    Flower's own ``send_and_receive`` sends all messages at once, and returns all replies in one list.

    Args:
        grid: of Flower; it is changed in place.
        at_least: messages in progress, however large they are.
    """

    def send_and_receive(messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        waiting, sent = deque(messages), set[str]()
        largest = max((payload(message.content) for message in waiting), default=0)
        limit = max(at_least, _IN_PROGRESS // max(largest, 1))
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while (waiting or sent) and time.monotonic() < ends:
            due = [waiting.popleft() for _ in range(min(len(waiting), limit - len(sent)))]
            sent.update(grid.push_messages(due))
            replies = list(grid.pull_messages(list(sent)))
            sent.difference_update(reply.metadata.reply_to_message_id for reply in replies)
            yield from replies
            if not replies:
                time.sleep(_POLL_SECONDS)

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid


def _connect(address: str, folder: Path | None) -> None:
    """Connect to a cluster; Flower's simulation then uses this connection.

    Raises:
        EngineError: there is no cluster, or a node does not have the folder.
    """
    import ray

    if address:
        _check_address(address)
    search_path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
    try:
        ray.init(address or None, runtime_env={"env_vars": {"PYTHONPATH": search_path}}, logging_level=WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"ray-address = {address!r}" if address else f"RAY_ADDRESS = {os.environ['RAY_ADDRESS']!r}"
        raise EngineError(f"{where}: cannot use a Ray cluster there: {error}") from error
    try:
        if folder is not None:
            _check_folder(folder.absolute())
    except BaseException:
        ray.shutdown()
        raise


def _check_address(address: str) -> None:
    """Check that something listens at the address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(
            f"ray-address = {address!r}: no connection ({error}); it must be host:port as in `ray start --address`, "
            "of the machine on which `ray start --head` runs"
        ) from None


def _check_folder(folder: Path) -> None:
    """Check that all nodes have the run folder.

    Clients keep state and ledgers there, and may run on any node. A ledger on each node would understate the cost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    exists = ray.remote(num_cpus=0)(os.path.isdir)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes() if node["Alive"]}
    answers = {
        name: exists.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote(str(folder))
        for name in nodes
    }
    for name, answer in answers.items():
        try:
            if ray.get(answer, timeout=_NODE_SECONDS):
                continue
            reason = f"does not have the run folder {folder}: put it on storage that all nodes share (--out)"
        except ray.exceptions.RayError as error:
            reason = f"does not work: {error}"
        raise EngineError(f"the Ray node at {nodes[name]} {reason}")


def _nodes() -> list[dict[str, Any]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _cores() -> float:
    """Return the number of cores of all Ray nodes."""
    return float(sum(node["Resources"].get("CPU", 0) for node in _nodes() if node["Alive"]))


@contextmanager
def _replacing_actors() -> Iterator[None]:
    """Let Flower's simulation use a pool that replaces actors that died; Flower has no public interface for it."""
    from flwr.server.superlink.fleet.vce.backend import raybackend

    from coterie.engine.ray_pool import ReplacingActorPool
    from coterie.flower import check

    check("engine.ray")
    backend: Any = raybackend
    original, backend.BasicActorPool = backend.BasicActorPool, ReplacingActorPool
    try:
        yield
    finally:
        backend.BasicActorPool = original
