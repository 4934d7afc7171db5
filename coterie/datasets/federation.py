"""Partition a data set among clients in hidden groups, each with its own shift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.datasets.catalog import load
from coterie.datasets.partition import Partition, parse_groups
from coterie.datasets.shifts import SHIFTS, Examples, Shift, Targets
from coterie.datasets.sources import DataError, Source
from coterie.datasets.split import Split, divided
from coterie.datasets.units import Units

Transform = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class TestSet:
    """Test data, in the format of a `Shard`. Clients with the same test data share one object."""

    __test__ = False  # keep pytest from collecting this class

    x: Examples
    y: Targets


@dataclass(frozen=True, eq=False)
class Shard:
    """A client's data.

    Attributes:
        client_id: the client.
        group: its true group.
        x: features of images float32 (n, *input_shape), tokens int64 (n, L), or vectors float32 (n, F).
        y: labels int64 (n,), or real targets float32 (n,).
        test: test data of the group or of the client; `x` and `y` themselves if nothing is held out.
        units: of the training records; None: each record is its own.
        test_shares: (m,) of the test records in a count of units (:meth:`Units.held_out_shares`); None: each record
            counts by itself.
    """

    client_id: int
    group: int
    x: Examples
    y: Targets
    test: TestSet
    units: Units | None = None
    test_shares: npt.NDArray[np.int64] | None = None


class Federation:
    """Clients with their shards, which are created on first use. Build it with `federate`.

    Attributes:
        clients: number of clients, without those held out for validation; ids are 0..clients-1.
        num_groups: number of hidden groups.
        group_of: true group of each client, int64 (clients,), read-only.
        task: what models predict.
        num_classes: number of classes; 0 for a task without classes.
        kind: "images", "tokens" or "vectors".
        input_shape: shape of one example after the transform.
        has_units: whether records belong to units, such as patients; never here.
    """

    has_units = False

    def __init__(
        self,
        source: Source,
        split: Split,
        *,
        group_of: npt.NDArray[np.int64],
        set_aside: int,
        shift: Shift,
        seed: int,
        transform: Transform | None,
    ) -> None:
        self.clients = len(group_of) - set_aside
        self.num_groups = int(group_of.max()) + 1
        self.group_of = group_of[: self.clients]
        self.group_of.flags.writeable = False
        self.task, self.num_classes, self.kind = source.task, source.task.num_classes, source.kind
        self._source, self._split, self._shift, self._seed, self._transform = source, split, shift, seed, transform
        self._group_aside = group_of[self.clients :]
        self._shards: dict[int, Shard] = {}
        self._tests: dict[int, TestSet] = {}
        first = source.train_x[:1]
        if source.kind != "images" and transform is not None:
            try:
                same = transform(first) is first
            except Exception:  # an image transform may fail on other data
                same = False
            if not same:
                raise DataError(
                    f"features require images, but {source.name} contains {source.kind}; use features 'none' "
                    "(transform None)"
                )
        probe, _ = self._prepare(first, source.train_y[:1], self.num_groups - 1)
        self.input_shape: tuple[int, ...] = probe.shape[1:]

    def shard(self, client_id: int) -> Shard:
        """Return the data of a client; repeated calls return the same object.

        Raises:
            DataError: the client does not exist.
        """
        if not 0 <= client_id < self.clients:
            raise DataError(f"client {client_id} does not exist; clients are numbered from 0 to {self.clients - 1}")
        if client_id not in self._shards:
            rows, group = self._split.train[client_id], int(self.group_of[client_id])
            x, y = self._prepare(self._source.train_x[rows], self._source.train_y[rows], group)
            if self._split.test is self._split.train:
                test = TestSet(x, y)
            elif self._split.test is None:
                test = self.test_set(group)
            else:
                rows = self._split.test[client_id]
                test = TestSet(*self._prepare(self._source.test_x[rows], self._source.test_y[rows], group))
            self._shards.setdefault(client_id, Shard(int(client_id), group, x, y, test))
        return self._shards[client_id]

    def test_set(self, group: int) -> TestSet:
        """Return the whole test set with the shift of `group`; repeated calls return the same object.

        With validation clients, it consists of the data of those in the group. If nothing is held out, it consists
        of all data.

        Raises:
            DataError: the group does not exist.
        """
        if not 0 <= group < self.num_groups:
            raise DataError(f"group {group} does not exist; groups are numbered from 0 to {self.num_groups - 1}")
        if group not in self._tests:
            if len(self._group_aside):
                aside = self.clients + np.flatnonzero(self._group_aside == group)
                rows = np.concatenate([self._split.train[i] for i in aside])
                x, y = self._source.train_x[rows], self._source.train_y[rows]
            else:
                x, y = self._source.test_x, self._source.test_y
            self._tests.setdefault(group, TestSet(*self._prepare(x, y, group)))  # thread-safe: the first one wins
        return self._tests[group]

    def _prepare(self, x: Examples, y: Targets, group: int) -> tuple[Examples, Targets]:
        """Scale, shift, centre and transform examples; the result shares no memory with the source.

        Only images are scaled, centred and transformed. Pixels are mapped from [0, 1] to [-1, 1] with fixed
        constants, because the mean of the data would leak information. Centred pixels make networks learn several
        times faster, which matters most under noise.
        """
        images = self._source.kind == "images"
        scaled = fractions(x) if images else np.array(x)
        shifted, targets = self._shift(scaled, y.copy(), group, self.num_groups, self.num_classes, self._seed)
        return (centred(shifted, self._transform) if images else np.ascontiguousarray(shifted)), targets


def fractions(pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Return a copy of images with pixels in [0, 1]; integers range from 0 to 255."""
    scaled = np.array(pixels, np.float32)
    if pixels.dtype == np.uint8:
        scaled /= 255
    return scaled


