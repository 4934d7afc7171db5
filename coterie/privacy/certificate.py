"""The certificate: the guarantee of a run, its privacy unit and cost, and what it does not cover.

It is derived from the ledger only: the first line holds the plan, the others the charges. Anyone can verify it
(``coterie privacy check RUN``). Its JSON schema is ``privacy.schema.json`` in this folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from coterie.fields import finite
from coterie.privacy.accountants import (
    Accountant,
    Event,
    PldAccountant,
    PrivacyError,
    VisibleAccountant,
    events_of_a_client,
)
from coterie.privacy.accounting import ACCOUNTANTS, SLACK, accountant_title, certifies, epsilon
from coterie.privacy.ledger_lines import START, count_events, earlier_events, extended_terms, header_digest
from coterie.privacy.mechanisms import plan_from_terms
from coterie.privacy.record import RecordPlan
from coterie.privacy.statement import NO_EVENTS, Guarantee

#: Entry of a certificate: largest share of right guesses of an attacker.
ODDS = "attacker_right"
#: Entry of a certificate: the releases of which its costs are computed, of each profile.
COMPOSED = "composed"
#: Entry of the public inputs: column of the tables that names the unit of a record.
UNIT_COLUMN = "unit-column"
_OUTSIDE = (
    "what holds for real-valued noise only: the noise is drawn in float64",
    "other runs on the same clients: their epsilons add up",
    "settings and checkpoints chosen by looking at exact diagnostics or at other runs on the same clients",
)


def plan_of(terms: Mapping[str, Any]) -> Guarantee:
    """Return the plan described by a ledger's first line or a certificate.

    Examples:
        >>> from coterie.privacy import read_ledger
        >>> header, charges = read_ledger("runs/ifca/ledger.jsonl")
        >>> plan_of(header["plan"]).epsilon
        8.0
    """
    if terms["mechanism"] == RecordPlan.mechanism:
        return RecordPlan(**{key: value for key, value in terms.items() if key != "mechanism"})
    return plan_from_terms(terms)


def plan_in_force(header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]]) -> Guarantee:
    """Return the plan of a run, with the rounds by which later charges extended it."""
    return plan_of(header["plan"]).extended(extended_terms(charges))


def certificate(header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the certificate of a run as JSON-ready values (None stands for infinity).

    A run that stopped early is certified at its planned number of rounds, or at as many as its budget allows.

    Args:
        header: first line of the run's ledger: ``plan``; ``seed`` (null for secret randomness); ``diagnostics``
            (values computed from client data outside the mechanism); ``public`` (further public inputs); ``tuned``
            (settings whose selection the guarantee does not cover, with their values); ``unfounded`` (claims of the
            method that give no guarantee, with the reason).
        charges: the other lines, in order.

    Examples:
        >>> from coterie.privacy import read_ledger
        >>> stated = certificate(*read_ledger("runs/ifca/ledger.jsonl"))
        >>> stated["certified"], stated["unit"], stated["epsilon"] <= 8.0
        (True, 'client', True)
    """
    plan, charged = plan_in_force(header, charges), count_events(charges)
    profiles = _profiles(header, plan, charges)
    start = header.get(START)
    delta = min(profile.plan.delta for profile in profiles)
    by_accountant = {name: max(profile.epsilon(delta, name) for profile in profiles) for name in _accountants(plan)}
    cost = by_accountant[plan.accountant]
    reasons = _reasons(header, plan, profiles, charged, cost)
    stated = plan.statement
    return {
        "certified": not reasons,
        "reasons": reasons,
        "unit": plan.unit,
        "adjacency": _adjacency(plan, header),
        "mechanism": plan.mechanism,
        "epsilon_participation_visible": finite(max(visible_epsilon(profile.events, delta) for profile in profiles)),
        ODDS: max(profile.attacker_right() for profile in profiles),
        "epsilon": finite(cost),
        "epsilon_budget": finite(plan.epsilon),
        "delta": delta if plan.private else None,
        "accountant": accountant_title(
            "rdp" if 0 < cost == by_accountant.get("rdp", 0.0) < math.inf else plan.accountant
        ),
        "accountants": {name: finite(value) for name, value in by_accountant.items()},
        "profiles": [profile.described(delta) for profile in profiles] if plan.unit == "record" else [],
        COMPOSED: [_charged(events_of_a_client(profile.events)) for profile in profiles] if plan.private else [],
        "shared_budget": _shared_budget(charges),
        **({"started_from": _started_from(start)} if start else {}),
        "sampler": plan.sampler,
        "rounds": plan.rounds,
        "charges": len(charges),
        "charged": _charged(charged),
        "public_inputs": {**plan.terms(), **plan.noises(), **header.get("public", {})},
        "tuned_outside": {**header.get("tuned", {}), **({"rounds": plan.rounds} if extended_terms(charges) else {})},
        "covers": list(stated.covers) if plan.private else [],
        "outside": [*header.get("diagnostics", ()), *_OUTSIDE, *_other_clients(start), *stated.outside]
        if plan.private
        else [],
        "coterie": version("coterie"),
    }


