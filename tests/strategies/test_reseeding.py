"""Re-seeding: the starving become mirrored copies of the fullest, everyone else is left alone."""

import numpy as np
import pytest

from coterie.strategies import Reseeding

MODELS = np.arange(12, dtype=np.float32).reshape(4, 3)


def reseed(shares):
    """The outcome; what was given stays as it was."""
    before, given = MODELS.copy(), np.array(shares, float)
    outcome = Reseeding()(MODELS, given, np.random.default_rng(0))
    np.testing.assert_array_equal(MODELS, before)
    np.testing.assert_array_equal(given, shares)
    return outcome


def test_the_starving_copies_the_fullest_and_both_step_apart():
    models, shares, moves = reseed([50, 2, 25, 23])
    assert moves == [(0, 1)]
    np.testing.assert_allclose((models[0] + models[1]) / 2, MODELS[0], atol=1e-6)
    assert np.linalg.norm(models[1] - models[0]) / 2 == pytest.approx(0.3 * np.linalg.norm(MODELS[0]), rel=1e-5)
    np.testing.assert_array_equal(models[2:], MODELS[2:])
    np.testing.assert_array_equal(shares, [26, 26, 25, 23])


def test_two_starving_models_copy_whatever_is_fullest_then():
    _, shares, moves = reseed([0, 60, 39, 1])
    assert moves == [(1, 0), (2, 3)]
    np.testing.assert_array_equal(shares, [30, 30, 20, 20])


@pytest.mark.parametrize("shares", [[25, 25, 25, 25], [10, 30, 30, 30], [33, 33, 33, 1], [0, 0, 0, 0], [-1, -2, 0, 1]])
def test_balance_is_left_alone(shares):
    models, after, moves = reseed(shares)
    if shares == [-1, -2, 0, 1]:
        assert len(moves) <= 4  # noise alone: anything finite
        assert np.isfinite(models).all()
        return
    assert moves == []
    np.testing.assert_array_equal(models, MODELS)
    np.testing.assert_array_equal(after, shares)


def test_when_it_is_due():
    rule = Reseeding(every=5, until=0.6)
    assert [t for t in range(1, 81) if rule.due(t, 80)] == [5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert not any(Reseeding(every=0).due(t, 80) for t in range(81))
