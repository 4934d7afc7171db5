"""Partition a data set among clients in hidden groups, each with its own shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.datasets.catalog import load
from coterie.datasets.shifts import SHIFTS, Examples, Shift, Targets
from coterie.datasets.sources import DataError, Source, unknown
from coterie.datasets.split import Split, by_classes, by_dirichlet, by_level, by_owner, evenly

Transform = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]

_MAX_GROUPS = 10_000


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
    """

    client_id: int
    group: int
    x: Examples
    y: Targets
    test: TestSet


class Federation:
    """Clients with their shards, which are created on first use. Build it with `federate`.

    Attributes:
        clients: number of clients, without those held out for validation; ids are 0..clients-1.
        num_groups: number of hidden groups.
        group_of: true group of each client, int64 (clients,), read-only.
        num_classes: number of classes; 0 for real targets.
        kind: "images", "tokens" or "vectors".
        input_shape: shape of one example after the transform.
    """

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
        self.num_classes, self.kind = source.num_classes, source.kind
        self._source, self._split, self._shift, self._seed, self._transform = source, split, shift, seed, transform
        self._group_aside = group_of[self.clients :]
        self._shards: dict[int, Shard] = {}
        self._tests: dict[int, TestSet] = {}
        if source.kind != "images" and transform is not None:
            _need_identity(transform, source)
        probe, _ = self._prepare(source.train_x[:1], source.train_y[:1], self.num_groups - 1)
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
            test = TestSet(x, y) if self._split.test is self._split.train else self._test_of(client_id)
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

    def _test_of(self, client_id: int) -> TestSet:
        group = int(self.group_of[client_id])
        if self._split.test is None:
            return self.test_set(group)
        rows = self._split.test[client_id]
        return TestSet(*self._prepare(self._source.test_x[rows], self._source.test_y[rows], group))

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


def _need_identity(transform: Transform, source: Source) -> None:
    probe = source.train_x[:1]
    try:
        same = transform(probe) is probe
    except Exception:  # an image transform may fail on other data
        same = False
    if not same:
        raise DataError(
            f"features require images, but {source.name} contains {source.kind}; use features 'none' (transform None)"
        )


def federate(  # long: one line per argument, all of which are documented
    dataset: str,
    *,
    clients: int,
    groups: str = "4",
    shift: str = "rotation",
    samples_per_client: int = 0,
    dirichlet_alpha: float = 0.0,
    classes_per_client: int = 0,
    non_iid_level: float = -1.0,
    validation: int = 0,
    seed: int = 0,
    data_dir: str | Path | None = None,
    transform: Transform | None = None,
) -> Federation:
    """Partition a data set among clients in hidden groups; the last two results are cached.

    If the data have natural clients, the clients with the most training data are used, and each is tested on its own
    held-out data; `groups` must be "1" and `shift` "none".

    Use `validation` to tune hyper-parameters: validation clients hold a part of the training data that no other client
    holds, and never train. The data of a group's validation clients are the test set of all clients of that group, and
    no test data is used.

    Args:
        dataset: a name accepted by `load`.
        clients: number of clients.
        groups: `"4"` for four balanced groups, or proportions `"2:1:1"`.
        shift: a key of `SHIFTS` that supports the kind of data.
        samples_per_client: number of examples per client, N. 0 distributes every example once, in sizes that differ by
            at most one: among the clients of each group for a source with `reuse`, else among all clients. N > 0
            draws without overlap across all clients if there are enough examples, else within each group. A
            natural client keeps at most N of its examples at random; 0 keeps all.
        dirichlet_alpha: 0 disables it. Otherwise each client draws a label distribution from Dirichlet(alpha); a
            smaller alpha gives more skewed labels. The client receives N training examples from this distribution (an
            equal share of all if N is 0), without overlap between clients, and its own test set of
            max(32, len(test) // clients) examples.
        classes_per_client: 0 disables it. Otherwise each client holds this many random classes, such that all classes
            are held about equally often. The client receives N training examples in equal shares per class (if N is 0,
            the holders of a class share all of its examples), without overlap between clients, and its own test set of
            max(32, len(test) // clients) examples in the same shares. Incompatible with dirichlet_alpha.
        non_iid_level: -1 disables it. Otherwise the clients partition all training and test rows, and each client is
            tested on its own data, because clustering is scored on the clustered data. Of every class c, this share,
            in [0, 1], is split equally between the clients i with i mod num_classes equal to c; the rest is
            distributed among all clients at random. At 0 the partition is random; at 1, client i of num_classes holds
            class i. Each client keeps N rows at random. Incompatible with dirichlet_alpha, classes_per_client and
            validation.
        validation: number of validation clients, in groups of the same proportions; 0 for none.
        seed: seed of the partition and of the random label permutations.
        data_dir: see `load`.
        transform: applied once to float32 images (n, C, H, W), after the shift, and to each image independently. The
            cache identifies it by the function object. For data other than images, None or the identity function.

    Raises:
        DataError: a name, number or proportion is out of range; the shift, transform or partition does not fit the
            data; or there are too few examples or natural clients.
    """
    proportions = parse_groups(groups)
    if shift not in SHIFTS:
        raise DataError(unknown("shift", shift, SHIFTS))
    _check_split(samples_per_client, validation, seed, dirichlet_alpha, classes_per_client, non_iid_level)
    source = load(dataset, data_dir)
    return _federate(
        source,
        clients,
        proportions,
        shift,
        samples_per_client,
        dirichlet_alpha,
        classes_per_client,
        non_iid_level,
        validation,
        seed,
        transform,
    )


