"""What a method declares and defines, its tools, and the plans and options that it supports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import MetricRecord

from coterie.fields import MAX_REDRAWN
from coterie.fields.settings import Settings
from coterie.privacy import Plan, ReleasedSums, ReleasedUpdates, Secure
from coterie.rounds.aggregation import Aggregator
from coterie.rounds.phases import Phase, SumsPhase, UpdatesPhase
from coterie.rounds.run_state import Run, StrategyError
from coterie.strategies import model_search
from coterie.strategies.options import StrategyOptions
from coterie.wire import EvaluateRequest, Request, TrainRequest
from coterie.wire.messages import Layout

T = TypeVar("T")
Models: TypeAlias = npt.NDArray[np.float32]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Parameters: TypeAlias = dict[str, npt.NDArray[np.float32]]
#: Part of a round: yields phases, receives their releases, returns a result.
Steps: TypeAlias = Generator[Phase[Any, Any], Any, T]
#: A round of a method: returns the (k, d) new models.
Round: TypeAlias = Generator[Phase[Any, Any], Any, Models]


class Declarations:  # large: what a method declares, a line each
    """Declarations of a method."""

    #: Name in configurations, title, and source of the method.
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    #: Units of privacy that the method supports.
    units: ClassVar[tuple[str, ...]] = ("client", "none")
    #: Whether a client's label is a function of its own data and released values only. Every method declares it;
    #: client-level privacy requires True.
    row_wise: ClassVar[bool]
    #: Result of a run: models, or one model with which clients label their records.
    produces: ClassVar[Literal["models", "labels"]] = "models"
    #: Plural name of the points that clients upload if the method clusters records; used in reports.
    point_name: ClassVar[str] = "points"
    #: Whether the method has cluster labels to rebalance or models to re-seed.
    clustered: ClassVar[bool] = True
    #: Whether a client knows its label before it trains.
    knows_label: ClassVar[bool] = True
    #: Whether models change by :meth:`step` only, so that an aggregator other than the mean covers every update, and an
    #: optimizer of the server every step.
    robust: ClassVar[bool] = False
    #: Whether clients keep state between rounds on which their updates depend.
    memory: ClassVar[bool] = False
    #: Settings of the method only.
    settings_class: ClassVar[type[Settings]] = Settings
    #: Options that depend on data and device instead of settings: ``true_groups``, ``example_shape``,
    #: ``feature_range``, ``device``, ``precision``.
    needs: ClassVar[tuple[str, ...]] = ()
    #: What replies of clients hold beside evaluations, in the words of a policy (coterie/site/policy.py).
    releases: ClassVar[tuple[str, ...]] = ("updates",)
    #: Whether all models start equal.
    equal_start: ClassVar[bool] = False
    #: Whether round 1 has full batches: all records of a client.
    full_first_batch: ClassVar[bool] = False
    #: Whether small clusters are always rebalanced; ``rebalance-min`` is then, by default, above 0.
    rebalances: ClassVar[bool] = False
    #: Whether the method finds the number of clusters if it is 0.
    finds_clusters: ClassVar[bool] = False
    #: Whether it does so by a search (strategies/model_search.py), from ``max-clusters`` models.
    searches: ClassVar[bool] = False
    #: Whether the number of clusters grows during a run; ``clusters`` is then an upper bound, by default 0: no bound.
    grows: ClassVar[bool] = False
    #: Defaults of the method for common settings, by key, where they differ from the settings' own.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Published privacy claims that give no guarantee, and why; for certificates without privacy.
    unfounded: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def max_selections(cls, rounds: int) -> int:
        """Maximum number of choices of a cluster by loss by one client at record level."""
        return 0

    @classmethod
    def released_losses(cls, clients: int, settings: Settings) -> dict[str, int]:
        """``compared`` and ``models_per_message`` of :class:`~coterie.privacy.RecordPlan`; empty: neither is used."""
        return {}

    @classmethod
    def default_settings(cls, unit: str) -> dict[str, Any]:
        """Defaults of the method for common settings, by key."""
        settings: dict[str, Any] = {}
        if not cls.clustered:
            settings |= {"clusters": 1, "reseed-every": 0}
        if "client" not in cls.units or unit == "record":  # all clients take part, and no sizes are released
            settings |= {"sampling-rate": 1.0, "reseed-every": 0}
        return settings | ({"clusters": 0} if cls.grows else {}) | dict(cls.defaults)

    @classmethod
    def check_settings(cls, setting: Callable[[str], Any]) -> None:
        """Check common settings of which plan and options do not say everything.

        Args:
            setting: function that returns the value of a setting by the last part of its name; None: "auto".

        Raises:
            StrategyError: the method does not use or support a value.
        """
        strategy, clusters, reseed_every = (setting(name) for name in ("strategy", "clusters", "reseed-every"))
        searching = cls.searches and clusters == 0
        if clusters == 0 and not cls.finds_clusters:
            raise StrategyError(f"clusters = 0: {strategy} does not determine the number of clusters; set it")
        if not searching and (maximum := setting("max-clusters")) is not None:
            raise StrategyError(
                f"max-clusters = {maximum} has no effect with strategy = {strategy} and clusters = {clusters}, only "
                "with ifca and clusters = 0; leave it out"
            )
        if searching and not reseed_every:
            raise StrategyError(
                "reseed-every = 0 with clusters = 0: the search for the number of clusters re-seeds models; leave "
                "reseed-every out, or set clusters"
            )
        if reseed_every and not cls.clustered:
            raise StrategyError(f"reseed-every = {reseed_every}: {strategy} has no clusters to re-seed; set it to 0")

    @staticmethod
    def evaluations(rounds: int, every: int) -> int:
        """Number of evaluations in ``rounds`` rounds: one every ``every`` rounds, and one after the last."""
        return math.ceil(rounds / every) if every else 0


class Method(Declarations, ABC):  # large: what a method may define, and the tools of its rounds
    """A method; :class:`~coterie.strategies.ClusteredStrategy` runs it and documents the attributes."""

    settings: Settings
    options: StrategyOptions
    clusters: int
    max_clusters: int
    run: Run

    # ---- to be defined by a method ------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the method supports its plan, options and settings.

        Raises:
            StrategyError: it does not.
        """
        if missing := [name for name in self.needs if not getattr(self.options, name)]:
            raise StrategyError(f"{self.name} requires the option {', '.join(missing)}")
        _check_unit(self)
        if self.options.masks and not isinstance(self.plan, Secure):
            raise StrategyError(
                f"masks require mechanism secure, with noise inside the vectors, not {self.plan.mechanism}"
            )
        _check_clusters(self)
        if (aggregator := self.options.aggregator).collects:
            _check_robust(self, aggregator)
        if (optimizer := self.options.server_optimizer.name) != "sgd" and not self.robust:
            raise StrategyError(
                f"{self.name} supports server-optimizer sgd, not {optimizer}: its models do not change by aggregated "
                "updates only"
            )
        _check_schedule(self)
        if self.searching:
            model_search.check(self.plan, self.options.averaging.last)

    @abstractmethod
    def round(self, number: int, models: Models) -> Round:
        """One round: yield phases, receive the release of each, return the (k, d) new models."""

    def initial_parameters(self, draw: Callable[..., Parameters]) -> Parameters:
        """Initial parameters; each call of ``draw`` initialises a new network.

        ``draw(gan=NAME, categories=k)`` initialises a GAN instead of the configured network.
        """
        return draw()

    def initial_models(self, models: Models) -> Models:
        """(k, d) initial models, from one model or from k."""
        if len(models) not in (1, self.plan.num_clusters):
            raise StrategyError(f"there are {len(models)} initial models for {self.plan.num_clusters} clusters")
        if self.equal_start:
            models = models[:1]
        return np.repeat(models, self.plan.num_clusters, axis=0) if len(models) == 1 else models

    def training(self) -> TrainRequest:
        """The request for training."""
        return TrainRequest()

    def evaluation(self) -> Request:
        """The request for evaluation."""
        return EvaluateRequest()

    def assignments(self, number: int) -> Mapping[int, int] | None:
        """The cluster of every client after round ``number`` if the server assigns it; None if clients choose.

        Clients without a cluster are not evaluated.
        """
        return None

    def evaluation_due(self, number: int, last: bool) -> bool:
        """Whether models are evaluated after round ``number``."""
        every = self.options.evaluate_every
        once = self.plan.clients_keep_ledgers and self.options.evaluate == "private"
        return bool(every) and (last or (number % every == 0 and not once))

    def evaluated(self, metrics: MetricRecord | None) -> MetricRecord | None:
        """The metrics of an evaluation, from what it released; None without any."""
        return metrics

    @property
    def fewest_clients(self) -> int:
        """Number of clients below which the method cannot cluster them."""
        return 1

    @property
    def finished(self) -> bool:
        """Whether the method has converged: the run ends before its last planned round."""
        return False

    @property
    def shared(self) -> int:
        """Number of leading coordinates that all clusters share."""
        return 0

    # ---- tools for rounds ---------------------------------------------------------------------------------

    def sums(self, request: Request, models: Models, to: Mapping[int, int] | None = None) -> Steps[ReleasedSums]:
        """Send a request to a random cohort; receive the sum of each cluster's updates.

        Args:
            request: the request.
            models: (k, d) models for the clients.
            to: index of the one model that each client receives; other clients get no request. None: each receives all.
        """
        return SumsPhase(request, models, to, shared=self.shared).run()

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

        For the arguments see :meth:`sums` and :class:`~coterie.rounds.phases.Phase`.
        """
        return UpdatesPhase(request, models, to, clients, joined_late, reply_layout).run()

    def step(self, models: Models, released: ReleasedSums) -> Models:
        """theta_j + eta S_j / D_j for every cluster, or the step of another optimizer of the server from S_j / D_j.

        Shared coordinates are divided by the size of the cohort.
        """
        mean = released.sums / released.divisors[:, None]
        mean[:, : self.shared] = released.sums[:, : self.shared] / released.cohort
        divisors = np.stack([released.divisors, np.full_like(released.divisors, released.cohort)], axis=1)
        return self.moved(models, mean, released.noise / divisors)

    def moved(self, models: Models, means: FloatArray, noise: FloatArray, *, restart: bool = False) -> Models:
        """Models after a step of the optimizer of the server.

        Args:
            models: (k, d), or (1, d) for all clusters.
            means: (k, d) of updates.
            noise: (k, 2) standard deviation of the noise of the means, in own and in shared coordinates.
            restart: whether the models are new, so that the optimizer starts anew.
        """
        options = self.options
        kept = {} if restart else self.state
        step, kept = options.server_optimizer(kept, means, noise, options.server_lr, self.shared)
        self.state = {**self.state, **kept}
        return np.asarray(models + step, dtype=np.float32)

    def step_size(self, number: int) -> float:
        """Step size of the clients in round ``number``, relative to round 1."""
        return float(self.run.state.config.get("lr-decay", 1.0)) ** (number - 1)

    @property
    def plan(self) -> Plan:
        """The plan of the next exchange."""
        return self.run.plan

    @property
    def layout(self) -> Layout:
        """Layout of one model."""
        return self.run.state.layout

    @property
    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays of the method between rounds; part of checkpoints.

        Whoever replaces them keeps those of the optimizer of the server.
        """
        return self.run.state.arrays

    @state.setter
    def state(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        kept = self.options.server_optimizer.kept(self.run.state.arrays)
        self.run.state = replace(self.run.state, arrays={**kept, **arrays})

    @property
    def notes(self) -> dict[str, Any]:
        """JSON-ready notes on the current round, from released values."""
        return self.run.state.notes

    @notes.setter
    def notes(self, notes: dict[str, Any]) -> None:
        self.run.state = replace(self.run.state, notes=notes)

    @property
    def present(self) -> list[int]:
        """Ids of the registered clients."""
        return sorted(self.run.registry.nodes)

    @property
    def attempt(self) -> int:
        """Number of the next charge, so that a repeated round draws fresh randomness."""
        return self.run.attempt

    @property
    def penalises(self) -> bool:
        """Whether the training of clients has a penalty on the distance to the start."""
        return self.training().penalty is not None

    @property
    def searching(self) -> bool:
        """Whether the run searches for the number of clusters."""
        return self.searches and not self.clusters


def _check_unit(method: Method) -> None:
    row_wise, plan = getattr(method, "row_wise", None), method.plan
    if plan.unit == "client" and row_wise is None:
        raise StrategyError(
            f"{method.name} does not declare row_wise, as client-level privacy requires: set row_wise = True if a "
            "client's label is a function of its own data and released values only, else False"
        )
    units = [unit for unit in method.units if row_wise is not False or unit != "client"]
    if plan.unit not in units:
        reason = ": its labels depend on the data of several clients, which no client-level proof covers"
        raise StrategyError(
            f"{method.name} supports privacy-unit {' or '.join(units)}, not {plan.unit!r}"
            f"{reason if row_wise is False else ''}"
        )
    if method.memory and not plan.memory:
        raise StrategyError(
            f"{method.name} keeps client state between rounds, which the proof of mechanism {plan.mechanism} does not "
            "cover; use mechanism joint"
        )


def _check_clusters(method: Method) -> None:
    plan, reseeding = method.plan, method.options.reseeding
    if method.options.rebalance_train == "assigned" and not (plan.redraws and method.knows_label):
        raise StrategyError(
            "rebalance-train = 'assigned' requires that labels are redrawn before training: use mechanism joint "
            "(or no privacy), and a method that chooses labels before training"
        )
    if not method.clustered and plan.num_clusters != 1:
        raise StrategyError(f"clusters = {plan.num_clusters}: {method.name} trains one model; set it to 1")
    if plan.clients < method.fewest_clients:
        raise StrategyError(
            f"clients = {plan.clients}: {method.name} clusters at least {method.fewest_clients} clients; use more "
            "clients, fewer clusters, or another strategy"
        )
    if plan.redraws and plan.rebalance_min and plan.num_clusters > MAX_REDRAWN:
        raise StrategyError(
            f"clusters = {plan.num_clusters}: clients redraw their labels among at most {MAX_REDRAWN} clusters; reduce "
            "clusters, or set rebalance-min to 0"
        )
    if plan.rebalance_min and "client" not in method.units:
        raise StrategyError(f"{method.name} does not support rebalancing; set rebalance-min to 0")
    if not method.clustered and plan.rebalance_min:
        raise StrategyError(f"{method.name} has no clusters to rebalance; set rebalance-min to 0")
    if reseeding and reseeding.last(plan.rounds) and plan.of_round(reseeding.every).noise_multiplier_counts is None:
        raise StrategyError("re-seeding requires released cluster sizes: set identifier_share above 0")


def _check_robust(method: Method, aggregator: Aggregator) -> None:
    plan, name = method.plan, aggregator.name
    right = (plan.unit, name, plan.divisor, method.robust) == ("none", "mean", "released", True)
    if aggregator.by_records and not right:
        raise StrategyError(
            "weights = records requires privacy-unit none, aggregator mean, divisor auto, and a method whose models "
            f"change by aggregated updates only, not {plan.unit}, {name}, {plan.divisor} and {method.name}"
        )
    if plan.unit == "client":
        raise StrategyError(
            f"aggregator = {name} requires privacy-unit record or none: client-level noise covers the contribution of "
            "one client to a sum, which clipping bounds by C; one client can change a median or the selection of Krum "
            "by more than C / n, and the server stores no individual updates; use mean"
        )
    if not method.robust:
        raise StrategyError(
            f"{method.name} supports aggregator mean, not {name}: its models do not change by aggregated updates only"
        )
    if plan.unit == "none" and plan.divisor != "released":
        raise StrategyError(f"aggregator = {name} does not use a divisor: set divisor to auto, not {plan.divisor}")


def _check_schedule(method: Method) -> None:
    """Check the schedule of averaging and evaluation."""
    plan, options = method.plan, method.options
    latest = 1 - (options.reseeding.until if options.reseeding else 0.0)
    if not 0 <= options.averaging.last <= latest + 1e-9:
        raise StrategyError(
            f"average-last = {options.averaging.last:g} must lie between 0 and {latest:g}, so that averaging begins "
            "after the last re-seeding"
        )
    evaluations = method.evaluations(plan.rounds, options.evaluate_every)
    if plan.clients_keep_ledgers:
        if options.evaluate == "private" and not plan.histograms:
            raise StrategyError(
                "evaluate = 'private' releases a histogram of scores alone at record level: set score-share, or at "
                "record level use diagnostic or off"
            )
        return
    if options.evaluate == "private" and plan.evaluations < evaluations:
        raise StrategyError(f"the plan covers {plan.evaluations} private evaluations; the run has {evaluations}")
    if options.evaluate == "private" and method.memory and not plan.evaluates_memory:
        raise StrategyError(
            f"evaluate = 'private': the proof of mechanism {plan.mechanism} with secret participation does not cover "
            "evaluations of clients that keep state between rounds; set participation to visible, or evaluate to off"
        )
