"""Losses of other clients' models, told with noise: what is drawn, what a record can move, and what it costs.

The statistical tests use fixed seeds; over fresh seeds each would fail about once in 10,000 runs.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy import Event, Ledger, Permit, PerUnit, PrivacyError, RecordLevel, RecordPlan, epsilon, noisy_losses
from coterie.wire import EvaluateRequest, LossesRequest, TrainRequest

NUMBERS = {"num_examples": 60, "batch_size": 10, "rounds": 3, "epsilon": 5.0, "delta": 1e-5}
NUMBERS |= {"compared": 70, "loss_noise": 4.0, "models_per_message": 32}
PLAN = RecordPlan(**NUMBERS, noise_multiplier=1.5)


def told(losses, bound=1.0, deviation=1e-12, num_examples=10, seed=0):
    return noisy_losses(PerUnit(losses), bound, deviation, num_examples, np.random.default_rng(seed))


def test_sums_are_clipped_by_record_and_divided_by_the_public_number():
    losses = [[0.5, 3.0, -1.0], [0.25, 1.0, math.nan], [0.0, math.inf, -math.inf]]
    np.testing.assert_allclose(told(losses), [0.075, 0.3, 0.1], atol=1e-9)
    np.testing.assert_allclose(told(losses, bound=2.0), [0.075, 0.5, 0.2], atol=1e-9)
    np.testing.assert_allclose(told(losses, num_examples=5), [0.15, 0.6, 0.2], atol=1e-9)
    np.testing.assert_allclose(told(np.zeros((0, 2))), [0, 0], atol=1e-9)  # no record at all


@pytest.mark.parametrize(("bound", "deviation", "examples"), [(1.0, 3.0, 10), (4.0, 3.0, 10), (1.0, 0.5, 200)])
def test_noise_has_the_planned_scale(bound, deviation, examples):
    found = told(np.full((7, 20_000), 0.25), bound, deviation, examples)
    # The standard error of a standard deviation is 0.5 % here; x 2/3 or x 3/2 are far outside 2 %.
    scale = deviation * bound / examples
    assert found.std() == pytest.approx(scale, rel=0.02)
    assert found.mean() == pytest.approx(7 * 0.25 / examples, abs=4 * scale / math.sqrt(20_000))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / math.sqrt(20_000)


@pytest.mark.parametrize("models", [1, 9, 400])
def test_a_record_moves_all_losses_together_by_the_sensitivity_and_no_more(models):
    """L sqrt(m) / N, whatever the record: half of them have the largest loss by all models, so the bound is met."""
    rng = np.random.default_rng(0)
    others = rng.uniform(0, 5, (20, models))
    farthest = 0.0
    for record in [np.full((1, models), 1e9), rng.normal(0, 10, (1, models)), np.full((1, models), math.nan)]:
        moved = told(np.concatenate([others, record]), bound=3.0) - told(others, bound=3.0)
        assert np.linalg.norm(moved) <= 3.0 * math.sqrt(models) / 10 * (1 + 1e-9)
        farthest = max(farthest, float(np.linalg.norm(moved)))
    assert farthest == pytest.approx(3.0 * math.sqrt(models) / 10)


@for_rows("bound", [0.0, -1.0, math.nan, math.inf, 5e-324, 1e308])
def test_a_bound_that_makes_no_sense(bound):
    with pytest.raises(PrivacyError, match="bound of a record's loss must lie in"):
        told([[1.0]], bound=bound)


@for_rows("accountant", ["pld", "rdp"])
@for_rows("at_once", [1, 13, 23, 32, 70, 100])
def test_all_messages_together_cost_what_one_release_of_the_loss_noise_costs(at_once, accountant):
    plan = replace(PLAN, models_per_message=at_once)
    assert plan.loss_deviation == pytest.approx(4.0 * math.sqrt(70))  # in units of L; a record moves sums by L sqrt(70)
    messages = plan.planned() - replace(plan, compared=0).planned()
    sizes = [at_once] * (70 // at_once) + [70 % at_once] * (70 % at_once > 0)
    assert sorted(event.noise_multiplier for event in messages.elements()) == pytest.approx(
        sorted(4.0 * math.sqrt(70 / size) for size in sizes)
    )
    assert {event.sampling_rate for event in messages} == {1.0}
    one = epsilon(Counter({Event(1.0, 4.0): 1}), 1e-5, accountant)
    assert epsilon(messages, 1e-5, accountant) == pytest.approx(one, rel=0.002)


def test_losses_are_paid_for_beside_the_steps_and_the_choices():
    plan = replace(PLAN, selection="gumbel", selections=2)
    assert plan.planned() == (replace(plan, compared=0).planned() + plan.losses(32) + plan.losses(32) + plan.losses(6))
    alike = replace(PLAN, batch_size=60, noise_multiplier=8.0, compared=64, models_per_message=16)
    assert alike.planned() == Counter({Event(1.0, 8.0): 3 + 4})  # steps and losses of the same price
    assert plan.losses(0) == Counter()
    calibrated = RecordPlan.calibrated(**NUMBERS)
    without = RecordPlan.calibrated(**NUMBERS | {"compared": 0})
    assert calibrated.noise_multiplier > without.noise_multiplier
    assert 4.95 < calibrated.cost() <= 5.0


def test_a_plan_without_losses_pays_for_none():
    with pytest.raises(PrivacyError, match="does not cover losses of other models"):
        replace(PLAN, compared=0).losses(3)


def test_the_server_charges_a_message_of_losses_by_its_models_and_late_clients_not_at_all():
    level = RecordLevel.of((PLAN,), clients=5, num_clusters=2, weights="examples")
    assert level.charges(LossesRequest(compared=7)) == PLAN.charges(LossesRequest(compared=7)) == PLAN.losses(7)
    assert level.charges(TrainRequest()) == PLAN.part()
    with pytest.raises(PrivacyError, match="does not cover replies to EvaluateRequest"):
        level.charges(EvaluateRequest())
    ledger = Ledger(PLAN.delta)
    for event in {*PLAN.part(), *(event for models in range(1, 33) for event in PLAN.losses(models))}:
        assert level.pays(Permit(1, 1, event, 0.0))
    assert level.pays(ledger.uncharged_permit(1))
    (too_many,) = PLAN.losses(33)
    assert not level.pays(Permit(1, 1, too_many, 0.0))
