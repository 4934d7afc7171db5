"""Which plans and options a method supports."""

from __future__ import annotations

from typing import ClassVar, Protocol

from coterie.privacy import Plan
from coterie.rounds import Aggregator, Averaging, StrategyError
from coterie.strategies.reseeding import Reseeding

#: Which model a client trains after rebalancing changed its label.
REBALANCE_TRAIN = ("own", "assigned")


class Method(Protocol):
    """The declarations that are checked; see :class:`~coterie.strategies.ClusteredStrategy`."""

    name: ClassVar[str]
    units: ClassVar[tuple[str, ...]]
    clustered: ClassVar[bool]
    knows_label: ClassVar[bool]
    robust: ClassVar[bool]
    memory: ClassVar[bool]


def check_support(
    method: type[Method], plan: Plan, reseeding: Reseeding | None, rebalance_train: str, aggregator: Aggregator | None
) -> None:
    """Check that a method supports a plan and options.

    Raises:
        StrategyError: it does not.
    """
    _check_unit(method, plan)
    if rebalance_train not in REBALANCE_TRAIN:
        raise StrategyError(f"rebalance-train must be {' or '.join(REBALANCE_TRAIN)}, not {rebalance_train!r}")
    if rebalance_train == "assigned" and not (plan.redraws and method.knows_label):
        raise StrategyError(
            "rebalance-train = 'assigned' needs clients that know their new label before they train: mechanism "
            "joint (or no privacy), and a method that chooses before it trains"
        )
    if not method.clustered and plan.num_clusters != 1:
        raise StrategyError(f"{method.name} trains one model; it was asked for {plan.num_clusters} clusters")
    if plan.rebalance_min and "client" not in method.units:
        raise StrategyError(f"{method.name} has nothing to rebalance: set rebalance-min to 0")
    if not method.clustered and plan.rebalance_min:
        raise StrategyError(f"{method.name} has no clusters to rebalance; set rebalance-min to 0")
    if reseeding and reseeding.every and not plan.identifier_share and plan.private:
        raise StrategyError("re-seeding reads cluster sizes: it needs a plan with identifier_share above 0")
    if aggregator and aggregator.robust:
        _check_robust(method, plan, aggregator.name)


def _check_unit(method: type[Method], plan: Plan) -> None:
    row_wise = getattr(method, "row_wise", None)
    if plan.unit == "client" and row_wise is None:
        raise StrategyError(
            f"{method.name} does not declare row_wise, which client-level privacy needs: set row_wise = True if a "
            "client's label is a function of its own data and released values alone, else False"
        )
    units = [unit for unit in method.units if row_wise is not False or unit != "client"]
    if plan.unit not in units:
        why = ": it places a client by looking at others, which no client-level proof covers"
        raise StrategyError(
            f"{method.name} supports privacy-unit {' or '.join(units)}, not {plan.unit!r}"
            f"{why if row_wise is False else ''}"
        )
    if method.memory and not plan.memory:
        raise StrategyError(
            f"{method.name} keeps something at the clients between rounds, which the proof of mechanism "
            f"{plan.mechanism} does not cover; use mechanism joint"
        )


def _check_robust(method: type[Method], plan: Plan, name: str) -> None:
    if plan.unit == "client":
        raise StrategyError(
            f"aggregator = {name} needs privacy-unit record or none: client-level noise covers one client's part "
            "of a sum, which clipping bounds by C; one client can move a median or Krum's choice further than "
            "C / n, and the server keeps no single update; use mean"
        )
    if not method.robust:
        raise StrategyError(
            f"{method.name} supports aggregator mean, not {name}: it does not move its models by one step of each "
            "cluster's updates alone"
        )
    if plan.unit == "none" and plan.divisor != "released":
        raise StrategyError(f"aggregator = {name} has no divisor: set divisor to auto, not {plan.divisor}")


def check_schedule(
    plan: Plan, reseeding: Reseeding | None, averaging: Averaging | None, evaluate: str, evaluations: int
) -> None:
    """Check the rounds of averaging and evaluation.

    Raises:
        StrategyError: they do not fit the plan.
    """
    latest = 1 - (reseeding.until if reseeding else 0.0)
    if averaging and not 0 <= averaging.last <= latest:
        raise StrategyError(
            f"average-last = {averaging.last:g} must be at least 0, and must begin after the last re-seeding: "
            f"at most {latest:g}"
        )
    if evaluate not in ("diagnostic", "private"):
        raise StrategyError(f"evaluate must be diagnostic or private, not {evaluate!r}")
    if evaluate == "private" and plan.evaluations < evaluations:
        raise StrategyError(f"the plan pays for {plan.evaluations} private evaluations, fewer than there will be")
