"""CFL on clients whose optima are known: FedAvg goes to their mean, and what is left pulls each to its own."""

import itertools
import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from kit.toy_grids import Answering, Kept, quiet, reply_to
from kit.toys import strategy_of

from coterie.privacy import Joint, NoPrivacy
from coterie.strategies import CFL, StrategyError
from coterie.strategies.cfl import bipartition
from coterie.strategies.registry import STRATEGIES
from coterie.wire.messages import Layout, pack_models, unpack_models

LAYOUT = Layout(("w",), ((4,),))
FOUR = 10 * np.eye(4)[np.arange(12) % 4]  # clients 0, 4, 8 have one optimum, 1, 5, 9 another, ...
THREE = np.array([[4.0, 0, 0, 0]] * 3 + [[-12.0, 0, 0, 0]])  # three clients against one, whose mean update is 0
HALF = 0.5  # of the way to its optimum that a client goes in a round


def near(optima, seed=0, spread=0.3):
    """The same clients, each a little off its group's optimum."""
    return optima + spread * np.random.default_rng(seed).standard_normal(optima.shape)


class Pulled(Answering):
    """Clients that go half of the way to their optimum; client i is here from ``since[i]`` questions for all on."""

    def __init__(self, optima, silent=lambda client, round: False, since=()):
        super().__init__(len(optima))
        self.optima, self.silent, self.since, self.round = optima, silent, dict(since), 0
        self.asked = []

    def get_node_ids(self):
        self.round += 1  # asked once before the first round, and before each
        return [i + 1 for i in range(len(self.optima)) if self.since.get(i, -1) < self.round - 1]

    def answers(self, client, message):
        models, _ = unpack_models(message.content["models"])
        config = message.content["config"]
        if message.metadata.message_type == "evaluate":
            said = {"accuracy": 1.0, "cluster": config["cluster"], "group": client % 4}
            return [RecordDict({"diagnostics": MetricRecord(said)})]
        self.asked.append((config["round"], client))
        if self.silent(client, config["round"]):
            return []
        assert len(models) == 1
        return [reply_to(message, HALF * config.get("lr", 1.0) * (self.optima[client] - models[0]), LAYOUT).content]


def run(optima, rounds=20, planned=None, grid=None, config=None, **options):
    kept = Kept()
    plan = NoPrivacy(clients=len(optima), num_clusters=1, sampling_rate=1.0, rounds=planned or rounds)
    strategy = strategy_of(CFL, plan, **quiet(recorder=kept, **{"first_split": 0, **options}))
    start = pack_models(np.zeros((1, 4), np.float32), LAYOUT)
    result = strategy.start(grid or Pulled(optima), start, rounds, train_config=ConfigRecord(config or {}))
    return unpack_models(result.arrays)[0], strategy, kept


def tree(kept):
    return next(line["notes"]["tree"] for line in reversed(kept.lines) if "tree" in line["notes"])


def leaves(kept):
    return sorted(node["clients"] for node in tree(kept) if node["why"] != "split")


