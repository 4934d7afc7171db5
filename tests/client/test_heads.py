"""Data and state folder of a client that are restored together: noticed by the next request of the run."""

import shutil
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict
from test_hostile_server import CHEAP, CONFIG, WORLDS, World, sender  # noqa: F401

from coterie.privacy.budget_files import reconcile_run, spending
from coterie.privacy.ledger_lines import read_ledger
from coterie.rounds.exchange import Exchange

HEAD = "ab" * 16


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "world", WORLDS["another label"][0], server="fl.example.org:9092 0123456789abcdef")


def ask(world, number, head=..., **changes):
    """Kind and text of what leaves a client, and the head of the charge."""
    kind, *rest = world.ask("train", {**CHEAP, "round": number, "strategy": "fedavg", "head": head, **changes})
    return kind, world.head if kind == "reply" else rest[0]


def ledger(world):
    return world.path / "data" / ".coterie-budget.jsonl"


def lacks(answer):
    return answer == ("error", "client 0 rejects the request: its ledger lacks a charge; see its own log for details")


def test_data_and_state_restored_together_are_noticed_by_the_next_request_of_the_run(world, tmp_path, caplog):
    _, first = ask(world, 1)
    shutil.copytree(world.path, tmp_path / "copy")
    _, second = ask(world, 2, first)
    assert ask(world, 3, second)[0] == "reply"
    assert ask(world, 4, first)[0] == "reply"  # a server that resumed from an earlier round
    charges = world.charges
    shutil.rmtree(world.path)
    shutil.copytree(tmp_path / "copy", world.path)
    assert lacks(ask(world, 4, second))
    assert f"coterie budget reconcile {ledger(world)} --run ledger.jsonl --client 0 --head {second}" in caplog.text
    assert len(world.charges) == 1 < len(charges)
    assert ask(world, 4, first)[0] == "reply"  # this one the copy holds


def test_heads_are_random_and_those_of_charges(world):
    heads = [ask(world, number)[1] for number in range(1, 6)]
    assert len(set(heads)) == 5
    assert [charge["head"] for charge in read_ledger(ledger(world))[1]] == heads
    assert ask(world, 5, heads[2]) == ("reply", heads[4])  # the cached reply, with the head of its charge


def test_a_head_that_no_charge_has(world):
    assert lacks(ask(world, 1, HEAD))
    assert not ledger(world).exists()
    ask(world, 1)
    before = world.charges
    unknown = ["", "ab", HEAD, HEAD.upper(), "x" * 4000, '"head"', 'a", "head": "b', 7, 1.5, True, [1, 2], b"ab"]
    for number, head in enumerate(unknown, 2):
        answer = ask(world, number, head)
        assert lacks(answer), (head, answer)
        assert world.charges == before, head


def test_no_server_and_no_client_learns_of_the_charges_for_another(world):
    _, head = ask(world, 1)
    other = {**world.node, "server": "fl.example.org:9092 fedcba9876543210"}
    mine, world.node = world.node, other
    assert lacks(ask(world, 2, head))
    world.node = {**mine, "client-id": 1, "state-dir": str(world.path / "state-1")}
    kind, text = ask(world, 2, head)
    assert (kind, "lacks a charge" in text) == ("error", True)
    world.node = {**mine, "server": "moved.example.org:9092 0123456789abcdef"}
    assert ask(world, 2, head)[0] == "reply"


def test_a_head_far_from_the_end_of_a_long_ledger(world, monkeypatch):
    monkeypatch.setattr("coterie.client.budget._TAIL", 700)
    heads = [ask(world, number)[1] for number in range(1, 6)]
    assert all(ask(world, 5 + number, head)[0] == "reply" for number, head in enumerate(heads, 1))


def test_replies_outside_record_level_have_no_head(world):
    del world.node["epsilon"], world.node["delta"]
    world.node["guarantee"] = "trusted-server"
    assert world.ask("train", {"strategy": "fedavg"})[0] == "reply"
    assert world.head is None
    assert (
        not list(world.path.rglob("*.jsonl"))
        or "head" not in (world.path / "state" / "client-0.audit.jsonl").read_text()
    )


# ---- the way out -------------------------------------------------------------------------------------------


def run_ledger(path, rounds):
    """Ledger of a run that has charged so many rounds."""
    charged = CONFIG.plan.ledger(path)
    for number in range(1, rounds + 1):
        for event, count in CONFIG.plan.worst.part(first=number == 1).items():
            charged.charge_round(number, event, count, **{"for": "training"})
    charged.close()
    return path


def test_what_the_run_has_charged_is_charged_again_and_the_client_goes_on(world, tmp_path, coterie):
    _, first = ask(world, 1)
    before = spending(ledger(world)).epsilon
    assert lacks(ask(world, 2, HEAD))
    run = run_ledger(tmp_path / "run.jsonl", 1)
    words = ["budget", "reconcile", ledger(world), "--run", run, "--client", 0, "--head", HEAD]
    assert coterie(*words)[0] == 0
    assert spending(ledger(world)).epsilon > before
    assert ask(world, 2, HEAD)[0] == "reply"
    assert ask(world, 3, first)[0] == "reply"


def test_an_empty_file_is_reconciled(world, tmp_path):
    ask(world, 1)
    path = ledger(world)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    shutil.rmtree(world.path / "state")
    assert lacks(ask(world, 2, HEAD))
    after = reconcile_run(path, run_ledger(tmp_path / "run.jsonl", 1), 0, HEAD)
    assert after.epsilon > 0
    assert ask(world, 2, HEAD)[0] == "reply"


def test_what_cannot_be_reconciled(world, tmp_path, coterie):
    ask(world, 1)
    path = ledger(world)
    run = run_ledger(tmp_path / "run.jsonl", 1)
    for words, reason in (
        ([], "give --anchors, or --run and --client"),
        (["--run", run], "give --anchors, or --run and --client"),
        (["--run", run, "--client", 0, "--anchors", path], "give --anchors"),
        (["--run", path, "--client", 0], "is not the ledger of a run at record level"),
        (["--run", tmp_path / "none", "--client", 0], "cannot be read"),
    ):
        before = path.read_bytes()
        status, _, err = coterie("budget", "reconcile", path, *words)
        assert (status, reason in err) == (1, True), err
        assert path.read_bytes() == before


def test_at_client_level_a_server_takes_no_head():
    """A client that sends one all the same gets none back, and none is stored."""
    content = RecordDict({"reply": ConfigRecord({"head": HEAD})})
    for keep, noted in ((False, {}), (True, {3: HEAD})):
        run = SimpleNamespace(plan=SimpleNamespace(clients_keep_ledgers=keep), heads={})
        Exchange._note_head(SimpleNamespace(_run=run), 3, content)
        assert run.heads == noted
