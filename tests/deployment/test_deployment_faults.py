"""Nodes, networks and servers that fail in the middle of a run: it ends with all its rounds, within every budget."""

import shutil
import time

import pytest
from safetensors.torch import load_file
from stack import OWN_DATA

from coterie.models import NetworkSpec, constants_of, differing
from coterie.privacy import read_ledger

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1200)]

RUN = {
    **OWN_DATA,
    "strategy": "fedavg",
    "clusters": 1,
    "clients": 3,
    "privacy-unit": "record",
    "samples-per-client": 480,
    "batch-size": 48,
    "local-epochs": 1,
    "epsilon": 8.0,
    "sampling-rate": 1.0,
    "evaluate": "off",
    "registration-timeout": 240.0,
    "min-clients": 3,
    "min-replies": 1.0,
    "round-timeout": 45.0,
}


@pytest.mark.xdist_group("faults")
def test_a_run_survives_a_node_a_network_the_superlink_and_the_serverapp(stack):
    rounds, network = 24, NetworkSpec("mlp-32", adapters="lora:rank=2")
    run = {**RUN, "model": network.model, "adapters": network.adapters}
    run_id = stack.submit(**run, rounds=rounds, out="/runs/faults")
    stack.until(lambda: len(stack.lines("faults")) >= 1)
    stack.kill("supernode-0")  # comes back after more than 60 s, when the SuperLink takes it again
    stack.until(lambda: len(stack.lines("faults")) >= 3)
    with stack.cut_off("supernode-1", "fleet-1"):
        time.sleep(90)
    stack.until(lambda: len(stack.lines("faults")) >= 5)
    stack.kill("superlink")
    stack.until(lambda: len(stack.lines("faults")) >= 7)
    with stack.paused("clientapp-0"):  # the round waits for it, so that others have paid when the server dies
        time.sleep(5)  # the round before ends, if it has its reply
        stack.until(lambda: max(stack.paid(2)) == len(stack.lines("faults")) + 1)
        stack.kill("serverapp")
        done = len(stack.lines("faults"))
    stack.wait(run_id, seconds=180)
    assert 7 <= len(stack.lines("faults")) == done < rounds
    resumed = stack.submit(**run, rounds=rounds, out="/runs/faults", resume=True)
    stack.complete(resumed)

    lines = stack.lines("faults")
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    result = stack.result("faults")
    assert result["certified"]
    assert result["epsilon"] <= RUN["epsilon"] * (1 + 1e-9)
    assert [line["replies"]["accepted"] for line in lines] == [3] * rounds
    said = stack.log(run_id)
    assert all(f"no reply from clients [{client}]" in said for client in (0, 1))
    assert "client 2 replays the cached reply to a repeated request" in stack.logs("clientapp-2")
    for client in range(3):
        # No charge is lost, and none is made for a question that is only asked again.
        assert stack.paid(client) == list(range(1, rounds + 1))
        assert stack.spent(f"clientapp-{client}", client)["epsilon"] <= RUN["epsilon"] * (1 + 1e-9)
    # Frozen parameters are those of round 0, bit for bit, and only adapters have travelled.
    models = stack.runs / "faults" / "models"
    frozen = load_file(models / "constants.safetensors")
    assert differing(frozen, constants_of(network, (1, 8, 8), 10)) == []
    assert load_file(models / "cluster-0.safetensors").keys().isdisjoint(frozen)


def test_correlated_noise_and_a_serverapp_that_dies(stack):
    """A round is charged once, to its slot, before and after the crash."""
    rounds = 9
    settings = {
        **OWN_DATA,
        "clusters": 2,
        "clients": 3,
        "mechanism": "banded",
        "sampling-rate": 1 / 3,
        "rounds": rounds,
        "evaluate": "off",
        "registration-timeout": 240.0,
        "round-timeout": 45.0,
        "out": "/runs/banded",
    }
    run_id = stack.submit(**settings)
    stack.until(lambda: len(stack.lines("banded")) >= 1)
    with stack.paused("clientapp-0"):  # the run cannot end before the kill
        stack.kill("serverapp")
        done = len(stack.lines("banded"))
    stack.wait(run_id, seconds=180)
    assert done < rounds
    resumed = stack.submit(**settings, resume=True)
    stack.complete(resumed)

    result = stack.result("banded")
    skipped = result.get("skipped_rounds", [])
    assert [line["round"] for line in stack.lines("banded")] == [n for n in range(1, rounds + 1) if n not in skipped]
    _, charges = read_ledger(stack.runs / "banded" / "ledger.jsonl")
    assert [(charge["round"], charge["slot"]) for charge in charges] == [(n, (n - 1) % 3) for n in range(1, rounds + 1)]
    assert result["certified"]
    assert result["epsilon"] <= 8 * (1 + 1e-9)
    assert not any("show which clients take part" in stack.log(run) for run in (run_id, resumed))


@pytest.mark.skipif(not all(map(shutil.which, ("nsenter", "nft", "tc"))), reason="needs nsenter, nft and tc")
def test_a_bad_line_does_not_move_the_deadline(stack):
    # 30 % of packets lost on the way in, 1 Mbit/s on the way out; three models are 370 kB.
    lossy = "add table ip bad; add chain ip bad in { type filter hook input priority 0; }; "
    stack.in_network_of("supernode-2", "nft", lossy + "add rule ip bad in numgen random mod 100 < 30 drop")
    for device in ("eth0", "eth1"):  # one leads to the SuperLink, one to the client's app
        slow = f"qdisc add dev {device} root tbf rate 1mbit burst 32kbit latency 400ms"
        stack.in_network_of("supernode-2", "tc", *slow.split())
    settings = {**RUN, "privacy-unit": "none", "samples-per-client": 0, "min-replies": 0.0, "round-timeout": 15.0}
    settings |= {"strategy": "ifca", "clusters": 3, "model": "cnn-small"}
    run_id = stack.submit(**settings, rounds=3, out="/runs/lossy")
    stack.complete(run_id)
    lines = stack.lines("lossy")
    assert len(lines) == 3
    # The deadline, the time Flower takes to look (3 s), and another look at who is there.
    assert all(line["seconds"] < 15 + 15 for line in lines)
    late = [line["round"] for line in lines if line["replies"]["accepted"] < 3]
    assert late  # else the line was not bad enough to show anything
