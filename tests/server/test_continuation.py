"""Runs that go on: the planned rounds after stop-after, and more rounds within the budget that is left."""

import json
import tomllib

import numpy as np
import pytest
from kit.commands import tree
from kit.run_folders import execute, model, privacy

from coterie.client.handlers import HANDLERS
from coterie.privacy import Event, epsilon, read_ledger
from coterie.privacy.certificate import certificate, total
from coterie.privacy.check import check
from coterie.server import FolderError, RunConfig, RunError, RunFolder
from coterie.wire.messages import TRAIN

BASE = {"strategy": "fedavg", "clients": 20, "clusters": 1, "groups": "1", "rounds": 2, "sampling-rate": 0.5}
BASE |= {"local-epochs": 1, "samples-per-client": 10, "model": "linear", "evaluate-every": 2}
PUBLIC = {**BASE, "privacy-unit": "none", "seed": 3}
# Noise by hand leaves most of the budget.
PRIVATE = {**BASE, "epsilon": 20, "noise-multiplier": 3.0}


def setting(path, name):
    return tomllib.loads((path / "config.toml").read_text())["config"][name]


def test_further_rounds_keep_the_step_size(tmp_path):
    """It followed from the rounds that were planned first."""
    run = execute(tmp_path / "run", PRIVATE)
    first = json.loads((tmp_path / "run" / "privacy.json").read_text())["public_inputs"]["server-lr"]
    assert first == RunConfig(PRIVATE).server_lr != RunConfig({**PRIVATE, "rounds": 5}).server_lr
    execute(tmp_path / "run", rounds=5)
    last = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (run["rounds"], last["charges"], last["public_inputs"]["server-lr"]) == (2, 5, first)


@pytest.mark.parametrize("settings", [PUBLIC, BASE], ids=["none", "client"])
def test_the_planned_rounds_after_stop_after(tmp_path, settings):
    settings = {**settings, "rounds": 4, "seed": 3}
    execute(tmp_path / "whole", settings)
    first = execute(tmp_path / "run", {**settings, "stop-after": 1})
    outcome = execute(tmp_path / "run", **{"stop-after": 3})
    assert (first["rounds"], outcome["rounds"], setting(tmp_path / "run", "stop-after")) == (1, 3, 3)
    outcome = execute(tmp_path / "run", **{"stop-after": 0})
    assert (outcome["rounds"], outcome["charges"], outcome["epsilon"]) == (4, 4, first["epsilon"])
    np.testing.assert_equal(model(tmp_path / "run"), model(tmp_path / "whole"))


def test_the_certificate_covers_both_parts_at_the_same_noise(tmp_path):
    path = tmp_path / "run"
    execute(path, PRIVATE)
    first, before = privacy(path), (path / "ledger.jsonl").read_bytes()
    execute(path, rounds=6)
    stated, (header, charges) = privacy(path), read_ledger(path / "ledger.jsonl")
    assert (path / "ledger.jsonl").read_bytes().startswith(before)  # one ledger, with its chain
    assert header["plan"]["rounds"] == 2
    assert [charge.get("extended") for charge in charges] == [None] * 2 + [{"rounds": 6, "evaluations": 0}] * 4
    assert {charge["noise_multiplier"] for charge in charges} == {3.0}
    assert (first["rounds"], stated["rounds"], stated["certified"]) == (2, 6, True)
    assert (stated["tuned_outside"]["rounds"], stated["public_inputs"]["rounds"]) == (6, 6)
    assert first["epsilon"] == pytest.approx(epsilon({Event(0.5, 3.0): 2}, first["delta"]))
    assert stated["epsilon"] == pytest.approx(epsilon({Event(0.5, 3.0): 6}, first["delta"]))
    assert stated["accountants"]["rdp"] == pytest.approx(epsilon({Event(0.5, 3.0): 6}, first["delta"], "rdp"))
    assert total({"run": (header, charges)})["epsilon"] == stated["epsilon"]


def test_a_certificate_counts_the_further_rounds_from_their_first_charge(tmp_path):
    execute(tmp_path / "run", PRIVATE)
    execute(tmp_path / "run", rounds=6)
    header, charges = read_ledger(tmp_path / "run/ledger.jsonl")
    epsilons = [certificate(header, charges[:count])["epsilon"] for count in range(7)]
    assert epsilons[:3] == [epsilons[0]] * 3
    assert epsilons[3:] == [epsilons[6]] * 4
    assert epsilons[0] < epsilons[6]


NOISY = {**PRIVATE, "rounds": 3, "evaluate": "private", "evaluate-noise": 0.5}


def test_private_evaluations_of_the_further_rounds_are_planned_and_charged(tmp_path):
    path = tmp_path / "run"
    execute(path, NOISY)
    execute(path, rounds=6)
    charges = read_ledger(path / "ledger.jsonl")[1]
    evaluated = [charge["round"] for charge in charges if charge.get("for") == "evaluation"]
    assert evaluated == [2, 3, 4, 6]
    assert {tuple(charge["extended"].values()) for charge in charges[5:]} == {(6, 4)}
    assert privacy(path)["epsilon"] == pytest.approx(charges[-1]["epsilon"])


