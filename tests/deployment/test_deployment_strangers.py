"""Strangers at the one published port, 9092 of docker/server: the server stays within its container's limit."""

import json

import grpc
import pytest
from kit.strangers import LARGE, attack, send
from stack import ROOT, Stack, docker

from coterie.flower.transport import nodes_speak_http

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

# Megabytes by which the memory of the container may grow while 2,000 connections are open.
MOST = 200


def memory(container):
    """Memory of a container without the page cache, in MB."""
    used = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", container).stdout.split("/")[0].strip()
    number = float(used.rstrip("GMKiB"))
    return number * {"G": 1074, "M": 1.049, "K": 0.001}[used.removeprefix(used.rstrip("GMKiB"))[0]]


def test_strangers_at_the_published_port(image, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    folder.chmod(0o755)
    server = Stack(
        folder, "coterie-test-strangers", ROOT / "docker" / "server" / "compose.yml", FLEET_PORT="0", SERVER_MEMORY="1g"
    )
    server.prepare()
    subject, pki = "server", server.secrets
    try:
        server.compose("up", "--detach", "--wait", subject, timeout=300)
        container = server.container(subject)
        port = int(server.compose("port", subject, "9092").stdout.rpartition(":")[2])
        before = memory(container)
        most = attack(port, pki, lambda: memory(container), talking=1000, silent=1000)
        large = grpc.StatusCode.UNAUTHENTICATED if nodes_speak_http() else grpc.StatusCode.RESOURCE_EXHAUSTED
        assert send(pki, port, LARGE, node=0) == large  # with a certificate
        assert send(pki, port, 100) == grpc.StatusCode.UNAVAILABLE
        assert send(pki, port, 100, node=0) == grpc.StatusCode.UNAUTHENTICATED
        print(f"server: {before:.0f} MB before, {most:.0f} MB at most, {memory(container):.0f} MB after")
        (state,) = json.loads(docker("inspect", container).stdout)
        assert state["HostConfig"]["Memory"] == 2**30
        assert (state["State"]["Health"]["Status"], state["State"]["OOMKilled"], state["RestartCount"]) == (
            "healthy",
            False,
            0,
        )
        assert most - before < MOST
    finally:
        server.down()
