"""A frozen plan defines sampler, clipping, noise and accounting event together; nothing else draws noise.

A plan is a mechanism (one file each in :mod:`coterie.privacy.mechanisms`) with a :class:`Schedule`. The mechanism
releases the *queries* of a round, each with its sensitivity and its noise (:attr:`Plan.parts`); the schedule charges
one event for them. A plan whose queries need more than its event charges cannot be created. Its use in a round:

    cohort        = plan.sample(coins, t)               sampled clients
    contributions = plan.contributions(d)               clipped on arrival; secret
    permit        = ledger.charge_round(t, plan.event())       charged, on disk
    released      = plan.release(permit, contributions, streams, attempt)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from coterie.privacy.accountants import PrivacyError
from coterie.privacy.contributions import Collected, Contributions, Gathered, SingleContributions, Summed
from coterie.privacy.ledger import Ledger, Permit
from coterie.privacy.ledger_lines import LedgerError
from coterie.privacy.noise import NoiseSplit, check_noise
from coterie.privacy.preconditions import JOINT, Precondition
from coterie.privacy.randomness import FloatArray, Streams, gaussian
from coterie.privacy.releases import IntArray, MechanismOutput, ReleasedSums
from coterie.privacy.schedule import Schedule
from coterie.privacy.score_histograms import CELLS, ScoreHistogram, number_of_histograms, sum_of_clients
from coterie.privacy.statement import Statement

R = TypeVar("R")

#: Entry of charges for histograms of scores.
FOR_HISTOGRAM: dict[str, Any] = {"for": "histogram"}


@dataclass(frozen=True, kw_only=True)
class Plan(Schedule):  # large: the interface of a mechanism, its release of rounds and of evaluations
    """All privacy parameters of a run, and its mechanism: who takes part, and what is released with which noise."""

    #: One-line description.
    title: ClassVar[str]
    #: Whether participation and labels are secret, so that a run shows nothing that counts clients or their replies.
    hides_clients: ClassVar[bool] = True
    #: Whether clients clip the gradients of records (DP-SGD).
    clips_records: ClassVar[bool] = False
    #: Whether clients redraw their own labels for rebalancing (by a matrix of released values).
    redraws: ClassVar[bool] = False
    #: Whether the number of clusters may change between rounds, as a function of released values.
    resizes: ClassVar[bool] = False
    #: Whether clients may keep state between rounds on which their updates depend.
    memory: ClassVar[bool] = True
    #: Whether a round that crashed after its charge is repeated under a further charge; otherwise it is skipped.
    repeats_rounds: ClassVar[bool] = True
    #: Reasons why runs of this mechanism are never certified; empty if they may be.
    flaws: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        """Return what is not a default, for logs."""
        return _in_short(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private and not self.flaws and not self.clients_keep_ledgers:
            self.check_noise()

    def check_noise(self) -> None:
        """Check that every round has the noise that its event charges.

        Raises:
            PrivacyError: it has less.
        """
        for number in {1, self.rounds}:
            check_noise(self.of_round(number).parts, self.event().noise_multiplier)

    # ---- noise --------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """C, the factor of noisy sums of clipped updates in units of C; 1 without clipping."""
        return self.clip_norm if math.isfinite(self.clip_norm) else 1.0

    @property
    def split(self) -> NoiseSplit:
        """How the noise of a round up to ``sizes_until`` divides between sums, labels and norms."""
        return NoiseSplit(self.noise_multiplier, self.identifier_share, self.clip_share)

    @property
    def noise_multiplier_updates(self) -> float:
        """sigma_theta, up to ``sizes_until``: noise standard deviation of the sums / their sensitivity."""
        return self.split.updates

    @property
    def noise_multiplier_counts(self) -> float | None:
        """Noise standard deviation of the histogram or the one-hot identifiers; None if neither is released."""
        return self.split.counts if self.private else 0.0

    @property
    def parts(self) -> list[tuple[float, float | None]]:
        """Sensitivity and noise standard deviation of what a round releases: sums in units of C, counts, norms."""
        return [(1.0, self.noise_multiplier_updates), (1.0, self.noise_multiplier_counts), (0.5, self.split.norms)]

    @property
    def noise_of_rounds(self) -> FloatArray:
        """(T,) ``noise_multiplier_updates`` of every round."""
        with_sizes = np.arange(1, self.rounds + 1) <= self.sizes_until
        last = self.of_round(self.rounds).noise_multiplier_updates
        return np.where(with_sizes, self.noise_multiplier_updates, last)

    @property
    def model_noise(self) -> float:
        """Root mean square over rounds of the noise of a model, in units of C times the server's step size / D_j."""
        return math.sqrt(float(np.mean(np.cumsum(self.noise_of_rounds**2))))

    def noise_walk(self, lr: float, optimizer: str = "sgd") -> float:
        """Standard deviation of the noise of all rounds in a parameter, if the server's step size is 1.

        Args:
            lr: root mean square over rounds of the step size of the clients; it matters where clients add the noise.
            optimizer: of the clients; it matters there, too.
        """
        return math.sqrt(2) * self.model_noise * self.scale / self.expected_members

    def noise_of_sums(self, number: int) -> float:
        """Return the standard deviation of the noise in a coordinate of a sum that round ``number`` releases."""
        return float(self.of_round(number).noise_multiplier_updates * self.scale)

    def noises(self) -> dict[str, float | None]:
        """Return the noise multipliers of sums, also in the last round if it releases no sizes, and of labels."""
        last = float(self.noise_of_rounds[-1])
        return {
            "noise_multiplier_updates": self.noise_multiplier_updates,
            **({"noise_multiplier_updates_last": last} if self.sizes_until < self.rounds else {}),
            "noise_multiplier_counts": self.noise_multiplier_counts,
        }

    # ---- a round ------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Sample the cohort of round ``number``, from 1: client ids in [0, M), in the order of the slots."""

    @abstractmethod
    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Contributions:
        """Create the container for updates of size d, whose first ``shared`` coordinates all clusters share."""

    def collected(self, size: int, cohort: IntArray) -> Collected:
        """Create the container for updates that a method reads individually.

        Raises:
            PrivacyError: this mechanism releases noisy sums only.
        """
        raise PrivacyError(f"mechanism {self.mechanism} releases noisy sums only, not single updates")

    def gathered(self, cohort: IntArray) -> Gathered:
        """Create the container for points, which are read individually.

        Raises:
            PrivacyError: see :meth:`collected`.
        """
        self.collected(0, cohort)
        return Gathered(cohort)

    def max_update_norm(self, client: int, size: int, lr: float, first: bool, optimizer: str = "sgd") -> float:
        """L2 norm above which a client's update is rejected; inf if the server clips updates.

        Args:
            client: its id.
            size: d.
            lr: step size of the client.
            first: whether it uses the batches of round 1.
            optimizer: of the client.
        """
        return math.inf

    def new_state(self) -> object | None:
        """Create the state of the mechanism for one run, such as correlated noise; None: there is no state.

        It is created once per run and passed to every :meth:`release`, which may change it. It stays in the memory of
        the server: a resumed run starts with a new state.
        """
        return None

    def state_of(self, state: object | None, number: int) -> object | None:
        """Return the state of the mechanism for round ``number``."""
        return state

    def rearrange(self, state: object | None, origins: IntArray, factors: FloatArray, shared: int = 0) -> None:
        """Adapt the state of the mechanism to models that were replaced, added, removed or scaled.

        Args:
            state: state of the mechanism (:meth:`new_state`).
            origins: (k',) index of the model that each model continues; -1: none, the mechanism restarts for it.
            factors: (k',) in [0, 1], by which each model was scaled.
            shared: number of leading coordinates that all clusters share; the mechanism continues for these.
        """
        return

    @property
    def record_plans(self) -> str | None:
        """The terms of every client's record-level plan, as JSON; None: clients add no noise."""
        return None

    def noisy_counts(
        self, contributions: Summed, noise: np.random.Generator
    ) -> tuple[FloatArray | None, FloatArray | None]:
        """(draws, k) histogram and (draws,) count of short updates, as far as they are released.

        A client moves the first by 1 and the second by 1/2, whatever it sends.
        """
        histogram = below = None
        if self.noise_multiplier_counts is not None:
            shape = contributions.counts.shape
            histogram = contributions.counts + gaussian(noise, self.noise_multiplier_counts, shape)
        if self.split.norms is not None:
            below = contributions.below + gaussian(noise, self.split.norms, contributions.below.shape)
        return histogram, below

    @abstractmethod
    def perturb(
        self,
        contributions: Any,
        noise: np.random.Generator,
        coins: np.random.Generator,
        redraw: FloatArray,
        state: Any = None,
    ) -> MechanismOutput:
        """Run the mechanism without a ledger: called by :meth:`release` and attacked by the audit."""

    def check_release(self, number: int, contributions: Contributions) -> None:
        """Check that the contributions of a round can be released.

        Raises:
            NothingReleasedError: they cannot, for a public reason: the round is skipped, and its charge stays.
        """
        return

    def cohort_of(self, contributions: Contributions) -> float:
        """Return the public number of clients of a release: qM, whoever replied."""
        return self.rate * self.clients

    def noise_of_release(self, number: int, contributions: Contributions) -> float:
        """Return the standard deviation of the noise in a coordinate of the sums of this release."""
        return self.noise_of_sums(number)

    def release(
        self,
        permit: Permit,
        contributions: Contributions,
        streams: Streams,
        attempt: int,
        redraw: FloatArray | None = None,
        state: object | None = None,
    ) -> ReleasedSums:
        """Release the noisy sums of one round; requires a permit from the ledger.

        Args:
            permit: unused permit for this plan's :meth:`event`.
            contributions: contributions of the cohort.
            streams: the server's randomness.
            attempt: number of this attempt in the run, so that a repeated round draws fresh noise.
            redraw: (k, k) matrix by which clients redrew their labels; None if they did not.
            state: state of the mechanism (:meth:`new_state`).

        Raises:
            LedgerError: the permit was already used, or is for another event.
            NothingReleasedError: see :meth:`check_release`.
        """
        self._spend(permit)
        self.check_release(permit.round, contributions)
        state = self.state_of(state, permit.round)
        noise = streams.stream("noise", permit.round, attempt)
        coins = streams.stream("rebalancing", permit.round, attempt)
        matrix = np.eye(self.num_clusters) if redraw is None else redraw
        output = self.of_round(permit.round).perturb(contributions, noise, coins, matrix, state)
        sums, divisors = output.sums[0], output.divisors[0]
        histogram = None if output.histogram is None else output.histogram[0]
        sums[:, : contributions.shared] = sums[0, : contributions.shared]  # summed and noised once, in row 0
        members = cohort = self.cohort_of(contributions)
        if self.divisor == "released" and histogram is not None:
            cohort = max(float(histogram.sum()), 1.0)
        return ReleasedSums(
            charge=permit.charge,
            epsilon=permit.epsilon,
            sums=sums,
            histogram=histogram,
            divisors=divisors,
            cohort=cohort,
            noise=self.noise_of_release(permit.round, contributions),
            below=None if output.below is None else 0.5 + float(output.below[0]) / members,
        )

    def release_each(self, permit: Permit, contributions: SingleContributions[R]) -> R:
        """Release the contributions of single clients, if the server may read them; see :meth:`release`."""
        self._spend(permit)
        return contributions.released(permit)

    def _spend(self, permit: Permit) -> None:
        if not self.pays(permit):
            raise LedgerError(f"charge {permit.charge} is for {permit.event}, no release of round {permit.round}")
        permit.use()

    # ---- evaluation ---------------------------------------------------------------------------------------

    @property
    def evaluates_memory(self) -> bool:
        """Whether the guarantee covers private evaluations that depend on state of clients."""
        return True

    def release_evaluation(self, permit: Permit, accuracies: Sequence[float], streams: Streams, attempt: int) -> float:
        """Release the noisy mean accuracy of all M clients; missing clients count as one half.

        Args:
            permit: unused permit for :meth:`evaluation_event`.
            accuracies: accuracies of the clients that replied; each is clipped to [0, 1], and NaN counts as one half.
            streams: the server's randomness.
            attempt: number of this attempt in the run.

        Raises:
            LedgerError: the permit was already used, or is for another event.
        """
        permit.use_for(self.evaluation_event())
        noise = streams.stream("evaluation", permit.round, attempt)
        values = np.nan_to_num(np.asarray(accuracies, dtype=np.float64), nan=0.5)
        total = float(np.sum(np.clip(values, 0.0, 1.0) - 0.5))
        total += float(gaussian(noise, self.evaluation_noise * self.clients, ()))
        return min(1.0, max(0.0, 0.5 + total / self.clients))

    def charge_histogram(self, ledger: Ledger, number: int) -> Permit:
        """Charge one histogram of scores.

        Raises:
            BudgetError: the charge would exceed the budget.
        """
        return ledger.charge_round(number, self.histogram_event(), **FOR_HISTOGRAM)

    def release_histogram(
        self, permit: Permit, counts: Mapping[int, Any], streams: Streams, attempt: int
    ) -> ScoreHistogram:
        """Release the noisy histogram of scores of all clients; missing clients and invalid counts add zero.

        Args:
            permit: unused permit of :meth:`charge_histogram`.
            counts: of the clients that replied, by client (:func:`~coterie.privacy.score_histograms.count_scores`).
            streams: the server's randomness.
            attempt: number of this attempt in the run.

        Raises:
            LedgerError: the permit was already used, or is for another event.
        """
        permit.use_for(self.histogram_event())
        noise = streams.stream("histogram", permit.round, attempt)
        sensitivity = math.sqrt(2) if self.sampler == "fixed" else 1.0  # replaced: both are not negative; absent
        deviation = self.histogram_noise * sensitivity
        number = number_of_histograms(self.histogram_classes)
        return ScoreHistogram.of_units(
            sum_of_clients(counts.values(), number) + gaussian(noise, deviation, (number * CELLS,)), deviation
        )

    # ---- for the certificate ------------------------------------------------------------------------------

    @property
    def statement(self) -> Statement:
        """See :class:`Statement`."""
        until = f", up to round {self.sizes_until:g}" if self.sizes_until < self.rounds else ""
        covers = (
            "the models of every round",
            *([f"noisy cluster sizes{until}"] if self.noise_multiplier_counts is not None else []),
            *(["clipping norms, which follow noisy shares of clipped updates"] if self.clip_share else []),
            *(["noisy mean accuracies of private evaluations"] if self.evaluations else []),
            *(["a noisy histogram of scores by label, and what follows from it"] if self.histograms else []),
        )
        return Statement(covers, self.preconditions, self.flaws)

    @property
    def preconditions(self) -> tuple[Precondition, ...]:
        """Those of the theorem behind the guarantee; Theorem 1 unless a mechanism has one of its own."""
        return JOINT


def _in_short(value: Any) -> str:
    """Return a value, of a plan what is not a default, and of several plans the first."""
    if is_dataclass(value):
        names = (entry.name for entry in fields(value) if entry.repr and getattr(value, entry.name) != entry.default)
        return f"{type(value).__name__}({', '.join(f'{name}={_in_short(getattr(value, name))}' for name in names)})"
    if isinstance(value, tuple) and value:
        return f"({_in_short(value[0])},)" if len(value) == 1 else f"({_in_short(value[0])}, and {len(value) - 1} more)"
    return repr(value)
