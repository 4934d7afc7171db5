"""Models that clients train alone: their accuracies, their cost, and the sentence whether federation pays."""

import io
import json
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from kit.tables import for_rows
from rich.console import Console

from coterie import models as networks
from coterie.client.backend import train
from coterie.client.personal import trained_alone
from coterie.client.scores import accuracies
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.datasets.federation import TestSet
from coterie.privacy import NoPrivacy
from coterie.report import formats
from coterie.report.predictions import federation_pays
from coterie.report.result_table import result_table
from coterie.results import Diagnostics, Outcome
from coterie.server import RunConfig, RunFolder
from coterie.server.planning import about
from coterie.server.simulate import simulate
from coterie.server.simulated_scores import compared_alone
from coterie.strategies import FedAvg, Local
from coterie.strategies.loop import configure_clients
from coterie.wire.messages import Layout

SMALL = {"clients": 20, "groups": "1", "shift": "none", "clusters": 1, "strategy": "fedavg", "rounds": 2, "seed": 3}
SMALL |= {"privacy-unit": "none", "local-epochs": 1}
SCORES = Diagnostics(accuracy=0.5)


def alone(**settings):
    return compared_alone(RunConfig(SMALL | {k.replace("_", "-"): v for k, v in settings.items()}), SCORES)


def test_clients_alone_learn_from_their_own_records():
    few, many = alone(clients=500), alone(clients=20, rounds=30)
    assert 0.1 < few.alone_accuracy < many.alone_accuracy < 1
    assert many.alone_worst_client_accuracy < many.alone_accuracy
    assert many.alone_seconds < 5
    assert many.accuracy == 0.5


def test_equal_runs_have_equal_models_of_clients_alone():
    first, second = alone(), alone(rounds=2)
    assert (first.alone_accuracy, first.alone_clients) == (second.alone_accuracy, second.alone_clients)


@for_rows(
    ("settings", "clients"),
    [
        ({"train_alone": 4, "rounds": 200, "clients": 100}, 4),
        ({"clients": 2}, 2),
        ({"rounds": 40}, 3),  # a tenth of 8 passes of 20 clients is less than one that makes 40; at least three
        ({"rounds": 240, "clients": 100}, 12),
        ({"rounds": 16, "privacy_unit": "record", "samples_per_client": 60}, 8),
        ({"rounds": 800, "clients": 100}, 20),
    ],
)
def test_clients_alone_take_at_most_a_tenth_of_the_training(settings, clients):
    assert alone(**settings).alone_clients == clients


@for_rows(
    "settings",
    [
        {"train_alone": 0},
        {"evaluate": "off"},
        {"evaluate": "private", "privacy_unit": "client", "noise_multiplier": 2.0},
        {"strategy": "local"},
        {"strategy": "kfed", "clusters": 4, "rounds": 1, "local_epochs": 4},
    ],
)
def test_nothing_is_trained_alone_where_nothing_is_compared(settings):
    changed = {key.replace("_", "-"): value for key, value in settings.items()}
    values = {
        key: value
        for key, value in (SMALL | changed).items()
        if settings.get("strategy") != "kfed" or key in ("strategy", "clusters", "clients", "seed")
    }
    config = RunConfig(values)
    assert config.trains_alone == 0
    assert compared_alone(config, SCORES) is SCORES
    assert not any("train alone" in line for line in about(config)["diagnostics"])
    scores = Diagnostics()  # of a run that was not evaluated
    assert compared_alone(RunConfig(SMALL), scores) is scores


def test_the_certificate_lists_what_is_computed_without_noise():
    listed = about(RunConfig(SMALL))["diagnostics"]
    assert any("models that some clients train alone" in line for line in listed)


def test_a_simulation_ends_with_the_comparison(tmp_path):
    with closing(RunFolder.create(tmp_path / "run", RunConfig(SMALL))) as folder:
        outcome = simulate(folder)
    stored = json.loads((tmp_path / "run" / "diagnostics.json").read_text())
    assert stored["alone_accuracy"] == outcome.diagnostics.alone_accuracy > 0
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(result_table(outcome, {}))
    assert "Federation pays" in console.export_text()


