"""Robust aggregation: rules against plain oracles, what dishonest clients can do, and where it is refused."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kit.toy_grids import Kept, quiet
from kit.toys import UP
from scipy.stats import trim_mean
from test_base import CLIENTS, LAYOUT, ZERO, Stub, nothing, private

from coterie.privacy import Joint, RecordLevel, RecordPlan, ReleasedUpdates, RRSlot
from coterie.rounds import aggregation
from coterie.rounds.aggregation import krum, krum_scores, median, multi_krum, trimmed_mean
from coterie.server import ConfigError, RunConfig
from coterie.strategies import AGGREGATORS, IFCA, Aggregator, FedAvg, StrategyError
from coterie.strategies.registry import STRATEGIES
from coterie.wire.messages import pack_models, pack_update, unpack_models

ROBUST = [name for name in AGGREGATORS if name != "mean"]
MAX_FILE_BYTES = float(np.finfo(np.float32).max)
FINITE = st.floats(-MAX_FILE_BYTES, MAX_FILE_BYTES, width=32)


@st.composite
def cohorts(draw):
    """(honest, dishonest) updates, the latter any finite ones and fewer than the former."""
    byzantine = draw(st.integers(0, 3))
    honest = draw(st.integers(byzantine + 1, 6)), draw(st.integers(1, 4))
    near = st.floats(-1, 1, width=32)
    return (
        draw(arrays(np.float32, honest, elements=near)),
        draw(arrays(np.float32, (byzantine, honest[1]), elements=FINITE | st.just(np.float32(1e30)))),
    )


# ---- the rules -----------------------------------------------------------------------------------------------


@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-100, 100, width=32)))
def test_coordinate_wise_rules_are_those_of_numpy_and_scipy(updates):
    n = len(updates)
    np.testing.assert_allclose(median(updates), np.median(updates.astype(float), axis=0), atol=1e-12)
    for byzantine in range((n - 1) // 2 + 1):
        expected = trim_mean(updates.astype(float), byzantine / n + 1e-9, axis=0)
        np.testing.assert_allclose(trimmed_mean(updates, byzantine), expected, atol=1e-9)


@given(
    arrays(np.float32, st.tuples(st.integers(3, 9), st.integers(1, 4)), elements=st.floats(-100, 100, width=32)),
    st.data(),
)
def test_krum_is_that_of_a_plain_loop(updates, data):
    n, every = len(updates), updates.astype(float)
    byzantine = data.draw(st.integers(0, (n - 3) // 2))
    scores = []
    for i in range(n):
        distances = sorted(float(((every[i] - every[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - byzantine - 2]))
    np.testing.assert_allclose(krum_scores(updates, byzantine), scores, rtol=1e-9, atol=1e-9)
    order = np.sort(scores)
    if n > 1 and order[1] > order[0] * (1 + 1e-6) + 1e-6:  # no tie
        np.testing.assert_array_equal(krum(updates, byzantine), updates[np.argmin(scores)])
    if byzantine and order[n - byzantine] > order[n - byzantine - 1] * (1 + 1e-6) + 1e-6:
        chosen = np.argsort(scores)[: n - byzantine]
        np.testing.assert_allclose(multi_krum(updates, byzantine), every[chosen].mean(axis=0), atol=1e-9)


@pytest.mark.parametrize("name", ROBUST)
@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=FINITE), st.data())
def test_the_order_of_clients_does_not_matter_and_nothing_overflows(name, updates, data):
    shuffled = updates[data.draw(st.permutations(range(len(updates))))]
    found = Aggregator(name)(updates)
    np.testing.assert_array_equal(found, Aggregator(name)(shuffled))
    assert np.isfinite(found).all()


@given(cohorts(), st.data())
def test_dishonest_clients_leave_the_range_of_the_honest_in_no_coordinate(cohort, data):
    honest, dishonest = cohort
    updates = np.concatenate([honest, dishonest])[data.draw(st.permutations(range(len(honest) + len(dishonest))))]
    for found in (median(updates), trimmed_mean(updates, len(dishonest))):
        assert (found >= honest.min(axis=0) - 1e-12).all()
        assert (found <= honest.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("rule", [krum, multi_krum])
@pytest.mark.parametrize("collusion", [True, False])
@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.sampled_from([10.0, 1e4, 1e30, MAX_FILE_BYTES]))
def test_krum_takes_honest_updates_alone_where_they_are_close_together(rule, collusion, byzantine, seed, magnitude):
    rng = np.random.default_rng(seed)
    honest = (0.01 * rng.uniform(-1, 1, (byzantine + 3, 5))).astype(np.float32)
    away = np.full((byzantine, 5), magnitude, np.float32)
    if not collusion:
        away *= rng.choice([-1, 1], (byzantine, 5)).astype(np.float32)
    updates = rng.permutation(np.concatenate([honest, away]))
    assert np.abs(rule(updates, byzantine)).max() <= 0.01
    if rule is krum:
        assert (krum(updates, byzantine) == honest).all(axis=1).any()


def test_blocks_of_columns_make_no_difference(monkeypatch):
    updates = np.random.default_rng(0).standard_normal((7, 23)).astype(np.float32)
    whole = {name: Aggregator(name)(updates) for name in ROBUST}
    monkeypatch.setattr(aggregation, "_CHUNK", 21)  # three columns
    for name in ROBUST:
        np.testing.assert_allclose(Aggregator(name)(updates), whole[name], rtol=1e-12)


def test_how_many_dishonest_updates_are_assumed():
    expected = {"trimmed-mean": [0, 0, 1, 1, 2, 3, 6], "krum": [0, 0, 0, 0, 1, 2, 6]}
    for name, counts in expected.items():
        assert [Aggregator(name, 0.3).byzantine(n) for n in (1, 2, 3, 4, 5, 7, 20)] == counts
    assert Aggregator("krum", 0.2).byzantine(10) == 2  # a share of exactly two of ten
    assert Aggregator("trimmed-mean", 0.0).byzantine(10) == 0


def test_without_dishonest_clients_to_remove_trimmed_mean_and_multi_krum_are_the_mean():
    updates = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    for name in ("trimmed-mean", "multi-krum"):
        np.testing.assert_allclose(Aggregator(name, 0.0)(updates), updates.mean(axis=0, dtype=float), rtol=1e-12)


@pytest.mark.parametrize("name", ROBUST)
def test_small_clusters(name):
    one, two = np.array([[1.0, 2.0]], np.float32), np.array([[1.0, 2.0], [3.0, 0.0]], np.float32)
    np.testing.assert_array_equal(Aggregator(name, 0.4)(one), one[0])
    np.testing.assert_array_equal(Aggregator(name, 0.4)(two), [2.0, 1.0])  # nothing tells them apart


# ---- clusters ------------------------------------------------------------------------------------------------


def collected(updates, assigned, labels=None):
    n = len(updates)
    return ReleasedUpdates(
        charge=1,
        epsilon=math.inf,
        clients=np.arange(n),
        labels=np.asarray(labels or assigned, np.int64),
        assigned=np.asarray(assigned, np.int64),
        weights=np.ones(n),
        updates=np.asarray(updates, np.float32).reshape(n, 2),
    )


def test_each_cluster_has_its_own_and_one_without_updates_stays():
    updates = [[1, 1], [2, 2], [9, 9], [5, 5]]
    found = Aggregator("median").aggregated(collected(updates, [0, 0, 0, 2]), 3)
    np.testing.assert_array_equal(found.sums / found.divisors[:, None], [[2, 2], [0, 0], [5, 5]])
    assert found.histogram is None
    nobody = Aggregator("median").aggregated(collected([], []), 3, shared=1)
    np.testing.assert_array_equal(nobody.sums, np.zeros((3, 2)))


def test_counts_are_of_the_chosen_clusters_and_updates_of_the_redrawn_ones():
    found = Aggregator("median").aggregated(collected([[1, 1], [2, 2]], [2, 2], [0, 1]), 3, counts=True)
    np.testing.assert_array_equal(found.histogram, [1, 1, 0])
    np.testing.assert_array_equal(found.sums, [[0, 0], [0, 0], [1.5, 1.5]])


def test_what_clusters_share_is_aggregated_over_the_cohort():
    found = Aggregator("median").aggregated(collected([[1, 1], [2, 2], [9, 9], [5, 5]], [0, 0, 1, 2]), 3, shared=1)
    np.testing.assert_array_equal(found.sums, [[3.5, 1.5], [3.5, 9], [3.5, 5]])


# ---- runs ----------------------------------------------------------------------------------------------------


def hostile(*attackers, scale=-1e17):
    def spoil(client, content):
        if client in attackers:
            content["update"] = pack_update((scale * UP).astype(np.float32), LAYOUT)
        return [content]

    return Stub(spoil)


def moved(grid, aggregator=None, plan=None, method=FedAvg, rounds=1, **options):
    strategy = method(plan or nothing(), aggregator=aggregator or Aggregator(), **quiet(**options))
    k = strategy.plan.num_clusters
    return unpack_models(strategy.start(grid, pack_models(np.zeros((k, 4), np.float32), LAYOUT), rounds).arrays)[0]


@pytest.mark.parametrize("name", ROBUST)
def test_two_of_eight_clients_ruin_the_mean_and_nothing_else(name):
    assert np.abs(moved(hostile(2, 5))).max() > 1e16
    np.testing.assert_allclose(moved(hostile(2, 5), Aggregator(name, 0.25)), [UP], rtol=1e-6)
    np.testing.assert_allclose(moved(hostile(2, 5, scale=-1), Aggregator(name, 0.25)), [UP], rtol=1e-6)
    np.testing.assert_allclose(moved(hostile(2, 5, scale=-1)), [UP / 2], rtol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
def test_clusters_without_clients_keep_their_model_and_rounds_have_exact_counts(name):
    plan, recorder = nothing(num_clusters=2, rounds=2), Kept()
    models = moved(Stub(), Aggregator(name), plan, IFCA, rounds=2, recorder=recorder)
    np.testing.assert_allclose(models, [2 * UP, 0 * UP], rtol=1e-6)  # the stub's label is 0
    assert [line["histogram"] for line in recorder.lines] == [[CLIENTS, 0.0]] * 2


def test_at_record_level_the_server_may_take_a_median_of_private_replies():
    for aggregator, expected in ((Aggregator("median"), UP), (Aggregator(), UP / 2)):
        one = RecordPlan(num_examples=4, batch_size=4, rounds=1, epsilon=1e6, delta=1e-5, noise_multiplier=1.0)
        level = RecordLevel.of((one,), clients=CLIENTS, num_clusters=1, weights="examples")
        strategy = FedAvg(level, aggregator=aggregator, **quiet())
        grid = hostile(2, 5, scale=-1.0)
        result = strategy.start(grid, ZERO, 1, train_config=ConfigRecord({"lr": 0.5}))
        np.testing.assert_allclose(unpack_models(result.arrays)[0], [expected], rtol=1e-6)
        assert strategy.statistics.accepted == CLIENTS
        assert len(strategy.ledger.charges) == 1


# ---- refusals ------------------------------------------------------------------------------------------------

AT_CLIENT_LEVEL = r"aggregator = {} requires privacy-unit record or none: .*sum, which clipping bounds by C.*; use mean"


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("mechanism", [Joint, RRSlot])
def test_client_level_sums_take_no_other_aggregator(name, mechanism):
    with pytest.raises(StrategyError, match=AT_CLIENT_LEVEL.format(name)):
        FedAvg(private(mechanism=mechanism), aggregator=Aggregator(name))
    with pytest.raises(ConfigError, match=AT_CLIENT_LEVEL.format(name)):
        RunConfig({"aggregator": name, "mechanism": mechanism.mechanism, "epsilon": 100, "rounds": 3})
    FedAvg(private(mechanism=mechanism), aggregator=Aggregator())


ROBUST_METHODS = ("fedavg", "fedprox", "fedper", "ifca", "fesem", "fedcam", "rr-cluster")
ROBUST_METHODS += ("lcfl", "rc-dpfl", "f-cdpfl", "oracle")


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_methods_that_do_not_step_by_clusters_refuse_by_name(name):
    shape = {"strategy": name, "privacy-unit": "none", "aggregator": "median", "rounds": 3}
    if name in ("ppfc-gan", "kfed", "ffcm"):
        shape["dataset"] = "digits"
    if name in ROBUST_METHODS:
        assert RunConfig(shape).aggregator == Aggregator("median", 0.2)
        return
    with pytest.raises(ConfigError, match=f"{name} supports aggregator mean, not median"):
        RunConfig(shape)


# ---- weights by numbers of records ---------------------------------------------------------------------------


def counting(records):
    """Client i replies with a number of records, and an update of i + 1 in every coordinate."""

    def spoil(client, content):
        content["update"] = pack_update(np.full(4, client + 1, np.float32), LAYOUT)
        if (number := records(client)) is not None:
            content["reply"]["records"] = number
        return [content]

    return Stub(spoil)


@pytest.mark.parametrize("method", [FedAvg, IFCA])
def test_the_mean_is_weighted_by_numbers_of_records(method):
    weights = 10 ** np.arange(CLIENTS)
    expected = np.average(np.arange(CLIENTS) + 1, weights=weights)
    grid, by_records = counting(lambda client: 10**client), Aggregator(by_records=True)
    np.testing.assert_allclose(moved(grid, by_records, method=method), np.full((1, 4), expected), rtol=1e-6)
    np.testing.assert_allclose(moved(grid, method=method), np.full((1, 4), 4.5), rtol=1e-6)  # numbers without effect


def test_weights_are_those_of_the_own_cluster_and_shared_columns_have_all():
    released = replace(collected([[1, 1], [4, 4], [9, 9]], [0, 0, 1]), weights=np.array([1.0, 2.0, 3.0]))
    found = Aggregator(by_records=True).aggregated(released, 3, shared=1)
    np.testing.assert_allclose(found.sums, [[6, 3], [6, 9], [6, 0]])


@pytest.mark.parametrize("number", [None, 0, -1, 10**9 + 1, 1e308, math.nan, 5.0, True, "5", [5]])
def test_a_number_of_records_that_is_none_drops_the_reply(number):
    grid = counting(lambda client: number if client == 7 else 10)
    np.testing.assert_allclose(moved(grid, Aggregator(by_records=True)), np.full((1, 4), 4.0), rtol=1e-6)


def test_numbers_of_records_are_asked_for_without_privacy_alone():
    values = {"strategy": "fedavg", "clusters": 1, "privacy-unit": "none", "weights": "records"}
    assert RunConfig(values).aggregator == Aggregator(by_records=True)
    assert not RunConfig({**values, "weights": "equal"}).aggregator.collects
    for changes, text in (
        ({"privacy-unit": "record", "samples-per-client": 100}, "true numbers of records are private"),
        ({"privacy-unit": "client"}, "weights = 'records' has no effect with privacy.privacy-unit = 'client'"),
        ({"aggregator": "krum"}, "requires privacy-unit none, aggregator mean"),
        ({"divisor": "fixed"}, "divisor auto"),
        ({"strategy": "kfed", "clusters": 2}, "a method whose models change by aggregated updates only"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            RunConfig({**values, **changes})
    with pytest.raises(StrategyError, match="requires privacy-unit none"):
        moved(Stub(), Aggregator(by_records=True), private())


def test_settings():
    none = {"privacy-unit": "none"}
    config = RunConfig({**none, "aggregator": "krum:0.3"})
    assert config.aggregator == Aggregator("krum", 0.3)
    for values, text in (
        ({"aggregator": "medain"}, "did you mean 'median'"),
        ({"aggregator": "krum:0.5"}, "aggregator = 'krum:0.5': must be mean, median"),
        ({"aggregator": "krum:nan"}, "aggregator = 'krum:nan': must be mean, median"),
        ({"aggregator": "krum:"}, "aggregator = 'krum:': must be mean, median"),
        ({"aggregator": "median", "divisor": "fixed"}, "median does not use a divisor: set divisor to auto"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            RunConfig({**none, **values})
