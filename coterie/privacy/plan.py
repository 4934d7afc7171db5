"""A frozen plan defines sampler, clipping, noise and accounting event together; nothing else draws noise.

A plan is a mechanism (one file each in :mod:`coterie.privacy.mechanisms`) with its public parameters. Its use in a
round:

    cohort        = plan.sample(coins, t)               sampled clients
    contributions = plan.contributions(d)               clipped on arrival; secret
    permit        = ledger.charge_round(t, plan.event())       charged, on disk
    released      = plan.release(permit, contributions, streams, attempt)
"""

from __future__ import annotations

import functools
import math
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Required, Self, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from coterie.privacy.accountants import ACCOUNTANTS, MAX_NOISE, Event, PrivacyError
from coterie.privacy.accounting import calibrate, check_delta
from coterie.privacy.clipping import check_clip_norm, clip_to_unit
from coterie.privacy.ledger import Ledger, LedgerError, Permit
from coterie.privacy.randomness import FloatArray, Streams, gaussian
from coterie.privacy.record import PricedRequest

IntArray = npt.NDArray[np.int64]
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

# Numbers that are clipped at once: 512 kB in float64, which fit a core's cache.
_BLOCK = 1 << 16
# Largest number of bytes of collected updates in memory.
_SPOOL = 1 << 28

#: Ways to divide a cluster's noisy sum.
DIVISORS = ("fixed", "released")


class Contributions(ABC):
    """Updates of one cohort, clipped on arrival and divided by C; exact sums and labels, accessible to mechanisms only.

    ``draws`` independent rounds can be stored together, as in the audit, which runs a mechanism 100,000 times; a run
    has one. Labels then have shape (draws,) and updates (draws, d).

    The first ``shared`` coordinates of an update are summed over all clients regardless of their labels, and receive
    noise once; this block is the same in every row of a (k, d) sum. An update is clipped as one vector.
    """

    def __init__(self, plan: Plan, size: int, draws: int = 1, shared: int = 0) -> None:
        self.plan = plan
        self.size = size
        self.draws = draws
        self.shared = shared

    @abstractmethod
    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add one client's contribution: slot in the cohort, chosen label, redrawn label, update."""

    @property
    def partial(self) -> Callable[[], Summed] | None:
        """Creates an empty container in which another process sums contributions; None: each must be added here."""
        return None

    def _clipped(self, update: npt.ArrayLike) -> FloatArray:
        rows = np.broadcast_to(np.asarray(update), (self.draws, self.size))
        return clip_to_unit(rows, self.plan.clip_norm)


