"""The certificate: what a run guarantees, to whom, at which price, and what lies outside.

It is derived from the ledger alone: the plan stands in its first line, the charges in the others. So anybody can
derive it again (``coterie privacy check RUN``). Its JSON schema is ``privacy.schema.json`` beside this file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from coterie.privacy.accountants import ACCOUNTANTS, Event, VisibleAccountant, accountant_title
from coterie.privacy.accounting import composed, epsilon
from coterie.privacy.ledger import counted
from coterie.privacy.plan import Plan, certifies
from coterie.privacy.record import RecordPlan

_OUTSIDE = (
    "what holds for real-valued noise only: the noise is drawn in float64",
    "other runs on the same clients: their epsilons add up",
    "settings and checkpoints chosen by looking at exact diagnostics or at other runs on the same clients",
)
_HIDDEN = "{}: the amplification by sampling holds against those who cannot see it"
# Rounding of a budget that a calibration met exactly.
_SLACK = 1 + 1e-9


def plan_of(terms: Mapping[str, Any]) -> Plan | RecordPlan:
    """The plan that a ledger's first line or a certificate describes."""
    if terms["mechanism"] == RecordPlan.mechanism:
        return RecordPlan(**{key: value for key, value in terms.items() if key != "mechanism"})
    return Plan.of_terms(terms)


def certificate(header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The certificate of a run, as JSON-ready values (null stands for infinity).

    A run that was ended early is certified at its planned number of rounds, or at what its budget allows of them.

    Args:
        header: first line of the run's ledger: ``plan``; ``seed`` (null for secret randomness); ``diagnostics``
            (what was computed from client data outside the mechanism); ``public`` (further public inputs);
            ``tuned`` (settings that the guarantee takes as given, and what they were); ``unfounded`` (claims about the
            method that give no guarantee, and why).
        charges: its other lines, in order.
    """
    plan, seed = plan_of(header["plan"]), header.get("seed")
    charged = counted(charges)
    events = _with_what_is_planned(plan, charged)
    by_accountant = {name: epsilon(events, plan.delta, name) for name in _accountants(plan)}
    cost = by_accountant[plan.accountant]
    reasons = plan.reasons() + ([] if plan.private else list(header.get("unfounded", ())))
    if plan.private and seed is not None:
        reasons.append(f"seeded noise (seed {seed}), for simulation only: whoever knows the seed can remove it")
    if plan.private and not certifies(plan.accountant):
        reasons.append(f"counted by {plan.accountant}, which does not certify (pld and rdp do)")
    if plan.private and not math.isfinite(cost):
        reasons.append("the charges have so little noise that epsilon is infinite")
    if plan.private and not cost <= plan.epsilon * _SLACK:
        reasons.append(f"the charges amount to epsilon {cost:.4f}, above the budget of {plan.epsilon:g}")
    visible = VisibleAccountant()
    for event, count in events.items():
        visible.compose(event, count)
    hidden = "which records are in a batch" if isinstance(plan, RecordPlan) else "who takes part"
    outside = [*header.get("diagnostics", ()), *_OUTSIDE, _HIDDEN.format(hidden)] if plan.private else []
    return {
        "certified": not reasons,
        "reasons": reasons,
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "mechanism": plan.mechanism,
        "epsilon": _finite(cost),
        "epsilon_budget": _finite(plan.epsilon),
        "delta": plan.delta if plan.private else None,
        "accountant": accountant_title(plan.accountant),
        "accountants": {name: _finite(value) for name, value in by_accountant.items()},
        "epsilon_participation_visible": _finite(visible.epsilon(plan.delta)),
        "sampler": plan.sampler,
        "rounds": plan.rounds,
        "charges": len(charges),
        "charged": [
            {
                "sampler": event.sampler,
                "sampling_rate": event.sampling_rate,
                "noise_multiplier": event.noise_multiplier,
                "charges": count,
            }
            for event, count in charged.items()
        ],
        "public_inputs": {**plan.terms(), **_noises(plan), **header.get("public", {})},
        "tuned_outside": dict(header.get("tuned", {})),
        "covers": _covers(plan) if plan.private else [],
        "outside": outside,
        "coterie": version("coterie"),
    }


def _covers(plan: Plan | RecordPlan) -> list[str]:
    """The values to which epsilon applies."""
    if isinstance(plan, RecordPlan):
        return ["what clients send in training, and all that the server computes from it: models and clusters"]
    return [
        "the models of every round",
        *(["noisy cluster sizes"] if plan.noise_multiplier_counts is not None else []),
        *(["noisy mean accuracies of private evaluations"] if plan.evaluations else []),
    ]


def _with_what_is_planned(plan: Plan | RecordPlan, charged: Counter[Event]) -> Counter[Event]:
    """The charges, and at the planned noise the rounds and evaluations that are still to come."""
    if isinstance(plan, RecordPlan):
        planned = charged | plan.planned()
        if epsilon(planned, plan.delta, plan.accountant) <= plan.epsilon * _SLACK:
            return planned
        # Rounds were repeated after a crash: as many more as the ledger allows.
        part = plan.part(chooses=plan.selections > 0)

        def over(rounds: int) -> bool:
            more = charged + Counter({event: rounds * count for event, count in part.items()})
            return epsilon(more, plan.delta, plan.accountant) > plan.epsilon * _SLACK

        fit = bisect_left(range(1, plan.rounds + 1), True, key=over)
        return charged + Counter({event: fit * count for event, count in part.items() if fit})
    training = sum(count for event, count in charged.items() if not _is_evaluation(plan, event))
    evaluations = charged.total() - training
    planned = charged.copy()
    for event, count in plan.planned().items():
        done = evaluations if _is_evaluation(plan, event) else training
        planned[event] += max(0, count - done)
    if epsilon(planned, plan.delta, plan.accountant) <= plan.epsilon * _SLACK:
        return planned
    # More was planned than the budget allows, and the ledger refuses what does not fit: a public matter.
    so_far, event = composed(charged, plan.accountant), plan.event()
    rounds = range(1, planned[event] - charged[event] + 1)
    fit = bisect_left(
        rounds, True, key=lambda n: so_far.with_rounds(event, n).epsilon(plan.delta) > plan.epsilon * _SLACK
    )
    return charged + Counter({event: fit})


def _is_evaluation(plan: Plan, event: Event) -> bool:
    return bool(plan.evaluations) and event == plan.evaluation_event()


def _accountants(plan: Plan | RecordPlan) -> list[str]:
    """The plan's own first, then the others that cover its sampler; Opacus' answer slowly and are left out."""
    others = [name for name, a in ACCOUNTANTS.items() if plan.sampler in a.samplers and not name.startswith("opacus")]
    if plan.mechanism != "paper":
        others = [name for name in others if certifies(name)]
    return list(dict.fromkeys([plan.accountant, *others]))


def _noises(plan: Plan | RecordPlan) -> dict[str, float | None]:
    if isinstance(plan, RecordPlan):
        return {}
    return {
        "noise_multiplier_updates": plan.noise_multiplier_updates,
        "noise_multiplier_counts": plan.noise_multiplier_counts,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
