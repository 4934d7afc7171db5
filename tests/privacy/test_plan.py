"""One plan: its sampler, its clipping, its noise and its event belong together.

The statistical tests use fixed seeds; over fresh seeds each would fail about once in 10,000 runs.
"""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.audit.printed import Paper, PaperUncharged
from coterie.privacy import (
    PLANS,
    Banded,
    Joint,
    LedgerError,
    NoPrivacy,
    PrivacyError,
    RecordLevel,
    RecordPlan,
    RRSlot,
    Streams,
    clip,
    epsilon,
    plan_from_terms,
)

C = 0.5
NUMBERS = {"rounds": 10, "clip_norm": C, "epsilon": math.inf, "delta": 1e-5}


def plan(kind=Joint, noise=2.0, share=0.2, k=3, clients=1000, rate=0.3, **numbers):
    shape = {"clients": clients, "num_clusters": k, "sampling_rate": rate}
    return kind(noise_multiplier=noise, identifier_share=share, **shape | NUMBERS | numbers)


def release(plan, members, size=2, seed=0, attempt=1):
    """One release of (slot, label, update)s."""
    contributions = plan.contributions(size)
    for slot, label, update in members:
        contributions.add(slot, label, label, update)
    permit = plan.ledger().charge_round(1, plan.event())
    return plan.release(permit, contributions, Streams(seed), attempt)


@for_rows("update", [[[1.0, 2.0], [3.0, 4.0]], np.float32(7), 7.0, [], np.full(10_000, 3e38, np.float32)])
def test_other_arrays_and_numbers_are_clipped_as_float64(update):
    clipped = clip(update, C)
    original = np.asarray(update, dtype=np.float64)
    assert clipped.shape == original.shape
    norm = np.linalg.norm(clipped.ravel())
    assert norm <= C
    largest = np.abs(original).max(initial=0.0)
    if largest > 1e-3:
        assert norm == pytest.approx(C, rel=2e-6)
        np.testing.assert_allclose(clipped / np.abs(clipped).max(), original / largest, rtol=1e-12)


def test_the_sampler_is_poisson():
    p = plan()
    cohorts = [p.sample(Streams(0).stream("cohort", t), t) for t in range(400)]
    sizes = np.array([len(c) for c in cohorts])
    # Binomial(1000, 0.3): mean 300, variance 210; a sampler of fixed size has variance 0.
    assert sizes.mean() == pytest.approx(300, abs=4 * math.sqrt(210 / 400))
    assert sizes.var() == pytest.approx(210, rel=4 * math.sqrt(2 / 400))
    each = np.bincount(np.concatenate(cohorts), minlength=1000)
    assert len(each) == 1000
    assert each.mean() == pytest.approx(120, abs=4 * math.sqrt(84 / 1000))
    assert each.var() == pytest.approx(84, rel=4 * math.sqrt(2 / 1000))


@pytest.mark.parametrize("kind", [RRSlot, Paper])
def test_slots_are_of_fixed_number_random_and_all_different(kind):
    p = plan(kind)
    cohorts = np.array([p.sample(Streams(0).stream("cohort", t), t) for t in range(400)])
    assert cohorts.shape == (400, 300)
    assert all(len(set(cohort)) == 300 for cohort in cohorts)
    each = np.bincount(cohorts.ravel(), minlength=1000)  # mean 120, variance 84 nearly
    assert each.var() == pytest.approx(84, rel=4 * math.sqrt(2 / 1000))
    assert cohorts[:, 0].mean() == pytest.approx(499.5, abs=4 * 289 / 20)  # the first slot is anybody's
    assert p.rate == p.event().sampling_rate == 0.3
    assert plan(kind, rate=0.0001, k=1).cohort_size == 1


