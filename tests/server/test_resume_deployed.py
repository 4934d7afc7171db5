"""Runs of deployed clients at record level whose server dies: resumed, they have all rounds, and pay once for each."""

import os
import shutil

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from kit.run_folders import run_in

from coterie.client.app import app
from coterie.engine.in_process import LocalGrid
from coterie.privacy.ledger_lines import read_ledger
from coterie.server import RunConfig, RunError, RunFolder

SETTINGS = {"strategy": "fedavg", "clusters": 1, "dataset": "own", "input-shape": "1x4x4", "num-classes": 2}
SETTINGS |= {"model": "linear", "device": "cpu", "clients": 3, "privacy-unit": "record", "samples-per-client": 24}
SETTINGS |= {"batch-size": 8, "local-epochs": 1, "sampling-rate": 1.0, "rounds": 3, "epsilon": 8.0, "evaluate": "off"}
LCFL = {"strategy": "lcfl", "clusters": 2, "landmarks": 0}


class ServerDies(BaseException):
    pass


class Deployed(LocalGrid):
    """Clients that are deployed: each has its data and its state in a folder of its own.

    Args:
        folder: of all of them.
        dies: (verb, round): when that was asked and answered, the server is gone before it reads an answer.
    """

    def __init__(self, folder, dies=None):
        super().__init__(3)
        self._folder, self._dies = folder, dies

    def _answers(self, questions):
        replies = [self._reply(message) for message in questions]
        asked = [message for message in questions if "config" in message.content]
        if asked and (asked[0].metadata.message_type, asked[0].content["config"]["round"]) == self._dies:
            raise ServerDies
        return replies

    def _node(self, client):
        own = self._folder / str(client)
        node = {"client-id": client, "data": str(own / "own.npz"), "state-dir": str(own)}
        return node | {"guarantee": "trusted-server"}

    def _reply(self, message):
        client = message.metadata.dst_node_id - 1
        try:
            return app(message, Context(1, client + 1, self._node(client), RecordDict(), {}))
        except Exception as error:
            return Message(Error(1, str(error)), reply_to=message)


@pytest.fixture
def clients(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(3):
        (tmp_path / "clients" / str(i)).mkdir(parents=True)
        x = rng.integers(0, 256, (24, 1, 4, 4), np.uint8)
        np.savez(tmp_path / "clients" / str(i) / "own.npz", x=x, y=np.arange(24) % 2)
    return tmp_path / "clients"


def paid(path):
    return [line["round"] for line in read_ledger(path)[1]]


@pytest.mark.parametrize(
    ("more", "dies", "charges"),
    [
        ({}, ("train", 2), [1, 2, 3]),
        (LCFL, ("train", 1), [1, 1, 2, 3]),
        (LCFL, ("query.losses", 1), [1, 1, 2, 3]),
        (LCFL, ("train", 2), [1, 1, 2, 3]),
    ],
)
def test_a_server_that_dies_with_all_answers_costs_nothing(clients, tmp_path, more, dies, charges):
    path = tmp_path / "run"
    with pytest.raises(ServerDies):
        run_in(RunFolder.create(path, RunConfig({**SETTINGS, **more})), Deployed(clients, dies))
    outcome = run_in(RunFolder.resume(path, {}), Deployed(clients))
    assert (outcome["rounds"], outcome["certified"]) == (3, True)
    assert paid(path / "ledger.jsonl") == charges
    for i in range(3):
        assert paid(clients / str(i) / f"client-{i}.ledger.jsonl") == charges


def test_a_server_that_dies_between_a_charge_and_the_end_of_its_round(clients, tmp_path, monkeypatch):
    path = tmp_path / "run"
    keep = RunFolder.checkpoint

    def die(self, state, line):
        if state.round == 2:
            raise ServerDies
        keep(self, state, line)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "checkpoint", die)
        with pytest.raises(ServerDies):
            run_in(RunFolder.create(path, RunConfig(SETTINGS)), Deployed(clients))
    assert run_in(RunFolder.resume(path, {}), Deployed(clients))["rounds"] == 3
    assert paid(path / "ledger.jsonl") == [1, 2, 3]


