"""Clients that keep the protocol and lie: what they change, and what they leave alone."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord

from coterie.datasets import Partition, federate
from coterie.privacy import NoPrivacy, Streams
from coterie.server import RunConfig, RunFolder, run
from coterie.server.metrics import summarise
from coterie.strategies import Aggregator, FedAvg
from coterie.wire.messages import Layout, pack_models, unpack_models

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "robustness.py"))
HostileGrid, choose_attackers = BENCHMARK["HostileGrid"], BENCHMARK["choose_attackers"]
CLIENTS = 20
SETTINGS = {
    "dataset": "digits",
    "clients": CLIENTS,
    "groups": "1",
    "shift": "none",
    "strategy": "fedavg",
    "privacy-unit": "none",
    "rounds": 8,
    "sampling-rate": 1.0,
    "evaluate-every": 8,
    "seed": 0,
    "device": "cpu",
}


def test_attackers_are_a_share_of_all_and_depend_on_the_seed_alone():
    assert choose_attackers(100, 0.3, 1) == choose_attackers(100, 0.3, 1) != choose_attackers(100, 0.3, 2)
    assert len(choose_attackers(100, 0.3, 1)) == 30
    assert choose_attackers(100, 0.1, 1) < choose_attackers(100, 0.3, 1) < set(range(100))
    assert choose_attackers(100, 0.0, 1) == set()


def test_labels_of_attackers_are_flipped_for_a_while_and_no_test_data():
    data = federate("digits", Partition(clients=4, groups="2"))
    before = [(data.shard(i).y.copy(), data.shard(i).test.y.copy()) for i in range(4)]
    with BENCHMARK["flipped_labels"](data, {1, 2}):
        for i, (train, test) in enumerate(before):
            np.testing.assert_array_equal(data.shard(i).y, 9 - train if i in (1, 2) else train)
            np.testing.assert_array_equal(data.shard(i).test.y, test)
    for i, (train, _) in enumerate(before):
        np.testing.assert_array_equal(data.shard(i).y, train)


def moved(attackers, scale, aggregator=None):
    """(models, result) of a round of eight toy clients, of which group 0 moves up; labels are equal."""
    layout, config = Layout(("output.weight", "output.bias"), ((2, 1), (2,))), RunConfig({})
    sent = {**config.for_clients(), "dataset": "kit.toys:pixels", "shift": "none", "groups": "1", "clients": 8}
    sent |= {"model": "linear", "samples-per-client": 5, "local-epochs": 1, "batch-size": 5, "seed": 0}
    plan = NoPrivacy(clients=8, num_clusters=1, sampling_rate=1.0, rounds=1)
    options = {
        "streams": Streams(0),
        "registration_timeout": 0.0,
        "evaluate_metrics_aggr_fn": summarise,
        "aggregator": aggregator or Aggregator(),
    }
    strategy, grid = FedAvg(plan, **options), HostileGrid(8, attackers, scale)
    result = strategy.start(grid, pack_models(np.zeros((1, 4), np.float32), layout), 1, train_config=ConfigRecord(sent))
    return unpack_models(result.arrays)[0][0], result


def test_updates_of_attackers_come_scaled_with_the_sign_flipped_and_only_the_honest_are_evaluated():
    honest, _ = moved((), 5.0)
    turned, result = moved((1, 6), 5.0)
    assert np.abs(honest).min() > 0.05
    np.testing.assert_allclose(turned, honest * (6 - 5 * 2) / 8, rtol=1e-5)
    assert len(result.evaluate_metrics_clientapp[1]["client_accuracy"]) == 6
    np.testing.assert_allclose(moved((1, 6), 0.0)[0], honest, rtol=1e-6)
    np.testing.assert_allclose(moved((1, 6), 5.0, Aggregator("median"))[0], honest, rtol=1e-5)


@pytest.mark.parametrize("aggregator", ["mean", "median", "trimmed-mean:0.3", "multi-krum:0.3"])
def test_sign_flippers_ruin_the_mean_of_a_whole_run_and_no_robust_aggregator(aggregator, tmp_path):
    config = RunConfig({**SETTINGS, "aggregator": aggregator})
    attackers = choose_attackers(CLIENTS, 0.25, 0)
    folder, grid = RunFolder.create(tmp_path / "run", config), HostileGrid(CLIENTS, attackers, 5.0)
    accuracy = run(folder, grid)["diagnostics"]["accuracy"]
    folder.close()
    grid.close()
    if aggregator == "mean":
        assert accuracy < 0.3
    else:
        assert accuracy > 0.8


def row(cell):
    return cell.unit, cell.strategy, cell.aggregator, cell.seed


def test_the_table_of_the_page_is_that_of_the_results():
    found = BENCHMARK["read"](BENCHMARK["RESULTS"])
    assert found
    every, rows = BENCHMARK["cells"](1 + max(cell.seed for cell in found)), {row(cell) for cell in found}
    assert found.keys() == {cell for cell in every if row(cell) in rows}
    text = BENCHMARK["PAGE"].read_text()
    assert "<!-- none -->" in text
    assert "<!-- record -->" in text
    assert BENCHMARK["filled"](text) == text
