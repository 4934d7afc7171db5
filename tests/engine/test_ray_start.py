"""Ray that does not start on this machine: a message instead of a traceback."""

import socket

import pytest

pytestmark = pytest.mark.ray
TOO_SLOW = "The current node timed out during startup."


@pytest.fixture
def attempts(monkeypatch):
    """Replaces the start of Ray by the outcomes in this list: an error, or None for a node that starts."""
    import ray

    outcomes = []

    def init(*words, **options):
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    return outcomes


def test_a_node_that_does_not_start_is_started_three_times(attempts, coterie, caplog):
    attempts += [Exception(TOO_SLOW)] * 4
    status, _, err = coterie("run", "--engine", "ray", "--out", "run")
    assert (status, len(attempts)) == (1, 1)
    assert f"Ray does not start on this machine: {TOO_SLOW} Use --engine local" in err
    assert "Traceback" not in err
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "attempt 2 of 3 follows",
        "attempt 3 of 3 follows",
    ]


def test_the_second_attempt_may_succeed(attempts, monkeypatch):
    from coterie.engine.ray import ray_workers

    attempts += [Exception(TOO_SLOW), None]
    monkeypatch.setattr("coterie.engine.ray._nodes", lambda: nodes(1))
    monkeypatch.setattr("coterie.engine.ray_workers.RayWorkers", Workers)
    with ray_workers() as workers:
        assert workers.actors == 1
    assert attempts == []


def test_a_cluster_that_does_not_answer_is_named(attempts, monkeypatch):
    from coterie.engine.ray import EngineError, ray_workers

    attempts += [Exception("Timed out while waiting for GCS to become available.")] * 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        named = f"RAY_ADDRESS = '{address}': cannot use a Ray cluster there: Timed"
        with pytest.raises(EngineError, match=named), ray_workers():
            pass
    assert len(attempts) == 1


@pytest.mark.parametrize("cores", [(), (2,), (3, 3), (3.5, 0)])
def test_more_cores_than_a_node_has_are_refused_at_once(cores, attempts, monkeypatch, coterie):
    attempts.append(None)
    monkeypatch.setattr("coterie.engine.ray._nodes", lambda: nodes(*cores))
    monkeypatch.setattr("coterie.engine.ray._check_folder", lambda folder: None)
    monkeypatch.setattr("coterie.engine.ray_workers.RayWorkers", Workers)
    status, _, err = coterie("run", "--engine", "ray", "--client-cpus", 4, "--clients", 6, "--rounds", 1)
    assert status == 1
    largest = int(max(cores, default=0))
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        f"error: --client-cpus 4: Ray runs a client on one node, and its largest has {largest} cores: use fewer cores, "
        "or set RAY_ADDRESS to a larger cluster"
    ]


def nodes(*cores):
    return [{"Resources": {"CPU": count} if count else {}} for count in cores]


class Workers:
    def __init__(self, actors, cores):
        self.actors = actors

    def close(self):
        """Ends nothing."""
