"""Declarations of a method, and the plans and options that it supports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.fields import REBALANCE_TRAIN
from coterie.privacy import Plan
from coterie.rounds import Aggregator, Averaging, Phase, StrategyError
from coterie.settings import Settings
from coterie.strategies.reseeding import Reseeding
from coterie.wire import EvaluateRequest, Request, TrainRequest

T = TypeVar("T")
Models: TypeAlias = npt.NDArray[np.float32]
Parameters: TypeAlias = dict[str, npt.NDArray[np.float32]]
#: Part of a round: yields phases, receives their releases, returns a result.
Steps: TypeAlias = Generator[Phase[Any, Any], Any, T]
#: A round of a method: returns the (k, d) new models.
Round: TypeAlias = Generator[Phase[Any, Any], Any, Models]


class CheckOptions(TypedDict, total=False):
    """Options of :meth:`Method.check`."""

    reseeding: Reseeding | None
    rebalance_train: str
    aggregator: Aggregator | None


class Method(ABC):
    """The declarations of a method and its interface; :class:`~coterie.strategies.ClusteredStrategy` runs it."""

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
    #: Whether models change by :meth:`step` only, so that an aggregator other than the mean covers every update.
    robust: ClassVar[bool] = False
    #: Whether clients keep state between rounds on which their updates depend.
    memory: ClassVar[bool] = False
    #: Settings of the method only.
    settings_class: ClassVar[type[Settings]] = Settings
    #: Arguments of the constructor that depend on data and device instead of settings.
    needs: ClassVar[tuple[str, ...]] = ()
    #: Whether all models start equal.
    equal_start: ClassVar[bool] = False
    #: Whether round 1 has full batches: all records of a client.
    full_first_batch: ClassVar[bool] = False
    #: Whether small clusters are always rebalanced; ``rebalance-min`` is then, by default, above 0.
    rebalances: ClassVar[bool] = False
    #: Whether the method finds the number of clusters if it is 0.
    finds_clusters: ClassVar[bool] = False
    #: Whether it does so by :class:`~coterie.strategies.model_search.ModelSearch`, from ``max-clusters`` models.
    searches: ClassVar[bool] = False
    #: Whether the number of clusters grows during a run; ``clusters`` is then an upper bound, by default 0: no bound.
    grows: ClassVar[bool] = False
    #: Defaults of the method for common settings, by key, where they differ from the settings' own.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Published privacy claims that give no guarantee, and why; for certificates without privacy.
    unfounded: ClassVar[tuple[str, ...]] = ()

    plan: Plan

    @classmethod
    def check(
        cls,
        plan: Plan,
        *,
        reseeding: Reseeding | None = None,
        rebalance_train: str = "own",
        aggregator: Aggregator | None = None,
    ) -> None:
        """Check that a method supports a plan and options.

        Raises:
            StrategyError: it does not.
        """
        _check_unit(cls, plan)
        if rebalance_train not in REBALANCE_TRAIN:
            raise StrategyError(f"rebalance-train must be {' or '.join(REBALANCE_TRAIN)}, not {rebalance_train!r}")
        if rebalance_train == "assigned" and not (plan.redraws and cls.knows_label):
            raise StrategyError(
                "rebalance-train = 'assigned' requires that labels are redrawn before training: use mechanism joint "
                "(or no privacy), and a method that chooses labels before training"
            )
        if not cls.clustered and plan.num_clusters != 1:
            raise StrategyError(f"clusters = {plan.num_clusters}: {cls.name} trains one model; set it to 1")
        if plan.rebalance_min and "client" not in cls.units:
            raise StrategyError(f"{cls.name} does not support rebalancing; set rebalance-min to 0")
        if not cls.clustered and plan.rebalance_min:
            raise StrategyError(f"{cls.name} has no clusters to rebalance; set rebalance-min to 0")
        if reseeding and reseeding.every and not plan.identifier_share and plan.private:
            raise StrategyError("re-seeding requires released cluster sizes: set identifier_share above 0")
        if aggregator and aggregator.robust:
            _check_robust(cls, plan, aggregator.name)

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
        found: dict[str, Any] = {}
        if not cls.clustered:
            found |= {"clusters": 1, "reseed-every": 0}
        if "client" not in cls.units or unit == "record":  # all clients take part, and no sizes are released
            found |= {"sampling-rate": 1.0, "reseed-every": 0}
        return found | ({"clusters": 0} if cls.grows else {}) | dict(cls.defaults)

    def assignments(self, number: int) -> Mapping[int, int] | None:
        """The cluster of every client after round ``number`` if the server assigns it; None if clients choose.

        Clients without a cluster are not evaluated.
        """
        return None

    @property
    def shared(self) -> int:
        """Number of leading coordinates that all clusters share."""
        return 0


def _check_unit(method: type[Method], plan: Plan) -> None:
    row_wise = getattr(method, "row_wise", None)
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


def _check_robust(method: type[Method], plan: Plan, name: str) -> None:
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


def check_schedule(
    plan: Plan, reseeding: Reseeding | None, averaging: Averaging | None, evaluate: str, evaluations: int, memory: bool
) -> None:
    """Check the schedule of averaging and evaluation.

    Args:
        plan, reseeding, averaging, evaluate: of the run.
        evaluations: number of evaluations in the run.
        memory: whether clients keep state between rounds.

    Raises:
        StrategyError: it does not match the plan.
    """
    latest = 1 - (reseeding.until if reseeding else 0.0)
    if averaging and not 0 <= averaging.last <= latest:
        raise StrategyError(
            f"average-last = {averaging.last:g} must lie between 0 and {latest:g}, so that averaging begins after the "
            "last re-seeding"
        )
    if evaluate not in ("diagnostic", "private"):
        raise StrategyError(f"evaluate must be diagnostic or private, not {evaluate!r}")
    if evaluate == "private" and plan.evaluations < evaluations:
        raise StrategyError(f"the plan covers {plan.evaluations} private evaluations; the run has {evaluations}")
    if evaluate == "private" and memory and not plan.evaluates_memory:
        raise StrategyError(
            f"evaluate = 'private': the proof of mechanism {plan.mechanism} with secret participation does not cover "
            "evaluations of clients that keep state between rounds; set participation to visible, or evaluate to off"
        )
