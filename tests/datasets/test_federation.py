import sys
import types
from itertools import chain

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.datasets import DataError, Partition, Source, assign_groups, federate, parse_groups


@pytest.fixture
def numbered(monkeypatch):
    """100 training and 8 test images whose upper left pixel is their row, so that shards can be read off.

    Returns a function of `reuse` to the name of the data set.
    """

    def name(reuse):
        def images(n):
            x = np.zeros((n, 1, 2, 2), np.float32)
            x[:, 0, 0, 0] = np.arange(n)
            return x, np.arange(n) % 10

        module = types.ModuleType(f"numbered_{reuse}")
        module.make = lambda: Source("numbered", *images(100), *images(8), 10, reuse)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:make"

    return name


def rows_of(federation):
    """The training rows of each client; needs shift `none` or one of labels."""
    return [pixels(federation.shard(i).x[:, 0, 0, 0]).astype(int).tolist() for i in range(federation.clients)]


def joined(lists):
    return list(chain.from_iterable(lists))


def pixels(x):
    """Undo the map of [0, 1] to [-1, 1]."""
    return (x + 1) / 2


def double(x):
    return 2 * x


@for_rows(
    ("text", "proportions"),
    [("1", (1,)), ("4", (1, 1, 1, 1)), ("2:1:1", (2, 1, 1)), ("3:6:6:6", (3, 6, 6, 6)), ("0.5:0.25", (0.5, 0.25))],
)
def test_parse_groups(text, proportions):
    assert parse_groups(text) == proportions


@for_rows("text", ["", "0", "-1", "2.5", "four", "2:", ":", "1:0", "1:-1", "1:nan", "1:inf", "10001", "2,1"])
def test_parse_groups_refuses_nonsense(text):
    with pytest.raises(DataError, match="groups must be a number from 1 to 10000"):
        parse_groups(text)


@for_rows(
    ("clients", "groups", "sizes"),
    [
        *((500, "4", [125, 125, 125, 125]), (10, "4", [3, 3, 2, 2]), (1000, "2:1:1", [500, 250, 250])),
        *((21, "3:6:6:6", [3, 6, 6, 6]), (3, "3", [1, 1, 1])),
        *((10, "3:3:1", [4, 4, 2]), (11, "0.1:0.2:0.7", [1, 2, 8])),  # quotas 4.29, 4.29, 1.43 and 1.1, 2.2, 7.7
    ],
)
def test_group_sizes_are_by_largest_remainder(clients, groups, sizes):
    group_of = assign_groups(clients, parse_groups(groups))
    assert np.bincount(group_of).tolist() == sizes
    assert group_of.dtype == np.int64


