"""The base class of every clustered strategy: cohort, transport, validation, release, checkpoints.

A method (one file per paper) defines a round; the order of the steps around it is fixed here:
cohort -> send -> check -> clip and sum on arrival -> charge -> release -> update -> checkpoint -> evaluate.
"""

from __future__ import annotations

import hashlib
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from coterie.logs import printable
from coterie.messages import (
    CONFIG,
    DIAGNOSTICS,
    MODELS,
    Layout,
    Points,
    ReplyError,
    check_sender,
    diagnostics,
    pack_models,
    payload,
    read_points,
    read_reply,
    unpack_models,
)
from coterie.privacy import (
    BudgetError,
    Collected,
    Contributions,
    Event,
    Gathered,
    Ledger,
    Permit,
    Plan,
    Released,
    ReleasedPoints,
    ReleasedSums,
    ReleasedUpdates,
    Streams,
    epsilon,
    redraw_matrix,
)
from coterie.settings import Settings
from coterie.strategies.aggregation import Aggregator
from coterie.strategies.averaging import Averaging
from coterie.strategies.evaluation import mean_of_clients
from coterie.strategies.reseeding import Reseeding
from coterie.strategies.roster import Roster
from coterie.strategies.settings import REBALANCE_TRAIN
from coterie.wire import EvaluateRequest, Request, Summary, TrainRequest, digest

Models: TypeAlias = npt.NDArray[np.float32]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Parameters: TypeAlias = dict[str, npt.NDArray[np.float32]]
R = TypeVar("R")

# Attempts to receive a reply from silent clients, where too few replies come.
_ATTEMPTS = 3
# Flower's transport errors: the node or its process is gone, or the time is over.
_UNHEARD = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
# Largest number of distinct reasons for dropped replies that are counted.
_MOST_REASONS, _OTHER_REASONS = 100, "other reasons"
# Weight of the latest histogram in the running mean for rebalancing and re-seeding.
_MEMORY = 0.25


class StrategyError(ValueError):
    """A strategy cannot run as configured."""


@dataclass(frozen=True)
class Phase:
    """One exchange with a cohort, released together under one charge.

    Attributes:
        request: the request; the strategy fills in what all requests of a round have in common.
        models: (k, d) models for the clients.
        to: index of the one model that each client receives; other clients get no request. None: each receives all.
        collect: whether the method needs single replies, which few mechanisms allow.
        clients: the clients, instead of a random cohort; needs ``collect``.
        late: whether they joined after round 1: at record level they are charged in their own ledgers.
        answer: layout of the reply, or its points, which needs ``collect``; None: an update of a model.
    """

    request: Request
    models: Models
    to: Mapping[int, int] | None = None
    collect: bool = False
    clients: Collection[int] | None = None
    late: bool = False
    answer: Layout | Points | None = None

    def __post_init__(self) -> None:
        if self.clients is not None and not self.collect:
            raise StrategyError("a phase for chosen clients must collect: sums are of cohorts that chance has chosen")
        if isinstance(self.answer, Points) and not self.collect:
            raise StrategyError("a phase that asks for points must collect: points of two clients are not added up")


#: A round of a method: yields phases, receives releases, returns the new models.
Round: TypeAlias = Generator[Phase, Released, Models]


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes; released values only.

    Attributes:
        round: the last completed round.
        models: (k, d).
        layout: of one model.
        histogram: (k,) running mean of released histograms; None before the first.
        mean: (k, d) mean of the last rounds' models; None while there is none.
        kept: state of the method (:attr:`ClusteredStrategy.kept`).
    """

    round: int
    models: Models
    layout: Layout
    histogram: FloatArray | None
    mean: Models | None = None
    kept: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Recorder(Protocol):
    """Stores the output of a run, such as the server's run folder."""

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        """Called after the release of a round was applied; ``line`` holds its metrics so far."""

    def round_finished(self, line: Mapping[str, Any]) -> None:
        """Called at the end of a round with its metrics."""

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store the evidence from which clusters were found; released values only."""

    def kept(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays last stored under this name in this run, also before a crash; None if there are none."""

    def working_on(self, what: str) -> None:
        """Report progress within a long round."""


