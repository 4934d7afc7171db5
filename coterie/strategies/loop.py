"""The loop of a run: exchanges, checkpoints and evaluations, until the last round or the end of the budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie.privacy import BudgetError, Event, NothingReleasedError, Released, epsilon
from coterie.rounds.client_registry import ClientRegistry
from coterie.rounds.evaluation import EvaluatePhase, LabelPhase, ScoresPhase
from coterie.rounds.exchange import Exchange
from coterie.rounds.recorder import Checkpoint
from coterie.rounds.run_state import Run, StrategyError
from coterie.strategies.method import Method, Models, Steps, T
from coterie.strategies.post_processing import finish_round
from coterie.wire import EvaluateRequest, LabelRequest
from coterie.wire.messages import DIVERGED, pack_models, unpack_models

if TYPE_CHECKING:
    from coterie.strategies.strategy import ClusteredStrategy

# Artifact of a run: the heads of its clients.
_HEADS = "heads"
# Released labels, (clients, 2) with the numbers of the clients, in the arrays of a checkpoint.
_LABELS = "released-labels"
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
        steps = evaluation_steps(strategy, number, unpack_models(result.arrays)[0], evaluate_config, last=last)
        metrics = _performed(strategy, grid, timeout, steps, number)
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
            configure_clients(strategy, train_config, number)
            models, metrics = _performed(strategy, grid, timeout, training_steps(strategy, number, models), number)
            run.state = run.state.resized(len(models))
            mean = strategy.options.averaging(mean, models, number, num_rounds)
            result.arrays = pack_models(models if mean is None else mean, run.state.layout)
            line = _line(run, number, metrics) | {"seconds": time.perf_counter() - started}
            _keep(strategy, Checkpoint(number, models, run.state.layout, run.state.histogram, mean), line)
            last = number
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


def exchanges(run: Run, steps: Steps[T], number: int) -> Generator[Exchange[Any, Any], None, T]:
    """Yield an exchange for each phase of a round, to be performed; return what the steps return."""
    answer: Any = None
    while True:
        try:
            phase = steps.throw(answer) if isinstance(answer, NothingReleasedError) else steps.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        exchange = Exchange(run, phase, number)
        yield exchange
        try:
            answer = exchange.release()
        except NothingReleasedError as reason:
            answer = reason


def training_steps(method: Method, number: int, models: Models) -> Steps[tuple[Models, MetricRecord]]:
    """The phases of a method's round; return the (k', d) new models and the metrics of the round."""
    run, steps, released = method.run, method.round(number, models), None
    try:
        while True:
            released = yield steps.send(released)
    except StopIteration as end:
        return finish_round(method, number, end.value, cast(Released, released))
    except NothingReleasedError as reason:  # of a method with sums: one phase a round
        steps.close()
        log(WARNING, "round %s is skipped: %s; its charge stays", number, reason, extra={"round": number})
        run.state = replace(run.state, notes={**run.state.notes, "skipped": str(reason)})
        return models, MetricRecord({"epsilon": run.ledger.spent(), "epsilon_rdp": run.ledger.spent("rdp")})


def evaluation_steps(
    method: Method, number: int, models: Models, config: ConfigRecord, *, last: bool = True
) -> Steps[MetricRecord | None]:
    """The phases of an evaluation by the registered clients, or by those that evaluate; return its metrics.

    What takes long is of the last round only: exact diagnostics of all held-out records, of training losses that choose
    nothing, and of models that clients fit to their own records.
    """
    run, options = method.run, method.options
    run.state = replace(run.state, config=dict(config))
    clients, private = method.present, options.evaluate == "private"
    if not private and 0 < options.evaluate_clients < len(clients):
        present = [client for client in run.evaluation_order if client in run.registry.nodes]
        clients = present[: options.evaluate_clients]
    request = method.evaluation()
    if isinstance(request, EvaluateRequest):
        request = replace(
            request,
            personalize=options.personalize if last or private else None,
            private=private,
            histogram=private and last and run.plan.histograms > 0,
            sampled=not (last or private),
        )
    assigned = method.assignments(number)
    if run.plan.clients_keep_ledgers and private:
        request = replace(request, record_plans=run.plan.record_plans)
        if assigned is None:  # by labels that are released: a choice now would depend on training records
            assigned = dict.fromkeys(clients, 0) if len(models) == 1 else run.statistics.labels
    kind = LabelPhase if isinstance(request, LabelRequest) else ScoresPhase if private else EvaluatePhase
    requests = [request]
    if run.masks and isinstance(request, EvaluateRequest) and request.histogram:
        requests = [replace(request, histogram=False), request]  # a masked round for each sum
    metrics: MetricRecord | None = None
    for each in requests:
        phase = kind(each, models, assigned, clients, aggregate=options.evaluate_metrics_aggr_fn)
        try:
            released = yield from phase.run()
            metrics = released if metrics is None else MetricRecord({**metrics, **(released or {})})
        except NothingReleasedError as reason:
            log(WARNING, "a private evaluation is skipped: %s; its charge stays", reason)
    return method.evaluated(metrics)


def _performed(strategy: ClusteredStrategy, grid: Grid, timeout: float, steps: Steps[T], number: int) -> T:
    """Perform the exchanges of all phases; return what the steps return."""
    opened = exchanges(strategy.run, steps, number)
    while True:
        try:
            exchange = next(opened)
        except StopIteration as end:
            return cast(T, end.value)
        exchange.perform(grid, timeout, strategy.options.min_replies)


def configure_clients(method: Method, config: Mapping[str, Any], number: int) -> None:
    """Set the configuration for clients in round ``number``, with the step size of the round."""
    run = method.run
    run.state = replace(run.state, config=dict(config))
    if "lr" in config:
        run.state = replace(run.state, config={**config, "lr": config["lr"] * method.step_size(number)})


# ---- before and after rounds ------------------------------------------------------------------------------


def _starting_point(strategy: ClusteredStrategy, initial_arrays: ArrayRecord) -> tuple[Models, Models | None, int]:
    """Models, their mean, and the last completed round."""
    run, checkpoint = strategy.run, strategy.options.resume_from
    models, layout = unpack_models(initial_arrays)
    run.state = replace(run.state, layout=layout)
    models = strategy.initial_models(models)
    if checkpoint is not None:
        arrays = dict(run.state.arrays)
        run.statistics.labels = dict(arrays.pop(_LABELS, np.zeros((0, 2), np.int64)).tolist())
        run.state = replace(run.state, layout=checkpoint.layout, arrays=arrays).resized(len(checkpoint.models))
        kept = strategy.recorder.load_artifact(_HEADS) if run.plan.clients_keep_ledgers else None
        if kept is not None:
            run.heads = dict(zip(kept["clients"].tolist(), kept["heads"].tolist(), strict=True))
        return checkpoint.models, checkpoint.mean, checkpoint.round
    if run.plan.clients_keep_ledgers:  # after a crash in round 1, clients receive the same request again
        strategy.recorder.checkpoint(Checkpoint(0, models, layout, None, None, {}), {})
    return models, None, 0


def _keep(strategy: ClusteredStrategy, checkpoint: Checkpoint, line: Mapping[str, Any]) -> None:
    """Store a checkpoint with the arrays of the run and the released labels, and the heads of deployed clients."""
    arrays, labels, heads = dict(strategy.run.state.arrays), strategy.statistics.labels, strategy.run.heads
    if labels:
        arrays[_LABELS] = np.array(sorted(labels.items()), np.int64)
    strategy.recorder.checkpoint(replace(checkpoint, state=arrays), line)
    if heads:
        kept = {"clients": np.array(list(heads), np.int64), "heads": np.array(list(heads.values()))}
        strategy.recorder.save_artifact(_HEADS, kept)


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
    required = session_begins or not strategy.plan.hides_clients
    enough = registry.wait_for(grid, max(int(required), strategy.options.min_clients))
    if required and not registry.nodes:
        waited = "" if registry.plain_apps else f" after {registry.wait:g} s"
        raise StrategyError(
            f"round {number}: no client is registered{waited}; nothing was charged for it, and "
            f"completed rounds are saved: {_to_do(registry)}, then resume"
        )
    if not enough and not (strategy.plan.hides_clients and strategy.ledger.charges):
        raise StrategyError(
            f"round {number}: {len(registry.nodes)} clients are registered after {registry.wait:g} s, fewer than "
            f"min-clients = {strategy.options.min_clients}; completed rounds are saved: {_to_do(registry)}, then resume"
        )
    _require_consent(strategy, number)


def _to_do(registry: ClientRegistry) -> str:
    """What the operator does about missing clients."""
    if registry.plain_apps:
        return (
            f"the app of {registry.plain_apps} nodes is a ClientApp: replace it by a ClusteredClientApp "
            "(docs/existing-app.md)"
        )
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


def _line(run: Run, number: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a round, from released values."""
    line: dict[str, Any] = {"round": number, **metrics}
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
    hopeless = not run.plan.hides_clients and done >= _HOPELESS and not statistics.accepted
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
    if run.plan.hides_clients:
        return {}
    replies = counts["replies"]
    if replies["asked"] and not replies["accepted"]:
        reason = next(iter(replies["dropped"]), "no client replied")
        text = "none of %s replies of this round could be used; first: %s"
        log(WARNING, text, replies["asked"], reason, extra={"reason": reason})
    return {**counts, "clients_present": len(run.registry.nodes)}
