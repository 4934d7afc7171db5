"""Base class of all strategies: helpers for methods, and Flower's hooks.

A method (one file per paper) defines a round, which yields phases; each phase is one exchange of
:mod:`coterie.rounds`. :meth:`ClusteredStrategy.start` runs the rounds. :mod:`coterie.strategies.method` documents the
declarations of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import INFO
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie.privacy import Ledger, Plan, ReleasedPoints, ReleasedSums, ReleasedUpdates, Streams, certificate
from coterie.rounds import (
    Aggregator,
    Averaging,
    Checkpoint,
    ClientRegistry,
    EvaluationExchange,
    Exchange,
    MessageBatch,
    NullRecorder,
    Phase,
    PointsPhase,
    Recorder,
    RoundsStrategy,
    RunContext,
    Statistics,
    StrategyError,
    SumsPhase,
    UpdatesPhase,
    await_clients,
    mean_of_clients,
    run_rounds,
)
from coterie.settings import Settings
from coterie.strategies.adaptive_clipping import AdaptiveClipping
from coterie.strategies.method import Method, Models, Round, Steps, check_schedule
from coterie.strategies.model_search import ModelSearch
from coterie.strategies.reseeding import Reseeding
from coterie.wire import Request
from coterie.wire.messages import Layout, PointsSpec, pack_models, unpack_models

E = TypeVar("E", bound=Exchange[Any, Any] | EvaluationExchange)
FloatArray: TypeAlias = npt.NDArray[np.float64]

# Weight of the latest histogram in the running mean for rebalancing and re-seeding.
_LATEST_WEIGHT = 0.25
# The adaptive clipping norm of the next round, in the state of a run.
_CLIP_NORM = "clip-norm"


@dataclass
class _Open:
    """State between two of Flower's hooks: the round of the method with its phase, and the exchange."""

    round: Round | None = None
    phase: Phase[Any, Any] | None = None
    exchange: Exchange[Any, Any] | EvaluationExchange | None = None


class CommonOptions(TypedDict, total=False):
    """Options of every strategy but ``clusters``, by keyword; see :class:`ClusteredStrategy`."""

    ledger: Ledger | None
    streams: Streams | None
    server_lr: float
    reseeding: Reseeding | None
    clipping: AdaptiveClipping | None
    averaging: Averaging | None
    aggregator: Aggregator | None
    rebalance_train: str
    evaluate: str
    evaluate_every: int
    evaluate_clients: int
    recorder: Recorder | None
    resume_from: Checkpoint | None
    evaluate_metrics_aggr_fn: Callable[[Sequence[Any]], MetricRecord]
    registration_timeout: float
    min_clients: int
    min_replies: float


class StrategyOptions(CommonOptions, total=False):
    """Options of every strategy, by keyword; see :class:`ClusteredStrategy`."""

    clusters: int | None


