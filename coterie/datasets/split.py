"""Partition the rows of a source among clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.datasets.partition import Partition
from coterie.datasets.sources import DataError, Source

Rows = npt.NDArray[np.int64]

#: Minimum size of a client's test set in `by_dirichlet` and `by_classes`.
_MIN_TESTS = 32


@dataclass(frozen=True)
class Split:
    """Rows of each client, validation clients last.

    Attributes:
        train: rows of the training arrays.
        test: rows of the test arrays; None if a whole group shares all of them, or if the data of validation clients
            replace them; `train` itself if nothing is held out.
    """

    train: list[Rows]
    test: list[Rows] | None = None


def divided(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Divide the rows of a source: by owner if it has natural clients, else as `Partition` states.

    Raises:
        DataError: there are too few rows, classes or natural clients.
    """
    if source.owners:
        return by_owner(source, partition, rng)
    by_labels = {"dirichlet": by_dirichlet, "classes": by_classes, "non-iid": by_level}
    return by_labels.get(partition.skew[0], evenly)(source, partition, rng)


def evenly(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Distribute training rows at random.

    Validation clients receive their rows first, so no other client of any group holds them.

    Raises:
        DataError: there are too few rows.
    """
    rows, group_of, set_aside = np.arange(len(source.train_y)), partition.group_of(), partition.validation_clients
    if not set_aside:
        return Split(_share_out(source, rows, group_of, partition.samples_per_client, rng))
    rows = rng.permutation(rows)
    parts = np.split(rows, [len(rows) - len(rows) * set_aside // len(group_of)])
    groups = np.split(group_of, [partition.clients])
    return Split(
        [
            shard
            for subset, members in zip(parts, groups, strict=True)
            for shard in _share_out(source, subset, members, partition.samples_per_client, rng)
        ]
    )


def by_owner(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Map clients to the owners with the most training rows, ties to the lower owner.

    Validation clients are a random sample of them: the smallest owners would not be representative.

    Raises:
        DataError: there are more clients than owners.
    """
    set_aside, samples = partition.validation_clients, partition.samples_per_client
    wanted = partition.clients + set_aside
    if wanted > source.owners:
        asked = f"{partition.clients} clients" + (f" and {set_aside} validation clients" if set_aside else "")
        raise DataError(f"{source.name} has {source.owners} natural clients, not {asked}; use at most {source.owners}")
    train = _rows_by(source.train_owner, source.owners)
    test = _rows_by(source.test_owner, source.owners)
    largest = np.argsort([-len(rows) for rows in train], kind="stable")[:wanted]
    aside = np.isin(np.arange(wanted), rng.choice(wanted, set_aside, replace=False))
    chosen = [*largest[~aside], *largest[aside]]
    return Split(
        [rng.permutation(train[i])[:samples] if samples else train[i] for i in chosen],
        None if set_aside else [test[i] for i in chosen],
    )


def by_dirichlet(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Draw the rows of each client from a label distribution of Dirichlet(alpha) (arXiv:1909.06335).

    Each training row is assigned once. When a class is exhausted, the remaining classes of the client's distribution
    replace it, or any remaining rows if there are none; clients draw in random order, so exhaustion affects random
    clients. The test rows of a client follow the distribution of its training rows, without repetition while a class
    has enough rows.

    Raises:
        DataError: there are too few rows.
    """
    set_aside, available = partition.validation_clients, len(source.train_y)
    everyone = partition.clients + set_aside
    size = partition.samples_per_client or available // everyone
    if not 0 < everyone * size <= available:
        raise _too_few(source, everyone, everyone * max(size, 1), available)
    by_class = [rng.permutation(rows) for rows in _rows_by(source.train_y, source.num_classes)]
    tests = _rows_by(source.test_y, source.num_classes)
    test_size = max(_MIN_TESTS, len(source.test_y) // partition.clients)
    left = np.array([len(rows) for rows in by_class])
    preferences = rng.dirichlet(np.full(source.num_classes, partition.skew[1]), size=everyone)
    train, test = ([np.empty(0, np.int64)] * everyone for _ in range(2))
    for i in rng.permutation(everyone):
        counts, followed = _draw(left, preferences[i], size, rng)
        train[i] = np.concatenate(
            [rows[end - count : end] for rows, end, count in zip(by_class, left, counts, strict=True)]
        )
        left = left - counts
        if not set_aside:
            wanted = rng.multinomial(test_size, _among(followed, np.array([len(rows) for rows in tests])))
            test[i] = _take(tests, wanted, rng)
    return Split(train, None if set_aside else test)


def by_classes(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Give each client rows of a fixed number of classes, in equal shares (LCFL's FEMNIST, section V).

    In random order, each client takes the classes with the fewest holders so far, ties at random; so the numbers of
    holders of two classes differ by at most one. Each training row is assigned once; if samples_per_client is 0, the
    holders of a class share all of its rows. The test rows of a client have the same shares as its training rows,
    without repetition while a class has enough rows.

    Raises:
        DataError: a client holds more classes than there are, or than it has rows; or a class has too few training rows
            for its holders, or no test rows.
    """
    classes, samples_per_client = int(partition.skew[1]), partition.samples_per_client
    if classes > source.num_classes:
        raise DataError(f"label-skew is classes:{classes}; {source.name} has {source.num_classes} classes")
    if 0 < samples_per_client < classes:
        raise DataError(f"samples-per-client is {samples_per_client}, less than the {classes} classes of label-skew")
    set_aside = partition.validation_clients
    everyone, size = partition.clients + set_aside, samples_per_client or classes
    counts = np.zeros((everyone, source.num_classes), np.int64)
    for i in rng.permutation(everyone):
        holders = np.count_nonzero(counts, axis=0)
        chosen = np.lexsort((rng.random(source.num_classes), holders))[:classes]
        counts[i, chosen] = _shares(size, classes)
    by_class = [rng.permutation(rows) for rows in _rows_by(source.train_y, source.num_classes)]
    tests = _rows_by(source.test_y, source.num_classes)
    parts = []
    for c, rows in enumerate(by_class):
        held = np.flatnonzero(counts[:, c])
        if counts[:, c].sum() > len(rows):
            raise _too_few(source, len(held), int(counts[:, c].sum()), len(rows), f" of class {c}")
        if len(held) and not len(tests[c]) and not set_aside:
            raise DataError(
                f"{source.name} has no test {source.kind} of class {c}, but clients have training {source.kind} of it"
            )
        if len(held) and not samples_per_client:
            counts[held, c] = _shares(len(rows), len(held))
        parts.append(np.split(rows, np.cumsum(counts[:, c])))
    train = [rng.permutation(np.concatenate([class_rows[i] for class_rows in parts])) for i in range(everyone)]
    if set_aside:
        return Split(train)
    test_size = max(_MIN_TESTS, len(source.test_y) // partition.clients)
    wanted = np.diff(np.cumsum(counts, axis=1) * test_size // counts.sum(axis=1, keepdims=True), prepend=0)
    return Split(train, [_take(tests, test_counts, rng) for test_counts in wanted])


def by_level(source: Source, partition: Partition, rng: np.random.Generator) -> Split:
    """Partition all rows: a share of every class by class, the rest at random (PPFC-GAN, section 4.1).

    The share P of class c is split equally between the clients i with i mod num_classes == c, if there
    are any. All other rows are pooled and distributed evenly. With as many clients as classes, client i holds exactly
    class i at level 1. The paper draws the rest from the entire data; here no row is held twice. Nothing is held out.
    All rows of the source are training rows (`Source.whole`).

    Raises:
        DataError: a client has too few rows.
    """
    clients, (_, level), samples_per_client = partition.clients, partition.skew, partition.samples_per_client
    classes = source.num_classes
    class_rows, pool = [np.empty(0, np.int64)] * clients, []
    for c, rows in enumerate(_rows_by(source.train_y, classes)):
        holders = range(c, clients, classes)
        held, rest = np.split(rng.permutation(rows), [round(level * len(rows)) if holders else 0])
        pool.append(rest)
        for j, client in enumerate(holders):
            class_rows[client] = held[j :: len(holders)]
    mixed = rng.permutation(np.concatenate(pool))
    train = [rng.permutation(np.concatenate([class_rows[i], mixed[i::clients]])) for i in range(clients)]
    for i, rows in enumerate(train):
        if len(rows) < max(samples_per_client, 1):
            raise DataError(
                f"client {i} has {len(rows)} of {source.name}'s {len(source.train_y)} {source.kind} at label-skew = "
                f"non-iid:{level:g}, but needs {max(samples_per_client, 1)}; use fewer clients, a smaller "
                "samples_per_client or a lower level"
            )
    if samples_per_client:
        train = [rows[:samples_per_client] for rows in train]
    return Split(train, train)


def _share_out(
    source: Source, rows: Rows, group_of: Rows, samples_per_client: int, rng: np.random.Generator
) -> list[Rows]:
    """Distribute `rows` among the clients, without overlap across all of them or within each group."""
    clients = len(group_of)
    everyone = np.arange(clients)
    members = [np.flatnonzero(group_of == g) for g in range(int(group_of.max()) + 1)]
    if samples_per_client:
        pools = [everyone] if clients * samples_per_client <= len(rows) else members
    else:
        pools = members if source.reuse else [everyone]
    shared = [np.empty(0, np.int64)] * clients
    for pool in pools:
        needed = len(pool) * max(samples_per_client, 1)
        if needed > len(rows):
            raise _too_few(source, len(pool), needed, len(rows))
        order = rows[rng.permutation(len(rows))]
        parts = np.array_split(order[:needed] if samples_per_client else order, len(pool))
        for client, client_rows in zip(pool, parts, strict=True):
            shared[client] = client_rows
    return shared


def _draw(
    left: npt.NDArray[np.int64], preference: npt.NDArray[np.float64], size: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the number of rows per class (classes,), `size` in total and at most `left`, and their distribution."""
    counts, followed = np.zeros_like(left), np.zeros(len(left))
    while missing := size - int(counts.sum()):
        weights = _among(preference, left - counts)
        drawn = np.minimum(rng.multinomial(missing, weights), left - counts)
        counts += drawn
        followed += weights * (drawn.sum() / size)
    return counts, followed


def _shares(total: int, parts: int) -> npt.NDArray[np.int64]:
    """Return integers (parts,) that sum to `total` and differ by at most one, larger ones first."""
    return total // parts + (np.arange(parts) < total % parts)


def _take(by_class: list[Rows], counts: npt.NDArray[np.int64], rng: np.random.Generator) -> Rows:
    """Draw `counts` random rows per class; rows repeat only if a class has too few."""
    return np.concatenate(
        [np.resize(rng.permutation(rows), count) for rows, count in zip(by_class, counts, strict=True)]
    )


def _among(weights: npt.NDArray[np.float64], available: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Normalise `weights` over classes with available rows; if all are zero, use proportions of available rows."""
    some = np.where(available > 0, weights, 0.0)
    if not some.sum() > 0:
        some = available.astype(np.float64)
    probabilities: npt.NDArray[np.float64] = some / some.sum()
    return probabilities


def _rows_by(key: npt.NDArray[np.int64] | None, count: int) -> list[Rows]:
    """Return the rows where `key` is 0, 1, ..., count - 1."""
    assert key is not None
    return np.split(np.argsort(key, kind="stable"), np.cumsum(np.bincount(key, minlength=count))[:-1])


def _too_few(source: Source, clients: int, needed: int, available: int, which: str = "") -> DataError:
    return DataError(
        f"{clients} clients need {needed} training {source.kind}{which}, but {source.name} has {available}; "
        "use fewer clients or a smaller samples_per_client"
    )
