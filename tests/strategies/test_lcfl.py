"""LCFL by hand: clients with L_i(w) = |w - c_i|^2 who go halfway to c_i, and the two groups of the toy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from kit.toy_grids import Answering, Kept, changing, quiet, reply_to
from kit.toys import strategy_of

from coterie.privacy import NoPrivacy, Streams
from coterie.server.metrics import summarise
from coterie.strategies import LCFL, Averaging, StrategyError, lcfl
from coterie.strategies.lcfl import LCFLSettings
from coterie.wire.messages import Layout, losses_layout, pack_models, pack_update, unpack_models

#: c_i of seven clients: A, B, A, B, A, B, B.
OPTIMA = np.array([1.0, -2.0, 1.2, -2.1, 1.1, -1.9, -2.4])[:, None]
A, B = [0, 2, 4], [1, 3, 5, 6]
MEANS = np.array([[1.1 / 2], [-2.1 / 2]])  # of their models after half a way from 0
LABELS = [0, 1, 0, 1, 0, 1, 1]


@dataclass
class Question:
    """A message that a client received."""

    verb: str
    client: int
    models: Any
    config: Any


class Halfway(Answering):
    """Clients whose loss is |w - c|^2 and who go half the way to c; ``silent(question)`` says who gives no answer."""

    def __init__(self, optima=OPTIMA, silent=lambda question: False, nodes=None):
        super().__init__(len(optima))
        self.optima, self.silent = optima, silent
        self.nodes = list(range(1, len(optima) + 1)) if nodes is None else nodes
        self.questions = []

    def get_node_ids(self):
        return list(self.nodes)

    def asked(self, verb, round=None, client=None):
        asked = [q for q in self.questions if q.verb == verb and round in (None, q.config["round"])]
        return [q for q in asked if client in (None, q.client)]

    def answers(self, client, message):
        verb = message.metadata.message_type
        models, layout = unpack_models(message.content["models"])
        asked = Question(verb, client, models, dict(message.content["config"]))
        self.questions.append(asked)
        if self.silent(asked):
            return []
        if verb == "evaluate":
            told = {"accuracy": 1.0, "client-id": client, "cluster": 0, "group": 0, "loss": 0.0, "num-examples": 1}
            return [RecordDict({"diagnostics": MetricRecord(told)})]
        update = (self.optima[client] - models[0]) / 2
        if verb == "query.losses":
            update, layout = ((models - self.optima[client]) ** 2).sum(axis=1), losses_layout(len(models))
        return [reply_to(message, update, layout).content]


def start(grid=None, rounds=1, k=2, sampling_rate=1.0, planned=None, **options):
    """Models, the strategy, the grid and what was kept, after so many rounds from 0."""
    grid = grid or Halfway()
    m, d = grid.optima.shape
    planned = max(rounds, planned or 1)
    setting = NoPrivacy(clients=m, num_clusters=max(k, 1), sampling_rate=sampling_rate, rounds=planned)
    options = quiet(**{"recorder": Kept(), "clusters": k, **options})
    strategy = strategy_of(LCFL, setting, **options)
    zero = pack_models(np.zeros((1, d), np.float32), Layout(("w",), ((d,),)))
    result = strategy.start(grid, zero, rounds)
    return unpack_models(result.arrays)[0], strategy, grid, options["recorder"]


def labels(strategy):
    return strategy.state["labels"].tolist()


def on(verb, *clients, until=99, most=10**9):
    """Says that these clients give no answer to a verb, until after this round, to no more than ``most`` models."""
    return lambda q: q.verb == verb and q.client in clients and q.config["round"] <= until and len(q.models) <= most


# ---- lines 1 to 18 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 0])
@pytest.mark.parametrize("metric", ["loss", "params", "gradcos"])
@pytest.mark.parametrize("clusterer", ["k-medoids", "agglomerative", "hdbscan"])
def test_round_one_gives_the_means_of_the_members_models(metric, clusterer, k):
    if clusterer == "hdbscan":
        k = 0
    models, strategy, grid, _ = start(metric=metric, clusterer=clusterer, k=k)
    assert labels(strategy) == LABELS
    np.testing.assert_allclose(models, MEANS, rtol=1e-6)
    assert strategy.plan.num_clusters == 2
    assert len(grid.asked("query.losses")) == (7 if metric == "loss" else 0)
    assert not any("penalty" in q.config for q in grid.questions)


def test_the_other_rounds_are_fedavg_within_each_cluster():
    models, _, grid, _ = start(rounds=3)
    # From the mean m of a cluster its clients go to (m + c_i) / 2: the mean to (m + mean c) / 2, twice.
    np.testing.assert_allclose(models, np.array([[1.1], [-2.1]]) * (1 - 1 / 8), rtol=1e-6)
    second = grid.asked("train", 2)
    assert sorted(q.client for q in second) == list(range(7))
    for question in second:
        np.testing.assert_allclose(question.models, MEANS[[LABELS[question.client]]], rtol=1e-6)
    assert len(grid.asked("query.losses")) == len(grid.asked("query.losses", 1))


def test_a_client_cannot_train_another_cluster_s_model():
    """It is in the first cluster and says that its update, a huge one, is of the second."""

    def cross(reply):
        sent = reply.content
        if "update" in sent and sent["reply"]["round"] == 2 and sent["reply"]["client-id"] == A[0]:
            sent["reply"]["redrawn-label"] = 1
            sent["update"] = pack_update(np.full(1, 2000, np.float32), Layout(("w",), ((1,),)))

    moved, strategy, *_ = start(changing(Halfway(), cross), rounds=2)
    absent, *_ = start(Halfway(silent=lambda q: q.client == A[0] and q.config["round"] == 2), rounds=2)
    np.testing.assert_array_equal(moved, absent)
    assert strategy.statistics.dropped == {"label is 0 and redrawn-label 1; the server assigned cluster 0": 1}


@pytest.mark.parametrize("options", [{"warm_up_rounds": 1, "planned": 2}, {}])
def test_a_label_is_that_of_a_model_that_was_sent(options):
    """In the warm-up, and where clients are compared, one model is sent, however many clusters there will be."""

    def move(reply):
        if reply.metadata.src_node_id == 4 and "update" in reply.content:
            reply.content["reply"].update({"label": 1, "redrawn-label": 1})

    _, strategy, *_ = start(changing(Halfway(), move), **options)
    assert "label is 1, expected an integer in [0, 1)" in strategy.statistics.dropped


def test_warm_up_rounds_are_fedavg_and_come_first():
    kept = Kept()
    _, _, grid, _ = start(rounds=3, warm_up_rounds=2, recorder=kept)
    mean = OPTIMA.mean()
    np.testing.assert_allclose(kept.states[0].models, [[mean / 2]], rtol=1e-6)
    np.testing.assert_allclose(kept.states[1].models, [[mean * 3 / 4]], rtol=1e-6)
    assert "labels" not in kept.states[1].state
    expected = np.array([[1.1], [-2.1]]) / 2 + mean * 3 / 8
    np.testing.assert_allclose(kept.states[2].models, expected, rtol=1e-6)
    assert not grid.asked("query.losses", 2)
    travelled = grid.asked("query.losses", 3, client=0)[0].models
    np.testing.assert_allclose(travelled[0], [0])  # nobody has trained it
    np.testing.assert_allclose(travelled[1:], OPTIMA / 2 + mean * 3 / 8, rtol=1e-6)


def test_the_server_s_step_is_from_the_model_that_all_began_with():
    models, *_ = start(rounds=2, warm_up_rounds=1, server_lr=0.5)
    warmed = OPTIMA.mean() / 4
    np.testing.assert_allclose(models, warmed + (np.array([[1.1], [-2.1]]) - warmed) / 4, rtol=1e-6)


@pytest.mark.parametrize("at_once", [1, 3, 8, 100])
def test_every_model_travels_once_to_each_client_in_messages_of_bounded_size(at_once):
    _, strategy, grid, kept = start(models_per_message=at_once)
    every = np.vstack([[[0.0]], OPTIMA / 2])  # the untrained one first
    for client in range(7):
        messages = grid.asked("query.losses", client=client)
        assert [len(q.models) for q in messages] == [at_once] * (8 // at_once) + [8 % at_once] * (8 % at_once > 0)
        assert [q.config["compared"] for q in messages] == [len(q.models) for q in messages]
        np.testing.assert_allclose(np.vstack([q.models for q in messages]), every, rtol=1e-6)
    assert labels(strategy) == LABELS
    own = (OPTIMA / 2 - OPTIMA) ** 2
    worse = np.abs((OPTIMA.T / 2 - OPTIMA) ** 2 - own)
    np.testing.assert_allclose(kept.evidence["distances"]["matrix"], worse + worse.T, rtol=1e-5, atol=1e-6)
    assert kept.said == [f"7 clients compare {done} of 8 models" for done in range(0, 8, at_once)]


def test_messages_that_are_too_large_are_refused_with_the_number_that_works(monkeypatch):
    monkeypatch.setattr(lcfl, "_MAX_BYTES", 4 * 3)  # three models of one number
    with pytest.raises(StrategyError, match=r"models-per-message = 8 leads to messages of 0.0 GB; set it to 3 or less"):
        start()
    assert labels(start(models_per_message=3)[1]) == LABELS
    monkeypatch.setattr(lcfl, "_MAX_BYTES", 3)  # a model that trains can travel
    assert labels(start(models_per_message=1)[1]) == LABELS


def test_what_is_told_of_the_clustering():
    _, _, _, kept = start(rounds=2, k=0, planned=5)
    notes = kept.lines[0]["notes"]
    assert notes["clusters"] == 2
    assert (notes["metric"], notes["clusterer"]) == ("loss", "k-medoids")
    assert list(notes["silhouettes"]) == ["2"]  # three leave one alone
    assert notes["silhouettes"]["2"] > 0.9
    assert notes["evaluations"] == 7 * 8
    assert "notes" not in kept.lines[1]
    assert kept.evidence["distances"]["clients"].tolist() == list(range(7))
    assert kept.evidence["distances"]["labels"].tolist() == LABELS
    assert kept.evidence["distances"]["matrix"].dtype == np.float32


# ---- landmarks -------------------------------------------------------------------------------------------------------


def test_as_many_landmarks_as_clients_are_all_pairs():
    matrices = [start(landmarks=n)[3].evidence["distances"]["matrix"] for n in (0, 7, 100)]
    np.testing.assert_array_equal(matrices[0], matrices[1])
    np.testing.assert_array_equal(matrices[0], matrices[2])


def test_landmarks_are_some_clients_models_the_same_for_all():
    _, strategy, grid, kept = start(landmarks=3)
    sent = [q.models for q in grid.asked("query.losses")]
    assert len(sent) == 7
    assert all(np.array_equal(models, sent[0]) for models in sent)
    assert sent[0][0] == 0
    drawn = [int(np.abs(OPTIMA[:, 0] / 2 - value).argmin()) for value in sent[0][1:, 0]]
    assert drawn == sorted(set(drawn))
    np.testing.assert_allclose(sent[0][1:], OPTIMA[drawn] / 2, rtol=1e-6)
    profiles = (OPTIMA[drawn].T / 2 - OPTIMA) ** 2
    expected = np.abs(profiles[:, None] - profiles).mean(axis=2)
    np.testing.assert_allclose(kept.evidence["distances"]["matrix"], expected, rtol=1e-5, atol=1e-6)
    assert labels(strategy) == LABELS
    assert kept.lines[0]["notes"]["evaluations"] == 7 * 4
    others = {tuple(start(landmarks=3, streams=Streams(s))[2].asked("query.losses")[0].models[:, 0]) for s in range(5)}
    assert len(others) > 1


# ---- one cluster, none, and one client -------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["loss", "params"])
def test_clients_that_are_all_alike_are_one_cluster_where_the_number_is_not_told(metric):
    optima = 1 + 0.1 * np.random.default_rng(0).normal(size=(12, 20))
    models, strategy, *_ = start(Halfway(optima), k=0, rounds=2, metric=metric)
    assert labels(strategy) == [0] * 12
    np.testing.assert_allclose(models, optima.mean(axis=0, keepdims=True) * 3 / 4, rtol=1e-5)
    assert strategy.plan.num_clusters == 1


def test_a_run_in_which_nobody_is_like_anybody_ends():
    # |e_j / 2 - e_i|^2 = 5/4 of another's model against 1 of the untrained one and 1/4 of the own
    strangers = Halfway(np.eye(8))
    with pytest.raises(StrategyError, match="no two clients are similar: for 8 of 8 clients"):
        start(strangers, k=0)
    for k in (1, 2):
        told, *_ = start(Halfway(np.eye(8)), k=k)
        assert len(told) == k
    lower, *_ = start(Halfway(np.eye(8)), k=0, metric="params")  # others' losses say nothing there
    assert len(lower) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_found_clusters_goes_on_though_the_landmark_suits_few(seed):
    """All of the other group and the one whose model it is gain from no landmark: more than half of the clients."""
    _, strategy, *_ = start(k=0, landmarks=1, streams=Streams(seed))
    assert labels(strategy) == LABELS


@pytest.mark.parametrize(("alone", "ends"), [(4, False), (5, True)])
def test_it_ends_when_most_gain_less_than_half_from_anybody_else(alone, ends):
    untrained, own = np.full(8, 3.0), np.eye(8, dtype=bool)
    losses = np.where(own, 2.0, 4.0)  # one's own model gains 1
    losses[:alone, 1] = np.where(own[:alone, 1], 2.0, 2.51)  # another's less than half of that
    losses[alone:, 1] = 2.5
    if ends:
        with pytest.raises(StrategyError, match=f"{alone} of 8 clients"):
            lcfl._check_similarity(losses, untrained, own)
    else:
        lcfl._check_similarity(losses, untrained, own)
    lcfl._check_similarity(losses[:, 1:2], untrained, own[:, :0].any(axis=1, keepdims=True))  # no own model to compare


def test_one_client_can_be_a_cluster_where_the_number_is_told():
    optima = np.array([1.0, 1.1, 1.2, -30.0, 1.1])[:, None]
    models, strategy, grid, _ = start(Halfway(optima), rounds=2)
    assert labels(strategy) == [0, 0, 0, 1, 0]
    np.testing.assert_allclose(models, [[1.1 * 3 / 4], [-30 * 3 / 4]], rtol=1e-6)
    assert [q.client for q in grid.asked("train", 2) if q.config["cluster"] == 1] == [3]


@pytest.mark.parametrize("metric", ["loss", "params", "gradcos"])
@pytest.mark.parametrize("here", [[], [1], [1, 2]])
def test_too_few_who_can_be_compared_end_the_run(metric, here):
    reason = f"only {len(here)} of 7 clients could be compared, too few" if here else "no client is registered"
    with pytest.raises(StrategyError, match=reason):
        start(Halfway(nodes=here), k=3, metric=metric)


# ---- clients that did not answer -------------------------------------------------------------------------------------


def test_a_client_whose_losses_did_not_come_has_no_cluster_and_gets_one_when_they_come():
    # Client 6 gives no losses in round 1, client 2 those of the first four models alone.
    def silent(q):
        return q.verb == "query.losses" and (
            (q.client == 6 and q.config["round"] < 3) or (q.client == 2 and q.config["round"] == 1 and q.models[0] != 0)
        )

    kept = Kept()
    _, _, grid, _ = start(Halfway(silent=silent), rounds=3, models_per_message=4, recorder=kept)
    first, second, third = (state.state["labels"].tolist() for state in kept.states)
    assert first == [0, 1, -1, 1, 0, 1, -1]
    np.testing.assert_allclose(kept.states[0].models, [[2.1 / 4], [-2.0 / 2]], rtol=1e-6)  # the others' means
    assert second == [0, 1, 0, 1, 0, 1, -1]
    assert third == LABELS
    assert kept.lines[1]["notes"] == {"late": {"2": 0}}
    assert kept.lines[2]["notes"] == {"late": {"6": 1}}
    assert [q.client for q in grid.asked("query.losses", 2)] == [2, 6]
    assert [q.client for q in grid.asked("query.losses", 3)] == [6]
    assert sorted(q.client for q in grid.asked("train", 2)) == [0, 1, 2, 3, 4, 5]
    assert sorted(q.client for q in grid.asked("train", 3)) == list(range(7))
    assert kept.evidence["distances"]["clients"].tolist() == [0, 1, 3, 4, 5]


def test_a_late_client_tells_its_losses_of_each_cluster_s_best_model():
    _, strategy, grid, kept = start(Halfway(silent=on("query.losses", 4, until=1)), rounds=2)
    # Members' mean losses are least for the models that went farthest: those of clients 2 and 6.
    (late,) = grid.asked("query.losses", 2)
    np.testing.assert_allclose(late.models, [[0.6], [-1.2]], rtol=1e-6)
    profiles = [[np.mean((w - OPTIMA[group]) ** 2) for w in (0.6, -1.2)] for group in ([0, 2], B)]
    np.testing.assert_allclose(kept.states[0].state["profiles"], profiles, rtol=1e-5)
    np.testing.assert_allclose(kept.states[0].state["landmarks"], [[0.6], [-1.2]], rtol=1e-6)
    assert labels(strategy)[4] == 0


def test_the_best_model_of_a_cluster_is_the_one_nearest_to_its_members_mean():
    _, strategy, *_ = start(k=1, rounds=2, warm_up_rounds=1)
    mean = OPTIMA.mean()  # -0.87; client 5 went halfway to -1.9 from half of it, the others of B a little farther
    np.testing.assert_allclose(strategy.state["landmarks"], [[-1.9 / 2 + mean / 4]], rtol=1e-6)
    profile = np.mean((-1.9 / 2 + mean / 4 - OPTIMA) ** 2)
    np.testing.assert_allclose(strategy.state["profiles"], [[profile]], rtol=1e-5)


@pytest.mark.parametrize(("optimum", "label"), [(-4.5, 1), (3.0, 0), (4.0, 1)])
def test_a_late_client_goes_where_losses_are_like_its_own_and_not_where_they_are_least(optimum, label):
    """Losses of 0.6 and of -1.2: A's mean is (0.26, 5.30), B's is (7.33, 0.85).

    c = -4.5 tells (26.01, 10.89): 31.4 from A, 28.7 from B. c = 3 tells (5.76, 17.64): 17.8 and 18.4. c = 4 tells
    (11.56, 27.04): 33.0 and 30.4, though the first is the lesser loss.
    """
    _, strategy, *_ = start(Halfway(np.vstack([OPTIMA, [[optimum]]]), silent=on("train", 7, until=1)), rounds=2)
    assert labels(strategy)[7] == label


@pytest.mark.parametrize("metric", ["loss", "params", "gradcos"])
@pytest.mark.parametrize(("optimum", "label"), [(0.9, 0), (-1.7, 1)])
@pytest.mark.parametrize("landmarks", [0, 5])
def test_a_client_that_comes_later_gets_the_nearest_cluster(metric, optimum, label, landmarks):
    grid = Halfway(np.vstack([OPTIMA, [[optimum]]]), nodes=list(range(1, 8)))

    def come(question):
        if question.config["round"] == 2:
            grid.nodes = list(range(1, 9))
        return False

    grid.silent = come
    kept = Kept()
    start(grid, rounds=3, warm_up_rounds=0, metric=metric, landmarks=landmarks, recorder=kept)
    assert [state.state["labels"][7] for state in kept.states] == [-1, -1, label]
    assert not [q for number in (1, 2) for q in grid.asked("train", number, client=7)]
    mine = grid.asked("train", 3, client=7)
    if metric != "loss":  # what the others did in round 1, from the same model
        np.testing.assert_array_equal(mine[0].models, [[0.0]])
        mine = mine[1:]
    assert [q.config["cluster"] for q in mine] == [label]
    assert kept.lines[2]["notes"] == {"late": {"7": label}}


def test_a_late_client_begins_where_the_others_began_after_their_warm_up():
    _, strategy, grid, _ = start(Halfway(silent=on("train", 6, until=2)), rounds=3, warm_up_rounds=1, metric="params")
    warmed = OPTIMA[:6].mean() / 2
    first, _ = grid.asked("train", 3, client=6)
    np.testing.assert_allclose(first.models, [[warmed]], rtol=1e-6)
    assert labels(strategy) == LABELS
    np.testing.assert_allclose(strategy.state["centres"], (np.array([[1.1], [-2.0]]) - warmed) / 2, rtol=1e-5)


def test_clients_without_a_cluster_are_not_evaluated():
    silent = on("query.losses", 3)
    _, strategy, grid, _ = start(Halfway(silent=silent), rounds=2, evaluate_every=1, evaluate_metrics_aggr_fn=summarise)
    for number in (1, 2):
        assert sorted(q.client for q in grid.asked("evaluate", number)) == [0, 1, 2, 4, 5, 6]
    assert strategy.assignments(2) == {0: 0, 1: 1, 2: 0, 4: 0, 5: 1, 6: 1}


def test_before_the_clustering_everybody_is_evaluated_on_the_one_model():
    _, _, grid, _ = start(rounds=2, warm_up_rounds=1, evaluate_every=1, evaluate_metrics_aggr_fn=summarise)
    assert sorted(q.client for q in grid.asked("evaluate", 1)) == list(range(7))
    assert {len(q.models) for q in grid.asked("evaluate", 1)} == {1}


# ---- samples, numbers of clusters, checkpoints -----------------------------------------------------------------------


def test_all_clients_are_compared_and_a_part_of_them_trains_afterwards():
    _, strategy, grid, _ = start(rounds=4, sampling_rate=0.5, warm_up_rounds=1)
    by_chance = {
        t: strategy.plan.sample(Streams(0).stream("cohort", t, attempt), t).tolist()
        for t, attempt in ((1, 1), (3, 4), (4, 5))  # the comparison is two charges
    }
    assert by_chance[1] not in (by_chance[3], list(range(7)))
    for t, cohort in by_chance.items():
        assert sorted(q.client for q in grid.asked("train", t)) == cohort
    assert sorted(q.client for q in grid.asked("train", 2)) == list(range(7))
    assert sorted(q.client for q in grid.asked("query.losses", 2)) == list(range(7))


def test_fewer_clusters_than_told_do_not_stop_the_rounds():
    """All clients are the same: three clusters cannot be had. The warm-up counted three."""
    models, strategy, *_ = start(Halfway(np.ones((6, 1))), rounds=4, k=3, warm_up_rounds=2)
    assert len(models) == strategy.plan.num_clusters <= 3
    assert set(labels(strategy)) == set(range(len(models)))
    np.testing.assert_allclose(models, 1 - 1 / 16, rtol=1e-6)
    assert strategy.histogram.sum() == 6


@pytest.mark.parametrize("options", [{}, {"k": 0, "landmarks": 4}, {"k": 0, "warm_up_rounds": 1}, {"metric": "params"}])
@pytest.mark.parametrize("until", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_same_clusters(until, options, tmp_path):
    """Half of the clients take part in a round; client 5 is compared with nobody, and comes in round 4."""

    def run(path, rounds, resume_from=None):
        grid = Halfway(silent=lambda q: q.client == 5 and q.config["round"] < 4)
        setting = NoPrivacy(clients=7, num_clusters=2, sampling_rate=0.5, rounds=6)
        ledger = setting.ledger(tmp_path / path)
        more = {"ledger": ledger, "resume_from": resume_from, "planned": 6, "sampling_rate": 0.5}
        models, strategy, grid, kept = start(grid, rounds=rounds, **more, **options)
        ledger.close()
        return models, strategy, grid, kept

    whole, straight, _, _ = run("whole", 6)
    _, _, _, begun = run("parts", until)
    resumed, strategy, grid, later = run("parts", 6, begun.states[-1])
    np.testing.assert_array_equal(resumed, whole)
    assert labels(strategy) == labels(straight) == LABELS
    assert len(later.states) == 6 - until
    if until > options.get("warm_up_rounds", 0):
        assert not any(q.client != 5 for q in grid.asked("query.losses"))
    np.testing.assert_array_equal(strategy.histogram, straight.histogram)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"metric": "hash"}, "lcfl.metric = 'hash': must be loss, params, gradcos"),
        ({"clusterer": "k-means"}, "lcfl.clusterer = 'k-means': must be k-medoids"),
        ({"clusterer": "dbscan"}, "dbscan determines the number of clusters itself: set clusters to 0"),
        ({"landmarks": -1}, "lcfl.landmarks = -1: must be an integer, at least 0"),
        ({"warm_up_rounds": -1}, "lcfl.warm-up-rounds = -1: must be"),
        ({"models_per_message": 0}, "lcfl.models-per-message = 0: must be an integer, at least 1"),
        ({"warm_up_rounds": 4}, "warm-up-rounds = 4 must be less than rounds = 4"),
        ({"warm_up_rounds": 3, "averaging": Averaging(0.5)}, "before the clustering in round 4: set it to at most"),
    ],
)
def test_settings_that_make_no_sense(options, complaint):
    setting = NoPrivacy(clients=8, num_clusters=2, sampling_rate=1.0, rounds=4)
    with pytest.raises(ValueError, match=complaint):
        strategy_of(LCFL, setting, **options)


def test_the_last_models_of_the_clusters_can_be_averaged():
    models, *_ = start(rounds=4, warm_up_rounds=2, averaging=Averaging(0.5))
    mean = OPTIMA.mean() * 3 / 4
    third = (np.array([[1.1], [-2.1]]) + mean) / 2
    fourth = (np.array([[1.1], [-2.1]]) + third) / 2
    np.testing.assert_allclose(models, (third + fourth) / 2, rtol=1e-6)


def test_models_to_be_told_of_are_all_or_the_landmarks_and_the_untrained_one():
    for options, compared in (({}, 11), ({"landmarks": 4}, 5), ({"landmarks": 40}, 11), ({"metric": "params"}, 0)):
        assert LCFL.released_losses(10, LCFLSettings(**options)) == {"compared": compared, "models_per_message": 32}
