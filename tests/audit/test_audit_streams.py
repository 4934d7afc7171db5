"""The audit of whole schedules finds what breaks a mechanism whose noise is correlated over rounds."""

import numpy as np
import pytest

from coterie.audit.streams import _measure_stream as measure
from coterie.audit.streams import audit_streams, measured_plans
from coterie.privacy import Banded, Streams
from coterie.privacy.mechanisms import banded
from coterie.privacy.mechanisms.banded import CorrelatedNoise
from coterie.privacy.mechanisms.factorization import banded_matrix


def violated():
    return [finding.attack for finding in map(measure, measured_plans()) if finding.violated]


def test_the_measured_noise_is_the_claimed_one():
    for plan in measured_plans():
        finding = measure(plan)
        assert not finding.failed
        assert finding.bound == pytest.approx(finding.claim, rel=1e-9)


def test_a_matrix_one_band_too_wide_is_found(monkeypatch):
    wide = property(lambda plan: banded_matrix(plan.rounds, min(plan.slots + 1, plan.rounds)))
    monkeypatch.setattr(Banded, "matrix", wide)
    monkeypatch.setattr(Banded, "check_matrix", lambda plan: None)
    assert len(violated()) == len(measured_plans())


def test_columns_a_little_too_long_are_found(monkeypatch):
    long = property(lambda plan: banded_matrix(plan.rounds, plan.slots) * (1 + 1e-6))
    monkeypatch.setattr(Banded, "matrix", long)
    monkeypatch.setattr(Banded, "check_matrix", lambda plan: None)
    assert len(violated()) == len(measured_plans())


def test_slots_that_are_too_close_are_found(monkeypatch):
    sample = Banded.sample
    monkeypatch.setattr(Banded, "sample", lambda plan, rng, number: sample(plan, rng, number // 2 + 1))
    assert violated()


def test_rows_that_cancel_too_much_are_found(monkeypatch):
    def eager(self, fresh):
        row = fresh - 0.9 * (self._past[0] if self._past else 0.0)
        self._past.appendleft(row)
        self.row += 1
        return row

    monkeypatch.setattr(CorrelatedNoise, "next", eager)
    assert violated()


def test_half_the_noise_is_found(monkeypatch):
    gaussian = banded.gaussian
    monkeypatch.setattr(banded, "gaussian", lambda rng, std, shape: gaussian(rng, std / 2, shape))
    assert len(violated()) == len(measured_plans())


def test_noise_that_is_the_same_in_two_rounds_is_found(monkeypatch):
    """Its matrix is singular."""

    def stale(self, fresh):
        self.row += 1
        self.kept = fresh if self.row % 2 else self.kept
        return self.kept

    monkeypatch.setattr(CorrelatedNoise, "next", stale)
    assert violated()


@pytest.mark.slow
def test_statistics_find_the_control_and_hold_for_what_is_shipped():
    findings = audit_streams(60_000, Streams(0))
    assert not [finding.attack for finding in findings if finding.failed]
    assert [finding.attack for finding in findings if finding.violated] == ["matrix one band wider than the separation"]
    visible = next(finding for finding in findings if finding.attack == "client in every round of its slot")
    assert 0.93 * visible.claim < visible.bound <= visible.claim
    assert np.isfinite([finding.bound for finding in findings]).all()
