"""Runs that are killed, resumed and repeated in any order, at any write to the disk.

A state machine drives one run folder of each kind of run. A kill is an exception at a sync or a replacement of a file,
before or after it; drivers of the slow tests kill whole processes. Whatever happened: no charge is lost, every round is
recorded once, the certificate follows from the ledger within the budget, and a run that wasted no charge has the models
of one that never stopped.
"""

import json
import os
import shutil
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import booleans, integers
from kit.run_folders import privacy, run_in
from safetensors.numpy import load_file

from coterie.privacy import read_ledger
from coterie.server import RunConfig, RunFolder

COMMON = {"clients": 6, "groups": "2", "rounds": 4, "local-epochs": 1, "samples-per-client": 8, "model": "linear"}
COMMON |= {"evaluate-every": 3, "seed": 3}
NONE = {"privacy-unit": "none"}
CLIENT = {"epsilon": 20.0, "noise-multiplier": 2.0, "delta": 1e-3, "server-lr": 1.0}
#: Kinds of runs: what each carries from one round to the next.
KINDS = {
    "replaced models": {"strategy": "ifca", "clusters": 2, "rebalance-min": 1, "reseed-every": 1, **CLIENT},
    "without a seed": {"strategy": "ifca", "clusters": 2, **CLIENT, "seed": "auto"},
    "a search for the number of models": {"strategy": "ifca", "clusters": 0, "max-clusters": 3, "rounds": 20, **NONE},
    "momentum and a mean": {"strategy": "fedavg", "server-optimizer": "momentum", "average-last": 0.7, **NONE},
    "adam and momentum of clusters": {"strategy": "fedcam", "clusters": 2, "server-optimizer": "adam", **CLIENT},
    "an adapted norm": {"strategy": "fedavg", "clip-norm": "adaptive", **CLIENT},
    "correlated noise": {"strategy": "ifca", "clusters": 2, "mechanism": "banded", "sampling-rate": 0.5, **CLIENT},
    "slots": {"strategy": "ifca", "clusters": 2, "mechanism": "rr-slot", **CLIENT},
    "compared clients": {"strategy": "lcfl", "clusters": 2, "warm-up-rounds": 1, **NONE},
    "a tree": {"strategy": "cfl", **NONE},
    "soft labels": {"strategy": "rc-dpfl", "clusters": 2, **NONE},
    "own networks": {"strategy": "local", **NONE},
    "own heads": {"strategy": "fedper", "model": "mlp-32", **NONE},
    "records": {"strategy": "rc-dpfl", "clusters": 2, "privacy-unit": "record", "epsilon": 50.0},
}
#: Noise that is correlated over the planned rounds restarts with a resume.
CORRELATED = "correlated noise"
#: More rounds are refused: the planned ones are a part of the noise, or of each client's plan.
FIXED = {CORRELATED, "records"}
#: Further rounds differ from those of a run that planned them at first: its last steps are small, or it switches later.
PLANNED = {"own networks", "soft labels"}


class Killed(BaseException):
    """The process ends here."""


def models(path):
    """Parameters of all models and of all clients' own networks, by file."""
    files = sorted([*(path / "models").iterdir(), *(path / "clients").glob("*.safetensors")])
    return {file.name: load_file(file) for file in files}