def _adjacency(plan: Guarantee, header: Mapping[str, Any]) -> str:
    """Return what the guarantee protects; a record is a unit with all of its records if the tables have a column."""
    column = header.get("public", {}).get(UNIT_COLUMN)
    if plan.unit != "record" or column is None:
        return plan.adjacency
    return (
        f"add/remove all records of one client that have one value in column {str(column)!r}, such as all of a "
        "patient, at a fixed public number of such values"
    )


def visible_epsilon(events: Mapping[Event, int], delta: float) -> float:
    """Return epsilon at ``delta`` of all ``events`` together against those who observe which clients take part."""
    return _composed_once(VisibleAccountant, tuple(events_of_a_client(events).items())).epsilon(delta)


@lru_cache(maxsize=16)
def _composed_once(accountant: type[Accountant], events: tuple[tuple[Event, int], ...]) -> Accountant:
    """Return an accountant of these events, composed in this order, for whoever composes no others."""
    total = accountant()
    for event, count in events:
        total.compose(event, count)
    return total


def epsilon_observers(certificate: Mapping[str, Any]) -> float | None:
    """Return epsilon of a client-level certificate against those who observe participation; None: it is not larger."""
    if certificate.get("unit") != "client" or "epsilon_participation_visible" not in certificate:
        return None
    values = (certificate.get(name) for name in ("epsilon", "epsilon_participation_visible"))
    secret, shown = (math.inf if value is None else float(value) for value in values)
    return shown if shown > 1.01 * secret else None


def attacker_right(certificate: Mapping[str, Any], prior: float) -> float:
    """Return how often an attacker's guess can be right at most, as ``attacker_right`` of a certificate is for 1/2.

    Args:
        certificate: of a private run, with its releases (:data:`COMPOSED`).
        prior: in (0, 1/2], how likely the attacker thinks beforehand that the client, or the record, took part.
    """
    composed = [
        {Event(line["sampling_rate"], line["noise_multiplier"], line["sampler"]): line["charges"] for line in lines}
        for lines in certificate[COMPOSED]
    ]
    held_out = certificate["public_inputs"].get("held_out_epsilon", 0.0)
    return max(_largest_right(events, certificate["unit"], prior, held_out) for events in composed)


def _largest_right(events: Mapping[Event, int], unit: str, prior: float, held_out: float) -> float:
    """Return 1 - p + p δ(log((1 - p) / p)): with p = ``prior``, the share of right guesses of the best test.

    At ``held_out`` epsilon of a held-out record, which is in no event, the worst is randomised response.
    """
    accountant = _composed_once(PldAccountant if unit == "record" else VisibleAccountant, tuple(events.items()))
    odds = (1 - prior) / prior
    randomised = (math.exp(min(held_out, 700.0)) - odds) / (math.exp(min(held_out, 700.0)) + 1)
    return 1 - prior + prior * max(accountant.delta(math.log(odds)), randomised, 0.0)