class ClusteredStrategy(Method, RoundsStrategy):
    """A Flower ``Strategy`` that trains one model per cluster under a privacy plan. Each run needs its own instance.

    Args:
        plan: participation, per-round release and privacy cost; also M, k and T.
        settings: of the method, a :attr:`settings_class`; None: its defaults.
        clusters: number of clusters; 0: determined by the method, with the plan's as the maximum where it searches for
            it (``searches``); None: that of the plan.
        ledger: records charges; None keeps them in memory.
        streams: randomness; None is secret randomness.
        server_lr: eta, step size of the server.
        reseeding: schedule of re-seeding models without clients; None: never.
        clipping: how the clipping norm follows released shares of norms; requires a plan with a ``clip_share``, whose
            ``clip_norm`` is that of round 1. None: the default if the plan has a ``clip_share``.
        averaging: the released models to average; None returns the last ones.
        aggregator: aggregator of a cluster's updates; None: the mean. Others require a plan without privacy or at
            record level.
        rebalance_train: model that a client trains if rebalancing changes its cluster: of its "own" cluster or of the
            "assigned" one; the latter requires clients that redraw their labels.
        evaluate: "diagnostic", exact and outside every guarantee, or "private", noisy and charged; the plan must then
            include as many ``evaluations`` as :meth:`evaluations` returns.
        evaluate_every: number of rounds between evaluations; the last round is always evaluated. 0: never.
        evaluate_clients: number of clients that evaluate exactly, drawn once at random; 0: all.
        recorder: stores checkpoints and metrics.
        resume_from: a checkpoint of the same run.
        evaluate_metrics_aggr_fn: aggregates evaluation replies to one MetricRecord; default: mean over clients of every
            scalar. A :class:`~coterie.wire.Summary` receives valid replies only. If it raises, the evaluation has no
            metrics.
        registration_timeout: seconds to wait for all M clients before round 1, and later for the clients that a round
            requires.
        min_clients: number of registered clients that a round requires. At client level it applies to round 1 only:
            later the end of a run would reveal how many clients are present.
        min_replies: share of the requested replies that a round requires; clients without a reply receive the request a
            few more times. Not available at client level, where every round is charged and released regardless of
            replies.

    Attributes:
        histogram: (k,) running mean of released histograms; None before the first.
        state: arrays of the method between rounds; part of checkpoints.
        notes: JSON-ready notes of the method on the current round, from released values.
        stopped: reason why the run ended before its last round; None otherwise.
        registry: the registered clients.
        statistics: counts of requests and replies.
        layout: of one model, available after :meth:`start`; a method may replace it.
        client_config: the configuration of the last training request.

    Raises:
        StrategyError: the method does not support the plan's unit, rebalancing, or number of clusters.
    """

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
        clipping: AdaptiveClipping | None = None,
        averaging: Averaging | None = None,
        aggregator: Aggregator | None = None,
        rebalance_train: str = "own",
        evaluate: str = "diagnostic",
        evaluate_every: int = 1,
        evaluate_clients: int = 0,
        recorder: Recorder | None = None,
        resume_from: Checkpoint | None = None,
        evaluate_metrics_aggr_fn: Callable[[Sequence[Any]], MetricRecord] = mean_of_clients,
        registration_timeout: float = 60.0,
        min_clients: int = 0,
        min_replies: float = 0.0,
    ) -> None:
        self.settings = settings or self.settings_class()
        if type(self.settings) is not self.settings_class:
            raise StrategyError(f"{self.name} requires {self.settings_class.__name__}, not {type(settings).__name__}")
        if clusters is not None and clusters < 0:
            raise StrategyError(f"clusters must be at least 0, not {clusters}")
        self.clusters = plan.num_clusters if clusters is None else clusters
        self.aggregator = aggregator or Aggregator()
        self.check(plan, reseeding=reseeding, rebalance_train=rebalance_train, aggregator=self.aggregator)
        check_schedule(plan, reseeding, averaging, evaluate, self.evaluations(plan.rounds, evaluate_every), self.memory)
        self.averaging = averaging or Averaging(0.0)
        self.search = self._new_search(plan)
        self.state: dict[str, npt.NDArray[Any]] = dict(resume_from.state) if resume_from else {}
        self.plan = _with_adapted_clipping(plan, self.state)
        self.max_clusters = plan.num_clusters
        self.ledger = ledger or plan.ledger()
        self.streams = streams or Streams()
        self.server_lr = server_lr
        self.reseeding = reseeding
        self.clipping = clipping or AdaptiveClipping()
        self.rebalance_train = rebalance_train
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        self.evaluate_clients = 0 if evaluate == "private" else evaluate_clients
        self.recorder: Recorder = recorder or NullRecorder()
        self.resume_from = resume_from
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        self.min_clients = min_clients
        self.min_replies = min_replies
        self.histogram: FloatArray | None = resume_from.histogram if resume_from else None
        self.notes: dict[str, Any] = {}
        self.stopped: str | None = None
        self.registry = ClientRegistry(plan.clients, registration_timeout)
        self.statistics = Statistics()
        self.client_config: Mapping[str, Any] = {}
        self._evaluation_order: npt.NDArray[np.int64] | None = None
        self._open = _Open()

    # ---- tools for methods --------------------------------------------------------------------------------

    def sums(self, request: Request, models: Models, to: Mapping[int, int] | None = None) -> Steps[ReleasedSums]:
        """Send a request to a random cohort; receive the sum of each cluster's updates.

        Args:
            request: the request.
            models: (k, d) models for the clients.
            to: index of the one model that each client receives; other clients get no request. None: each receives all.
        """
        return SumsPhase(request, models, to).run()

    def updates(
        self,
        request: Request,
        models: Models,
        to: Mapping[int, int] | None = None,
        *,
        clients: Collection[int] | None = None,
        joined_late: bool = False,
        reply_layout: Layout | None = None,
    ) -> Steps[ReleasedUpdates]:
        """Send a request to clients; receive individual updates, which few mechanisms allow.

        For the arguments see :meth:`sums` and :class:`~coterie.rounds.Phase`.
        """
        return UpdatesPhase(request, models, to, clients, joined_late, reply_layout).run()

    def points(
        self,
        request: Request,
        models: Models,
        reply_spec: PointsSpec,
        on_points_received: Callable[[int, Models], None] | None = None,
        *,
        clients: Collection[int],
        joined_late: bool = False,
    ) -> Steps[ReleasedPoints]:
        """Send a request to clients; receive their points. See :class:`~coterie.rounds.PointsPhase`."""
        phase = PointsPhase(
            request, models, None, clients, joined_late, reply_spec=reply_spec, on_points_received=on_points_received
        )
        return phase.run()

    def step(self, models: Models, released: ReleasedSums) -> Models:
        """theta_j + eta S_j / D_j for every cluster; shared coordinates are divided by the size of the cohort."""
        mean = released.sums / released.divisors[:, None]
        mean[:, : self.shared] = released.sums[:, : self.shared] / released.cohort
        return np.asarray(models + self.server_lr * mean, dtype=np.float32)

    def step_size(self, number: int) -> float:
        """Step size of the clients in round ``number``, relative to round 1."""
        return float(self.client_config.get("lr-decay", 1.0)) ** (number - 1)

    @property
    def present(self) -> list[int]:
        """Ids of the registered clients."""
        return sorted(self.registry.nodes)

    @property
    def attempt(self) -> int:
        """Number of the next charge, so that a repeated round draws fresh randomness."""
        return len(self.ledger.charges) + 1

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
        the ledger rejects a charge, the run ends: the result has the latest models, :attr:`stopped` the reason.

        Raises:
            StrategyError: more rounds than planned.
        """
        if num_rounds > self.plan.rounds:
            raise StrategyError(f"num_rounds = {num_rounds} exceeds the {self.plan.rounds} rounds of the plan")
        self.summary()
        self._open = _Open()
        train = train_config or ConfigRecord()
        return run_rounds(self, grid, initial_arrays, num_rounds, timeout, train, evaluate_config or train, evaluate_fn)

    def certificate(self) -> dict[str, Any]:
        """The certificate of the run so far, JSON-ready, derived from the ledger; see docs/privacy.md.

        Its epsilon covers the charges made and the remaining planned rounds. A run with a seed is not certified.
        """
        exact = self.evaluate == "diagnostic" and self.evaluate_every
        header = {
            "diagnostics": ["what clients send in evaluations, exact, and its means"] if exact else [],
            "unfounded": list(self.unfounded),
            **self.plan.ledger().header,
            **self.ledger.header,
        }
        if not self.streams.secret:
            header["seed"] = self.streams.seed
        return certificate(header, self.ledger.charges)

    @cached_property
    def mechanism_state(self) -> object | None:
        """State of the plan's mechanism between rounds; in memory only."""
        return self.plan.new_state()

    @property
    def open_batch(self) -> MessageBatch | None:
        """The messages of the open exchange; None between exchanges."""
        return self._open.exchange.batch if self._open.exchange else None

    @property
    def open_sums(self) -> Exchange[Any, Any] | None:
        """The open exchange if its replies may be summed where clients are simulated; not if a subclass reads them."""
        exchange = self._open.exchange
        reads = type(self).aggregate_train is not ClusteredStrategy.aggregate_train
        return exchange if isinstance(exchange, Exchange) and not reads else None

    def close_exchange(self, kind: type[E]) -> E | None:
        """Close and return the open exchange; None if none of this kind is open."""
        exchange, self._open.exchange = self._open.exchange, None
        return exchange if isinstance(exchange, kind) else None

    def context(self) -> RunContext:
        """The current state of the run, for an exchange."""
        return RunContext(
            plan=self.plan,
            ledger=self.ledger,
            streams=self.streams,
            registry=self.registry,
            statistics=self.statistics,
            aggregator=self.aggregator,
            layout=self.layout,
            shared=self.shared,
            config=self.client_config,
            histogram=self.histogram,
            rebalance_train=self.rebalance_train,
            mechanism_state=self.mechanism_state,
        )

    # ---- Flower's hooks -----------------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the method and the plan."""
        log(INFO, "%s: %s", self.name, self.title)
        log(INFO, "\t%s", self.plan)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages of the method's next phase to a newly sampled cohort."""
        models, self.layout = unpack_models(arrays)
        if self._open.round is None or self._open.phase is None:
            self._open.round = self.round(server_round, models)
            self._open.phase = next(self._open.round)
        if not self.registry.nodes:
            await_clients(self.registry, grid)
        self.client_config = dict(config)
        if "lr" in config:
            self.client_config["lr"] *= self.step_size(server_round)
        self._open.exchange = Exchange(self.context(), self._open.phase, server_round)
        return list(self._open.exchange.batch.messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate and clip replies on arrival, then charge, release and update.

        The models are None while phases of this round remain.
        """
        exchange: Exchange[Any, Any] | None = self.close_exchange(Exchange)
        if self._open.round is None or exchange is None:
            raise StrategyError("aggregate_train was called before configure_train")
        exchange.collect(replies)
        released = exchange.release()
        try:
            self._open.phase = self._open.round.send(released)
            return None, None
        except StopIteration as stop:
            models: Models = stop.value
        self._open = _Open()
        histogram = released.histogram if isinstance(released, ReleasedSums) else None
        models, moves = self._reseeded(server_round, models, histogram)
        metrics = MetricRecord({"epsilon": released.epsilon, "epsilon_rdp": self.ledger.spent("rdp")})
        metrics["reseeded"] = [j for move in moves for j in move]
        if histogram is not None:
            metrics["histogram"] = histogram.tolist()
        if released.below is not None:
            metrics["clip_norm"] = self.plan.clip_norm
            self._adapt_clipping(released.below)
        return pack_models(models, self.layout), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages with all k models, or each client's own, to every registered client."""
        models, self.layout = unpack_models(arrays)
        self.client_config = dict(config)
        self._open.exchange = exchange = EvaluationExchange(
            self.context(),
            self.evaluation(),
            server_round,
            models,
            self.assignments(server_round),
            self.evaluate_metrics_aggr_fn,
            self._evaluating(),
        )
        return list(exchange.batch.messages.values())

    def membership(self, number: int) -> Mapping[int, int]:
        """The cluster of each client after round ``number``: assigned, or of its latest released label.

        Empty at client level, where labels are not released.
        """
        if self.plan.unit == "client":
            return {}
        assigned = self.assignments(number)
        return self.statistics.labels if assigned is None else assigned

    def _evaluating(self) -> list[int]:
        """The registered clients that evaluate, of an order drawn once."""
        present = sorted(self.registry.nodes)
        if not 0 < self.evaluate_clients < len(present):
            return present
        if self._evaluation_order is None:
            rng = self.streams.stream("evaluation-clients")
            self._evaluation_order = rng.permutation(self.plan.clients)
        found = [client for client in self._evaluation_order.tolist() if client in self.registry.nodes]
        return sorted(found[: self.evaluate_clients])

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Diagnostics of the clients, outside every guarantee; or their noisy mean accuracy, which is charged."""
        exchange, private = self.close_exchange(EvaluationExchange), self.evaluate == "private"
        if exchange is None:  # a subclass has its own evaluation
            return None
        contents = list(exchange.collect(replies, self.plan.num_clusters, private=private).values())
        return exchange.release(contents) if private else exchange.metrics(contents)

    def _new_search(self, plan: Plan) -> ModelSearch | None:
        """The search for the number of clusters; None if it is known.

        Raises:
            StrategyError: the plan does not support it.
        """
        if self.clusters or not self.searches:
            return None
        search = ModelSearch()
        search.check(plan, self.averaging.last)
        return search

    def _adapt_clipping(self, below: float) -> None:
        """Set the clipping norm of the next round, by a released share of norms below that of this one."""
        clip_norm = self.clipping(self.plan.clip_norm, below)
        self.plan = self.plan.with_clip_norm(clip_norm)
        self.state = {**self.state, _CLIP_NORM: np.array(clip_norm)}

    def _reseeded(
        self, number: int, models: Models, histogram: FloatArray | None
    ) -> tuple[Models, list[tuple[int, int]]]:
        """Update the running mean of histograms; re-seed if it is due."""
        if histogram is None:
            return models, []
        if self.search:
            return self._searched(self.search, number, models, histogram)
        mean = self.histogram
        self.histogram = histogram if mean is None else (1 - _LATEST_WEIGHT) * mean + _LATEST_WEIGHT * histogram
        if self.reseeding is None or not self.reseeding.due(number, self.plan.rounds):
            return models, []
        rng = self.streams.stream("reseeding", number, self.attempt)
        models, self.histogram, moves = self.reseeding(models, self.histogram, rng, self.shared)
        origins = np.arange(len(models))
        origins[[replaced for _, replaced in moves]] = -1
        self.plan.rearrange(self.mechanism_state, origins, np.ones(len(models)), self.shared)
        return models, moves

    def _searched(
        self, search: ModelSearch, number: int, models: Models, histogram: FloatArray
    ) -> tuple[Models, list[tuple[int, int]]]:
        """Search for the number of clusters; :attr:`histogram` is the mean of the last window of rounds."""
        self.state = search.observe(self.state, histogram)
        action = search.action(number, self.plan.rounds)
        if action is None:
            return models, []
        rng = self.streams.stream("reseeding", number, self.attempt)
        found, self.state = search(action, models, self.state, self.plan, self.max_clusters, rng)
        self.plan.rearrange(self.mechanism_state, found.origins, found.factors)
        self.histogram = found.sizes
        self.notes |= {"search": action, "clusters": len(found.models), "origins": found.origins.tolist()}
        return found.models, found.moves


def _with_adapted_clipping(plan: Plan, state: Mapping[str, npt.NDArray[Any]]) -> Plan:
    """The plan with the clipping norm of a resumed run, if it is adaptive."""
    return plan.with_clip_norm(float(state[_CLIP_NORM])) if _CLIP_NORM in state else plan
