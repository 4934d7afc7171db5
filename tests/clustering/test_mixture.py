"""Groups of noisy updates: projection against scikit-learn, EM against hand and scikit-learn, M found, E_c by hand."""

import math
import tracemalloc

import numpy as np
import pytest
from kit.tables import for_rows
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

from coterie.clustering import distances
from coterie.clustering import mixture as gmm
from coterie.privacy import FirstRound
from coterie.privacy.first_round import GROUP_DISTANCE

#: Group of each of 21 clients, with a minority of 3.
GROUPS = np.repeat([0, 1, 2, 3], [3, 6, 6, 6])


def cluster(updates, *arguments, **options):
    return gmm.cluster(gmm.project(updates), *arguments, **options)


def rng(seed=0):
    return np.random.default_rng(seed)


def updates_of(groups, means, noise, d, seed):
    """(n, d) float32: rows of means (M, r), padded with zeros, and noise of this standard deviation."""
    updates = rng(seed).normal(0, noise, (len(groups), d))
    updates[:, : means.shape[1]] += means[groups]
    return updates.astype(np.float32)


def same_groups(labels, groups):
    return adjusted_rand_score(groups, labels) == 1


# ---- projection ---------------------------------------------------------------------------------------------


@for_rows(("n", "d", "components"), [(21, 5000, 2), (21, 5000, 20), (21, 7, 3), (5, 5, 4), (2, 9, 1), (9, 1, 1)])
def test_projection_is_that_of_sklearn_up_to_signs(n, d, components):
    updates = (rng(1).normal(3, 1, (n, d)) * np.linspace(1, 4, d)).astype(np.float32)
    scores = gmm.project(updates, components)
    expected = PCA(components, svd_solver="full").fit_transform(updates.astype(float))
    np.testing.assert_allclose(np.abs(scores), np.abs(expected), atol=1e-6 * np.abs(expected).max())
    widest = np.abs(scores).argmax(axis=0)
    assert (scores[widest, range(components)] > 0).all()


def test_all_scores_keep_all_distances_over_many_chunks(monkeypatch):
    updates = rng(2).normal(size=(6, 1001)).astype(np.float32)
    whole = gmm.project(updates)
    assert whole.shape == (6, 5)
    distance = np.linalg.norm(whole[:, None] - whole, axis=2)
    np.testing.assert_allclose(distance, np.linalg.norm(updates[:, None] - updates, axis=2), rtol=1e-5)
    monkeypatch.setattr(distances, "_CHUNK", 6 * 100)
    np.testing.assert_allclose(gmm.project(updates), whole, rtol=1e-9)
    np.testing.assert_allclose(gmm.project(list(updates), 2), whole[:, :2], rtol=1e-9)


def test_more_components_than_there_are():
    assert gmm.project(np.eye(4, dtype=np.float32), 10).shape == (4, 3)
    assert gmm.project(np.ones((1, 8), np.float32), 2).shape == (1, 0)
    scores = gmm.project(rng().normal(size=(9, 2)).astype(np.float32), 5)
    assert scores.shape == (9, 5)
    assert (scores[:, 2:] == 0).all()


def test_equal_updates_are_at_zero():
    np.testing.assert_array_equal(gmm.project(np.full((5, 40), 3, np.float32), 2), np.zeros((5, 2)))


