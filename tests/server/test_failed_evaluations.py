"""A run whose evaluations all fail is an error with the first reason; its models are saved, and it can be resumed."""

import logging

import pytest
from kit.run_folders import execute

from coterie.client.handlers import HANDLERS
from coterie.client.state import ClientError
from coterie.models import ModelError
from coterie.server import RunError
from coterie.wire.messages import EVALUATE, TRAIN

SETTINGS = {"strategy": "fedavg", "clients": 6, "clusters": 1, "groups": "1", "rounds": 2, "sampling-rate": 1}
SETTINGS |= {"local-epochs": 1, "samples-per-client": 10, "model": "linear", "privacy-unit": "none", "seed": 1}
SETTINGS |= {"evaluate-every": 1}
NETWORKS = """
import torch
from torch import nn

def parallel(shape, classes):
    return nn.DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes)))

def scripted(shape, classes):
    return torch.jit.script(parallel(shape, classes).module)

def traced(shape, classes):
    return torch.jit.trace(parallel(shape, classes).module, torch.zeros(1, *shape))
"""


def failing(error):
    def fail(cohort):
        raise error

    return fail


@pytest.mark.parametrize("network", ["parallel", "scripted", "traced"])
@pytest.mark.filterwarnings("ignore")
def test_networks_that_could_train_and_not_be_evaluated_are_refused(tmp_path, monkeypatch, network):
    (tmp_path / f"nets_{network}.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=f"model 'nets_{network}:{network}' returns "):
        execute(tmp_path / "run", {**SETTINGS, "model": f"nets_{network}:{network}"})
    assert len((tmp_path / "run/ledger.jsonl").read_text().splitlines()) == 1


PRIVATELY = {"privacy-unit": "client", "evaluate": "private", "evaluate-noise": 0.5, "epsilon": 20}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"privacy-unit": "none"}, ClientError("no test data")),
        ({"privacy-unit": "client"}, MemoryError("too large")),
        (PRIVATELY, KeyError("weight")),
    ],
    ids=["none", "client", "private evaluations"],
)
def test_any_error_of_all_clients_is_named(tmp_path, monkeypatch, changes, error):
    with monkeypatch.context() as patched:
        patched.setitem(HANDLERS, EVALUATE, failing(error))
        with pytest.raises(RunError, match="no client could evaluate the models: the client failed") as caught:
            execute(tmp_path / "run", {**SETTINGS, **changes})
    assert str(error.args[0]) in str(caught.value)
    assert "--resume" in str(caught.value)
    assert (tmp_path / "run/models/cluster-0.safetensors").exists()
    if changes is not PRIVATELY:  # which are charged, and never repeated
        assert execute(tmp_path / "run")["diagnostics"]["accuracy"] is not None  # the cause is gone


def test_a_certified_run_names_no_reason_of_a_client(tmp_path, monkeypatch):
    monkeypatch.setitem(HANDLERS, EVALUATE, failing(ClientError("of client 3")))
    with pytest.raises(RunError, match="no client could evaluate the models: withheld") as caught:
        execute(tmp_path / "run", {**SETTINGS, "privacy-unit": "client", "seed": "auto"})
    assert "client 3" not in str(caught.value)


def test_the_first_reason_is_named(tmp_path, monkeypatch):
    reasons = iter(["the first", *["another"] * 100])
    monkeypatch.setitem(HANDLERS, EVALUATE, lambda cohort: failing(ClientError(next(reasons)))(cohort))
    with pytest.raises(RunError, match="the first"):
        execute(tmp_path / "run", {**SETTINGS, "clients": 1, "rounds": 3})


def test_one_evaluation_suffices(tmp_path, monkeypatch):
    evaluate, calls = HANDLERS[EVALUATE], iter([True, False, False])
    monkeypatch.setitem(
        HANDLERS, EVALUATE, lambda cohort: evaluate(cohort) if next(calls) else failing(ClientError("x"))(cohort)
    )
    assert execute(tmp_path / "run", {**SETTINGS, "clients": 1, "rounds": 3})["rounds"] == 3


def test_without_evaluations_nothing_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(HANDLERS, EVALUATE, failing(ClientError("never asked")))
    assert execute(tmp_path / "run", {**SETTINGS, "evaluate": "off"})["rounds"] == 2


def test_a_round_without_a_usable_reply_names_the_first_reason(tmp_path, monkeypatch, caplog):
    train, rounds = HANDLERS[TRAIN], []

    def second_fails(cohort):
        rounds.append(cohort)
        return failing(OSError("the disk is gone"))(cohort) if len(rounds) == 2 else train(cohort)

    monkeypatch.setitem(HANDLERS, TRAIN, second_fails)
    with caplog.at_level(logging.WARNING, "flwr"):
        assert execute(tmp_path / "run", {**SETTINGS, "clients": 1, "rounds": 3})["rounds"] == 3
    assert "none of 1 replies of this round could be used; first: the client failed: OSError: the disk" in caplog.text
