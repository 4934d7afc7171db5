"""The audit of whole runs finds what is broken in the frame of a round.

Every audit here has a seed, so that it never fails by chance; over fresh seeds an exact test would fail once in ten
million audits, and a row of deltas once in 1,000.
"""

import numpy as np
import pytest

from coterie.audit.runs import audit_runs, quiet, shared_block
from coterie.privacy import Joint, Plan
from coterie.privacy.plan import Summed
from coterie.strategies import ClusteredStrategy

RUNS = 100


def broken(runs=RUNS):
    return [f.attack for f in audit_runs(0, runs) if f.wrong]


def test_what_is_shipped_holds_and_the_attack_has_power():
    findings = {f.attack: f for f in audit_runs(0, RUNS)}
    assert len(findings) == 5
    assert not [f for f in findings.values() if f.wrong]
    for method in ("ifca", "fedcam"):
        finding = findings[f"a client more in a whole run ({method})"]
        assert 0.05 < finding.bound < finding.claim < 0.75


def test_an_empty_cohort_that_the_server_draws_again_is_found(monkeypatch):
    configure = ClusteredStrategy.configure_train

    def again(self, number, arrays, config, grid):
        messages = configure(self, number, arrays, config, grid)
        while not len(self._cohort):
            self._cohort = self.plan.sample(np.random.default_rng())
            self._slots = {int(client): slot for slot, client in enumerate(self._cohort)}
            messages = list(self._addressed(self._phase.models, self._sent, None, "train", list(self._slots)).values())
            self._ask({int(client): m for client, m in zip(self._cohort, messages, strict=True)})
        return messages

    monkeypatch.setattr(ClusteredStrategy, "configure_train", again)
    assert {f"nobody is asked in a round ({method})" for method in ("ifca", "fedcam")} <= set(broken(20))


def test_noise_of_a_third_is_found(monkeypatch):
    scale = Joint.noise_multiplier_updates.fget
    monkeypatch.setattr(Joint, "noise_multiplier_updates", property(lambda plan: scale(plan) / 3))
    monkeypatch.setattr("coterie.audit.runs._NOISE", 1.0)
    assert "a client more in a whole run (ifca)" in broken()


@pytest.mark.parametrize("where", ["release", "step"])
def test_a_true_count_as_divisor_of_a_shared_block_is_found(monkeypatch, where):
    counts = {}
    add, release, step = Summed.add, Plan.release, ClusteredStrategy.step

    def counted(self, *args):
        add(self, *args)
        counts["now"] = float(self.counts.sum())

    def replaced(released):
        return type(released)(**{**vars(released), "cohort": counts["now"]})

    monkeypatch.setattr(Summed, "add", counted)
    if where == "release":
        monkeypatch.setattr(Plan, "release", lambda self, *args: replaced(release(self, *args)))
    else:
        monkeypatch.setattr(ClusteredStrategy, "step", lambda self, models, r: step(self, models, replaced(r)))
    with quiet():
        finding = shared_block(0)
    assert finding.violated
    assert finding.bound == pytest.approx((12 / 11) ** 2, rel=0.05)
