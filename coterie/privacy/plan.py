"""A frozen plan defines sampler, clipping, noise and accounting event together; nothing else draws noise.

A plan is a mechanism (one file each in :mod:`coterie.privacy.mechanisms`) with its public parameters. Its use in a
round:

    cohort        = plan.sample(coins, t)               sampled clients
    contributions = plan.contributions(d)               clipped on arrival; secret
    permit        = ledger.charge_round(t, plan.event())       charged, on disk
    released      = plan.release(permit, contributions, streams, attempt)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Required, Self, TypedDict, TypeVar, Unpack, cast

import numpy as np

from coterie.fields import AT_LEAST_0, AT_LEAST_1, RATE, SHARE, Bounds, OneOf
from coterie.privacy.accountants import Event, PrivacyError, events_of_a_client
from coterie.privacy.accounting import calibrate
from coterie.privacy.clipping import check_clip_norm
from coterie.privacy.contributions import Collected, Contributions, Gathered, SingleContributions, Summed
from coterie.privacy.ledger import Ledger, LedgerError, Permit, count_events
from coterie.privacy.noise import NoiseSplit, check_noise
from coterie.privacy.preconditions import JOINT, Precondition
from coterie.privacy.randomness import FloatArray, Streams, gaussian
from coterie.privacy.releases import IntArray, MechanismOutput, ReleasedSums
from coterie.privacy.score_histograms import CELLS, MAX_CLASSES, ScoreHistogram, number_of_histograms, sum_of_clients
from coterie.privacy.statement import NO_EVENTS, Guarantee, PricedRequest, Statement

R = TypeVar("R")

#: Ways to divide a cluster's noisy sum.
DIVISORS = ("fixed", "released")
#: Entry of charges for histograms of scores.
FOR_HISTOGRAM: dict[str, Any] = {"for": "histogram"}


class PlanNumbers(TypedDict, total=False):  # large: the arguments of every plan
    """Arguments of :meth:`Plan.calibrated`; see the attributes of :class:`Plan` and of its subclasses."""

    clients: Required[int]
    num_clusters: Required[int]
    sampling_rate: Required[float]
    rounds: Required[int]
    epsilon: Required[float]
    delta: Required[float]
    clip_norm: Required[float]
    identifier_share: float
    sizes_until: float
    clip_share: float
    clip_factor: float
    rebalance_min: float
    divisor: str
    evaluations: int
    evaluation_noise: float
    histograms: int
    histogram_noise: float
    histogram_classes: int
    accountant: str
    identifiers: str
    participation: str
    min_separation: int
    dropout: float
    corrupt: int


class LedgerHeader(TypedDict, total=False):
    """Entries of a ledger's first line beside the plan; see :func:`~coterie.privacy.certificate`."""

    seed: int | None
    diagnostics: Sequence[str]
    public: Mapping[str, Any]
    tuned: Mapping[str, Any]
    unfounded: Sequence[str]
    start: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan(Guarantee):  # large: public numbers, the interface of a mechanism, and what both units derive
    """All privacy parameters of a run, which are fixed before its first round and public.

    Use :meth:`calibrated` to calibrate the noise; the constructor takes a noise multiplier.

    Attributes, beside those of :class:`Guarantee`:
        clients: M, the configured number of clients, never a number of replies.
        num_clusters: k.
        sampling_rate: q, the sampling rate of clients in a round.
        identifier_share: share of the noise for labels or their histogram; 0: neither is released.
        sizes_until: last round that releases cluster sizes, whose share then goes to the updates; inf: all rounds do.
        rebalance_min: B, minimum size of a cluster in a round (RR-Cluster); 0: no rebalancing.
        divisor: D_j of the update: "fixed" (qM/k), or "released" (from released sizes, at least max(B, 1)).
        evaluations: number of planned private evaluations.
        evaluation_noise: standard deviation of the noise on the mean accuracy of a private evaluation.
        histograms: number of planned histograms of scores, each with a private evaluation; 0: none is released.
        histogram_noise: noise multiplier of each.
        histogram_classes: number of classes of the records; of more than two, one event releases a histogram of each.
    """

    clients: Annotated[int, AT_LEAST_1]
    num_clusters: Annotated[int, AT_LEAST_1]
    sampling_rate: Annotated[float, RATE]
    identifier_share: Annotated[float, SHARE] = 0.0
    sizes_until: float = math.inf
    rebalance_min: float = 0.0
    divisor: Annotated[str, OneOf(DIVISORS)] = "fixed"
    evaluations: Annotated[int, AT_LEAST_0] = 0
    evaluation_noise: Annotated[float, Bounds(0, above=True)] = 0.01
    histograms: Annotated[int, AT_LEAST_0] = 0
    histogram_noise: Annotated[float, Bounds(0, above=True)] = 10.0
    histogram_classes: Annotated[int, Bounds(2, MAX_CLASSES)] = 2

    #: One-line description.
    title: ClassVar[str]
    unit: ClassVar[str] = "client"
    #: Whether every client keeps its own ledger, which is charged for its participation (record level).
    clients_keep_ledgers: ClassVar[bool] = False
    #: Whether clients redraw their own labels for rebalancing (by a matrix of released values).
    redraws: ClassVar[bool] = False
    #: Whether the number of clusters may change between rounds, as a function of released values.
    resizes: ClassVar[bool] = False
    #: Whether clients may keep state between rounds on which their updates depend.
    memory: ClassVar[bool] = True
    #: Whether a round that crashed after its charge is repeated under a further charge; otherwise it is skipped.
    repeats_rounds: ClassVar[bool] = True
    #: Reason why a run cannot have more rounds than planned; empty if it can.
    fixed_rounds: ClassVar[str] = ""
    #: Reasons why runs of this mechanism are never certified; empty if they may be.
    flaws: ClassVar[tuple[str, ...]] = ()
    #: Settings of privacy that this mechanism alone has; they are arguments of the constructor.
    options: ClassVar[tuple[str, ...]] = ()
    #: Whether the server uses noisy labels of single clients, which need a share of the privacy.
    noisy_labels: ClassVar[bool] = False
    #: Whether the clipping norm may follow a released share of norms.
    adapts_clipping: ClassVar[bool] = False
    #: Default share of identifiers.
    default_identifier_share: ClassVar[float] = 0.0

    def __str__(self) -> str:
        """Return what is not a default, for logs."""
        return _in_short(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private or self.clip_norm != math.inf:
            check_clip_norm(self.clip_norm)
        if not self.sizes_until >= 0:
            raise PrivacyError(f"sizes-until must be a round, or inf, not {self.sizes_until}")
        if self.sizes_until < self.rounds and self.reads_sizes:
            raise PrivacyError(
                f"sizes-until must be at least the number of rounds, {self.rounds}, where noisy labels, rebalancing or "
                f"released divisors need cluster sizes in every round, not {self.sizes_until:g}"
            )
        if not 0 <= self.clip_share < 1 - self.identifier_share:
            raise PrivacyError(
                f"clip share must be at least 0 and below 1 - identifier share = {1 - self.identifier_share:g}, not "
                f"{self.clip_share}"
            )
        if self.clip_share and not self.adapts_clipping:
            raise PrivacyError(f"mechanism {self.mechanism} does not support an adaptive clipping norm; set clip-norm")
        if self.num_clusters > self.clients:
            raise PrivacyError(
                f"num clusters must be at most the number of clients, {self.clients}, not {self.num_clusters}"
            )
        if not 0 <= self.rebalance_min <= self.expected_members:
            raise PrivacyError(
                f"rebalance-min must be at most qM/k = {self.expected_members:g} (sampling-rate x clients / "
                f"clusters), not {self.rebalance_min:g}"
            )
        if self.accountant not in self.accountants:
            names = ", ".join(self.accountants)
            raise PrivacyError(
                f"the accountant of mechanism {self.mechanism} must be one of {names}, not {self.accountant!r}"
            )
        if self.private and not self.flaws and not self.clients_keep_ledgers:
            self.check_noise()

    def check_noise(self) -> None:
        """Check that every round has the noise that its event charges.

        Raises:
            PrivacyError: it has less.
        """
        for number in {1, self.rounds}:
            check_noise(self.of_round(number).parts, self.event().noise_multiplier)

    def terms(self) -> dict[str, Any]:
        """See :meth:`Guarantee.terms`; what is not used, and was unknown to older ledgers, is left out.

        That is ``sizes_until`` if all rounds release sizes, and the terms of histograms if there are none.
        """
        unused = {"sizes_until"} if math.isinf(self.sizes_until) else set()
        unused |= set() if self.histograms else {"histograms", "histogram_noise"}
        unused |= set() if self.histograms and self.histogram_classes > 2 else {"histogram_classes"}
        return {name: value for name, value in super().terms().items() if name not in unused}

    def affordable_rounds(self, spent: Mapping[Event, int], remaining: int) -> int:
        """Return how many of ``remaining`` further rounds fit the budget at the noise of the plan, after ``spent``."""
        event = self.event()

        def exceeds(rounds: int) -> bool:
            return not self.budget.covers(Counter(spent) + Counter({event: rounds}))

        return bisect_left(range(1, remaining + 1), True, key=exceeds)

    @classmethod
    def calibrated(cls, **numbers: Unpack[PlanNumbers]) -> Self:
        """Return the plan with the smallest noise whose rounds and evaluations cost at most (epsilon, delta).

        Args:
            numbers: attributes of the class, without the noise multiplier.

        Raises:
            PrivacyError: a parameter is invalid, or no noise suffices.
        """
        defaults = {"identifier_share": cls.default_identifier_share, "accountant": cls.accountants[0]}
        sketch = cls(noise_multiplier=1.0, **cast(dict[str, Any], {**defaults, **numbers}))
        return sketch.recalibrated(sketch.noise_for(sketch.rounds, sketch.evaluation_events()))

    @classmethod
    def calibrated_with_histogram(cls, share: float, **numbers: Unpack[PlanNumbers]) -> Self:
        """Return a plan whose rounds and evaluations cost (1 - share) epsilon, and a histogram of scores the rest.

        Args:
            share: in (0, 1), by how much of epsilon the histogram raises the cost of all else.
            numbers: as for :meth:`calibrated`.

        Raises:
            PrivacyError: see :meth:`calibrated`.
        """
        part: PlanNumbers = {**numbers, "epsilon": (1 - share) * numbers["epsilon"]}
        rest = cls.calibrated(**part)
        whole = replace(rest, epsilon=numbers["epsilon"], histograms=1)
        spent = events_of_a_client(rest.planned())
        noise = calibrate(
            whole.epsilon, whole.delta, 1.0, 1, sampler=cls.sampler, spent=spent, accountant=whole.accountant
        )
        return replace(whole, histogram_noise=noise)

    def ledger(self, path: str | Path | None = None, **about: Unpack[LedgerHeader]) -> Ledger:
        """Create a ledger for this plan, in memory or in ``path``.

        Its header contains the plan and ``about``, as :func:`~coterie.privacy.certificate` describes.
        """
        return Ledger(self.delta, self.epsilon, path, self.accountant, {"plan": self.terms(), **about})

    def with_clip_norm(self, clip_norm: float) -> Self:
        """Return this plan with another clipping norm, which does not affect epsilon."""
        return replace(self, clip_norm=clip_norm)

    # ---- the numbers of a round ---------------------------------------------------------------------------

    @property
    def units(self) -> int:
        """M."""
        return self.clients

    @property
    def rate(self) -> float:
        """The effective sampling rate of the sampler."""
        return self.sampling_rate

    @property
    def scale(self) -> float:
        """C, the factor of noisy sums of clipped updates in units of C; 1 without clipping."""
        return self.clip_norm if math.isfinite(self.clip_norm) else 1.0

    @property
    def expected_members(self) -> float:
        """qM/k, the public expected number of members of a cluster in a round."""
        return self.rate * self.clients / self.num_clusters

    @property
    def reads_sizes(self) -> bool:
        """Whether the mechanism itself reads labels or cluster sizes, in every round."""
        return bool(self.noisy_labels or self.rebalance_min or (self.private and self.divisor == "released"))

    def of_round(self, number: int) -> Self:
        """Return the plan by which round ``number``, from 1, is released: without sizes after ``sizes_until``.

        Its event is that of this plan: the share of the sizes reduces the noise of the updates.
        """
        return self if number <= self.sizes_until else replace(self, identifier_share=0.0, sizes_until=math.inf)

    @property
    def noise_of_rounds(self) -> FloatArray:
        """(T,) ``noise_multiplier_updates`` of every round."""
        with_sizes = np.arange(1, self.rounds + 1) <= self.sizes_until
        last = self.of_round(self.rounds).noise_multiplier_updates
        return np.where(with_sizes, self.noise_multiplier_updates, last)

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

    def event(self) -> Event:
        """The event of one round."""
        return Event(self.rate, self.noise_multiplier, self.sampler)

    def round_event(self, number: int) -> Event:
        """The event of round ``number``, from 1, with its slot if only some clients may contribute."""
        return self.event()

    def evaluation_event(self) -> Event:
        """The event of one private evaluation: every client adds its accuracy - 1/2 to a sum."""
        sensitivity = 1.0 if self.sampler == "fixed" else 0.5  # replaced: from -1/2 to 1/2; absent: 0
        return Event(1.0, self.evaluation_noise * self.clients / sensitivity, self.sampler)

    def histogram_event(self) -> Event:
        """The event of one histogram of scores: every client adds a vector to a sum."""
        return Event(1.0, self.histogram_noise, self.sampler)

    def evaluation_events(self) -> Counter[Event]:
        """All events of evaluations."""
        histograms = Counter({self.histogram_event(): self.histograms})
        return +(Counter({self.evaluation_event(): self.evaluations}) + histograms)

    def pays(self, permit: Permit) -> bool:
        """Whether a permit is for a release of its round."""
        return permit.event == self.round_event(permit.round)

    def charges(self, request: PricedRequest, cohort: IntArray | None = None) -> Counter[Event]:
        """Events of releasing the replies to ``request``; the permit of the last one allows the release."""
        return Counter({self.round_event(request.round): 1})

    def planned(self) -> Counter[Event]:
        """All events of the run."""
        return self.events_of(1, self.rounds) + self.evaluation_events()

    def events_of(self, first: int, last: int) -> Counter[Event]:
        """All events of the rounds ``first`` to ``last``; slots take turns."""
        period = self.round_event(first).slots or 1
        return Counter(
            {
                self.round_event(number): (last - number) // period + 1
                for number in range(first, min(first + period, last + 1))
            }
        )

    def expected(
        self, charges: Sequence[Mapping[str, Any]], plan: Self, earlier: Mapping[Event, int] = NO_EVENTS
    ) -> Counter[Event]:
        """Return the charges of a run and its remaining planned events, as far as the budget allows."""
        charged = count_events(charges)
        releases = self.evaluation_events()
        evaluated = Counter({event: charged[event] for event in releases})
        training = charged.total() - evaluated.total()
        remaining = max(0, self.rounds - training)

        def after(rounds: int) -> Counter[Event]:
            return charged + Counter(earlier) + self.events_of(training + 1, training + rounds)

        planned = after(remaining) + (releases - evaluated)
        if self.budget.covers(planned):
            return planned
        # More events are planned than the budget allows. The ledger rejects what does not fit, which depends on public
        # values only.
        return after(bisect_left(range(1, remaining + 1), True, key=lambda n: not self.budget.covers(after(n))))

    def participations(self, rounds: int) -> int:
        """The largest number of ``rounds`` to which a client contributes."""
        return rounds

    def noise_for(self, rounds: int, besides: Mapping[Event, int] | None = None) -> float:
        """Return the noise multiplier at which ``rounds`` rounds and the events ``besides`` fit the budget."""
        return calibrate(
            self.epsilon,
            self.delta,
            self.event().sampling_rate,
            self.participations(rounds),
            sampler=self.sampler,
            spent=besides or {},
            accountant=self.accountant,
        )

    def recalibrated(self, noise_multiplier: float) -> Self:
        """Return this plan with another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)

    @property
    def evaluates_memory(self) -> bool:
        """Whether the guarantee covers private evaluations that depend on state of clients."""
        return True

    # ---- a round ------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Sample the cohort of round ``number``, from 1: client ids in [0, M), in the order of the slots."""

    @abstractmethod
    def contributions(self, size: int, draws: int = 1, shared: int = 0) -> Contributions:
        """Create the container for updates of size d, whose first ``shared`` coordinates all clusters share."""

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

    def _spend(self, permit: Permit) -> None:
        if not self.pays(permit):
            raise LedgerError(f"charge {permit.charge} is for {permit.event}, no release of round {permit.round}")
        permit.use()

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

    def noises(self) -> dict[str, float | None]:
        """Return the noise multipliers of sums, also in the last round if it releases no sizes, and of labels."""
        last = float(self.noise_of_rounds[-1])
        return {
            "noise_multiplier_updates": self.noise_multiplier_updates,
            **({"noise_multiplier_updates_last": last} if self.sizes_until < self.rounds else {}),
            "noise_multiplier_counts": self.noise_multiplier_counts,
        }


def _in_short(value: Any) -> str:
    """Return a value, of a plan what is not a default, and of several plans the first."""
    if is_dataclass(value):
        names = (entry.name for entry in fields(value) if entry.repr and getattr(value, entry.name) != entry.default)
        return f"{type(value).__name__}({', '.join(f'{name}={_in_short(getattr(value, name))}' for name in names)})"
    if isinstance(value, tuple) and value:
        return f"({_in_short(value[0])},)" if len(value) == 1 else f"({_in_short(value[0])}, and {len(value) - 1} more)"
    return repr(value)
