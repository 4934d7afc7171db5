"""Record-level accounting: RC-DPFL's setting, with a full first batch or without, and choices by loss."""

import math

import pytest
from kit.opacus_epsilons import opacus_epsilon

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.privacy import Ledger, PrivacyError, RecordPlan, certificate, epsilon, read_ledger
from coterie.privacy.check import check

SETTING = {"num_examples": 6600, "batch_size": 32, "rounds": 200, "delta": 1e-4}

REFERENCE = [
    (2, 32, 1.996, 1.864),
    (5, 32, 1.077, 1.025),
    (10, 32, 0.780, 0.753),
    (2, 6600, 2.704, 2.509),
    (5, 6600, 1.309, 1.230),
    (10, 6600, 0.857, 0.822),
]


def calibrated(**numbers):
    return RecordPlan.calibrated(**SETTING | numbers)


@pytest.mark.parametrize(("target", "first", "rdp", "pld"), REFERENCE)
def test_noise_of_the_reference(target, first, rdp, pld):
    for accountant, reference in (("rdp", rdp), ("pld", pld)):
        plan = calibrated(epsilon=target, first_batch_size=first, accountant=accountant)
        assert plan.noise_multiplier == pytest.approx(reference, rel=0.01)
        assert plan.cost() <= target


def test_steps_and_rates():
    plan = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.3, first_batch_size=6600, local_epochs=3)
    assert {(e.sampling_rate, n) for e, n in plan.planned().items()} == {(1.0, 3), (32 / 6600, 199 * 3 * 206)}
    same = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.3)
    assert list(same.planned().values()) == [200 * 206]
    assert list(RecordPlan(**SETTING | {"rounds": 1}, epsilon=5.0, noise_multiplier=1.3).planned().values()) == [206]


def test_opacus_agrees():
    plan = calibrated(epsilon=5.0, first_batch_size=6600)
    ours, theirs = plan.cost("rdp"), opacus_epsilon(plan.planned(), plan.delta, "rdp")
    assert theirs == pytest.approx(ours, rel=0.005)
    assert opacus_epsilon(plan.planned(), plan.delta, "prv") == pytest.approx(plan.cost("pld"), rel=0.01)


def test_round_one_can_have_a_noise_of_its_own():
    one = calibrated(epsilon=5.0, first_batch_size=6600)
    rest = calibrated(epsilon=5.0, first_batch_size=6600, first_noise_multiplier=3.0)
    assert rest.noise_multiplier < one.noise_multiplier  # round 1 leaves more for the others
    first = calibrated(epsilon=5.0, first_batch_size=6600, noise_multiplier=rest.noise_multiplier)
    assert first.first_noise_multiplier == pytest.approx(3.0, rel=0.05)
    for plan in (rest, first):
        assert 4.98 < plan.cost() <= 5.0
        assert plan.cost() == pytest.approx(epsilon(plan.planned(), 1e-4))
    with pytest.raises(PrivacyError, match="no first noise multiplier reaches epsilon 5"):
        calibrated(epsilon=5.0, first_batch_size=6600, noise_multiplier=0.9)


def test_full_batches_make_round_one_millions_of_times_less_noisy():
    """RC-DPFL, equation (2): the variance of round 1's update goes as N z^2 / b^3."""
    for target, factor in ((2.0, 4.85e6), (5.0, 6.09e6), (10.0, 7.37e6)):
        small, full = calibrated(epsilon=target), calibrated(epsilon=target, first_batch_size=6600)
        noise = (small.noise_multiplier / full.noise_multiplier) ** 2
        assert noise * (6600 / 32) ** 3 == pytest.approx(factor, rel=0.02)


def test_a_hundred_choices_cost_less_than_half_a_percent():
    without = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.3, first_batch_size=6600)
    base = _fine(without)
    chosen = _fine(RecordPlan(**vars(without) | {"selection": "gumbel", "selections": 100, "selection_epsilon": 0.02}))
    assert chosen / base - 1 == pytest.approx(0.0041, abs=0.0002)


def _fine(plan):
    """The least noise to 1e-5; calibrations stop at 1e-3."""
    low, high = 1.0, 2.0
    while high / low > 1 + 1e-5:
        middle = math.sqrt(low * high)
        fits = RecordPlan(**vars(plan) | {"noise_multiplier": middle}).cost() <= plan.epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"batch_size": 7000}, "batch-size must be at most num-examples = 6600, not 7000"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"epsilon": math.inf}, "epsilon must be positive and finite"),
    ],
)
def test_plans_that_make_no_sense(change, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        calibrated(**{"epsilon": 5.0} | change)


def test_a_round_that_was_repeated_is_certified_within_the_budget(tmp_path):
    plan = calibrated(epsilon=3.0, first_batch_size=64, rounds=20)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(plan.delta, plan.epsilon, path, plan.accountant, {"plan": plan.terms(), "seed": None})
    for number in (1, 1, 2):  # killed in round 1
        for event, count in plan.part(first=number == 1).items():
            ledger.charge_round(number, event, count)
    ledger.close()
    paper = certificate(*read_ledger(path))
    assert paper["certified"] is True
    assert [each["charges"] for each in paper["charged"]] == [2 * 103, 206]
    assert epsilon(plan.planned() + plan.part(first=True), plan.delta) > 3.0  # all that was planned no longer fits
    assert 2.8 < paper["epsilon"] <= 3.0  # what may still come counts, as far as the budget goes
    assert check(*read_ledger(path), paper) == []


def test_round_one_s_noise_can_be_a_multiple_of_the_others():
    plans = {ratio: calibrated(epsilon=5.0, first_batch_size=6600, first_noise_ratio=ratio) for ratio in (1, 2, 4)}
    for ratio, plan in plans.items():
        assert plan.noise(first=True) == pytest.approx(ratio * plan.noise_multiplier)
        assert 4.98 < plan.cost() <= 5.0
    assert plans[4].noise_multiplier < plans[2].noise_multiplier < plans[1].noise_multiplier
    with pytest.raises(PrivacyError, match="first noise ratio must be positive"):
        calibrated(epsilon=5.0, first_noise_ratio=0.0)


def test_the_share_of_short_gradients_is_a_coordinate_of_the_same_event():
    """A record moves the sum of gradients by at most 1, and the count by 1/2."""
    plan = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.3, clip_share=0.2, clip_factor=0.5)
    shift = 1 / plan.noise_of_gradients(False) ** 2 + (1 / 2) ** 2 / plan.noise_of_norms(False) ** 2
    assert shift == pytest.approx(1 / 1.3**2)
    alone = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.3)
    assert plan.planned() == alone.planned()
    assert (alone.noise_of_gradients(False), alone.noise_of_norms(False)) == (1.3, None)
    assert plan.norm_threshold == 2 * plan.clip_norm
    assert plan.max_update_norm(10, 0.1) > alone.max_update_norm(10, 0.1)


@pytest.mark.parametrize("clip_share", [-0.1, 1e-300, 0.51, 1.0, math.nan, math.inf])
def test_shares_that_leave_no_noise_in_range_are_refused(clip_share):
    terms = RecordPlan(**SETTING, epsilon=5.0, noise_multiplier=1.0).terms()
    del terms["mechanism"]
    with pytest.raises(PrivacyError, match=r"clip-share must be 0, or at least 0\.0001 and at most"):
        RecordPlan.from_terms(terms | {"clip_share": clip_share})