def test_memory_of_the_projection_does_not_grow_with_the_model():
    updates = rng().standard_normal((21, 500_000), dtype=np.float32)  # 42 MB; in float64 84
    tracemalloc.start()
    gmm.project(updates, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 25e6


@for_rows("means", [1, 2, 3, 5])
def test_components_that_stand_out(means):
    centres = np.eye(means + 1)[:, : means + 1]
    for seed in range(5):
        updates = updates_of(np.arange(24) % (means + 1), centres, 0.03, 1000, seed)
        assert gmm.spanned(gmm.project(updates)) == means


def test_components_of_points_with_few_coordinates_all_count():
    assert gmm.spanned(gmm.project(rng().normal(size=(21, 2)).astype(np.float32))) == 2
    assert gmm.spanned(np.zeros((5, 4))) == 1


# ---- one mixture --------------------------------------------------------------------------------------------


def test_two_pairs_by_hand():
    # Means 0.5 and 20.5, all four points half a unit away: variance 1/4, SS = 20 / (2 * 1/2).
    mixture = gmm.fit(np.array([[0.0], [1.0], [20.0], [21.0]]), 2, rng())
    np.testing.assert_allclose(np.sort(mixture.means, axis=0), [[0.5], [20.5]])
    assert mixture.variance == pytest.approx(0.25)
    assert mixture.mss == pytest.approx(20)
    assert mixture.log_likelihood == pytest.approx(-0.5 - math.log(2 * math.pi * 0.25) / 2 - math.log(2))
    assert mixture.mpo == pytest.approx(0, abs=1e-80)
    assert same_groups(mixture.labels, [0, 0, 1, 1])


def test_variance_is_that_of_one_coordinate():
    points = np.array([[0.0, 0.0], [2.0, 0.0], [100.0, 0.0], [102.0, 0.0]])  # 1 along the first, 0 along the second
    assert gmm.fit(points, 2, rng()).variance == pytest.approx(0.5)


def test_a_point_between_two_components_belongs_to_both():
    points = np.array([[-3.0], [-2.0], [0.0], [2.0], [3.0]])
    mixture = gmm.fit(points, 2, rng())
    np.testing.assert_allclose(mixture.probabilities[2], [0.5, 0.5], atol=1e-3)
    np.testing.assert_allclose(mixture.probabilities.sum(axis=1), 1)
    distances = (points - mixture.means.T) ** 2
    odds = np.exp(-distances / (2 * mixture.variance))
    np.testing.assert_allclose(mixture.probabilities, odds / odds.sum(axis=1, keepdims=True), atol=1e-3)


@pytest.mark.parametrize(
    ("means", "mss", "mpo"),
    [([[0.0, 0.0], [3.0, 4.0]], 1.25, 0.2113), ([[0.0], [8.0], [12.0]], 1.0, 0.3173), ([[1.0], [1.0]], 0.0, 1.0)],
)
def test_confidence_by_hand(means, mss, mpo):
    mixture = gmm.Mixture(np.array(means), 4.0, np.eye(len(means)), 0.0)  # sigma 2
    assert mixture.mss == pytest.approx(mss)
    assert mixture.mpo == pytest.approx(mpo, abs=1e-4)


@for_rows(
    ("mpo", "rounds", "last"), [(0, 200, 100), (0.5, 200, 50), (0.2113, 200, 78), (1, 200, 1), (0, 1, 1), (0, 5, 2)]
)
def test_switch_round_by_hand(mpo, rounds, last):
    assert gmm.switch_round(mpo, rounds) == last


def test_em_ends_where_its_own_equations_hold():
    points = rng(4).normal(size=(60, 2)) + np.repeat([[0.0, 0.0], [2.5, 0.0]], 30, axis=0)
    mixture = gmm.fit(points, 2, rng())
    weights = mixture.probabilities
    means = (weights.T @ points) / weights.sum(axis=0)[:, None]
    np.testing.assert_allclose(mixture.means, means, atol=0.02)
    within = (weights * ((points[:, None] - means) ** 2).sum(axis=2)).sum() / (60 * 2)
    assert mixture.variance == pytest.approx(within, rel=0.01)


def test_restarts_keep_the_likeliest():
    points = rng(5).normal(size=(40, 2))
    single = max(gmm.fit(points, 5, rng(seed), restarts=1).log_likelihood for seed in range(5))
    assert gmm.fit(points, 5, rng(0), restarts=30).log_likelihood >= single - 0.02
    assert gmm.fit(points, 5, rng(7), 20).log_likelihood >= gmm.fit(points, 5, rng(7), 1).log_likelihood


def test_groups_without_noise_end_at_the_floor():
    mixture = gmm.fit(np.repeat([[0.0], [1.0], [5.0]], 4, axis=0), 3, rng())
    assert mixture.variance == pytest.approx(gmm.FLOOR * np.var([0, 1, 5]))
    assert same_groups(mixture.labels, np.repeat([0, 1, 2], 4))
    assert gmm.switch_round(mixture.mpo, 100) == 50


def test_one_component_is_sure_of_itself():
    mixture = gmm.fit(rng().normal(size=(9, 2)), 1, rng())
    assert (mixture.mss, mixture.mpo) == (math.inf, 0)
    assert (mixture.labels == 0).all()


@pytest.mark.parametrize("value", [0.0, 7.3, 1e6])
def test_equal_points_are_told_apart_by_nobody(value):
    mixture = gmm.fit(np.full((6, 2), value), 3, rng())
    np.testing.assert_allclose(mixture.probabilities, 1 / 3, atol=1e-6)
    assert mixture.mss == pytest.approx(0, abs=1e-6)
    assert gmm.switch_round(mixture.mpo, 100) == 1


# ---- groups of updates --------------------------------------------------------------------------------------


def test_known_groups_are_found_and_minorities_with_them():
    for seed in range(8):
        mixture, scores = cluster(updates_of(GROUPS, np.eye(4), 0.03, 2000, seed), 4, rng(seed))
        assert same_groups(mixture.labels, GROUPS)
        assert mixture.mss > 10
        assert scores == {4: mixture.mss}
        assert mixture.probabilities.max(axis=1).min() > 0.999


#: Means whose groups lie as they please: at equal distances, in pairs that are near, in a plane, in a line.
SHAPES = {
    "2": np.array([[0.0], [1.0]]),
    "3": np.eye(3),
    "4": np.eye(4),
    "7": np.eye(7),
    "pairs": np.hstack([3 * np.repeat(np.eye(2), 2, axis=0), np.eye(4)]),
    "rectangle": np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 1.0]]),
    "line": np.arange(4.0)[:, None],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_groups_is_found(shape):
    means = SHAPES[shape]
    groups = np.arange(max(20, 4 * len(means))) % len(means)
    for seed in range(3):
        mixture, scores = cluster(updates_of(groups, means, 0.015, 1000, seed), None, rng(seed))
        assert same_groups(mixture.labels, groups), f"{len(mixture.means)} groups, seed {seed}: {scores}"
        assert mixture.mss == max(scores.values()) == scores[len(means)]


