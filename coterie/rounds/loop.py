"""The loop of a run: exchanges, checkpoints and evaluations, until the last round or the end of the budget."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from coterie.privacy import BudgetError, Event, Ledger, Plan, epsilon
from coterie.rounds.averaging import Averaging
from coterie.rounds.client_registry import ClientRegistry
from coterie.rounds.context import Models, Statistics, StrategyError
from coterie.rounds.exchange import Exchange, MessageBatch, PartialSums, SupportsSums
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.wire.messages import DIVERGED, Layout, pack_models, unpack_models

#: Flower's transport errors: the node or its process is gone, or the time is over.
TRANSPORT_ERRORS = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
# Attempts to receive a reply from silent clients, where too few replies come.
_ATTEMPTS = 3
# Rounds without any finite update after which a run ends, and the largest parameter of a model that did not diverge.
_HOPELESS, _LARGEST = 3, 1e9


class RoundsStrategy(Strategy):
    """What :func:`run_rounds` uses of a strategy beside Flower's hooks.

    :class:`~coterie.strategies.ClusteredStrategy` documents the attributes.
    """

    plan: Plan
    layout: Layout
    histogram: npt.NDArray[np.float64] | None
    state: dict[str, npt.NDArray[Any]]
    notes: dict[str, Any]
    stopped: str | None
    ledger: Ledger
    registry: ClientRegistry
    statistics: Statistics
    recorder: Recorder
    averaging: Averaging
    resume_from: Checkpoint | None
    evaluate: str
    evaluate_every: int
    min_clients: int
    min_replies: float

    @property
    @abstractmethod
    def open_batch(self) -> MessageBatch | None:
        """The messages of the open exchange; None between exchanges."""

    @property
    @abstractmethod
    def open_sums(self) -> Exchange[Any, Any] | None:
        """The open exchange if the replies may be summed where the clients are simulated."""

    @abstractmethod
    def initial_models(self, models: Models) -> Models:
        """(k, d) initial models, from one model or from k."""

    @property
    def finished(self) -> bool:
        """Whether the method has converged: the run ends before its last planned round."""
        return False

    @staticmethod
    def evaluations(rounds: int, every: int) -> int:
        """Number of evaluations in ``rounds`` rounds: one every ``every`` rounds, and one after the last."""
        return math.ceil(rounds / every) if every else 0

    def evaluation_due(self, number: int, last: bool) -> bool:
        """Whether models are evaluated after round ``number``."""
        return bool(self.evaluate_every) and (number % self.evaluate_every == 0 or last)


def run_rounds(
    strategy: RoundsStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
) -> Result:
    """Run all rounds after the last checkpoint; see ``ClusteredStrategy.start``."""
    models, mean, first = _starting_point(strategy, initial_arrays)
    _recalibrate(strategy, first, num_rounds)
    await_clients(strategy.registry, grid)
    _warn_of_refused_evaluation(strategy)
    result = Result()
    last, diverged = first, False

    def evaluate(number: int) -> dict[str, Any]:
        messages = _timed(strategy.configure_evaluate(number, result.arrays, evaluate_config, grid), timeout)
        metrics = strategy.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=timeout))
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics
        return dict(metrics or {})

    arrays = pack_models(models, strategy.layout)
    result.arrays = arrays if mean is None else pack_models(mean, strategy.layout)
    try:
        numbers = _rounds_to_run(strategy, first, num_rounds)
        for number in numbers:
            if strategy.finished:
                break
            started = time.perf_counter()
            _require_clients(strategy, grid, number)
            arrays, metrics = _train(strategy, grid, number, arrays, train_config, timeout)
            models, strategy.layout = unpack_models(arrays)
            _resize(strategy, models)
            mean = strategy.averaging(mean, models, number, num_rounds)
            result.arrays = arrays if mean is None else pack_models(mean, strategy.layout)
            line = _line(strategy, number, metrics) | {"seconds": time.perf_counter() - started}
            checkpoint = Checkpoint(number, models, strategy.layout, strategy.histogram, mean, strategy.state)
            strategy.recorder.checkpoint(checkpoint, line)
            last = number
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            if strategy.evaluation_due(number, last=number == numbers[-1] or strategy.finished):
                line |= evaluate(number)
            if evaluate_fn and (central := evaluate_fn(number, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = central
            line |= _participation(strategy) | {"seconds": time.perf_counter() - started}
            strategy.recorder.round_finished(line)
            diverged = _check_divergence(strategy, models, number, number - first, diverged)
        if last == first and strategy.evaluation_due(first, last=True):  # killed before the last evaluation
            evaluate(first)
    except BudgetError as refused:
        strategy.stopped = str(refused)
        log(WARNING, "stopped by the budget: %s", refused)
    return result


def _starting_point(strategy: RoundsStrategy, initial_arrays: ArrayRecord) -> tuple[Models, Models | None, int]:
    """Models, their mean, and the last completed round."""
    models, strategy.layout = unpack_models(initial_arrays)
    models = strategy.initial_models(models)
    if (checkpoint := strategy.resume_from) is not None:
        strategy.layout = checkpoint.layout
        _resize(strategy, checkpoint.models)
        return checkpoint.models, checkpoint.mean, checkpoint.round
    if strategy.plan.clients_keep_ledgers:  # after a crash in round 1, clients receive the same request again
        strategy.recorder.checkpoint(Checkpoint(0, models, strategy.layout, None, None, {}), {})
    return models, None, 0


def _rounds_to_run(strategy: RoundsStrategy, done: int, rounds: int) -> list[int]:
    """The rounds after ``done``, without those that a crash ended after their charge, if these must not be repeated."""
    remaining = range(done + 1, rounds + 1)
    if strategy.plan.repeats_rounds:
        return list(remaining)
    if lost := strategy.ledger.training_rounds.intersection(remaining):
        log(
            WARNING,
            "round(s) %s are skipped: they were charged before a crash, and their clients cannot contribute again; "
            "epsilon and noise stay as planned",
            ", ".join(map(str, sorted(lost))),
        )
    return [number for number in remaining if number not in lost]


def _recalibrate(strategy: RoundsStrategy, done: int, rounds: int) -> None:
    """After a crash that wasted charges: recalibrate the noise of the remaining rounds to the budget."""
    plan, spent, remaining = strategy.plan, strategy.ledger.events, rounds - done
    if plan.clients_keep_ledgers:  # every client has its own ledger, and drops out when its budget is spent
        return
    if not plan.repeats_rounds:  # every planned round is charged once
        return
    if strategy.evaluate == "private" and (every := strategy.evaluate_every):
        spent += Counter({plan.evaluation_event(): strategy.evaluations(rounds, every) - done // every})

    def over(events: Counter[Event]) -> bool:
        return epsilon(events, plan.delta, plan.accountant) > plan.epsilon * (1 + 1e-9)

    wasted = len(strategy.ledger.charges) > done and remaining > 0
    if not wasted or over(plan.planned()) or not over(spent + Counter({plan.event(): remaining})):
        return
    noise = plan.noise_for(remaining, spent)
    log(
        WARNING,
        "charges were lost in a crash; to stay within epsilon = %g, the remaining %s round(s) use noise multiplier "
        "%.3f instead of %.3f",
        plan.epsilon,
        remaining,
        noise,
        plan.noise_multiplier,
    )
    strategy.plan = plan.recalibrated(noise)


def await_clients(registry: ClientRegistry, grid: Grid) -> None:
    """Wait until all clients have registered, or until the deadline."""
    if not registry.wait_for(grid, registry.clients):
        log(
            WARNING,
            "%s of %s clients are registered; the others do not participate until they register",
            len(registry.nodes),
            registry.clients,
        )


def _warn_of_refused_evaluation(strategy: RoundsStrategy) -> None:
    """Warn before the first round if the run evaluates and clients have announced that they refuse."""
    refusing, registered = strategy.registry.unevaluated, len(strategy.registry.nodes)
    if refusing and strategy.evaluate_every:
        some = ", ".join(map(str, sorted(refusing)[:10])) + (", ..." if len(refusing) > 10 else "")
        log(
            WARNING,
            "%s of %s registered clients refuse evaluation, which their own budgets do not cover (clients %s); scores "
            "are of the others: set evaluate = off, or diagnostics = true in their node configurations",
            len(refusing),
            registered,
            some,
        )


def _require_clients(strategy: RoundsStrategy, grid: Grid, number: int) -> None:
    """Update the registered clients before a round.

    Raises:
        StrategyError: fewer than ``min_clients`` are registered. At client level it applies to round 1 only.
    """
    registry = strategy.registry
    enough = registry.wait_for(grid, strategy.min_clients)
    if not enough and (strategy.plan.unit != "client" or not strategy.ledger.charges):
        raise StrategyError(
            f"round {number}: {len(registry.nodes)} clients are registered after {registry.wait:g} s, fewer than "
            f"min-clients = {strategy.min_clients}; completed rounds are saved: check the clients, then resume"
        )


def _train(
    strategy: RoundsStrategy, grid: Grid, number: int, arrays: ArrayRecord, config: ConfigRecord, timeout: float
) -> tuple[ArrayRecord, MetricRecord | None]:
    """Run exchanges until the models of the round are there."""
    while True:
        messages = strategy.configure_train(number, arrays, config, grid)
        replies = _replies(strategy, grid, number, strategy.open_batch, strategy.open_sums, messages, timeout)
        updated, metrics = strategy.aggregate_train(number, replies)
        if updated is not None:
            return updated, metrics


def _replies(
    strategy: RoundsStrategy,
    grid: Grid,
    number: int,
    batch: MessageBatch | None,
    sums: Exchange[Any, Any] | None,
    messages: Iterable[Message],
    timeout: float,
) -> Iterator[Message]:
    """Replies in order of arrival; silent clients receive the request again if replies are too few.

    Partial sums of simulated clients are merged into the exchange ``sums`` and are not yielded.

    Raises:
        StrategyError: too few replies after all attempts.
    """
    if batch is None:  # a subclass that sends messages of its own
        yield from grid.send_and_receive(_timed(messages, timeout), timeout=timeout)
        return
    messages = list(messages)
    least = 0 if strategy.plan.unit == "client" else math.ceil(strategy.min_replies * len(messages) - 1e-9)
    silent = set(batch.messages)
    for attempt in range(1, _ATTEMPTS + 1):
        for reply in _received(grid, sums, _timed(messages, timeout), timeout):
            if isinstance(reply, PartialSums):
                assert sums is not None
                silent -= sums.merge(reply)
                continue
            if least and reply.has_error() and reply.error.code in TRANSPORT_ERRORS:
                continue
            if (client := batch.client_of(reply)) is not None:
                silent.discard(client)
            yield reply
        short = least - (len(batch.messages) - len(silent))
        if short <= 0:
            return
        log(WARNING, "round %s, attempt %s: no reply from clients %s", number, attempt, sorted(silent))
        if attempt < _ATTEMPTS:
            strategy.registry.wait_for(grid, short, among=silent)
            messages = batch.repeat(silent)
    raise StrategyError(
        f"round {number}: no reply from clients {sorted(silent)} after {_ATTEMPTS} attempts, with min-replies = "
        f"{strategy.min_replies:g}; completed rounds are saved: check the clients, then resume"
    )


def _received(
    grid: Grid, sums: Exchange[Any, Any] | None, messages: list[Message], timeout: float
) -> Iterator[Message | PartialSums]:
    new_sums = None if sums is None else sums.new_sums
    if new_sums is not None and isinstance(grid, SupportsSums):
        return grid.send_and_sum(messages, new_sums)
    return iter(grid.send_and_receive(messages, timeout=timeout))


def _timed(messages: Iterable[Message], timeout: float) -> list[Message]:
    """The messages, which expire after ``timeout`` seconds."""
    messages = list(messages)
    for message in messages:
        message.metadata.ttl = timeout
    return messages


def _resize(strategy: RoundsStrategy, models: Models) -> None:
    """Adopt the number of clusters that the method found."""
    if len(models) != strategy.plan.num_clusters:
        strategy.plan = replace(strategy.plan, num_clusters=len(models))
    if strategy.histogram is not None and len(strategy.histogram) != len(models):
        strategy.histogram = None


def _line(strategy: RoundsStrategy, number: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics of a round, from released values."""
    line: dict[str, Any] = {"round": number, **(metrics or {})}
    moves = line.pop("reseeded", [])
    line["reseeded"] = [moves[i : i + 2] for i in range(0, len(moves), 2)]  # pairs: from, to
    if strategy.notes:
        line["notes"], strategy.notes = strategy.notes, {}
    return line


def _check_divergence(strategy: RoundsStrategy, models: Models, number: int, done: int, diverged: bool) -> bool:
    """Return whether models diverged in this round or before, with a warning for the first; no reply ends a run alone.

    Raises:
        StrategyError: no client gave a valid reply in `_HOPELESS` rounds because training diverged. At client level,
            where rounds are released regardless of replies, the run goes on.
    """
    statistics = strategy.statistics
    hopeless = strategy.plan.unit != "client" and done >= _HOPELESS and not statistics.accepted
    if hopeless and any(reason.endswith(DIVERGED) for reason in statistics.dropped):
        raise StrategyError(f"round {number}: no client has sent a valid update")
    largest = float(np.abs(models).max(initial=0.0))
    if diverged or largest <= _LARGEST:
        return diverged
    log(WARNING, "round %s: a parameter of the models is %.3g: %s", number, largest, DIVERGED)
    return True


def _participation(strategy: RoundsStrategy) -> dict[str, Any]:
    """Clients, replies and traffic of a round; nothing at client level, where cohorts are secret."""
    counts = strategy.statistics.next_round()
    if strategy.plan.unit == "client":
        return {}
    return {**counts, "clients_present": len(strategy.registry.nodes)}
