"""RR-Cluster: clusters with fewer than B clients are filled up with random clients of larger clusters.

X. Yang, S. Hu, S. Kim, T. Li: Differentially Private Federated Clustering with Random Rebalancing
(papers/rr_cluster), Algorithm 1, and Algorithm 2, which is Algorithm 1 with IFCA.

Algorithm 1, a round t
     4  server samples M^t from the M clients with probability q
     5  server sends theta_1, ..., theta_k to M^t
     6  client i returns its update u_i and other information s_i
     7  server privatises s_i into ~s_i
     8  server partitions M^t into S_1, ..., S_k by ~s_i
     9  server determines large and small groups by comparing |S_j| with B
    10  server samples clients of large groups into small ones, such that |S_j| >= B for every j
    11  -u_i <- u_i / max(1, ||u_i|| / C)
    12  ~u_j <- (sum over i in S_j of -u_i + N(0, (2C)^2 sigma_theta^2)) / |S_j|
    13  theta_j <- theta_j + gamma ~u_j

Algorithm 2 makes lines 6 to 10 those of IFCA (its own numbers)
     7  client: c_i <- argmin_j F(theta_j, D_i);  s_i <- one-hot of c_i
     8          u_i <- LocalTraining(D_i, theta_(c_i)) - theta_(c_i)
     9          send u_i and s_i
    10  server: ~s_i <- s_i / max(1, ||s_i|| / C_s) + N(0, C_s^2 sigma_s^2)
    11          S_j <- {i : argmax ~s_i = j}
    12          large groups |S_j| >= B;  small groups the others
    13          sample members of the large groups uniformly to expand small ones to |S_j| = B

Lines 5 to 9 of the clients and line 13 of Algorithm 1 belong to a method (strategies/ifca.py, fesem.py, fedcam.py).
This file has the server's part, twice, and a third form of line 10 for the joint mechanism.

===========================  ===============================  =======================================================
line                         as printed                       as repaired: :class:`RRSlot`
===========================  ===============================  =======================================================
A1 4, cohort                 qM clients                       m = qM slots of all M clients, reachable or not; a
                                                              missing reply has no identifier and an update of zero
A2 10, identifiers           N(0, sigma_s^2), charged at      charged at sensitivity sqrt(2), the distance of two
                             sensitivity 1                    one-hots; or the exponential mechanism on the label
A2 11, groups                of the clients that replied      of all slots
A2 12, 13, donors            every member of a group of at    members beyond B alone, so that no donor becomes small
                             least B                          (:func:`surplus_members`)
A1 12, noise                 (2C)^2 sigma_theta^2             the same
A1 12, divisor               |S_j| after the moves            max(|S_j|, 1) after the moves, of slots; or qM / k
===========================  ===============================  =======================================================

As repaired, lines 10 to 13 and the divisors are functions of (~s, coins) alone. Two worlds that differ in the client
of one slot therefore have the same partition, and one block of the sums moves by at most 2C. With

    mu^2 = 2 / sigma_s^2 + 1 / sigma_theta^2

a round is a Gaussian pair of shift mu, amplified by sampling without replacement. Cohort and ~s are never published.
Theorem 2 and its proof: docs/privacy.md. The form as printed is for the paper's tables alone and never certified
(coterie/audit/printed.py).

Deviations from the paper
- :class:`RRSlot` is the right column.
- The default mechanism, ``joint``, has no per-client identifiers. There line 10 of Algorithm 1 is
  :func:`redraw_matrix`: every client redraws its own label from a row of a matrix of released histograms, which
  couples no clients and costs nothing.
- Sizes are at least B in expectation with :func:`redraw_matrix`, and as far as there are donors with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.fields import OneOf
from coterie.privacy.accountants import PrivacyError
from coterie.privacy.contributions import Contributions
from coterie.privacy.plan import Plan
from coterie.privacy.preconditions import SLOTS, Precondition
from coterie.privacy.randomness import FloatArray, gaussian
from coterie.privacy.releases import IntArray, MechanismOutput
from coterie.privacy.selection import identifier_gap, identifier_mu, noisy_labels

BoolArray = npt.NDArray[np.bool_]
#: Tells by labels, sizes, B and coins which members may be moved.
Movable: TypeAlias = Callable[[IntArray, IntArray, int, np.random.Generator], BoolArray]

#: Ways to make identifiers noisy.
IDENTIFIERS = ("gaussian", "exponential")


def redraw_matrix(histogram: npt.ArrayLike, minimum: float) -> FloatArray:
    """Return the row-stochastic (k, k) matrix that moves surplus above ``minimum`` to clusters below it.

    Algorithm 1, lines 9 and 10, for the joint mechanism: client i with label c draws its new label from row c. The
    expected sizes h R are at least min(B, sum(h) / k) in every cluster, where h are the released sizes with negative
    values replaced by zero (docs/privacy.md, lemma 1).

    Args:
        histogram: (k,) released cluster sizes; noise may make them negative.
        minimum: B, the minimum size.

    Examples:
        >>> matrix = redraw_matrix([8.0, 2.0], minimum=4.0)
        >>> matrix
        array([[0.75, 0.25],
               [0.  , 1.  ]])
        >>> [8.0, 2.0] @ matrix
        array([6., 4.])
    """
    sizes = np.maximum(np.asarray(histogram, dtype=np.float64), 0.0)
    num_clusters = len(sizes)
    target = min(minimum, sizes.sum() / num_clusters)
    surplus = np.maximum(sizes - target, 0.0)
    deficit = np.maximum(target - sizes, 0.0)
    matrix = np.eye(num_clusters)
    if not (deficit.sum() > 0 and surplus.sum() > 0):  # rounding errors can leave a deficit without a surplus
        return matrix
    # The deficit never exceeds the surplus, because the target is at most the mean; all donors give the same share.
    leaving = np.divide(surplus, sizes, out=np.zeros(num_clusters), where=sizes > 0)
    leaving *= min(1.0, deficit.sum() / surplus.sum())
    matrix -= np.diag(leaving)
    matrix += np.outer(leaving, deficit / deficit.sum())
    return matrix


def surplus_members(labels: IntArray, sizes: IntArray, minimum: int, rng: np.random.Generator) -> BoolArray:
    """Return (draws, m) whether a member may be moved, as repaired: ``minimum`` random members of its cluster stay."""
    ranks = _ranks(labels + rng.random(labels.shape))  # sorted by label, in random order within a cluster
    absent = (labels < 0).sum(axis=1, keepdims=True)
    begin = absent + np.cumsum(sizes, axis=1) - sizes
    ranks -= np.take_along_axis(begin, np.maximum(labels, 0), axis=1)
    return np.asarray((labels >= 0) & (ranks >= minimum))


def move_members(
    labels: IntArray, num_clusters: int, minimum: int, rng: np.random.Generator, *, movable: Movable = surplus_members
) -> IntArray:
    """Fill clusters below ``minimum`` with members of large clusters, drawn uniformly at random.

    Algorithm 2, lines 12 and 13. A function of (labels, coins) only.

    Args:
        labels: (draws, m) cluster of every member; -1 for slots without a member, which are unchanged.
        num_clusters: k.
        minimum: B; 0 moves no client.
        rng: the coins.
        movable: tells which members may be moved.

    Returns:
        (draws, m) clusters after the moves.
    """
    if not minimum:
        return labels
    sizes = (labels[..., None] == np.arange(num_clusters)).sum(axis=1)  # (draws, k)
    missing = np.maximum(minimum - sizes, 0)
    may_move = movable(labels, sizes, minimum, rng)
    # line 13: in random order, the first ones fill the first cluster's gap, the next the second's, ...
    rank = _ranks(np.where(may_move, rng.random(labels.shape), np.inf))
    ends = np.cumsum(missing, axis=1)
    taken = may_move & (rank < ends[:, -1:])
    target = (rank[..., None] >= ends[:, None, :]).sum(axis=-1)
    return np.where(taken, np.minimum(target, num_clusters - 1), labels)


def _ranks(keys: FloatArray) -> IntArray:
    """Return (draws, m) the place of every key in its row's ascending order."""
    order = np.argsort(keys, axis=1)
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(keys.shape[1]), order.shape), axis=1)
    return ranks


