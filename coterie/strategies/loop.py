"""The loop of a run: exchanges, checkpoints and evaluations, until the last round or the end of the budget."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie.privacy import BudgetError, Event, NothingReleasedError, Summed, epsilon
from coterie.rounds.client_registry import ClientRegistry
from coterie.rounds.evaluation import EvaluationExchange
from coterie.rounds.exchange import TRANSPORT_ERRORS, Exchange, PartialSums, SupportsSums
from coterie.rounds.masked_evaluation import MaskedEvaluation
from coterie.rounds.masked_exchange import MaskedExchange, MaskedSum
from coterie.rounds.phases import Phase, SumsPhase
from coterie.rounds.recorder import Checkpoint
from coterie.rounds.run_state import Run, StrategyError
from coterie.strategies.method import Method, Models
from coterie.strategies.post_processing import finish_round
from coterie.wire import EvaluateRequest
from coterie.wire.messages import DIVERGED, pack_models, unpack_models

if TYPE_CHECKING:
    from coterie.strategies.strategy import ClusteredStrategy

# Artifact of a run: the heads of its clients.
_HEADS = "heads"
# Attempts to receive a reply from silent clients, where too few replies come.
_ATTEMPTS = 3
# Rounds without any finite update after which a run ends, and the largest parameter of a model that did not diverge.
_HOPELESS, _LARGEST = 3, 1e9


def run_rounds(
    strategy: ClusteredStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
) -> Result:
    """Run all rounds after the last checkpoint; see ``ClusteredStrategy.start``."""
    run, recorder = strategy.run, strategy.recorder
    models, mean, first = _starting_point(strategy, initial_arrays)
    _recalibrate(strategy, first, num_rounds)
    run.registry.wait_for_all(grid)
    _warn_of_refused_evaluation(strategy)
    result = Result()
    last, diverged = first, False

    def evaluate(number: int, last: bool = True) -> dict[str, Any]:
        metrics = _evaluate(strategy, grid, number, result.arrays, evaluate_config, timeout, last)
        if metrics is not None:
            result.evaluate_metrics_clientapp[number] = metrics
        return dict(metrics or {})

    result.arrays = pack_models(models if mean is None else mean, run.state.layout)
    try:
        numbers = _rounds_to_run(run, first, num_rounds)
        for number in numbers:
            if strategy.finished:
                break
            started = time.perf_counter()
            _require_clients(strategy, grid, number, session_begins=number == numbers[0])
            models, metrics = _train(strategy, grid, number, models, train_config, timeout)
            run.state = run.state.resized(len(models))
            mean = strategy.options.averaging(mean, models, number, num_rounds)
            result.arrays = pack_models(models if mean is None else mean, run.state.layout)
            line = _line(run, number, metrics) | {"seconds": time.perf_counter() - started}
            state = run.state
            recorder.checkpoint(Checkpoint(number, models, state.layout, state.histogram, mean, state.arrays), line)
            _keep_heads(strategy)
            last = number
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            ends = number == numbers[-1] or strategy.finished
            if strategy.evaluation_due(number, last=ends):
                line |= evaluate(number, ends)
            if evaluate_fn and (central := evaluate_fn(number, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = central
            line |= _participation(strategy, number) | {"seconds": time.perf_counter() - started}
            recorder.round_finished(line)
            diverged = _check_divergence(run, models, number, number - first, diverged)
        # It was killed before the last evaluation, which is charged once.
        if last == first and strategy.evaluation_due(first, last=True) and first not in run.ledger.evaluated_rounds:
            evaluate(first)
    except BudgetError as refused:
        run.state = replace(run.state, stopped=str(refused))
        log(WARNING, "stopped by the budget: %s", refused)
    return result


# ---- the exchanges of a round -----------------------------------------------------------------------------


class TrainingRound:
    """One round of a method, to iterate over its exchanges and to collect the replies of each.

    Args:
        method: whose generator yields the phases.
        number: of the round.
        models: (k, d).

    Attributes:
        models: after the last exchange, the (k', d) new models.
        metrics: after the last exchange, those of the round.
    """

    def __init__(self, method: Method, number: int, models: Models) -> None:
        self._method, self._number, self._before = method, number, models
        self.models, self.metrics = models, MetricRecord()

    def __iter__(self) -> Iterator[Exchange[Any, Any]]:
        steps = self._method.round(self._number, self.models)
        phase = next(steps)
        while True:
            exchange = _exchange(self._method.run, phase, self._number)
            yield exchange
            try:
                released = exchange.release()
            except NothingReleasedError as skipped:  # of a method with sums: one phase a round
                steps.close()
                self.models, self.metrics = self._before, _skipped(self._method.run, self._number, skipped)
                return
            try:
                phase = steps.send(released)
            except StopIteration as stop:
                self.models, self.metrics = finish_round(self._method, self._number, stop.value, released)
                return


def _skipped(run: Run, number: int, reason: NothingReleasedError) -> MetricRecord:
    """Note that a round is skipped; return its metrics."""
    log(WARNING, "round %s is skipped: %s; its charge stays", number, reason, extra={"round": number})
    run.state = replace(run.state, notes={**run.state.notes, "skipped": str(reason)})
    return MetricRecord({"epsilon": run.ledger.spent(), "epsilon_rdp": run.ledger.spent("rdp")})


def configure_clients(method: Method, config: Mapping[str, Any], number: int) -> None:
    """Set the configuration for clients in round ``number``, with the step size of the round."""
    run = method.run
    run.state = replace(run.state, config=dict(config))
    if "lr" in config:
        run.state = replace(run.state, config={**config, "lr": config["lr"] * method.step_size(number)})


def open_evaluation(
    method: Method, number: int, models: Models, config: ConfigRecord, *, last: bool = True
) -> EvaluationExchange | MaskedEvaluation:
    """An evaluation of models by the registered clients, or by those that evaluate.

    What takes long is of the last round only: exact diagnostics of all held-out records, of training losses that choose
    nothing, and of models that clients fit to their own records.
    """
    run, options = method.run, method.options
    run.state = replace(run.state, config=dict(config))
    clients = method.present
    if options.evaluate != "private" and 0 < options.evaluate_clients < len(clients):
        present = [client for client in run.evaluation_order if client in run.registry.nodes]
        clients = sorted(present[: options.evaluate_clients])
    aggregate = options.evaluate_metrics_aggr_fn
    request = method.evaluation()
    if isinstance(request, EvaluateRequest):
        private = options.evaluate == "private"
        request = replace(
            request,
            personalize=options.personalize if last or private else None,
            private=private,
            histogram=private and last and run.plan.histograms > 0,
            sampled=not (last or private),
        )
    assigned = method.assignments(number)
    if run.plan.clients_keep_ledgers and options.evaluate == "private":
        request = replace(request, record_plans=run.plan.record_plans)
        if assigned is None:  # by labels that are released: a choice now would depend on training records
            assigned = dict.fromkeys(clients, 0) if len(models) == 1 else run.statistics.labels
    if run.masks and isinstance(request, EvaluateRequest) and request.private:
        return MaskedEvaluation(run, request, number, models, clients, assigned=assigned is not None)
    return EvaluationExchange(run, request, number, models, assigned, aggregate, clients)


def _train(
    strategy: ClusteredStrategy, grid: Grid, number: int, models: Models, config: ConfigRecord, timeout: float
) -> tuple[Models, MetricRecord | None]:
    """Run the exchanges of a round; return its models and metrics."""
    configure_clients(strategy, config, number)
    training = TrainingRound(strategy, number, models)
    for exchange in training:
        if isinstance(exchange, MaskedExchange):
            _collect_masked(grid, exchange, timeout)
        else:
            exchange.collect(_replies(strategy, grid, exchange, exchange.batch.messages.values(), timeout))
    return training.models, training.metrics


def _exchange(run: Run, phase: Phase[Any, Any], number: int) -> Exchange[Any, Any]:
    if run.masks and isinstance(phase, SumsPhase):
        return MaskedExchange(run, phase, number)
    return Exchange(run, phase, number)


def _collect_masked(grid: Grid, exchange: MaskedExchange | MaskedSum, timeout: float) -> None:
    steps = exchange.steps()
    messages = next(steps, None)
    while messages is not None:
        try:
            messages = steps.send(_send(grid, messages, timeout))
        except StopIteration:
            return


def _evaluate(
    strategy: ClusteredStrategy,
    grid: Grid,
    number: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    timeout: float,
    last: bool,
) -> MetricRecord | None:
    """The metrics of an evaluation; None without any."""
    exchange = open_evaluation(strategy, number, unpack_models(arrays)[0], config, last=last)
    if isinstance(exchange, MaskedEvaluation):
        for masked in exchange:
            _collect_masked(grid, masked, timeout)
        return exchange.released
    return strategy.evaluated(exchange, _send(grid, exchange.batch.messages.values(), timeout))


def _replies(
    strategy: ClusteredStrategy, grid: Grid, exchange: Exchange[Any, Any], messages: Iterable[Message], timeout: float
) -> Iterator[Message]:
    """Replies in order of arrival; silent clients receive the request again if replies are too few.

    Partial sums of simulated clients are merged into the exchange.

    Raises:
        StrategyError: too few replies after all attempts.
    """
    messages, batch, number = list(messages), exchange.batch, exchange.request.round
    min_replies, client_level = strategy.options.min_replies, strategy.plan.unit == "client"
    least = 0 if client_level else math.ceil(min_replies * len(messages) - 1e-9)
    silent = set(batch.messages)
    for attempt in range(1, _ATTEMPTS + 1):
        for reply in _received(grid, messages, timeout, exchange.new_sums):
            if isinstance(reply, PartialSums):
                silent -= exchange.merge(reply)
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
        f"{min_replies:g}; completed rounds are saved: check the clients, then resume"
    )


def _received(
    grid: Grid, messages: Iterable[Message], timeout: float, new_sums: Callable[[], Summed] | None
) -> Iterable[Message | PartialSums]:
    if new_sums is not None and isinstance(grid, SupportsSums):
        return grid.send_and_sum(_timed(messages, timeout), new_sums)
    return _send(grid, messages, timeout)


def _send(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
    return grid.send_and_receive(_timed(messages, timeout), timeout=timeout)


def _timed(messages: Iterable[Message], timeout: float) -> list[Message]:
    """The messages, which expire after ``timeout`` seconds."""
    messages = list(messages)
    for message in messages:
        message.metadata.ttl = timeout
    return messages


# ---- before and after rounds ------------------------------------------------------------------------------


def _starting_point(strategy: ClusteredStrategy, initial_arrays: ArrayRecord) -> tuple[Models, Models | None, int]:
    """Models, their mean, and the last completed round."""
    run, checkpoint = strategy.run, strategy.options.resume_from
    models, layout = unpack_models(initial_arrays)
    run.state = replace(run.state, layout=layout)
    models = strategy.initial_models(models)
    if checkpoint is not None:
        run.state = replace(run.state, layout=checkpoint.layout).resized(len(checkpoint.models))
        kept = strategy.recorder.load_artifact(_HEADS) if run.plan.clients_keep_ledgers else None
        if kept is not None:
            run.heads = dict(zip(kept["clients"].tolist(), kept["heads"].tolist(), strict=True))
        return checkpoint.models, checkpoint.mean, checkpoint.round
    if run.plan.clients_keep_ledgers:  # after a crash in round 1, clients receive the same request again
        strategy.recorder.checkpoint(Checkpoint(0, models, layout, None, None, {}), {})
    return models, None, 0


def _keep_heads(strategy: ClusteredStrategy) -> None:
    """Store the heads of clients, which only deployed clients at record level send."""
    if heads := strategy.run.heads:
        arrays = {"clients": np.array(list(heads), np.int64), "heads": np.array(list(heads.values()))}
        strategy.recorder.save_artifact(_HEADS, arrays)


def _rounds_to_run(run: Run, done: int, rounds: int) -> list[int]:
    """The rounds after ``done``, without those that a crash ended after their charge, if these must not be repeated."""
    remaining = range(done + 1, rounds + 1)
    if run.plan.repeats_rounds:
        return list(remaining)
    if lost := run.ledger.training_rounds.intersection(remaining):
        log(
            WARNING,
            "round(s) %s are skipped: they were charged before a crash, and their clients cannot contribute again; "
            "epsilon and noise stay as planned",
            ", ".join(map(str, sorted(lost))),
        )
    return [number for number in remaining if number not in lost]


def _recalibrate(strategy: ClusteredStrategy, done: int, rounds: int) -> None:
    """After a crash that wasted charges: recalibrate the noise of the remaining rounds to the budget."""
    plan, spent, remaining = strategy.plan, strategy.ledger.events, rounds - done
    if plan.clients_keep_ledgers:  # every client has its own ledger, and drops out when its budget is spent
        return
    if not plan.repeats_rounds:  # every planned round is charged once
        return
    if strategy.options.evaluate == "private" and (every := strategy.options.evaluate_every):
        spent += Counter({plan.evaluation_event(): strategy.evaluations(rounds, every) - done // every})
        spent += Counter({plan.histogram_event(): plan.histograms}) - strategy.ledger.events

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
    strategy.run.state = replace(strategy.run.state, plan=plan.recalibrated(noise))


def _warn_of_refused_evaluation(strategy: ClusteredStrategy) -> None:
    """Warn before the first round if the run evaluates and clients have announced that they refuse."""
    refusing, registered = strategy.registry.unevaluated, len(strategy.registry.nodes)
    charged = strategy.plan.clients_keep_ledgers and strategy.options.evaluate == "private"
    if refusing and not charged and strategy.options.evaluate_every:
        some = ", ".join(map(str, sorted(refusing)[:10])) + (", ..." if len(refusing) > 10 else "")
        log(
            WARNING,
            "%s of %s registered clients refuse evaluation, which their guarantees do not cover (clients %s); scores "
            "are of the others: set evaluate = off, or diagnostics = true in their node configurations",
            len(refusing),
            registered,
            some,
        )


def _require_clients(strategy: ClusteredStrategy, grid: Grid, number: int, *, session_begins: bool) -> None:
    """Update the registered clients before a round.

    Raises:
        StrategyError: no client is registered, so that a charge would buy nothing; or fewer than ``min_clients`` are.
            At client level the first applies to the begin of a session only, the second to round 1 only: later the end
            of a run would reveal who is present.
    """
    registry = strategy.registry
    required = session_begins or strategy.plan.unit != "client"
    enough = registry.wait_for(grid, max(int(required), strategy.options.min_clients))
    if required and not registry.nodes:
        raise StrategyError(
            f"round {number}: no client is registered after {registry.wait:g} s; nothing was charged for it, and "
            f"completed rounds are saved: {_to_do(registry)}, then resume"
        )
    if not enough and (strategy.plan.unit != "client" or not strategy.ledger.charges):
        raise StrategyError(
            f"round {number}: {len(registry.nodes)} clients are registered after {registry.wait:g} s, fewer than "
            f"min-clients = {strategy.options.min_clients}; completed rounds are saved: {_to_do(registry)}, then resume"
        )
    _require_consent(strategy, number)


def _to_do(registry: ClientRegistry) -> str:
    """What the operator does about missing clients."""
    if not registry.silent:
        return "check the clients"
    return (
        f"{len(registry.silent)} nodes are online and have not sent their client-id; if they are still starting, "
        "increase registration-timeout"
    )


def _require_consent(strategy: ClusteredStrategy, number: int) -> None:
    """State how many clients refused to be trained; none is known to where participants are secret.

    Raises:
        StrategyError: at record level, fewer than ``min_clients`` of the registered ones did not refuse.
    """
    statistics, nodes = strategy.statistics, strategy.registry.nodes
    refusing = {client: kind for client, kind in statistics.refusing.items() if client in nodes}
    if not refusing:
        return
    registered, least = len(nodes), strategy.options.min_clients
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(Counter(refusing.values()).items()))
    text = f"{len(refusing)} of {registered} registered clients refuse to be trained ({kinds})"
    if strategy.plan.clients_keep_ledgers and registered - len(refusing) < least:
        raise StrategyError(
            f"round {number}: {text}, so that fewer than min-clients = {least} take part; completed rounds are saved: "
            "agree on settings that the clients accept, or resume with fewer"
        )
    log(WARNING, "round %s: %s", number, text, extra={"round": number})


def _line(run: Run, number: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics of a round, from released values."""
    line: dict[str, Any] = {"round": number, **(metrics or {})}
    moves = line.pop("reseeded", [])
    line["reseeded"] = [moves[i : i + 2] for i in range(0, len(moves), 2)]  # pairs: from, to
    if run.state.notes:
        line["notes"] = run.state.notes
        run.state = replace(run.state, notes={})
    return line


def _check_divergence(run: Run, models: Models, number: int, done: int, diverged: bool) -> bool:
    """Return whether models diverged in this round or before, with a warning for the first; no reply ends a run alone.

    Raises:
        StrategyError: no client gave a valid reply in `_HOPELESS` rounds because training diverged. At client level,
            where rounds are released regardless of replies, the run goes on.
    """
    statistics = run.statistics
    hopeless = run.plan.unit != "client" and done >= _HOPELESS and not statistics.accepted
    if hopeless and any(reason.endswith(DIVERGED) for reason in statistics.dropped):
        raise StrategyError(f"round {number}: no client has sent a valid update")
    largest = float(np.abs(models).max(initial=0.0))
    if diverged or largest <= _LARGEST:
        return diverged
    log(WARNING, "round %s: a parameter of the models is %.3g: %s", number, largest, DIVERGED)
    return True


def _participation(strategy: ClusteredStrategy, number: int) -> dict[str, Any]:
    """Clients, replies and traffic of a round; nothing at client level, where cohorts are secret."""
    run, refusing = strategy.run, strategy.statistics.refusing
    if refusing:
        clients = {str(client): kind for client, kind in refusing.items()}
        strategy.options.audit("refusals", round=number, clients=clients)
    counts = run.statistics.next_round()
    if run.plan.unit == "client":
        return {}
    replies = counts["replies"]
    if replies["asked"] and not replies["accepted"]:
        reason = next(iter(replies["dropped"]), "no client replied")
        text = "none of %s replies of this round could be used; first: %s"
        log(WARNING, text, replies["asked"], reason, extra={"reason": reason})
    return {**counts, "clients_present": len(run.registry.nodes)}
