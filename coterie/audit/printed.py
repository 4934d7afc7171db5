"""RR-Cluster as printed, with the claim of its Theorem 4.2: mechanisms for the tables of the paper, never certified.

:mod:`coterie.privacy.mechanisms.rebalancing` compares the printed lines with the repaired ones. :attr:`Paper.flaws`
lists what breaks the claim; docs/privacy.md has counterexamples, and ``coterie audit --mechanism paper`` attacks.

Importing this module lets configurations of this process name these mechanisms, and the accountants of
:mod:`coterie.audit.comparisons`. Tables, sweeps and the audit do; ``coterie run`` does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

import coterie.audit.comparisons  # noqa: F401 - adds the accountants that Paper names
from coterie.privacy import PrivacyError, RRSlot
from coterie.privacy.mechanisms import register
from coterie.privacy.mechanisms.rebalancing import BoolArray
from coterie.privacy.randomness import FloatArray
from coterie.privacy.releases import IntArray
from coterie.privacy.statement import Statement


def large_members(labels: IntArray, sizes: IntArray, minimum: int, rng: np.random.Generator) -> BoolArray:
    """Return (draws, m) whether a member may be moved, as printed: its cluster has at least ``minimum`` (line 12)."""
    large = np.take_along_axis(sizes >= minimum, np.maximum(labels, 0), axis=1)
    return np.asarray((labels >= 0) & large)


@dataclass(frozen=True, kw_only=True)
class Paper(RRSlot):
    """RR-Cluster as printed: donors of at least B members, unprotected, and true counts as divisors.

    ``identifier_share`` 0 is Algorithm 1 without line 7, for identifiers that require no noise: labels are exact.
    """

    accountant: str = "theorem-4.2"

    mechanism: ClassVar[str] = "paper"
    title: ClassVar[str] = "RR-Cluster as printed, for its tables; never certified"
    adjacency: ClassVar[str] = "as claimed: add/remove one client; the theorem used is for replace-one"
    options: ClassVar[tuple[str, ...]] = ()
    identifier_sensitivity: ClassVar[float] = 1.0
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

    def _check_identifiers(self) -> None:
        if self.identifiers != "gaussian":
            raise PrivacyError("mechanism paper supports gaussian identifiers only; use rr-slot for exponential ones")

    def _movable(self, labels: IntArray, sizes: IntArray, minimum: int, rng: np.random.Generator) -> BoolArray:
        """Algorithm 2, line 12."""
        return large_members(labels, sizes, minimum, rng)

    def _identify(self, labels: IntArray, noise: np.random.Generator) -> tuple[FloatArray | None, IntArray]:
        """Algorithm 2, lines 10 and 11; clients without a reply are in no group."""
        scores, noisy = super()._identify(labels, noise)
        exact = self.num_clusters > 1 and scores is None
        return scores, np.where(labels >= 0, labels if exact else noisy, -1)


@dataclass(frozen=True, kw_only=True)
class PaperUncharged(Paper):
    """The same with the noise of Appendix C on identifiers, N(0, 1) for any budget, which is *not charged*."""

    mechanism: ClassVar[str] = "paper-uncharged"
    title: ClassVar[str] = "RR-Cluster as printed, with the uncharged identifiers of its Appendix C"
    default_identifier_share: ClassVar[float] = 0.0

    @property
    def noise_multiplier_counts(self) -> float | None:
        """sigma_s."""
        return 1.0

    def _check_identifiers(self) -> None:
        super()._check_identifiers()
        if self.identifier_share:
            raise PrivacyError(
                f"mechanism {self.mechanism} has uncharged noise on identifiers; set identifier-share to 0, not "
                f"{self.identifier_share}"
            )

    @property
    def statement(self) -> Statement:
        """The flaws, and the identifiers outside the budget."""
        stated = super().statement
        return replace(stated, reasons=(*stated.reasons, "identifiers have noise of deviation 1 outside the budget"))


register(Paper)
register(PaperUncharged)