def test_groups_interleave():
    assert assign_groups(8, (1, 1, 1, 1)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert set(assign_groups(1000, (2, 1, 1))[:8]) == {0, 1, 2}


@for_rows(("clients", "proportions"), [(3, (1, 1, 1, 1)), (10, (100, 1)), (0, (1,)), (-2, (1, 1))])
def test_every_group_has_a_client(clients, proportions):
    with pytest.raises(DataError, match="without a client"):
        assign_groups(clients, proportions)


def test_reused_images_are_shared_out_once_within_each_group(numbered):
    federation = federate(numbered(True), Partition(clients=14, groups="2:1", shift="none"))
    rows = rows_of(federation)
    for group, size in ((0, 9), (1, 5)):
        held = [rows[i] for i in np.flatnonzero(federation.group_of == group)]
        assert len(held) == size
        assert sorted(joined(held)) == list(range(100))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_other_images_are_shared_out_once_among_all(numbered):
    rows = rows_of(federate(numbered(False), Partition(clients=14, groups="2", shift="none")))
    assert sorted(joined(rows)) == list(range(100))
    assert {len(r) for r in rows} == {7, 8}
    assert joined(rows) != list(range(100))


@pytest.mark.parametrize("reuse", [True, False])
def test_fixed_sample_sizes(numbered, reuse):
    name = numbered(reuse)
    rows = rows_of(federate(name, Partition(clients=10, groups="2", shift="none", samples_per_client=10)))
    assert sorted(joined(rows)) == list(range(100))
    crowded = federate(name, Partition(clients=10, groups="2", shift="none", samples_per_client=20))
    rows = rows_of(crowded)
    orders = []
    for group in (0, 1):
        held = joined(rows[i] for i in np.flatnonzero(crowded.group_of == group))
        assert sorted(held) == list(range(100))
        orders.append(held)
    assert orders[0] != orders[1]
    with pytest.raises(DataError, match="5 clients need 105 training images, but numbered has 100"):
        federate(name, Partition(clients=10, groups="2", shift="none", samples_per_client=21))


def test_more_clients_than_images(numbered):
    with pytest.raises(DataError, match="101 clients need 101 training images, but numbered has 100"):
        federate(numbered(False), Partition(clients=101, groups="2"))
    assert federate(numbered(True), Partition(clients=200, groups="2")).clients == 200
    with pytest.raises(DataError, match="101 clients need 101"):
        federate(numbered(True), Partition(clients=202, groups="2"))


def test_the_seed_draws_the_split_and_nothing_else_does(numbered):
    name = numbered(False)
    first = federate(name, Partition(clients=5, groups="1", shift="none"), seed=1)
    again = federate(name, Partition(clients=5, groups="1", shift="label-shift"), seed=1)
    other = federate(name, Partition(clients=5, groups="1", shift="none"), seed=2)
    assert rows_of(first) == rows_of(again) != rows_of(other)


def test_train_and_test_of_a_client_share_its_groups_shift(numbered):
    federation = federate(numbered(True), Partition(clients=8, groups="4", shift="label-permutation"), seed=5)
    for i in range(8):
        shard = federation.shard(i)
        true_train = pixels(shard.x[:, 0, 0, 0]).astype(int) % 10
        true_test = pixels(shard.test.x[:, 0, 0, 0]).astype(int) % 10
        learned = dict(zip(true_train.tolist(), shard.y.tolist(), strict=True))
        assert [learned[label] for label in true_test] == shard.test.y.tolist()


def test_rotated_shards_are_the_rotated_images(numbered):
    federation = federate(numbered(True), Partition(clients=8, groups="4", shift="rotation"))
    corner = {0: (0, 0), 1: (1, 0), 2: (1, 1), 3: (0, 1)}
    for i in range(8):
        shard = federation.shard(i)
        row, column = corner[shard.group]
        np.testing.assert_array_equal(shard.y, pixels(shard.x[:, 0, row, column]).astype(int) % 10)
        np.testing.assert_array_equal(pixels(shard.test.x[:, 0, row, column]), np.arange(8))


def test_a_group_shares_one_test_set_and_shards_are_kept(numbered):
    federation = federate(numbered(True), Partition(clients=6, groups="2"))
    shards = [federation.shard(i) for i in range(6)]
    assert [s.client_id for s in shards] == list(range(6))
    assert [s.group for s in shards] == federation.group_of.tolist() == [0, 1] * 3
    assert len({id(s.test) for s in shards}) == 2
    assert all(s.test is federation.test_set(s.group) for s in shards)
    assert federation.shard(3) is shards[3]
    assert federate(numbered(True), Partition(groups="2", clients=6)) is federation


def test_bytes_become_fractions_and_the_source_stays(monkeypatch):
    images = np.full((4, 1, 2, 2), 255, np.uint8), np.arange(4), np.full((1, 1, 2, 2), 51, np.uint8), np.arange(1)
    source = Source("bytes", *images, 4)
    module = types.ModuleType("bytes_data")
    module.make = lambda: source
    monkeypatch.setitem(sys.modules, "bytes_data", module)
    federation = federate("bytes_data:make", Partition(clients=2, groups="1", shift="none"))
    shard = federation.shard(0)
    assert (shard.x.dtype, shard.y.dtype) == (np.float32, np.int64)
    assert (pixels(shard.x) == 1).all()
    np.testing.assert_allclose(pixels(shard.test.x), 0.2, rtol=1e-6)
    shard.test.y[:] = 3
    assert source.test_y.tolist() == [0]
    assert (source.train_x == 255).all()


def test_the_transform_comes_after_the_shift_once(numbered):
    def left_half(x):
        return x[..., :1]

    federation = federate(numbered(True), Partition(clients=4, groups="4"), transform=left_half)
    assert federation.input_shape == (1, 2, 1)
    # A quarter turn brings the marked upper left pixel to the lower left, a half turn to the lower right.
    assert pixels(federation.shard(1).x[:, 0, 1, 0]).any()
    assert not pixels(federation.shard(2).x).any()
    doubled = federate(numbered(True), Partition(clients=4, groups="4", shift="none"), transform=double)
    assert sorted(doubled.shard(0).x[:, 0, 0, 0]) == [2 * (2 * i - 1) for i in range(100)]
    assert doubled.shard(0).test.x[:, 0, 0, 0].tolist() == [2 * (2 * i - 1) for i in range(8)]


def test_a_negative_seed_is_refused():
    with pytest.raises(DataError, match="seed is -1; it must be at least 0"):
        federate("digits", Partition(clients=20), seed=-1)


def test_no_such_client():
    federation = federate("digits", Partition(clients=20))
    for client in (-1, 20):
        with pytest.raises(DataError, match=f"client {client} does not exist; clients are numbered from 0 to 19"):
            federation.shard(client)
    with pytest.raises(DataError, match="group 4 does not exist"):
        federation.test_set(4)
