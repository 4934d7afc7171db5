"""Neighbours on a ring: survivors that are signed stay connected without any of them that may be corrupt."""

from itertools import combinations

import numpy as np
import pytest

from coterie.privacy.secure_aggregation.neighbours import COMPLETE, connected, reach, ring


def is_connected(places, clients, reach):
    """Whether a graph of places on a ring is connected, by a search."""
    left, found = set(places), [min(places)]
    while found:
        one = found.pop()
        left.discard(one)
        apart = {other: min((one - other) % clients, (other - one) % clients) for other in left}
        near = [other for other, places_apart in apart.items() if places_apart <= reach]
        left -= set(near)
        found += near
    return not left


@pytest.mark.parametrize("clients", [9, 12])
@pytest.mark.parametrize("reach", [1, 2, 3])
@pytest.mark.parametrize("corrupt", [0, 1, 2])
def test_survivors_stay_connected_without_any_of_them_that_may_be_corrupt(clients, reach, corrupt):
    passed = 0
    for count in range(corrupt + 2, clients + 1):
        for places in combinations(range(clients), count):
            if connected(places, clients, reach, corrupt):
                passed += 1
                for gone in combinations(places, corrupt):
                    assert is_connected(set(places) - set(gone), clients, reach)
    assert passed > 0 or corrupt >= reach


def test_a_gap_among_survivors_is_noticed():
    assert connected(range(1000), 1000, 30, 1)
    assert connected([place for place in range(1000) if not 10 <= place < 38], 1000, 30, 1)
    assert not connected([place for place in range(1000) if not 10 <= place < 39], 1000, 30, 1)
    assert not connected([place for place in range(1000) if not 985 <= place < 1014 and place >= 14], 1000, 30, 1)
    lonely = [place for place in range(1000) if place == 50 or not 20 <= place < 80]
    assert not connected(lonely, 1000, 30, 0)


@pytest.mark.parametrize("clients", [201, 500, 2000])
@pytest.mark.parametrize("corrupt", [0, 1, 5])
def test_a_third_that_drops_out_at_random_spoils_no_round(clients, corrupt):
    rng, places = np.random.default_rng(clients + corrupt), reach(clients, corrupt)
    assert corrupt + 1 < places < 60
    for _ in range(300):
        assert connected(np.flatnonzero(rng.random(clients) < 2 / 3).tolist(), clients, places, corrupt)


def test_a_small_cohort_is_complete():
    for clients in (1, 2, 3, 10, COMPLETE):
        assert 2 * reach(clients, 1) + 1 >= clients
        assert connected([0, 1], clients, reach(clients, 1), 1)


def test_the_ring_is_another_one_in_every_round():
    one, other = ring(b"one", range(50)), ring(b"other", range(50))
    assert sorted(one) == sorted(other) == list(range(50))
    assert one != other
    assert one == ring(b"one", range(49, -1, -1))
