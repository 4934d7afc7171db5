"""Natural clients, label distributions of one's own, and clients set aside for validation."""

import dataclasses
import sys
import types
from itertools import count

import numpy as np
import pytest
from kit.tables import for_rows

from coterie.datasets import DataError, Partition, Source, federate
from coterie.fields.settings import ConfigError

NUMBERS = count()


@pytest.fixture
def named(monkeypatch):
    """A function from a source to the name by which `federate` finds it."""

    def name(source):
        module = types.ModuleType(f"own_source_{next(NUMBERS)}")
        module.make = lambda: source
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:make"

    return name


def numbered(train_y, test_y, *, reuse=False, **owners):
    """Images whose upper left pixel is their row: training rows from 1, test rows from -1 downwards."""

    def images(n, sign):
        x = np.zeros((n, 1, 2, 2), np.float32)
        x[:, 0, 0, 0] = sign * np.arange(1, n + 1)
        return x

    train_y, test_y = np.asarray(train_y), np.asarray(test_y)
    train_x, test_x = images(len(train_y), 1), images(len(test_y), -1)
    return Source("numbered", train_x, train_y, test_x, test_y, 10, reuse, **owners)


def rows(part):
    """Row numbers of a shard or test set without a shift of images."""
    return ((part.x[:, 0, 0, 0] + 1) / 2).astype(int).tolist()


def speakers():
    """Five owners with 4, 9, 2, 9 and 1 training rows, and with 1, 2, 3, 4 and 5 test rows, in mixed order."""
    train = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [4, 9, 2, 9, 1]))
    test = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [1, 2, 3, 4, 5]))
    return numbered(np.arange(25) % 10, np.arange(15) % 10, train_owner=train, test_owner=test)


def plain(name, seed=0, data_dir=None, transform=None, **changes):
    partition = Partition(**({"groups": "1", "shift": "none"} | changes))
    return federate(name, partition, seed=seed, data_dir=data_dir, transform=transform)


def test_clients_are_the_owners_with_most_rows(named):
    source = speakers()
    federation = plain(named(source), clients=4)
    shards = [federation.shard(i) for i in range(4)]
    for shard, owner in zip(shards, (1, 3, 0, 2), strict=True):
        assert rows(shard) == (np.flatnonzero(source.train_owner == owner) + 1).tolist()
        assert rows(shard.test) == (-np.flatnonzero(source.test_owner == owner) - 1).tolist()
    assert federation.num_groups == 1
    assert federation.shard(2).test is shards[2].test
    assert len({id(shard.test) for shard in shards}) == 4


def test_at_most_so_many_random_rows_of_each_owner(named):
    source = speakers()
    name = named(source)
    drawn = {seed: plain(name, clients=5, samples_per_client=3, seed=seed) for seed in (1, 2)}
    for federation in drawn.values():
        held = [rows(federation.shard(i)) for i in range(5)]
        assert [len(own) for own in held] == [3, 3, 3, 2, 1]
        for own, owner in zip(held, (1, 3, 0, 2, 4), strict=True):
            assert len(set(own)) == len(own)
            assert set(source.train_owner[np.array(own) - 1]) == {owner}
        assert [len(federation.shard(i).test.y) for i in range(5)] == [2, 4, 1, 3, 5]
    assert rows(drawn[1].shard(0)) != rows(drawn[2].shard(0))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"clients": 6}, "numbered has 5 natural clients, not 6 clients; use at most 5"),
        ({"clients": 4, "validation_clients": 2}, "has 5 natural clients, not 4 clients and 2 validation clients"),
        ({"clients": 4, "groups": "2"}, r"set groups to 1, and shift .* \(they are 2 groups, none and none\)"),
        ({"clients": 4, "shift": "label-shift"}, "5 natural clients, whose data are fixed"),
        ({"clients": 4, "label_skew": "dirichlet:0.5"}, "label-skew to none .*1 groups, none and dirichlet:0.5"),
        ({"clients": 4, "label_skew": "classes:3"}, "label-skew to none .*none and classes:3"),
        ({"clients": 4, "label_skew": "non-iid:0"}, "numbered has 5 natural clients, .*none and non-iid:0"),
    ],
)
def test_impossible_natural_clients_are_refused(named, arguments, complaint):
    with pytest.raises(DataError, match=complaint):
        plain(named(speakers()), **arguments)


