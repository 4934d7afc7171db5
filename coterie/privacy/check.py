"""Verification of a run's certificate: everything is derived again from the ledger."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.files import FileError, read_lines
from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.accounting import composed, composed_further, epsilon
from coterie.privacy.certificate import COMPOSED, ODDS, certificate, plan_in_force
from coterie.privacy.ledger_lines import (
    HELD_OUT,
    LedgerError,
    count_of,
    earlier_events,
    event_of,
    held_out_epsilon,
    read_chained,
)
from coterie.privacy.manifest import card_of
from coterie.privacy.record import RecordPlan
from coterie.privacy.statement import Guarantee

# Tolerance for rounding in another order, or by another version of a library.
_TOLERANCE = 1e-6
# Key of the version that derived a certificate, which is not part of the guarantee.
_VERSION = "coterie"
# Key of what the guarantee does not cover.
_OUTSIDE = "outside"
_WAY_OUT = "restore it from a copy, or start a new run with another --out: this run is not certified"


def verified(run: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the charges of a run folder's ledger, verified against the folder's other files.

    The checkpoint stores the number of charges when it was written, and the chain of the last one. Every round of the
    checkpoint and of metrics.jsonl must have a charge.

    Raises:
        LedgerError: the ledger is missing, damaged, too short or of another run, or a file that it is compared with
            is damaged.
    """
    run = Path(run)
    ledger = run / "ledger.jsonl"
    try:  # read the ledger last, so that it is never behind the other files of a running run
        checkpoint = checkpoint_facts(run / "checkpoint" / "state.safetensors")
        metrics = run / "metrics.jsonl"
        lines = read_lines(metrics) if metrics.exists() else []
        for number, line in enumerate(lines, 1):
            if not isinstance(line.get("round"), int):
                raise FileError(f"{metrics}, line {number}, does not describe a round")
    except FileError as error:
        raise LedgerError(f"{error}; {_WAY_OUT}") from None
    try:
        header, charges, chains = read_chained(ledger)
    except LedgerError as error:
        text = str(error)
        raise LedgerError(text if "restore" in text else f"{text}; {_WAY_OUT}") from None
    recorded, chain = checkpoint.get("charges", 0), checkpoint.get("chain")
    if recorded > len(charges):
        raise LedgerError(
            f"{ledger} contains {len(charges)} charges, but the checkpoint was written after {recorded}; {_WAY_OUT}"
        )
    if chain and chains[recorded] != chain:
        raise LedgerError(
            f"{ledger} does not match the checkpoint: their chains differ at charge {recorded}; {_WAY_OUT}"
        )
    plan = header.get("plan")
    plan = plan if isinstance(plan, Mapping) else {}
    if plan.get("mechanism") == RecordPlan.mechanism:  # rounds may be free of charge
        return header, charges
    rounds = {"the checkpoint": checkpoint.get("round", 0)}
    rounds["metrics.jsonl"] = max((line["round"] for line in lines), default=0)
    charged = max((charge["round"] for charge in charges), default=0)
    for what, last in rounds.items():
        if last > charged:
            raise LedgerError(
                f"{what} of {run} is at round {last}, but the last charge in {ledger.name} is for round {charged}; "
                f"{_WAY_OUT}"
            )
    for planned, key, what in (
        ("evaluations", "accuracy", "evaluation"),
        ("histograms", "score_histogram", "histogram"),
    ):
        released = {line["round"] for line in lines if key in line} if plan.get(planned) else set()
        for number in sorted(released - {c["round"] for c in charges if c.get("for", "evaluation") == what}):
            raise LedgerError(
                f"metrics.jsonl of {run} contains a private {key.replace('_', ' ')} of round {number}, but no charge "
                f"for it is in {ledger.name}; {_WAY_OUT}"
            )
    return header, charges


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint without its tensors; empty if there is no checkpoint.

    Raises:
        FileError: the checkpoint is damaged.
    """
    if not path.exists():
        return {}
    metadata = card_of(path)
    numbers = [metadata.get("round"), metadata.get("charges", 0)]
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or not isinstance(metadata.get("chain", ""), str):
        raise FileError(f"{path} is damaged: it contains no checkpoint")
    return metadata


def check(
    header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]], stated: Mapping[str, Any] | None
) -> list[str]:
    """Return the problems of a run's ledger and certificate; empty if the certificate matches the ledger.

    Every charge must be for a release of the plan and state the epsilon of all charges up to it, all charges must fit
    the budget, and ``stated`` must follow from them. Versions of software may differ.

    Args:
        header: first line of the ledger.
        charges: its other lines.
        stated: contents of privacy.json; None if it does not exist yet.

    Raises:
        LedgerError: ``header`` contains no plan.
    """
    plan = _plan(header, charges)
    problems = []
    for key, planned in (("delta", plan.delta), ("epsilon", plan.epsilon), ("accountant", plan.accountant)):
        if not _same(header.get(key), _finite(planned)):
            problems.append(f"the ledger has {key} = {_format(header.get(key))}, but its plan has {_format(planned)}")
    allowed = plan.planned()
    so_far, spent = earlier_events(header), 0.0
    live = {plan.accountant: composed(so_far, plan.accountant)}
    problems += _unplanned_held_out(plan, charges)
    for charge in (charge for charge in charges if HELD_OUT not in charge):
        event, name = event_of(charge), f"charge {charge['charge']} (round {charge['round']})"
        problems += [f"{name} {problem}" for problem in _unplanned(plan, allowed, charge, event)]
        try:
            live = composed_further(live, so_far, event, count_of(charge), plan.budget)
        except PrivacyError as error:
            return [*problems, f"the charges cannot be composed: {error}"]
        so_far[event] += count_of(charge)
        spent = live[plan.accountant].epsilon(plan.delta)
        if not _same(charge.get("epsilon", "nothing"), _finite(spent)):  # or it is of a version without rounded counts
            spent = epsilon(so_far, plan.delta, plan.accountant)
        if not _same(charge.get("epsilon", "nothing"), _finite(spent)):
            recorded = _format(charge.get("epsilon", "nothing"))
            problems.append(f"{name} records epsilon {recorded}, but the charges up to it amount to {_format(spent)}")
    if not spent <= plan.epsilon * (1 + _TOLERANCE):
        problems.append(f"the charges amount to epsilon {_format(spent)}, above the budget of {plan.epsilon:g}")
    if stated is not None:
        follows = certificate(header, charges)
        for key, value, derived in _differences(_unversioned(stated), _unversioned(follows)):
            if _is_missing_earlier(key, value, header):
                continue
            if key == _OUTSIDE and COMPOSED not in stated and _same(value, _outside_earlier(plan, derived)):
                continue  # it was written by a version that says less
            problems.append(f"privacy.json has {key} = {_format(value)}, but the ledger gives {_format(derived)}")
    return problems


def _is_missing_earlier(key: str, value: Any, header: Mapping[str, Any]) -> bool:
    """Whether an earlier version writes certificates without an entry.

    Either the entry states no guarantee, or the plan of the ledger lacks the term, too.
    """
    later_term = key.rpartition(".")[2] in _LATER and _LATER.isdisjoint(header["plan"])
    return value is _Absent and (key in (COMPOSED, ODDS) or later_term)


def _outside_earlier(plan: Guarantee, outside: Sequence[str]) -> list[str]:
    """Return what a certificate of version 0.2.0 says of what is outside."""
    later = {precondition.outside for precondition in plan.statement.preconditions if precondition.later}
    return [text for text in outside if text not in later]


def _unplanned_held_out(plan: Guarantee, charges: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield in which the releases of held-out records exceed that of the plan."""
    planned = plan.held_out_epsilon if isinstance(plan, RecordPlan) else 0.0
    if (spent := held_out_epsilon(charges)) > planned * (1 + _TOLERANCE):
        yield f"the charges of held-out records amount to epsilon {spent:g}, but {planned:g} is planned"