def test_another_question_of_the_same_round_is_charged(clients, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(ServerDies):
        run_in(RunFolder.create(path, RunConfig(SETTINGS)), Deployed(clients, ("train", 2)))
    folder = RunFolder.resume(path, {})
    folder.resumed.models[:] += 1
    with pytest.raises(RunError, match="the budget is exhausted after 2 of 3 rounds"):
        run_in(folder, Deployed(clients))
    assert paid(path / "ledger.jsonl") == [1, 2, 2]
    assert paid(clients / "0" / "client-0.ledger.jsonl") == [1, 2, 2]


def test_what_a_client_keeps_is_for_its_user_alone(clients, tmp_path):
    before = os.umask(0)
    try:
        run_in(RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, **LCFL})), Deployed(clients))
    finally:
        os.umask(before)
    kept = [path for path in clients.rglob("*") if path.name != "own.npz" and path.parent != clients]
    assert {"client-0.ledger.jsonl", "client-0.answers", "lock"} <= {path.name for path in kept}
    assert {path.stat().st_mode & 0o777 for path in kept if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in kept if path.is_file()} == {0o600}


class Changing(Deployed):
    """Client 2 leaves after round 1; ``successor``, a folder of its data, also has its state from a round on."""

    def __init__(self, folder, successor=None, since=9):
        super().__init__(folder)
        self._successor, self._since, self._round, self.asked = successor, since, 0, []

    def get_node_ids(self):
        return [1, 2] if 1 <= self._round < self._since - 1 else [1, 2, 3]

    def _answers(self, questions):
        asked = [message for message in questions if "config" in message.content]
        if asked:
            self._round = asked[0].content["config"]["round"]
            self.asked.append((self._round, [message.metadata.dst_node_id - 1 for message in asked]))
        return [self._reply(message) for message in questions]

    def _node(self, client):
        if self._successor is None or client != 2:
            return super()._node(client)
        state = self._folder / "2" if self._round < self._since else self._successor
        node = {"client-id": 2, "data": str(self._successor / "own.npz"), "state-dir": str(state)}
        return node | {"epsilon": 8.0, "delta": 1e-3, "input-shape": "1x4x4", "num-classes": 2}


def test_a_client_that_leaves_for_ever_pays_for_the_rounds_it_was_in(clients, tmp_path):
    grid = Changing(clients)
    outcome = run_in(RunFolder.create(tmp_path / "run", RunConfig(SETTINGS)), grid)
    assert (outcome["rounds"], outcome["certified"]) == (3, True)
    assert grid.asked == [(1, [0, 1, 2]), (2, [0, 1]), (3, [0, 1])]
    assert [len(paid(clients / str(i) / f"client-{i}.ledger.jsonl")) for i in range(3)] == [3, 3, 1]


def test_a_client_that_was_deleted_and_comes_back_has_spent_what_it_spent(clients, tmp_path):
    """Its node and its state are new; the data are the same, and their budget lies beside them."""
    data = tmp_path / "data"
    data.mkdir()
    os.link(clients / "2" / "own.npz", data / "own.npz")
    grid = Changing(clients, data, since=3)
    assert run_in(RunFolder.create(tmp_path / "run", RunConfig(SETTINGS)), grid)["rounds"] == 3
    assert [number for number, who in grid.asked if 2 in who] == [1, 3]
    assert paid(data / ".coterie-budget.jsonl") == [1, 3]

    shutil.rmtree(data / "client-2.answers")  # all that it kept, but for what it spent
    run_in(RunFolder.create(tmp_path / "next", RunConfig(SETTINGS)), Changing(clients, data, since=1))
    assert paid(data / ".coterie-budget.jsonl") == [1, 3, 1]  # a second round of this run would exceed it


class Restored(Deployed):
    """From a round on, client 2 has data and state of a copy that was made after round 1."""

    def __init__(self, folder, since):
        super().__init__(folder)
        self._since, self.replies = since, []

    def _reply(self, message):
        if message.metadata.dst_node_id != 3 or "config" not in message.content:
            return super()._reply(message)
        own, copy = self._folder / "2", self._folder / "copy"
        number = message.content["config"]["round"]
        if number == self._since and copy.exists():
            shutil.rmtree(own)
            copy.rename(own)
        reply = super()._reply(message)
        self.replies.append((number, reply.has_content()))
        if number == 1:
            shutil.copytree(own, copy)
        return reply


@pytest.mark.parametrize("resumed", [False, True])
def test_a_client_restored_with_data_and_state_is_noticed_also_by_a_server_that_resumes(clients, tmp_path, resumed):
    grid, settings = Restored(clients, since=3), {**SETTINGS, "stop-after": 2 if resumed else 0}
    run_in(RunFolder.create(tmp_path / "run", RunConfig(settings)), grid)
    if resumed:
        assert grid.replies == [(1, True), (2, True)]
        run_in(RunFolder.resume(tmp_path / "run", {"stop-after": 0}), grid)
    assert grid.replies == [(1, True), (2, True), (3, False)]
    assert paid(clients / "2" / "client-2.ledger.jsonl") == [1]