def test_owners_set_aside_are_drawn_at_random(named):
    """Always the smallest of five would have probability 1/5**20."""
    source = speakers()
    name = named(source)
    aside = []
    for seed in range(20):
        federation = plain(name, clients=4, validation_clients=1, seed=seed)
        test = federation.test_set(0)
        owners = source.train_owner[np.array(rows(test)) - 1]
        assert len(set(owners)) == 1
        assert len(owners) == (source.train_owner == owners[0]).sum()
        aside.append(owners[0])
        assert all(federation.shard(i).test is test for i in range(4))
        held = [row for i in range(4) for row in rows(federation.shard(i))]
        assert sorted(held + rows(test)) == list(range(1, 26))
    assert len(set(aside)) >= 3


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("samples", [0, 20])
def test_dirichlet_gives_each_row_once(named, alpha, samples):
    source = numbered(np.arange(1000) % 10, np.arange(300) % 10, reuse=True)
    federation = federate(
        named(source),
        Partition(clients=30, groups="3", shift="none", label_skew=f"dirichlet:{alpha}", samples_per_client=samples),
    )
    held = [rows(federation.shard(i)) for i in range(30)]
    assert {len(own) for own in held} == {samples or 33}
    flat = np.concatenate(held)
    assert len(set(flat)) == len(flat)
    for i, own in enumerate(held):
        shard = federation.shard(i)
        np.testing.assert_array_equal(shard.y, source.train_y[np.array(own) - 1])
        np.testing.assert_array_equal(shard.test.y, source.test_y[-np.array(rows(shard.test)) - 1])
        assert len(shard.test.y) == 32
        assert shard.test is federation.shard(i).test
    assert len({id(federation.shard(i).test) for i in range(30)}) == 30


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_label_distributions_are_dirichlets(named, alpha):
    """sum p_k^2 has mean (alpha + 1)/(10 alpha + 1); two of a client's N labels agree with that probability.

    Its mean over 400 clients of 50 labels is within 5 standard errors (measured), where rows are plentiful.
    """
    federation = plain(
        named(numbered(np.arange(100_000) % 10, np.arange(50) % 10)),
        clients=400,
        label_skew=f"dirichlet:{alpha}",
        samples_per_client=50,
    )
    counts = np.array([np.bincount(federation.shard(i).y, minlength=10) for i in range(400)])
    agree = (counts * (counts - 1)).sum(1) / (50 * 49)
    expected = (alpha + 1) / (10 * alpha + 1)
    assert abs(agree.mean() - expected) < 5 * agree.std() / np.sqrt(400)
    np.testing.assert_allclose(counts.mean(0), 5, atol=5 * counts.std(0).max() / np.sqrt(400))


def test_test_rows_follow_the_training_labels(named):
    """2,000 rows each: frequencies agree up to sampling, standard error at most 0.016 for a difference."""
    source = numbered(np.arange(100_000) % 10, np.arange(20_000) % 10)
    federation = plain(named(source), clients=10, label_skew="dirichlet:0.3", samples_per_client=2000)
    for i in range(10):
        shard = federation.shard(i)
        train, test = (np.bincount(y, minlength=10) / len(y) for y in (shard.y, shard.test.y))
        assert len(shard.test.y) == 2000
        np.testing.assert_allclose(train, test, atol=5 * 0.016)
        assert len(set(rows(shard.test))) == 2000 or test.max() > 0.9


def test_test_rows_follow_what_a_client_was_given_where_classes_run_out(named):
    """Everybody wants whatever is left of two classes, of which one has a single row."""
    source = numbered([0] * 199 + [1], [0] * 50 + [1] * 50)
    federation = plain(named(source), clients=10, label_skew="dirichlet:1")
    ones = [int((federation.shard(i).test.y == 1).sum()) for i in range(10)]
    takers = [i for i in range(10) if (federation.shard(i).y == 1).any()]
    assert len(takers) == 1
    assert sum(ones) - ones[takers[0]] < 0.2 * 32 * 9  # most never had a chance of a one; half would be ones by wish


def test_repetition_only_where_a_class_has_too_few_rows(named):
    source = numbered(np.repeat(np.arange(10), 100), np.arange(40) % 10)
    federation = plain(named(source), clients=10, label_skew="dirichlet:1e-06")
    for i in range(10):
        test = federation.shard(i).test
        for label in set(test.y):
            times = np.unique(np.array(rows(test))[test.y == label], return_counts=True)[1]
            assert times.max() - times.min() <= 1
            assert len(times) == min(4, (test.y == label).sum())


