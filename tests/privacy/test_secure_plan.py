"""The secure mechanism: its integers, noise, thresholds and cost, and what it refuses."""

import math
import secrets

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.privacy import (
    Event,
    Joint,
    Ledger,
    LedgerError,
    NothingReleasedError,
    PrivacyError,
    Secure,
    Streams,
    certificate,
    composed,
    epsilon,
)
from coterie.privacy.check import check
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.integer_sums import IntegerSums
from coterie.privacy.score_histograms import CELLS, NORM
from coterie.privacy.secure_aggregation.integers import to_modulus

NUMBERS = {"clients": 30, "num_clusters": 3, "sampling_rate": 1.0, "rounds": 6, "clip_norm": 0.5, "delta": 1e-4}
SIZE = 40


def make(**numbers):
    return Secure(**{**NUMBERS, "epsilon": math.inf, "noise_multiplier": 1.5, "identifier_share": 0.04, **numbers})


def updates(count, scale=0.3, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, SIZE))
    return (scale * rows / np.linalg.norm(rows, axis=1)[:, None]).astype(np.float32)


# ---- a vector ---------------------------------------------------------------------------------------------


@for_rows("shares", [(0.04, 0.01), (0.0, 0.0), (0.5, 0.3), (0.0, 0.5)])
@for_rows("shared", [0, 7, SIZE])
def test_the_norm_of_a_vector_is_at_most_that_of_the_grid(shares, shared):
    plan = make(identifier_share=shares[0], clip_share=shares[1])
    rng = np.random.default_rng(1)
    for length in (0.0, 1e-9, 0.49999, 0.5, 0.5000001, 3.0, 1e30, 1e300, math.inf, math.nan):
        direction = rng.standard_normal(SIZE)
        update = length * (direction / np.linalg.norm(direction))
        for label, redrawn in ((0, 0), (2, 1)):
            vector = plan.encode(update, label, redrawn, shared)
            assert vector.dtype == np.int64
            assert len(vector) == plan.vector_size(SIZE, shared)
            assert sum(int(entry) ** 2 for entry in vector) <= STEPS**2
    assert math.isclose(np.linalg.norm(plan.encode(np.ones(SIZE), 1, 1, shared)), STEPS, rel_tol=1e-3)


def test_vectors_add_up_to_the_sums_of_joint():
    plan, rows = make(clip_share=0.02, clip_factor=0.5), updates(30, 0.8)
    rows[::2] /= 4
    joint = Joint(
        **{**NUMBERS, "epsilon": math.inf, "noise_multiplier": 1.5, "identifier_share": 0.04}, clip_share=0.02
    ).contributions(SIZE, shared=5)
    joint.plan = plan  # the same norm threshold
    whole, each = plan.contributions(SIZE, shared=5), plan.contributions(SIZE, shared=5)
    labels, redrawn = np.arange(30) % 3, np.arange(30) // 10
    vectors = 0
    for label, other, row in zip(labels, redrawn, rows, strict=True):
        vectors = vectors + plan.encode(row, label, other, 5)
    joint.add_rows(labels, redrawn, rows)
    whole.add_rows(labels, redrawn, rows)
    each.add_vectors(vectors, 30)
    np.testing.assert_array_equal(whole.vector(), vectors)
    for name in ("sums", "counts", "below"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(each, name))
    factor, count, half = plan.factors
    assert np.linalg.norm(whole.sums / factor - joint.sums) < 1e-3
    np.testing.assert_array_equal(whole.counts / count, joint.counts)
    np.testing.assert_array_equal(whole.below / (2 * half), joint.below)


def test_partial_sums_of_processes_merge():
    plan, rows = make(), updates(30)
    labels = np.arange(30) % 3
    whole, merged = plan.contributions(SIZE), plan.contributions(SIZE)
    whole.add_rows(labels, labels, rows)
    for part in (slice(0, 11), slice(11, 30)):
        partial = merged.partial()
        partial.add_rows(labels[part], labels[part], rows[part])
        merged.merge(partial)
    np.testing.assert_array_equal(whole.vector(), merged.vector())
    assert merged.survivors == 30


# ---- noise ------------------------------------------------------------------------------------------------


