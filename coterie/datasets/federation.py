"""One data set split among clients in hidden groups, each group with its own shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from coterie.datasets.shifts import SHIFTS, Images, Labels, Shift
from coterie.datasets.sources import DataError, Source, load, unknown

Transform = Callable[[Images], Images]

_MAX_GROUPS = 10_000


@dataclass(frozen=True, eq=False)
class TestSet:
    """A group's held-out data: x float32 (n, *input_shape), y int64 (n,). One object serves a whole group."""

    __test__ = False  # not a test case, whatever pytest reads into the name

    x: Images
    y: Labels


@dataclass(frozen=True, eq=False)
class Shard:
    """A client's data: x float32 (n, *input_shape), y int64 (n,), its true group, the group's test set."""

    client_id: int
    group: int
    x: Images
    y: Labels
    test: TestSet


class Federation:
    """Clients with their shards, made on first use. Build it with `federate`.

    Attributes:
        clients: number of clients; ids are 0..clients-1.
        num_groups: number of hidden groups.
        group_of: true group of each client, int64 (clients,), read-only.
        num_classes: number of classes.
        input_shape: shape of one example after the transform.
    """

    def __init__(
        self,
        source: Source,
        *,
        group_of: npt.NDArray[np.int64],
        shift: Shift,
        samples_per_client: int,
        seed: int,
        transform: Transform | None,
    ) -> None:
        self.clients = len(group_of)
        self.num_groups = int(group_of.max()) + 1
        self.group_of = group_of
        self.group_of.flags.writeable = False
        self.num_classes = source.num_classes
        self._source, self._shift, self._seed, self._transform = source, shift, seed, transform
        self._rows = _split(source, group_of, samples_per_client, seed)
        self._shards: dict[int, Shard] = {}
        self._tests: dict[int, TestSet] = {}
        probe, _ = self._prepare(source.train_x[:1], source.train_y[:1], self.num_groups - 1)
        self.input_shape: tuple[int, ...] = probe.shape[1:]

    def shard(self, client_id: int) -> Shard:
        """The data of one client; the same object every time.

        Raises:
            DataError: no such client.
        """
        if not 0 <= client_id < self.clients:
            raise DataError(f"no client {client_id}; there are {self.clients}, from 0 to {self.clients - 1}")
        if client_id not in self._shards:
            rows, group = self._rows[client_id], int(self.group_of[client_id])
            x, y = self._prepare(self._source.train_x[rows], self._source.train_y[rows], group)
            self._shards.setdefault(client_id, Shard(int(client_id), group, x, y, self.test_set(group)))
        return self._shards[client_id]

    def test_set(self, group: int) -> TestSet:
        """The whole test set, shifted as `group` is; the same object every time.

        Raises:
            DataError: no such group.
        """
        if not 0 <= group < self.num_groups:
            raise DataError(f"no group {group}; there are {self.num_groups}, from 0 to {self.num_groups - 1}")
        if group not in self._tests:
            x, y = self._prepare(self._source.test_x, self._source.test_y, group)
            self._tests.setdefault(group, TestSet(x, y))  # the first one stays, also between threads
        return self._tests[group]

    def _prepare(self, x: npt.NDArray[np.generic], y: Labels, group: int) -> tuple[Images, Labels]:
        """Scale, shift, centre on zero and transform; the result shares no memory with the source.

        Pixels in [0, 1] become [-1, 1]: constants fixed in advance, since a mean of the data would reveal it.
        Networks learn several times faster from centred pixels, which noise makes the more precious.
        """
        scaled = np.array(x, dtype=np.float32)
        if x.dtype == np.uint8:
            scaled /= 255
        shifted, labels = self._shift(scaled, y.copy(), group, self.num_groups, self.num_classes, self._seed)
        centred = 2 * shifted - 1
        features = centred if self._transform is None else self._transform(centred)
        return np.ascontiguousarray(features, dtype=np.float32), labels


