"""Check a run's certificate against its ledger: everything is derived again, nothing is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.privacy.accounting import composed
from coterie.privacy.certificate import certificate, plan_of
from coterie.privacy.ledger import event_of
from coterie.privacy.plan import Plan

# Rounding of sums in another order, or by another version of a library.
_TOLERANCE = 1e-6


def check(
    header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]], stated: Mapping[str, Any] | None
) -> list[str]:
    """What is wrong with a run's papers; an empty list when the certificate follows from the ledger.

    Args:
        header: first line of the ledger.
        charges: its other lines.
        stated: privacy.json as it stands; None if the run has not written it yet.
    """
    problems = []
    plan = plan_of(header["plan"])
    for key, planned in (("delta", plan.delta), ("epsilon", plan.epsilon), ("accountant", plan.accountant)):
        said = math.inf if header[key] is None else header[key]
        if said != planned:
            problems.append(f"the ledger keeps {key} = {said}, but the plan in it has {planned}")
    live = composed([], plan.accountant)
    for charge in charges:
        event, name = event_of(charge), f"charge {charge['charge']} (round {charge['round']})"
        live.compose(event)
        if isinstance(plan, Plan):
            allowed = [plan.event(), plan.evaluation_event()]
            if (event.sampler, event.sampling_rate) not in [(e.sampler, e.sampling_rate) for e in allowed]:
                problems.append(
                    f"{name} is for {event.sampler} sampling at {event.sampling_rate:g}, which is not planned"
                )
            if event.noise_multiplier < min(e.noise_multiplier for e in allowed):
                problems.append(f"{name} has noise {event.noise_multiplier:g}, less than planned")
        recorded = math.inf if charge["epsilon"] is None else charge["epsilon"]
        spent = live.epsilon(plan.delta)
        if not _close(recorded, spent):
            problems.append(f"{name} says that epsilon was {recorded:.6g} after it; the charges amount to {spent:.6g}")
    derived = certificate(header, charges)
    if stated is not None:
        for key in dict.fromkeys([*derived, *stated]):
            if not _same(derived.get(key), stated.get(key)):
                problems.append(f"privacy.json says {key} = {stated.get(key)!r}; it follows that {derived.get(key)!r}")
    return problems


def _close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_TOLERANCE)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return _close(one, other)
    return bool(one == other)