def _charged(events: Mapping[Event, int]) -> list[dict[str, Any]]:
    """The kinds of events with their numbers, JSON-ready; the slots of a kind are added up."""
    kinds: Counter[tuple[str, float, float, int]] = Counter()
    for event, count in events.items():
        kinds[event.sampler, event.sampling_rate, event.noise_multiplier, event.slots] += count
    return [
        {
            "sampler": sampler,
            "sampling_rate": rate,
            "noise_multiplier": noise,
            **({"slots": slots} if slots else {}),
            "charges": count,
        }
        for (sampler, rate, noise, slots), count in kinds.items()
    ]


def _reasons(
    header: Mapping[str, Any], plan: Guarantee, profiles: Sequence[_Profile], charged: Counter[Event], cost: float
) -> list[str]:
    """Return the reasons why a run is not certified; empty if it is."""
    reasons = list(plan.statement.reasons) + ([] if plan.private else list(header.get("unfounded", ())))
    if not plan.private:
        return reasons
    start = header.get(START, {})
    reasons += [f"the initial models are those of {start['run']}: {reason}" for reason in start.get("reasons", ())]
    reasons += dict.fromkeys(reason for profile in profiles for reason in delta_reasons(profile.plan))
    if (seed := header.get("seed")) is not None:
        reasons.append(f"seeded noise (seed {seed}), for simulation only: whoever knows the seed can remove it")
    if not certifies(plan.accountant):
        reasons.append(f"counted by {plan.accountant}, which does not certify (pld and rdp do)")
    if not math.isfinite(cost):
        reasons.append("the charges have so little noise that epsilon is infinite")
    spent = epsilon(charged + earlier_events(header), plan.delta, plan.accountant)
    if not plan.budget.allows(spent):
        reasons.append(f"the charges amount to epsilon {spent:.4f}, above the budget of {plan.epsilon:g}")
    return reasons


def _started_from(start: Mapping[str, Any]) -> dict[str, Any]:
    """The run whose models are the initial ones, and its charges; ledgers of 0.3.0 state also who its clients are."""
    stated = {key: start[key] for key in ("run", "clients", "ledger") if key in start}
    return {**stated, "charged": _charged(count_events(start["events"]))}


def _other_clients(start: Mapping[str, Any] | None) -> list[str]:
    """What a certificate cannot prove of the initial models; only ledgers of 0.3.0 have such clients."""
    if not start or start.get("clients") != "other":
        return []
    return [
        f"that the initial models, of run {start['run']}, come from other clients: the user states it, and the charges "
        "of that run do not count"
    ]


def total(
    runs: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], delta: float | None = None
) -> dict[str, Any]:
    """Compose the cost of several client-level runs on the same clients from their ledgers.

    The cost of a run includes its charges and its remaining planned events, as in its certificate. A run that started
    from the models of another one includes the charges of that one, unless it is listed too.

    Args:
        runs: first line and charges of each ledger, by name.
        delta: delta at which epsilon is stated; None: the smallest delta of the runs.

    Raises:
        PrivacyError: a run is not at client level, or two runs have different numbers of clients or adjacencies.
    """
    plans: dict[str, Guarantee] = {}
    for name, (header, charges) in runs.items():
        plan = plan_in_force(header, charges)
        if plan.unit != "client":
            raise PrivacyError(f"{name} has privacy unit {plan.unit}: totals require client-level runs")
        plans[name] = plan
        first_name, first = next(iter(plans.items()))
        if plan.units != first.units:
            raise PrivacyError(
                f"{first_name} has {first.units} clients, but {name} has {plan.units}: the clients must be the same"
            )
        if (plan.sampler, plan.adjacency) != (first.sampler, first.adjacency):
            raise PrivacyError(
                f"{first_name} ({first.mechanism}) and {name} ({plan.mechanism}) have different adjacencies and cannot "
                "be composed"
            )
    delta = min(plan.delta for plan in plans.values()) if delta is None else delta
    papers = {name: certificate(header, charges) for name, (header, charges) in runs.items()}
    reasons = [f"{name}: {reason}" for name, paper in papers.items() for reason in paper["reasons"]]
    reasons += delta_reasons(replace(first, delta=delta))
    listed = {header_digest(header) for header, _ in runs.values()}
    events = sum(
        (
            plan.expected(
                charges, plan, NO_EVENTS if header.get(START, {}).get("header") in listed else earlier_events(header)
            )
            for plan, (header, charges) in zip(plans.values(), runs.values(), strict=True)
        ),
        Counter[Event](),
    )
    cost = epsilon(events, delta)
    return {
        "epsilon": finite(cost),
        "epsilon_rdp": finite(epsilon(events, delta, "rdp")),
        "delta": delta,
        "certified": not reasons and math.isfinite(cost),
        "reasons": reasons,
        "unit": first.unit,
        "adjacency": first.adjacency,
        "clients": first.units,
        "runs": [{"run": name, **{key: paper[key] for key in ("epsilon", "delta")}} for name, paper in papers.items()],
    }


