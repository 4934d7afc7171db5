"""The audit of whole runs finds what is broken in the frame of a round.

Every audit here has a seed, so that it never fails by chance; over fresh seeds an exact test would fail once in ten
million audits, and a row of deltas once in 1,000.
"""

from dataclasses import replace

import numpy as np
import pytest

from coterie.audit.runs import audit_runs, divisors, quiet
from coterie.privacy import Joint
from coterie.privacy.contributions import Summed
from coterie.strategies import ClusteredStrategy

pytestmark = pytest.mark.slow

RUNS = 100


def broken(runs=RUNS):
    return [f.attack for f in audit_runs(0, runs) if f.failed]


def test_what_is_shipped_holds():
    findings = {f.attack: f for f in audit_runs(0, RUNS)}
    assert len(findings) == 6
    assert not [f for f in findings.values() if f.failed]
    for method in ("ifca", "fedcam"):
        finding = findings[f"additional client in a complete run ({method})"]
        assert 0.05 < finding.deltas[0][0] < finding.deltas[0][1] < 0.75


def test_an_empty_cohort_that_the_server_draws_again_is_found(monkeypatch):
    sample = Joint.sample

    def again(self, rng, number):
        cohort = sample(self, rng, number)
        return cohort if len(cohort) else again(self, rng, number)

    monkeypatch.setattr(Joint, "sample", again)
    assert {f"empty cohort in a complete run ({method})" for method in ("ifca", "fedcam")} <= set(broken(20))


def test_noise_of_a_third_is_found(monkeypatch):
    scale = Joint.noise_multiplier_updates.fget
    monkeypatch.setattr(Joint, "noise_multiplier_updates", property(lambda plan: scale(plan) / 3))
    monkeypatch.setattr(Joint, "check_noise", lambda plan: None)
    monkeypatch.setattr("coterie.audit.runs._NOISE", 1.0)
    assert "additional client in a complete run (ifca)" in broken()


COUNTS = {"the replies": lambda known: known["counts"].sum(), "the cohort": lambda known: known["cohort"]}


@pytest.mark.parametrize("block", ["shared", "cluster"])
@pytest.mark.parametrize("of", COUNTS)
def test_a_true_count_as_divisor_is_found(monkeypatch, block, of):
    step, add, sample = ClusteredStrategy.step, Summed.add, Joint.sample
    known = {"counts": np.zeros(1), "cohort": 0}

    def sampled(self, rng, number):
        cohort = sample(self, rng, number)
        known["cohort"] = len(cohort)
        return cohort

    def added(self, *args):
        add(self, *args)
        known["counts"] = self.counts

    def divided(self, models, released):
        count = max(float(COUNTS[of](known)), 1.0)
        other = {"cohort": count} if block == "shared" else {"divisors": np.full(2, count / 2)}
        return step(self, models, replace(released, **other))

    monkeypatch.setattr(Summed, "add", added)
    monkeypatch.setattr(Joint, "sample", sampled)
    monkeypatch.setattr(ClusteredStrategy, "step", divided)
    with quiet():
        asked, _ = divisors(0)
    assert asked.violated


def test_a_divisor_that_follows_missing_replies_is_found(monkeypatch):
    step = ClusteredStrategy.step

    def divided(self, models, released):
        return step(
            self,
            models,
            replace(released, divisors=released.divisors * max(self.statistics.accepted, 1) / self.statistics.asked),
        )

    monkeypatch.setattr(ClusteredStrategy, "step", divided)
    with quiet():
        _, replies = divisors(0)
    assert replies.violated