@pytest.mark.parametrize("kind", [Joint, RRSlot, Paper])
@pytest.mark.parametrize("members", [0, 7])
def test_noise_has_the_planned_scale_whatever_the_counts(kind, members):
    p, size = plan(kind), 20_000
    released = release(p, [(slot, slot % 3, np.zeros(size)) for slot in range(members)], size)
    # The standard error of a standard deviation is 0.5 % here; sigma x 2/3 or x 3/2 are far outside 2 %.
    scale = p.noise_multiplier_updates * C * (1 if kind is Joint else 2)
    for row in released.sums:
        assert row.std() == pytest.approx(scale, rel=0.02)
        assert row.mean() == pytest.approx(0.0, abs=4 * scale / math.sqrt(size))
    assert abs(np.corrcoef(released.sums[0], released.sums[1])[0, 1]) < 4 / math.sqrt(size)


def test_updates_are_clipped_on_arrival_and_summed_by_redrawn_label():
    p = plan(noise=1e-9, share=0.5)
    contributions = p.contributions(2)
    contributions.add(0, 0, 1, [30.0, 40.0])
    contributions.add(1, 0, 1, [0.0, math.nan])
    contributions.add(2, 2, 2, [0.1, 0.2])
    released = p.release(p.ledger().charge_round(1, p.event()), contributions, Streams(0), 1)
    clipped = C * (1 - 1e-6)
    np.testing.assert_allclose(released.sums, [[0, 0], [0.6 * clipped, 0.8 * clipped], [0.1, 0.2]], atol=1e-7)
    np.testing.assert_allclose(released.histogram, [2, 0, 1], atol=1e-7)


def test_the_histogram_has_the_planned_scale():
    p = plan(k=5000, clients=5000, share=0.5)
    released = release(p, [(0, 0, np.zeros(1))], 1)
    assert released.histogram.std() == pytest.approx(p.noise_multiplier_counts, rel=0.04)
    assert released.histogram.mean() == pytest.approx(0.0, abs=4 * p.noise_multiplier_counts / math.sqrt(5000))


def test_identifiers_have_the_planned_scale():
    p = plan(RRSlot, k=4, clients=4000, rate=1.0)
    drawn = p.perturb(p.contributions(1), *(np.random.default_rng(i) for i in (0, 1)), np.eye(4))
    assert drawn.scores.shape == (1, 4000, 4)
    assert drawn.scores.std() == pytest.approx(p.noise_multiplier_counts, rel=4 / math.sqrt(2 * 16_000))


@pytest.mark.parametrize("kind", [RRSlot, Paper])
def test_the_chain_charges_both_its_steps(kind):
    """mu^2 = s^2 / sigma_s^2 + 1 / sigma_theta^2, one-hots moving by s: sqrt(2), and 1 as the paper has it."""
    p = plan(kind, noise=0.9)
    moved = 2 if kind is RRSlot else 1
    assert moved * p.noise_multiplier_counts**-2 + p.noise_multiplier_updates**-2 == pytest.approx(0.9**-2)


def test_divisors_are_public_or_released():
    members = [(slot, 0, np.zeros(2)) for slot in range(9)]
    assert release(plan(), members).divisors.tolist() == [100.0] * 3
    released = release(plan(divisor="released", rebalance_min=5), members)
    np.testing.assert_array_equal(released.divisors, np.maximum(released.histogram, 5))
    # All m = 30 slots count, though 9 clients replied: the partition is that of the noisy identifiers.
    slots = release(plan(RRSlot, clients=100, rebalance_min=8), members)
    assert slots.divisors.sum() == 30
    assert slots.divisors.min() >= 8
    assert release(plan(Paper, clients=100), members).divisors.sum() == pytest.approx(9, abs=2)  # true counts, least 1


def test_counts_that_nobody_pays_for_are_not_released():
    p = plan(share=0.0)
    assert p.noise_multiplier_counts is None
    assert p.noise_multiplier_updates == p.noise_multiplier
    assert release(p, []).histogram is None