def _shared_budget(charges: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the state of the shared budget at this run's last charge; None without a shared budget."""
    if not charges or "shared" not in charges[-1]:
        return None
    shared = dict(charges[-1]["shared"])
    return {"other_charges": shared.pop("charge") - len(charges), **shared}


def delta_reasons(plan: Guarantee) -> list[str]:
    """Return why a run is not certified if the plan's delta is too large; empty otherwise."""
    unit, units = plan.unit, plan.units
    if plan.delta <= SLACK / units:
        return []
    return [
        f"delta = {plan.delta:g} is above 1/{units} = {1 / units:.3g}: publishing one of the {units} {unit}s at random "
        f"satisfies delta = 1/{units}; set a smaller delta"
    ]


@dataclass(frozen=True)
class _Profile:
    """Clients with a common plan, and the maximum events of each; at client level, all clients.

    Attributes:
        clients: number of clients.
        plan: their plan; its epsilon and delta are the budget of their ledgers.
        events: charged and remaining planned events, as far as the budget allows.
        overcharged: whether the run charged more than the budget allows.
    """

    clients: int
    plan: Guarantee
    events: Counter[Event]
    overcharged: bool

    def epsilon(self, delta: float, accountant: str) -> float:
        """Upper bound on the epsilon of one of these clients, at a delta no larger than that of its plan."""
        cost = epsilon(self.events, delta, accountant)
        limited = delta == self.plan.delta and accountant == self.plan.accountant and not self.overcharged
        return max(self._held_out, min(cost, self.plan.epsilon) if limited else cost)

    @property
    def _held_out(self) -> float:
        """Epsilon of a held-out record, which is in no training."""
        return self.plan.held_out_epsilon if isinstance(self.plan, RecordPlan) else 0.0

    def attacker_right(self) -> float:
        """Largest share of right guesses of an attacker whether one client, or one record, took part, 1/2 being chance.

        The attacker knows all other data, and sees all that is published; at client level, also who takes part. Both
        answers are equally likely.
        """
        return _largest_right(events_of_a_client(self.events), self.plan.unit, 0.5, self._held_out)

    def described(self, delta: float) -> dict[str, Any]:
        """Return the entry of the profile in the certificate."""
        numbers = ("num_examples", "batch_size", "noise_multiplier", "first_batch_size", "first_noise_multiplier")
        return {
            "clients": self.clients,
            "epsilon": finite(self.epsilon(delta, self.plan.accountant)),
            "epsilon_budget": finite(self.plan.epsilon),
            "delta_budget": self.plan.delta,
            **{name: getattr(self.plan, name) for name in numbers},
        }


def _profiles(header: Mapping[str, Any], plan: Guarantee, charges: Sequence[Mapping[str, Any]]) -> list[_Profile]:
    earlier = earlier_events(header)
    over = not plan.budget.covers(count_events(charges) + earlier)
    profiles = []
    for entry in header.get("profiles", [{"clients": 1, "plan": plan.terms()}]):
        client_plan = plan_of(entry["plan"])
        events = client_plan.expected(charges, plan, earlier)
        profiles.append(_Profile(entry["clients"], client_plan, events, over and client_plan == plan))
    return profiles


def _accountants(plan: Guarantee) -> list[str]:
    """Return the plan's accountant, then the others that are valid for it."""
    return list(dict.fromkeys([plan.accountant, *(name for name in ACCOUNTANTS if name in plan.accountants)]))
