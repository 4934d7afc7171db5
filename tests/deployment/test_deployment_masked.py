"""Ten clients in containers mask their updates, and, beside it, send them in the clear: time and bytes of a round."""

import json

import pytest
from stack import OWN_DATA, Stack, further_clients

from coterie.privacy import Streams, read_ledger
from coterie.server import RunConfig
from coterie.server.run import initial_models

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]

CLIENTS, ROUNDS = 10, 2
RUN = {
    **OWN_DATA,
    "strategy": "ifca",
    "clusters": 2,
    "clients": CLIENTS,
    "privacy-unit": "client",
    "sampling-rate": 1.0,
    "epsilon": 50.0,
    "delta": 1e-3,
    "rounds": ROUNDS,
    "evaluate": "off",
    "registration-timeout": 120.0,
    "min-clients": CLIENTS,
}
MASKED_STEPS = ["train.open", "train.masked", "train.survivors", "train.unmask"]
ROSTER = "/run/secrets/roster.json"
# Bytes that the SuperLink receives from nodes, and sends to them: all of its networks but that of the ServerApp.
NODES = """
import fcntl, socket
control, sums, asked = socket.gethostbyname("superlink.control"), [0, 0], socket.socket()
for line in list(open("/proc/net/dev"))[2:]:
    name, _, counts = line.partition(":")
    address = fcntl.ioctl(asked, 0x8915, name.strip().encode().ljust(256, bytes(1)))[20:24]
    if socket.inet_ntoa(address) not in (control, "127.0.0.1"):
        sums = [total + int(counts.split()[place]) for total, place in zip(sums, (0, 8))]
print(*sums)
"""


@pytest.fixture(scope="module")
def stack(image, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    folder.chmod(0o755)
    deployment = Stack(
        folder, "coterie-test-masked", clients=CLIENTS, CLIENT_CONFIG=f'guarantee="trusted-server" roster="{ROSTER}"'
    )
    deployment.prepare()
    deployment.override(**further_clients(CLIENTS))
    try:
        deployment.compose("up", *(f"keys-{client}" for client in range(CLIENTS)))
        deployment.up()
        yield deployment
    finally:
        deployment.down()


def bytes_of_nodes(stack):
    """Up, and down."""
    return [int(number) for number in stack.execute("superlink", "python3", "-c", NODES).stdout.split()]


def test_ten_clients_mask_their_updates(stack):
    sent = {}
    for mechanism in ("joint", "secure"):
        before = bytes_of_nodes(stack)
        stack.complete(stack.submit(**RUN, mechanism=mechanism, out=f"/runs/{mechanism}"))
        up, down = (after - was for after, was in zip(bytes_of_nodes(stack), before, strict=True))
        seconds = [line["seconds"] for line in stack.lines(mechanism)]
        print(f"{mechanism}: rounds of {', '.join(f'{one:.1f}' for one in seconds)} s;", end=" ")
        print(f"the SuperLink receives {up / 1e6:.2f} MB from nodes, and sends {down / 1e6:.2f} MB")
        result, sent[mechanism] = stack.result(mechanism), up
        assert (len(seconds), result["rounds"], result.get("skipped_rounds", [])) == (ROUNDS, ROUNDS, [])
        assert (result["certified"], result["epsilon"] <= RUN["epsilon"]) == (True, True)
    # A vector has room for the update in every cluster; joint sends one.
    _, layout = initial_models(RunConfig(RUN), Streams(0))
    assert sent["secure"] - sent["joint"] > CLIENTS * ROUNDS * layout.size * 4
    _, charges = read_ledger(stack.runs / "secure" / "ledger.jsonl")
    assert [charge["round"] for charge in charges] == list(range(1, ROUNDS + 1))


def test_apps_have_signed_keys_and_not_those_of_their_nodes(stack):
    for client in (0, CLIENTS - 1):
        service = f"clientapp-{client}"
        assert stack.paid(client) == list(range(1, ROUNDS + 1))
        audit = stack.execute(service, "cat", f"/state/client-{client}.audit.jsonl").stdout
        asked = [entry["type"] for entry in map(json.loads, audit.splitlines()) if entry.get("round")]
        assert asked == ["train"] * ROUNDS + MASKED_STEPS * ROUNDS
        listed = stack.execute(service, "ls", "/run/secrets", "/state").stdout.split()
        assert {"roster.json", f"client-{client}.masking-key.signed"} <= set(listed)
        assert "node.key" not in listed
        assert f"client-{client}.open-round" not in listed
