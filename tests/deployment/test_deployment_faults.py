"""A server that dies, and a bad line, in the middle of a run: it ends with all its rounds, within its budget."""

import shutil
from contextlib import contextmanager

import pytest
from stack import OF_RECORDS, OWN_DATA

from coterie.privacy import read_ledger

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]


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
        "out": "/server/runs/banded",
    }
    run_id = stack.submit(**settings)
    stack.until(lambda: len(stack.lines("banded")) >= 1)
    with stack.paused("client-0"):  # the run cannot end before the kill
        stack.kill("server", "flwr-serverapp")
        done = len(stack.lines("banded"))
    stack.wait(run_id, seconds=360)
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
    settings = {
        **OF_RECORDS,
        "privacy-unit": "none",
        "samples-per-client": 0,
        "min-replies": 0.0,
        "round-timeout": 25.0,
    }
    settings |= {"strategy": "ifca", "clusters": 3, "model": "cnn-small"}
    with bad_line(stack, "client-2"):
        stack.complete(stack.submit(**settings, rounds=3, out="/server/runs/lossy"))
    lines = stack.lines("lossy")
    assert len(lines) == 3
    # The deadline, the time Flower takes to look (3 s), and another look at who is there.
    assert all(line["seconds"] < 25 + 15 for line in lines)
    late = [line["round"] for line in lines if line["replies"]["accepted"] < 3]
    assert late  # else the line was not bad enough to show anything


@contextmanager
def bad_line(stack, service):
    """30 % of packets lost on the way in, 1 Mbit/s on the way out; three models of the test are 370 kB."""
    lossy = "add table ip bad; add chain ip bad in { type filter hook input priority 0; }; "
    stack.in_network_of(service, "nft", lossy + "add rule ip bad in numgen random mod 100 < 30 drop")
    slow = "qdisc add dev eth0 root tbf rate 1mbit burst 32kbit latency 400ms"
    stack.in_network_of(service, "tc", *slow.split())
    try:
        yield
    finally:
        stack.in_network_of(service, "nft", "delete table ip bad")
        stack.in_network_of(service, "tc", "qdisc", "del", "dev", "eth0", "root")