def test_the_least_honest_survivors_have_the_noise_of_the_guarantee():
    plan = make(dropout=0.3, corrupt=2)
    assert (plan.threshold(1), plan.layers.survivors) == (21, (30, 28, 26, 23, 21))
    for survivors in range(21, 31):
        honest = plan.layers.deviation(survivors) * math.sqrt(survivors - 2)
        assert 1.5 * STEPS * (1 - 1e-12) <= honest <= 1.5 * STEPS * 1.06
    assert math.isclose(plan.noise_of_sums(1), 0.5 * plan.noise_multiplier_updates * math.sqrt(30 / 28))
    drawn = sum(plan.layers.draw(secrets.token_bytes(32), 20_000)[0] for _ in range(19))
    assert math.isclose(np.std(drawn), 1.5 * STEPS, rel_tol=0.03)


def test_noise_of_a_release_is_that_of_all_survivors():
    plan = make(clip_norm=2.0, dropout=0.2)
    contributions = plan.contributions(20_000)
    for _ in range(25):
        contributions.add_null()
    released = plan.release(charged(plan), contributions, Streams(), 1)
    excess = math.sqrt(25 / 23)  # 24 is the next of the layers below 25; one client is corrupt
    expected = 2.0 * plan.noise_multiplier_updates * excess
    assert math.isclose(released.noise, expected)
    assert math.isclose(np.std(released.sums), expected, rel_tol=0.02)
    assert np.all(np.abs(released.histogram) < 6 * plan.noise_multiplier_counts * excess)


def test_noise_that_is_inside_is_not_added_again():
    plan, rows = make(), updates(30)
    size = plan.vector_size(SIZE)
    total = sum(plan.encode(row, 0, 0) + plan.layers.draw(secrets.token_bytes(32), size)[0] for row in rows)
    contributions = plan.contributions(SIZE)
    contributions.add_vectors(to_modulus(total).view(np.int32).astype(np.int64), 30)
    released = [plan.release(charged(plan), contributions, Streams(), 1) for _ in range(2)]
    np.testing.assert_array_equal(released[0].sums, released[1].sums)


def test_divisors_follow_the_survivors():
    plan = make()
    contributions = plan.contributions(SIZE)
    contributions.add_rows(np.zeros(24, int), np.zeros(24, int), updates(24))
    released = plan.release(charged(plan), contributions, Streams(), 1)
    np.testing.assert_array_equal(released.divisors, [8, 8, 8])
    assert released.cohort == 24


def charged(plan, number=1):
    return Ledger(plan.delta).charge_round(number, plan.round_event(number))


# ---- rounds without a release -----------------------------------------------------------------------------


def test_too_few_survivors_release_nothing_and_use_the_permit():
    plan = make(dropout=0.3)
    contributions = plan.contributions(SIZE)
    contributions.add_rows(np.zeros(20, int), np.zeros(20, int), updates(20))
    permit = charged(plan)
    with pytest.raises(NothingReleasedError, match="20 clients are left of the 21"):
        plan.release(permit, contributions, Streams(), 1)
    contributions.add(0, 0, 0, updates(1)[0])
    with pytest.raises(LedgerError, match="already used"):
        plan.release(permit, contributions, Streams(), 1)
    plan.release(charged(plan), contributions, Streams(), 1)


@pytest.mark.parametrize(
    ("position", "amount", "problem"), [(0, 200 * STEPS, "norm"), (-2, 60 * STEPS, "do not add up to 30 clients")]
)
def test_an_impossible_sum_releases_nothing(position, amount, problem):
    plan = make()
    total = sum(plan.encode(row, 0, 0) for row in updates(30))
    honest, wrong = plan.contributions(SIZE), plan.contributions(SIZE)
    honest.add_vectors(total, 30)
    plan.release(charged(plan), honest, Streams(), 1)
    total[position] += amount
    wrong.add_vectors(total, 30)
    with pytest.raises(NothingReleasedError, match=problem):
        plan.release(charged(plan), wrong, Streams(), 1)


