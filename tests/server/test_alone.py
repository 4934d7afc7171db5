"""Models that clients train alone: their accuracies, their cost, and the sentence whether federation pays."""

import io
import json
import math

import pytest
from rich.console import Console

from coterie.report import formats
from coterie.report.payoff import federation_pays
from coterie.report.result_table import result_table
from coterie.results import Diagnostics, Outcome
from coterie.server import RunConfig, RunFolder
from coterie.server.alone import compared_alone
from coterie.server.planning import about
from coterie.server.simulate import simulate

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


@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        ({"train_alone": 4, "rounds": 200, "clients": 100}, 4),
        ({"clients": 2}, 2),
        ({"rounds": 40}, 3),  # a tenth of 8 passes of 20 clients is 2 clients; at least three
        ({"rounds": 40, "clients": 100}, 10),
        ({"rounds": 4, "privacy_unit": "record", "samples_per_client": 60}, 20),
        ({"rounds": 800, "clients": 100}, 20),
    ],
)
def test_clients_alone_take_at_most_a_tenth_of_the_training(settings, clients):
    assert alone(**settings).alone_clients == clients


@pytest.mark.parametrize(
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


def test_a_run_without_scores_is_not_compared():
    scores = Diagnostics()
    assert compared_alone(RunConfig(SMALL), scores) is scores


def test_the_certificate_lists_what_is_computed_without_noise():
    listed = about(RunConfig(SMALL))["diagnostics"]
    assert any("models that some clients train alone" in line for line in listed)


def test_a_simulation_ends_with_the_comparison(tmp_path):
    folder = RunFolder.create(tmp_path / "run", RunConfig(SMALL))
    try:
        outcome = simulate(folder)
    finally:
        folder.close()
    stored = json.loads((tmp_path / "run" / "diagnostics.json").read_text())
    assert stored["alone_accuracy"] == outcome.diagnostics.alone_accuracy > 0
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(result_table(outcome, {}))
    assert "Federation pays" in console.export_text()


@pytest.mark.parametrize(
    ("scores", "pays", "text"),
    [
        ({"accuracy": 0.9, "alone_accuracy": 0.5}, True, "yes: 90.0 % against 50.0 % for a model"),
        ({"accuracy": 0.5, "alone_accuracy": 0.9}, False, "share nothing (strategy local)"),
        ({"accuracy": 0.5, "alone_accuracy": 0.5}, False, "no: 50.0 % against 50.0 %"),
        (
            {"accuracy": 0.5, "personal_accuracy": 0.95, "alone_accuracy": 0.9},
            True,
            "yes: 50.0 %, personalised 95.0 %,",
        ),
        ({"accuracy": 0.5, "personal_accuracy": 0.6, "alone_accuracy": 0.9}, False, "no: 50.0 %, personalised 60.0 %,"),
    ],
)
def test_the_answer(scores, pays, text):
    answer = federation_pays(Diagnostics(**scores, alone_clients=20, alone_seconds=0.5))
    assert answer[0] is pays
    assert text in answer[1].replace(formats.NBSP, " ")
    assert "mean of 20 clients" in answer[1]


@pytest.mark.parametrize("scores", [{}, {"accuracy": 0.5}, {"alone_accuracy": 0.5}])
def test_without_a_comparison_there_is_no_answer(scores):
    assert federation_pays(Diagnostics(**scores)) is None
    assert "Federation" not in str(result_table(Outcome(diagnostics=Diagnostics(**scores)), {}).columns[0]._cells)
    assert math.isinf(RunConfig(SMALL).budget)