class _Nobody:
    """Stores nothing."""

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        pass

    def round_finished(self, line: Mapping[str, Any]) -> None:
        pass

    def keep(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        pass

    def kept(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        return None

    def working_on(self, what: str) -> None:
        pass


class ClusteredStrategy(Strategy):
    """A Flower ``Strategy`` that trains one model per cluster under a privacy plan.

    Args:
        plan: participation, per-round release and privacy cost; also M, k and T.
        settings: of the method, a :attr:`settings_class`; None: its defaults.
        clusters: number of clusters; 0: the method finds it; None: that of the plan.
        ledger: records charges; None keeps them in memory.
        streams: randomness; None is secret randomness.
        server_lr: eta, step size of the server.
        reseeding: when to re-seed models without clients; None: never.
        averaging: which released models to average; None returns the last ones.
        aggregator: how the updates of a cluster are aggregated; None: the mean. Others need a plan without privacy or
            at record level.
        rebalance_train: whether a client that rebalancing moves trains the model of its "own" cluster or of the
            "assigned" one; the latter needs clients that redraw their labels.
        evaluate: "diagnostic", exact and outside every guarantee, or "private", noisy and charged: the plan must
            include as many ``evaluations`` as :meth:`evaluations` returns.
        evaluate_every: number of rounds between evaluations; the last round is evaluated, too. 0: never.
        recorder: stores checkpoints and metrics.
        resume_from: a checkpoint of the same run.
        evaluate_metrics_aggr_fn: evaluation replies to one MetricRecord; default: mean over clients of every scalar.
            A :class:`~coterie.wire.Summary` receives valid replies only. If it raises, this evaluation has no metrics.
        registration_timeout: seconds to wait for all M clients before round 1, and later for the clients that a round
            requires.
        min_clients: number of registered clients that a round requires. At client level it applies to round 1 only:
            later the end of a run would reveal how many clients are present.
        min_replies: share of the requested replies that a round requires; silent clients receive the request again, a
            few times. Not at client level, where every round is charged and released regardless of replies.

    Raises:
        StrategyError: the method does not support the plan's unit, rebalancing, or number of clusters.
    """

    #: Name in configurations, title, and source of the method.
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    #: Units of privacy that the method supports.
    units: ClassVar[tuple[str, ...]] = ("client", "none")
    #: Whether a client's label is a function of its own data and released values alone ("row-wise").
    row_wise: ClassVar[bool] = True
    #: Whether the method has cluster labels to rebalance or models to re-seed.
    clustered: ClassVar[bool] = True
    #: Whether a client knows its label before it trains.
    knows_label: ClassVar[bool] = True
    #: Whether models move by :meth:`step` alone, so that an aggregator other than the mean covers every update.
    robust: ClassVar[bool] = False
    #: Whether clients keep state between rounds on which their updates depend.
    memory: ClassVar[bool] = False
    #: Settings of the method alone.
    settings_class: ClassVar[type[Settings]] = Settings
    #: Arguments of the constructor that follow from data and device instead of settings.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Whether all models start equal.
    equal_start: ClassVar[bool] = False
    #: Whether round 1 has full batches: all records of a client.
    full_first_batch: ClassVar[bool] = False
    #: Whether the method finds the number of clusters if it is 0.
    finds_clusters: ClassVar[bool] = False
    #: Whether the number of clusters grows in a run; ``clusters`` is then a bound, by default 0: no bound.
    grows: ClassVar[bool] = False
    #: Whether the method clusters records instead of clients: one model, with which clients label their records.
    labels_records: ClassVar[bool] = False
    #: Defaults of the method for settings that all methods share, by key, where they differ from the settings' own.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Published privacy claims that give no guarantee, and why; for certificates without privacy.
    unfounded: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        plan: Plan,
        settings: Settings | None = None,
        *,
        clusters: int | None = None,
        ledger: Ledger | None = None,
        streams: Streams | None = None,
        server_lr: float = 1.0,
        reseeding: Reseeding | None = None,
        averaging: Averaging | None = None,
        aggregator: Aggregator | None = None,
        rebalance_train: str = "own",
        evaluate: str = "diagnostic",
        evaluate_every: int = 1,
        recorder: Recorder | None = None,
        resume_from: Checkpoint | None = None,
        evaluate_metrics_aggr_fn: Callable[[Sequence[Any]], MetricRecord] = mean_of_clients,
        registration_timeout: float = 60.0,
        min_clients: int = 0,
        min_replies: float = 0.0,
    ) -> None:
        self.settings = settings or self.settings_class()
        if type(self.settings) is not self.settings_class:
            raise StrategyError(f"{self.name} has {self.settings_class.__name__}, not {type(settings).__name__}")
        if clusters is not None and clusters < 0:
            raise StrategyError(f"clusters must be at least 0, not {clusters}")
        self.clusters = plan.num_clusters if clusters is None else clusters
        self.aggregator = aggregator or Aggregator()
        self.check(plan, reseeding=reseeding, rebalance_train=rebalance_train, aggregator=self.aggregator)
        if averaging and not 0 <= averaging.last <= 1 - (reseeding.until if reseeding else 0.0):
            raise StrategyError(
                f"average-last = {averaging.last:g} must be at least 0, and must begin after the last re-seeding: "
                f"at most {1 - (reseeding.until if reseeding else 0.0):g}"
            )
        if evaluate not in ("diagnostic", "private"):
            raise StrategyError(f"evaluate must be diagnostic or private, not {evaluate!r}")
        if evaluate == "private" and plan.evaluations < self.evaluations(plan.rounds, evaluate_every):
            raise StrategyError(f"the plan pays for {plan.evaluations} private evaluations, fewer than there will be")
        self.plan = plan
        self.ledger = ledger or plan.ledger()
        self.streams = streams or Streams()
        self.server_lr = server_lr
        self.reseeding = reseeding
        self.averaging = averaging or Averaging(0.0)
        self.rebalance_train = rebalance_train
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        self.recorder: Recorder = recorder or _Nobody()
        self.resume_from = resume_from
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        self.min_clients = min_clients
        self.min_replies = min_replies
        self.histogram: FloatArray | None = resume_from.histogram if resume_from else None
        #: State of the method between rounds, as arrays; part of checkpoints.
        self.kept: dict[str, npt.NDArray[Any]] = dict(resume_from.kept) if resume_from else {}
        #: What the method reports of this round, JSON-ready; from released values.
        self.notes: dict[str, Any] = {}
        #: Why the run ended before its last round; None otherwise.
        self.stopped: str | None = None
        self.asked = 0
        self.accepted = 0
        #: Numbers of dropped replies by reason: printable text, a bounded number of reasons.
        self.dropped: Counter[str] = Counter()
        #: Messages and bytes of arrays in this round, both ways, without introductions.
        self.traffic: Counter[str] = Counter()
        self._roster = Roster(plan.clients, registration_timeout)
        self._timeout: float | None = None
        self._round: Round | None = None
        self._phase: Phase | None = None
        self._layout: Layout | None = None
        self._asked: dict[int, Message] = {}
        self._questions: dict[str, int] = {}
        self._config: dict[str, Any] = {}
        self._request: Request = EvaluateRequest()
        self._cohort: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._slots: dict[int, int] = {}
        self._number = 1
        self._permit: Permit | None = None  # of a charge before the request was sent

    @classmethod
    def check(
        cls,
        plan: Plan,
        *,
        reseeding: Reseeding | None = None,
        rebalance_train: str = "own",
        aggregator: Aggregator | None = None,
    ) -> None:
        """Check that the method supports a plan and options.

        Raises:
            StrategyError: it does not.
        """
        units = [unit for unit in cls.units if cls.row_wise or unit != "client"]
        if plan.unit not in units:
            why = (
                "" if cls.row_wise else ": it places a client by looking at others, which no client-level proof covers"
            )
            raise StrategyError(f"{cls.name} supports privacy-unit {' or '.join(units)}, not {plan.unit!r}{why}")
        if cls.memory and not plan.memory:
            raise StrategyError(
                f"{cls.name} keeps something at the clients between rounds, which the proof of mechanism "
                f"{plan.mechanism} does not cover; use mechanism joint"
            )
        if rebalance_train not in REBALANCE_TRAIN:
            raise StrategyError(f"rebalance-train must be {' or '.join(REBALANCE_TRAIN)}, not {rebalance_train!r}")
        if rebalance_train == "assigned" and not (plan.redraws and cls.knows_label):
            raise StrategyError(
                "rebalance-train = 'assigned' needs clients that know their new label before they train: mechanism "
                "joint (or no privacy), and a method that chooses before it trains"
            )
        if not cls.clustered and plan.num_clusters != 1:
            raise StrategyError(f"{cls.name} trains one model; it was asked for {plan.num_clusters} clusters")
        if plan.rebalance_min and "client" not in cls.units:
            raise StrategyError(f"{cls.name} has nothing to rebalance: set rebalance-min to 0")
        if not cls.clustered and plan.rebalance_min:
            raise StrategyError(f"{cls.name} has no clusters to rebalance; set rebalance-min to 0")
        if reseeding and reseeding.every and not plan.identifier_share and plan.private:
            raise StrategyError("re-seeding reads cluster sizes: it needs a plan with identifier_share above 0")
        if aggregator and aggregator.robust:
            cls._check_robust(plan, aggregator.name)

    @classmethod
    def _check_robust(cls, plan: Plan, name: str) -> None:
        if plan.unit == "client":
            raise StrategyError(
                f"aggregator = {name} needs privacy-unit record or none: client-level noise covers one client's part "
                "of a sum, which clipping bounds by C; one client can move a median or Krum's choice further than "
                "C / n, and the server keeps no single update; use mean"
            )
        if not cls.robust:
            raise StrategyError(
                f"{cls.name} supports aggregator mean, not {name}: it does not move its models by one step of each "
                "cluster's updates alone"
            )
        if plan.unit == "none" and plan.divisor != "released":
            raise StrategyError(f"aggregator = {name} has no divisor: set divisor to auto, not {plan.divisor}")

    @staticmethod
    def evaluations(rounds: int, every: int) -> int:
        """Number of evaluations in ``rounds`` rounds: one every ``every`` rounds, and one after the last."""
        return math.ceil(rounds / every) if every else 0

    @classmethod
    def default_settings(cls, unit: str) -> dict[str, Any]:
        """Defaults of the method for settings that all methods share, by key."""
        found: dict[str, Any] = {}
        if not cls.clustered:
            found |= {"clusters": 1, "reseed-every": 0}
        if "client" not in cls.units or unit == "record":  # all clients take part, and no sizes are released
            found |= {"sampling-rate": 1.0, "reseed-every": 0}
        return found | ({"clusters": 0} if cls.grows else {}) | dict(cls.defaults)

    @classmethod
    def choices(cls, rounds: int) -> int:
        """Largest number of choices of a cluster by loss that a client at record level makes."""
        return 0

    # ---- interface of a method ---------------------------------------------------------------------------

    @abstractmethod
    def round(self, number: int, models: Models) -> Round:
        """One round: yield phases, receive each phase's :class:`Released`, return the (k, d) new models."""

    def arrange(self, draw: Callable[..., Parameters]) -> Parameters:
        """Initial parameters, from calls of ``draw``, which initialises a new network each.

        ``draw(gan=NAME, categories=k)`` initialises a GAN instead of the configured network.
        """
        return draw()

    def training(self) -> TrainRequest:
        """The request for training."""
        return TrainRequest()

    def evaluation(self) -> Request:
        """The request for evaluation."""
        return EvaluateRequest()

    @classmethod
    def compares(cls, clients: int, settings: Settings) -> dict[str, int]:
        """``compared`` and ``models_per_message`` of :class:`~coterie.privacy.RecordPlan`; empty: neither is used."""
        return {}

    def placed(self, number: int) -> Mapping[int, int] | None:
        """The cluster of every client after round ``number`` if the server assigns it; None if clients choose.

        Clients without a cluster are not evaluated.
        """
        return None

    @property
    def finished(self) -> bool:
        """Whether the method has converged: the run ends before its last planned round."""
        return False

    def initial_models(self, models: Models) -> Models:
        """(k, d) initial models, from one model or from k."""
        if len(models) not in (1, self.plan.num_clusters):
            raise StrategyError(f"{len(models)} initial models for {self.plan.num_clusters} clusters")
        if self.equal_start:
            models = models[:1]
        return np.repeat(models, self.plan.num_clusters, axis=0) if len(models) == 1 else models

    # ---- tools for methods --------------------------------------------------------------------------------

    def sums(
        self, request: Request, models: Models, to: Mapping[int, int] | None = None
    ) -> Generator[Phase, Released, ReleasedSums]:
        """Send a request to a random cohort; receive the sum of each cluster's updates.

        Args:
            request: the request.
            models: (k, d) models for the clients.
            to: index of the one model that each client receives; other clients get no request. None: each receives all.
        """
        released = yield Phase(request, models, to)
        assert isinstance(released, ReleasedSums)
        return released

    def updates(
        self,
        request: Request,
        models: Models,
        to: Mapping[int, int] | None = None,
        *,
        clients: Collection[int] | None = None,
        late: bool = False,
        answer: Layout | None = None,
    ) -> Generator[Phase, Released, ReleasedUpdates]:
        """Send a request to clients; receive their single updates, which few mechanisms allow.

        Args:
            request: the request.
            models: (k, d) models for the clients.
            to: see :meth:`sums`.
            clients: the clients; None: a random cohort.
            late: whether they joined after round 1: at record level they are charged in their own ledgers.
            answer: layout of the replies; None: an update of a model.
        """
        released = yield Phase(request, models, to, True, clients, late, answer)
        assert isinstance(released, ReleasedUpdates)
        return released

    def points(
        self, request: Request, models: Models, answer: Points, *, clients: Collection[int], late: bool = False
    ) -> Generator[Phase, Released, ReleasedPoints]:
        """Send a request to clients; receive their points, within the bounds of ``answer``. See :meth:`updates`."""
        released = yield Phase(request, models, None, True, clients, late, answer)
        assert isinstance(released, ReleasedPoints)
        return released

    def step(self, models: Models, released: ReleasedSums) -> Models:
        """theta_j + eta S_j / D_j for every cluster; shared coordinates are divided by the size of the cohort."""
        mean = released.sums / released.divisors[:, None]
        mean[:, : self.shared] = released.sums[:, : self.shared] / released.cohort
        return np.asarray(models + self.server_lr * mean, dtype=np.float32)

    @property
    def shared(self) -> int:
        """Number of leading coordinates that all clusters share."""
        return 0

    @property
    def layout(self) -> Layout:
        """Layout of one model, available after :meth:`start`; a method may replace it."""
        assert self._layout is not None
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._layout = layout

    def step_size(self, number: int) -> float:
        """Step size of the clients in round ``number``, relative to round 1."""
        return float(self._config.get("lr-decay", 1.0)) ** (number - 1)

    @property
    def present(self) -> list[int]:
        """Ids of the registered clients."""
        return sorted(self._roster.nodes)

    def _redraw(self) -> FloatArray | None:
        """(k, k) matrix by which clients redraw their labels in this round; None if they do not."""
        if not (self.plan.redraws and self.plan.rebalance_min and self.histogram is not None):
            return None
        return redraw_matrix(self.histogram, self.plan.rebalance_min)

    # ---- a run --------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds, with the signature and result of ``flwr.serverapp.strategy.Strategy.start``.

        ``num_rounds`` must not exceed the plan's rounds, which determine the noise. Clients receive the configs. If
        the ledger rejects a charge the run ends: the result holds the models so far, :attr:`stopped` the reason.

        Raises:
            StrategyError: more rounds than planned.
        """
        if num_rounds > self.plan.rounds:
            raise StrategyError(f"{num_rounds} rounds asked for, but the plan's noise is for {self.plan.rounds}")
        self.summary()
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or train_config
        result = Result()
        models, layout = unpack_models(initial_arrays)
        self._layout = layout
        models, mean, done = self.initial_models(models), None, 0
        if self.resume_from is not None:
            models, mean, done = self.resume_from.models, self.resume_from.mean, self.resume_from.round
            self._layout = layout = self.resume_from.layout
            self._resize(models)
        elif self.plan.unit == "record":  # after a crash in round 1, clients receive the same request again
            self.recorder.checkpoint(Checkpoint(0, models, layout, None, None, {}), {})
        arrays = pack_models(models, layout)
        self._recalibrate(done, num_rounds)
        self._timeout = timeout
        self._meet(grid)

        result.arrays = arrays if mean is None else pack_models(mean, layout)
        ended = done
        try:
            for current in range(done + 1, num_rounds + 1):
                if self.finished:
                    break
                started = time.perf_counter()
                asked, accepted, dropped = self.asked, self.accepted, self.dropped.copy()
                self._gather(grid, current)
                updated, metrics = None, None
                while updated is None:  # once for each phase of the method
                    messages = self.configure_train(current, arrays, train_config, grid)
                    updated, metrics = self.aggregate_train(current, self._replies(grid, current, messages))
                arrays, (models, layout) = updated, unpack_models(updated)
                self._resize(models)
                mean = self.averaging(mean, models, current, num_rounds)
                result.arrays = arrays if mean is None else pack_models(mean, layout)
                line: dict[str, Any] = {"round": current, **(metrics or {})}
                moves = line.pop("reseeded", [])
                line["reseeded"] = [moves[i : i + 2] for i in range(0, len(moves), 2)]  # pairs: from, to
                if self.notes:
                    line["notes"], self.notes = self.notes, {}
                line["seconds"] = time.perf_counter() - started
                self.recorder.checkpoint(Checkpoint(current, models, layout, self.histogram, mean, self.kept), line)
                ended = current
                if metrics is not None:
                    result.train_metrics_clientapp[current] = metrics

                last = current == num_rounds or self.finished
                due = bool(self.evaluate_every) and (current % self.evaluate_every == 0 or last)
                if due or (self.labels_records and last):
                    evaluation = self._evaluate(current, result.arrays, evaluate_config, grid, timeout)
                    if evaluation is not None:
                        result.evaluate_metrics_clientapp[current] = evaluation
                        line |= dict(evaluation)
                if evaluate_fn and (central := evaluate_fn(current, result.arrays)) is not None:
                    result.evaluate_metrics_serverapp[current] = central
                if self.plan.unit != "client":  # whose cohorts are secret
                    line |= dict(self.traffic)
                    line["clients_present"] = len(self._roster.nodes)
                    line["replies"] = {
                        "asked": self.asked - asked,
                        "accepted": self.accepted - accepted,
                        "dropped": dict(self.dropped - dropped),
                    }
                self.traffic.clear()
                line["seconds"] = time.perf_counter() - started
                self.recorder.round_finished(line)

            if ended == done and (self.evaluate_every or self.labels_records):  # killed before the last evaluation
                evaluation = self._evaluate(done, result.arrays, evaluate_config, grid, timeout)
                if evaluation is not None:
                    result.evaluate_metrics_clientapp[done] = evaluation
        except BudgetError as refused:
            self.stopped = str(refused)
            log(WARNING, "stopped by the budget: %s", refused)
        return result

    def _evaluate(
        self, current: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        messages = self.configure_evaluate(current, arrays, config, grid)
        return self.aggregate_evaluate(current, grid.send_and_receive(messages, timeout=timeout))

    def _recalibrate(self, done: int, rounds: int) -> None:
        """After a crash that wasted charges: recalibrate the noise of the remaining rounds to the budget."""
        plan, spent = self.plan, self.ledger.events
        if plan.unit == "record":  # every client has its own ledger, and drops out when its budget is spent
            return
        remaining = rounds - done
        if self.evaluate == "private" and self.evaluate_every:
            evaluations = self.evaluations(rounds, self.evaluate_every) - done // self.evaluate_every
            spent += Counter({plan.evaluation_event(): evaluations})

        def over(events: Counter[Event]) -> bool:
            return epsilon(events, plan.delta, plan.accountant) > plan.epsilon * (1 + 1e-9)

        wasted = len(self.ledger.charges) > done and remaining > 0
        if not wasted or over(plan.planned()) or not over(spent + Counter({plan.event(): remaining})):
            return
        noise = plan.noise_for(remaining, spent)
        log(
            WARNING,
            "a crash wasted charges; to stay within epsilon = %g the remaining %s round(s) have noise multiplier "
            "%.3f in place of %.3f",
            plan.epsilon,
            remaining,
            noise,
            plan.noise_multiplier,
        )
        self.plan = plan.recalibrated(noise)

    def _resize(self, models: Models) -> None:
        """Adopt the number of clusters that the method found."""
        if len(models) != self.plan.num_clusters:
            self.plan = replace(self.plan, num_clusters=len(models))
        if self.histogram is not None and len(self.histogram) != len(models):
            self.histogram = None

    def _meet(self, grid: Grid) -> None:
        """Wait until all clients have registered, or until the deadline."""
        if not self._roster.wait_for(grid, self.plan.clients):
            log(
                WARNING,
                "%s of %s clients are here; the others contribute nothing until they come",
                len(self._roster.nodes),
                self.plan.clients,
            )

    def _gather(self, grid: Grid, number: int) -> None:
        """Update the registered clients before a round.

        Raises:
            StrategyError: fewer than ``min_clients`` are registered.
        """
        enough = self._roster.wait_for(grid, self.min_clients)
        if not enough and (self.plan.unit != "client" or not self.ledger.charges):
            raise StrategyError(
                f"round {number}: {len(self._roster.nodes)} clients are here after {self._roster.wait:g} s, fewer than "
                f"min-clients = {self.min_clients}; the rounds before are kept: see to the clients and resume"
            )

    def _replies(self, grid: Grid, number: int, messages: list[Message]) -> Iterator[Message]:
        """Replies in order of arrival; silent clients receive the request again if replies are too few.

        Raises:
            StrategyError: too few replies after all attempts.
        """
        least = 0 if self.plan.unit == "client" else math.ceil(self.min_replies * len(messages) - 1e-9)
        silent = set(self._asked)
        for attempt in range(1, _ATTEMPTS + 1):
            for reply in grid.send_and_receive(messages, timeout=self._timeout):
                if least and reply.has_error() and reply.error.code in _UNHEARD:
                    continue
                silent -= {self._whose(reply)}
                yield reply
            short = least - (len(self._asked) - len(silent))
            if short <= 0:
                return
            log(WARNING, "round %s, attempt %s: no reply of clients %s", number, attempt, sorted(silent))
            if attempt < _ATTEMPTS:
                self._roster.wait_for(grid, short, among=silent)
                messages = self._again(silent)
        raise StrategyError(
            f"round {number}: clients {sorted(silent)} gave no reply in {_ATTEMPTS} attempts, and min-replies = "
            f"{self.min_replies:g}; the rounds before are kept: see to the clients and resume"
        )

    # ---- Flower's hooks -----------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the method and the plan."""
        log(INFO, "%s: %s", self.name, self.title)
        log(INFO, "\t%s", self.plan)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages of the method's next phase to a fresh cohort."""
        models, self._layout = unpack_models(arrays)
        if self._round is None:
            self._round = self.round(server_round, models)
            self._phase = next(self._round)
        assert self._phase is not None
        if not self._roster.nodes:
            self._meet(grid)
        self._config = dict(config)
        if "lr" in self._config:
            self._config["lr"] *= self.step_size(server_round)
        self._request = request = self._completed(self._phase.request, server_round)
        if self._phase.clients is None:
            self._cohort = self.plan.sample(self.streams.stream("cohort", server_round, self._attempt))
        else:
            self._cohort = np.array(sorted(self._phase.clients), np.int64)
        cohort: list[int] = self._cohort.tolist()
        self._slots = {client: slot for slot, client in enumerate(cohort)}
        self._number, self._permit = self._attempt, None
        if self.plan.unit == "record" and (question := self._question(self._phase)):
            # Charged before it is sent: clients may reply even if this server fails, and replay their replies later.
            self._permit = self._charge(server_round, self._phase, question)
        self._ask(self._addressed(self._phase.models, request, self._phase.to, cohort))
        self.asked += len(self._asked)
        return list(self._asked.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate and clip replies on arrival, then charge, release and update.

        The models are None while phases of this round remain.
        """
        if self._round is None or self._layout is None or self._phase is None:
            raise StrategyError("aggregate_train was called before configure_train")
        phase = self._phase
        contributions = self._contributions(phase)
        for client, content in self._answers(replies):
            try:
                self._take(contributions, phase, server_round, client, content)
                self.accepted += 1
            except ReplyError as error:
                self._drop(client, str(error))

        permit = self._permit or self._charge(server_round, phase)
        released = self._release(permit, contributions, phase)
        try:
            self._phase = self._round.send(released)
            return None, None
        except StopIteration as stop:
            models: Models = stop.value
        self._round = self._phase = None
        models, moves = self._remember(server_round, models, released)
        metrics = MetricRecord(
            {
                "epsilon": released.epsilon,
                "epsilon_rdp": self.ledger.spent("rdp"),
                "reseeded": [j for move in moves for j in move],
            }
        )
        if isinstance(released, ReleasedSums) and released.histogram is not None:
            metrics["histogram"] = released.histogram.tolist()
        return pack_models(models, self._layout), metrics

    def _charge(self, number: int, phase: Phase, question: str = "") -> Permit:
        """Charge the replies of a phase; a repeated request is charged once."""
        charges = self.plan.charges(self._request, late=phase.late)
        if not charges:
            return self.ledger.unpaid(number)
        if question and self.ledger.paid(number, charges, question):
            return self.ledger.again(number, next(iter(charges)))
        details = self._details("training") | ({"question": question} if question else {})
        for event, count in charges.items():
            permit = self.ledger.round(number, event, count, **details)
        return permit

    def _question(self, phase: Phase) -> str:
        """Digest of a phase if all registered clients replay replies to repeated requests; else empty."""
        if not self._roster.repeating >= self._roster.nodes.keys():
            return ""
        message = self._content(pack_models(phase.models, self.layout), self._request)
        to = None if phase.to is None else sorted(phase.to.items())
        return hashlib.sha256(f"{digest(self._request.verb, message)} {to}".encode()).hexdigest()

    def _contributions(self, phase: Phase) -> Contributions:
        """The container for the replies of a phase."""
        if isinstance(phase.answer, Points):
            return self.plan.gathered(self._cohort)
        size = (phase.answer or self.layout).size
        if phase.collect or self.aggregator.robust:
            return self.plan.collected(size, self._cohort)
        return self.plan.contributions(size, shared=self.shared)

    def _release(self, permit: Permit, contributions: Contributions, phase: Phase) -> Released:
        """The release that the method receives for a phase."""
        if not isinstance(contributions, Collected | Gathered):
            return self.plan.release(permit, contributions, self.streams, self._number, self._redraw())
        released = self.plan.release_each(permit, contributions)
        if phase.collect or not isinstance(released, ReleasedUpdates):
            return released
        counts = self.plan.unit == "none"
        return self.aggregator.aggregated(released, self.plan.num_clusters, self.shared, counts=counts)

    def _take(
        self, contributions: Contributions, phase: Phase, server_round: int, client: int, content: RecordDict
    ) -> None:
        """Validate one reply and add it.

        Raises:
            ReplyError: the reply is invalid.
        """
        slot, expected = self._slots[client], {"client_id": client, "round": server_round}
        if isinstance(phase.answer, Points):
            points = _parsed(read_points, content, expected=phase.answer, **expected)
            contributions.add(slot, 0, 0, points)
            self.took(client, points)
            return
        k, layout = self.plan.num_clusters, phase.answer or self.layout
        training = self._request if isinstance(self._request, TrainRequest) else TrainRequest()
        redraw = None if training.redraw is None else np.reshape(training.redraw, (k, k))
        placed = None if phase.to is None else phase.to[client]
        of = {"num_clusters": len(phase.models), "layout": layout, "placed": placed, "redraw": redraw}
        reply = _parsed(read_reply, content, **of, **expected)
        longest = math.inf
        if not phase.answer:
            lr = float(self._config.get("lr", math.inf))
            longest = self.plan.longest_update(client, layout.size, lr, training.first_batch)
        if longest < math.inf and (norm := float(np.linalg.norm(reply.update.astype(np.float64)))) > longest:
            raise ReplyError(f"its update has norm {norm:.4g}; expected at most {longest:.4g}")
        contributions.add(slot, reply.label, reply.redrawn_label, reply.update)

    def took(self, client: int, points: npt.NDArray[np.float32]) -> None:
        """Called with the points of a client when they arrive."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages with all k models, or each client's own, to every registered client."""
        models, self._layout = unpack_models(arrays)
        self._config, self._request = dict(config), replace(self.evaluation(), round=server_round)
        self._ask(self._addressed(models, self._request, self.placed(server_round), self.present))
        return list(self._asked.values())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Diagnostics of the clients, outside every guarantee; or their noisy mean accuracy, which is charged."""
        contents = [content for _, content in self._evaluations(replies, self.plan.num_clusters)]
        if self.evaluate == "private":
            return self._release_evaluation(server_round, contents)
        return self._aggregated(contents)

    def _evaluations(
        self, replies: Iterable[Message], num_clusters: int, optional: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """(client id, diagnostics) of every valid evaluation reply, as ``evaluate_metrics_aggr_fn`` takes them.

        With ``optional``, a reply states its client and round and may lack diagnostics, which are then None.
        """
        summary = self.evaluate_metrics_aggr_fn if self.evaluate == "diagnostic" else None
        for client, content in self._answers(replies):
            request = self._asked[client].content[CONFIG]
            try:
                if optional:
                    _parsed(check_sender, content, client_id=client, round=request["round"])
                if optional and DIAGNOSTICS not in content:
                    yield client, None
                    continue
                record = _parsed(diagnostics, content)
                if isinstance(summary, Summary):
                    context = {"client_id": client, "num_clusters": num_clusters, "num_clients": self.plan.clients}
                    yield client, _parsed(summary.reply.parse, record, assigned=request.get("cluster"), **context)
                else:
                    yield client, content
            except ReplyError as error:
                self._drop(client, str(error))

    def _aggregated(self, contents: Sequence[Any]) -> MetricRecord | None:
        """Metrics of valid replies; None if there are none or the aggregation fails."""
        if not contents:
            return None
        try:
            return self.evaluate_metrics_aggr_fn(contents)
        except Exception as error:
            text = printable(f"{type(error).__name__}: {error}")
            log(WARNING, "evaluate_metrics_aggr_fn failed, this evaluation has no metrics: %s", text)
            return None

    def _release_evaluation(self, server_round: int, contents: Sequence[RecordDict]) -> MetricRecord:
        given = [diagnostics(content).get("accuracy") for content in contents]
        accuracies = [float(value) for value in given if isinstance(value, int | float)]
        attempt = self._attempt
        permit = self.ledger.round(server_round, self.plan.evaluation_event(), **self._details("evaluation"))
        accuracy = self.plan.release_evaluation(permit, accuracies, self.streams, attempt)
        return MetricRecord({"accuracy": accuracy, "epsilon": permit.epsilon, "epsilon_rdp": self.ledger.spent("rdp")})

    # ---- pieces -------------------------------------------------------------------------------------------

    @property
    def _attempt(self) -> int:
        """Number of the next charge."""
        return len(self.ledger.charges) + 1

    def _details(self, purpose: str) -> dict[str, Any]:
        if purpose == "evaluation":
            return {"for": purpose, "noise": self.plan.evaluation_noise}
        if self.plan.unit == "record":
            return {"for": purpose}
        return {
            "for": purpose,
            "noise_multiplier_updates": self.plan.noise_multiplier_updates,
            "noise_multiplier_counts": self.plan.noise_multiplier_counts,
        }

    def _completed(self, request: Request, number: int) -> Request:
        """The request of a method, completed with the fields that all requests of a round share."""
        request = replace(request, round=number, record_plans=self.plan.record_plans)
        redraw = self._redraw()
        if redraw is not None and isinstance(request, TrainRequest):
            follow = None if self.rebalance_train == "own" else self.rebalance_train
            request = replace(request, redraw=tuple(redraw.ravel().tolist()), rebalance_train=follow)
        return request

    def _addressed(
        self, models: Models, request: Request, to: Mapping[int, int] | None, clients: list[int]
    ) -> dict[int, Message]:
        """One message for each registered client: all models, or the one assigned to it."""
        here = [client for client in clients if client in self._roster.nodes]
        if to is None:
            return self._messages(pack_models(models, self.layout), request, here)
        messages: dict[int, Message] = {}
        for cluster, model in enumerate(models):
            members = [client for client in here if to.get(client) == cluster]
            arrays = pack_models(model[None], self.layout)
            messages |= self._messages(arrays, replace(request, cluster=cluster), members)
        return messages

    def _content(self, arrays: ArrayRecord, request: Request) -> RecordDict:
        """Content of a message to clients: models, and the run's configuration with the request.

        Raises:
            StrategyError: the configuration sets a field of the request, which no plan would price.
        """
        if taken := self._config.keys() & request.keys():
            names = ", ".join(sorted(taken))
            raise StrategyError(f"the configuration for clients sets {names}: the strategy sets that")
        return RecordDict({MODELS: arrays, CONFIG: ConfigRecord({**self._config, **request.to_record()})})

    def _messages(self, arrays: ArrayRecord, request: Request, clients: list[int]) -> dict[int, Message]:
        content, verb, group = self._content(arrays, request), request.verb, str(request.round)
        nodes = self._roster.nodes
        self.traffic["messages_down"] += len(clients)
        self.traffic["bytes_down"] += len(clients) * payload(content)
        return {
            client: Message(content, dst_node_id=nodes[client], message_type=verb, group_id=group, ttl=self._timeout)
            for client in clients
        }

    def _ask(self, messages: dict[int, Message]) -> None:
        """Accept replies to these messages only."""
        self._asked, self._questions = messages, {}

    def _again(self, clients: Collection[int]) -> list[Message]:
        """The same messages for registered clients, at their present nodes."""
        nodes = self._roster.nodes
        for client in nodes.keys() & clients:
            old = self._asked[client]
            verb, group = old.metadata.message_type, old.metadata.group_id
            self._asked[client] = Message(
                old.content, dst_node_id=nodes[client], message_type=verb, group_id=group, ttl=self._timeout
            )
            self.traffic["messages_down"] += 1
            self.traffic["bytes_down"] += payload(old.content)
        return [self._asked[client] for client in sorted(nodes.keys() & clients)]

    def _answers(self, replies: Iterable[Message]) -> Iterable[tuple[int, RecordDict]]:
        """(client id, content) of the first reply to each message of this phase."""
        answered: set[int] = set()
        for reply in replies:
            content = reply.content if reply.has_content() else None
            self.traffic["messages_up"] += 1
            self.traffic["bytes_up"] += payload(content) if isinstance(content, RecordDict) else 0
            client = self._whose(reply)
            if client is None or client in answered:
                self._drop(None, "nobody asked for it, or it came twice")
                continue
            answered.add(client)
            if reply.has_error():
                self._drop(client, f"the client failed: {reply.error.reason}")
            elif isinstance(content, RecordDict):
                yield client, content
            else:
                self._drop(client, f"its content is a {type(content).__name__}, expected a RecordDict")

    def _whose(self, reply: Message) -> int | None:
        """The client whose message this replies to; None if there is none."""
        question = reply.metadata.reply_to_message_id
        if question not in self._questions:  # Flower assigns ids when it sends messages
            self._questions = {message.metadata.message_id: client for client, message in self._asked.items()}
        return self._questions.get(question)

    def _drop(self, client: int | None, reason: str) -> None:
        certified = self.plan.private and self.streams.secret
        reason = printable(reason)
        kind = "reply" if certified else reason
        self.dropped[kind if kind in self.dropped or len(self.dropped) < _MOST_REASONS else _OTHER_REASONS] += 1
        if not certified or self.plan.unit == "record":  # participation is public at record level
            known = {"round": self._request.round, "client": client, "reason": reason}
            log(WARNING, "reply of client %s dropped: %s", "?" if client is None else client, reason, extra=known)

    def _remember(self, current: int, models: Models, released: Released) -> tuple[Models, list[tuple[int, int]]]:
        """Update the running mean of histograms; re-seed if it is due."""
        new = released.histogram if isinstance(released, ReleasedSums) else None
        if new is None:
            return models, []
        self.histogram = new if self.histogram is None else (1 - _MEMORY) * self.histogram + _MEMORY * new
        if self.reseeding is None or not self.reseeding.due(current, self.plan.rounds):
            return models, []
        rng = self.streams.stream("reseeding", current, self._attempt)
        models, self.histogram, moves = self.reseeding(models, self.histogram, rng, self.shared)
        return models, moves


def _parsed(read: Callable[..., R], content: Any, **context: Any) -> R:
    """Parse a reply with ``read``.

    Raises:
        ReplyError: the reply is invalid.
    """
    try:
        return read(content, **context)
    except ReplyError:
        raise
    except Exception as error:  # the reply comes from the network: anything may be in it
        raise ReplyError(f"it cannot be read: {type(error).__name__}: {error}") from error