def test_evaluations_need_the_clients_too():
    plan = Secure.calibrated(**NUMBERS, epsilon=8.0, evaluations=1, evaluation_noise=0.05, identifier_share=0.04)
    ledger = Ledger(plan.delta)
    for many in (21, 30):
        value = plan.release_evaluation(ledger.charge_round(1, plan.evaluation_event()), [1.0] * many, Streams(), 1)
        assert abs(value - (0.5 + many / 60)) < 6 * 0.05 * math.sqrt(many / 20)
    with pytest.raises(NothingReleasedError, match="20 clients"):
        plan.release_evaluation(ledger.charge_round(1, plan.evaluation_event()), [1.0] * 20, Streams(), 1)
    plan = Secure.calibrated_with_histogram(0.1, **NUMBERS, epsilon=8.0, identifier_share=0.04)
    counts = {client: np.eye(CELLS)[3] * 5 for client in range(30)}
    permit = plan.charge_histogram(Ledger(plan.delta), 1)
    histogram = plan.release_histogram(permit, counts, Streams(), 1)
    exact = Joint.calibrated_with_histogram(0.1, **NUMBERS, epsilon=8.0).release_histogram(
        Joint.calibrated_with_histogram(0.1, **NUMBERS, epsilon=8.0).charge_histogram(Ledger(1e-4), 1),
        counts,
        Streams(),
        1,
    )
    assert np.all(np.abs(histogram.counts - exact.counts) < 7 * (histogram.deviations + exact.deviations)[:, None])


