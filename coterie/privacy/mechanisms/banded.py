"""The banded mechanism: noise that is correlated over rounds, for participation that anyone may see.

C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu: (Amplified) Banded Matrix
Factorization, NeurIPS 2023, arXiv:2306.08153, Algorithm 1 and Theorem 4. Adaptive inputs: S. Denisov, H. B. McMahan,
K. Rush, A. Smith, A. Thakurta: Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive
Streams, NeurIPS 2022, arXiv:2202.08312, Theorem 2.1.

     1  every client belongs to one of b slots, by a public function of its id
     2  C <- a lower-triangular T x T matrix of b bands with columns of norm at most one (factorization.py)
     3  for t = 0, 1, ..., T - 1 do
     4      the clients of slot t mod b take part: all of them, or each with probability q b by secret coins
     5      each chooses its label and trains as under the joint mechanism, and replies with its update u
     6      histogram  ~h = sum e_c + N(0, sigma_h^2 I),                        in rounds whose sizes are used
            norms      ~B = sum (1[|u| < C_clip / factor] - 1/2) + N(0, sigma_b^2),  if C_clip is adaptive
     7      noise row  y_t = (Z_t - sum over j = 1, ..., b - 1 of C[t, t - j] y_(t-j)) / C[t, t],  Z_t ~ N(0, I)
     8      sums       S_j = C_clip (sum over c' = j of clip(u) / C_clip + sigma_theta (y_t)_j),  for every j
     9      divisors   D_j = qM/k, a constant

Line 7 is row t of C^-1 Z. A client contributes to rounds at least b apart, at most ceil(T / b) times, so its columns of
C have disjoint rows and the whole run is, for that client, ceil(T / b) Gaussian events of noise multiplier sigma at
rate 1, or Poisson-subsampled ones at rate q b. Theorem 4 and its proof: docs/privacy.md.

Differences from the papers
- The clipped vector has one block per cluster; cluster sizes and norms are part of the same contribution, with C = I:
  they are read round by round. Where C_clip or, after the last round with sizes, sigma_theta changes, later rows
  cancel earlier ones less well; epsilon is the same.
- The noise of a replaced model is restarted: line 7 without its earlier rows. So is all noise after a crash. If a
  model is scaled, its earlier rows are scaled by the same factor, which is at most one.
- A round that crashed after its charge is skipped, since its clients could contribute twice.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, Self, Unpack

import numpy as np

from coterie.fields import AT_LEAST_0, OneOf
from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.contributions import Summed
from coterie.privacy.mechanisms.factorization import MAX_OPTIMISED, banded_matrix, prefix_errors, row_errors
from coterie.privacy.mechanisms.turns import InTurn
from coterie.privacy.noise import check_noise
from coterie.privacy.preconditions import Precondition, of_banded
from coterie.privacy.randomness import FloatArray, gaussian
from coterie.privacy.releases import IntArray, MechanismOutput
from coterie.privacy.schedule import PlanNumbers

#: Who knows which clients of a slot take part: everyone, or the server alone.
PARTICIPATION = ("visible", "secret")


class CorrelatedNoise:
    """Rows of C^-1 Z in the memory of the server: with a released value, a row gives away the exact sum.

    Args:
        bands: (T, b) bands of C.

    Attributes:
        row: index t of the next row.
    """

    def __init__(self, bands: FloatArray) -> None:
        self._bands = bands
        self._past: deque[FloatArray] = deque(maxlen=bands.shape[1] - 1)  # the latest first
        self.row = 0

    def next(self, fresh: FloatArray) -> FloatArray:
        """Return row t of C^-1 Z (line 7), and go on to row t + 1.

        Args:
            fresh: Z_t; another shape than before restarts the matrix.
        """
        if self._past and self._past[0].shape != fresh.shape:
            self._past.clear()
        entries = self._bands[self.row]
        noise = fresh.copy()
        for j, row in enumerate(self._past, 1):
            noise -= entries[j] * row
        noise /= entries[0]
        self._past.appendleft(noise.copy())
        self.row += 1
        return noise

    def move_to(self, row: int) -> None:
        """Continue with row ``row``; if rows are left out, the matrix restarts, as after a crash."""
        if row != self.row:
            self._past.clear()
        self.row = row

    def rearrange(self, origins: IntArray, factors: FloatArray, shared: int) -> None:
        """Give each block the rows of its origin, times its factor, or zeros where it has none (index -1).

        The ``shared`` leading coordinates keep their rows.

        Raises:
            PrivacyError: two blocks have the same origin, or a factor is not in [0, 1]: Theorem 4 does not hold.
        """
        continued = origins[origins >= 0]
        if len(np.unique(continued)) < len(continued) or not np.all((factors >= 0) & (factors <= 1)):
            raise PrivacyError("rows of noise pass from a model to one other at most, scaled by a factor in [0, 1]")
        weights = np.where(origins < 0, 0.0, factors)[:, None]
        for index, row in enumerate(self._past):
            moved = row[:, origins]
            moved[..., shared:] *= weights
            self._past[index] = moved

    def __reduce__(self) -> NoReturn:
        raise TypeError("noise rows stay in memory: they are never stored or sent")


@dataclass(frozen=True, kw_only=True)
class Banded(InTurn):
    """Noise that later rounds partly cancel, for clients that take part every b rounds. See the module.

    Attributes:
        participation: "visible": everyone may know who takes part, and a cohort is a slot. "secret": the clients of a
            slot take part at random, and epsilon holds against those who cannot see it.
        min_separation: b, the number of slots and of bands. 0: 1/q, rounded, which it must be if participation is
            visible. :meth:`calibrated` chooses it by the least error if participation is secret.
    """

    participation: Annotated[str, OneOf(PARTICIPATION)] = "visible"
    min_separation: Annotated[int, AT_LEAST_0] = 0

    mechanism: ClassVar[str] = "banded"
    title: ClassVar[str] = "noise correlated over rounds; epsilon holds even if everyone sees who takes part"
    sampler: ClassVar[str] = "poisson"
    redraws: ClassVar[bool] = True
    adapts_clipping: ClassVar[bool] = True
    resizes: ClassVar[bool] = True
    fixed_rounds: ClassVar[str] = "the noise of mechanism banded is correlated over the planned rounds"
    default_identifier_share: ClassVar[float] = 0.04
    options: ClassVar[tuple[str, ...]] = ("participation", "min_separation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisor != "fixed":
            raise PrivacyError(
                f"divisor = {self.divisor!r}: noise cancels over rounds only if every round has the same divisor; set "
                "divisor to fixed"
            )
        self._check_slots()
        if self.rebalance_min and self.noise_multiplier_counts is None:
            raise PrivacyError("rebalancing requires cluster sizes: set identifier-share above 0")

    def _check_slots(self) -> None:
        slots = self.slots
        if self.participation == "visible" and slots != self._most_slots:
            raise PrivacyError(
                f"min-separation = {slots}: with visible participation a cohort is a slot, so sampling-rate = "
                f"{self.sampling_rate:g} makes it {self._most_slots}; set sampling-rate to {1 / slots:.4g}, or leave "
                "min-separation out"
            )
        if not slots * self.sampling_rate <= 1 + 1e-9 and self.participation == "secret":
            raise PrivacyError(
                f"min-separation = {slots}: a client of a slot would take part with probability sampling-rate x "
                f"min-separation = {slots * self.sampling_rate:g}; it must be at most {self._most_slots}"
            )
        self.check_slots(f"b = {slots}, the rounds from one participation of a client to the next,")

    @classmethod
    def calibrated(cls, **numbers: Unpack[PlanNumbers]) -> Self:
        """Return the plan with the smallest noise; see :meth:`Plan.calibrated`.

        With secret participation and without ``min_separation``, b is that of the least error of the models.
        """
        make = super().calibrated
        plan = make(**numbers)
        if plan.participation == "visible" or plan.min_separation:
            return plan
        most = min(plan._most_slots, plan.clients, plan.rounds)
        chosen = sorted({round(most ** (step / 6)) for step in range(7)})
        plans = [make(**{**numbers, "min_separation": slots}) for slots in chosen]
        return min(plans, key=lambda candidate: candidate.model_noise)

    @property
    def model_noise(self) -> float:
        """See :attr:`Plan.model_noise`."""
        rounds = min(self.rounds, MAX_OPTIMISED)  # more of them change little
        noise = self.noise_of_rounds[np.arange(rounds) * self.rounds // rounds]
        errors = prefix_errors(banded_matrix(rounds, min(self.slots, rounds)), noise)
        return float(np.sqrt(np.mean(errors**2)))

    def noise_of_sums(self, number: int) -> float:
        """See :meth:`Plan.noise_of_sums`; later rows of a matrix without interruptions, which may restart."""
        return super().noise_of_sums(number) * float(row_errors(self.rounds, self.slots)[number - 1])

    @property
    def matrix(self) -> FloatArray:
        """(T, b) bands of the matrix C."""
        return banded_matrix(self.rounds, self.slots)

    @property
    def slots(self) -> int:
        """b."""
        return self.min_separation or (self._most_slots if self.participation == "visible" else 1)

    @property
    def _most_slots(self) -> int:
        """1/q, rounded, or rounded down if clients take part at random."""
        inverse = 1 / self.sampling_rate
        return max(1, round(inverse) if self.participation == "visible" else int(inverse + 1e-9))

    @property
    def rate(self) -> float:
        """Share of the clients in a cohort: 1/b, or q."""
        return 1 / self.slots if self.participation == "visible" else self.sampling_rate

    # ---- cost ---------------------------------------------------------------------------------------------

    def event(self) -> Event:
        """The event of one contribution of a client."""
        rate = 1.0 if self.participation == "visible" else min(self.sampling_rate * self.slots, 1.0)
        return Event(rate, self.noise_multiplier, self.sampler)

    @property
    def evaluates_memory(self) -> bool:
        """Whether a private evaluation may depend on a client's memory: not on that of secret participation."""
        return self.participation == "visible" or self.slots == 1

    # ---- a round ------------------------------------------------------------------------------------------

    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Line 4."""
        inside, rate = self.members(number), self.event().sampling_rate
        return inside if rate == 1 else inside[rng.random(len(inside)) < rate]

    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Summed:
        """Line 5."""
        return Summed(self, size, draws, shared)

    def new_state(self) -> CorrelatedNoise:
        """Create the rows of noise of a run.

        Raises:
            PrivacyError: see :meth:`check_matrix`.
        """
        self.check_matrix()
        return CorrelatedNoise(self.matrix)

    def check_matrix(self) -> None:
        """Check that no contribution costs more than is charged.

        Raises:
            PrivacyError: the matrix has more bands than slots, or a column is longer than 1.
        """
        matrix = self.matrix
        if matrix.shape[1] > self.slots:
            raise PrivacyError(f"a matrix of {matrix.shape[1]} bands needs as many slots, and there are {self.slots}")
        columns = np.zeros(len(matrix))
        for row, entries in enumerate(matrix**2):
            columns[max(0, row - len(entries) + 1) : row + 1] += entries[: row + 1][::-1]
        check_noise([(math.sqrt(columns.max()), 1.0)], 1.0)

    def rearrange(self, state: object | None, origins: IntArray, factors: FloatArray, shared: int = 0) -> None:
        """Later rows cancel the noise that a model has left; see :meth:`Plan.rearrange`."""
        if isinstance(state, CorrelatedNoise):
            state.rearrange(origins, factors, shared)

    def state_of(self, state: object | None, number: int) -> CorrelatedNoise:
        """Return the rows of noise, at that of a round."""
        noise = state if isinstance(state, CorrelatedNoise) else self.new_state()
        noise.move_to(number - 1)
        return noise

    def perturb(
        self,
        contributions: Summed,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: Any = None,
    ) -> MechanismOutput:
        """Lines 6 to 9; each call with the same state is a further round."""
        rows = self.new_state() if state is None else state
        counts, sums = contributions.counts, contributions.sums
        histogram, below = self.noisy_counts(contributions, noise)  # line 6
        row = rows.next(gaussian(noise, 1.0, sums.shape))  # line 7
        sums = sums + self.noise_multiplier_updates * row  # line 8, in units of C_clip
        sums *= self.scale
        return MechanismOutput(sums, histogram, np.full(counts.shape, self.expected_members), below)  # line 9

    # ---- for the certificate ------------------------------------------------------------------------------

    @property
    def preconditions(self) -> tuple[Precondition, ...]:
        """Those of Theorem 4: participation is secret if a client of a slot may be left out."""
        return of_banded(secret=self.event().sampling_rate < 1)
