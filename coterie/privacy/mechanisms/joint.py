"""The joint mechanism: client-level privacy with a trusted server, and the default.

The server sees updates and labels, and protects clients from all who see what it releases. A client's label never
leaves the server, so noise is only required for the inputs of the models. M is the number of clients, k that of
clusters, q the sampling rate, C the clipping norm, B the minimum size of a cluster (``rebalance-min``).

     1  each of the M clients participates with probability q, by secret coins
     2  it chooses its label c (a function of its own data and released models); with rebalancing it redraws c' from
        row c of R, a matrix of *earlier* released histograms (else the identity); it trains and replies with its
        update u
     3  the server clips u to norm C, builds the one-hots itself, and sums on arrival
     4  histogram  ~h  = sum e_c + N(0, sigma_h^2 I),                          in rounds up to ``sizes_until``
        norms      ~s  = sum (1[|u| < C / f] - 1/2) + N(0, sigma_b^2),        if C follows norms, f = ``clip_factor``
     5  sums       S_j = C (sum over c' = j of clip(u, C) / C + N(0, sigma_theta^2 I)),   for every j
     6  divisors   D_j = qM/k, or max(B, 1, (~h R)_j) if ``divisor`` is "released";  never a true count

A client adds (e_c, +-1/2, e_c' x clip(u, C)): one block of norm at most C *whatever its label*. Lines 4 and 5 are
Gaussian releases on one cohort, so a round is ONE Poisson-subsampled Gaussian event with

    1 / sigma_eff^2 = 1 / sigma_h^2 + 1 / (2 sigma_b)^2 + 1 / sigma_theta^2.

Each term is the square of sensitivity over noise; the sensitivities are 1, 1/2 and 1 (in units of C). sigma_eff is the
``noise_multiplier`` of the event. After round ``sizes_until`` no histogram is released: sigma_theta is smaller, and the
event the same.

Theorem 1 and its proof: docs/privacy.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.privacy.accountants import PrivacyError
from coterie.privacy.contributions import Collected, Summed
from coterie.privacy.plan import Plan
from coterie.privacy.randomness import FloatArray, gaussian
from coterie.privacy.releases import IntArray, MechanismOutput

# Largest norm of an unclipped update: its square, and sums of many updates, are finite in float32.
_MAX_NORM = 1e18


@dataclass(frozen=True, kw_only=True)
class Joint(Plan):
    """Noise on sums and cluster sizes; labels stay with the server. See the module for the mechanism."""

    mechanism: ClassVar[str] = "joint"
    title: ClassVar[str] = "noise on sums and counts at the trusted server, which keeps labels secret (default)"
    adjacency: ClassVar[str] = "add/remove one client, at a fixed public number of clients"
    sampler: ClassVar[str] = "poisson"
    redraws: ClassVar[bool] = True
    adapts_clipping: ClassVar[bool] = True
    resizes: ClassVar[bool] = True
    default_identifier_share: ClassVar[float] = 0.04  # sigma_h = 5 sigma_eff; costs 2.06 % of sigma_theta

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rebalance_min or self.divisor == "released") and self.noise_multiplier_counts is None:
            raise PrivacyError("rebalancing and released divisors require cluster sizes: set identifier-share above 0")

    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Line 1."""
        return np.flatnonzero(rng.random(self.clients) < self.sampling_rate)

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Summed:
        """Line 3."""
        return Summed(self, size, draws, shared)

    def perturb(
        self,
        contributions: Summed,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """Lines 4 to 6."""
        counts, sums = contributions.counts, contributions.sums
        histogram, below = self.noisy_counts(contributions, noise)  # line 4
        sums = sums + gaussian(noise, self.noise_multiplier_updates, sums.shape)  # line 5, in units of C
        sums *= self.scale
        divisors = np.full(counts.shape, self.expected_members)  # line 6
        if self.divisor == "released" and histogram is not None:
            divisors = np.maximum(histogram @ redraw, max(self.rebalance_min, 1.0))
        return MechanismOutput(sums, histogram, divisors, below)


@dataclass(frozen=True, kw_only=True)
class NoPrivacy(Joint):
    """Exact sums and counts without clipping, with infinite epsilon: ``privacy-unit = "none"``."""

    clip_norm: float = math.inf
    epsilon: float = math.inf
    delta: float = 0.5
    noise_multiplier: float = 0.0
    divisor: str = "released"

    mechanism: ClassVar[str] = "none"
    title: ClassVar[str] = "no noise, no clipping, no guarantee"
    unit: ClassVar[str] = "none"
    hides_clients: ClassVar[bool] = False
    adapts_clipping: ClassVar[bool] = False
    flaws: ClassVar[tuple[str, ...]] = ("no privacy was asked for (privacy-unit = none)",)

    def max_update_norm(self, client: int, size: int, lr: float, first: bool, optimizer: str = "sgd") -> float:
        """Limit that keeps models, their norms and their sums finite in float32."""
        return _MAX_NORM

    def collected(self, size: int, cohort: IntArray) -> Collected:
        """Create the container for single updates with equal weights."""
        return Collected(size, cohort, np.ones(len(cohort)))
