"""One frozen plan yields sampler, clipping, noise and accounting event together; nothing else draws noise.

``joint`` (docs/privacy.md): client i adds e_c (its label, one-hot) and e_c' x clip(u, C) (its update, in one
block) to a round. With Gaussian noise sigma_h on the first sum and sigma_theta C on the second, both on one
Poisson cohort, a round is a single Poisson-subsampled Gaussian event with

    1 / sigma_eff^2 = 1 / sigma_h^2 + 1 / sigma_theta^2,

whatever the labels are, as long as a client's label is a function of its own data and released values alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coterie.privacy.accounting import Event, PrivacyError, calibrate, check_delta
from coterie.privacy.ledger import LedgerError, Permit
from coterie.privacy.randomness import FloatArray, Streams, gaussian

#: Mechanisms by name, with a line for a person who chooses.
MECHANISMS = {"joint": "noise on the sums and counts of the trusted server; labels stay with it (default)"}

# Room for the rounding of norms and sums below the clipping norm.
_CLIP_MARGIN = 1e-6


def clip(update: npt.ArrayLike, clip_norm: float) -> FloatArray:
    """``update`` in float64, scaled down to L2 norm at most ``clip_norm``; all zero if any entry is not finite.

    Args:
        update: array of any shape, 0-d and empty included.
        clip_norm: the bound C > 0; inf leaves finite updates as they are.
    """
    vector = np.asarray(update, dtype=np.float64)
    if not np.all(np.isfinite(vector)):
        return np.zeros_like(vector)
    if math.isinf(clip_norm):
        return vector
    largest = float(np.max(np.abs(vector), initial=0.0))
    if largest == 0.0:
        return vector
    norm = float(np.linalg.norm(vector / largest)) * largest  # scaled first: squares of 1e200 overflow
    limit = clip_norm * (1 - _CLIP_MARGIN)
    return vector if norm <= limit else vector / largest * (limit / (norm / largest))


@dataclass(frozen=True)
class Released:
    """What left the mechanism in one round: paid for, and free to use from here on.

    Attributes:
        sums: (k, d) float64, noisy sums of clipped updates per cluster.
        histogram: (k,) float64, noisy numbers of clients that chose each cluster; None when not released.
        charge: number of the ledger's charge that paid for it.
        epsilon: of everything charged up to this release.
    """

    sums: FloatArray
    histogram: FloatArray | None
    charge: int
    epsilon: float


@dataclass(frozen=True)
class Plan:
    """Everything about a run's privacy that is fixed before its first round. All numbers are public.

    Build one with :meth:`joint` or :meth:`no_privacy`.

    Attributes:
        unit: "client", or "none" for a run without privacy (epsilon is infinite).
        mechanism: a name of :data:`MECHANISMS`, or "none".
        clients: M, the configured number of clients, never a count of who replied.
        num_clusters: k.
        sampling_rate: q, the probability with which each client takes part in a round.
        rounds: T.
        clip_norm: C, L2 bound of one client's update.
        epsilon: the budget; inf without privacy.
        delta: of the guarantee.
        noise_multiplier: sigma_eff of a round; 0 without privacy.
        identifier_share: part of 1/sigma_eff^2 that goes to the histogram of labels; 0 releases none.
    """

    unit: str
    mechanism: str
    clients: int
    num_clusters: int
    sampling_rate: float
    rounds: int
    clip_norm: float
    epsilon: float
    delta: float
    noise_multiplier: float
    identifier_share: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate must lie in (0, 1], not {self.sampling_rate}")
        if not 0 < self.clip_norm:
            raise PrivacyError(f"clipping norm must be positive, not {self.clip_norm}")
        if not 0 <= self.identifier_share < 1:
            raise PrivacyError(f"identifier share must lie in [0, 1), not {self.identifier_share}")
        for name in ("clients", "num_clusters", "rounds"):
            if not getattr(self, name) >= 1:
                raise PrivacyError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        if self.num_clusters > self.clients:
            raise PrivacyError(f"{self.num_clusters} clusters for {self.clients} clients: ask for fewer clusters")
        check_delta(self.delta)

    @classmethod
    def joint(
        cls,
        *,
        clients: int,
        num_clusters: int,
        sampling_rate: float,
        rounds: int,
        clip_norm: float,
        epsilon: float,
        delta: float,
        identifier_share: float = 0.04,
    ) -> Plan:
        """The plan of the joint mechanism whose ``rounds`` rounds cost at most (epsilon, delta).

        ``identifier_share`` 0.04 means sigma_h = 5 sigma_eff and costs 2.06 % of sigma_theta.
        """
        noise = calibrate(epsilon, delta, sampling_rate, rounds)
        return cls(
            unit="client",
            mechanism="joint",
            clients=clients,
            num_clusters=num_clusters,
            sampling_rate=sampling_rate,
            rounds=rounds,
            clip_norm=clip_norm,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise,
            identifier_share=identifier_share,
        )

    @classmethod
    def no_privacy(cls, *, clients: int, num_clusters: int, sampling_rate: float, rounds: int) -> Plan:
        """No noise and no clipping: exact sums and counts, epsilon infinite."""
        return cls(
            unit="none",
            mechanism="none",
            clients=clients,
            num_clusters=num_clusters,
            sampling_rate=sampling_rate,
            rounds=rounds,
            clip_norm=math.inf,
            epsilon=math.inf,
            delta=0.5,
            noise_multiplier=0.0,
            identifier_share=0.0,
        )

    @property
    def private(self) -> bool:
        """Whether this plan promises anything at all."""
        return self.unit != "none"

    @property
    def noise_multiplier_updates(self) -> float:
        """sigma_theta: noise standard deviation of the sums, over the clipping norm."""
        return self.noise_multiplier / math.sqrt(1 - self.identifier_share)

    @property
    def noise_multiplier_counts(self) -> float | None:
        """sigma_h: noise standard deviation of the histogram; None when no histogram is released."""
        if not self.private:
            return 0.0
        return self.noise_multiplier / math.sqrt(self.identifier_share) if self.identifier_share else None

    @property
    def expected_members(self) -> float:
        """qM/k, the public stand-in for a cluster's number of members in a round."""
        return self.sampling_rate * self.clients / self.num_clusters

    def event(self) -> Event:
        """One round, for the accountant."""
        return Event(self.sampling_rate, self.noise_multiplier)

    def recalibrated(self, noise_multiplier: float) -> Plan:
        """This plan with another noise for the rounds that remain."""
        return replace(self, noise_multiplier=noise_multiplier)

    def sample(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Ids in [0, M) of one round's cohort: every client independently with probability q."""
        return np.flatnonzero(rng.random(self.clients) < self.sampling_rate)

    def clip(self, update: npt.ArrayLike) -> FloatArray:
        """:func:`clip` at this plan's clipping norm."""
        return clip(update, self.clip_norm)

    def release(self, permit: Permit, sums: FloatArray, counts: FloatArray, streams: Streams, attempt: int) -> Released:
        """The noisy sums and histogram of one round, against a permit from the ledger.

        Args:
            permit: of a charge for this plan's :meth:`event`, not used before.
            sums: (k, d) float64, sums of clipped updates.
            counts: (k,) float64, numbers of clients by the label that they chose.
            streams: the server's randomness.
            attempt: number of this attempt in the run, so that a seeded rerun draws fresh noise.

        Raises:
            LedgerError: the permit was used, or paid for another event.
        """
        if permit.event != self.event():
            raise LedgerError(f"charge {permit.charge} paid for {permit.event}, not for {self.event()}")
        permit.use()
        noise = streams.stream("noise", permit.round, attempt)
        histogram = None
        if self.noise_multiplier_counts is not None:
            histogram = counts + gaussian(noise, self.noise_multiplier_counts, counts.shape)
        scale = self.noise_multiplier_updates * self.clip_norm if self.private else 0.0
        sums = sums + gaussian(noise, scale, sums.shape)
        return Released(sums, histogram, permit.charge, permit.epsilon)
