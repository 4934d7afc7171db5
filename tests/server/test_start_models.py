"""The models of another run as a start: its charges count where the clients are the same."""

import json
from collections import Counter
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from kit.commands import tree
from kit.run_folders import model, privacy, run_in
from kit.tables import for_rows

import coterie.privacy
from coterie.privacy import Event, epsilon, read_ledger
from coterie.privacy.certificate import certificate, total
from coterie.privacy.check import check
from coterie.privacy.ledger_lines import count_events
from coterie.server import ConfigError, FolderError, RunError, RunFolder
from coterie.server.app import open_folder

SCHEMA = json.loads(Path(coterie.privacy.__file__).with_name("privacy.schema.json").read_text())
BASE = {"strategy": "fedavg", "clients": 20, "clusters": 1, "groups": "1", "rounds": 2, "sampling-rate": 0.5}
BASE |= {"local-epochs": 1, "samples-per-client": 10, "model": "linear", "evaluate": "off", "epsilon": 4}
PUBLIC = {**BASE, "privacy-unit": "none"}
del PUBLIC["epsilon"]


def opened(path, settings, start=None):
    values = {**settings, "out": str(path)}
    return open_folder(values | ({} if start is None else {"start-from": str(start)}), path.parent)


def execute(path, settings, start=None):
    return run_in(opened(path, settings, start))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A private run of two rounds."""
    path = tmp_path_factory.mktemp("first") / "first"
    execute(path, BASE)
    return path


def charged(path):
    header, charges = read_ledger(path / "ledger.jsonl")
    return header, count_events(charges)


def test_training_starts_with_the_models_of_the_other_run(tmp_path, first):
    folder = opened(tmp_path / "run", BASE | {"epsilon": 8}, first)
    start = folder.start_models()
    folder.close()
    np.testing.assert_array_equal(start.models[0], start.layout.flatten(model(first)))
    execute(tmp_path / "still", {**PUBLIC, "lr": 1e-6}, first)
    for name, values in model(tmp_path / "still").items():
        np.testing.assert_allclose(values, model(first)[name], atol=1e-4)


def test_ledger_and_certificate_compose_both_runs(tmp_path, first):
    execute(tmp_path / "run", BASE | {"epsilon": 8}, first)
    before, (header, events) = charged(first)[1], charged(tmp_path / "run")
    stated, delta = privacy(tmp_path / "run"), header["delta"]
    assert stated["epsilon"] == pytest.approx(epsilon(before + events, delta))
    assert stated["accountants"]["rdp"] == pytest.approx(epsilon(before + events, delta, "rdp"))
    assert 7.9 < stated["epsilon"] <= 8  # the budget counts both, and is used
    assert stated["certified"]
    jsonschema.validate(stated, SCHEMA)
    assert stated["charges"] == 2
    (noise,) = {event.noise_multiplier for event in events}
    assert epsilon({Event(0.5, noise): 2}, delta) < 7.5
    spent = [charge["epsilon"] for charge in read_ledger(tmp_path / "run/ledger.jsonl")[1]]
    assert spent[0] > privacy(first)["epsilon"]


def test_a_run_from_a_run_from_a_run_counts_all_three(tmp_path, first):
    execute(tmp_path / "second", BASE | {"epsilon": 8}, first)
    execute(tmp_path / "third", BASE | {"epsilon": 12}, tmp_path / "second")
    all_events = sum((charged(path)[1] for path in (first, tmp_path / "second", tmp_path / "third")), Counter())
    assert privacy(tmp_path / "third")["epsilon"] == pytest.approx(epsilon(all_events, 1 / 2000))
    ledgers = {path.name: read_ledger(path / "ledger.jsonl") for path in (tmp_path / "second", tmp_path / "third")}
    assert total(ledgers)["epsilon"] == pytest.approx(epsilon(all_events, 1 / 2000))  # nothing counts twice


def test_planned_rounds_of_a_stopped_run_count(tmp_path):
    execute(tmp_path / "first", {**BASE, "rounds": 4, "stop-after": 1})
    execute(tmp_path / "run", BASE | {"epsilon": 8}, tmp_path / "first")
    (kind,) = privacy(tmp_path / "run")["started_from"]["charged"]
    assert kind["charges"] == 4


@pytest.mark.parametrize("noise", [None, 3.0], ids=["calibrated", "by hand"])
def test_a_spent_budget_is_refused_before_the_run(tmp_path, first, noise):
    settings = BASE | {"epsilon": 3.5} | ({} if noise is None else {"noise-multiplier": noise})
    with pytest.raises((ConfigError, ValueError), match=r"already spent|leave no round"):
        opened(tmp_path / "run", settings, first)
    assert not (tmp_path / "run").exists()


def test_noise_by_hand_ends_at_the_budget_of_both(tmp_path, first):
    with pytest.raises(RunError, match="the budget is exhausted"):
        execute(tmp_path / "run", {**BASE, "epsilon": 4.2, "noise-multiplier": 3.0, "rounds": 40}, first)
    assert privacy(tmp_path / "run")["epsilon"] <= 4.2


def test_further_rounds_count_the_other_run(tmp_path, first):
    execute(tmp_path / "run", {**BASE, "epsilon": 4.5, "noise-multiplier": 5.0}, first)
    with pytest.raises(FolderError, match="at most") as caught:
        RunFolder.resume(tmp_path / "run", {"rounds": 300})
    most = int(str(caught.value).split("at most ")[1].split()[0])
    header, _ = charged(first)
    both = charged(first)[1] + Counter({Event(0.5, 5.0): most})
    assert epsilon(both, header["delta"]) <= 4.5 < epsilon(both + Counter({Event(0.5, 5.0): 1}), header["delta"])


@for_rows("clients", ["same", "other"])
def test_ledgers_of_0_3_0_state_whose_models_were_the_first(tmp_path_factory, first, clients):
    path = tmp_path_factory.mktemp("runs") / "run"
    execute(path, BASE | {"epsilon": 8}, first)
    header, charges = read_ledger(path / "ledger.jsonl")
    header["start"] |= {"clients": clients} | ({"events": []} if clients == "other" else {})
    stated = certificate(header, charges)
    jsonschema.validate(stated, SCHEMA)
    assert stated["started_from"]["clients"] == clients
    outside = [text for text in stated["outside"] if "come from other clients: the user states it" in text]
    assert len(outside) == (clients == "other")


def test_an_uncertified_start_makes_the_run_uncertified(tmp_path):
    execute(tmp_path / "first", {**BASE, "seed": 1})
    execute(tmp_path / "run", BASE | {"epsilon": 8}, tmp_path / "first")
    stated = privacy(tmp_path / "run")
    assert not stated["certified"]
    assert any("those of first: seeded noise" in reason for reason in stated["reasons"])


@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        (PUBLIC, BASE, "no privacy"),
        (BASE, {**BASE, "clients": 30}, "20 clients, this one 30"),
        (BASE, {**BASE, "mechanism": "rr-slot"}, "different adjacencies"),
        (BASE, {**BASE, "privacy-unit": "record", "sampling-rate": 1, "clients": 20}, "privacy unit client, this one"),
        (PUBLIC, {**PUBLIC, "model": "mlp-32"}, "no parameter"),
        ({**PUBLIC, "strategy": "ifca", "clusters": 3}, {**PUBLIC, "strategy": "ifca", "clusters": 2}, "has 3 models"),
    ],
    ids=["public", "clients", "adjacency", "record", "network", "clusters"],
)
def test_runs_that_do_not_fit_are_refused(tmp_path, there, here, named):
    execute(tmp_path / "first", there)
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path / "run", here, tmp_path / "first")
    assert not (tmp_path / "run").exists()


def test_one_model_is_the_start_of_every_cluster(tmp_path, first):
    execute(tmp_path / "run", {**PUBLIC, "strategy": "ifca", "clusters": 2, "reseed-every": 0, "lr": 1e-6}, first)
    same = [
        all(np.allclose(values, model(first)[name], atol=1e-3) for name, values in tensors.items())
        for tensors in (model(tmp_path / "run", f"models/cluster-{cluster}") for cluster in range(2))
    ]
    assert same == [True, False]  # IFCA perturbs the copies


@pytest.mark.parametrize("folder", ["nothing", "empty"])
def test_a_folder_without_models_is_named(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no models"):
        opened(tmp_path / "run", BASE, tmp_path / folder)


def test_a_resumed_run_needs_the_other_one_no_more_and_keeps_its_charges(tmp_path):
    execute(tmp_path / "first", BASE)
    folder = opened(tmp_path / "run", BASE | {"epsilon": 8}, tmp_path / "first")
    start = folder.start_models().models
    folder.close()  # before the first round
    (tmp_path / "first").rename(tmp_path / "gone")
    again = RunFolder.resume(tmp_path / "run", {})
    assert epsilon(again.ledger.events, again.plan.delta) > 3.9
    np.testing.assert_array_equal(again.start_models().models, start)
    run_in(again)
    assert 7.9 < privacy(tmp_path / "run")["epsilon"] <= 8
    before = tree(tmp_path / "run")
    with pytest.raises(FolderError, match="cannot change on resume"):
        RunFolder.resume(tmp_path / "run", {"start-from": str(tmp_path / "gone")})
    assert tree(tmp_path / "run") == before


def test_a_crash_is_made_up_for_within_the_budget_of_both(tmp_path, first):
    folder = opened(tmp_path / "run", BASE | {"epsilon": 8, "rounds": 3}, first)
    folder.checkpoint = lambda state, line: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_in(folder)
    assert run_in(RunFolder.resume(tmp_path / "run", {}))["charges"] == 4
    assert privacy(tmp_path / "run")["epsilon"] <= 8


def test_the_charges_of_the_other_run_cannot_be_left_out(tmp_path, first):
    execute(tmp_path / "run", BASE | {"epsilon": 8}, first)
    header, charges = read_ledger(tmp_path / "run/ledger.jsonl")
    stated = privacy(tmp_path / "run")
    forged = {**header, "start": {**header["start"], "events": []}}
    assert certificate(forged, charges)["epsilon"] < stated["epsilon"]
    assert check(forged, charges, stated)  # every charge states the epsilon up to it