def test_no_client_is_first_where_classes_run_out(named):
    """At alpha near 0 and all rows given, whoever comes late gets leftovers; that is as often an early id."""
    source = numbered(np.arange(1000) % 10, np.arange(10))
    pure = np.zeros(20)
    name = named(source)
    for seed in range(30):
        federation = plain(name, clients=20, label_skew="dirichlet:1e-06", seed=seed)
        pure += [len(set(federation.shard(i).y)) == 1 for i in range(20)]
    assert pure.sum() < 0.95 * 600
    difference = pure[:10].mean() - pure[10:].mean()
    assert abs(difference) < 5 * np.sqrt(2 * 30 / 4 / 10)


def test_each_client_holds_so_many_classes_in_equal_shares(named):
    """25 clients of 3 classes are 75 holders of 10 classes: 7 or 8 each."""
    source = numbered(np.arange(1000) % 10, np.arange(1000) % 10, reuse=True)
    federation = plain(named(source), clients=25, label_skew="classes:3", samples_per_client=20)
    shards = [federation.shard(i) for i in range(25)]
    held = [rows(shard) for shard in shards]
    assert len(set(np.concatenate(held))) == 25 * 20
    counts = np.array([np.bincount(shard.y, minlength=10) for shard in shards])
    np.testing.assert_array_equal(np.sort(counts, axis=1), [[0] * 7 + [6, 7, 7]] * 25)
    assert sorted((counts > 0).sum(axis=0)) == [7] * 5 + [8] * 5
    for shard, own, of_class in zip(shards, held, counts, strict=True):
        np.testing.assert_array_equal(shard.y, source.train_y[np.array(own) - 1])
        np.testing.assert_array_equal(shard.test.y, source.test_y[-np.array(rows(shard.test)) - 1])
        tests = np.bincount(shard.test.y, minlength=10)
        assert len(set(rows(shard.test))) == 40  # 1,000 // 25, none twice
        np.testing.assert_allclose(tests, 40 * of_class / 20, atol=0.999)  # shares of 14, 14 and 12


def test_holders_of_a_class_share_all_of_it(named):
    """Classes have 10, 20, ..., 100 rows; 4 clients of 5 classes hold each class twice."""
    source = numbered(np.repeat(np.arange(10), 10 * np.arange(1, 11)), np.arange(50) % 10)
    federation = plain(named(source), clients=4, label_skew="classes:5")
    shards = [federation.shard(i) for i in range(4)]
    assert sorted(row for shard in shards for row in rows(shard)) == list(range(1, 551))
    for shard in shards:
        counts, tests = (np.bincount(y, minlength=10) for y in (shard.y, shard.test.y))
        assert (counts > 0).sum() == 5
        np.testing.assert_array_equal(counts, np.where(counts > 0, 5 * np.arange(1, 11), 0))
        assert tests.sum() == 32
        np.testing.assert_allclose(tests, 32 * counts / counts.sum(), atol=0.999)


def test_classes_are_drawn_at_random(named):
    """A client has each class in 3 of 10 seeds; over 400 seeds within 5 standard deviations of sqrt(400 * 0.21).

    Each pair of classes is one of 3 among 45, so a client never has it with probability (14/15)**400 = 1e-12. Clients
    0 and 1 would never meet if they always drew one after the other.
    """
    name = named(numbered(np.arange(100) % 10, np.arange(10)))
    held = np.zeros((400, 7, 10), int)
    for seed in range(400):
        federation = plain(name, clients=7, label_skew="classes:3", seed=seed)
        for i in range(7):
            held[seed, i, np.unique(federation.shard(i).y)] = 1
    np.testing.assert_allclose(held.sum(axis=0), 120, atol=5 * np.sqrt(400 * 0.21))
    assert (held[:, 0].T @ held[:, 0]).min() > 0
    assert (held[:, 0] & held[:, 1]).any()


def test_a_class_without_test_rows_is_refused(named):
    source = numbered(np.arange(100) % 10, np.arange(9))
    with pytest.raises(DataError, match="numbered has no test images of class 9, but clients have"):
        plain(named(source), clients=5, label_skew="classes:2")


def uneven():
    """Ten classes of 120, 110, ..., 30 rows, of which every third is a test row."""
    y = np.repeat(np.arange(10), 10 * np.arange(12, 2, -1))
    return numbered(y[np.arange(len(y)) % 3 > 0], y[::3])


