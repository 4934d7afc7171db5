"""Robust aggregation of updates that are well-formed but may not be honest.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
ICML 2018, arXiv:1803.01498, Definitions 1 and 2: coordinate-wise median and trimmed mean.
P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017, arXiv:1703.02757, section 3: Krum and Multi-Krum.

All rules read the updates of one cluster, are unweighted, and do not depend on their order. Of n updates they assume
that f = ceil(byzantine share x n) are dishonest, lowered to what the rule can take: trimmed mean removes at most
(n - 1) // 2 on each side, Krum needs n >= 2f + 3. Fewer than three updates leave Krum no choice: it is the median then.

Details
- Krum averages updates with equal scores instead of taking the first.
- Multi-Krum averages the n - f updates with the lowest scores, as in the paper's experiments.
- Sums are in float64: no float32 update, however large, overflows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.fields import Bounded, Bounds, OneOf
from coterie.privacy import ReleasedSums, ReleasedUpdates

FloatArray: TypeAlias = npt.NDArray[np.float64]
Updates: TypeAlias = npt.NDArray[np.float32]

# Numbers of a pass over columns.
_CHUNK = 1 << 20


def trimmed_mean(updates: Updates, byzantine: int) -> FloatArray:
    """(d,) mean of each coordinate without its ``byzantine`` smallest and largest values; n > 2 byzantine.

    With at most ``byzantine`` dishonest updates, every coordinate lies within the range of the honest ones.
    """
    middle = slice(byzantine, len(updates) - byzantine)
    return _by_coordinate(updates, lambda values: np.sort(values, axis=0)[middle].mean(axis=0))


def median(updates: Updates, byzantine: int = 0) -> FloatArray:
    """(d,) median of each coordinate; of an even number the mean of the middle two. ``byzantine`` does not matter."""
    return _by_coordinate(updates, lambda values: np.median(values, axis=0))


def krum(updates: Updates, byzantine: int) -> FloatArray:
    """(d,) the update with the least sum of squared distances to its n - byzantine - 2 nearest others."""
    return _least_scores(updates, byzantine, 1)


def multi_krum(updates: Updates, byzantine: int) -> FloatArray:
    """(d,) mean of the n - byzantine updates that :func:`krum` would take first."""
    return _least_scores(updates, byzantine, len(updates) - byzantine)


def _least_scores(updates: Updates, byzantine: int, count: int) -> FloatArray:
    if len(updates) < 3:
        return median(updates)
    scores = krum_scores(updates, byzantine)
    return _by_coordinate(
        updates[scores <= np.sort(scores)[count - 1]], lambda values: np.sort(values, axis=0).mean(axis=0)
    )


def krum_scores(updates: Updates, byzantine: int) -> FloatArray:
    """(n,) sum of squared distances of each update to its n - byzantine - 2 nearest others; n >= 3."""
    from scipy.spatial.distance import pdist, squareform  # slow to import

    nearest = max(len(updates) - byzantine - 2, 1)
    squares = np.zeros(len(updates) * (len(updates) - 1) // 2)
    for _, values in _columns(updates):
        squares += pdist(values, "sqeuclidean")
    distances = squareform(squares)
    np.fill_diagonal(distances, np.inf)
    return np.asarray(np.sort(distances, axis=1)[:, :nearest].sum(axis=1))


def _columns(updates: Updates) -> Iterator[tuple[slice, FloatArray]]:
    """Some columns at a time of (n, d) updates, in float64: those may be many, and lie in a file."""
    width = max(_CHUNK // max(len(updates), 1), 1)
    for start in range(0, updates.shape[1], width):
        columns = slice(start, start + width)
        yield columns, np.asarray(updates[:, columns], np.float64)


def _by_coordinate(updates: Updates, rule: Callable[[FloatArray], FloatArray]) -> FloatArray:
    aggregate = np.empty(updates.shape[1])
    for columns, values in _columns(updates):
        aggregate[columns] = rule(values)
    return aggregate


#: Rules besides the mean, and how many of n updates each can take for dishonest.
_RULES: dict[str, tuple[Callable[[Updates, int], FloatArray], Callable[[int], int]]] = {
    "trimmed-mean": (trimmed_mean, lambda n: (n - 1) // 2),
    "median": (median, lambda n: (n - 1) // 2),
    "krum": (krum, lambda n: max((n - 3) // 2, 0)),
    "multi-krum": (multi_krum, lambda n: max((n - 3) // 2, 0)),
}

#: Names of aggregators in configurations.
AGGREGATORS = ("mean", *_RULES)


@dataclass(frozen=True)
class Aggregator(Bounded):
    """How the updates of a cluster become one.

    Attributes:
        name: one of :data:`AGGREGATORS`. "mean" is the weighted mean, summed on arrival in memory of k x d numbers; the
            others keep all updates of a round, n x d float32, in a file once they exceed 256 MiB.
        byzantine_share: assumed share of dishonest clients in every cluster, in [0, 0.5); median needs none.
        by_records: whether the mean is weighted by the numbers of training records that clients reply with; it keeps
            all updates of a round, too.

    Raises:
        ValueError: an unknown name, or a share out of range.
    """

    name: Annotated[str, OneOf(AGGREGATORS)] = "mean"
    byzantine_share: Annotated[float, Bounds(0, 0.5, below=True)] = 0.2
    by_records: bool = False

    @classmethod
    def parse(cls, text: str) -> Aggregator:
        """Return the aggregator of a name, or of name and share such as "krum:0.3".

        Raises:
            ValueError: an unknown name, or a share out of range or that the aggregator does not use.
        """
        name, colon, share = text.partition(":")
        if colon and name in ("mean", "median"):
            raise ValueError(f"{name} tolerates no share of dishonest clients")
        return cls(name, float(share)) if colon else cls(name)

    @property
    def robust(self) -> bool:
        """Whether it is another than the mean."""
        return self.name != "mean"

    @property
    def collects(self) -> bool:
        """Whether it reads updates one by one."""
        return self.robust or self.by_records

    def byzantine(self, count: int) -> int:
        """f of ``count`` updates."""
        return min(math.ceil(self.byzantine_share * count - 1e-9), _RULES[self.name][1](count))

    def __call__(self, updates: Updates, weights: FloatArray | None = None) -> FloatArray:
        """(d,) aggregate of (n, d) updates; n is at least 1. The mean alone has (n,) weights."""
        if not self.robust:
            return _by_coordinate(updates, lambda values: np.average(values, axis=0, weights=weights))
        return _RULES[self.name][0](updates, self.byzantine(len(updates)))

    def aggregated(
        self, released: ReleasedUpdates, num_clusters: int, shared: int = 0, *, counts: bool = False
    ) -> ReleasedSums:
        """Updates that were released one by one, as sums with divisors of one: a step from them is that of the rule.

        Args:
            released: of collected updates.
            num_clusters: k; a cluster without updates has a sum of zero.
            shared: leading coordinates that all clusters share; their rule reads the whole cohort.
            counts: whether to release how many clients chose each cluster, as sums without privacy do.
        """
        updates, assigned = released.updates, released.assigned
        sums = np.zeros((num_clusters, updates.shape[1]))
        for cluster in np.unique(assigned):
            members = assigned == cluster
            rows = (updates if members.all() else updates[members])[:, shared:]
            sums[cluster, shared:] = self(rows, released.weights[members])
        if shared and len(updates):
            sums[:, :shared] = self(updates[:, :shared], released.weights)
        histogram = np.bincount(released.labels, minlength=num_clusters).astype(np.float64) if counts else None
        return ReleasedSums(
            charge=released.charge,
            epsilon=released.epsilon,
            sums=sums,
            histogram=histogram,
            divisors=np.ones(num_clusters),
            cohort=1.0,
        )
