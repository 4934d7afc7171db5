"""The search for the number of clusters: thresholds by hand, released values alone, resume, and bad input."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
from kit.toy_grids import Kept
from kit.toys import UP
from test_toy import APART, plan, train

from coterie.privacy import Joint, Streams
from coterie.server import ConfigError, RunConfig
from coterie.strategies import IFCA, Averaging, StrategyError
from coterie.strategies import model_search as search
from coterie.strategies.model_search import Found

RNG = np.random.default_rng
MODELS = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
COHORT = 100.0


def found(sizes, splits=(0, 0, 0, 0)):
    k = len(MODELS)
    return Found(MODELS, np.array(sizes, float), np.array(splits, float), [], np.arange(k), np.ones(k))


def test_the_schedule_ends_after_seven_tenths_of_the_rounds():
    due = {t: search.action(t, 100) for t in range(1, 101) if search.action(t, 100)}
    assert list(due) == list(range(5, 75, 5))
    assert list(due.values()) == list(search.SCHEDULE)
    assert [t for t in range(1, 21) if search.action(t, 20)] == list(range(1, 15))


def test_sizes_are_the_mean_of_a_window_and_the_next_window_begins_at_zero():
    numbers = replace(plan("joint", 4, rounds=40), clients=100)  # windows of two rounds
    state = {"other": np.ones(1)}
    for histogram in ([50, 2, 25, 20], [52, 4, 25, 22]):
        state = search.observe(state, np.array(histogram, float))
    outcome, after = search.search(search.REMOVE, MODELS, state, numbers, 4, RNG(0))
    np.testing.assert_array_equal(outcome.sizes, [51, 25, 21])  # 3 < 0.04 * 100
    np.testing.assert_array_equal(outcome.models, MODELS[[0, 2, 3]])
    np.testing.assert_array_equal(after[search._SUMS], np.zeros(3))
    np.testing.assert_array_equal(after["other"], [1])


def test_an_idle_model_becomes_a_copy_of_the_largest_that_was_split_least():
    outcome = search.reseeded(found([50, 3.9, 30, 4.1], [1, 0, 0, 0]), COHORT, RNG(0))
    assert outcome.moves == [(2, 1)]  # 30 / 1 exceeds 50 / 2; 4.1 is not idle
    np.testing.assert_array_equal(outcome.splits, [1, 1, 1, 0])
    np.testing.assert_array_equal(outcome.models[[0, 3]], MODELS[[0, 3]])
    np.testing.assert_allclose((outcome.models[1] + outcome.models[2]) / 2, MODELS[2], rtol=1e-5)
    apart = np.linalg.norm(outcome.models[1] - outcome.models[2]) / 2
    assert apart == pytest.approx(0.3 * np.linalg.norm(MODELS[2]), rel=1e-5)


def test_every_model_names_its_origin_and_how_much_it_shrank():
    reseeded = search.reseeded(found([50, 3, 30, 10]), COHORT, RNG(0))
    np.testing.assert_array_equal(reseeded.origins, [0, -1, 2, 3])
    pruned = search.shrunk(search.without_idle(found([30, 3, 50, 10]), COHORT))
    np.testing.assert_array_equal(pruned.origins, [0, 2, 3])
    np.testing.assert_allclose(pruned.factors, [0.85, 1, 0.7])
    np.testing.assert_allclose(pruned.models, MODELS[[0, 2, 3]] * pruned.factors[:, None], rtol=1e-6)
    split = search.split(search.without_idle(found([50, 3, 30, 10]), COHORT), 5, RNG(0))
    np.testing.assert_array_equal(split.origins, [0, 2, 3, -1, -1])
    np.testing.assert_array_equal(split.factors, np.ones(5))


def test_a_small_group_is_kept_and_an_idle_model_removed():
    np.testing.assert_array_equal(search.without_idle(found([50, 10, 3, -2]), COHORT).models, MODELS[:2])
    np.testing.assert_array_equal(search.without_idle(found([-5, -1, -3, -2]), COHORT).models, MODELS[[1]])


def test_pruning_shrinks_by_rank_and_spares_the_largest():
    outcome = search.shrunk(found([20, 50, 10, 15]))
    np.testing.assert_allclose(outcome.models, MODELS * np.array([[0.9], [1], [0.7], [0.8]]), rtol=1e-6)


@pytest.mark.parametrize(("most", "moves"), [(8, [(1, 4), (0, 5), (3, 6), (2, 7)]), (5, [(1, 4)]), (4, [])])
def test_a_split_adds_copies_of_the_largest_up_to_the_maximum(most, moves):
    outcome = search.split(found([20, 50, 10, 15], [1, 2, 3, 4]), most, RNG(0))
    assert outcome.moves == moves
    assert len(outcome.models) == 4 + len(moves) <= most
    assert not outcome.splits.any()
    for s, copy in moves:
        np.testing.assert_allclose((outcome.models[s] + outcome.models[copy]) / 2, MODELS[s], rtol=1e-5)


def test_a_shrunk_copy_of_a_model_loses_its_clients_and_the_groups_remain():
    """Models 0 and 1 serve group 0, model 2 group 1, and model 3 is idle: 4 models for 2 groups."""
    start = np.stack([9 * UP, 8 * UP, -8 * UP, 0 * UP])
    options = {"rounds": 20, "clusters": 0, "evaluate_every": 20}
    models, result, _, strategy = train(IFCA, plan("none", 4, rounds=20), start, **options)
    assert len(models) == strategy.plan.num_clusters == 2
    assert sorted(np.sign(models @ UP)) == [-1, 1]
    assert result.evaluate_metrics_clientapp[20]["groups_found"] == 2
    np.testing.assert_array_equal(sorted(strategy.histogram), [4, 4])


def test_without_shrinking_no_size_tells_copies_apart(monkeypatch):
    """Two equally good copies: the clients of a group need a reason to leave one of them."""
    sizes = found([25, 25, 25, 25])
    assert len(search.without_idle(sizes, COHORT).models) == 4
    norms = np.linalg.norm(search.shrunk(sizes).models, axis=1) / np.linalg.norm(MODELS, axis=1)
    assert len(set(norms.round(4))) == 4  # ties are broken, so that any two copies differ


def test_decisions_follow_from_released_sizes_and_public_numbers_alone():
    """A search that is replayed from the released histograms of a noisy run finds the same numbers of models."""
    recorder = Kept()
    numbers = plan("joint", 4, rounds=20, noise=0.4)
    start = np.stack([APART[0], APART[1], APART[0] / 2, APART[1] / 2])
    strategy = train(IFCA, numbers, start, rounds=20, clusters=0, recorder=recorder, evaluate_every=0)[-1]
    histograms = [np.array(line["histogram"]) for line in recorder.lines]
    lines = list(zip(histograms, [len(state.models) for state in recorder.states], strict=True))
    assert strategy.plan == replace(numbers, num_clusters=lines[-1][1])
    assert len({many for _, many in lines}) > 1
    models, state = np.ones((4, 4), np.float32), {}
    for number, (histogram, many) in enumerate(lines, 1):
        state = search.observe(state, histogram)
        if action := search.action(number, 20):
            outcome, state = search.search(action, models, state, numbers, 4, RNG(0))
            models = outcome.models
        assert len(models) == many
    arguments = inspect.signature(search.search).parameters
    assert list(arguments) == ["action", "models", "state", "plan", "max_clusters", "rng"]


def test_the_event_of_a_round_does_not_depend_on_the_number_of_clusters():
    numbers = plan("joint", 4, rounds=20)
    for k in (1, 2, 8):
        resized = replace(numbers, num_clusters=k)
        assert resized.event() == numbers.event()
        assert resized.noise_multiplier_updates == numbers.noise_multiplier_updates


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"rebalance_min": 1}, {}, "rebalance-min = 0"),
        ({"identifier_share": 0.0}, {}, "identifier-share above 0"),
        ({"num_clusters": 1}, {}, "at least 2 clusters"),
        ({"rounds": 19}, {}, "at least 20 rounds, not 19"),
        ({}, {"averaging": Averaging(0.4)}, "average-last = 0.4 must be at most 0.3"),
    ],
)
def test_plans_that_do_not_support_a_search_are_refused(changes, options, message):
    numbers = replace(plan("joint", 4, rounds=20), **changes)
    with pytest.raises(StrategyError, match=message):
        IFCA(numbers, clusters=0, streams=Streams(0), **options)


def test_mechanisms_whose_proof_does_not_cover_it_are_refused():
    with pytest.raises(StrategyError, match="requires mechanism joint, banded or secure, or no privacy, not rr-slot"):
        IFCA(plan("rr-slot", 4, rounds=20), clusters=0)
    assert Joint.resizes
    assert IFCA(plan("banded", 4, rounds=20), clusters=0).searching


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max-clusters": 6}, "max-clusters = 6 has no effect"),
        ({"strategy": "fedcam", "clusters": 0}, "fedcam does not determine the number of clusters"),
        ({"strategy": "fesem", "clusters": 0}, "fesem does not determine the number of clusters"),
        ({"strategy": "rr-cluster", "clusters": 0}, "rr-cluster does not determine the number of clusters"),
        ({"strategy": "fesem", "max-clusters": 6}, "max-clusters = 6 has no effect"),
        ({"clusters": 0, "max-clusters": 1}, "max-clusters = 1: must be 'auto' or an integer, at least 2"),
        ({"clusters": 0, "max-clusters": 600}, "max-clusters = 600 exceeds the number of clients"),
        ({"clusters": 0, "reseed-every": 0}, "reseed-every = 0 with clusters = 0"),
        ({"clusters": 0, "mechanism": "rr-slot"}, "not rr-slot"),
    ],
)
def test_bad_settings(values, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(values)


def test_the_configuration_of_a_search():
    config = RunConfig({"clusters": 0, "max-clusters": 6})
    assert config.models == config.plan.num_clusters == 6
    assert config.plan.identifier_share == 0.1
    assert config.reseeding is None
    assert RunConfig({"clusters": 0}).models == 8
    assert RunConfig({"clusters": 0, "clients": 5, "sampling-rate": 1.0}).models == 5
