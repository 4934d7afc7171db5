"""One plan: its sampler, its clipping, its noise and its event belong together.

The statistical tests use fixed seeds; over fresh seeds each would fail about once in 10,000 runs.
"""

import math

import numpy as np
import pytest

from coterie.privacy import Ledger, LedgerError, Plan, PrivacyError, Streams, clip

C = 0.5


def plan(noise=2.0, share=0.2, k=3, clients=1000, rate=0.3):
    return Plan("client", "joint", clients, k, rate, 10, C, math.inf, 1e-5, noise, share)


def release(plan, sums, counts, seed=0, attempt=1):
    permit = Ledger(plan.delta).round(1, plan.event())
    return plan.release(permit, sums, counts, Streams(seed), attempt)


@pytest.mark.parametrize(
    "update",
    [
        [3.0, 4.0],
        [1e300, -1e300],
        [1e-320, 0.0],
        [[1.0, 2.0], [3.0, 4.0]],
        np.float32(7),
        7.0,
        [],
        [0.0, 0.0],
        np.full(10_000, 3e38, np.float32),
    ],
)
def test_clipping_bounds_the_norm_keeps_the_direction_and_the_shape(update):
    clipped = clip(update, C)
    original = np.asarray(update, dtype=np.float64)
    assert clipped.shape == original.shape
    norm = np.linalg.norm(clipped.ravel())
    assert norm <= C
    largest = np.abs(original).max(initial=0.0)
    if largest > 1e-3:
        assert norm == pytest.approx(C, rel=2e-6)
        np.testing.assert_allclose(clipped / np.abs(clipped).max(), original / largest, rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_nothing(bad):
    assert not clip([1.0, bad, 2.0], C).any()
    assert clip(bad, C) == 0.0
    assert not clip([bad], math.inf).any()


def test_small_updates_stay_as_they_are():
    np.testing.assert_array_equal(clip([0.1, -0.2], C), [0.1, -0.2])
    np.testing.assert_array_equal(clip([30.0, -40.0], math.inf), [30.0, -40.0])


def test_the_sampler_is_poisson():
    p = plan()
    cohorts = [p.sample(Streams(0).stream("cohort", t)) for t in range(400)]
    sizes = np.array([len(c) for c in cohorts])
    # Binomial(1000, 0.3): mean 300, variance 210; a sampler of fixed size has variance 0.
    assert sizes.mean() == pytest.approx(300, abs=4 * math.sqrt(210 / 400))
    assert sizes.var() == pytest.approx(210, rel=4 * math.sqrt(2 / 400))
    each = np.bincount(np.concatenate(cohorts), minlength=1000)
    assert len(each) == 1000
    assert each.mean() == pytest.approx(120, abs=4 * math.sqrt(84 / 1000))
    assert each.var() == pytest.approx(84, rel=4 * math.sqrt(2 / 1000))


@pytest.mark.parametrize("counts", [[0, 0, 0], [1000, 3, 0]])
def test_noise_has_the_planned_scale_whatever_the_counts(counts):
    p = plan()
    size = 20_000
    released = release(p, np.full((3, size), 5.0), np.array(counts, float))
    # The standard error of a standard deviation is 0.5 % here; sigma x 2/3 or x 3/2 are far outside 2 %.
    scale = p.noise_multiplier_updates * C
    for row in released.sums:
        assert row.std() == pytest.approx(scale, rel=0.02)
        assert row.mean() == pytest.approx(5.0, abs=4 * scale / math.sqrt(size))
    assert abs(np.corrcoef(released.sums[0], released.sums[1])[0, 1]) < 4 / math.sqrt(size)


def test_the_histogram_has_the_planned_scale():
    p = plan(k=5000, clients=5000, share=0.5)
    released = release(p, np.zeros((5000, 1)), np.full(5000, 7.0))
    assert released.histogram.std() == pytest.approx(p.noise_multiplier_counts, rel=0.04)
    assert released.histogram.mean() == pytest.approx(7.0, abs=4 * p.noise_multiplier_counts / math.sqrt(5000))


@pytest.mark.parametrize("share", [0.04, 0.2, 0.5])
def test_both_releases_together_are_the_event(share):
    p = plan(share=share)
    together = (p.noise_multiplier_updates**-2 + p.noise_multiplier_counts**-2) ** -0.5
    assert together == pytest.approx(p.event().noise_multiplier)
    assert p.event().sampling_rate == p.sampling_rate


def test_five_times_the_noise_on_counts_costs_two_percent_on_updates():
    p = plan(noise=1.0, share=0.04)
    assert p.noise_multiplier_counts == pytest.approx(5.0)
    assert p.noise_multiplier_updates == pytest.approx(1.0206, abs=1e-4)


def test_counts_that_nobody_pays_for_are_not_released():
    p = plan(share=0.0)
    assert p.noise_multiplier_counts is None
    assert p.noise_multiplier_updates == p.noise_multiplier
    assert release(p, np.zeros((3, 2)), np.ones(3)).histogram is None


def test_noise_is_fresh_for_every_attempt_at_a_round():
    p = plan()
    first, again, second = (release(p, np.zeros((3, 4)), np.zeros(3), attempt=a).sums for a in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.isin(second, first).any()


def test_a_permit_pays_once_and_for_its_own_event_alone():
    p = plan()
    permit = Ledger(p.delta).round(1, p.event())
    p.release(permit, np.zeros((3, 2)), np.zeros(3), Streams(0), 1)
    with pytest.raises(LedgerError, match="already made"):
        p.release(permit, np.zeros((3, 2)), np.zeros(3), Streams(0), 1)
    cheaper = Ledger(p.delta).round(1, p.recalibrated(9.0).event())
    with pytest.raises(LedgerError, match="paid for"):
        p.release(cheaper, np.zeros((3, 2)), np.zeros(3), Streams(0), 1)


def test_without_privacy_everything_is_exact_and_epsilon_infinite():
    p = Plan.no_privacy(clients=10, num_clusters=2, sampling_rate=0.5, rounds=3)
    released = release(p, np.full((2, 4), 1.5), np.array([3.0, 2.0]))
    np.testing.assert_array_equal(released.sums, 1.5)
    np.testing.assert_array_equal(released.histogram, [3.0, 2.0])
    assert released.epsilon == math.inf
    np.testing.assert_array_equal(p.clip([1e6]), [1e6])
    assert not p.private


def test_joint_is_calibrated():
    p = Plan.joint(clients=1000, num_clusters=4, sampling_rate=0.1, rounds=100, clip_norm=C, epsilon=4.0, delta=1e-3)
    assert p.noise_multiplier == pytest.approx(1.1002, rel=0.01)
    assert p.expected_members == 25


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rate": 0.0}, "sampling rate"),
        ({"rate": math.nan}, "sampling rate"),
        ({"share": 1.0}, "identifier share"),
        ({"share": -0.1}, "identifier share"),
        ({"k": 0}, "num clusters must be at least 1"),
        ({"clients": 2}, "3 clusters for 2 clients"),
    ],
)
def test_plans_that_make_no_sense(change, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        plan(**change)
