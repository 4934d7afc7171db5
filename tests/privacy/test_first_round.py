"""Noise of RC-DPFL's round 1: by hand, within the budget, no dearer than its bound, and alike for unlike clients."""

import math
from dataclasses import asdict, replace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from coterie.privacy import FirstRound, PrivacyError, RecordPlan
from coterie.privacy.first_round import GROUP_DISTANCE, MAX_INCREASE
from coterie.privacy.mechanisms.dp_sgd import RecordLevel
from coterie.wire import TrainRequest

FIRST = FirstRound(clients=21, groups=4, parameters=6634)
NUMBERS = {"num_examples": 1000, "batch_size": 32, "rounds": 60, "delta": 1e-4, "first_batch_size": 1000}
CHOICES = {"selection": "gumbel", "selections": 59}


def planned(epsilon, **numbers):
    return FIRST.calibrated(**{**NUMBERS, **CHOICES, "epsilon": epsilon, **numbers})


def alike(plan):
    """The same run if round 1 is like all others."""
    numbers = {name: value for name, value in asdict(plan).items() if name not in ("noise_multiplier", *_OWN)}
    return RecordPlan.calibrated(**numbers)


_OWN = ("first_batch_size", "first_noise_multiplier")


def test_separating_noise_by_hand():
    first = FirstRound(clients=16, groups=2, parameters=10_000)  # groups of 4 at least; (16 * 10^4)^(1/4) = 20
    assert first.separating_noise(1000, 1) == pytest.approx(1000 * GROUP_DISTANCE / math.hypot(25, 6))
    assert first.separating_noise(1000, 9) == pytest.approx(3 * first.separating_noise(1000, 1))  # 9 epochs
    assert first.separating_noise(500, 1) == pytest.approx(first.separating_noise(1000, 1) / 2)
    few = FirstRound(clients=1000, groups=2, parameters=1)
    assert few.separating_noise(1000, 1) == pytest.approx(1000 * GROUP_DISTANCE / 6, rel=0.02)  # a score of 3
    many = FirstRound(clients=3, groups=9, parameters=10_000)
    assert many.separating_noise(1000, 1) == pytest.approx(1000 * GROUP_DISTANCE / math.hypot(2.5 * 30_000**0.25, 6))


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 5.0])
def test_the_plan_is_within_its_budget_and_its_bound(epsilon):
    plan = planned(epsilon)
    assert 0.99 * epsilon < plan.cost() <= epsilon
    assert plan.noise_multiplier <= MAX_INCREASE * alike(plan).noise_multiplier * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [2.0, 5.0])
def test_an_independent_accountant_agrees(epsilon):
    plan = planned(epsilon, selection="none", selections=0)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.GaussianDpEvent(plan.noise(True)))
    step = dp_accounting.PoissonSampledDpEvent(32 / 1000, dp_accounting.GaussianDpEvent(plan.noise_multiplier))
    accountant.compose(step, 59 * 31)
    assert accountant.get_epsilon(1e-4) == pytest.approx(epsilon, rel=0.01)


def test_a_small_budget_is_spent_up_to_the_bound_and_a_large_one_up_to_separation():
    small, large = planned(2.0), planned(5.0)
    separating = FIRST.separating_noise(1000, 1)
    assert small.noise(True) > separating == large.noise(True)
    assert small.noise_multiplier == pytest.approx(MAX_INCREASE * alike(small).noise_multiplier)
    assert large.noise_multiplier < MAX_INCREASE * alike(large).noise_multiplier
    for plan in (small, large):
        whole = RecordPlan.calibrated(**NUMBERS, **CHOICES, epsilon=plan.epsilon)  # one noise for all rounds
        assert plan.noise_multiplier < 0.93 * whole.noise_multiplier


def test_updates_of_unlike_clients_have_equal_noise():
    plans = [
        planned(8.0, num_examples=n, first_batch_size=n, batch_size=b, delta=1e-5) for n, b in ((1000, 32), (700, 10))
    ]
    deviations = {round(plan.noise(True) / plan.num_examples, 12) for plan in plans}
    assert len(deviations) == 1


def test_one_round_takes_the_whole_budget():
    plan = planned(2.0, rounds=1, selection="none", selections=0)
    assert plan.noise(True) < FIRST.separating_noise(1000, 1)
    assert 1.98 < plan.cost() <= 2.0


def test_clients_execute_what_is_priced():
    plans = tuple(planned(e, num_examples=n, first_batch_size=n) for e, n in ((2.0, 1000), (5.0, 700)))
    level = RecordLevel.of(plans, clients=21, num_clusters=4, weights="examples")
    assert level.client_plans == plans
    for plan in plans:
        spent = plan.charges(TrainRequest(first_batch=True))
        for _ in range(plan.rounds - 1):
            spent += plan.charges(TrainRequest(choice=True))
        assert spent == plan.planned()


def test_a_budget_that_is_too_small_is_refused():
    with pytest.raises(PrivacyError, match="no noise multiplier reaches"):
        planned(0.01, selection_epsilon=5.0)


@pytest.mark.parametrize("more", [{"clients": 9}, {"groups": 5}, {"parameters": 6635}])
def test_fewer_clients_more_groups_and_larger_models_require_less_noise(more):
    assert replace(FIRST, **more).separating_noise(1000, 1) < FIRST.separating_noise(1000, 1)