@cache
def uninterrupted(kind, rounds):
    """Models, metrics and exact scores of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run_in(RunFolder.create(path, RunConfig({**COMMON, **KINDS[kind], "rounds": rounds})))
        return models(path), rows(path, "metrics.jsonl"), rows(path, "diagnostics.jsonl")


def rows(path, name):
    """Lines of a file, without times, and without the epsilon of sums in another order."""
    if not (path / name).exists():
        return []
    lines = [json.loads(line) for line in (path / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key and key != "epsilon"} for line in lines]


class Run(RuleBasedStateMachine):
    """A folder, and what is known of it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.settings = kind, {**COMMON, **KINDS[kind]}
        self.rounds = self.settings["rounds"]
        self.home = Path(tempfile.mkdtemp())
        self.path = self.home / "run"
        self.charges, self.finished = [], False

    def teardown(self):
        if self.path.exists():
            self.finish()
        shutil.rmtree(self.home)

    def open(self, **changes):
        if (self.path / "config.toml").exists():
            return RunFolder.resume(self.path, changes)
        return RunFolder.create(self.path, RunConfig(self.settings))

    def attempt(self, prepare=lambda folder: None, **changes):
        """One process; returns what it returns, or None if it was killed."""
        try:
            folder = self.open(**changes)
            prepare(folder)
            outcome = run_in(folder)
        except Killed:
            outcome = None
        self.check_ledger()
        return outcome

    def check_ledger(self):
        """No charge is lost, changed or moved."""
        path = self.path / "ledger.jsonl"
        charges = read_ledger(path)[1] if path.exists() else []
        assert charges[: len(self.charges)] == self.charges
        self.charges = charges

    @initialize()
    def start(self):
        self.killed_at_a_write(3, False)

    @rule(write=integers(1, 40), after=booleans())
    def killed_at_a_write(self, write, after):
        calls = iter(range(1, 1000))

        def deadly(call, *arguments, **options):
            number = next(calls)
            if number == write and not after:
                raise Killed
            result = call(*arguments, **options)
            if number == write:
                raise Killed
            return result

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "fsync", partial(deadly, os.fsync))
            patched.setattr(os, "replace", partial(deadly, os.replace))
            outcome = self.attempt()
        self.finished = self.finished or outcome is not None

    @rule(number=integers(1, 4))
    def interrupted_after_a_round(self, number):
        def end(record):
            if record.round >= number:
                raise Killed

        self.attempt(lambda folder: setattr(folder, "on_metrics", end))

    @rule(number=integers(1, 4))
    def killed_before_a_checkpoint(self, number):
        def prepare(folder):
            keep = folder.checkpoint

            def checkpoint(state, line):
                if state.round >= number:
                    raise Killed
                keep(state, line)

            folder.checkpoint = checkpoint

        self.attempt(prepare)

    @rule()
    def opened_and_closed(self):
        self.open().close()

    @rule(name=integers(0, 2), cut=integers(1, 30))
    def a_line_is_cut(self, name, cut):
        """What a loss of power leaves of the last line that was written."""
        path = self.path / ("ledger.jsonl", "metrics.jsonl", "diagnostics.jsonl")[name]
        if not self.finished and path.exists():
            with path.open("ab") as file:
                file.write(b'{"round": 1, "noise_multiplier": 3.0'[:cut])

    @precondition(lambda self: self.rounds == self.settings["rounds"] and self.kind not in FIXED)
    @rule()
    def more_rounds(self):
        self.finish()
        self.rounds += 1
        self.attempt(rounds=self.rounds)

    @rule()
    def finish(self):
        """Resume to the end, twice: the second time changes nothing."""
        outcome = self.attempt()
        charges = self.charges
        again = self.attempt()
        assert self.charges == charges
        varying = {"seconds_total": 0, "peak_rss_mb": 0}
        assert {**again, **varying} == {**outcome, **varying}
        self.finished = True
        self.check_result(outcome)

    def check_result(self, outcome):
        skipped = outcome.get("skipped_rounds", [])
        numbers = [line["round"] for line in rows(self.path, "metrics.jsonl")]
        assert sorted(numbers + skipped) == list(range(1, self.rounds + 1))
        assert numbers == sorted(numbers)
        if "epsilon" in KINDS[self.kind]:
            assert privacy(self.path)["epsilon"] <= self.settings["epsilon"]
        wasted = len({charge["round"] for charge in self.charges}) != len(self.charges) or skipped
        if wasted or self.settings["seed"] == "auto" or self.kind == CORRELATED:
            return
        further = self.rounds > self.settings["rounds"]
        if further and self.kind in PLANNED:
            return
        expected, metrics, exact = uninterrupted(self.kind, self.rounds)
        np.testing.assert_equal(models(self.path), expected)
        if not further:  # else the last one of the first plan was evaluated, too
            assert rows(self.path, "metrics.jsonl") == metrics
            assert rows(self.path, "diagnostics.jsonl") == exact


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a killed process closes no file
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_whatever_happens_to_its_process(kind):
    usual = settings(
        max_examples=3, stateful_step_count=5, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Run(kind), settings=usual)
