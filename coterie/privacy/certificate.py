"""The certificate: what a run guarantees, to whom, at which price, and what lies outside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from coterie.privacy.accounting import Event, accountant_name, epsilon
from coterie.privacy.plan import Plan

_OUTSIDE = (
    "what holds for real-valued noise only: the noise is drawn in float64",
    "other runs on the same clients: their epsilons add up",
    "settings chosen by looking at exact diagnostics or at other runs on the same clients",
    "who takes part in a round: the amplification holds against those who cannot see it",
)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def certificate(
    plan: Plan, events: Sequence[Event], *, seed: int | None, diagnostics: Sequence[str], public: dict[str, Any]
) -> dict[str, Any]:
    """The certificate of a run, as JSON-ready values (null stands for infinity).

    A run that was ended early is certified at its planned number of rounds.

    Args:
        plan: as planned before the first round.
        events: every charge ever made, in order.
        seed: of the run; anything but None makes it a simulation.
        diagnostics: what was computed from client data outside the mechanism.
        public: further public inputs, such as the smallest allowed cluster.
    """
    reasons = []
    if not plan.private:
        reasons.append("no privacy was asked for (privacy-unit = none)")
    elif seed is not None:
        reasons.append(f"seeded noise (seed {seed}), for simulation only: whoever knows the seed can remove it")
    planned = [*events, *([plan.event()] * max(0, plan.rounds - len(events)))]
    cost = epsilon(planned, plan.delta)
    rdp = epsilon(planned, plan.delta, "rdp")
    visible = epsilon([Event(1.0, event.noise_multiplier) for event in planned], plan.delta)
    if plan.private and not cost <= plan.epsilon * (1 + 1e-9):
        reasons.append(f"the charges amount to epsilon {cost:.4f}, above the budget of {plan.epsilon:g}")
    return {
        "certified": not reasons,
        "reasons": reasons,
        "unit": plan.unit,
        "adjacency": "add/remove one client, at a fixed public number of clients",
        "mechanism": plan.mechanism,
        "epsilon": _finite(cost),
        "epsilon_budget": _finite(plan.epsilon),
        "delta": plan.delta if plan.private else None,
        "epsilon_rdp": _finite(rdp),
        "epsilon_participation_visible": _finite(visible),
        "accountant": accountant_name("pld"),
        "sampler": "poisson",
        "sampling_rate": plan.sampling_rate,
        "rounds": plan.rounds,
        "charges": len(events),
        "charged": [
            {"sampling_rate": event.sampling_rate, "noise_multiplier": event.noise_multiplier, "charges": count}
            for event, count in Counter(events).items()
        ],
        "clip_norm": _finite(plan.clip_norm),
        "noise_multiplier": plan.noise_multiplier,
        "noise_multiplier_updates": plan.noise_multiplier_updates,
        "noise_multiplier_counts": plan.noise_multiplier_counts,
        "public_inputs": {"clients": plan.clients, "clusters": plan.num_clusters, **public},
        "outside": [*diagnostics, *_OUTSIDE] if plan.private else [],
    }