@pytest.mark.parametrize("level", [0, 0.25, 0.5, 0.75, 1])
@pytest.mark.parametrize("clients", [1, 4, 10, 23])
def test_the_level_of_each_class_goes_to_its_clients_and_the_rest_to_all(named, level, clients):
    """The rest of a class is hypergeometric: every number is within 5 of the deviations of a binomial, and 1 beside."""
    source = uneven()
    federation = plain(named(source), clients=clients, label_skew=f"non-iid:{level}")
    shards = [federation.shard(i) for i in range(clients)]
    held = [rows(shard) for shard in shards]
    assert sorted(np.concatenate(held)) == [*range(-250, 0), *range(1, 501)]  # all rows, each once
    for shard, own in zip(shards, held, strict=True):
        own = np.array(own)
        y = np.where(own > 0, source.train_y[own - 1], source.test_y[np.where(own < 0, -own - 1, 0)])
        np.testing.assert_array_equal(shard.y, y)
        assert (shard.test.x is shard.x, shard.test.y is shard.y) == (True, True)
    counts = np.array([np.bincount(shard.y, minlength=10) for shard in shards])
    sizes = 10 * np.arange(12, 2, -1)
    mine = np.arange(10) == np.arange(clients)[:, None] % 10
    fixed = np.where(mine, np.round(level * sizes) / np.maximum(mine.sum(0), 1), 0)
    rest = (sizes - fixed.sum(0)) / clients
    assert (np.abs(counts - fixed - rest) <= 5 * np.sqrt(rest * (1 - 1 / clients)) + mine).all()
    np.testing.assert_allclose(counts.sum(1), (fixed + rest).sum(1), atol=1.999)  # two roundings


def test_both_ends_of_the_level_are_exact(named):
    name = named(uneven())
    for i in range(10):
        assert plain(name, clients=10, label_skew="non-iid:1").shard(i).y.tolist() == [i] * (120 - 10 * i)
    assert {len(plain(name, clients=10, label_skew="non-iid:0").shard(i).y) for i in range(10)} == {75}
    counts = [np.bincount(plain(name, clients=10, label_skew="non-iid:0").shard(i).y, minlength=10) for i in range(10)]
    expected = np.arange(12, 2, -1)
    chi_squared = ((counts - expected) ** 2 / expected).sum()  # of 81 degrees of freedom; dealt by class, near 0
    assert abs(chi_squared - 81) < 5 * np.sqrt(2 * 81)
    twice = plain(name, clients=13, label_skew="non-iid:1")  # classes 0, 1 and 2 have two clients
    assert [len(twice.shard(i).y) for i in range(13)] == [60, 55, 50, 90, 80, 70, 60, 50, 40, 30, 60, 55, 50]
    assert all(set(twice.shard(i).y) == {i % 10} for i in range(13))


def test_rows_of_a_level_are_drawn_and_shuffled_by_the_seed(named):
    """Mean places, of a client's own class and of its test rows, are within 5 deviations of the middle."""
    name, copy = named(uneven()), named(uneven())
    half = plain(name, clients=10, label_skew="non-iid:0.5").shard(0)
    places = np.flatnonzero(half.y == 0) / len(half.y)
    assert abs(places.mean() - 0.5) < 5 / np.sqrt(12 * len(places))
    drawn = [rows(plain(name, clients=20, label_skew="non-iid:1", seed=seed).shard(0)) for seed in (1, 2)]
    assert set(drawn[0]) != set(drawn[1])
    for own in drawn:
        tests = np.flatnonzero(np.array(own) < 0) / len(own)
        assert abs(tests.mean() - 0.5) < 5 / np.sqrt(12 * len(tests))
    assert rows(plain(copy, clients=20, label_skew="non-iid:1", seed=1).shard(0)) == drawn[0]


def test_so_many_random_rows_of_a_level(named):
    """Of a class of n, client c has n/2 + n/20 in its n/2 + 750/20 rows; a third of all are test rows: 5 deviations."""
    federation = plain(named(uneven()), clients=10, label_skew="non-iid:0.5", samples_per_client=30)
    shards = [federation.shard(i) for i in range(10)]
    held = np.array([rows(shard) for shard in shards])
    assert held.shape == (10, 30)
    assert len(set(held.ravel())) == 300
    assert all(shard.test.x is shard.x for shard in shards)
    assert abs((held < 0).sum() - 100) < 5 * np.sqrt(300 * 2 / 9)
    own = np.array([(shard.y == i).sum() for i, shard in enumerate(shards)])
    sizes = 10 * np.arange(12, 2, -1)
    shares = 0.55 * sizes / (sizes / 2 + 37.5)
    assert (abs(own - 30 * shares) < 5 * np.sqrt(30 * shares * (1 - shares))).all()