class Summed(Contributions):
    """Sums on arrival: memory does not grow with the cohort.

    Attributes:
        sums: (draws, k, d) of clipped updates, by redrawn label; the shared block is in row 0 only.
        counts: (draws, k) numbers of clients by chosen label.
        below: (draws,) sum over clients of 1/2 if the update is shorter than the plan's ``norm_threshold``, else -1/2.
    """

    def __init__(self, plan: Plan, size: int, draws: int = 1, shared: int = 0) -> None:
        super().__init__(plan, size, draws, shared)
        self.sums = np.zeros((draws, plan.num_clusters, size))
        self.counts = np.zeros((draws, plan.num_clusters))
        self.below = np.zeros(draws)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Add to both sums; ``slot`` is ignored."""
        every, clipped = np.arange(self.draws), self._clipped(update)
        self.sums[:, 0, : self.shared] += clipped[:, : self.shared]
        self.sums[every, redrawn_label, self.shared :] += clipped[:, self.shared :]
        self.counts[every, label] += 1
        if self.plan.clip_share:
            self.below += self._short(np.broadcast_to(np.asarray(update), (self.draws, self.size)))

    def _short(self, updates: npt.NDArray[Any]) -> FloatArray:
        """(n,) 1/2 for updates, before clipping, that are shorter than the threshold, else -1/2."""
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are not shorter
            norms = np.linalg.norm(updates.astype(np.float64), axis=1)
        return np.where(norms < self.plan.norm_threshold, 0.5, -0.5)

    def add_rows(self, labels: IntArray, redrawn_labels: IntArray, updates: npt.NDArray[np.float32]) -> None:
        """Add the contributions of n clients in one draw.

        Args:
            labels: (n,) chosen labels.
            redrawn_labels: (n,) redrawn labels.
            updates: (n, d).
        """
        sums, many = self.sums[0], max(1, _BLOCK // max(self.size, 1))
        for begin in range(0, len(updates), many):
            clipped = clip_to_unit(updates[begin : begin + many], self.plan.clip_norm)
            for label, row in zip(redrawn_labels[begin : begin + many], clipped, strict=True):
                sums[0, : self.shared] += row[: self.shared]
                sums[label, self.shared :] += row[self.shared :]
            if self.plan.clip_share:
                self.below[0] += self._short(updates[begin : begin + many]).sum()
        self.counts[0] += np.bincount(labels, minlength=self.plan.num_clusters)

    @property
    def partial(self) -> Callable[[], Summed]:
        """Creates an empty container, to be merged into this one."""
        return functools.partial(Summed, self.plan, self.size, self.draws, self.shared)

    def merge(self, partial: Summed) -> None:
        """Add sums and counts of other clients."""
        self.sums += partial.sums
        self.counts += partial.counts
        self.below += partial.below


class Collected(Contributions):
    """Updates of single clients, if the server may read them: they are already private, or the run has no privacy.

    Args:
        plan: plan of the run.
        size: d.
        cohort: (m,) client of every slot.
        weights: (m,) public weight of every slot.
    """

    def __init__(self, plan: Plan, size: int, cohort: IntArray, weights: FloatArray) -> None:
        super().__init__(plan, size)
        self._cohort, self._weights = cohort, weights
        self._labels: dict[int, tuple[int, int]] = {}
        self._updates = _rows(len(cohort), size)

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Store the update unchanged."""
        self._labels[slot], self._updates[slot] = (int(label), int(redrawn_label)), update

    def released(self, permit: Permit) -> ReleasedUpdates:
        """All of them, by client."""
        slots = sorted(self._labels)
        for place, slot in enumerate(slots):  # in place: the array may be large
            self._updates[place] = self._updates[slot]
        labels = np.array([self._labels[slot] for slot in slots], np.int64).reshape(-1, 2)
        return ReleasedUpdates(
            charge=permit.charge,
            epsilon=permit.epsilon,
            clients=self._cohort[slots],
            labels=labels[:, 0],
            assigned=labels[:, 1],
            weights=self._weights[slots],
            updates=self._updates[: len(slots)],
        )


class Gathered(Contributions):
    """Points of clients, any number per client, if the server may read them; see :class:`Collected`.

    Args:
        plan: plan of the run.
        cohort: (m,) client of every slot.
    """

    def __init__(self, plan: Plan, cohort: IntArray) -> None:
        super().__init__(plan, 0)
        self._cohort = cohort
        self._points: dict[int, npt.NDArray[np.float32]] = {}
        self._bytes = 0

    def add(self, slot: int, label: Any, redrawn_label: Any, update: npt.ArrayLike) -> None:
        """Store one client's (n, *shape) points, in an unnamed file if memory use would be large."""
        points = np.asarray(update, np.float32)
        self._bytes += points.nbytes
        if self._bytes > _SPOOL:
            file = _in_a_file(len(points), points[0].size)
            file[:] = points.reshape(len(points), -1)
            points = file.reshape(points.shape)
        self._points[int(self._cohort[slot])] = points

    def released(self, permit: Permit) -> ReleasedPoints:
        """All of them, by client."""
        points = dict(sorted(self._points.items()))
        return ReleasedPoints(charge=permit.charge, epsilon=permit.epsilon, points=points)


class SingleContributions(Protocol[R_co]):
    """Contributions that are released one by one."""

    def released(self, permit: Permit) -> R_co:
        """All of them, by client."""


def _rows(count: int, size: int) -> npt.NDArray[np.float32]:
    """(count, size) zeros; in an unnamed file if memory use would be large."""
    return np.zeros((count, size), np.float32) if 4 * count * size <= _SPOOL else _in_a_file(count, size)