def test_the_number_of_groups_is_found_with_a_minority():
    for seed in range(4):
        assert same_groups(cluster(updates_of(GROUPS, np.eye(4), 0.03, 2000, seed), None, rng())[0].labels, GROUPS)


def test_less_noise_gives_more_confidence():
    scores = [cluster(updates_of(GROUPS, np.eye(4), s, 2000, 0), 4, rng())[0].mss for s in (0.01, 0.03, 0.1)]
    assert scores[0] > 2 * scores[1] > 4 * scores[2]


def test_the_authors_projection():
    updates = updates_of(GROUPS, np.eye(4) * [4, 3, 2, 1], 0.03, 2000, 0)
    mixture, scores = cluster(updates, 4, rng(), components=2, scaled=True)
    points = gmm.project(updates, 2)
    points = (points - points.min(axis=0)) / (points.max(axis=0) - points.min(axis=0))
    expected = gmm.fit(points, 4, rng())
    np.testing.assert_array_equal(mixture.means, expected.means)
    assert mixture.means.shape == (4, 2)
    assert scores == {4: expected.mss}


def test_scaling_leaves_equal_updates_alone():
    mixture, _ = cluster(np.ones((6, 9), np.float32), 2, rng(), scaled=True)
    assert mixture.mpo == pytest.approx(1)


def test_a_component_of_one_client_is_out():
    # Two tight groups of five and somebody far away: three components would be the most confident.
    points = np.concatenate([rng(1).normal(0, 0.1, 5), rng(2).normal(1, 0.1, 5), [1000.0]])[:, None]
    assert np.bincount(gmm.fit(points, 3, rng()).labels).min() == 1
    with pytest.raises(ValueError, match="no number of groups leaves two of the 11 clients in each"):
        gmm.choose(points, rng(), most=3)
    pair = np.concatenate([points, [[1000.1]]])
    chosen, scores = gmm.choose(pair, rng())
    assert len(chosen.means) == max(scores, key=scores.get)
    assert np.bincount(chosen.labels).min() >= 2
    lone = {m for m in range(2, 7) if np.bincount(gmm.fit(pair, m, rng()).labels, minlength=m).min() < 2}
    assert 6 in lone
    assert 6 not in scores


def test_candidates_end_at_ten_and_at_half_of_the_clients():
    assert max(gmm.choose(np.repeat(rng().normal(size=(10, 9)), 4, axis=0), rng())[1]) == 10
    assert max(gmm.choose(np.repeat(rng().normal(size=(12, 9)), 4, axis=0), rng())[1]) <= 10
    assert set(gmm.choose(np.repeat(np.arange(3.0), 2)[:, None] ** 2, rng())[1]) == {2, 3}
    assert set(gmm.choose(np.repeat(np.arange(5.0), 2)[:, None] ** 2, rng(), most=2)[1]) == {2}


