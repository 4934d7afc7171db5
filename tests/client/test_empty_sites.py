"""Simulated clients without training records reply with an error, and the others as if they were alone."""

import numpy as np
import pytest
from flwr.app import RecordDict
from kit.deployed import OWN, request_of
from kit.own_files import read_shard

from coterie.client.answer import handle
from coterie.client.handlers import train_and_sum
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.datasets import own_federation, own_shard
from coterie.server import RunConfig

SETTINGS = {**OWN, "input-shape": "4", "strategy": "fedavg", "seed": 3, "clients": 4}


@pytest.fixture
def content(tmp_path, monkeypatch):
    """A request to clients of which 1 has no records, and those of 3 are held out."""
    own_shard.cache_clear()
    own_federation.cache_clear()
    rng = np.random.default_rng(0)
    for i, n in enumerate((20, 0, 20, 1)):
        x, y = rng.normal(0, 1, (n, 4)).astype(np.float32), rng.integers(0, 2, n)
        while n == 1 and not held_out(tmp_path, x, y):
            x = x + 1
        np.savez(tmp_path / f"client-{i}.npz", x=x, y=y)
    return question(str(tmp_path))


def held_out(folder, x, y):
    np.savez(folder / "probe.npz", x=x, y=y)
    own_shard.cache_clear()
    return not len(read_shard(folder / "probe.npz", (4,), strict=False).y)


def question(folder, **settings):
    return request_of(RunConfig({**SETTINGS, "privacy-unit": "none", "data-dir": folder, **settings}))[0]


CLIENTS = [Client(i) for i in range(4)]


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_others_reply_as_if_they_were_alone(content, verb):
    replies = handle(verb, content, CLIENTS)
    assert [isinstance(reply, ClientError) for reply in replies] == [False, True, False, True]
    assert str(replies[1]) == "client 1 has no training records"
    alone = handle(verb, content, [CLIENTS[0], CLIENTS[2]])
    assert [dict(reply) for reply in alone] == [dict(replies[0]), dict(replies[2])]


def test_sums_are_those_of_the_others(content):
    class Sums:
        plan = RunConfig({**SETTINGS, "privacy-unit": "none"}).plan
        rows = ()

        def add_rows(self, labels, redrawn, updates):
            self.rows = updates

    every, others = Sums(), Sums()
    replies = train_and_sum(content, CLIENTS, every)
    assert [type(reply) for reply in replies] == [type(None), ClientError, type(None), ClientError]
    train_and_sum(content, [CLIENTS[0], CLIENTS[2]], others)
    assert len(every.rows) == 2
    np.testing.assert_array_equal(every.rows, others.rows)


def test_a_cohort_of_empty_sites_has_errors_alone(content):
    assert all(isinstance(reply, ClientError) for reply in handle("train", content, [CLIENTS[1], CLIENTS[3]]))
    assert all(isinstance(reply, ClientError) for reply in handle("evaluate", content, [CLIENTS[1]]))


def test_a_deployed_client_replies_as_if_it_had_records(content, tmp_path):
    deployed = Client(1, str(tmp_path / "state"), data=str(tmp_path / "client-1.npz"), guarantee="trusted-server")
    (reply,) = handle("train", content, [deployed])
    assert isinstance(reply, RecordDict)


def test_at_record_level_a_simulated_client_replies_as_if_it_had_records(content, tmp_path):
    """Otherwise the reply would tell whether there is a record."""
    private = {"privacy-unit": "record", "samples-per-client": 20, "epsilon": 8, "delta": 1e-3, "rounds": 2}
    content = question(str(tmp_path), **private)
    content["config"]["clients-dir"] = str(tmp_path / "states")
    assert all(isinstance(reply, RecordDict) for reply in handle("train", content, CLIENTS))


@pytest.mark.parametrize("unit", ["none", "client"])
def test_a_run_without_any_records_does_not_start(coterie, tmp_path, content, unit):
    for i in range(4):
        np.savez(tmp_path / f"client-{i}.npz", x=np.full((3, 4), np.nan), y=np.zeros(3))
    config = "".join(f"{key} = {value!r}\n" for key, value in {**SETTINGS, "privacy-unit": unit}.items())
    (tmp_path / "run.toml").write_text(config)
    words = ["--config", "run.toml", "--clusters", 1, "--rounds", 2, "--data-dir", ".", "--out", "run"]
    status, _, err = coterie("run", *words, *(["--epsilon", 4] if unit == "client" else []))
    assert status == 1
    assert "none of the 4 clients has training records; the log gives the reasons" in err
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("unit", ["none", "client"])
def test_a_run_goes_on_without_empty_sites(coterie, tmp_path, content, unit, caplog):
    """The case few_records: one client whose records are all held out ended the run of 200."""
    config = "".join(f"{key} = {value!r}\n" for key, value in {**SETTINGS, "privacy-unit": unit}.items())
    (tmp_path / "run.toml").write_bytes(config.encode("utf-8-sig"))  # as Windows writes it
    words = ["--config", "run.toml", "--clusters", 1, "--rounds", 2, "--set", "sampling-rate=1", "--data-dir", "."]
    status, _, _ = coterie("run", *words, "--out", "run", *(["--epsilon", 4] if unit == "client" else []))
    assert status == 0
    assert "client 3 is left out, as it has no training records (2 of 4 clients so far)" in caplog.text