def _in_a_file(count: int, size: int) -> npt.NDArray[np.float32]:
    """(count, size) zeros in an unnamed file."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=(count, size))


@dataclass(frozen=True)
class MechanismOutput:
    """Output of one or more draws of a mechanism; the leading axis is ``draws``.

    ``scores`` and ``assigned`` are for the audit and never leave the server.

    Attributes:
        sums: (draws, k, d), noisy.
        histogram: (draws, k), noisy; None if sizes are not released.
        divisors: (draws, k) D_j of the update.
        below: (draws,) noisy sum of 1/2 or -1/2 per client, by whether its update is shorter than the plan's
            ``norm_threshold``; None if not released.
        scores: (draws, m, k) noisy identifiers by slot, if the mechanism has them.
        assigned: (draws, m) cluster of each slot's update, if the mechanism has slots.
    """

    sums: FloatArray
    histogram: FloatArray | None
    divisors: FloatArray
    below: FloatArray | None = None
    scores: FloatArray | None = None
    assigned: IntArray | None = None


@dataclass(frozen=True, kw_only=True)
class Released:
    """The release of one round, which is charged and may be used freely; each kind has a subclass.

    Attributes:
        charge: number of its charge in the ledger.
        epsilon: cost of all charges up to this release.
        below: noisy share of the updates, or at record level of the gradients, that are shorter than the plan's
            ``norm_threshold``; None if not released.
    """

    charge: int
    epsilon: float
    below: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReleasedSums(Released):
    """Sums of the updates of each cluster.

    Attributes:
        sums: (k, d) float64, noisy sums of clipped updates per cluster.
        histogram: (k,) float64, noisy numbers of clients that chose each cluster; None if not released.
        divisors: (k,) float64, D_j of the update, from public constants and released values.
        cohort: divisor of coordinates shared by all clusters: qM, or the sum of released sizes.
    """

    sums: FloatArray
    histogram: FloatArray | None
    divisors: FloatArray
    cohort: float


@dataclass(frozen=True, kw_only=True)
class ReleasedUpdates(Released):
    """The updates of single clients.

    Attributes:
        clients: (n,) ids of the clients.
        labels: (n,) chosen or assigned clusters.
        assigned: (n,) clusters whose models the updates change; they differ from ``labels`` after redrawing.
        weights: (n,) public weights.
        updates: (n, d) float32.
    """

    clients: IntArray
    labels: IntArray
    assigned: IntArray
    weights: FloatArray
    updates: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class ReleasedPoints(Released):
    """Points of single clients.

    Attributes:
        points: (n, *shape) float32 points by client id.
    """

    points: Mapping[int, npt.NDArray[np.float32]]


class PlanNumbers(TypedDict, total=False):
    """Arguments of :meth:`Plan.calibrated`; see the attributes of :class:`Plan` and of its subclasses."""

    clients: Required[int]
    num_clusters: Required[int]
    sampling_rate: Required[float]
    clip_norm: Required[float]
    identifier_share: float
    clip_share: float
    clip_factor: float
    rebalance_min: float
    divisor: str
    evaluations: int
    evaluation_noise: float
    accountant: str
    identifiers: str
    identifier_noise: float
    participation: str
    min_separation: int


class LedgerHeader(TypedDict, total=False):
    """Entries of a ledger's first line beside the plan; see :func:`~coterie.privacy.certificate`."""

    seed: int | None
    diagnostics: Sequence[str]
    public: Mapping[str, Any]
    tuned: Mapping[str, Any]
    unfounded: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """All privacy parameters of a run, which are fixed before its first round and public.

    Use :meth:`calibrated` to calibrate the noise; the constructor takes a noise multiplier.

    Attributes:
        clients: M, the configured number of clients, never a number of replies.
        num_clusters: k.
        sampling_rate: q, the sampling rate of clients in a round.
        rounds: T.
        clip_norm: C, L2 bound of one client's update.
        epsilon: the budget; inf without privacy.
        delta: of the guarantee.
        noise_multiplier: sigma_eff of a round; 0 without privacy.
        identifier_share: share of 1 / sigma_eff^2 for labels or their histogram; 0: neither is released.
        clip_share: share of 1 / sigma_eff^2 for the number of updates shorter than a threshold, which an adaptive
            clipping norm follows; 0: it is not released, and C is fixed.
        clip_factor: C over that threshold, in (0, 1].
        rebalance_min: B, minimum size of a cluster in a round (RR-Cluster); 0: no rebalancing.
        divisor: D_j of the update: "fixed" (qM/k), or "released" (from released sizes, at least max(B, 1)).
        evaluations: number of planned private evaluations.
        evaluation_noise: standard deviation of the noise on the mean accuracy of a private evaluation.
        accountant: name of the accountant of the budget; a key of :data:`~coterie.privacy.accountants.ACCOUNTANTS`.
    """

    clients: int
    num_clusters: int
    sampling_rate: float
    rounds: int
    clip_norm: float
    epsilon: float
    delta: float
    noise_multiplier: float
    identifier_share: float = 0.0
    clip_share: float = 0.0
    clip_factor: float = 1.0
    rebalance_min: float = 0.0
    divisor: str = "fixed"
    evaluations: int = 0
    evaluation_noise: float = 0.01
    accountant: str = "pld"

    #: Name in configurations and certificates, and a one-line description.
    mechanism: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str] = "client"
    adjacency: ClassVar[str]
    sampler: ClassVar[str]
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
    #: Reasons why runs of this mechanism are never certified; empty if they may be.
    flaws: ClassVar[tuple[str, ...]] = ()
    #: Accountants that are valid for this mechanism (for `paper`: those used in the paper).
    accountants: ClassVar[tuple[str, ...]] = ("pld", "rdp")
    #: Settings of privacy that this mechanism alone has; they are arguments of the constructor.
    options: ClassVar[tuple[str, ...]] = ()
    #: Whether the server uses noisy labels of single clients, which need a share of the privacy.
    noisy_labels: ClassVar[bool] = False
    #: Whether the clipping norm may follow a released share of norms.
    adapts_clipping: ClassVar[bool] = False
    #: Default share of identifiers.
    default_identifier_share: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(f"sampling rate must lie in (0, 1], not {self.sampling_rate}")
        if self.private or self.clip_norm != math.inf:
            check_clip_norm(self.clip_norm)
        if not 0 <= self.noise_multiplier <= MAX_NOISE:
            raise PrivacyError(f"noise multiplier must lie in [0, {MAX_NOISE:g}], not {self.noise_multiplier}")
        if not 0 <= self.identifier_share < 1:
            raise PrivacyError(f"identifier share must lie in [0, 1), not {self.identifier_share}")
        if not 0 <= self.clip_share < 1 - self.identifier_share:
            raise PrivacyError(
                f"clip share must be at least 0 and below 1 - identifier share = {1 - self.identifier_share:g}, not "
                f"{self.clip_share}"
            )
        if not 0 < self.clip_factor <= 1:
            raise PrivacyError(f"clip-factor must lie in (0, 1], not {self.clip_factor}")
        if self.clip_share and not self.adapts_clipping:
            raise PrivacyError(f"mechanism {self.mechanism} does not support an adaptive clipping norm; set clip-norm")
        for name in ("clients", "num_clusters", "rounds"):
            if not getattr(self, name) >= 1:
                raise PrivacyError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        if self.num_clusters > self.clients:
            raise PrivacyError(
                f"num clusters must be at most the number of clients, {self.clients}, not {self.num_clusters}"
            )
        check_delta(self.delta)
        if self.divisor not in DIVISORS:
            raise PrivacyError(f"divisor must be {' or '.join(DIVISORS)}, not {self.divisor!r}")
        if not 0 <= self.rebalance_min <= self.expected_members:
            raise PrivacyError(
                f"rebalance-min must be at most qM/k = {self.expected_members:g} (sampling-rate x clients / "
                f"clusters), not {self.rebalance_min:g}"
            )
        if not self.evaluation_noise > 0:
            raise PrivacyError(f"evaluation noise must be positive, not {self.evaluation_noise}")
        if self.accountant not in self.accountants:
            known = ", ".join(self.accountants)
            raise PrivacyError(
                f"the accountant of mechanism {self.mechanism} must be one of {known}, not {self.accountant!r}"
            )

    @classmethod
    def calibrated(cls, *, rounds: int, epsilon: float, delta: float, **numbers: Unpack[PlanNumbers]) -> Self:
        """Return the plan with the smallest noise whose rounds and evaluations cost at most (epsilon, delta).

        Args:
            rounds: T.
            epsilon: the budget.
            delta: of the guarantee.
            numbers: further attributes of the class.

        Raises:
            PrivacyError: a parameter is invalid, or no noise suffices.
        """
        defaults = {"identifier_share": cls.default_identifier_share, "accountant": cls.accountants[0]}
        given: dict[str, Any] = {**defaults, **numbers}
        sketch = cls(rounds=rounds, epsilon=epsilon, delta=delta, noise_multiplier=1.0, **given)
        return sketch.recalibrated(sketch.noise_for(rounds, sketch._evaluations(sketch.evaluations)))

    def terms(self) -> dict[str, Any]:
        """Return all parameters, JSON-ready (None stands for infinity)."""
        numbers = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        return {"mechanism": self.mechanism, **numbers}

    def ledger(self, path: str | Path | None = None, **about: Unpack[LedgerHeader]) -> Ledger:
        """Create a ledger for this plan, in memory or in ``path``; its header contains the plan and ``about``."""
        return Ledger(self.delta, self.epsilon, path, self.accountant, {"plan": self.terms(), **about})

    def with_clip_norm(self, clip_norm: float) -> Self:
        """Return this plan with another clipping norm, which does not affect epsilon."""
        return replace(self, clip_norm=clip_norm)

    # ---- the numbers of a round ---------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether this plan gives a guarantee."""
        return self.unit != "none"

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
    def noise_multiplier_updates(self) -> float:
        """sigma_theta: noise standard deviation of the sums / their sensitivity."""
        return self.noise_multiplier / math.sqrt(1 - self.identifier_share - self.clip_share)

    @property
    def noise_multiplier_counts(self) -> float | None:
        """Noise standard deviation of the histogram or the one-hot identifiers; None if neither is released."""
        if not self.private:
            return 0.0
        return self.noise_multiplier / math.sqrt(self.identifier_share) if self.identifier_share else None

    @property
    def norm_threshold(self) -> float:
        """C / clip_factor, the norm with which those of updates are compared."""
        return self.clip_norm / self.clip_factor

    @property
    def noise_of_norms(self) -> float | None:
        """Noise standard deviation of the sum of 1/2 or -1/2 per client; None if it is not released."""
        return 0.5 * self.noise_multiplier / math.sqrt(self.clip_share) if self.clip_share else None

    @property
    def model_noise(self) -> float:
        """Root mean square over rounds of the noise of a model, in units of C times the server's step size / D_j."""
        return self.noise_multiplier_updates * math.sqrt((self.rounds + 1) / 2)

    def event(self) -> Event:
        """The event of one round."""
        return Event(self.rate, self.noise_multiplier, self.sampler)

    def round_event(self, number: int) -> Event:
        """The event of round ``number``, from 1, with its slot if only some clients may contribute."""
        return self.event()

    def evaluation_event(self) -> Event:
        """The event of one private evaluation: every client adds its accuracy - 1/2 to a sum."""
        sensitivity = 0.5 if self.sampler == "poisson" else 1.0  # absent: 0; replaced: from -1/2 to 1/2
        return Event(1.0, self.evaluation_noise * self.clients / sensitivity, self.sampler)

    def releases(self) -> Collection[Event | None]:
        """Events for which :meth:`release` accepts a permit; None: no charge."""
        return {self.event()}

    def charges(self, request: PricedRequest, cohort: IntArray | None = None) -> Counter[Event]:
        """Events of releasing the replies to ``request``; the permit of the last one allows the release.

        Args:
            request: the request.
            cohort: (m,) its recipients. The events may depend on public groups of clients, but not on secret sampling.
        """
        return Counter({self.round_event(request.round): 1})

    def _evaluations(self, count: int) -> dict[Event, int]:
        return {self.evaluation_event(): count} if count else {}

    def planned(self) -> Counter[Event]:
        """All events of the run."""
        return Counter({self.event(): self.rounds}) + Counter(self._evaluations(self.evaluations))

    def noise_for(self, rounds: int, besides: Mapping[Event, int] | None = None) -> float:
        """Return the noise multiplier at which ``rounds`` rounds and the events ``besides`` fit the budget."""
        return calibrate(
            self.epsilon,
            self.delta,
            self.rate,
            rounds,
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
        return Gathered(self, cohort)

    def max_update_norm(self, client: int, size: int, lr: float, first: bool) -> float:
        """L2 norm above which a client's update is rejected; inf if the server clips updates.

        Args:
            client: its id.
            size: d.
            lr: step size of the client.
            first: whether it uses the batches of round 1.
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
        if self.noise_of_norms is not None:
            below = contributions.below + gaussian(noise, self.noise_of_norms, contributions.below.shape)
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
        """
        self._spend(permit, self.releases())
        noise = streams.stream("noise", permit.round, attempt)
        coins = streams.stream("rebalancing", permit.round, attempt)
        matrix = np.eye(self.num_clusters) if redraw is None else redraw
        output = self.perturb(contributions, noise, coins, matrix, state)
        sums, divisors = output.sums[0], output.divisors[0]
        histogram = None if output.histogram is None else output.histogram[0]
        sums[:, : contributions.shared] = sums[0, : contributions.shared]  # summed and noised once, in row 0
        cohort = self.rate * self.clients
        if self.divisor == "released" and histogram is not None:
            cohort = max(float(histogram.sum()), 1.0)
        return ReleasedSums(
            charge=permit.charge,
            epsilon=permit.epsilon,
            sums=sums,
            histogram=histogram,
            divisors=divisors,
            cohort=cohort,
            below=None if output.below is None else 0.5 + float(output.below[0]) / (self.rate * self.clients),
        )

    def release_each(self, permit: Permit, contributions: SingleContributions[R]) -> R:
        """Release the contributions of single clients, if the server may read them; see :meth:`release`."""
        self._spend(permit, self.releases())
        return contributions.released(permit)

    def release_evaluation(self, permit: Permit, accuracies: Sequence[float], streams: Streams, attempt: int) -> float:
        """Release the noisy mean accuracy of all M clients; missing clients count as one half.

        Args:
            permit: unused permit for :meth:`evaluation_event`.
            accuracies: accuracies of the clients that replied; each is clipped to [0, 1].
            streams: the server's randomness.
            attempt: number of this attempt in the run.

        Raises:
            LedgerError: the permit was already used, or is for another event.
        """
        self._spend(permit, {self.evaluation_event()})
        noise = streams.stream("evaluation", permit.round, attempt)
        values = np.nan_to_num(np.asarray(accuracies, dtype=np.float64), nan=0.5)
        total = float(np.sum(np.clip(values, 0.0, 1.0) - 0.5))
        total += float(gaussian(noise, self.evaluation_noise * self.clients, ()))
        return min(1.0, max(0.0, 0.5 + total / self.clients))

    def _spend(self, permit: Permit, events: Collection[Event | None]) -> None:
        if permit.event not in events:
            raise LedgerError(f"charge {permit.charge} is for {permit.event}, not for {' or '.join(map(str, events))}")
        permit.use()

    # ---- for the certificate ------------------------------------------------------------------------------

    @property
    def unprotected(self) -> str:
        """What the guarantee does not hide, as stated in the certificate."""
        return "who takes part: the amplification by sampling holds against those who cannot see it"

    def reasons(self) -> list[str]:
        """Reasons why runs of this plan are never certified."""
        return list(self.flaws)


def certifies(accountant: str) -> bool:
    """Whether certificates may state the epsilon of this accountant."""
    return accountant in ("pld", "rdp") and accountant in ACCOUNTANTS