def test_nothing_is_held_out_at_a_level(named):
    source = uneven()
    federation = federate(named(source), Partition(clients=10, groups="2", shift="label-shift", label_skew="non-iid:1"))
    assert all(set(federation.shard(i).y) == {(i + i % 2) % 10} for i in range(10))
    for group in (0, 1):
        test = federation.test_set(group)
        assert rows(test) == [*range(1, 501), *range(-1, -251, -1)]
        np.testing.assert_array_equal(test.y, (np.concatenate([source.train_y, source.test_y]) + group) % 10)
    assert source.whole is source.whole
    mixed = dataclasses.replace(source, test_x=np.zeros(source.test_x.shape, np.uint8))
    with pytest.raises(DataError, match="numbered: train_x and test_x must have the same dtype"):
        plain(named(mixed), clients=6, label_skew="non-iid:1")


@pytest.mark.parametrize("spread", [{"label_skew": "dirichlet:0.5"}, {"label_skew": "classes:3"}])
def test_the_shift_of_a_group_comes_on_top(named, spread):
    source = numbered(np.arange(200) % 10, np.arange(50) % 10)
    federation = federate(named(source), Partition(clients=6, groups="2", shift="label-shift", **spread))
    for i in range(6):
        shard = federation.shard(i)
        np.testing.assert_array_equal(shard.y, (source.train_y[np.array(rows(shard)) - 1] + i % 2) % 10)
        np.testing.assert_array_equal(shard.test.y, (source.test_y[-np.array(rows(shard.test)) - 1] + i % 2) % 10)


NO_SKEWS = "non-iid", "none:0", "non-iid:-0.5", "non-iid:nan", "dirichlet:0", "dirichlet:inf", "classes:2.5", "None"


@for_rows(
    ("complaint", "arguments"),
    [
        ("shift = 'rotations': must be label-permutation, .*; did you mean 'rotation'\\?", {"shift": "rotations"}),
        ("samples-per-client = -1: must be an integer", {"samples_per_client": -1}),
        ("clients = 0: must be an integer", {"clients": 0}),
        ("without a client", {"clients": 3}),
        (
            "20 clients need 1420 training im.*s, but digits has 1400",
            {"label_skew": "dirichlet:1", "samples_per_client": 71},
        ),
        ("1401 clients need 1401 training images, but digits has 1400", {"label_skew": "dirichlet:1", "clients": 1401}),
        ("label-skew is classes:11; digits has 10 classes", {"label_skew": "classes:11"}),
        ("samples-per-client is 2, less than the 3 classes", {"label_skew": "classes:3", "samples_per_client": 2}),
        (
            r"20 clients need 200 training images of class \d, but digits has \d+; use fewer clients",
            {"label_skew": "classes:10", "samples_per_client": 100},
        ),
        *(
            (f"label-skew = '{text}': must be none, dirichlet:ALPHA, classes:NUMBER, or non-iid:", {"label_skew": text})
            for text in NO_SKEWS
        ),
        (
            "validation-clients = 4: label-skew = non-iid:1 divides",
            {"label_skew": "non-iid:1", "validation_clients": 4},
        ),
        (
            r"client \d+ has 8\d of digits's 1797 images at label-skew = non-iid:1, but needs 100; use fewer clients",
            {"label_skew": "non-iid:1", "samples_per_client": 100},
        ),
        ("client 1797 has 0 of digits's 1797 images .* needs 1", {"label_skew": "non-iid:0", "clients": 1798}),
        (
            "label-skew = non-iid:0 requires classes, but lines-easy has real targets; set it to none",
            {"dataset": "lines-easy", "shift": "lines", "label_skew": "non-iid:0"},
        ),
        ("validation-clients: 3 clients in groups 1:1:1:1 leave group 3 without a client", {"validation_clients": 3}),
        (
            "need 5000 training images, but digits",
            {"clients": 1000, "validation_clients": 500, "samples_per_client": 20},
        ),
    ],
)
def test_impossible_splits_are_refused(complaint, arguments):
    dataset = arguments.get("dataset", "digits")
    changes = {name: value for name, value in arguments.items() if name != "dataset"}
    with pytest.raises((DataError, ConfigError), match=complaint):
        federate(dataset, Partition(**({"clients": 20} | changes)))


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"samples_per_client": 5},
        {"samples_per_client": 12},
        {"label_skew": "dirichlet:0.3"},
        {"label_skew": "classes:3"},
        {"label_skew": "classes:3", "samples_per_client": 5},
    ],
)
def test_validation_holds_rows_that_no_client_has_and_no_test_row(named, reuse, arguments):
    source = numbered(np.arange(120) % 10, np.arange(40) % 10, reuse=reuse)
    federation = federate(
        named(source), Partition(clients=10, groups="2", shift="label-shift", validation_clients=4, **arguments)
    )
    assert federation.clients == len(federation.group_of) == 10
    shards = [federation.shard(i) for i in range(10)]
    trained = {row for shard in shards for row in rows(shard)}
    for group in (0, 1):
        test = federation.test_set(group)
        held = rows(test)
        assert len(held) == len(set(held)) > 0
        assert min(held) > 0  # test rows are negative
        assert not trained & set(held)
        np.testing.assert_array_equal(test.y, (source.train_y[np.array(held) - 1] + group) % 10)
        assert all(shard.test is test for shard in shards if shard.group == group)
    with pytest.raises(DataError, match="client 10 does not exist"):
        federation.shard(10)
    if not arguments:
        everything = [*trained, *rows(federation.test_set(0)), *rows(federation.test_set(1))]
        assert set(everything) == set(range(1, 121))
        sizes = [len(shard.y) for shard in shards]
        assert max(sizes) - min(sizes) <= 1


