"""The schedule of a run: its public numbers, and the events that it charges, from which its noise is calibrated.

What a round releases for its event, and with which noise, is up to the mechanism: see :class:`coterie.privacy.Plan`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Required, Self, TypedDict, Unpack, cast

from coterie.fields import AT_LEAST_0, AT_LEAST_1, RATE, SHARE, Bounds, OneOf
from coterie.privacy.accountants import Event, PrivacyError, events_of_a_client
from coterie.privacy.accounting import calibrate
from coterie.privacy.clipping import check_clip_norm
from coterie.privacy.ledger import Ledger, Permit
from coterie.privacy.ledger_lines import count_events
from coterie.privacy.releases import IntArray
from coterie.privacy.score_histograms import MAX_CLASSES
from coterie.privacy.statement import NO_EVENTS, Guarantee, PricedRequest

#: Ways to divide a cluster's noisy sum.
DIVISORS = ("fixed", "released")


class PlanNumbers(TypedDict, total=False):  # large: the arguments of every plan
    """Arguments of :meth:`Schedule.calibrated`; see the attributes of :class:`Schedule` and of mechanisms."""

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
class Schedule(Guarantee):  # large: public numbers, and the events of rounds and of evaluations
    """Public numbers of a run, which are fixed before its first round, and the events that follow from them.

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

    unit: ClassVar[str] = "client"
    #: Whether every client keeps its own ledger, which is charged for its participation (record level).
    clients_keep_ledgers: ClassVar[bool] = False
    #: Reason why a run cannot have more rounds than planned; empty if it can.
    fixed_rounds: ClassVar[str] = ""
    #: Settings of privacy that this mechanism alone has; they are arguments of the constructor.
    options: ClassVar[tuple[str, ...]] = ()
    #: Whether the server uses noisy labels of single clients, which need a share of the privacy.
    noisy_labels: ClassVar[bool] = False
    #: Whether the clipping norm may follow a released share of norms.
    adapts_clipping: ClassVar[bool] = False
    #: Default share of identifiers.
    default_identifier_share: ClassVar[float] = 0.0

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

    def terms(self) -> dict[str, Any]:
        """See :meth:`Guarantee.terms`; what is not used, and was unknown to older ledgers, is left out.

        That is ``sizes_until`` if all rounds release sizes, and the terms of histograms if there are none.
        """
        unused = {"sizes_until"} if math.isinf(self.sizes_until) else set()
        unused |= set() if self.histograms else {"histograms", "histogram_noise"}
        unused |= set() if self.histograms and self.histogram_classes > 2 else {"histogram_classes"}
        return {name: value for name, value in super().terms().items() if name not in unused}

    def ledger(self, path: str | Path | None = None, **about: Unpack[LedgerHeader]) -> Ledger:
        """Create a ledger for this plan, in memory or in ``path``.

        Its header contains the plan and ``about``, as :func:`~coterie.privacy.certificate` describes.
        """
        return Ledger(self.delta, self.epsilon, path, self.accountant, {"plan": self.terms(), **about})

    def with_clip_norm(self, clip_norm: float) -> Self:
        """Return this plan with another clipping norm, which does not affect epsilon."""
        return replace(self, clip_norm=clip_norm)

    # ---- calibration --------------------------------------------------------------------------------------

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

    def affordable_rounds(self, spent: Mapping[Event, int], remaining: int) -> int:
        """Return how many of ``remaining`` further rounds fit the budget at the noise of the plan, after ``spent``."""
        event = self.event()

        def exceeds(rounds: int) -> bool:
            return not self.budget.covers(Counter(spent) + Counter({event: rounds}))

        return bisect_left(range(1, remaining + 1), True, key=exceeds)

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

    # ---- events -------------------------------------------------------------------------------------------

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

    def charges(self, request: PricedRequest, cohort: IntArray | None = None) -> Counter[Event]:
        """Events of releasing the replies to ``request``; the permit of the last one allows the release."""
        return Counter({self.round_event(request.round): 1})

    def pays(self, permit: Permit) -> bool:
        """Whether a permit is for a release of its round."""
        return permit.event == self.round_event(permit.round)

    def participations(self, rounds: int) -> int:
        """The largest number of ``rounds`` to which a client contributes."""
        return rounds

    def events_of(self, first: int, last: int) -> Counter[Event]:
        """All events of the rounds ``first`` to ``last``; slots take turns."""
        period = self.round_event(first).slots or 1
        return Counter(
            {
                self.round_event(number): (last - number) // period + 1
                for number in range(first, min(first + period, last + 1))
            }
        )

    def planned(self) -> Counter[Event]:
        """All events of the run."""
        return self.events_of(1, self.rounds) + self.evaluation_events()

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
