"""On Ray, the same program: one seed, one round, the same models, shared and own."""

import gc
import time
from contextlib import closing

import pytest
from kit.ray_nodes import ON_RAY
from kit.run_folders import assert_agree, networks

from coterie.engine.in_process import LocalGrid
from coterie.engine.ray import ray_workers
from coterie.privacy import read_ledger
from coterie.server import RunConfig, RunFolder, run
from coterie.strategies.registry import STRATEGIES

CLIENTS = 12

pytestmark = ON_RAY


@pytest.fixture(autouse=True)
def clean_up_after_ray():
    """Ray leaves files open; collect them here, where that is known, and not in some later test."""
    yield
    gc.collect()


def ray_grid(workers):
    from coterie.engine.ray_workers import RayGrid

    return RayGrid(CLIENTS, workers)


@pytest.fixture(scope="module")
def workers():
    """Ray and its actors, which are kept from one run to the next: they take longer to start than a method's round."""
    with ray_workers() as started:
        yield started


def run_on_both(settings, path, workers):
    """Run locally and on Ray, and compare models; folder and result of each."""
    with closing(RunFolder.create(path / "local", RunConfig(settings))) as local:
        expected = run(local, LocalGrid(CLIENTS))
    with closing(RunFolder.create(path / "ray", RunConfig(settings))) as ray:
        result = run(ray, ray_grid(workers))
    assert_agree(networks(local.path), networks(ray.path))
    return (local, expected), (ray, result)


@pytest.mark.parametrize("participation", ["visible", "secret"])
def test_noise_is_correlated_over_rounds_as_in_the_local_engine(participation, tmp_path, workers):
    settings = {"clients": CLIENTS, "clusters": 2, "groups": "2", "rounds": 4}
    settings |= {"sampling-rate": 0.5 if participation == "visible" else 0.4, "mechanism": "banded"}
    settings |= {"participation": participation, "delta": 1e-3, "samples-per-client": 20, "seed": 7}
    settings |= {"registration-timeout": 600.0}
    for folder, _ in run_on_both(settings, tmp_path, workers):
        _, charges = read_ledger(folder.path / "ledger.jsonl")
        assert [charge["slot"] for charge in charges] == [0, 1, 0, 1]


CASES = [(name, unit) for name, method in STRATEGIES.items() for unit in ("none", "record") if unit in method.units]


@pytest.mark.parametrize(("strategy", "unit"), CASES)
def test_ray_and_local_agree(strategy, unit, tmp_path, workers):
    settings = {
        "strategy": strategy,
        "clients": CLIENTS,
        "rounds": 1,
        "sampling-rate": 0.6 if "client" in STRATEGIES[strategy].units and unit == "none" else 1.0,
        "samples-per-client": 20,
        "privacy-unit": unit,
        "seed": 7,
        "registration-timeout": 600.0,  # a busy machine may take its time to start Ray
        **({"local-epochs": 2, "pretrain-epochs": 1, "joint-epochs": 1} if strategy == "ppfc-gan" else {}),
    }
    (_, expected), (_, result) = run_on_both(settings, tmp_path, workers)
    assert result["diagnostics"]["accuracy"] == pytest.approx(expected["diagnostics"]["accuracy"], abs=1e-6)


SUMMED = {"strategy": "ifca", "clusters": 2, "clients": CLIENTS, "rounds": 2, "sampling-rate": 1.0}
SUMMED |= {"samples-per-client": 20, "evaluate": "off", "seed": 7}


def trained(path, grid):
    """Models of a run on Ray."""
    with closing(RunFolder.create(path, RunConfig(SUMMED))) as folder:
        outcome = run(folder, grid)
        return networks(folder.path), outcome


def test_a_node_sends_one_sum_a_round(tmp_path, workers):
    from coterie.engine.ray_workers import RayGrid

    received = []

    class Noting(RayGrid):
        def send_and_sum(self, messages, new_sums):
            replies = list(super().send_and_sum(messages, new_sums))
            received.append([len(reply.messages) for reply in replies])
            return replies

    trained(tmp_path / "run", Noting(CLIENTS, workers))
    assert received == [[CLIENTS]] * 2


def test_clients_whose_sums_are_lost_reply_again(tmp_path, monkeypatch, workers):
    import ray

    from coterie.engine import ray_workers as module

    class Dying:
        def merge(self):
            time.sleep(60)

    def lost(waiting):
        actor = ray.remote(num_cpus=0)(Dying).remote()
        reference = actor.merge.remote()
        ray.kill(actor)
        return waiting[-1]._replace(sums=reference)

    expected, _ = trained(tmp_path / "whole", ray_grid(workers))
    monkeypatch.setattr(module, "_merged", lost)
    found, outcome = trained(tmp_path / "lost", ray_grid(workers))
    assert outcome["certified"] is False  # the seed
    assert_agree(expected, found)