@pytest.mark.parametrize("kind", [Joint, Banded])
@pytest.mark.parametrize("last", [0, 1, 5, 9, 10, 40])
@pytest.mark.parametrize("clip_share", [0.0, 0.01])
def test_every_round_is_the_same_event_with_and_without_sizes(kind, last, clip_share):
    """1 / z^2 is the sum of the shares in every round, and only rounds up to the last one with sizes release them."""
    p = plan(kind, share=0.1, sizes_until=last, clip_share=clip_share, rate=0.5)
    for number in range(1, p.rounds + 1):
        now = p.of_round(number)
        assert (now.noise_multiplier_counts is None) == (number > last)
        shares = [now.noise_multiplier_updates, now.noise_multiplier_counts, now.split.norms and 2 * now.split.norms]
        assert sum(z**-2 for z in shares if z) == pytest.approx(p.noise_multiplier**-2, rel=1e-12)
        assert now.round_event(number) == p.round_event(number)
        assert now.noise_multiplier_updates == p.noise_of_rounds[number - 1]
    assert p.planned() == plan(kind, share=0.1, clip_share=clip_share, rate=0.5).planned()


@pytest.mark.parametrize("kind", [Joint, Banded])
def test_sizes_end_and_the_noise_of_updates_falls(kind):
    p = plan(kind, noise=2.0, share=0.75, k=1, rate=1.0, sizes_until=2)
    ledger, state, deviations = p.ledger(), p.new_state(), []
    for number in (1, 2, 3, 4):
        permit = ledger.charge_round(number, p.round_event(number))
        released = p.release(permit, p.contributions(40_000), Streams(1), number, state=state)
        assert (released.histogram is None) == (number > 2)
        deviations.append(released.sums.std() / C)
    first = 4.0 * (1 if kind is Joint else p.matrix[0, 0] ** -1)  # 2 / sqrt(1 - 0.75)
    assert deviations[0] == pytest.approx(first, rel=0.02)
    if kind is Joint:
        assert deviations == pytest.approx([4.0, 4.0, 2.0, 2.0], rel=0.02)


def test_the_noise_of_models_counts_every_round_s_own():
    rounds = [plan(share=0.75, sizes_until=last).model_noise for last in (10, 5, 0)]
    assert rounds == pytest.approx([4 * math.sqrt(5.5), math.sqrt((16 * 40 + 4 * 15) / 10), 2 * math.sqrt(5.5)])
    banded = [plan(Banded, share=0.75, rate=1.0, sizes_until=last).model_noise for last in (10, 5, 0)]
    assert banded == pytest.approx(rounds)  # one slot: C is the identity
    slots = [plan(Banded, share=0.04, rate=0.5, sizes_until=last).model_noise for last in (0, 6, 10)]
    assert sorted(slots) == slots


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (Joint, {"rebalance_min": 2}),
        (Joint, {"divisor": "released"}),
        (Banded, {"rebalance_min": 2, "rate": 0.5}),
        (RRSlot, {}),
        (Paper, {}),
        (Joint, {"sizes_until": -1}),
        (Joint, {"sizes_until": math.nan}),
    ],
)
def test_sizes_that_are_read_do_not_end(kind, numbers):
    with pytest.raises(PrivacyError, match="sizes-until must be"):
        plan(kind, **{"sizes_until": 9, **numbers})


def test_sizes_may_end_after_the_last_round_and_older_plans_release_all():
    assert plan(rebalance_min=2, sizes_until=10).of_round(10).noise_multiplier_counts
    older = plan().terms()
    assert "sizes_until" not in older
    assert plan_from_terms(older).sizes_until == math.inf
    assert plan_from_terms(plan(sizes_until=6).terms()) == plan(sizes_until=6)
    assert plan(sizes_until=6).statement.covers[1] == "noisy cluster sizes, up to round 6"
    assert plan().statement.covers[1] == "noisy cluster sizes"
    assert plan(sizes_until=6).extended({"rounds": 20, "sizes_until": 12}).sizes_until == 12
    assert plan().extended({"rounds": 20, "sizes_until": 12}).sizes_until == math.inf


