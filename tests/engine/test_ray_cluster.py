"""A Ray cluster of two nodes on this machine: clients run on both, and the run survives nodes and clients that die."""

import gc
import os
import signal
import threading
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from kit import ray_nodes, toys
from kit.run_folders import assert_agree, networks
from kit.servers import until

from coterie.engine.in_process import LocalGrid
from coterie.engine.ray import EngineError, ray_workers
from coterie.server import RunConfig, RunFolder, run

CLIENTS = 12
SETTINGS = {"dataset": "kit.toys:noted", "clients": CLIENTS, "groups": "1", "shift": "none", "samples-per-client": 5}
SETTINGS |= {"model": "linear", "local-epochs": 1, "batch-size": 5, "lr": 0.1, "rounds": 3, "evaluate": "off"}
SETTINGS |= {"sampling-rate": 1.0, "privacy-unit": "none", "seed": 7, "registration-timeout": 600.0}

pytestmark = [*ray_nodes.ON_RAY, pytest.mark.timeout(600)]


class Cluster:
    """Two nodes with two cores each; ``address`` is that of the head."""

    def __init__(self, address, places, nodes):
        self.address, self.places, self.nodes = address, places, nodes

    def kill(self, name):
        """End a node with all its processes at once, as if its machine had failed."""
        os.killpg(self.nodes[name].pid, signal.SIGKILL)


@contextmanager
def started():
    import ray

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True)))
        places = {name: folder / name for name in ("head", "other")}
        for place in places.values():
            place.mkdir()

        def variables(name):
            return {toys.PLACE: str(places[name]), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

        cores, log = "--num-cpus=2", folder / "other.log"
        head, address = stack.enter_context(ray_nodes.head(folder, cores, **variables("head")))
        other = stack.enter_context(ray_nodes.node(log, f"--address={address}", cores, **variables("other")))
        ray.init(address, log_to_driver=False)
        try:
            until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, other, log, 240)
        finally:
            ray.shutdown()
        yield Cluster(address, places, {"head": head, "other": other})
    gc.collect()  # Ray leaves files open


@pytest.fixture(scope="module")
def cluster():
    with started() as running:
        yield running


@pytest.fixture
def fragile():
    """A cluster of which a test may kill a node."""
    with started() as running:
        yield running


def on_cluster(cluster, path, settings, on_metrics=lambda record: None):
    """Run; return models and metrics."""
    config = RunConfig(settings)
    with closing(RunFolder.create(path, config)) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        folder.on_metrics = on_metrics
        with ray_workers(1, folder.path) as workers:
            from coterie.engine.ray_workers import RayGrid

            run(folder, RayGrid(config.data.clients, workers))
        return networks(path), folder.rounds()


@pytest.mark.parametrize("method", [{"strategy": "ifca", "clusters": 2}, {"strategy": "local", "clusters": 1}])
def test_clients_run_on_both_nodes_as_in_the_local_engine(method, cluster, tmp_path):
    settings = {**SETTINGS, **method}
    with closing(RunFolder.create(tmp_path / "local", RunConfig(settings))) as folder:
        run(folder, LocalGrid(CLIENTS))
    trained, _ = on_cluster(cluster, tmp_path / "ray", settings)
    assert_agree(networks(tmp_path / "local"), trained)
    assert all(any(place.iterdir()) for place in cluster.places.values())


def test_a_node_that_dies_costs_no_reply(fragile, tmp_path):
    def on_metrics(record):
        if record.round == 1:
            threading.Timer(1.0, fragile.kill, ["other"]).start()  # a client takes longer

    clients = 8  # each of which the model makes wait
    slow = {"strategy": "fedavg", "model": "kit.toys:slow", "local-epochs": 5, "rounds": 4, "clients": clients}
    _, records = on_cluster(fragile, tmp_path / "run", {**SETTINGS, **slow}, on_metrics)
    accepted = [record.replies["accepted"] for record in records]
    assert accepted == [clients] * 4  # those on the node that died reply again
    assert fragile.nodes["head"].poll() is None
    assert fragile.nodes["other"].poll() is not None


def test_a_client_that_kills_its_process_costs_its_own_reply(cluster, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for client in range(6):
        x = np.full((5, 2), -9 if client == 3 else client, np.float32)
        np.savez(data / f"client-{client}.npz", x=x, y=np.arange(5) % 2)
    own = {"dataset": "own", "input-shape": "2", "num-classes": 2, "data-dir": str(data), "clients": 6}
    settings = {**SETTINGS, **own, "samples-per-client": 0, "strategy": "fedavg", "model": "kit.toys:deadly"}
    settings |= {"rounds": 6}
    del settings["groups"], settings["shift"]
    _, records = on_cluster(cluster, tmp_path / "run", settings)
    assert [record.replies["accepted"] for record in records] == [5] * 6  # more rounds than the cluster has cores


def test_processes_do_not_share_random_generators(cluster):
    import ray

    class Client:
        def draw(self):
            import random

            import torch

            return random.random(), np.random.random(), torch.rand(()).item()

    ray.init(cluster.address, log_to_driver=False)
    try:
        actors = [ray.remote(num_cpus=1)(Client).remote() for _ in range(2)]
        one, other = ray.get([actor.draw.remote() for actor in actors])
    finally:
        ray.shutdown()
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, False]


def test_every_node_must_have_the_run_folder(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(EngineError, match="does not have the run folder"), ray_workers(folder=tmp_path / "elsewhere"):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:", ":70000"])
def test_an_address_without_a_cluster_fails_at_once(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EngineError, match="ray start"), ray_workers():
        pass
