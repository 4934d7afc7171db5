"""How the data of a run are divided among its clients, in hidden groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from coterie.datasets.shifts import SHIFTS
from coterie.datasets.sources import DataError
from coterie.fields import COUNT, SIZE, Bounds
from coterie.fields.settings import ConfigError, Settings, setting

_MAX_GROUPS = 10_000
# Numbers of each kind of label skew.
_SKEWS = {"dirichlet": Bounds(0, 1e9, above=True), "classes": Bounds(1, SIZE.high), "non-iid": Bounds(0, 1)}


def _skew(text: str) -> tuple[str, float] | None:
    """Return kind and number of a label skew; None if it has another form."""
    if text == "none":
        return text, 0.0
    kind, _, number = text.partition(":")
    try:
        value = int(number) if kind == "classes" else float(number)
    except ValueError:
        return None
    return (kind, value) if value in _SKEWS.get(kind, ()) else None


@dataclass(frozen=True)
class Partition(Settings):
    """How a data set is divided among clients in hidden groups, and how the data of these groups differ.

    If the data have natural clients, those with the most training data are used, and each is tested on its own held-out
    data; `groups` must be "1" and `shift` "none".

    Attributes:
        clients: number of clients.
        groups: `"4"` for four balanced groups, or proportions `"2:1:1"`.
        shift: a key of `SHIFTS` that supports the kind of data.
        label_skew: how labels differ between clients; `"none"`: all draw from all of them. No two clients hold the same
            training example. With `"dirichlet:A"`, each client draws a label distribution from Dirichlet(A), more
            skewed the smaller A is, and receives N training examples from it (an equal share of all if N is 0). With
            `"classes:C"`, it holds C random classes, such that all classes are held about equally often, and receives
            N examples in equal shares per class (if N is 0, the holders of a class share all of its examples). Both
            have a test set of their own of max(32, len(test) // clients) examples in the same shares. With
            `"non-iid:P"`, the clients partition all training and test rows, and each is tested on its own data, because
            clustering is scored on the clustered data. Of every class c, the share P is split equally between the
            clients i with i mod num_classes equal to c; the rest is distributed among all clients at random. At 0 the
            partition is random; at 1, client i of num_classes holds class i. Each client keeps N rows at random.
        validation_clients: number of additional clients, in groups of the same proportions, that hold a part of the
            training data that no other client holds, and never train. The data of a group's validation clients are the
            test set of all clients of that group, and no test data is used.
        samples_per_client: number of examples per client, N. 0 distributes every example once, in sizes that differ by
            at most one: among the clients of each group for a source with `reuse`, else among all clients. N > 0
            draws without overlap across all clients if there are enough examples, else within each group. A
            natural client keeps at most N of its examples at random; 0 keeps all.

    Raises:
        ConfigError: a value is out of range, or two exclude each other.
    """

    table: ClassVar[str] = "data"

    clients: int = setting(500, "number of clients, M; public", within=COUNT, client=True)
    groups: str = setting(
        "4", "hidden groups: a number, or proportions such as 2:1:1", allowed="4 or 2:1:1", client=True
    )
    shift: str = setting("rotation", "how the data of hidden groups differ", choices=sorted(SHIFTS), client=True)
    label_skew: str = setting(
        "none",
        "how labels differ between clients: by Dirichlet(ALPHA), by NUMBER classes each, or by a SHARE of each class "
        "that goes to one client, which is tested on its own part of all data",
        allowed="none, dirichlet:ALPHA, classes:NUMBER, or non-iid:SHARE (0 to 1)",
        check=lambda text: _skew(text) is not None,
        client=True,
    )
    validation_clients: int = setting(
        0,
        "additional clients that never train and whose data replace the test data, for tuning",
        within=SIZE,
        client=True,
    )
    samples_per_client: int = setting(0, "training examples of a client; 0: divide all", within=SIZE, client=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skew[0] == "non-iid" and self.validation_clients:
            raise ConfigError(
                f"validation-clients = {self.validation_clients}: label-skew = {self.label_skew} divides all data "
                "among the clients; set validation-clients to 0, or another label-skew"
            )

    @property
    def skew(self) -> tuple[str, float]:
        """Kind of label skew and its number; ("none", 0) if all clients draw from all labels.

        Raises:
            ConfigError: a server sent another text.
        """
        if (skew := _skew(self.label_skew)) is None:
            raise ConfigError(f"label-skew must be {self.declared()['label_skew'].allowed}")
        return skew

    def group_of(self) -> npt.NDArray[np.int64]:
        """Return the group of each client, int64 (clients + validation_clients,), validation clients last.

        Raises:
            DataError: the proportions are invalid, or a group would be empty.
        """
        proportions = parse_groups(self.groups)
        group_of = assign_groups(self.clients, proportions)
        if not self.validation_clients:
            return group_of
        try:
            return np.concatenate([group_of, assign_groups(self.validation_clients, proportions)])
        except DataError as error:
            raise DataError(f"validation-clients: {error}") from None


def parse_groups(text: str) -> tuple[float, ...]:
    """Parse group proportions: `"3"` for three equal groups, `"2:1:1"` for one large and two small groups.

    Raises:
        DataError: the text has another format.

    Examples:
        >>> parse_groups("3"), parse_groups("2:1:1")
        ((1.0, 1.0, 1.0), (2.0, 1.0, 1.0))
    """
    parts = text.split(":")
    if len(parts) == 1 and text.strip().isdecimal() and 1 <= int(text) <= _MAX_GROUPS:
        return (1.0,) * int(text)
    try:
        proportions = tuple(float(proportion) for proportion in parts)
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

    Examples:
        >>> assign_groups(6, (2, 1))
        array([0, 1, 0, 0, 1, 0])
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
