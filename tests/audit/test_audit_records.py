"""The audit of clients at record level finds what is broken in what a client adds, and in what it charges.

Seeded audits never fail by chance; the ClientApp's randomness is secret, and its row fails by chance with a probability
below 1e-6.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from coterie.audit.clientapp import audit_client_app
from coterie.audit.findings import dominance_test
from coterie.audit.records import audit_records
from coterie.client import clipper, dpsgd, ghost, gradients, record_level
from coterie.datasets import TestSet, Units
from coterie.fields import UNIT_SHARES
from coterie.privacy import ClientLedger, Event, Streams
from coterie.privacy import losses as noisy
from coterie.privacy.score_histograms import UnitCounts

ANSWERS = 8000


def broken(attacks):
    """The attacks, of those whose name contains this, that find a violation."""
    return [f.attack for f in audit_records(Streams(0), ANSWERS, attacks) if f.failed]


@pytest.mark.slow
def test_what_is_shipped_holds_and_the_attacks_have_power():
    findings = audit_records(Streams(0), ANSWERS)
    assert len(findings) == 14
    assert not [f for f in findings if f.failed]
    for finding in findings:
        # A quarter of the answers, and four steps of which only the sum is seen, are worth less.
        least = 0.4 if "eight" in finding.attack or "Poisson" in finding.attack else 0.8
        assert least * finding.claim < finding.bound <= finding.claim * (1 + 1e-5), finding.attack


def test_less_noise_on_gradients_is_found(monkeypatch):
    monkeypatch.setattr(dpsgd, "gaussian", lambda rng, std, shape: rng.standard_normal(shape) * std * 0.7)
    assert broken("full batches")
    assert broken("eight replies")


def test_a_share_of_short_gradients_that_is_not_charged_is_found(monkeypatch):
    monkeypatch.setattr("coterie.privacy.RecordPlan.noise_of_gradients", lambda self, first: self.noise(first))
    monkeypatch.setattr("coterie.privacy.record.check_noise", lambda parts, charged: None)
    assert broken("with the share of short gradients")
    assert not broken("full batches")


@pytest.mark.slow
def test_batches_of_twice_the_rate_are_found(monkeypatch):
    def sample(self, coins, size):
        return np.flatnonzero(coins.random(size) < 2 * self.batch_size / self.num_examples)

    monkeypatch.setattr(dpsgd.DPSGD, "sample", sample)
    assert broken("Poisson batches")
    assert not broken("full batches")


@pytest.mark.slow
@pytest.mark.parametrize("margin", [-0.05, -1e-3])
def test_a_clip_of_gradients_that_lets_a_little_through_is_found(monkeypatch, margin):
    monkeypatch.setattr(clipper, "_MARGIN", margin)
    assert len(broken("gradient of any norm")) == 5


@pytest.mark.slow
def test_an_adapter_that_counts_half_in_the_norm_of_a_record_is_found(monkeypatch):
    class Halved:
        def __init__(self, gradient):
            self.sum, self.numbers = gradient.sum, gradient.numbers
            self.squares, self.spread = gradient.squares / 4, gradient.spread / 4

    right = ghost.GhostClipping.gradients

    def wrong(self, x, y):
        found = right(self, x, y)
        hidden = len(x) == 4  # from DP-SGD's own comparison with autograd, which would use another method
        adapters = [value for name, value in self.named.items() if hidden and name.endswith("up.weight")]
        return found | {value: Halved(found[value]) for value in adapters}

    monkeypatch.setattr(ghost.GhostClipping, "gradients", wrong)
    assert broken("gradient of any norm") == ["gradient of any norm (adapters beside frozen layers)"]


@pytest.mark.slow
def test_a_clip_of_each_record_of_a_patient_is_found(monkeypatch):
    def per_record(self, x, y, clip_norm):
        records = gradients.BatchesOfOne(self._network, dpsgd.AUTO)
        sums = [records.clipped_sum(x[:, j], y[:, j].clip(0), clip_norm) for j in range(3)]
        return sum(total for total, _ in sums), sums[0][1]

    assert not broken("units of several records")
    right = gradients.BatchesOfOne.clipped_sum
    monkeypatch.setattr(
        gradients.BatchesOfOne, "clipped_sum", lambda self, *batch: (per_record if self._units else right)(self, *batch)
    )
    assert broken("units of several records")


def test_noise_on_losses_without_the_root_of_their_number_is_found(monkeypatch):
    def less(losses, bound, deviation, num_examples, rng):
        return noisy.noisy_losses(losses, bound, deviation / math.sqrt(4), num_examples, rng)

    monkeypatch.setattr("coterie.audit.records.noisy_losses", less)
    assert broken("losses of models")


@pytest.mark.slow
def test_the_client_app_holds():
    uncharged, replies = audit_client_app(50)
    assert not uncharged.failed
    assert not replies.failed
    assert replies.claim == 2.0  # four answers at noise 1, all of which the ledgers charge


def test_a_client_that_does_not_charge_every_answer_is_found(monkeypatch):
    spend = ClientLedger.spend

    def once(self, number, events, **details):
        return spend(self, number, events, **details) if number < 4 else 1000 + number

    monkeypatch.setattr(ClientLedger, "spend", once)
    uncharged, _ = audit_client_app(10)
    assert uncharged.violated
    assert uncharged.bound == 20  # one of each client in both worlds


def test_worlds_that_do_not_overlap_are_always_found():
    """The bound is the same for all draws; the next test uses the same number of draws."""
    rng, bounds = np.random.default_rng(0), set()
    for _ in range(50):
        worlds = rng.normal(0, 0.02, (250, 1)), rng.normal(4, 0.02, (250, 1))
        found = dominance_test("dp-sgd", "victim", {Event(1.0, 1.0): 4}, worlds, confidence=1 - 1e-7)
        assert found.violated
        bounds.add(found.bound)
    assert len(bounds) == 1


@pytest.mark.slow
def test_a_client_app_with_hardly_any_noise_is_found(monkeypatch):
    monkeypatch.setattr(dpsgd, "gaussian", lambda rng, std, shape: rng.standard_normal(shape) * std / 100)
    assert audit_client_app(250)[1].violated


def test_a_histogram_that_counts_a_record_twice_is_found(monkeypatch):
    assert not broken("histogram")
    once = record_level.count_scores
    monkeypatch.setattr(record_level, "count_scores", lambda *given: 2 * once(*given))
    assert broken("histogram") == [
        "held-out record of any score, histogram",
        "held-out unit of any records, histogram",
        "additional held-out record, histogram",
    ]


def test_what_certifies_holds_for_units():
    assert not broken("held-out unit")


def test_a_histogram_that_counts_a_unit_by_record_is_found(monkeypatch):
    right = Units.held_out_shares
    monkeypatch.setattr(Units, "held_out_shares", lambda units, trained: UNIT_SHARES * (right(units, trained) > 0))
    assert broken("histogram") == ["held-out unit of any records, histogram"]


def test_a_histogram_that_counts_a_unit_that_is_trained_on_is_found(monkeypatch):
    right = Units.held_out_shares
    none = Units.named([], 8)
    monkeypatch.setattr(Units, "held_out_shares", lambda units, _: right(units, none))
    assert broken("histogram") == ["held-out unit of any records, histogram"]


def test_a_histogram_that_counts_training_records_is_found(monkeypatch):
    def counted(network, layout, models, shard, **options):
        test = TestSet(*(np.concatenate(each) for each in ((shard.test.x, shard.x), (shard.test.y, shard.y))))
        return right(network, layout, models, replace(shard, test=test), **options)

    right = record_level.held_out_counts
    monkeypatch.setattr(record_level, "held_out_counts", counted)
    assert broken("held-out record of any score") == ["held-out record of any score, histogram"]


def test_a_histogram_with_half_of_its_noise_is_found(monkeypatch):
    right = UnitCounts.noisy
    monkeypatch.setattr(UnitCounts, "noisy", lambda counts, epsilon, rng: right(counts, 2 * epsilon, rng))
    assert broken("histogram") == ["additional held-out record, histogram"]
