"""The Ray engine: actors of Ray, on this machine or on a cluster, replace the worker processes of the local engine."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engine.ray_workers import RayWorkers

# Seconds to wait for the head of a cluster to accept a connection.
_CONNECT_SECONDS = 10.0
# Seconds to wait for all Ray nodes to look for the run folder.
_NODE_SECONDS = 60.0
# Attempts to start Ray on this machine. A node of Ray ends if its agents take more than 15 s to start, as they may on a
# busy machine, and no option of `ray.init` changes that (ray-project/ray, issue 65983).
_STARTS = 3

_log = getLogger(__name__)


class EngineError(RuntimeError):
    """An engine is not installed, or its cluster cannot be used."""


@contextmanager
def ray_workers(client_cpus: int = 1, folder: str | Path | None = None) -> Iterator[RayWorkers]:
    """Start an actor for every client that the cluster can run at a time; :class:`~.ray_workers.RayGrid` needs them.

    The cluster is the one at ``host:port`` in RAY_ADDRESS, otherwise Ray on this machine. If this process is connected
    to Ray, it stays so.

    Args:
        client_cpus: CPU cores of a client, which determine how many run at a time.
        folder: run folder, in which clients keep their state and their ledgers; every node of a cluster must have it.

    Raises:
        EngineError: Ray is not installed, there is no cluster at the address, no node has the cores for a client, or
            a node does not have the folder.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("the Ray engine requires Ray: pip install 'coterie[simulation]', or use --engine local")
    import ray

    from coterie.engine.ray_workers import RayWorkers

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    connected = ray.is_initialized()
    if not connected:
        before = signal.getsignal(signal.SIGTERM)
        _connect(os.environ.get("RAY_ADDRESS", ""))
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray replaces it
    try:
        if folder is not None:
            _check_folder(Path(folder).absolute())
        cores = [int(node["Resources"].get("CPU", 0)) for node in _nodes()]
        room = sum(count // client_cpus for count in cores)
        if not room:  # Ray would wait for a larger node
            raise EngineError(
                f"--client-cpus {client_cpus}: Ray runs a client on one node, and its largest has "
                f"{max(cores, default=0)} cores: use fewer cores, or set RAY_ADDRESS to a larger cluster"
            )
        workers = RayWorkers(room, client_cpus)
        try:
            yield workers
        finally:
            workers.close()
    finally:
        if not connected:
            ray.shutdown()


def _connect(address: str) -> None:
    """Connect to a cluster, or start Ray on this machine.

    Raises:
        EngineError: there is no cluster, or Ray does not start.
    """
    import ray

    search_path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": search_path}}, "logging_level": WARNING}
    if not address:
        _start(options)
        return
    if address != "auto" and "://" not in address:  # other forms of Ray
        host, _, port = address.rpartition(":")
        try:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"RAY_ADDRESS = {address!r}: no connection ({error}); it must be host:port as in `ray start "
                "--address`, of the machine on which `ray start --head` runs"
            ) from None
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no common class of its errors
        raise EngineError(f"RAY_ADDRESS = {address!r}: cannot use a Ray cluster there: {error}") from error


def _start(options: dict[str, Any]) -> None:
    """Start Ray on this machine, several times if it fails: nodes fail on busy machines."""
    import ray

    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(include_dashboard=False, **options)
            return
        except Exception as error:  # the only class that Ray has for a node that does not start
            if attempt == _STARTS:
                raise EngineError(
                    f"Ray does not start on this machine: {error} Use --engine local, or start Ray yourself and set "
                    "RAY_ADDRESS (docs/simulation.md)"
                ) from error
            _log.warning("Ray does not start on this machine; attempt %d of %d follows", attempt + 1, _STARTS)


def _check_folder(folder: Path) -> None:
    """Check that all nodes have the run folder.

    Clients keep state and ledgers there, and may run on any node. A ledger on each node would understate the cost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    exists = ray.remote(num_cpus=0)(os.path.isdir)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
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

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