GROUPS = [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


# ---- Equation (6) --------------------------------------------------------------------------------------------


def by_brute_force(similarities):
    n = len(similarities)
    halves = [np.array([0, *rest]) for rest in itertools.product((0, 1), repeat=n - 1) if any(rest)]
    return min(similarities[np.ix_(half == 0, half == 1)].max() for half in halves)


@pytest.mark.parametrize("n", range(2, 9))
def test_the_bipartition_is_the_best_of_all(n):
    rng = np.random.default_rng(n)
    for trial in range(30):
        similarities = rng.uniform(-1, 1, (n, n)) if trial % 3 else rng.integers(-2, 3, (n, n)) / 2  # with ties
        similarities = (similarities + similarities.T) / 2
        side, closest = bipartition(similarities)
        assert side[0] == 0
        assert set(side) == {0, 1}
        assert similarities[np.ix_(side == 0, side == 1)].max() == closest == by_brute_force(similarities)


# ---- a run ---------------------------------------------------------------------------------------------------


def test_the_first_rounds_are_fedavg_and_the_first_split_is_by_hand():
    models, _, kept = run(THREE, rounds=1)
    np.testing.assert_allclose(models, [[0, 0, 0, 0], [0, 0, 0, 0]])  # the mean update is 0: a split at once
    (root, first, second) = tree(kept)
    assert (root["ended"], root["why"], root["cluster"], root["similarity"]) == (1, "split", None, -1.0)
    assert (first["clients"], first["cluster"], first["born"], first["parent"]) == ([0, 1, 2], 0, 1, 0)
    assert (second["clients"], second["cluster"], second["ended"]) == ([3], 1, None)
    models, _, kept = run(THREE, rounds=2)
    np.testing.assert_allclose(models[:, 0], [2, -6])  # each half goes on from theta*, half of the way
    assert kept.lines[1]["notes"]["norms"] == {"0": [2.0, 2.0], "1": [6.0, 6.0]}
    models, _, kept = run(THREE + np.eye(4)[0], rounds=3, first_split=3)
    np.testing.assert_allclose(models, [[0.875, 0, 0, 0]])  # no split yet; half, then a quarter, ... of the way to 1


def test_four_groups_are_found_by_three_splits_and_each_model_reaches_its_optimum():
    models, strategy, kept = run(near(FOUR), rounds=25, stationary_norm=0.1, incongruent_norm=1.0)
    assert leaves(kept) == GROUPS
    assert [node["why"] for node in tree(kept)].count("split") == 3
    assert tree(kept)[0]["clients"] == list(range(12))
    means = [near(FOUR)[group].mean(axis=0) for group in GROUPS]
    for group, mean in zip(GROUPS, means, strict=True):
        np.testing.assert_allclose(models[strategy.assignments(25)[group[0]]], mean, atol=0.1)
    assert kept.lines[-1]["notes"]["clusters"] == 4


def test_weights_count_in_the_mean():
    """A weighted mean of 1, 1, 5 with weights 1, 1, 3 is 17 / 5."""

    class Weighted(NoPrivacy):
        def collected(self, size, cohort):
            collected = super().collected(size, cohort)
            collected.weights = np.array([1.0, 1.0, 3.0])
            return collected

    plan = Weighted(clients=3, num_clusters=1, sampling_rate=1.0, rounds=1)
    strategy = CFL(plan, **quiet())
    optima = np.array([[2.0, 0, 0, 0], [2.0, 0, 0, 0], [10.0, 0, 0, 0]])
    result = strategy.start(Pulled(optima), pack_models(np.zeros((1, 4), np.float32), LAYOUT), 1)
    np.testing.assert_allclose(unpack_models(result.arrays)[0][0, 0], 17 / 5, rtol=1e-6)


def test_clients_that_are_alike_stay_together_and_the_run_ends_when_nothing_moves():
    optima = near(np.full((9, 4), 5.0), spread=0.05)
    _, strategy, kept = run(optima, rounds=40)
    assert len(tree(kept)) == 1
    assert tree(kept)[0]["why"] == "stationary"
    assert strategy.finished
    assert len(kept.states) == tree(kept)[0]["ended"] < 15  # of 40 rounds
    # by hand: 5 stands in all coordinates, the first update is 5 long, and a round halves it: 0.01 of it in round 8
    assert tree(kept)[0]["ended"] == 8


def test_where_nobody_is_alike_one_cluster_stays_and_says_so_once(caplog):
    logging.getLogger("flwr").propagate = True
    optima = 10 * np.eye(4)  # every similarity is -1/3
    models, _, kept = run(optima, rounds=12)
    assert len(models) == 1
    assert leaves(kept) == [[0, 1, 2, 3]]
    assert sum("no two clients are similar" in record.message for record in caplog.records) == 1


def test_clients_that_are_alike_but_far_from_their_mean_are_not_peeled_off():
    rng = np.random.default_rng(0)
    optima = 3 * rng.standard_normal((20, 4))  # what few data do: noise around one optimum
    models, _, _ = run(optima, rounds=15, stationary_norm=1.0, incongruent_norm=0.5)
    assert len(models) == 1


def test_clusters_bounds_their_number_and_two_clients_are_not_split():
    models, _, kept = run(near(FOUR), rounds=15, clusters=2, stationary_norm=0.5, incongruent_norm=1.0)
    assert len(models) == 2
    assert len(leaves(kept)) == 2
    pair = np.array([[4.0, 0, 0, 0], [-4.0, 0, 0, 0]])
    assert len(run(pair, rounds=5)[0]) == 1


def test_thresholds_are_as_told_or_in_units_of_the_first_max_update_norm():
    optima = np.array([[4.0, 0, 0, 0], [4.0, 0, 0, 0], [-8.0, 0, 0, 0]])  # updates of 2, 2 and -4; their mean is 0
    assert len(run(optima, rounds=1, stationary_norm=1e-6, incongruent_norm=4.0)[0]) == 2
    assert len(run(optima, rounds=1, stationary_norm=1e-6, incongruent_norm=4.01)[0]) == 1
    moved = optima + 0.9 * np.eye(4)[0]  # the mean update is 0.45, the longest 3.55: 0.127 of it
    assert len(run(moved, rounds=1)[0]) == 2
    moved = optima + 2 * np.eye(4)[0]  # 1 of 3: more than 0.2
    assert len(run(moved, rounds=1)[0]) == 1
    # Steps that shrink to a half shorten all updates alike: the unit follows, and nothing is taken for congruent.
    decay = {"lr": 1.0, "lr-decay": 0.5}
    assert len(run(moved, rounds=4, config=decay)[0]) == 2


def test_a_split_and_a_stop_wait_for_every_member():
    grid = Pulled(THREE, silent=lambda client, round: client == 1 and round <= 3)
    models, _, _ = run(THREE, rounds=3, grid=grid)
    assert len(models) == 1
    grid = Pulled(np.full((3, 4), 5.0), silent=lambda client, round: client == 1)
    _, strategy, _ = run(np.full((3, 4), 5.0), rounds=20, grid=grid)
    assert not strategy.finished


def test_a_cluster_that_nobody_answers_for_keeps_its_model():
    grid = Pulled(THREE, silent=lambda client, round: client == 3 and round > 1)
    models, _, _ = run(THREE, rounds=4, grid=grid)
    np.testing.assert_allclose(models[:, 0], [4 * 0.875, 0])


def test_a_cluster_that_stopped_is_not_asked_again():
    grid = Pulled(THREE)
    _, _, kept = run(THREE, rounds=30, grid=grid, stationary_norm=0.1, incongruent_norm=1.0)
    stopped = {node["clients"][0]: node["ended"] for node in tree(kept) if node["why"] == "stationary"}
    assert stopped[0] < stopped[3]  # three clients had a shorter way
    assert max(round for round, client in grid.asked if client == 0) == stopped[0]
    assert max(round for round, client in grid.asked if client == 3) == stopped[3] == len(kept.states)


# ---- clients that come later, and resume ---------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 5, 10])
def test_a_client_that_comes_later_goes_down_the_tree_to_its_group(late):
    optima = near(FOUR)
    _, strategy, kept = run(optima, rounds=9, grid=Pulled(optima, since=[(late, 99)]))
    assert late not in strategy.assignments(9)
    assert len(leaves(kept)) == 4
    _, strategy, kept = run(optima, rounds=12, grid=Pulled(optima, since=[(late, 9)]))
    friend = (late + 4) % 12
    assert strategy.assignments(12)[late] == strategy.assignments(12)[friend]
    assert kept.lines[9]["notes"]["late"] == [late]
    assert any(late in leaf and friend in leaf for leaf in leaves(kept))


def test_before_any_split_a_client_that_comes_later_joins_the_root():
    optima = np.full((3, 4), 5.0)
    grid = Pulled(optima, since=[(2, 3)])
    _, strategy, _ = run(optima, rounds=6, grid=grid)
    assert strategy.assignments(6) == {0: 0, 1: 0, 2: 0}
    assert [round for round, client in grid.asked if client == 2] == [4, 5, 6]


def test_a_run_resumes_in_the_middle_of_its_tree():
    setting = {"stationary_norm": 0.3, "incongruent_norm": 1.0}
    whole, _, kept = run(near(FOUR), rounds=20, **setting)
    grown = [len(state.models) for state in kept.states]
    middle = grown.index(2)
    assert 0 < middle < 19
    assert grown[-1] == 4
    for state in (kept.states[middle], kept.states[-3]):
        again, _, other = run(near(FOUR), rounds=20, resume_from=state, **setting)
        np.testing.assert_array_equal(again, whole)
        assert [len(s.models) for s in other.states] == grown[state.round :]
    assert leaves(kept) == GROUPS


# ---- what is told, and what is refused -----------------------------------------------------------------------


def test_similarities_are_kept_at_splits_at_every_tenth_round_and_at_the_end():
    _, _, kept = run(near(FOUR), rounds=25, stationary_norm=0.1, incongruent_norm=1.0)
    splits = {node["ended"] for node in tree(kept) if node["why"] == "split"}
    expected = sorted({*splits, *range(10, len(kept.states) + 1, 10), len(kept.states)})
    assert sorted(kept.evidence) == [f"similarities-{number:04d}" for number in expected]
    first = kept.evidence[f"similarities-{min(splits):04d}"]
    assert first["labels"].tolist() == [0] * 12
    assert first["matrix"][0, 4] > 0.9
    assert first["matrix"][0, 1] < 0
    last = kept.evidence[f"similarities-{len(kept.states):04d}"]
    assert np.isnan(last["matrix"][0, 1])  # no longer in one cluster
    assert len(set(last["labels"])) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stationary_norm": 0.0}, "cfl.stationary-norm = 0.0: must be 'auto' or a finite number above 0"),
        ({"incongruent_norm": "soon"}, "cfl.incongruent-norm = 'soon': must be"),
        ({"clusters": -1}, "clusters must be an integer, at least 0, not -1"),
        ({"first_split": -1}, "cfl.first-split = -1: must be"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        run(FOUR, **options)


def test_a_part_of_the_clients_and_client_level_privacy_are_refused_with_the_reason():
    with pytest.raises(StrategyError, match=r"set sampling-rate to 1, not 0\.5"):
        CFL(NoPrivacy(clients=4, num_clusters=1, sampling_rate=0.5, rounds=2))
    shape = {"clients": 40, "num_clusters": 1, "sampling_rate": 1.0, "rounds": 2}
    private = Joint.calibrated(**shape, epsilon=8, delta=1e-4, clip_norm=1)
    for name in ("cfl", "lcfl"):
        with pytest.raises(StrategyError, match="labels depend on the data of several clients"):
            STRATEGIES[name](private)