@pytest.mark.parametrize("kind", [Joint, RRSlot])
def test_noise_is_fresh_for_every_attempt_at_a_round(kind):
    p = plan(kind)
    first, again, second = (release(p, [], attempt=a).sums for a in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.isin(second, first).any()


def test_a_permit_pays_once_and_for_its_own_event_alone():
    p = plan()
    permit = p.ledger().charge_round(1, p.event())
    p.release(permit, p.contributions(2), Streams(0), 1)
    with pytest.raises(LedgerError, match="already used"):
        p.release(permit, p.contributions(2), Streams(0), 1)
    cheaper = p.ledger().charge_round(1, p.recalibrated(9.0).event())
    with pytest.raises(LedgerError, match="is for Event"):
        p.release(cheaper, p.contributions(2), Streams(0), 1)
    with pytest.raises(LedgerError, match="is for Event"):
        p.release_evaluation(cheaper, [0.5], Streams(0), 1)


def test_without_privacy_everything_is_exact_and_epsilon_infinite():
    p = NoPrivacy(clients=10, num_clusters=2, sampling_rate=0.5, rounds=3)
    released = release(p, [(0, 0, [1e6, 1.5]), (1, 1, [2.0, 3.0]), (2, 1, [2.0, 3.0])])
    np.testing.assert_array_equal(released.sums, [[1e6, 1.5], [4.0, 6.0]])
    np.testing.assert_array_equal(released.histogram, [1, 2])
    np.testing.assert_array_equal(released.divisors, [1, 2])
    assert released.epsilon == math.inf
    assert not p.private


@pytest.mark.parametrize(
    ("kind", "noise"), [(Joint, 1.1002), (RRSlot, 1.1885), (Paper, 2.573)], ids=["joint", "rr-slot", "paper"]
)
def test_calibrated_plans_have_the_reference_noise(kind, noise):
    p = kind.calibrated(
        clients=1000, num_clusters=4, sampling_rate=0.1, rounds=100, clip_norm=C, epsilon=4.0, delta=1e-3
    )
    assert p.noise_multiplier == pytest.approx(noise, rel=0.01)
    assert p.identifier_share == kind.default_identifier_share
    assert p.expected_members == 25
    assert epsilon(p.planned(), 1e-3, p.accountant) <= 4.0


def test_private_evaluations_are_part_of_the_budget():
    numbers = {"clients": 500, "num_clusters": 4, "sampling_rate": 0.2, "rounds": 80, "clip_norm": C}
    without = Joint.calibrated(**numbers, epsilon=8.0, delta=2e-5)
    with_them = Joint.calibrated(**numbers, epsilon=8.0, delta=2e-5, evaluations=16)
    assert without.noise_multiplier < with_them.noise_multiplier < 1.05 * without.noise_multiplier
    assert 7.9 < epsilon(with_them.planned(), 2e-5) <= 8.0
    # An accuracy moves the sum of (accuracy - 1/2) by at most 1/2; the noise on the mean is 0.01.
    assert with_them.evaluation_event().noise_multiplier == pytest.approx(0.01 * 500 / 0.5)
    assert plan(RRSlot).evaluation_event().noise_multiplier == pytest.approx(0.01 * 1000)  # replaced: by 1


def test_a_private_evaluation_has_the_planned_noise():
    p = plan(evaluations=1, evaluation_noise=0.05)
    values = []
    for attempt in range(400):
        permit = p.ledger().charge_round(1, p.evaluation_event())
        values.append(p.release_evaluation(permit, [0.8] * 1000, Streams(0), attempt))
    assert np.mean(values) == pytest.approx(0.8, abs=4 * 0.05 / 20)
    assert np.std(values) == pytest.approx(0.05, rel=4 / math.sqrt(800))


@pytest.mark.parametrize(("wild", "counted"), [(1e6, 1.0), (-1e6, 0.0), (math.nan, 0.5), (math.inf, 1.0)])
def test_one_reported_accuracy_counts_as_one_accuracy(wild, counted):
    p = plan(clients=10, rate=0.5, evaluations=1, evaluation_noise=1e-9)
    value = p.release_evaluation(p.ledger().charge_round(1, p.evaluation_event()), [0.5] * 9 + [wild], Streams(0), 1)
    assert value == pytest.approx((4.5 + counted) / 10, abs=1e-6)


def test_rr_slot_parts_by_noisy_identifiers_and_takes_no_member_of_a_cluster_that_needs_it():
    p = plan(RRSlot, k=3, clients=20, rate=1.0, rebalance_min=6)
    contributions = p.contributions(2, draws=500)
    for row in range(20):
        contributions.add(row, row % 3, 0, np.zeros(2))
    drawn = p.perturb(contributions, np.random.default_rng(0), np.random.default_rng(1), np.eye(3))
    unmoved = plan(RRSlot, k=3, clients=20, rate=1.0).perturb(
        contributions, np.random.default_rng(0), np.random.default_rng(1), np.eye(3)
    )
    np.testing.assert_array_equal(unmoved.assigned, unmoved.scores.argmax(axis=-1))  # noisy ones alone decide
    before = (drawn.scores.argmax(axis=-1)[..., None] == np.arange(3)).sum(axis=1)
    after = (drawn.assigned[..., None] == np.arange(3)).sum(axis=1)
    assert (before < 6).any()
    assert (after >= 6).all()


@pytest.mark.parametrize("kind", PLANS.values(), ids=list(PLANS))
def test_terms_say_everything(kind):
    p = (
        NoPrivacy(clients=9, num_clusters=3, sampling_rate=0.5, rounds=2)
        if kind is NoPrivacy
        else plan(kind, noise=1.3, share=kind.default_identifier_share)
    )
    assert plan_from_terms(p.terms()) == p
    assert not [value for value in p.terms().values() if value == math.inf]


@pytest.mark.parametrize("spool", [0, 4 * 6 * 5 - 1, 4 * 6 * 5])
def test_collected_updates_are_the_same_in_a_file_as_in_memory(spool, monkeypatch):
    """Six slots of five numbers; slots 1 and 4 stay empty, and the others come in another order."""
    monkeypatch.setattr("coterie.privacy.contributions._SPOOL", spool)
    p = NoPrivacy(clients=10, num_clusters=3, sampling_rate=1.0, rounds=1)
    collected = p.collected(5, np.array([0, 2, 3, 5, 8, 9]))
    sent = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32) * 1e6  # nothing is clipped
    for slot in (5, 0, 3, 2):
        collected.add(slot, slot % 3, 0, sent[slot])
    released = p.release_each(p.ledger().charge_round(1, p.event()), collected)
    assert isinstance(released.updates, np.memmap) is (spool < 4 * 6 * 5)
    np.testing.assert_array_equal(released.updates, sent[[0, 2, 3, 5]])
    assert released.clients.tolist() == [0, 3, 5, 9]
    assert released.labels.tolist() == [0, 2, 0, 2]
    assert released.weights.tolist() == [1.0] * 4


