"""Distances between clients by hand: LCFL's Equations (1), (2) and (6), and cosines of updates."""

import numpy as np
import pytest

from coterie.clustering import distances
from coterie.clustering.distances import cosines, gram, loss_distances, parameter_distances, profile_distances

#: L_i(w_j) of three clients; no two of its symmetric readings agree.
LOSSES = np.array([[1.0, 4.0, 2.0], [1.5, 2.0, 1.0], [0.5, 5.0, 1.5]])
UPDATES = np.array([[0, 0], [3, 4], [3, 0]], np.float32)


def symmetric(upper):
    """(3, 3) of the distances 0-1, 0-2 and 1-2."""
    found = np.zeros((3, 3))
    found[np.triu_indices(3, 1)] = upper
    return found + found.T


def test_losses_of_each_other_s_models_by_hand():
    # |L_0(w_1) - L_0(w_0)| + |L_1(w_0) - L_1(w_1)| = |4 - 1| + |1.5 - 2|; |2 - 1| + |0.5 - 1.5|; |1 - 2| + |5 - 1.5|
    np.testing.assert_allclose(loss_distances(LOSSES), symmetric([3.5, 2.0, 4.5]))


def test_profiles_of_losses_by_hand():
    # (|1 - 1.5| + |4 - 2| + |2 - 1|) / 3, and so on
    np.testing.assert_allclose(profile_distances(LOSSES), symmetric([3.5 / 3, 2 / 3, 4.5 / 3]))
    np.testing.assert_allclose(profile_distances(LOSSES[:, 1:2]), symmetric([2, 1, 3]))


@pytest.mark.parametrize(("i", "j"), [(0, 1), (0, 2), (1, 2)])
def test_profiles_of_two_clients_own_models_are_equation_6_s_mean(i, j):
    both = abs(LOSSES[i, i] - LOSSES[j, i]) + abs(LOSSES[i, j] - LOSSES[j, j])
    assert profile_distances(LOSSES[:, [i, j]])[i, j] == both / 2
    assert both != loss_distances(LOSSES)[i, j]


def test_profiles_over_all_models_are_other_numbers_and_part_the_same_groups():
    group = np.array([0, 0, 0, 1, 1, 1, 1])
    alike = group[:, None] == group
    losses = np.where(alike, 0.3, 2.0) + 0.1 * np.random.default_rng(0).random((7, 7))
    found = [loss_distances(losses), profile_distances(losses)]
    assert np.abs(found[0] - found[1]).max() > 1
    for each in found:
        assert each[alike].max() < 0.5
        assert each[~alike].min() > 1


def test_parameters_by_hand():
    np.testing.assert_allclose(parameter_distances(UPDATES), symmetric([5, 3, 4]))


def test_cosines_by_hand_and_an_update_of_zero_is_like_none():
    updates = np.array([[2, 0], [0.3, 0.3], [0, 0], [-5, 0]], np.float32)
    half = np.sqrt(0.5)
    expected = [[1, half, 0, -1], [half, 1, 0, -half], [0, 0, 1, 0], [-1, -half, 0, 1]]
    np.testing.assert_allclose(cosines(updates), expected, atol=1e-7)
    np.testing.assert_array_equal(cosines(np.zeros((2, 3), np.float32)), np.eye(2))


def test_rounding_makes_no_cosine_beyond_one_and_no_square_below_zero():
    updates = np.repeat(np.random.default_rng(0).standard_normal((1, 50)), 4, axis=0).astype(np.float32) / 3
    assert cosines(updates).max() == 1
    assert np.isfinite(parameter_distances(updates)).all()


@pytest.mark.parametrize("measure", [parameter_distances, loss_distances, profile_distances])
def test_distances_are_symmetric_with_a_zero_diagonal(measure):
    given = np.random.default_rng(1).standard_normal((9, 9)).astype(np.float32)
    found = measure(given)
    assert found.shape == (9, 9)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found.diagonal(), 0, atol=1e-6)
    assert found.min() >= 0
    assert (found + np.eye(9) > 0.01).all()


@pytest.mark.parametrize("chunk", [1, 5 * 7, 5 * 99, 5 * 100, 5 * 101])
@pytest.mark.parametrize("centred", [False, True])
def test_products_in_parts_are_the_plain_product(chunk, centred, monkeypatch):
    updates = np.random.default_rng(2).standard_normal((5, 100)).astype(np.float32) + 1
    plain = updates.astype(float)
    if centred:
        plain = plain - plain.mean(axis=0)
    monkeypatch.setattr(distances, "_CHUNK", chunk)
    np.testing.assert_allclose(gram(updates, centred=centred), plain @ plain.T, rtol=1e-12)
    np.testing.assert_allclose(gram(list(updates), centred=centred), plain @ plain.T, rtol=1e-12)
