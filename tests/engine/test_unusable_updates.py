"""One client's update or evaluation is not finite, is huge, or fails: it contributes zero, and no client is missing.

The same for every mechanism of client-level privacy, with and without masks, whether the server receives updates or the
engine sums them.
"""

import json
from contextlib import closing

import numpy as np
import pytest

from coterie.client import handlers, local_evaluation, masked_rounds
from coterie.client.cohort import Cohort
from coterie.engine.in_process import LocalGrid, MaskedGrid, SummingGrid
from coterie.privacy.mechanisms import score_sums, secure
from coterie.privacy.secure_aggregation import noise_layers
from coterie.rounds import score_estimates
from coterie.server import RunConfig, RunFolder, run
from coterie.server.checkpoints import read_checkpoint
from coterie.wire.messages import SCORE_COUNTS

CLIENTS, SPOILED = 12, 3
SETTINGS = {"clients": CLIENTS, "rounds": 1, "samples-per-client": 10, "model": "linear", "local-epochs": 1, "seed": 7}
SETTINGS |= {"groups": "2", "clusters": 2, "sampling-rate": 1, "epsilon": 1e4, "delta": 1e-3, "evaluate": "off"}
MECHANISMS = {
    "joint": {},
    "joint, released divisors": {"mechanism": "joint", "divisor": "released"},
    "joint, adaptive norm": {"mechanism": "joint", "clip-norm": "adaptive"},
    "banded": {"mechanism": "banded", "rounds": 2, "sampling-rate": 0.5},
    "rr-slot": {"mechanism": "rr-slot"},
    "secure": {"mechanism": "secure", "dropout": 0},
    "secure, adaptive norm": {"mechanism": "secure", "dropout": 0, "clip-norm": "adaptive"},
}
UPDATES = {"NaN": np.nan, "infinity": np.inf, "one NaN": None, "failure": None}
ENGINES = {"messages": LocalGrid, "sums": SummingGrid, "masks": MaskedGrid}


def spoil(monkeypatch, kind, value=0.0):
    """Let one client return another update; "failure": let its training fail. Others are as they were."""
    train = handlers.train_without_dp

    def spoiled(cohort):
        labels, redrawn, updates = train(cohort)
        for row, client in enumerate(cohort.clients):
            if client.client_id == SPOILED:
                if kind == "failure":
                    raise ArithmeticError("these records cannot be trained on")
                if kind == "one NaN":
                    updates[row, -1] = np.nan
                else:
                    updates[row] = value
                if kind == "zero":
                    labels[row] = redrawn[row] = 0
        return labels, redrawn, updates

    for module in (handlers, masked_rounds):
        monkeypatch.setattr(module, "train_without_dp", spoiled)


def spoil_evaluation(monkeypatch, kind):
    """Let the evaluation of one client fail, or find no number; "loss": let no client have a finite loss."""
    reports = local_evaluation.reports

    def spoiled(cohort):
        found = reports(cohort)
        for client, report in zip(cohort.clients, found, strict=True):
            if client.client_id == SPOILED and kind == "failure":
                raise ArithmeticError("these records cannot be evaluated")
            if client.client_id == SPOILED and kind == "NaN":
                report["accuracy"] = np.nan
                if SCORE_COUNTS in report:
                    report[SCORE_COUNTS] = [np.nan] * len(report[SCORE_COUNTS])
        return found

    for module in (local_evaluation, masked_rounds):
        monkeypatch.setattr(module, "reports", spoiled)
    if kind == "loss":
        monkeypatch.setattr(Cohort, "losses", property(lambda self: np.full((len(self.clients), 1), np.inf)))


def models_of(path, grid, **settings):
    """The models, and the rounds that were skipped."""
    config = RunConfig({**SETTINGS, "out": str(path), "masks": grid is MaskedGrid, **settings})
    with closing(RunFolder.create(path, config)) as folder, closing(grid(CLIENTS)) as opened:
        outcome = run(folder, opened)
    checkpoint, _ = read_checkpoint(path / "checkpoint" / "state.safetensors")
    return checkpoint.models, outcome.get("skipped_rounds", [])


def engines_of(mechanism):
    return [name for name in ENGINES if name != "masks" or mechanism.startswith("secure")]


@pytest.fixture
def without_noise(monkeypatch):
    for module in (noise_layers, score_sums, secure):
        monkeypatch.setattr(module, "discrete_gaussian", lambda rng, std, size: np.zeros(size, np.int64))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_update_that_is_not_finite_is_zero_and_nobody_is_missing(tmp_path, monkeypatch, without_noise, mechanism):
    settings, expected = MECHANISMS[mechanism], None
    for kind, value in {"zero": 0.0, **UPDATES}.items():
        if kind == "zero" and not mechanism.startswith("secure"):
            continue  # a null client, of which not even the label counts
        for engine in engines_of(mechanism):
            with monkeypatch.context() as patched:
                spoil(patched, kind, value)
                models, skipped = models_of(tmp_path / f"{kind} {engine}", ENGINES[engine], **settings)
            assert skipped == [], (kind, engine)
            expected = models if expected is None else expected
            np.testing.assert_allclose(models, expected, atol=1e-6, err_msg=f"{kind} {engine}")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_huge_update_is_clipped(tmp_path, monkeypatch, without_noise, mechanism):
    """Its direction counts, however large it is: the squares of float32 numbers overflow in float32 alone."""
    expected = None
    for value in (1e6, 1e25, 3e38):
        for engine in engines_of(mechanism):
            with monkeypatch.context() as patched:
                spoil(patched, "huge", value)
                models, skipped = models_of(tmp_path / f"{value} {engine}", ENGINES[engine], **MECHANISMS[mechanism])
            assert skipped == [], (value, engine)
            expected = models if expected is None else expected
            np.testing.assert_allclose(models, expected, atol=1e-6, err_msg=f"{value} {engine}")


@pytest.mark.parametrize("kind", ["failure", "NaN", "loss"])
def test_an_evaluation_that_fails_counts_as_one_half_and_nobody_is_missing(tmp_path, monkeypatch, without_noise, kind):
    monkeypatch.setattr(score_estimates, "_REPETITIONS", 2)
    spoil_evaluation(monkeypatch, kind)
    settings = MECHANISMS["secure"] | {"evaluate": "private", "score-share": 0.1, "dataset": "breast-cancer"}
    settings |= {"clusters": 1, "shift": "none", "groups": 1}
    found = []
    for engine in ENGINES:
        models_of(tmp_path / engine, ENGINES[engine], **settings)
        (line,) = map(json.loads, (tmp_path / engine / "metrics.jsonl").read_text().splitlines())
        found.append((line["accuracy"], line["score_histogram"]))
    assert found[0] == found[1] == found[2]
