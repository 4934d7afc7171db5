"""Base class of all strategies: a run and its certificate.

A method (one file per paper) defines a round, which yields phases; each phase is one exchange of
:mod:`coterie.rounds`. :meth:`ClusteredStrategy.start` runs the rounds. :mod:`coterie.strategies.method` documents the
declarations of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie.fields.settings import Settings
from coterie.privacy import Plan, Streams, certificate
from coterie.rounds.client_registry import ClientRegistry
from coterie.rounds.run_state import Run, RunState, StrategyError
from coterie.strategies import adaptive_clipping
from coterie.strategies.hooks import FlowerHooks
from coterie.strategies.loop import run_rounds
from coterie.strategies.method import FloatArray
from coterie.strategies.options import StrategyOptions


class ClusteredStrategy(FlowerHooks):
    """A Flower ``Strategy`` that trains one model per cluster under a privacy plan. Each run needs its own instance.

    Args:
        plan: participation, per-round release and privacy cost; also M, k and T.
        settings: of the method, a :attr:`settings_class`; None: its defaults.
        options: of the run.
        keywords: further options, by name, as fields of :class:`StrategyOptions`.

    Attributes:
        run: the run and its state.
        clusters: the resolved number of clusters; 0: determined by the method.
        max_clusters: number of clusters of the plan.
        ledger, streams, registry, statistics: of the run.
        recorder: of the options.

    Raises:
        StrategyError: the method does not support the plan's unit, rebalancing, number of clusters, or an option.
    """

    def __init__(
        self, plan: Plan, settings: Settings | None = None, options: StrategyOptions | None = None, **keywords: object
    ) -> None:
        self.settings = settings or self.settings_class()
        if type(self.settings) is not self.settings_class:
            raise StrategyError(f"{self.name} requires {self.settings_class.__name__}, not {type(settings).__name__}")
        self.options = options = replace(options or StrategyOptions(), **keywords)  # type: ignore[arg-type]
        self.max_clusters = plan.num_clusters
        unset = 0 if self.grows else self.max_clusters
        self.clusters = unset if options.clusters is None else options.clusters
        checkpoint = options.resume_from
        arrays = dict(checkpoint.state) if checkpoint else {}
        self.run = Run(
            ledger=options.ledger or plan.ledger(),
            streams=options.streams or Streams(),
            registry=ClientRegistry(plan.clients, options.registration_timeout, options.roster, options.audit),
            aggregator=options.aggregator,
            rebalance_train=options.rebalance_train,
            masks=options.masks,
            state=RunState(
                adaptive_clipping.resumed(plan, arrays),
                histogram=checkpoint.histogram if checkpoint else None,
                arrays=arrays,
            ),
        )
        self.ledger, self.streams = self.run.ledger, self.run.streams
        self.registry, self.statistics = self.run.registry, self.run.statistics
        self.recorder = options.recorder
        self.check()

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
            StrategyError: more rounds than planned, or an array that is no parameter.
        """
        self._check_arrays(initial_arrays)
        if num_rounds > self.plan.rounds:
            raise StrategyError(f"num_rounds = {num_rounds} exceeds the {self.plan.rounds} rounds of the plan")
        self.summary()
        train = train_config or ConfigRecord()
        return run_rounds(self, grid, initial_arrays, num_rounds, timeout, train, evaluate_config or train, evaluate_fn)

    def certificate(self) -> dict[str, Any]:
        """The certificate of the run so far, JSON-ready, derived from the ledger; see docs/privacy.md.

        Its epsilon covers the charges made and the remaining planned rounds. A run with a seed is not certified.
        """
        exact = self.options.evaluate == "diagnostic" and self.options.evaluate_every
        header = {
            "diagnostics": ["what clients send in evaluations, exact, and its means"] if exact else [],
            "unfounded": list(self.unfounded),
            **self.plan.ledger().header,
            **self.ledger.header,
        }
        if not self.streams.secret:
            header["seed"] = self.streams.seed
        return certificate(header, self.ledger.charges)

    @property
    def stopped(self) -> str | None:
        """Reason why the run ended before its last round; None otherwise."""
        return self.run.state.stopped

    @property
    def histogram(self) -> FloatArray | None:
        """(k,) running mean of released histograms; None before the first."""
        return self.run.state.histogram

    def membership(self, number: int) -> Mapping[int, int]:
        """The cluster of each client after round ``number``: assigned, or of its latest released label.

        Empty at client level, where labels are not released.
        """
        if self.plan.hides_clients:
            return {}
        assigned = self.assignments(number)
        return self.statistics.labels if assigned is None else assigned

    def summary(self) -> None:
        """Log the method and the plan."""
        log(INFO, "%s: %s", self.name, self.title)
        log(INFO, "\t%s", self.plan)