class Slots(Contributions):
    """Labels and updates by slot, because the partition requires all identifiers.

    Attributes:
        labels: (draws, m); -1 for missing replies.
        updates: (draws, d) clipped updates by slot.
    """

    def __init__(self, cohort_size: int, size: int, clip_norm: float, draws: int = 1, shared: int = 0) -> None:
        super().__init__(size, clip_norm, draws, shared)
        self.labels: IntArray = np.full((draws, cohort_size), -1, np.int64)
        self.updates: dict[int, npt.NDArray[np.float32]] = {}

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Store label and update; clients do not redraw labels."""
        self.labels[:, slot] = label
        # Algorithm 1, line 11; rounding stays within the clipping margin
        self.updates[slot] = self._clipped(update).astype(np.float32)

    def sums(self, assigned: IntArray, num_clusters: int) -> FloatArray:
        """(draws, k, d) sums of updates by the assigned cluster of each slot."""
        total = np.zeros((self.draws, num_clusters, self.size))
        every = np.arange(self.draws)
        for slot, update in self.updates.items():
            total[:, 0, : self.shared] += update[:, : self.shared]
            total[every, assigned[:, slot], self.shared :] += update[:, self.shared :]
        return total


@dataclass(frozen=True, kw_only=True)
class RRSlot(Plan):
    """RR-Cluster as repaired: noisy identifiers by slot, then noisy sums of the parts.

    Attributes:
        identifiers: "gaussian" or "exponential" (Algorithm 2, line 10).
    """

    divisor: str = "released"
    identifiers: Annotated[str, OneOf(IDENTIFIERS)] = "gaussian"

    mechanism: ClassVar[str] = "rr-slot"
    title: ClassVar[str] = "RR-Cluster's noisy identifiers with a cohort of fixed size, corrected"
    adjacency: ClassVar[str] = "replace one client, or make it absent, at fixed public numbers of clients and of slots"
    sampler: ClassVar[str] = "fixed"
    options: ClassVar[tuple[str, ...]] = ("identifiers",)
    noisy_labels: ClassVar[bool] = True
    default_identifier_share: ClassVar[float] = 0.2
    memory: ClassVar[bool] = False
    #: Sensitivity of a one-hot identifier to replacing the client of its slot.
    identifier_sensitivity: ClassVar[float] = math.sqrt(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rebalance_min != int(self.rebalance_min):
            raise PrivacyError(f"rebalance-min must be an integer, not {self.rebalance_min}")
        self._check_identifiers()

    def _check_identifiers(self) -> None:
        if self.num_clusters > 1 and not self.identifier_share:
            raise PrivacyError(f"mechanism {self.mechanism} adds noise to labels: set identifier-share above 0")

    @property
    def preconditions(self) -> tuple[Precondition, ...]:
        """Those of Theorem 2."""
        return SLOTS

    @property
    def cohort_size(self) -> int:
        """m."""
        return max(1, round(self.sampling_rate * self.clients))

    @property
    def rate(self) -> float:
        """m / M."""
        return self.cohort_size / self.clients

    @property
    def noise_multiplier_counts(self) -> float | None:
        """sigma_s, the noise standard deviation of one-hot identifiers; None if they receive no Gaussian noise."""
        if not self.identifier_share or self.identifiers != "gaussian":
            return None
        return self.identifier_sensitivity * self.noise_multiplier / math.sqrt(self.identifier_share)

    @property
    def identifier_gap(self) -> float | None:
        """eta of the exponential mechanism: the true label is exp(eta) times as likely as each other label."""
        if not self.identifier_share or self.identifiers != "exponential":
            return None
        mu = math.sqrt(self.identifier_share) / self.noise_multiplier if self.noise_multiplier else math.inf
        return identifier_gap(mu, self.num_clusters)

    @property
    def parts(self) -> list[tuple[float, float | None]]:
        """See :attr:`Plan.parts`: sums, and one-hot identifiers, or the pair that dominates noisy labels."""
        parts = [(2.0, 2 * self.noise_multiplier_updates), (math.sqrt(2), self.noise_multiplier_counts)]
        if self.identifier_gap is not None and self.num_clusters > 1:
            parts.append((identifier_mu(self.identifier_gap, self.num_clusters), 1.0))
        return parts

    @property
    def model_noise(self) -> float:
        """See :attr:`Plan.model_noise`; the sensitivity is 2C."""
        return 2 * super().model_noise

    def noise_of_sums(self, number: int) -> float:
        """See :meth:`Plan.noise_of_sums`."""
        return 2 * super().noise_of_sums(number)

    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Algorithm 1, line 4."""
        return rng.permutation(self.clients)[: self.cohort_size]

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Slots:
        """Create the container for contributions by slot."""
        return Slots(self.cohort_size, size, self.clip_norm, draws, shared)

    def perturb(
        self,
        contributions: Slots,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """Algorithm 2, lines 10 to 13, and Algorithm 1, line 12."""
        scores, labels = self._identify(contributions.labels, noise)  # lines 10 and 11
        minimum = int(self.rebalance_min)
        assigned = move_members(labels, self.num_clusters, minimum, coins, movable=self._movable)  # lines 12 and 13
        sums = contributions.sums(assigned, self.num_clusters)
        sums += gaussian(noise, 2 * self.noise_multiplier_updates, sums.shape)  # Algorithm 1, line 12, in units of C
        sums *= self.scale
        sizes = _sizes(assigned, self.num_clusters)
        divisors = np.maximum(sizes, 1.0) if self.divisor == "released" else np.full(sizes.shape, self.expected_members)
        return MechanismOutput(sums, _sizes(labels, self.num_clusters), divisors, None, scores, assigned)

    def _movable(self, labels: IntArray, sizes: IntArray, minimum: int, rng: np.random.Generator) -> BoolArray:
        """Algorithm 2, line 12."""
        return surplus_members(labels, sizes, minimum, rng)

    def _identify(self, labels: IntArray, noise: np.random.Generator) -> tuple[FloatArray | None, IntArray]:
        """Algorithm 2, lines 10 and 11: (draws, m, k) noisy identifiers, and (draws, m) noisy labels."""
        if self.noise_multiplier_counts is not None:
            scores = _one_hot(labels, self.num_clusters)
            scores += gaussian(noise, self.noise_multiplier_counts, scores.shape)
            return scores, scores.argmax(axis=-1)
        if self.identifier_gap is not None:
            drawn = noisy_labels(labels, self.num_clusters, self.identifier_gap, noise)
            return _one_hot(drawn, self.num_clusters), drawn
        return None, np.zeros_like(labels)  # one cluster needs no identifiers


def _one_hot(labels: IntArray, num_clusters: int) -> FloatArray:
    """(..., k); all zero where the label is -1."""
    return np.asarray(labels[..., None] == np.arange(num_clusters), dtype=np.float64)


def _sizes(labels: IntArray, num_clusters: int) -> FloatArray:
    return np.asarray(_one_hot(labels, num_clusters).sum(axis=-2))