def centred(images: npt.NDArray[np.float32], transform: Transform | None) -> npt.NDArray[np.float32]:
    """Map pixels from [0, 1] to [-1, 1], and apply the transform."""
    mapped = 2 * images - 1
    return np.ascontiguousarray(mapped if transform is None else transform(mapped), dtype=np.float32)


def federate(
    dataset: str,
    partition: Partition,
    *,
    seed: int = 0,
    data_dir: str | Path | None = None,
    transform: Transform | None = None,
) -> Federation:
    """Divide a data set among clients in hidden groups; the last two results are cached.

    Args:
        dataset: a name accepted by `load`.
        partition: the clients, their groups, and what each of them holds.
        seed: seed of the partition and of the random label permutations.
        data_dir: see `load`.
        transform: applied once to float32 images (n, C, H, W), after the shift, and to each image independently. The
            cache identifies it by the function object. For data other than images, None or the identity function.

    Raises:
        DataError: the shift, transform or partition does not fit the data; or there are too few examples or natural
            clients.

    Examples:
        >>> from coterie.datasets import Partition
        >>> federation = federate("digits", Partition(clients=8, groups="2", shift="rotation"))
        >>> federation.clients, federation.num_groups, federation.input_shape
        (8, 2, (1, 8, 8))
    """
    if seed < 0:
        raise DataError(f"seed is {seed}; it must be at least 0")
    return _federate(load(dataset, data_dir), partition, seed, transform)


@lru_cache(maxsize=2)
def _federate(source: Source, partition: Partition, seed: int, transform: Transform | None) -> Federation:
    group_of, (skew, _) = partition.group_of(), partition.skew
    if source.owners:
        groups = len(parse_groups(partition.groups))
        if groups > 1 or partition.shift != "none" or partition.label_skew != "none":
            raise DataError(
                f"{source.name} has {source.owners} natural clients, whose data are fixed: set groups to 1, and shift "
                f"and label-skew to none (they are {groups} groups, {partition.shift} and {partition.label_skew})"
            )
    elif skew != "none" and not source.task.has_classes:
        raise DataError(
            f"label-skew = {partition.label_skew} requires classes, but {source.name} has {source.task}; set it to none"
        )
    source = source.whole if skew == "non-iid" else source
    return Federation(
        source,
        divided(source, partition, np.random.default_rng(seed)),
        group_of=group_of,
        set_aside=partition.validation_clients,
        shift=SHIFTS[partition.shift],
        seed=seed,
        transform=transform,
    )
