"""What a client records of requests: who asked for what, what was decided, and what is spent."""

import logging
import os
import sys

import pytest
from flwr.app import RecordDict
from test_hostile_server import CHEAP, WORLDS, World, sender  # noqa: F401

from coterie.cli.audit_log import read_audit_log
from coterie.client.audited import audited
from coterie.client.identity import Client
from coterie.privacy.budget_files import spending

SERVER = "fl.example.org:9092 0123456789abcdef"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "world", WORLDS["another label"][0], server=SERVER)


def entries(world):
    path = world.path / "state" / "client-0.audit.jsonl"
    return read_audit_log(path)[0] if path.exists() else []


def test_a_site_sees_who_asked_and_what_is_spent(world, caplog, monkeypatch):
    monkeypatch.setenv("COTERIE_APP_HASH", "ab" * 32)
    with caplog.at_level(logging.INFO, "flwr"):
        assert world.ask("train", {**CHEAP, "strategy": "fedavg"})[0] == "reply"
    (entry,) = entries(world)
    spent = spending(world.path / "data" / ".coterie-budget.jsonl")
    told = [entry[key] for key in ("run", "app", "server", "strategy", "type", "round", "decision", "budget")]
    assert told == ["1", "ab" * 32, SERVER, "fedavg", "train", 1, "answered", 5.0]
    assert entry["epsilon"] == pytest.approx(spent.epsilon)
    line = f"run 1 (fedavg of {SERVER}): epsilon {spent.epsilon:.4g} of 5 spent"
    assert line in [record.getMessage() for record in caplog.records]


def test_refusals_are_recorded_with_their_kind(world, tmp_path):
    world.ask("train", {**CHEAP, "round": "1"})
    (tmp_path / "policy.toml").write_text("releases = []")
    world.node["policy"] = str(tmp_path / "policy.toml")
    world.ask("train", CHEAP)
    del world.node["policy"]
    world.node["epsilon"] = 1e-3
    world.ask("train", CHEAP)
    world.ask("train", {**CHEAP, "strategy": "\x1b[2J\n{}" * 20})
    recorded = entries(world)
    assert [entry["decision"] for entry in recorded] == ["refused"] * 4
    assert [entry["kind"] for entry in recorded] == ["failed", "policy", "budget", "budget"]
    assert "round" not in recorded[0]
    assert recorded[3]["strategy"].isprintable()
    assert len(recorded[3]["strategy"]) <= 210


def test_a_client_that_lacks_a_library_records_its_failure(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "coterie.client.answer", None)
    answer = world.ask("train", CHEAP)
    assert answer[:2] == ("error", "client 0 failed; see its own log for details")
    (entry,) = entries(world)
    assert (entry["decision"], entry["kind"]) == ("refused", "failed")
    assert "coterie.client.answer" in entry["reason"]


def test_a_reply_that_cannot_be_recorded_does_not_leave(world, caplog):
    (world.path / "state").mkdir()
    (world.path / "state" / "client-0.audit.jsonl").mkdir()
    answer = world.ask("train", CHEAP)
    assert answer[:2] == ("error", "client 0 cannot record the request; see its own log for details")
    assert "the audit log cannot be written" in caplog.text
    assert len(world.charges) == 1  # before the reply
    world.node["epsilon"] = 1e-3
    assert "budget" in world.ask("train", {**CHEAP, "round": 2})[1]  # a refusal stays what it is


def test_a_repeated_request_is_recorded_though_it_is_not_charged_again(world):
    world.ask("train", CHEAP)
    world.ask("train", CHEAP)
    assert [entry["decision"] for entry in entries(world)] == ["answered", "answered"]
    assert len(world.charges) == 1


def test_simulated_clients_record_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for client in (Client(0), Client(0, "")):
        assert audited(client, "train", {}, RecordDict) == RecordDict()
        with pytest.raises(ZeroDivisionError):
            audited(client, "train", {}, lambda: 1 // 0)
    assert os.listdir(tmp_path) == []