def federate(
    dataset: str,
    *,
    clients: int,
    groups: str = "4",
    shift: str = "rotation",
    samples_per_client: int = 0,
    seed: int = 0,
    data_dir: str | None = None,
    transform: Transform | None = None,
) -> Federation:
    """Split a data set among clients in hidden groups; the last two are kept, so that asking again is cheap.

    Args:
        dataset: a name that `load` takes.
        clients: number of clients.
        groups: `"4"` for four balanced groups, or proportions `"2:1:1"`.
        shift: a key of `SHIFTS`.
        samples_per_client: images a client holds, N. 0 shares all out, each once, in sizes that differ by one
            at most: among each group's clients for a source with `reuse`, else among all clients. N > 0
            draws without overlap over all clients if there are images enough, else within each group.
        seed: of the split and of the random label permutations.
        data_dir: see `load`.
        transform: applied once to float32 images (n, C, H, W), after the shift; treats each image alone.
            The same function object finds the same federation again.

    Raises:
        DataError: a name, number or proportion out of range, or fewer images than the clients need.
    """
    proportions = parse_groups(groups)
    if shift not in SHIFTS:
        raise DataError(unknown("shift", shift, SHIFTS))
    for name, value, least in (("samples_per_client", samples_per_client, 0), ("seed", seed, 0)):
        if not value >= least:
            raise DataError(f"{name} is {value}; it must be at least {least}")
    return _federate(load(dataset, data_dir), clients, proportions, shift, samples_per_client, seed, transform)


@lru_cache(maxsize=2)
def _federate(
    source: Source,
    clients: int,
    proportions: tuple[float, ...],
    shift: str,
    samples_per_client: int,
    seed: int,
    transform: Transform | None,
) -> Federation:
    return Federation(
        source,
        group_of=assign_groups(clients, proportions),
        shift=SHIFTS[shift],
        samples_per_client=samples_per_client,
        seed=seed,
        transform=transform,
    )


def parse_groups(text: str) -> tuple[float, ...]:
    """Proportions of the groups: `"3"` is three equal ones, `"2:1:1"` a large one and two small ones.

    Raises:
        DataError: anything else.
    """
    parts = text.split(":")
    if len(parts) == 1 and text.strip().isdecimal() and 1 <= int(text) <= _MAX_GROUPS:
        return (1.0,) * int(text)
    try:
        proportions = tuple(float(part) for part in parts)
    except ValueError:
        proportions = ()
    if len(proportions) < 2 or not all(p > 0 and math.isfinite(p) for p in proportions):
        raise DataError(
            f"groups is '{text}'; write a number of groups from 1 to {_MAX_GROUPS}, such as 4, or positive "
            "proportions, such as 2:1:1"
        )
    return proportions


def assign_groups(clients: int, proportions: Sequence[float]) -> npt.NDArray[np.int64]:
    """True group of each client, int64 (clients,), a function of these two arguments alone.

    Group sizes are exact by the method of largest remainders (ties to the earlier group), and groups
    interleave: equal ones come in turn, 0, 1, 2, 3, 0, 1, ...

    Raises:
        DataError: a group would have no client.
    """
    weights = [Fraction(p) for p in proportions]
    total = sum(weights)
    quotas = [clients * w / total for w in weights]
    sizes = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda g: sizes[g] - quotas[g])
    for g in by_remainder[: clients - sum(sizes)]:
        sizes[g] += 1
    if not min(sizes) >= 1:
        raise DataError(
            f"{clients} clients in groups {':'.join(f'{p:g}' for p in proportions)} leave group "
            f"{sizes.index(min(sizes))} without a client; use more clients or other groups"
        )
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(places, kind="stable")]


def _split(
    source: Source, group_of: npt.NDArray[np.int64], samples_per_client: int, seed: int
) -> list[npt.NDArray[np.int64]]:
    """Rows of the training set that each client holds."""
    rng = np.random.default_rng(seed)
    n, clients = len(source.train_y), len(group_of)
    everyone = np.arange(clients)
    members = [np.flatnonzero(group_of == g) for g in range(int(group_of.max()) + 1)]
    if samples_per_client:
        pools = [everyone] if clients * samples_per_client <= n else members
    else:
        pools = members if source.reuse else [everyone]
    rows: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * clients
    for pool in pools:
        needed = len(pool) * max(samples_per_client, 1)
        if needed > n:
            raise DataError(
                f"{len(pool)} clients need {needed} of {source.name}'s {n} training images, each once; use "
                "fewer clients or a smaller samples_per_client"
            )
        order = rng.permutation(n)
        parts = np.array_split(order[:needed] if samples_per_client else order, len(pool))
        for client, part in zip(pool, parts, strict=True):
            rows[client] = part
    return rows
