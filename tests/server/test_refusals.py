"""Runs whose clients refuse: how many is stated, and where too few are left the run stops, at record level alone."""

import logging

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from kit.run_folders import run_in
from test_resume_deployed import SETTINGS, clients  # noqa: F401

from coterie.client.app import app
from coterie.deploy.clientapp import answer
from coterie.engine.in_process import LocalGrid
from coterie.server import RunConfig, RunError, RunFolder
from coterie.wire.messages import REFUSALS

DECLARED = {"input-shape": "1x4x4", "num-classes": 2}
POOR = {"epsilon": 0.01, "delta": 1e-3, **DECLARED}
RICH = {"epsilon": 8.0, "delta": 1e-3, **DECLARED}


class Refusing(LocalGrid):
    """Deployed clients with budgets of their own; ``others`` are their node configurations by client."""

    def __init__(self, folder, others):
        super().__init__(3)
        self.folder, self.others, self.rounds = folder, others, []

    def _answers(self, questions):
        for message in questions:
            client = message.metadata.dst_node_id - 1
            own = self.folder / str(client)
            node = {"client-id": client, "data": str(own / "own.npz"), "state-dir": str(own), **RICH}
            if "config" in message.content:
                self.rounds.append(message.content["config"]["round"])
            node = {key: value for key, value in (node | self.others.get(client, {})).items() if value is not None}
            yield answer(app, message, Context(1, client + 1, node, RecordDict(), {}))


def stated(caplog):
    return [record.getMessage() for record in caplog.records if "refuse to be trained" in record.getMessage()]


def run(clients, tmp_path, others, **settings):  # noqa: F811
    grid = Refusing(clients, others)
    folder = RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, **settings}))
    return grid, run_in(folder, grid)


def test_the_server_states_how_many_refuse_and_why(clients, tmp_path, caplog):  # noqa: F811
    (tmp_path / "policy.toml").write_text("releases = []")
    others = {0: POOR, 1: {"policy": str(tmp_path / "policy.toml")}}
    with caplog.at_level(logging.WARNING, "flwr"):
        _, outcome = run(clients, tmp_path, others, **{"min-clients": 1})
    assert outcome["rounds"] == 3
    text = "2 of 3 registered clients refuse to be trained (budget: 1, policy: 1)"
    assert stated(caplog) == [f"round 2: {text}", f"round 3: {text}"]


@pytest.mark.parametrize(("least", "rounds"), [(2, {1}), (3, {1}), (1, {1, 2, 3})])
def test_a_run_stops_where_fewer_than_min_clients_take_part(clients, tmp_path, least, rounds):  # noqa: F811
    grid = Refusing(clients, {0: POOR, 1: POOR})
    folder = RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, "min-clients": least}))
    if rounds == {1, 2, 3}:
        run_in(folder, grid)
    else:
        with pytest.raises(RunError, match=rf"round 2: 2 of 3 .*budget: 2.* fewer than min-clients = {least}"):
            run_in(folder, grid)
    assert set(grid.rounds) == rounds


def test_a_client_that_takes_part_again_counts_again(clients, tmp_path, caplog):  # noqa: F811
    folder = RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, "min-clients": 2}))

    class Agreeing(Refusing):
        def _answers(self, questions):
            questions = list(questions)
            if any("config" in m.content and m.content["config"]["round"] == 2 for m in questions):
                (self.folder / "0" / ".coterie-budget.jsonl").unlink()  # it holds no charge
                self.others = {}
            return super()._answers(questions)

    with caplog.at_level(logging.WARNING, "flwr"):
        run_in(folder, Agreeing(clients, {0: POOR}))
    assert stated(caplog) == ["round 2: 1 of 3 registered clients refuse to be trained (budget: 1)"]


class Lying(LocalGrid):
    """Clients that refuse each request with a code of any kind."""

    def __init__(self, code):
        super().__init__(4)
        self.code = code

    @property
    def nodes_of_clients(self):
        return {client: client + 1 for client in range(4)}

    def _answers(self, questions):
        for message in questions:
            refuses = message.metadata.message_type == "train" and message.metadata.dst_node_id > 1
            yield Message(Error(self.code, "no"), reply_to=message) if refuses else self._reply(message)

    def _reply(self, message):
        return next(iter(LocalGrid._answers(self, [message])))


@pytest.mark.parametrize("kind", REFUSALS)
def test_at_client_level_a_refusal_reveals_and_changes_nothing(tmp_path, kind, caplog):
    """The number of refusals is a number of participants, which is secret there."""
    settings = {"clients": 4, "rounds": 3, "samples-per-client": 10, "sampling-rate": 0.9, "model": "linear"}
    settings |= {"clusters": 1, "strategy": "fedavg", "epsilon": 4.0, "evaluate": "off", "min-clients": 3}
    with caplog.at_level(logging.WARNING, "flwr"):
        outcome = run_in(RunFolder.create(tmp_path / "run", RunConfig(settings)), Lying(REFUSALS[kind]))
    assert outcome["rounds"] == 3
    assert stated(caplog) == []
    text = "".join(path.read_text() for path in (tmp_path / "run").glob("*.json*"))
    assert "refuses" not in text
    assert np.isfinite(outcome["epsilon"])
