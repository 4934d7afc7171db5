"""The redraw matrix: row-stochastic for any histogram, and no cluster stays short."""

import numpy as np
import pytest

from coterie.strategies import redraw_matrix


def test_by_hand():
    # Mean 10, B = 6: clusters short by 6 and 2, surplus 20 above B in cluster 0, of which 8 leave its 26.
    matrix = redraw_matrix([26, 0, 4], 6)
    np.testing.assert_allclose(matrix, [[18 / 26, 6 / 26, 2 / 26], [0, 1, 0], [0, 0, 1]], atol=1e-12)


def test_any_histogram():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        k = rng.integers(1, 9)
        histogram = rng.normal(rng.uniform(-5, 30), rng.uniform(0, 40), k)
        minimum = rng.uniform(0, 40)
        matrix = redraw_matrix(histogram, minimum)
        sizes = np.maximum(histogram, 0)
        assert np.all(matrix >= 0)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
        after = sizes @ matrix
        assert after.sum() == pytest.approx(sizes.sum())
        assert np.all(after >= min(minimum, sizes.mean()) - 1e-9)
        target = min(minimum, sizes.mean())
        stays = np.diag(matrix)
        np.testing.assert_array_equal(stays[sizes <= target], 1)  # only surplus moves,
        off = matrix - np.diag(stays)
        assert not off[:, sizes >= target].any()  # and only to where there is too little


@pytest.mark.parametrize(("histogram", "minimum"), [([9, 8, 7], 7), ([9, 0, 7], 0), ([0, 0], 5), ([-3, -2], 5)])
def test_nobody_moves_without_need(histogram, minimum):
    np.testing.assert_array_equal(redraw_matrix(histogram, minimum), np.eye(len(histogram)))
