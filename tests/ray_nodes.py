"""Nodes of Ray, as ``ray start`` starts them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAY = Path(sys.executable).parent / "ray"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(log, *words, **variables):
    """Start a node with free ports of its own; its process, which leads a group of all that it starts."""
    words += ("--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats", "--object-store-memory=100000000")
    # Nodes on one machine share Ray's default range, and a driver ends if its port is taken.
    words += ("--min-worker-port=0", "--max-worker-port=0")
    # A node that lets its agents choose their ports ends if they have none after 15 s, as on a busy machine.
    agents = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    words += tuple(f"--{agent}-port={free_port()}" for agent in agents)
    variables = os.environ | {"RAY_agent_register_timeout_ms": "300000"} | variables
    with log.open("w") as out:
        return subprocess.Popen([RAY, "start", *words], env=variables, stdout=out, stderr=out, start_new_session=True)


def start_head(folder, *words, **variables):
    """Start the head of a cluster in a folder with a short path, as sockets need; its process and its address."""
    port = free_port()
    words = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/ray", *words)
    head = start(folder / "head.log", *words, **variables)
    try:
        until(lambda: answers(port))
    except AssertionError:
        end(head)
        raise
    return head, f"127.0.0.1:{port}"


def end(node):
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@contextlib.contextmanager
def short_folder():
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def one_node(**variables):
    """The address of a cluster that is this machine; its processes have these environment variables."""
    with short_folder() as folder:
        head, address = start_head(folder, **variables)
        try:
            yield address
        finally:
            end(head)


def until(happened, seconds=240):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)
