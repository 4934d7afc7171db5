"""The banded mechanism: slots, cost, noise rows, and what it refuses.

The statistical tests use fixed seeds; over fresh seeds each would fail about once in 10,000 runs.
"""

import copy
import math
import pickle
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from kit.opacus_epsilons import opacus_epsilon
from scipy.optimize import brentq
from scipy.stats import norm

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.privacy import (
    Banded,
    Event,
    Joint,
    Ledger,
    LedgerError,
    PrivacyError,
    SharedBudget,
    Streams,
    certificate,
    epsilon,
)
from coterie.privacy.accountants import events_of_a_client
from coterie.privacy.check import check
from coterie.privacy.mechanisms.banded import CorrelatedNoise
from coterie.privacy.mechanisms.factorization import banded_matrix, dense, prefix_errors
from coterie.privacy.mechanisms.turns import slots_of
from coterie.rounds.run_state import StrategyError
from coterie.strategies import IFCA, FedPer
from coterie.wire import TrainRequest

# Noise of `joint` per round at which (rate, epsilon) holds over 80 rounds, delta = 1e-5, with visible participation.
VISIBLE = {(0.1, 2.0): 6.4638, (0.1, 8.0): 2.019, (0.2, 2.0): 8.5777, (0.2, 8.0): 2.6433}
NUMBERS = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 20, "clip_norm": 0.5, "delta": 1e-4}


def make(**numbers):
    return Banded(**{**NUMBERS, "epsilon": math.inf, "noise_multiplier": 1.5, **numbers})