@pytest.mark.parametrize(
    ("first", "change", "named"),
    [
        ({}, {"rounds": 5}, "multiple of 2, not to round 5"),
        ({"rounds": 9, "stop-after": 2}, {"stop-after": 3}, "multiple of 2, not to round 3"),
        ({"rounds": 4, "stop-after": 2}, {"rounds": 6, "stop-after": 0}, "2 planned rounds left"),
    ],
)
def test_where_a_run_goes_on_chooses_no_private_evaluation(tmp_path, first, change, named):
    execute(tmp_path / "run", {**NOISY, **first})
    with pytest.raises(FolderError, match=named):
        RunFolder.resume(tmp_path / "run", change)


def test_a_private_evaluation_at_the_stop_is_paid_for_by_later_noise(tmp_path):
    path = tmp_path / "run"
    settings = {**BASE, "rounds": 4, "evaluate": "private", "evaluate-noise": 0.03, "epsilon": 20}
    execute(path, {**settings, "stop-after": 3})
    outcome = execute(path, **{"stop-after": 0})
    charges = read_ledger(path / "ledger.jsonl")[1]
    assert [charge["round"] for charge in charges if charge["for"] == "evaluation"] == [2, 3, 4]
    noise = [charge["noise_multiplier"] for charge in charges if charge["for"] == "training"]
    assert noise[3] > noise[2]
    assert outcome["rounds"] == 4
    assert privacy(path)["epsilon"] <= 20


def test_a_finished_run_is_not_privately_evaluated_again(tmp_path):
    first = execute(tmp_path / "run", NOISY)
    again = execute(tmp_path / "run")
    assert (again["charges"], again["accuracy"]) == (first["charges"], first["accuracy"])


@pytest.mark.parametrize(
    ("settings", "rounds", "named"),
    [
        (BASE, 3, "no further round fits"),
        ({**PRIVATE, "epsilon": 5}, 400, "at most [0-9]+ rounds fit"),
        ({**PRIVATE, "mechanism": "banded"}, 4, "banded.*--from RUN"),
        ({**BASE, "privacy-unit": "record", "sampling-rate": 1}, 4, "record level.*--from RUN"),
        ({**PUBLIC, "stop-after": 1}, 4, "add --set stop-after=0"),
        (PUBLIC, 1, "rounds was 2, now 1.*set stop-after"),
    ],
    ids=["no budget", "some budget", "banded", "record", "stop-after", "fewer"],
)
def test_rounds_that_cannot_be_are_refused_and_change_nothing(tmp_path, settings, rounds, named):
    path = tmp_path / "run"
    execute(path, settings)
    before = tree(path)
    with pytest.raises(FolderError, match=named):
        RunFolder.resume(path, {"rounds": rounds})
    assert tree(path) == before


def test_the_rounds_that_an_error_names_fit_and_no_more(tmp_path):
    path = tmp_path / "run"
    execute(path, {**PRIVATE, "epsilon": 3})
    with pytest.raises(FolderError, match="at most") as caught:
        RunFolder.resume(path, {"rounds": 100})
    most = int(str(caught.value).split("at most ")[1].split()[0])
    with pytest.raises(FolderError, match=f"at most {most} rounds"):
        RunFolder.resume(path, {"rounds": most + 1})
    folder = RunFolder.resume(path, {"rounds": most})
    folder.close()
    plan = folder.plan
    assert (plan.rounds, plan.epsilon) == (most, 3)
    assert epsilon({plan.event(): most}, plan.delta) <= 3 < epsilon({plan.event(): most + 1}, plan.delta)


@pytest.mark.parametrize("change", [{"epsilon": 30}, {"noise-multiplier": 2.0}, {"delta": 1e-3}, {"clip-norm": 2.0}])
def test_a_budget_and_the_noise_never_change(tmp_path, change):
    execute(tmp_path / "run", PRIVATE)
    with pytest.raises(FolderError, match="cannot change on resume"):
        RunFolder.resume(tmp_path / "run", {"rounds": 4, **change})


def test_a_run_whose_clients_all_failed_succeeds_with_more_rounds(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setitem(HANDLERS, TRAIN, lambda cohort: 1 / 0)
        with pytest.raises(RunError, match="no valid reply"):
            execute(path, PUBLIC)
    with pytest.raises(RunError, match="no valid reply"):
        execute(path)
    assert execute(path, rounds=4)["rounds"] == 4
    assert execute(path)["rounds"] == 4  # no mark of the failure is left


def test_a_run_stopped_in_a_bad_session_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setitem(HANDLERS, TRAIN, lambda cohort: 1 / 0)
        with pytest.raises(RunError, match="no valid reply"):
            execute(path, {**PUBLIC, "rounds": 4, "stop-after": 2})
    assert execute(path, **{"stop-after": 0})["rounds"] == 4


def test_an_extended_ledger_cannot_be_shortened(tmp_path):
    path = tmp_path / "run"
    execute(path, PRIVATE)
    execute(path, rounds=4)
    stated = json.loads((path / "privacy.json").read_text())
    header, charges = read_ledger(path / "ledger.jsonl")
    smaller = [{**charge, "extended": {"rounds": 1}} if "extended" in charge else charge for charge in charges]
    assert certificate(header, smaller)["epsilon"] == stated["epsilon"]  # what is charged counts in any case
    assert certificate(header, smaller)["rounds"] == 2
    larger = [*charges[:-1], {**charges[-1], "extended": {"rounds": 9}}]
    assert certificate(header, larger)["epsilon"] > stated["epsilon"]
    assert any("rounds" in problem for problem in check(header, larger, stated))
