"""rr-slot: RR-Cluster's chain of noisy identifiers, made right.

X. Yang, S. Hu, S. Kim, T. Li: Differentially Private Federated Clustering with Random Rebalancing
(papers/rr_cluster), Algorithm 2, with what its proof needs.

     1  a cohort of fixed public size m = qM, drawn without replacement from all M clients, reachable or not, in
        random slots; a missing reply keeps its slot, with no identifier and an update of zero
     2  identifiers  ~s_i = e_(c_i) + N(0, sigma_s^2 I_k),  or the exponential mechanism on the label
     3  partition    S_j = {i : argmax ~s_i = j}
     4  rebalance    members move uniformly at random from clusters' surplus above B to clusters below B
     5  sums         C (sum over i in S_j of clip(u_i, C) / C + N(0, (2 sigma_theta)^2 I_d))
     6  divisors     D_j = max(|S_j|, 1)

Lines 3, 4 and 6 are functions of (~s, coins) alone, so two worlds that differ in the client of one slot have the
same partition, and one block moves by at most 2C. One-hots move by sqrt(2). With

    mu^2 = 2 / sigma_s^2 + 1 / sigma_theta^2

a round is a Gaussian pair of shift mu, amplified by sampling without replacement. Cohort and ~s are never
published. Theorem 2 and its proof: docs/privacy.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.privacy.accountants import PrivacyError
from coterie.privacy.mechanisms.rebalancing import move_members
from coterie.privacy.plan import Contributions, IntArray, MechanismOutput, Plan
from coterie.privacy.randomness import FloatArray, gaussian
from coterie.privacy.selection import identifier_gap, noisy_labels

#: Ways to make identifiers noisy.
IDENTIFIERS = ("gaussian", "exponential")


class Slots(Contributions):
    """Everything by slot, since the partition is known only when all identifiers are.

    Attributes:
        labels: (draws, m); -1 where no reply came.
        updates: (draws, d) clipped updates by slot.
    """

    def __init__(self, plan: RRSlot, size: int, draws: int = 1, shared: int = 0) -> None:
        super().__init__(plan, size, draws, shared)
        self.labels: IntArray = np.full((draws, plan.cohort_size), -1, np.int64)
        self.updates: dict[int, npt.NDArray[np.float32]] = {}

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Keep label and update; clients do not redraw here."""
        self.labels[:, slot] = label
        self.updates[slot] = self._clipped(update).astype(np.float32)  # rounding stays within the clipping margin

    def sums(self, assigned: IntArray, num_clusters: int) -> FloatArray:
        """(draws, k, d) sums of updates by the cluster that each slot was assigned to."""
        total = np.zeros((self.draws, num_clusters, self.size))
        every = np.arange(self.draws)
        for slot, update in self.updates.items():
            total[:, 0, : self.shared] += update[:, : self.shared]
            total[every, assigned[:, slot], self.shared :] += update[:, self.shared :]
        return total


@dataclass(frozen=True, kw_only=True)
class RRSlot(Plan):
    """Noisy identifiers by slot, then noisy sums of the parts. See the module for the mechanism.

    Attributes:
        identifiers: "gaussian" or "exponential" (line 2).
    """

    divisor: str = "released"
    identifiers: str = "gaussian"

    mechanism: ClassVar[str] = "rr-slot"
    title: ClassVar[str] = "RR-Cluster's noisy identifiers with a cohort of fixed size, made right"
    adjacency: ClassVar[str] = "replace one client, or make it absent, at fixed public numbers of clients and of slots"
    sampler: ClassVar[str] = "fixed"
    usual_share: ClassVar[float] = 0.2
    memory: ClassVar[bool] = False
    #: How far a one-hot identifier moves when the client of its slot is another one.
    identifier_sensitivity: ClassVar[float] = math.sqrt(2)
    #: Whether only members above B may be moved away (line 4).
    protected: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rebalance_min != int(self.rebalance_min):
            raise PrivacyError(f"rebalance-min counts members and must be a whole number, not {self.rebalance_min}")
        if self.identifiers not in IDENTIFIERS:
            raise PrivacyError(f"identifiers must be {' or '.join(IDENTIFIERS)}, not {self.identifiers!r}")
        self._check_identifiers()

    def _check_identifiers(self) -> None:
        if self.num_clusters > 1 and not self.identifier_share:
            raise PrivacyError(f"{self.mechanism} makes labels noisy: set identifier-share above 0")

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
        """sigma_s, the noise's standard deviation on a one-hot; None where labels are not made noisy by it."""
        if not self.identifier_share or self.identifiers != "gaussian":
            return None
        return self.identifier_sensitivity * self.noise_multiplier / math.sqrt(self.identifier_share)

    @property
    def identifier_gap(self) -> float | None:
        """eta of the exponential mechanism: the true label is exp(eta) times as likely as each other one."""
        if not self.identifier_share or self.identifiers != "exponential":
            return None
        mu = math.sqrt(self.identifier_share) / self.noise_multiplier if self.noise_multiplier else math.inf
        return identifier_gap(mu, self.num_clusters)

    def sample(self, rng: np.random.Generator) -> IntArray:
        """Line 1."""
        return rng.permutation(self.clients)[: self.cohort_size]

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Slots:
        """By slot."""
        return Slots(self, size, draws, shared)

    def perturb(
        self,
        contributions: Slots,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """Lines 2 to 6."""
        scores, labels = self._identify(contributions.labels, noise)  # lines 2 and 3
        assigned = move_members(
            labels, self.num_clusters, int(self.rebalance_min), coins, protected=self.protected
        )  # line 4
        sums = contributions.sums(assigned, self.num_clusters)
        sums += gaussian(noise, 2 * self.noise_multiplier_updates, sums.shape)  # line 5, in units of C
        sums *= self.scale
        sizes = _sizes(assigned, self.num_clusters)
        divisors = np.maximum(sizes, 1.0) if self.divisor == "released" else np.full(sizes.shape, self.expected_members)
        return MechanismOutput(sums, _sizes(labels, self.num_clusters), divisors, scores, assigned)  # line 6

    def _identify(self, labels: IntArray, noise: np.random.Generator) -> tuple[FloatArray | None, IntArray]:
        """(draws, m, k) noisy identifiers, and the noisy label of every slot."""
        if self.noise_multiplier_counts is not None:
            scores = _one_hot(labels, self.num_clusters)
            scores += gaussian(noise, self.noise_multiplier_counts, scores.shape)
            return scores, scores.argmax(axis=-1)
        if self.identifier_gap is not None:
            drawn = noisy_labels(labels, self.num_clusters, self.identifier_gap, noise)
            return _one_hot(drawn, self.num_clusters), drawn
        return None, np.zeros_like(labels)  # one cluster: there is nothing to tell


def _one_hot(labels: IntArray, num_clusters: int) -> FloatArray:
    """(..., k); all zero where the label is -1."""
    return np.asarray(labels[..., None] == np.arange(num_clusters), dtype=np.float64)


def _sizes(labels: IntArray, num_clusters: int) -> FloatArray:
    return np.asarray(_one_hot(labels, num_clusters).sum(axis=-2))
