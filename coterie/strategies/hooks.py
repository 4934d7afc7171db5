"""Flower's four hooks, for a server that calls them itself instead of ``start``; subclasses override none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coterie.rounds.exchange import Exchange
from coterie.rounds.run_state import StrategyError
from coterie.strategies.loop import configure_clients, evaluation_steps, exchanges, training_steps
from coterie.strategies.method import Method
from coterie.wire.messages import check_trainable, pack_models, unpack_models

# What a subclass overrides instead of each hook (docs/extending.md).
_INSTEAD = {
    "configure_train": "round, or training for the request alone",
    "aggregate_train": "round, or step for the update of the models alone",
    "configure_evaluate": "evaluation",
    "aggregate_evaluate": "evaluated",
}


class FlowerHooks(Method, Strategy):
    """The hooks of ``flwr.serverapp.strategy.Strategy`` on the exchanges of a method.

    Raises:
        TypeError: of a subclass that overrides a hook.
    """

    _exchange: Exchange[Any, Any] | None = None
    _training: Iterator[Exchange[Any, Any]]
    _evaluation: tuple[Exchange[Any, Any], Iterator[Exchange[Any, Any]]] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for hook, instead in _INSTEAD.items():
            if getattr(cls, hook) is not getattr(FlowerHooks, hook):
                raise TypeError(f"{cls.__name__} overrides {hook}, which no run calls: override {instead}")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages of the method's next phase to a newly sampled cohort."""
        if self.run.masks:
            raise StrategyError("masked rounds have four exchanges, which start() sends")
        self._check_arrays(arrays)
        models, layout = unpack_models(arrays)
        self.run.state = replace(self.run.state, layout=layout)
        configure_clients(self, config, server_round)
        if not self.run.registry.nodes:
            self.run.registry.wait_for_all(grid)
        if self._exchange is None or self._exchange.request.round != server_round:
            self._training = exchanges(self.run, training_steps(self, server_round, models), server_round)
            self._exchange = next(self._training)
        return list(self._exchange.batch.messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate and clip replies on arrival, then charge, release and update.

        The models are None while phases of this round remain.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            raise StrategyError("aggregate_train was called before configure_train")
        exchange.collect(replies)
        try:
            self._exchange = next(self._training)
        except StopIteration as end:
            models, metrics = end.value
            return pack_models(models, self.layout), metrics
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Messages with all k models, or each client's own, to every registered client."""
        if self.run.masks and self.options.evaluate == "private":
            raise StrategyError("masked evaluations have four exchanges, which start() sends")
        models, layout = unpack_models(arrays)
        self.run.state = replace(self.run.state, layout=layout)
        opened = exchanges(self.run, evaluation_steps(self, server_round, models, config), server_round)
        exchange = next(opened)
        self._evaluation = exchange, opened
        return list(exchange.batch.messages.values())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What ``evaluated`` returns; None before ``configure_evaluate``."""
        if self._evaluation is None:
            return None
        (exchange, opened), self._evaluation = self._evaluation, None
        exchange.collect(replies)
        try:
            next(opened)
        except StopIteration as end:
            metrics: MetricRecord | None = end.value
        return metrics

    def _check_arrays(self, arrays: ArrayRecord) -> None:
        try:
            check_trainable(arrays, private=self.plan.private)
        except ValueError as error:
            raise StrategyError(str(error)) from None
