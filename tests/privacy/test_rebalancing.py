"""Rebalancing: the redraw matrix is row-stochastic for any histogram, and no cluster stays short; members move."""

import numpy as np

from coterie.audit.printed import large_members
from coterie.privacy.mechanisms.rebalancing import move_members, redraw_matrix, surplus_members


def test_by_hand():
    # Mean 10, B = 6: clusters short by 6 and 2, surplus 20 above B in cluster 0, of which 8 leave its 26.
    matrix = redraw_matrix([26, 0, 4], 6)
    np.testing.assert_allclose(matrix, [[18 / 26, 6 / 26, 2 / 26], [0, 1, 0], [0, 0, 1]], atol=1e-12)


def moved(labels, minimum, movable, draws=2000):
    rows = np.broadcast_to(np.array(labels), (draws, len(labels)))
    return move_members(rows, max(labels) + 1, minimum, np.random.default_rng(0), movable=movable)


def test_surplus_fills_the_gap_and_everyone_in_it_is_as_likely_to_go():
    labels = [0] * 6 + [1] * 5 + [2] * 1 + [-1]  # B = 3: surplus 3 and 2, gap 2
    after = moved(labels, 3, movable=surplus_members)
    sizes = [(after == j).sum(axis=1) for j in range(3)]
    assert (sizes[0] >= 3).all()
    assert (sizes[1] >= 3).all()
    assert (sizes[2] == 3).all()
    assert (after[:, 11] == 2).all()
    assert (after[:, 12] == -1).all()
    went = (after[:, :11] == 2).mean(axis=0)
    # Surplus of cluster 0 is 3 of 6 members, each in the pool of 5 with chance 1/2; two of five go: 0.2 each.
    np.testing.assert_allclose(went, [*[0.2] * 6, *[0.16] * 5], atol=0.04)


def test_as_printed_donors_are_drawn_below_b():
    labels = [0] * 3 + [1] * 1  # B = 2: the pool is all of cluster 0
    assert (np.sort(moved(labels, 2, movable=large_members), axis=1) == [0, 0, 1, 1]).all()
    donors_at_b = moved([0] * 2 + [1] * 2 + [2] * 0 + [3] * 2, 2, movable=large_members)
    assert ((donors_at_b == 2).sum(axis=1) == 2).all()
    assert ((donors_at_b == 0).sum(axis=1) < 2).any()
    protected = moved([0] * 2 + [1] * 2 + [3] * 2, 2, movable=surplus_members)
    assert (protected == [0, 0, 1, 1, 3, 3]).all()  # nobody above B: nobody goes


def test_no_minimum_moves_nobody():
    labels = np.array([[0, 0, 1]])
    assert move_members(labels, 2, 0, np.random.default_rng(0)) is labels
