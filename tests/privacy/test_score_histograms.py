"""What one client can do to a histogram of scores, and what a plan charges for it."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.tables import for_rows

from coterie.privacy import Banded, Joint, LedgerError, RRSlot, Streams, epsilon
from coterie.privacy.score_histograms import (
    BINS,
    CELLS,
    EDGES,
    NORM,
    count_outputs,
    count_scores,
    sum_of_clients,
    unit_counts,
)

NUMBERS = {"clients": 200, "num_clusters": 1, "sampling_rate": 1.0, "rounds": 10, "clip_norm": 1.0, "delta": 1e-4}
COUNTS = st.lists(st.one_of(st.integers(0, 10**9), st.floats()), min_size=CELLS, max_size=CELLS)


@pytest.mark.slow
@given(COUNTS, COUNTS)
@example([1e6] + [0.0] * 63, [-1e6] + [0.0] * 63)
@example([1e6] + [0.0] * 63, [0.0] * 63 + [1e6])
@settings(max_examples=200)
def test_one_client_moves_the_sum_by_at_most_its_norm(counts, replacement):
    others = [np.ones(CELLS), np.arange(CELLS)]
    base = sum_of_clients(others)
    one, other = sum_of_clients([*others, counts]), sum_of_clients([*others, replacement])
    assert np.linalg.norm(one - base) <= 1 + 1e-9
    assert np.linalg.norm(one - other) <= math.sqrt(2) + 1e-9


@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=40), st.tuples(st.floats(), st.booleans()))
@settings(max_examples=200)
def test_a_record_is_counted_once(records, further):
    before, after = (
        count_scores([score for score, _ in some], [int(label) for _, label in some])
        for some in (records, [*records, further])
    )
    assert before.sum() == len(records)
    assert sorted(after - before) == [0.0] * (CELLS - 1) + [1.0]


@for_rows(
    "counts", [None, "many", [1.0], [[1.0] * CELLS], [math.nan] * CELLS, [-1.0] * CELLS, [math.inf] + [0.0] * 63, [{}]]
)
def test_what_is_no_count_adds_nothing(counts):
    assert not unit_counts(counts).any()


def test_few_records_are_not_clipped_and_many_are():
    few = np.zeros(CELLS)
    few[[3, BINS + 3]] = 1.0
    np.testing.assert_allclose(unit_counts(few)[[3, BINS + 3]] * NORM, [1.0, 2.0])
    assert np.linalg.norm(unit_counts(1000 * few)) == pytest.approx(1.0, abs=1e-5)


def test_the_edges_are_public_numbers_in_order():
    assert len(EDGES) == BINS - 1
    assert (np.diff(EDGES) > 0).all()
    np.testing.assert_allclose(EDGES, -EDGES[::-1], atol=1e-12)


@pytest.mark.parametrize("kind", [Joint, Banded, RRSlot])
def test_a_histogram_costs_its_share_and_all_together_the_budget(kind):
    with_it = kind.calibrated_with_histogram(0.05, **NUMBERS, epsilon=8.0, evaluations=1, evaluation_noise=0.05)
    rest = Counter(with_it.planned()) - Counter({with_it.histogram_event(): 1})
    clients_rest = kind.calibrated(**NUMBERS, epsilon=7.6, evaluations=1, evaluation_noise=0.05)
    assert with_it.noise_multiplier == clients_rest.noise_multiplier
    assert rest == clients_rest.planned()
    assert 7.9 < with_it.cost() <= 8.0
    assert 7.5 < clients_rest.cost() <= 7.6
    assert with_it.expected([], with_it) == with_it.planned()


def test_a_plan_without_a_histogram_has_the_terms_of_older_ledgers():
    terms = Joint(noise_multiplier=1.0, **NUMBERS, epsilon=8.0).terms()
    assert {"histograms", "histogram_noise"}.isdisjoint(terms)
    assert Joint(noise_multiplier=1.0, **NUMBERS, epsilon=8.0, histograms=1).terms()["histograms"] == 1


@pytest.mark.parametrize(("kind", "factor"), [(Joint, 1.0), (RRSlot, math.sqrt(2))])
def test_the_noise_is_the_planned_one(kind, factor):
    plan = kind(noise_multiplier=1.0, **NUMBERS, epsilon=8.0, histograms=1, histogram_noise=3.0)
    drawn = []
    for attempt in range(50):
        permit = plan.ledger().charge_round(1, plan.histogram_event())
        histogram = plan.release_histogram(permit, {}, Streams(0), attempt)
        drawn.append(histogram.counts / histogram.deviations[:, None])
        assert histogram.deviations.tolist() == pytest.approx([3 * NORM * factor, 1.5 * NORM * factor])
    assert np.std(drawn) == pytest.approx(1.0, rel=4 / math.sqrt(2 * np.size(drawn)))


def test_a_permit_is_for_one_histogram():
    plan = Joint(noise_multiplier=1.0, **NUMBERS, epsilon=8.0, histograms=1)
    ledger = plan.ledger()
    permit = ledger.charge_round(1, plan.histogram_event())
    plan.release_histogram(permit, {}, Streams(0), 1)
    with pytest.raises(LedgerError, match="already used"):
        plan.release_histogram(permit, {}, Streams(0), 2)
    with pytest.raises(LedgerError, match="not for"):
        plan.release_histogram(ledger.charge_round(1, plan.event()), {}, Streams(0), 1)
    assert epsilon(ledger.events, plan.delta) > 0


# ---- several classes --------------------------------------------------------------------------------------


@given(st.integers(3, 10), st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 1e3, 1e8]))
@settings(max_examples=100)
def test_one_client_moves_histograms_of_classes_by_at_most_their_norm(classes, seed, size):
    rng = np.random.default_rng(seed)
    others = [rng.integers(3, size=classes * CELLS) for _ in range(3)]
    first, second = (size * rng.integers(3, size=classes * CELLS) for _ in range(2))
    base, one, other = (sum_of_clients([*others, *more], classes) for more in ([], [first], [second]))
    assert np.linalg.norm(one - base) <= 1 + 1e-9
    assert np.linalg.norm(one - other) <= math.sqrt(2) + 1e-9


@pytest.mark.parametrize("classes", [3, 10])
def test_a_record_is_counted_once_for_each_class(classes):
    rng = np.random.default_rng(0)
    outputs, labels = 3 * rng.normal(size=(50, classes)), rng.integers(classes, size=50)
    counts = count_outputs(outputs, labels).reshape(classes, 2, BINS)
    assert (counts.sum(axis=(1, 2)) == 50).all()
    np.testing.assert_array_equal(counts[:, 1].sum(axis=1), np.bincount(labels, minlength=classes))
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    for c in range(classes):
        expected = count_scores(np.log(shares[:, c] / (1 - shares[:, c])), labels == c)
        np.testing.assert_array_equal(counts[c].ravel(), expected)
    np.testing.assert_array_equal(
        count_outputs(outputs[:, :2], labels == 1), count_scores(outputs[:, 1] - outputs[:, 0], labels == 1)
    )
    assert count_outputs(np.full((4, classes), np.nan), np.zeros(4)).sum() == 4 * classes


def test_counts_of_another_number_of_classes_add_nothing():
    assert not unit_counts([1.0] * CELLS, 3).any()
    assert not unit_counts([1.0] * (3 * CELLS)).any()
    assert unit_counts([1.0] * (3 * CELLS), 3).any()


def test_the_terms_of_two_classes_are_those_of_older_ledgers():
    plan = Joint.calibrated_with_histogram(0.05, **NUMBERS, epsilon=8.0)
    assert "histogram_classes" not in plan.terms()
    several = Joint.calibrated_with_histogram(0.05, **NUMBERS, epsilon=8.0, histogram_classes=3)
    assert several.terms()["histogram_classes"] == 3
    assert several.histogram_noise == plan.histogram_noise
