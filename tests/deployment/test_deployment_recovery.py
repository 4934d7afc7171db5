"""Nodes, networks and servers that fail in the middle of a run: it ends with all its rounds, within every budget."""

import time

import pytest
from safetensors.torch import load_file
from stack import OF_RECORDS

from coterie.models import NetworkSpec, constants_of, differing

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]


def test_a_run_survives_a_node_a_network_the_superlink_and_the_serverapp(stack):
    rounds, network = 14, NetworkSpec("mlp-32", adapters="lora:rank=2")
    run = {**OF_RECORDS, "model": network.model, "adapters": network.adapters}
    run_id = stack.submit(**run, rounds=rounds, out="/server/runs/faults")
    stack.until(lambda: len(stack.lines("faults")) >= 1)
    stack.kill("client-0", "coterie.deploy.supernode")  # comes back after 60 s, when the SuperLink takes it again
    stack.until(lambda: len(stack.lines("faults")) >= 3)
    with stack.cut_off("client-1", "fleet-1"):
        time.sleep(60)
    stack.until(lambda: len(stack.lines("faults")) >= 5)
    with stack.paused("client-0"):  # the round waits for it, so that others have paid when the server dies
        time.sleep(5)  # the round before ends, if it has its reply
        stack.until(lambda: max(stack.paid(2)) == len(stack.lines("faults")) + 1)
        stack.kill("server", "flwr-serverapp")
        done = len(stack.lines("faults"))
    stack.wait(run_id, seconds=360)
    assert 5 <= len(stack.lines("faults")) == done < rounds - 3
    resumed = stack.submit(**run, rounds=rounds, out="/server/runs/faults", resume=True)
    stack.until(lambda: len(stack.lines("faults")) >= done + 2)
    stack.kill("server", "coterie server")  # SuperLink and ServerApp
    stack.until(lambda: stack.cli("coterie", "status", check=False).returncode == 0)
    stack.wait(resumed, seconds=360)
    assert done + 2 <= len(stack.lines("faults")) < rounds
    resumed = stack.submit(**run, rounds=rounds, out="/server/runs/faults", resume=True)
    stack.complete(resumed)

    lines = stack.lines("faults")
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    result = stack.result("faults")
    assert result["certified"]
    assert result["epsilon"] <= OF_RECORDS["epsilon"] * (1 + 1e-9)
    assert [line["replies"]["accepted"] for line in lines] == [3] * rounds
    said = stack.log(run_id)
    assert all(f"no reply from clients [{client}]" in said for client in (0, 1))
    assert "client 2 replays the cached reply to a repeated request" in stack.logs("client-2")
    for client in range(3):
        # No charge is lost, and none is made for a question that is only asked again.
        assert stack.paid(client) == list(range(1, rounds + 1))
        assert stack.spent(f"client-{client}", client)["epsilon"] <= OF_RECORDS["epsilon"] * (1 + 1e-9)
    # Frozen parameters are those of round 0, bit for bit, and only adapters have travelled.
    models = stack.runs / "faults" / "models"
    frozen = load_file(models / "constants.safetensors")
    assert differing(frozen, constants_of(network, (1, 8, 8), 10)) == []
    assert load_file(models / "cluster-0.safetensors").keys().isdisjoint(frozen)