def test_em_finds_what_sklearn_finds():
    # scikit-learn with one variance a component and free weights, where groups are equal and many: the same model.
    centres = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    points = centres[np.arange(600) % 3] + rng(3).normal(size=(600, 2))
    ours = gmm.fit(points, 3, rng())
    theirs = GaussianMixture(3, covariance_type="spherical", init_params="k-means++", tol=1e-6, n_init=5, max_iter=500)
    theirs.set_params(random_state=0).fit(points)
    ours_in_order, theirs_in_order = (means[np.lexsort(means.round().T)] for means in (ours.means, theirs.means_))
    np.testing.assert_allclose(ours_in_order, theirs_in_order, atol=0.05)
    assert ours.variance == pytest.approx(theirs.covariances_.mean(), rel=0.03)
    assert ours.log_likelihood == pytest.approx(theirs.score(points), abs=0.01)
    assert (adjusted_rand_score(ours.labels, theirs.predict(points))) > 0.98


def broken(value):
    """Updates of five clients; one number of client 3 is this value."""
    updates = np.zeros((5, 10), np.float32)
    updates[3, 7] = value
    return updates


@for_rows(
    ("call", "complaint"),
    [
        (lambda: gmm.project(broken(np.nan)), r"updates \[3\] contain NaN or Inf"),
        (lambda: gmm.project(broken(np.inf)), r"updates \[3\] contain NaN or Inf"),
        (lambda: gmm.project(np.eye(3, dtype=np.float32), 0), "components must be at least 1, not 0"),
        (lambda: gmm.fit(broken(np.nan), 2, rng()), "finite"),
        (lambda: gmm.fit(broken(np.inf), 2, rng()), "finite"),
        (lambda: gmm.fit(np.zeros((5, 2)), 0, rng()), "number of clients, 5, not 0"),
        (lambda: gmm.fit(np.zeros((5, 2)), 6, rng()), "number of clients, 5, not 6"),
        (lambda: gmm.fit(gmm.project(np.ones((1, 3), np.float32)), 1, rng()), r"with r >= 1, not \(1, 0\)"),
        (lambda: gmm.switch_round(math.nan, 10), "mpo must lie in"),
        (lambda: gmm.switch_round(-0.1, 10), "mpo must lie in"),
        (lambda: gmm.switch_round(1.1, 10), "mpo must lie in"),
        (lambda: cluster(np.eye(2, dtype=np.float32), None, rng()), "no number of groups leaves two of the 2 clients"),
        (lambda: cluster(np.eye(3, dtype=np.float32), None, rng()), "no number of groups leaves two of the 3 clients"),
    ],
)
def test_what_makes_no_sense_is_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


def test_the_same_generator_gives_the_same():
    updates = updates_of(GROUPS, np.eye(4), 0.3, 500, 0)
    (first, scores), (second, again) = (cluster(updates, None, rng(5)) for _ in range(2))
    assert scores == again
    np.testing.assert_array_equal(first.probabilities, second.probabilities)


# ---- noise that separates groups (privacy/first_round.py) ---------------------------------------------------


@for_rows(("n", "groups", "d"), [(21, 4, 6634), (21, 2, 2000), (60, 8, 500), (12, 2, 20)])
def test_the_separating_noise_separates_and_three_times_as_much_does_not(n, groups, d):
    """Groups at the assumed distance, the smallest of half an equal share."""
    small = max(n // (2 * groups), 2)
    labels = np.concatenate([np.zeros(small, int), 1 + np.arange(n - small) % (groups - 1)])
    means = np.eye(groups) * GROUP_DISTANCE / math.sqrt(2)
    deviation = FirstRound(clients=n, groups=groups, parameters=d).separating_noise(1000, 1) / 1000
    for factor, separated in ((1, True), (3, False)):
        fits = [cluster(updates_of(labels, means, factor * deviation, d, seed), groups, rng())[0] for seed in range(3)]
        assert all(same_groups(mixture.labels, labels) for mixture in fits) is separated
        assert (min(mixture.mss for mixture in fits) > 3) is separated