def test_no_test_array_is_touched_while_tuning(named):
    """The result is the same whatever the test arrays hold."""
    source = numbered(np.arange(120) % 10, np.arange(40) % 10)
    other = dataclasses.replace(source, test_x=np.full((3, 1, 2, 2), 7, np.float32), test_y=np.zeros(3, np.int64))
    owned = speakers()
    cases = [
        (source, other, {"groups": "2", "shift": "rotation"}),
        (source, other, {"label_skew": "dirichlet:0.5"}),
        (source, other, {"label_skew": "classes:3"}),
        (owned, dataclasses.replace(owned, test_x=owned.test_x + 7), {"clients": 2}),
    ]
    for first, second, arguments in cases:
        federations = [
            plain(named(s), **({"clients": 8, "validation_clients": 2} | arguments)) for s in (first, second)
        ]
        for i in range(federations[0].clients):
            one, two = (federation.shard(i) for federation in federations)
            for a, b in ((one.x, two.x), (one.y, two.y), (one.test.x, two.test.x), (one.test.y, two.test.y)):
                np.testing.assert_array_equal(a, b)


def test_clients_keep_their_groups_beside_those_set_aside(named):
    name = named(numbered(np.arange(120) % 10, np.arange(40) % 10))
    without = federate(name, Partition(clients=10, groups="3:2", shift="none"))
    beside = federate(name, Partition(clients=10, groups="3:2", shift="none", validation_clients=5))
    np.testing.assert_array_equal(without.group_of, beside.group_of)
    assert len(beside.test_set(0).y) == pytest.approx(1.5 * len(beside.test_set(1).y), rel=0.1)


def test_tokens_and_vectors_pass_as_they_are(named):
    train, test = (np.array([[0, 5], [3, 9]] * 4), np.arange(8)), (np.array([[1, 1]]), np.array([2]))
    source = Source("chars", *train, *test, 10, reuse=True)
    federation = plain(named(source), clients=2)
    shard = federation.shard(0)
    assert (shard.x.dtype, shard.y.dtype, federation.input_shape) == (np.int64, np.int64, (2,))
    assert set(map(tuple, shard.x)) <= {(0, 5), (3, 9)}
    assert shard.test.x.tolist() == [[1, 1]]
    shard.test.x[:] = 0
    assert source.test_x.tolist() == [[1, 1]]
    lines = plain("lines-easy", clients=2).shard(0)
    assert (lines.x.dtype, lines.y.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("transform", [lambda x: x[:, :, ::2], lambda x: x[:, :1], lambda x: x.copy()])
def test_features_of_what_is_no_image_are_refused(transform):
    plain("lines-easy", clients=2, transform=lambda x: x)
    words = "features require images, but lines-easy contains vectors; use features 'none'"
    with pytest.raises(DataError, match=words):
        plain("lines-easy", clients=2, transform=transform)