def exact_epsilon(mu, delta):
    """Epsilon of a Gaussian pair of shift mu, in closed form."""

    def excess(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return brentq(excess, 0, 500) if excess(0) > 0 else 0.0


# ---- slots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "slots"), [(1, 1), (10, 3), (500, 5), (1001, 10)])
def test_every_client_has_one_slot_and_slots_have_equal_sizes(clients, slots):
    sizes = np.bincount(slots_of(clients, slots), minlength=slots)
    assert sizes.sum() == clients
    assert sizes.max() - sizes.min() <= 1


def test_slots_never_change_and_are_unrelated_to_regular_groups():
    assert slots_of(12, 3).tolist() == [0, 0, 0, 2, 1, 1, 2, 2, 0, 1, 2, 1]
    for groups in (2, 4, 5, 10):
        table = np.zeros((10, groups))
        np.add.at(table, (slots_of(1000, 10), np.arange(1000) % groups), 1)
        assert table.min() > 0.4 * 100 / groups


def test_a_client_takes_part_in_every_round_of_its_slot_and_in_no_other():
    plan, seen = make(rounds=13), {}
    for number in range(1, 14):
        for client in plan.sample(np.random.default_rng(number), number):
            seen.setdefault(int(client), []).append(number)
    assert sorted(seen) == list(range(100))
    for numbers in seen.values():
        assert set(np.diff(numbers)) == {5}
        assert len(numbers) == len(range(numbers[0], 14, 5))


def test_secret_participation_is_poisson_inside_a_slot():
    plan = make(sampling_rate=0.1, participation="secret", min_separation=4, rounds=400)
    cohorts = [plan.sample(np.random.default_rng(number), number) for number in range(1, 401)]
    slots = slots_of(100, 4)
    for number, cohort in enumerate(cohorts):
        assert (slots[cohort] == number % 4).all()
    assert np.mean([len(cohort) for cohort in cohorts]) == pytest.approx(10, abs=4 * math.sqrt(25 * 0.24 / 400))
    assert plan.event().sampling_rate == pytest.approx(0.4)


# ---- cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.6, 1.5, 4.0])
@pytest.mark.parametrize(
    ("rate", "rounds"), [(1.0, 5), (0.5, 9), (0.2, 20), (0.2, 23), (0.1, 80), (0.05, 200), (0.1, 10)]
)
def test_epsilon_is_that_of_a_gaussian_of_the_shift_of_all_participations(rate, rounds, noise):
    plan = make(sampling_rate=rate, rounds=rounds, noise_multiplier=noise)
    shift = math.sqrt(math.ceil(rounds * rate)) / noise
    assert epsilon(plan.planned(), 1e-5) == pytest.approx(exact_epsilon(shift, 1e-5), rel=0.01)


@pytest.mark.parametrize(("slots", "rounds", "noise"), [(2, 20, 1.2), (3, 25, 1.5), (5, 40, 2.0)])
def test_epsilon_of_secret_participation_is_that_of_another_library(slots, rounds, noise):
    plan = make(sampling_rate=0.1, participation="secret", min_separation=slots, rounds=rounds, noise_multiplier=noise)
    events = {Event(0.1 * slots, noise): math.ceil(rounds / slots)}
    assert events_of_a_client(plan.planned()) == events
    assert epsilon(plan.planned(), 1e-5) == pytest.approx(opacus_epsilon(events, 1e-5, "prv"), rel=0.015)


def test_cost_is_that_of_the_slot_with_most_events():
    def of(slot, count, noise=1.5, slots=5):
        return {Event(1.0, noise, "poisson", slot, slots): count}

    assert events_of_a_client({**of(0, 3), **of(1, 2)}) == {Event(1.0, 1.5): 3}
    assert events_of_a_client({**of(0, 3), **of(1, 4), Event(0.2, 1.5): 2}) == {Event(1.0, 1.5): 4, Event(0.2, 1.5): 2}
    # Not nested: an upper bound on every client. Other numbers of slots are other groups of clients.
    assert events_of_a_client({**of(0, 3), **of(1, 2, 2.0)}) == {Event(1.0, 1.5): 3, Event(1.0, 2.0): 2}
    assert events_of_a_client({**of(0, 3), **of(0, 2, slots=4)}) == {Event(1.0, 1.5): 5}


@pytest.mark.parametrize(("rounds", "contributions"), [(20, 4), (21, 5), (24, 5)])
def test_a_calibrated_plan_meets_its_budget_with_evaluations(rounds, contributions):
    numbers = {**NUMBERS, "rounds": rounds}
    plan = Banded.calibrated(**numbers, epsilon=4.0, evaluations=4, evaluation_noise=0.05)
    events = Counter({Event(1.0, plan.noise_multiplier): contributions, plan.evaluation_event(): 4})
    assert events_of_a_client(plan.planned()) == events
    assert 3.95 < epsilon(plan.planned(), plan.delta) <= 4.0


@pytest.mark.parametrize("rate", [0.1, 0.2])
@pytest.mark.parametrize("budget", [2.0, 8.0])
def test_the_noise_of_models_against_independent_noise_of_visible_participation(rate, budget):
    """At most half for the last model, and 0.6 over all rounds."""
    numbers = {**NUMBERS, "clients": 500, "rounds": 80, "delta": 1e-5, "sampling_rate": rate, "epsilon": budget}
    plan = Banded.calibrated(**numbers)
    errors = prefix_errors(plan.matrix) * plan.noise_multiplier_updates
    joint = Joint.calibrated(**numbers)
    # Visible participation: a client may be in all rounds in which it happens to be sampled.
    visible = VISIBLE[rate, budget]
    seen = certificate({"plan": joint.recalibrated(visible).terms(), "seed": None}, [])
    assert seen["epsilon_participation_visible"] == pytest.approx(budget, rel=0.01)
    independent = visible * np.sqrt(np.arange(1, 81))
    assert errors[-1] < 0.5 * independent[-1]
    assert np.sqrt(np.mean(errors**2)) < 0.6 * np.sqrt(np.mean(independent**2))


def test_secret_participation_chooses_the_separation_of_the_least_noise():
    numbers = {**NUMBERS, "clients": 500, "rounds": 80, "sampling_rate": 0.1, "delta": 1e-5}
    small = Banded.calibrated(**numbers, epsilon=1.0, participation="secret")
    large = Banded.calibrated(**numbers, epsilon=8.0, participation="secret")
    assert small.slots < large.slots == 10
    for plan, budget in ((small, 1.0), (large, 8.0)):
        for slots in (1, 2, 10):
            other = Banded.calibrated(**numbers, epsilon=budget, participation="secret", min_separation=slots)
            assert plan.model_noise <= other.model_noise * (1 + 1e-9)


def test_charges_carry_the_slot_of_the_round():
    plan = make()
    for number, slot in ((1, 0), (5, 4), (6, 0), (12, 1)):
        event = Event(1.0, 1.5, "poisson", slot, 5)
        assert plan.charges(TrainRequest(round=number)) == {event: 1}
        assert plan.pays(Ledger(1e-5).charge_round(number, event))
    assert sum(plan.planned().values()) == 20


# ---- the ledger -------------------------------------------------------------------------------------------


def test_the_ledger_counts_per_slot_and_refuses_a_round_twice(tmp_path):
    plan = Banded.calibrated(**{**NUMBERS, "rounds": 12}, epsilon=4.0)
    ledger = plan.ledger(tmp_path / "ledger.jsonl")
    costs = [ledger.charge_round(number, plan.round_event(number)).epsilon for number in range(1, 8)]
    one, two = (epsilon({Event(1.0, plan.noise_multiplier): count}, plan.delta) for count in (1, 2))
    assert costs == pytest.approx([one] * 5 + [two] * 2)
    with pytest.raises(LedgerError, match="round 7 was charged before"):
        ledger.charge_round(7, plan.round_event(7))
    ledger.close()
    with (
        closing(plan.ledger(tmp_path / "ledger.jsonl")) as again,  # after a crash
        pytest.raises(LedgerError, match="round 7 was charged before"),
    ):
        again.charge_round(7, plan.round_event(7))


def test_two_runs_of_one_budget_add_up_over_slots(tmp_path):
    numbers = {"clients": 100, "sampler": "poisson", "epsilon": 50.0, "delta": 1e-4}
    first, second = make(), make(sampling_rate=0.25)
    with closing(SharedBudget(tmp_path / "budget", **numbers)) as budget:
        budget.charge(1, first.round_event(1), 1)
        budget.charge(1, first.round_event(1), 1)  # another run of the same clients
        budget.charge(2, second.round_event(2), 1)  # its slots are other groups of clients
        assert budget.spent() == pytest.approx(epsilon({Event(1.0, 1.5): 3}, 1e-4))


def test_a_changed_slot_is_a_problem():
    plan = Banded.calibrated(**NUMBERS, epsilon=4.0)
    ledger = plan.ledger()
    for number in range(1, 21):
        ledger.charge_round(number, plan.round_event(number), **{"for": "training"})
    assert check(ledger.header, ledger.charges, certificate(ledger.header, ledger.charges)) == []
    ledger.charges[6]["slot"] = 4  # cheaper: the charges of slots are spread unevenly
    problems = check(ledger.header, ledger.charges, None)
    assert "charge 7 (round 7) is for slot 4, but its round is of slot 1" in problems[0]


def test_a_charge_without_its_slot_is_a_problem():
    plan = Banded.calibrated(**NUMBERS, epsilon=4.0)
    ledger = plan.ledger()
    ledger.charge_round(1, plan.event(), **{"for": "training"})
    assert "is for slot None, but its round is of slot 0" in check(ledger.header, ledger.charges, None)[0]


def test_the_certificate_of_an_early_end_states_the_planned_cost():
    plan = Banded.calibrated(**NUMBERS, epsilon=4.0)
    for charged in (0, 3, 20):
        ledger = plan.ledger()
        for number in range(1, charged + 1):
            ledger.charge_round(number, plan.round_event(number))
        document = certificate({**ledger.header, "seed": None}, ledger.charges)
        assert document["certified"] is True
        assert document["epsilon"] == document["epsilon_participation_visible"] == pytest.approx(4.0, rel=2e-3)
        assert document["charged"] == (
            [{"sampler": "poisson", "sampling_rate": 1.0, "noise_multiplier": plan.noise_multiplier, "slots": 5,
              "charges": charged}] if charged else []
        )  # fmt: skip
        assert "whether a client replies, which must not depend on its data" in document["outside"]
        assert not any("amplification" in line for line in document["outside"])


def test_noise_that_the_budget_does_not_allow_ends_the_run_early():
    plan = make(epsilon=3.0, noise_multiplier=1.3)
    document = certificate({"plan": plan.terms(), "seed": None}, [])
    assert document["certified"] is True
    assert document["epsilon"] == epsilon({Event(1.0, 1.3): 1}, plan.delta) < 3 < epsilon(plan.planned(), plan.delta)


def test_secret_participation_states_both_costs():
    plan = Banded.calibrated(**{**NUMBERS, "sampling_rate": 0.1}, epsilon=4.0, participation="secret", min_separation=2)
    document = certificate({"plan": plan.terms(), "seed": None}, [])
    assert document["epsilon"] == pytest.approx(4.0, rel=2e-3)
    assert document["epsilon_participation_visible"] > 6
    assert any("amplification by sampling" in line for line in document["outside"])


# ---- noise ------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_inverse_of_the_matrix():
    rounds, bands = 12, 4
    fresh = np.random.default_rng(0).standard_normal((rounds, 1, 2, 3))
    noise = CorrelatedNoise(banded_matrix(rounds, bands))
    rows = np.stack([noise.next(row) for row in fresh])
    expected = np.linalg.solve(dense(banded_matrix(rounds, bands)), fresh.reshape(rounds, -1))
    np.testing.assert_allclose(rows.reshape(rounds, -1), expected, atol=1e-12)


@pytest.mark.parametrize("restarted", [3, 7])
def test_a_restart_of_a_cluster_is_a_block_diagonal_matrix_for_it_alone(restarted):
    rounds, bands, shared = 12, 4, 1
    fresh = np.random.default_rng(1).standard_normal((rounds, 1, 2, 3))
    noise, rows = CorrelatedNoise(banded_matrix(rounds, bands)), []
    for number, row in enumerate(fresh):
        if number == restarted:
            noise.rearrange(np.array([0, -1]), np.ones(2), shared)
        rows.append(noise.next(row))
    matrix = dense(banded_matrix(rounds, bands))
    blocks = matrix.copy()
    blocks[restarted:, :restarted] = 0.0
    assert np.linalg.norm(blocks, axis=0).max() <= 1 + 1e-12
    solved = np.linalg.solve(matrix, fresh.reshape(rounds, -1)).reshape(fresh.shape)
    solved[:, :, 1, shared:] = np.linalg.solve(blocks, fresh[:, 0, 1, shared:])[:, None]
    np.testing.assert_allclose(np.stack(rows), solved, atol=1e-12)


def test_models_that_move_shrink_or_are_added_have_a_matrix_of_shorter_columns_each():
    rounds, bands, changed = 12, 4, 5
    before, after = np.random.default_rng(1).standard_normal((2, rounds, 1, 3, 2))
    noise = CorrelatedNoise(banded_matrix(rounds, bands))
    for row in before[:changed]:
        noise.next(row)
    noise.rearrange(np.array([2, -1, 0]), np.array([0.7, 1.0, 1.0]), shared=0)
    rows = [noise.next(row) for row in after[changed:]]
    for block, (origin, factor) in enumerate([(2, 0.7), (1, 0.0), (0, 1.0)]):
        matrix = dense(banded_matrix(rounds, bands))
        matrix[changed:, :changed] *= factor
        assert np.linalg.norm(matrix, axis=0).max() <= 1 + 1e-12
        fresh = np.concatenate([before[:changed, 0, origin], after[changed:, 0, block]])
        np.testing.assert_allclose(np.stack(rows)[:, 0, block], np.linalg.solve(matrix, fresh)[changed:], atol=1e-12)


@pytest.mark.parametrize(
    ("origins", "factors"), [([0, 0], [1, 1]), ([0, 1], [1.1, 1]), ([0, 1], [1, -0.1]), ([0, 1], [1, math.nan])]
)
def test_rows_of_noise_have_one_heir_and_never_grow(origins, factors):
    noise = CorrelatedNoise(banded_matrix(4, 2))
    noise.next(np.ones((1, 2, 3)))
    with pytest.raises(PrivacyError, match="from a model to one other at most"):
        noise.rearrange(np.array(origins), np.array(factors), shared=0)


def test_left_out_rows_and_other_shapes_restart_the_matrix():
    bands = banded_matrix(12, 4)
    fresh = np.random.default_rng(2).standard_normal((1, 2, 3))
    noise = CorrelatedNoise(bands)
    noise.next(fresh)
    noise.move_to(1)
    assert not np.allclose(noise.next(fresh), fresh / bands[1, 0])
    noise.move_to(5)
    np.testing.assert_allclose(noise.next(fresh), fresh / bands[5, 0])
    noise.move_to(6)
    np.testing.assert_allclose(noise.next(fresh[:, :1]), fresh[:, :1] / bands[6, 0])


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_noise_rows_are_never_stored_or_sent(way):
    with pytest.raises(TypeError, match="noise rows stay in memory"):
        way(CorrelatedNoise(banded_matrix(4, 2)))


def released(plan, rounds=None, seed=0, state=None):
    """Releases without contributions, in units of C."""
    ledger, state, found = plan.ledger(), state or plan.new_state(), []
    for number in range(1, (rounds or plan.rounds) + 1):
        permit = ledger.charge_round(number, plan.round_event(number))
        out = plan.release(permit, plan.contributions(50), Streams(seed), number, state=state)
        found.append(out.sums / plan.clip_norm)
    return np.stack(found)


def test_the_noise_of_a_run_has_the_planned_covariance():
    plan = make(identifier_share=0.04, rounds=10)
    noise = np.concatenate([released(plan, seed=seed).reshape(10, -1) for seed in range(40)], axis=1)
    white = dense(plan.matrix) @ noise / plan.noise_multiplier_updates
    count = white.shape[1]
    np.testing.assert_allclose(white @ white.T / count, np.eye(10), atol=4 * math.sqrt(2 / count))
    summed = noise.sum(axis=0).std() / plan.noise_multiplier_updates
    assert summed == pytest.approx(prefix_errors(plan.matrix)[-1], rel=4 / math.sqrt(2 * count))


def test_sums_cluster_sizes_and_divisors():
    plan = make(identifier_share=0.2, noise_multiplier=0.06)
    contributions = plan.contributions(2)
    for slot, (label, update) in enumerate([(0, [3.0, 4.0]), (0, [0.3, 0.4]), (1, [-3.0, 4.0])]):
        contributions.add(slot, label, label, update)
    permit = plan.ledger().charge_round(1, plan.round_event(1))
    out = plan.release(permit, contributions, Streams(0), 1)
    deviation = 5 * plan.noise_multiplier_updates * plan.clip_norm / plan.matrix[0, 0]
    np.testing.assert_allclose(out.sums, [[0.6, 0.8], [-0.3, 0.4]], atol=deviation)
    np.testing.assert_allclose(out.histogram, [2, 1], atol=5 * plan.noise_multiplier_counts)
    assert out.divisors.tolist() == [10, 10]  # M / (b k)
    assert out.cohort == 20


def test_the_histogram_has_independent_noise():
    plan = make(identifier_share=0.2, rounds=10)
    state, ledger, seen = plan.new_state(), plan.ledger(), []
    for number in range(1, 11):
        permit = ledger.charge_round(number, plan.round_event(number))
        out = plan.release(permit, plan.contributions(1), Streams(None), number, state=state)
        seen.append(out.histogram)
    spread = np.array(seen) / plan.noise_multiplier_counts
    assert 0.4 < spread.std() < 1.8


def test_a_permit_of_another_slot_releases_nothing():
    plan, contributions = make(), make().contributions(2)
    permit = plan.ledger().charge_round(1, plan.round_event(2))
    with pytest.raises(LedgerError, match="no release of round 1"):
        plan.release(permit, contributions, Streams(0), 1)
    bare = Ledger(1e-5).charge_round(1, plan.event())
    with pytest.raises(LedgerError, match="no release of round 1"):
        plan.release(bare, contributions, Streams(0), 1)


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"participation": "open"}, "participation must be visible or secret"),
        ({"divisor": "released"}, "noise cancels over rounds only if every round has the same divisor"),
        ({"min_separation": 4}, "sampling-rate = 0.2 makes it 5; set sampling-rate to 0.25"),
        ({"rounds": 4}, "b = 5, .* exceeds the number of rounds, 4"),
        ({"clients": 4}, "b = 5, .* exceeds the number of clients, 4"),
        ({"participation": "secret", "min_separation": 6}, "it must be at most 5"),
        ({"rebalance_min": 3.0}, "rebalancing requires cluster sizes"),
    ],
)
def test_what_cannot_work_is_refused(numbers, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        make(**numbers)


def test_rates_near_a_fraction_become_it():
    plan = make(sampling_rate=0.3)
    assert (plan.slots, plan.rate, plan.expected_members) == (3, 1 / 3, pytest.approx(100 / 6))


def test_evaluations_of_clients_with_memory_need_visible_participation():
    numbers = {"num_clusters": 1, "evaluations": 20}
    FedPer(make(**numbers), evaluate="private")
    FedPer(make(**numbers, participation="secret", min_separation=1), evaluate="private")
    secret = make(**{**numbers, "sampling_rate": 0.1}, participation="secret", min_separation=2)
    with pytest.raises(StrategyError, match="does not cover evaluations of clients that keep state"):
        FedPer(secret, evaluate="private")
    FedPer(secret, evaluate_every=0)
    IFCA(make(evaluations=20, sampling_rate=0.1, participation="secret", min_separation=2), evaluate="private")