@pytest.mark.parametrize("corrupt", [0, 1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("clients", [30, 41])
def test_evaluations_have_the_noise_of_the_guarantee_if_the_fewest_of_all_clients_stay(
    monkeypatch, clients, slots, dropout, corrupt
):
    def drawn(rng, std, size):
        deviations.append(std)
        return np.zeros(size, np.int64)

    deviations = []
    scores = {"evaluations": 1, "evaluation_noise": 0.05, "histograms": 1, "histogram_noise": 4.0}
    plan = make(clients=clients, sampling_rate=1 / slots, dropout=dropout, corrupt=corrupt, **scores)
    monkeypatch.setattr("coterie.privacy.mechanisms.score_sums.discrete_gaussian", drawn)
    least, ledger = math.ceil((1 - dropout) * clients - 1e-9), Ledger(plan.delta)
    assert [plan.scores(release).threshold for release in ("accuracy", "histogram")] == [least, least]
    for many in (least, clients):
        plan.release_evaluation(ledger.charge_round(1, plan.evaluation_event()), [1.0] * many, Streams(), 1)
        counts = {client: np.ones(CELLS) for client in range(many)}
        histogram = plan.release_histogram(plan.charge_histogram(ledger, 1), counts, Streams(), 1)
        for std, event in zip(deviations[-2:], (plan.evaluation_event(), plan.histogram_event()), strict=True):
            each = std / math.sqrt(many)
            assert math.isclose(each * math.sqrt(many - corrupt), event.noise_multiplier * STEPS)
        assert math.isclose(histogram.deviations[0], 4.0 * NORM * math.sqrt(many / (many - corrupt)))
    assert plan.evaluation_event().noise_multiplier == 0.05 * clients / 0.5
    small = Ledger(plan.delta).charge_round(1, plan.evaluation_event())
    with pytest.raises(NothingReleasedError, match=f"{least - 1} clients are left of the {least}"):
        plan.release_evaluation(small, [1.0] * (least - 1), Streams(), 1)


# ---- who takes part ---------------------------------------------------------------------------------------


def test_a_histogram_of_several_classes_is_that_of_joint():
    numbers = {**NUMBERS, "epsilon": 300.0, "histogram_classes": 3}
    counts = {client: np.arange(3 * CELLS) % 7 for client in range(30)}
    released = []
    for plan in (Secure.calibrated_with_histogram(0.1, **numbers), Joint.calibrated_with_histogram(0.1, **numbers)):
        permit = plan.charge_histogram(Ledger(plan.delta), 1)
        released.append(plan.release_histogram(permit, counts, Streams(), 1))
    secure, joint = released
    assert secure.counts.shape == joint.counts.shape
    deviation = np.max(secure.deviations) + np.max(joint.deviations)
    assert np.all(np.abs(secure.counts - joint.counts) < 7 * deviation)
    assert np.max(joint.counts) > 7 * deviation


def test_slots_take_turns_and_every_client_is_charged_for_its_own():
    plan = make(clients=50, sampling_rate=0.2, rounds=12)
    cohorts = [plan.sample(None, number).tolist() for number in range(1, 13)]
    assert sorted(client for cohort in cohorts[:5] for client in cohort) == list(range(50))
    assert cohorts[:5] == cohorts[5:10]
    assert plan.participations(12) == 3
    assert composed(plan.planned(), "rdp").epsilon(1e-4) == epsilon({Event(1.0, 1.5, "discrete"): 3}, 1e-4, "rdp")


@pytest.mark.parametrize(("accountant", "tolerance"), [("pld", 1e-3), ("rdp", 1e-9)])
def test_its_cost_is_that_of_gaussian_noise(accountant, tolerance):
    plan = Secure.calibrated(**NUMBERS, epsilon=4.0, identifier_share=0.04, accountant=accountant)
    gaussian = epsilon({Event(1.0, plan.noise_multiplier): 6}, plan.delta, accountant)
    assert 3.9 < plan.cost() <= 4.0
    assert plan.cost() == pytest.approx(gaussian, rel=tolerance)
    assert plan.cost("pld") <= plan.cost("rdp")


def test_events_of_other_samplers_are_not_composed_with_its_own():
    plan = Secure.calibrated(**NUMBERS, epsilon=4.0)
    with pytest.raises(PrivacyError, match="poisson and discrete events have different adjacencies"):
        epsilon({plan.event(): 1, Event(1.0, 1.0): 1}, 1e-5)
    with pytest.raises(PrivacyError, match="no amplification"):
        Event(0.5, 1.0, "discrete")


def test_the_certificate_follows_from_the_ledger():
    plan = Secure.calibrated(**{**NUMBERS, "delta": 1e-3}, epsilon=4.0, identifier_share=0.04)
    ledger = plan.ledger(seed=None)
    for number in range(1, 7):
        ledger.charge_round(number, plan.round_event(number), **{"for": "training"})
    stated = certificate(ledger.header, ledger.charges)
    assert stated["certified"]
    assert stated["epsilon"] == stated["epsilon_participation_visible"] == plan.cost()
    assert 0.5 < stated["attacker_right"] < 1
    assert "work with the server" in " ".join(stated["outside"])
    assert check(ledger.header, ledger.charges, stated) == []


# ---- refusals ---------------------------------------------------------------------------------------------


@for_rows(
    ("numbers", "problem"),
    [
        ({"dropout": 0.34}, "dropout must be"),
        ({"corrupt": -1}, "corrupt must be"),
        ({"corrupt": 21}, "a cohort of 30 clients, of which 21 must stay and corrupt = 21"),
        ({"corrupt": 13}, "twice those that stay"),
        ({"clients": 2, "num_clusters": 1, "corrupt": 2}, "a cohort of 2 clients"),
        ({"clients": 1, "num_clusters": 1}, "a cohort of 1 clients"),
        ({"sampling_rate": 0.1}, "exceeds the number of rounds, 6"),
        ({"sampling_rate": 1 / 31, "rounds": 50, "num_clusters": 1}, "exceeds the number of clients, 30"),
        ({"noise_multiplier": 0.002}, "32 steps"),
        ({"noise_multiplier": 5000.0}, "integers of 32 bits"),
        ({"clients": 1001}, "a cohort of 1,001 clients exceeds 1,000, .* sampling-rate = 0.5 or less"),
        ({"clients": 4200, "sampling_rate": 1 / 3}, "a cohort of 1,400 clients .* sampling-rate = 0.2 or less"),
        ({"clients": 1001, "sampling_rate": 0.5, "evaluations": 1}, "asks all 1,001 clients, .* set evaluate to none"),
        ({"clients": 1001, "sampling_rate": 0.5, "histograms": 1, "histogram_noise": 20.0}, "asks all 1,001 clients"),
        ({"evaluations": 1, "evaluation_noise": 2000.0}, "evaluation-noise: .* integers of 32 bits"),
        ({"evaluations": 1, "evaluation_noise": 2e-5}, "evaluation-noise: 0.0012 times .* 32 steps"),
        ({"accountant": "theorem-4.2"}, "accountant of mechanism secure"),
        ({"rebalance_min": 2, "identifier_share": 0.0}, "require cluster sizes"),
    ],
)
def test_impossible_plans_are_refused(numbers, problem):
    with pytest.raises(PrivacyError, match=problem):
        make(**numbers)


@pytest.mark.parametrize(("clients", "rate"), [(1000, 1.0), (1001, 0.5), (4200, 0.2)])
def test_a_large_federation_takes_turns(clients, rate):
    plan = make(clients=clients, sampling_rate=rate)
    sizes = [len(plan.members(number)) for number in range(1, plan.slots + 1)]
    assert (sum(sizes), max(sizes)) == (clients, -(-clients * rate // 1))
    assert max(sizes) <= 1000


def test_models_that_are_too_large_are_refused_before_a_charge():
    with pytest.raises(PrivacyError, match=r"3 x 700,000 parameters, more than 2,000,000"):
        make().contributions(700_000)
    assert isinstance(make().contributions(600_000), IntegerSums)