def _check_split(
    samples_per_client: int,
    validation: int,
    seed: int,
    dirichlet_alpha: float,
    classes_per_client: int,
    non_iid_level: float,
) -> None:
    """Raise DataError for a number out of range or for incompatible partition settings."""
    for name, value in (
        ("samples_per_client", samples_per_client),
        ("validation", validation),
        ("seed", seed),
        ("dirichlet_alpha", dirichlet_alpha),
        ("classes_per_client", classes_per_client),
    ):
        if not 0 <= value < math.inf:
            raise DataError(f"{name} is {value}; it must be at least 0" + (", and finite" if value == math.inf else ""))
    if dirichlet_alpha and classes_per_client:
        raise DataError(
            f"dirichlet_alpha = {dirichlet_alpha:g} and classes_per_client = {classes_per_client} are alternatives; "
            "set one of them to 0"
        )
    if not (non_iid_level == -1 or 0 <= non_iid_level <= 1):
        raise DataError(f"non_iid_level is {non_iid_level}; it must be -1 (off), or from 0 to 1")
    if non_iid_level >= 0 and (dirichlet_alpha or classes_per_client or validation):
        raise DataError(
            f"non_iid_level = {non_iid_level:g} divides all data and sets the label distribution: set dirichlet_alpha, "
            f"classes_per_client and validation to 0 (they are {dirichlet_alpha:g}, {classes_per_client} and "
            f"{validation}), or non_iid_level to -1"
        )


@lru_cache(maxsize=2)
def _federate(
    source: Source,
    clients: int,
    proportions: tuple[float, ...],
    shift: str,
    samples_per_client: int,
    dirichlet_alpha: float,
    classes_per_client: int,
    non_iid_level: float,
    validation: int,
    seed: int,
    transform: Transform | None,
) -> Federation:
    group_of = assign_groups(clients, proportions)
    if validation:
        try:
            group_of = np.concatenate([group_of, assign_groups(validation, proportions)])
        except DataError as error:
            raise DataError(f"validation: {error}") from None
    rng = np.random.default_rng(seed)
    if source.owners:
        _check_natural(source, proportions, shift, dirichlet_alpha, classes_per_client, non_iid_level)
        split = by_owner(source, clients, validation, samples_per_client, rng)
    elif (dirichlet_alpha or classes_per_client or non_iid_level >= 0) and not source.num_classes:
        name = "dirichlet_alpha" if dirichlet_alpha else "classes_per_client" if classes_per_client else "non_iid_level"
        off = -1 if name == "non_iid_level" else 0
        raise DataError(f"{name} requires labels, but {source.name} has real targets; set it to {off}")
    elif dirichlet_alpha:
        split = by_dirichlet(source, clients, validation, dirichlet_alpha, samples_per_client, rng)
    elif classes_per_client:
        split = by_classes(source, clients, validation, classes_per_client, samples_per_client, rng)
    elif non_iid_level >= 0:
        source = source.whole
        split = by_level(source, clients, non_iid_level, samples_per_client, rng)
    else:
        split = evenly(source, group_of, validation, samples_per_client, rng)
    return Federation(
        source, split, group_of=group_of, set_aside=validation, shift=SHIFTS[shift], seed=seed, transform=transform
    )


def _check_natural(
    source: Source,
    proportions: tuple[float, ...],
    shift: str,
    dirichlet_alpha: float,
    classes_per_client: int,
    non_iid_level: float,
) -> None:
    if non_iid_level >= 0:
        raise DataError(
            f"{source.name} has {source.owners} natural clients, whose data are fixed: set non_iid_level to -1 "
            f"(it is {non_iid_level:g})"
        )
    if len(proportions) > 1 or shift != "none" or dirichlet_alpha or classes_per_client:
        raise DataError(
            f"{source.name} has {source.owners} natural clients, whose data are fixed: set groups to 1, shift to "
            f"none, and dirichlet_alpha and classes_per_client to 0 (they are {len(proportions)} groups, {shift}, "
            f"{dirichlet_alpha:g} and {classes_per_client})"
        )


def parse_groups(text: str) -> tuple[float, ...]:
    """Parse group proportions: `"3"` for three equal groups, `"2:1:1"` for one large and two small groups.

    Raises:
        DataError: the text has another format.
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
            f"groups must be a number from 1 to {_MAX_GROUPS}, such as 4, or positive proportions, such as 2:1:1, not "
            f"'{text}'"
        )
    return proportions


def assign_groups(clients: int, proportions: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the true group of each client, int64 (clients,); deterministic.

    Group sizes follow the method of largest remainders (ties to the earlier group). Groups interleave: equal groups
    alternate, 0, 1, 2, 3, 0, 1, ...

    Raises:
        DataError: a group would be empty.
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
