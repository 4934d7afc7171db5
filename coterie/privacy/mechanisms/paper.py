"""paper: RR-Cluster as printed, to reproduce its tables. It is never certified.

X. Yang, S. Hu, S. Kim, T. Li: Differentially Private Federated Clustering with Random Rebalancing
(papers/rr_cluster), Algorithms 1 and 2.

     1  sample qM clients                                                     Algorithm 1, line 4
     2  ~s_i = s_i + N(0, sigma_s^2), one-hots counted at sensitivity 1       Algorithm 2, line 10
     3  S_j = {i : argmax ~s_i = j}                                           line 11
     4  large groups |S_j| >= B, small groups the others                      line 12
     5  members of large groups, drawn uniformly, expand small ones to B      line 13
     6  (sum over S_j of clip(u_i, C) + N(0, (2C)^2 sigma_theta^2)) / |S_j|   Algorithm 1, line 12

The privacy claim is Theorem 4.2 with Theorem A.1. What breaks it is in :attr:`Paper.flaws`, as counterexamples in
docs/privacy.md and tests, and as attacks in ``coterie audit --mechanism paper``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.privacy.accountants import PrivacyError
from coterie.privacy.mechanisms.rr_slot import RRSlot
from coterie.privacy.plan import IntArray
from coterie.privacy.randomness import FloatArray


@dataclass(frozen=True, kw_only=True)
class Paper(RRSlot):
    """Algorithm 2 with donors of at least B members, unprotected, and true counts as divisors.

    ``identifier_share`` 0 is Algorithm 1 for identifiers that need no noise: labels stay exact.

    Attributes:
        identifier_noise: standard deviation of the noise on one-hots, *not charged*, as Appendix C has it
            (it adds N(0, 1), whatever the budget); 0 takes it from the identifiers' share.
    """

    accountant: str = "theorem-4.2"
    identifier_noise: float = 0.0

    mechanism: ClassVar[str] = "paper"
    title: ClassVar[str] = "RR-Cluster as printed, for its tables; never certified"
    adjacency: ClassVar[str] = "as claimed: add/remove one client; the theorem used is for replace-one"
    identifier_sensitivity: ClassVar[float] = 1.0
    protected: ClassVar[bool] = False
    memory: ClassVar[bool] = True
    accountants: ClassVar[tuple[str, ...]] = ("theorem-4.2", "theorem-4.2-canonne", "rdp", "pld")
    flaws: ClassVar[tuple[str, ...]] = (
        "mechanism paper: a removed client and the one moved in its place change two clusters, a joint shift of "
        "sqrt(5) C where 2C is charged",
        "mechanism paper: removing one member of a donor of exactly B members takes the whole cluster out of the pool",
        "mechanism paper: sums are divided by true counts, so one client changes the noise's variance in every "
        "coordinate",
        "mechanism paper: one-hot identifiers move by sqrt(2) under the replace-one adjacency of its amplification "
        "theorem and are charged at 1",
    )

    @property
    def noise_multiplier_counts(self) -> float | None:
        """sigma_s."""
        return self.identifier_noise or super().noise_multiplier_counts

    def _check_identifiers(self) -> None:
        if not 0 <= self.identifier_noise < math.inf or (self.identifier_noise and self.identifier_share):
            raise PrivacyError(
                f"identifier noise must be finite and at least 0, and replaces a share (set identifier-share to 0), "
                f"not {self.identifier_noise} beside a share of {self.identifier_share}"
            )
        if self.identifiers != "gaussian":
            raise PrivacyError("mechanism paper has gaussian identifiers; rr-slot has exponential ones")

    def reasons(self) -> list[str]:
        """Its flaws, and identifiers that are outside the budget."""
        uncharged = f"identifiers have noise of deviation {self.identifier_noise:g} that is outside the budget"
        return super().reasons() + ([uncharged] if self.identifier_noise else [])

    def _identify(self, labels: IntArray, noise: np.random.Generator) -> tuple[FloatArray | None, IntArray]:
        """Lines 2 and 3; whoever did not reply is in no group."""
        scores, noisy = super()._identify(labels, noise)
        exact = self.num_clusters > 1 and scores is None
        return scores, np.where(labels >= 0, labels if exact else noisy, -1)