@for_rows(
    ("accuracy", "personal", "alone", "pays", "text"),
    [
        (0.9, None, 0.5, True, "yes: 90.0 % against 50.0 % for a model"),
        (0.5, None, 0.9, False, "share nothing (strategy local)"),
        (0.5, None, 0.5, False, "no difference: 50.0 %, as much as a model that a client"),
        (0.50004, None, 0.5, False, "no difference: 50.0 %, as much as a model"),
        (0.4, 0.5, 0.5, False, "no difference: 40.0 %, personalised 50.0 %, as much as"),
        (0.5, 0.95, 0.9, True, "yes: 50.0 %, personalised 95.0 %,"),
        (0.5, 0.6, 0.9, False, "no: 50.0 %, personalised 60.0 %,"),
    ],
)
def test_the_answer(accuracy, personal, alone, pays, text):
    scores = Diagnostics(accuracy=accuracy, personal_accuracy=personal, alone_accuracy=alone)
    answer = federation_pays(replace(scores, alone_clients=20, alone_seconds=0.5))
    assert answer[0] is pays
    assert text in answer[1].replace(formats.NBSP, " ")
    assert "mean of 20 clients" in answer[1]


@for_rows("scores", [{}, {"accuracy": 0.5}, {"alone_accuracy": 0.5}])
def test_without_a_comparison_there_is_no_answer(scores):
    assert federation_pays(Diagnostics(**scores)) is None
    assert "Federation" not in str(result_table(Outcome(diagnostics=Diagnostics(**scores)), {}).columns[0]._cells)
    assert math.isinf(RunConfig(SMALL).budget)


def test_the_page_and_a_site_state_the_same_figure(monkeypatch):
    """Both train by one function, with small last steps, however few rounds the run has."""
    calls = []

    def trained(network, layout, initial, shards, rngs, training):
        calls.append((len(shards), training.lr, training.batch_size))
        return trained_alone(network, layout, initial, shards, rngs, training)

    monkeypatch.setattr("coterie.server.simulated_scores.trained_alone", trained)
    assert alone(rounds=1, clients=4).alone_accuracy == alone(rounds=9, clients=4).alone_accuracy
    assert calls == [(3, RunConfig(SMALL).training.lr, RunConfig(SMALL).training.batch_size)] * 2


@for_rows("rounds", [1, 3, 4, 8, 10])
def test_the_last_quarter_of_local_training_has_small_steps(rounds):
    plan = NoPrivacy(clients=1, num_clusters=1, sampling_rate=1.0, rounds=rounds)
    steps = []
    for method in (Local(plan), FedAvg(plan)):
        for number in range(1, rounds + 1):
            configure_clients(method, {"lr": 0.5, "lr-decay": 0.9}, number)
            steps.append(method.run.state.config["lr"])
    local, flat = np.reshape(steps, (2, rounds))
    small = rounds // 4
    assert flat == pytest.approx(0.5 * 0.9 ** np.arange(rounds))
    assert local == pytest.approx(flat * np.repeat([1, 0.1], [rounds - small, small]))


def test_small_last_steps_are_a_stronger_baseline():
    """On records whose labels are partly wrong, a flat step ends further from the minimum."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1200, 20)).astype(np.float32)
    y = (x[:, 0] + 1.5 * rng.standard_normal(1200) > 0).astype(np.int64)
    shards = [Shard(0, i, x[300 * i :][:300], y[300 * i :][:300], TestSet(x, y)) for i in range(4)]
    network = networks.build("linear", (20,), 2)
    layout, training = Layout.of(dict(network.named_parameters())), LocalTrainingConfig(40, 10, 1.0)
    rngs = [[np.random.default_rng(i) for i in range(4)] for _ in range(2)]
    initial = np.zeros(layout.size, np.float32)
    small = trained_alone(network, layout, initial, shards, rngs[0], training)
    flat = train(network, layout, np.tile(initial, (4, 1)), shards, rngs[1], training)
    clean = (x[:, 0] > 0).astype(np.int64)
    scores = [np.mean([accuracies(network, layout, m[None], x, clean)[0] for m in models]) for models in (small, flat)]
    assert scores[0] > scores[1] + 0.02
