"""What a resumed run may change: when it stops, and the number of its rounds, within the budget that is left."""

from __future__ import annotations

from collections import Counter
from typing import Any

from coterie.privacy import Ledger, Plan, RecordLevel
from coterie.privacy.ledger_lines import count_events
from coterie.server.config import RunConfig
from coterie.server.planning import sizes_until

_ROUNDS, _STOP = "rounds", "stop-after"
_FROM = "start a new run from its models: coterie run --from RUN"


class ContinuationError(RuntimeError):
    """A run cannot continue as asked; nothing was changed."""


def accepted_changes(stored: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the changed settings of a resumed run: ``stop-after``, and a larger number of ``rounds``.

    Args:
        stored: configuration of the run so far.
        config: the requested one.

    Raises:
        ContinuationError: other settings differ, or ``stop-after`` would end the run before its further rounds.
    """
    changed = differences(stored, config)
    accepted = {_STOP} | ({_ROUNDS} if config.run.rounds > stored.run.rounds else set())
    refused = {name: values for name, values in changed.items() if name not in accepted}
    if refused:
        what = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in refused.items())
        fewer = "; to end the run earlier, set stop-after" if _ROUNDS in refused else ""
        raise ContinuationError(
            f"was run with other settings ({what}), which cannot change on resume; omit them, or start a new run with "
            f"another --out{fewer}"
        )
    if _ROUNDS in changed and config.privacy.privacy_unit == RecordLevel.unit:
        raise _fixed(stored.run.rounds, RecordLevel.fixed_rounds)
    if _ROUNDS in changed and 0 < config.run.stop_after <= stored.run.rounds:
        raise ContinuationError(
            f"stops after round {config.run.stop_after}, before the further rounds: add --set stop-after=0"
        )
    # The kinds of charges follow from the plan: only where they end may depend on what was released.
    end, planned = config.run.stop_after or config.run.rounds, stored.run.rounds
    every = config.evaluation.evaluate_every
    if changed and config.evaluation.evaluate == "private" and end != planned and end % every:
        raise ContinuationError(
            f"evaluates privately every {every} rounds: it can go on to round {planned}, or to a multiple of {every}, "
            f"not to round {end}"
        )
    return {name: new for name, (_, new) in changed.items()}


def differences(stored: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ, with both values; paths, timeouts and ports are ignored."""
    old, new = stored.values, config.values
    return {
        name: (old.get(name), new.get(name))
        for name, declared in {**stored.declared, **config.declared}.items()
        if not declared.place and old.get(name) != new.get(name)
    }


def extended_plan(plan: Plan, config: RunConfig, done: int, ledger: Ledger) -> Plan:
    """Return the plan with the rounds that the configuration has beyond it, at the same noise.

    Args:
        plan: under which the ledger was opened.
        config: configuration of the resumed run.
        done: rounds that are completed.
        ledger: ledger of the run.

    Raises:
        ContinuationError: the mechanism has no further rounds, or they do not fit the budget that is left.
    """
    rounds = config.run.rounds
    if rounds <= plan.rounds:
        return plan
    if plan.fixed_rounds:
        raise _fixed(plan.rounds, plan.fixed_rounds)
    evaluation, histogram = plan.evaluation_event(), plan.histogram_event()
    private = config.evaluation.evaluate == "private"
    if private and done < plan.rounds:
        raise ContinuationError(f"has {plan.rounds - done} planned rounds left: finish them with stop-after = 0 first")
    every = config.evaluation.evaluate_every  # and after the last round
    due = sum(number % every == 0 or number == rounds for number in range(done + 1, rounds + 1)) if private else 0
    evaluated = count_events(ledger.charges)[evaluation] if private else 0
    terms = {"rounds": rounds, "evaluations": due + evaluated, "sizes_until": sizes_until(config)}
    besides = ledger.events + Counter({evaluation: due})
    if plan.histograms:
        terms["histograms"] = 1 + count_events(ledger.charges)[histogram]
        besides += Counter({histogram: 1})
    extended = plan.extended(terms)
    if extended.private and (most := extended.affordable_rounds(+besides, rounds - done)) < rounds - done:
        possible = f"at most {done + most} rounds fit" if most else "no further round fits"
        raise ContinuationError(
            f"has a budget of epsilon {extended.epsilon:g}, in which {possible} at noise multiplier "
            f"{extended.noise_multiplier:.4g}, not {rounds}; a budget never grows. For a new budget, {_FROM}"
        )
    return extended


def _fixed(rounds: int, reason: str) -> ContinuationError:
    return ContinuationError(f"cannot have more than {rounds} rounds: {reason}; {_FROM}")


def extension(plan: Plan) -> dict[str, int]:
    """Return the terms of an extended plan that its charges state."""
    terms = plan.terms()
    return {name: terms[name] for name in ("rounds", "evaluations", "sizes_until", "histograms") if name in terms}
