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


@pytest.fixture(scope="module")
def stack(image, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    folder.chmod(0o755)
    deployment = Stack(folder, "coterie-test-masked", clients=CLIENTS)
    deployment.prepare()
    deployment.override(**further_clients(CLIENTS))
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.down()


def bytes_of_nodes(stack):
    """Up, and down: what the server receives and sends in all of its networks."""
    lines = stack.execute("server", "cat", "/proc/net/dev").stdout.splitlines()[2:]
    counts = [line.partition(":")[2].split() for line in lines if line.split(":")[0].strip() != "lo"]
    return [sum(int(numbers[place]) for numbers in counts) for place in (0, 8)]


def test_ten_clients_mask_their_updates(stack):
    sent = {}
    for mechanism in ("joint", "secure"):
        before = bytes_of_nodes(stack)
        stack.complete(stack.submit(**RUN, mechanism=mechanism, out=f"/server/runs/{mechanism}"))
        up, down = (after - was for after, was in zip(bytes_of_nodes(stack), before, strict=True))
        seconds = [line["seconds"] for line in stack.lines(mechanism)]
        print(f"{mechanism}: rounds of {', '.join(f'{one:.1f}' for one in seconds)} s;", end=" ")
        print(f"the server receives {up / 1e6:.2f} MB from nodes, and sends {down / 1e6:.2f} MB")
        result, sent[mechanism] = stack.result(mechanism), up
        assert (len(seconds), result["rounds"], result.get("skipped_rounds", [])) == (ROUNDS, ROUNDS, [])
        assert (result["certified"], result["epsilon"] <= RUN["epsilon"]) == (True, True)
    # A vector has room for the update in every cluster; joint sends one.
    _, layout = initial_models(RunConfig(RUN), Streams(0))
    assert sent["secure"] - sent["joint"] > CLIENTS * ROUNDS * layout.size * 4
    _, charges = read_ledger(stack.runs / "secure" / "ledger.jsonl")
    assert [charge["round"] for charge in charges] == list(range(1, ROUNDS + 1))


def test_clients_have_signed_keys_and_keep_no_secret_of_a_round(stack):
    for client in (0, CLIENTS - 1):
        service = f"client-{client}"
        assert stack.paid(client) == list(range(1, ROUNDS + 1))
        audit = stack.execute(service, "cat", f"/state/client-{client}.audit.jsonl").stdout
        asked = [entry["type"] for entry in map(json.loads, audit.splitlines()) if entry.get("round")]
        assert asked == ["train"] * ROUNDS + MASKED_STEPS * ROUNDS
        listed = stack.execute(service, "ls", "/state").stdout.split()
        assert f"client-{client}.masking-key.signed" in listed
        assert f"client-{client}.open-round" not in listed