def _unplanned(plan: Guarantee, allowed: Mapping[Event, int], charge: Mapping[str, Any], event: Event) -> Iterator[str]:
    """Yield in which the release of a charge differs from those of the plan."""
    least = [e.noise_multiplier for e in allowed if _sampling(e) == _sampling(event)]
    if not least:
        yield f"is for {event.sampler} sampling at rate {event.sampling_rate:g}, which is not planned"
    elif event.noise_multiplier < min(least):
        yield f"has noise {event.noise_multiplier:g}, less than the planned {min(least):g}"
    if (slot := _slot(plan, charge)) != event.slot:
        yield f"is for slot {event.slot}, but its round is of slot {slot}"


def _plan(header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]]) -> Guarantee:
    try:
        return plan_in_force(header, charges)
    except (AttributeError, KeyError, TypeError, ValueError, PrivacyError) as error:
        raise LedgerError(
            f"the ledger contains no plan known to this version ({error}): use the version that wrote it"
        ) from None


def _slot(plan: Guarantee, charge: Mapping[str, Any]) -> int | None:
    """Return the slot of a charge; None: it concerns all clients."""
    return None if charge.get("for") in ("evaluation", "histogram") else plan.slot(charge["round"])


def _sampling(event: Event) -> tuple[str, float]:
    return event.sampler, event.sampling_rate


def _unversioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """Remove software versions, because another version derives the same certificate."""
    rest = {key: value for key, value in document.items() if key != _VERSION}
    if "accountant" in rest:
        rest["accountant"] = re.sub(r" \d[^,]*(?=,)", "", str(rest["accountant"]))
    return rest


def _differences(stated: Any, derived: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, stated, derived) for every difference of two documents; nested keys are joined by dots."""
    if isinstance(stated, Mapping) and isinstance(derived, Mapping):
        for name in dict.fromkeys([*derived, *stated]):
            inside = f"{key}.{name}" if key else str(name)
            yield from _differences(stated.get(name, _Absent), derived.get(name, _Absent), inside)
    elif not _same(stated, derived):
        yield key, stated, derived


#: Entries of a plan that version 0.2.0 has not; a plan without them has their defaults.
_LATER = frozenset({"clip_share", "clip_factor"})


class _Absent:
    """Placeholder for a key that one of two documents lacks."""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        try:
            return math.isclose(one, other, rel_tol=_TOLERANCE)
        except OverflowError:  # an integer beyond floats
            return one == other
    return bool(one == other)


def _finite(value: Any) -> Any:
    """Replace infinity by None, as in JSON."""
    return None if value == math.inf else value


def _format(value: Any) -> str:
    return "nothing" if value is _Absent else json.dumps(_finite(value), ensure_ascii=False)
