"""The secure mechanism: client-level privacy without a trusted server.

The server learns noisy sums of integer vectors, and never an update or a label of one client: secure aggregation
(privacy/secure_aggregation/masking.py) adds the vectors modulo 2^32. P. Kairouz, Z. Liu, T. Steinke: The Distributed
Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation, ICML 2021, arXiv:2102.06387, without
rotation and modular clipping, and with one block per cluster.

     1  every client belongs to one of b slots, by a public function of its id; slot (t - 1) mod b is the cohort of
        round t: n clients, of which at least l = ceil((1 - dropout) n) must stay, and at most c work with the server
     2  a client chooses its label, trains, and writes its update u into a vector of k d + k + 1 integers of L2 norm
        at most D = 2^16, whatever its label and its update:
            block c'       round(sqrt(1 - w - v) D clip(u, C) / C)      shortened, so that rounding adds nothing
            count of c     sqrt(w) D                                    w: share of the cluster sizes
            the last       sqrt(v) D if |u| < C / factor, else the negative;  v: share of the norms
     3  it adds discrete Gaussian noise of deviation sigma D / sqrt(l - c) to all entries, in layers
     4  the server learns the sum of the survivors' vectors, less the layers that so many of them do not need
        (coterie/privacy/secure_aggregation/noise_layers.py). Fewer than l survivors: nothing, and the round is skipped
     5  histogram, norms and sums: the parts of the sum, divided by the factors of line 2, and the sums times C
     6  divisors   D_j = n' / k of n' survivors, or max(B, 1, (~h R)_j)

A client's contribution has norm D under noise of at least sigma D, whoever sees the sum: one Gaussian event per round
of its slot. Theorem 9 and its proof: docs/privacy.md.

A simulation adds the same integers without masks and draws the noise of all survivors at once: a sum of discrete
Gaussians of deviation s >= 32 has the law of one to 10^-300 (Kairouz et al., Theorem 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np

from coterie.fields import AT_LEAST_0, MAX_COHORT, Bounds
from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.clipping import clip_to_unit
from coterie.privacy.contributions import Contributions
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.integer_sums import DEVIATIONS, IntegerSums, check_survivors, has_possible_norm
from coterie.privacy.ledger import Permit
from coterie.privacy.mechanisms.score_sums import ACCURACY, HISTOGRAM, ScoreSum
from coterie.privacy.mechanisms.turns import InTurn
from coterie.privacy.noise import check_noise
from coterie.privacy.preconditions import Precondition, of_secure
from coterie.privacy.randomness import FloatArray, Streams
from coterie.privacy.releases import MechanismOutput, NothingReleasedError
from coterie.privacy.score_histograms import ScoreHistogram, number_of_histograms
from coterie.privacy.secure_aggregation.integers import Integers, discrete_gaussian, from_grid, to_grid, to_modulus
from coterie.privacy.secure_aggregation.noise_layers import MIN_STEPS, NoiseLayers

#: Largest number of parameters of all models together: 8 MB a client and round.
MAX_PARAMETERS = 2_000_000
# A sum of vectors and its noise stay within the signed integers of 32 bits, in units of D.
_LARGEST_SUM = 2**31 / STEPS
_IMPOSSIBLE = "the sum of the clients' vectors is impossible"


@dataclass(frozen=True, kw_only=True)
class Secure(InTurn):  # large: what rounds and evaluations need
    """Noise of the clients on sums of which the server sees no summand. See the module for the mechanism.

    Attributes:
        dropout: share of a cohort that may drop out in a round without its being skipped.
        corrupt: c, clients of a cohort that may work with the server.
    """

    dropout: Annotated[float, Bounds(0, 1 / 3)] = 0.3
    corrupt: Annotated[int, AT_LEAST_0] = 1

    mechanism: ClassVar[str] = "secure"
    title: ClassVar[str] = "the server sees noisy sums only; epsilon holds against it as well"
    sampler: ClassVar[str] = "discrete"
    redraws: ClassVar[bool] = True
    adapts_clipping: ClassVar[bool] = True
    resizes: ClassVar[bool] = True
    default_identifier_share: ClassVar[float] = 0.04
    options: ClassVar[tuple[str, ...]] = ("dropout", "corrupt")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_slots(f"1 / sampling-rate, {self.slots} slots,")
        if (self.rebalance_min or self.divisor == "released") and self.noise_multiplier_counts is None:
            raise PrivacyError("rebalancing and released divisors require cluster sizes: set identifier-share above 0")
        self._check_cohorts()
        sizes = {self.clients // self.slots, -(-self.clients // self.slots)}
        for clients in sizes | ({self.clients} if self.evaluations or self.histograms else set()):
            least = self._least(clients)
            if least - self.corrupt < 1 or 2 * least <= clients + self.corrupt:
                raise PrivacyError(
                    f"a cohort of {clients} clients, of which {least} must stay and corrupt = {self.corrupt} may work "
                    "with the server, is too small: twice those that stay must exceed all and the corrupt ones; use "
                    "more clients, a smaller dropout or fewer corrupt ones"
                )
        charged = self.event().noise_multiplier
        for clients in sizes:
            self.check_layers(charged, "noise", clients, self.layers)
        if self.evaluations:
            noise = self.evaluation_event().noise_multiplier
            self.check_layers(noise, "evaluation-noise", self.clients, self.scores(ACCURACY).layers)
        if self.histograms:
            layers = self.scores(HISTOGRAM).layers
            self.check_layers(self.histogram_noise, "the noise of a histogram of scores", self.clients, layers)

    def _check_cohorts(self) -> None:
        """Check that the clients of every round are few enough for each of them to mask with all others."""
        if (cohort := -(-self.clients // self.slots)) > MAX_COHORT:
            raise PrivacyError(
                f"a cohort of {cohort:,} clients exceeds {MAX_COHORT:,}, since each client masks with all others; use "
                f"more slots: sampling-rate = {1 / -(-self.clients // MAX_COHORT):.4g} or less"
            )
        if self.clients > MAX_COHORT and (self.evaluations or self.histograms):
            raise PrivacyError(
                f"a private evaluation asks all {self.clients:,} clients, and masked rounds have at most "
                f"{MAX_COHORT:,}; set evaluate to none"
            )

    def check_noise(self) -> None:
        """See :meth:`Plan.check_noise`; the vector of a client is no longer than the grid allows."""
        super().check_noise()
        for number in {1, self.rounds}:
            check_noise([(math.hypot(*self.of_round(number).factors) / STEPS, 1.0)], 1.0)

    def check_layers(self, noise: float, name: str, clients: int, layers: NoiseLayers) -> None:
        """Check that the noise of so many clients suffices, and that its integers hold it.

        Raises:
            PrivacyError: it does not, or they do not.
        """
        if not MIN_STEPS <= layers.deviations[0]:
            raise PrivacyError(
                f"{name}: {noise:g} times the sensitivity is less than {MIN_STEPS:g} steps of the grid a client"
            )
        if not layers.suffice(noise * STEPS, clients, self._least(clients), self.corrupt):
            raise PrivacyError(
                f"{name}: the honest of {clients} clients, of which {self._least(clients)} must stay, add less than "
                f"{noise:g} times the sensitivity together"
            )
        if clients + DEVIATIONS * math.sqrt(clients) * layers.deviation() / STEPS >= _LARGEST_SUM:
            raise PrivacyError(
                f"{name}: {noise:g} times the sensitivity and the sum over {clients} clients exceed integers of "
                "32 bits; use fewer clients a round, or a larger epsilon"
            )

    # ---- who takes part -----------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """b: 1/q, rounded."""
        return max(1, round(1 / self.sampling_rate))

    def threshold(self, number: int) -> int:
        """Return l, the survivors of a round below which nothing is released."""
        return self._least(len(self.members(number)))

    def _least(self, clients: int) -> int:
        return math.ceil((1 - self.dropout) * clients - 1e-9)

    # ---- noise --------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> NoiseLayers:
        """The layers of one client's noise in a round, sized for the smallest slot."""
        clients = self.clients // self.slots
        return NoiseLayers.of(self.noise_multiplier * STEPS, clients, self._least(clients), self.corrupt)

    def _excess(self, survivors: int, unremoved: int = 0) -> float:
        """Return the ratio of the noise of a release to that of the guarantee.

        Args:
            survivors: number of clients.
            unremoved: of those whose surplus is in the sum.
        """
        return self.layers.deviation_of_sum(survivors, unremoved) / (self.noise_multiplier * STEPS)

    @property
    def model_noise(self) -> float:
        """See :attr:`Plan.model_noise`; all clients stay."""
        return super().model_noise * self._excess(self.clients // self.slots)

    def noise_of_sums(self, number: int) -> float:
        """See :meth:`Plan.noise_of_sums`; all clients stay."""
        return super().noise_of_sums(number) * self._excess(self.clients // self.slots)

    def event(self) -> Event:
        """The event of one contribution of a client."""
        return Event(1.0, self.noise_multiplier, self.sampler)

    # ---- a client's vector --------------------------------------------------------------------------------

    @property
    def factors(self) -> tuple[float, int, int]:
        """Steps of the grid of a clipped update of norm C, of a count of one, and of the sign of a short update."""
        counts, norms = self.identifier_share, self.clip_share
        return STEPS * math.sqrt(1 - counts - norms), _whole(counts), _whole(norms)

    def on_grid(self, update: FloatArray) -> Integers:
        """Return a (d,) update, clipped, as integers of norm at most the first of :attr:`factors`."""
        return to_grid(clip_to_unit(update[None], self.clip_norm)[0], self.factors[0])

    def vector_size(self, size: int, shared: int = 0) -> int:
        """Return the number of entries of a vector for models of d parameters, of which all share the first ones."""
        return shared + self.num_clusters * (size - shared) + self.num_clusters + 1

    def encode(self, update: FloatArray, label: int, redrawn_label: int, shared: int = 0) -> Integers:
        """Return the vector of one client without noise (line 2), of L2 norm at most D; of the plan of its round.

        Args:
            update: (d,).
            label: chosen.
            redrawn_label: of the block of the update.
            shared: number of leading parameters that all clusters share.
        """
        contributions = self.contributions(len(update), shared=shared)
        contributions.add(0, label, redrawn_label, update)
        return contributions.vector()

    # ---- a round ------------------------------------------------------------------------------------------

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> IntegerSums:
        """Line 4, by a simulation."""
        if self.num_clusters * size > MAX_PARAMETERS:
            raise PrivacyError(
                f"mechanism secure hides labels in vectors of {self.num_clusters} x {size:,} parameters, more than "
                f"{MAX_PARAMETERS:,}: use fewer clusters or a smaller network, such as adapters"
            )
        return IntegerSums(self, size, draws, shared)

    def perturb(
        self,
        contributions: IntegerSums,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: object | None = None,
    ) -> MechanismOutput:
        """Lines 3, 5 and 6."""
        survivors = contributions.survivors

        def with_noise(part: Integers, factor: float) -> FloatArray:
            total = part
            if not contributions.noisy:
                drawn = discrete_gaussian(noise, self.layers.deviation_of_sum(survivors), part.size)
                total = part + drawn.reshape(part.shape)
            return from_grid(to_modulus(total)) * (STEPS / factor)

        updates, count, half = self.factors
        sums = with_noise(contributions.sums, updates) * self.scale
        histogram = with_noise(contributions.counts, count) if count else None
        below = with_noise(contributions.below, 2 * half) if half else None
        divisors = np.full(contributions.counts.shape, max(survivors, 1) / self.num_clusters)
        if self.divisor == "released" and histogram is not None:
            divisors = np.maximum(histogram @ redraw, max(self.rebalance_min, 1.0))
        return MechanismOutput(sums, histogram, divisors, below)

    def check_release(self, number: int, contributions: Contributions) -> None:
        """Check that enough clients are left, and that their vectors may have this sum; see :class:`Plan`."""
        sums = _integers(contributions)
        check_survivors(sums.survivors, self.threshold(number))
        vector, noise = sums.vector(), self.layers.deviation_of_sum(sums.survivors, sums.unremoved) / STEPS
        if not has_possible_norm(vector, sums.survivors, noise):
            raise NothingReleasedError(f"{_IMPOSSIBLE}: its norm exceeds that of all clients together")
        if count := self.of_round(number).factors[1]:
            total, deviation = float(sums.counts.sum()) / count, noise * STEPS / count
            if abs(total - sums.survivors) > DEVIATIONS * deviation * math.sqrt(self.num_clusters):
                raise NothingReleasedError(f"{_IMPOSSIBLE}: its counts do not add up to {sums.survivors} clients")

    def cohort_of(self, contributions: Contributions) -> float:
        """Return the number of survivors, which is public."""
        return float(_integers(contributions).survivors)

    def noise_of_release(self, number: int, contributions: Contributions) -> float:
        """See :meth:`Plan.noise_of_release`: the noise of all survivors."""
        sums = _integers(contributions)
        return super().noise_of_sums(number) * self._excess(sums.survivors, sums.unremoved)

    # ---- evaluation ---------------------------------------------------------------------------------------

    def release_evaluation(self, permit: Permit, accuracies: Sequence[float], streams: Streams, attempt: int) -> float:
        """See :meth:`Plan.release_evaluation`.

        Raises:
            NothingReleasedError: too few clients have replied.
        """
        scores, noise = self.scores(ACCURACY), streams.stream("evaluation", permit.round, attempt)
        permit.use_for(scores.event)
        return scores.accuracy(scores.simulated(accuracies, noise))

    def release_histogram(
        self, permit: Permit, counts: Mapping[int, Any], streams: Streams, attempt: int
    ) -> ScoreHistogram:
        """See :meth:`Plan.release_histogram`.

        Raises:
            NothingReleasedError: too few clients have replied.
        """
        scores, noise = self.scores(HISTOGRAM), streams.stream("histogram", permit.round, attempt)
        permit.use_for(scores.event)
        return scores.histogram(scores.simulated(list(counts.values()), noise), len(counts))

    def scores(self, release: str) -> ScoreSum:
        """Return the sum that a private evaluation releases: :data:`ACCURACY` or :data:`HISTOGRAM`."""
        event, histograms = self.evaluation_event(), 0
        if release == HISTOGRAM:
            event, histograms = self.histogram_event(), number_of_histograms(self.histogram_classes)
        return ScoreSum(event, self.clients, self._least(self.clients), self.corrupt, histograms)

    @property
    def planned_of_client(self) -> Counter[Event]:
        """All events of one client in the run."""
        return Counter({self.event(): self.participations(self.rounds)}) + self.evaluation_events()

    # ---- for the certificate ------------------------------------------------------------------------------

    @property
    def preconditions(self) -> tuple[Precondition, ...]:
        """Those of Theorem 9."""
        who = "of all clients" if self.evaluations or self.histograms else "clients of a cohort"
        return of_secure(corrupt=self.corrupt, clients=who)


def _integers(contributions: Contributions) -> IntegerSums:
    assert isinstance(contributions, IntegerSums)
    return contributions


def _whole(share: float) -> int:
    """Return sqrt(share) D, rounded down: an entry of the vector."""
    return math.floor(STEPS * math.sqrt(share))
