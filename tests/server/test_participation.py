"""Seconds of a round, measured on this machine with the run's own clients; the clock is a toy's."""

import json

import pytest

from coterie.datasets import DataError
from coterie.server import RunConfig, participation
from coterie.server.participation import participations, seconds_of_client

SETTINGS = {"clients": 40, "rounds": 5, "epsilon": 8, "delta": 1e-3, "local-epochs": 3, "model": "linear"}


def config(**changes):
    return RunConfig({**SETTINGS, **{key.replace("_", "-"): value for key, value in changes.items()}})


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 0.01 s per client and epoch; the first time takes five times as long."""
    now, trained = [0.0], []

    def train(network, layout, start, shards, rngs, training):
        now[0] += (0.01 if trained else 0.05) * len(shards) * training.local_epochs * start.shape[1] / size(network)
        trained.append((len(shards), training.local_epochs, start.shape))
        assert start.shape[1] == layout.size

    def size(network):
        return sum(values.numel() for values in network.parameters())

    monkeypatch.setattr(participation, "train", train)
    monkeypatch.setattr(participation.time, "perf_counter", lambda: now[0])
    return trained


def test_seconds_are_those_of_prepared_clients_times_epochs(clock):
    assert seconds_of_client(config()) == pytest.approx(0.03)
    assert [(clients, epochs) for clients, epochs, _ in clock] == [(1, 1), (20, 1), (20, 1)]


@pytest.mark.parametrize("local_epochs", [7, 10])
def test_a_client_that_takes_long_is_timed_alone(clock, local_epochs):
    assert seconds_of_client(config(local_epochs=local_epochs)) == pytest.approx(0.01 * local_epochs)
    assert [clients for clients, *_ in clock] == [1, 1]


def test_both_networks_of_fedcam_are_trained(clock):
    seconds_of_client(config(strategy="fedcam"))
    seconds_of_client(config())
    assert clock[0][2][1] == 2 * clock[-1][2][1]


def test_fewer_clients_than_are_timed(clock):
    assert seconds_of_client(config(clients=3, clusters=1, groups="1")) == pytest.approx(0.03)
    assert [clients for clients, *_ in clock] == [1, 3, 3]


@pytest.fixture
def one_rate(monkeypatch):
    """Half of the clients in a round, and all of them: the noise of every rate is searched for."""
    monkeypatch.setattr(participation, "_RATES", (0.5,))


@pytest.mark.usefixtures("one_rate")
def test_seconds_of_a_round_are_those_of_its_messages():
    ways = participations(config(), 0.25)
    assert [way.seconds for way in ways] == [0.25 * way.messages for way in ways]
    assert {way.seconds for way in participations(config())} == {None}


def test_without_data_there_are_no_seconds(tmp_path):
    with pytest.raises(DataError, match="own"):
        seconds_of_client(config(dataset="own", input_shape=4, num_classes=3, groups=1, shift="none"))
    with pytest.raises(DataError, match="fashion-mnist"):
        seconds_of_client(config(dataset="fashion-mnist", data_dir=str(tmp_path)))


def test_true_seconds_are_above_0():
    assert 0 < seconds_of_client(config()) < 1
    assert 0 < seconds_of_client(config(strategy="fedcam")) < 1


@pytest.mark.usefixtures("one_rate")
def test_the_command_states_them(coterie, tmp_path):
    words = ["privacy", "noise", "--compare"]
    words += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    status, out, _ = coterie(*words, "--json")
    ways = json.loads(out)
    assert status == 0
    assert all(0 < way["seconds"] / way["messages"] < 1 for way in ways)
    status, out, _ = coterie(*words, "--set", "dataset=fashion-mnist", "--set", f"data-dir={tmp_path}")
    assert (status, "seconds are not known without data: " in out) == (0, True)
    assert "–" in out