def test_nobody_s_updates_are_none():
    p = NoPrivacy(clients=10, num_clusters=3, sampling_rate=1.0, rounds=1)
    released = p.release_each(p.ledger().charge_round(1, p.event()), p.collected(5, np.arange(10)))
    assert released.updates.shape == (0, 5)
    assert released.clients.shape == released.labels.shape == released.weights.shape == (0,)


def test_nothing_else_draws_noise():
    """``perturb`` skips the ledger: only ``release``, the audit and a plan of tests, which overrides it, call it.

    Only mechanisms call ``gaussian``, and what draws a client's own noise, after its charge.
    """
    names = ("banded", "joint", "rebalancing")
    mechanisms = {"privacy/plan.py", *(f"privacy/mechanisms/{name}.py" for name in names)}
    clients = {"client/dpsgd.py", "privacy/losses.py", "guard/watched_training.py"}
    callers = {
        "perturb": {"privacy/plan.py", "audit/mechanisms.py", "audit/streams.py", "testing/strategies.py"},
        "gaussian": mechanisms | clients,
    }
    found = {name: set() for name in callers}
    package = Path(__file__).parents[2] / "coterie"
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in callers:
                    found[name].add(path.relative_to(package).as_posix())
    assert found == callers


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"clients": 2}, "num clusters must be at most the number of clients, 2, not 3"),
        ({"accountant": "theorem-4.2"}, "the accountant of mechanism joint must be one of pld, rdp, not 'theorem-4.2'"),
        ({"rebalance_min": 101}, "rebalance-min must be at most qM/k = 100"),
        ({"rebalance_min": 2, "share": 0.0}, "identifier-share above 0"),
        ({"kind": RRSlot, "share": 0.0}, "identifier-share above 0"),
        ({"kind": RRSlot, "rebalance_min": 2.5}, "must be an integer"),
        ({"kind": Paper, "identifiers": "exponential"}, "rr-slot for exponential ones"),
        *[({"clip_norm": wrong}, "clipping norm must lie in") for wrong in (math.inf, math.nan, 0.0, 5e-324, 1e308)],
    ],
)
def test_plans_that_make_no_sense(change, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        plan(**change)


@pytest.mark.parametrize("kind", [Joint, RRSlot])
def test_a_shared_block_moves_by_what_a_client_sent_and_no_more(kind):
    """Two shared coordinates, then one of the cluster: clipped as one vector, the shared part summed over all."""
    p = plan(kind, noise=1e-6, share=0.5, k=2, clients=10, rate=1.0)
    contributions = p.contributions(3, shared=2)
    for slot in range(10):
        contributions.add(slot, int(slot < 4), int(slot < 4), [3.0, 0.0, 4.0])
    released = p.release(p.ledger().charge_round(1, p.event()), contributions, Streams(0), 1)
    sent = p.clip_norm * np.array([0.6, 0.0, 0.8])
    expected = [[*10 * sent[:2], 6 * sent[2]], [*10 * sent[:2], 4 * sent[2]]]
    np.testing.assert_allclose(released.sums, expected, atol=1e-4)
    assert released.cohort == pytest.approx(10)


def test_a_shared_block_is_noised_once_at_the_scale_of_a_cluster_s():
    p = plan(Joint, noise=2.0, share=0.2, k=4)
    drawn = [
        p.release(p.ledger().charge_round(1, p.event()), p.contributions(600, shared=300), Streams(0), attempt).sums
        for attempt in range(8)
    ]
    for sums in drawn:
        np.testing.assert_array_equal(sums[:, :300], np.repeat(sums[:1, :300], 4, axis=0))
    scale = p.noise_multiplier_updates * p.clip_norm
    assert np.std([s[0, :300] for s in drawn]) == pytest.approx(scale, rel=5 / math.sqrt(2 * 2400))
    assert np.std([s[:, 300:] for s in drawn]) == pytest.approx(scale, rel=5 / math.sqrt(2 * 9600))


def test_the_paper_s_identifiers_can_be_left_uncharged_and_the_certificate_says_so():
    numbers = {"clients": 1000, "num_clusters": 4, "sampling_rate": 0.1, "rounds": 100, "clip_norm": 0.3, "delta": 1e-3}
    charged = Paper.calibrated(epsilon=8.0, identifier_share=0.2, **numbers)
    uncharged = PaperUncharged.calibrated(epsilon=8.0, **numbers)
    assert uncharged.noise_multiplier_counts == 1.0
    assert uncharged.noise_multiplier_updates == uncharged.noise_multiplier == charged.noise_multiplier
    assert charged.noise_multiplier_counts > 2.9  # what a share of the budget buys
    extra = set(uncharged.statement.reasons) - set(charged.statement.reasons)
    assert extra == {"identifiers have noise of deviation 1 outside the budget"}
    assert plan_from_terms(uncharged.terms()) == uncharged
    contributions = uncharged.contributions(1, draws=2000)
    for slot in range(100):
        contributions.add(slot, 2, 0, [0.0])
    drawn = uncharged.perturb(contributions, *(np.random.default_rng(i) for i in (0, 1)), np.eye(4))
    assert np.std(drawn.scores - [0, 0, 1, 0]) == pytest.approx(1, rel=0.01)
    with pytest.raises(PrivacyError, match=r"set identifier-share to 0, not 0\.2"):
        PaperUncharged.calibrated(epsilon=8.0, identifier_share=0.2, **numbers)


def test_logs_show_what_is_no_default_and_one_of_many_plans():
    assert str(plan()).startswith("Joint(rounds=")
    assert "divisor" not in str(plan())
    client = RecordPlan.calibrated(num_examples=600, batch_size=30, rounds=10, epsilon=5.0, delta=1e-4)
    federation = RecordLevel.of((client,) * 1000, clients=1000, num_clusters=2, weights="examples")
    assert "client_plans=(RecordPlan(" in str(federation)
    assert "and 999 more" in str(federation)
    assert len(str(federation)) < 500
