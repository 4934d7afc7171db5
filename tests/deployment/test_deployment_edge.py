"""docker/server and docker/edge: a client with its own data on a machine of its own dials out to the server."""

import pytest
from stack import OWN_DATA, ROOT, Stack

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

RUN = {
    **OWN_DATA,
    "strategy": "fedavg",
    "clusters": 1,
    "clients": 1,
    "privacy-unit": "record",
    "samples-per-client": 480,
    "batch-size": 48,
    "epsilon": 8.0,
    "sampling-rate": 1.0,
    "rounds": 2,
    "evaluate": "off",
    "registration-timeout": 120.0,
    "min-clients": 1,
    "min-replies": 1.0,
}


def test_a_client_on_a_machine_of_its_own(image, tmp_path_factory):
    folder = tmp_path_factory.mktemp("edge")
    folder.chmod(0o755)
    server = Stack(folder, "coterie-test-server", ROOT / "docker" / "server" / "compose.yml", FLEET_PORT="0")
    server.prepare()
    edge = Stack(
        folder,
        "coterie-test-edge",
        ROOT / "docker" / "edge" / "compose.yml",
        DATA=str(server.data / "client-0"),
        BUNDLE=str(server.secrets / "sites" / "node-0.coterie"),
        BUDGET=str(folder / "budget"),
        CLIENT_ARGS="--guarantee trusted-server",
    )
    way_to_server = {"external": True, "name": "coterie-test-server_fleet"}
    edge.override({}, networks={"default": way_to_server})
    try:
        server.compose("up", "--detach", "--wait", timeout=300)
        # The passphrase opens the bundle once.
        once = {"COTERIE_PASSPHRASE": server.passphrases[0], "CHECK": "--check"}
        assert "all checks passed" in edge.compose("run", "--rm", "client", environment=once).stdout
        edge.compose("up", "--detach", "--wait", timeout=120)
        run = server.submit(**RUN, out="/server/runs/edge")
        server.complete(run)
        assert [line["replies"]["accepted"] for line in server.lines("edge")] == [1, 1], server.log(run) + edge.logs()
        assert server.result("edge")["certified"]
        assert edge.spent("client", 0)["charges"] == 2
    finally:
        edge.down()
        server.down()
