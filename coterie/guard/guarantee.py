"""The certificate of a site or of a run, derived from its ledger alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coterie.fields import finite
from coterie.guard.owners import UNNAMED, charges_by_site, reporter
from coterie.privacy import Event, LedgerError, RecordPlan, epsilon, read_ledger
from coterie.privacy.accounting import SLACK, accountant_title
from coterie.privacy.ledger_lines import count_events

_ACCOUNTANTS = ("pld", "rdp")
#: Epsilon by RDP above which nothing else is computed, and nothing is charged at a site.
MAX_RDP = 100.0
_VERIFIED = (
    "sampling rate, noise and number of all steps: the guard drew the batches and the noise",
    "each record's gradient was clipped",
    "the arrays of each reply are the received ones, changed by these steps only: between them, no parameter, buffer "
    "or state of the optimizer changed",
    "the number of records in replies is the public one, and no other metric left without the owner's permission",
)
_ASSUMED = (
    "the app that ran is the one that the site's owner approved (pin it: docs/deployment.md)",
    "the gradient of a record depends on this record and the model alone: the model, the loss and the preparation of "
    "the data do not mix records, and the data set has each record once",
    "the base optimizer's step is a function of the gradients, its state, its step sizes and the parameters",
    "step sizes, the number of epochs and failures of the app do not depend on the data, and the app sends nothing but "
    "its reply",
)
_SEVERAL = (
    "epsilon counts the charges as fixed beforehand; epsilon_budget holds also if a server chose them, which are of "
    "several kinds, by earlier replies"
)
_NAMED = "replies about the same records have one site name: that of their owner, or the number of a simulated client"
_COMPOSED = "nodes without a name were composed as one site, an upper bound: set site in the node configuration of each"
_DECLARED = "the DP training of the app is as its owner declares: the guard did not verify it"
_OUTSIDE = (
    "what holds for real-valued noise only: the noise is drawn in float64",
    "the time of a reply, and that it was refused",
    "which records are in a batch: the amplification by sampling holds against those who cannot see it",
)
_OF_RUN = "other runs on the same data, and replies that never arrived: the ledger of each site counts them"


def certificate(path: Path) -> dict[str, Any]:
    """Return the certificate of a guard's ledger, JSON-ready (None stands for infinity).

    Args:
        path: ledger of a site (all apps and runs), or ``ledger.jsonl`` of a guarded run (all its sites).

    Raises:
        LedgerError: the ledger is missing or damaged, or has no charge of a guard.
    """
    header, charges = read_ledger(path)
    try:
        return _certificate(header, charges)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LedgerError(f"{path} is not a ledger of a guard: {type(error).__name__}: {error}") from None


def _certificate(header: Mapping[str, Any], charges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    of_run = header.get("guard") == "run"
    by_site = charges_by_site(charges) if of_run else {"this site": charges} if charges else {}
    sites = [_site(name, site_charges, header["delta"]) for name, site_charges in sorted(by_site.items())]
    unnamed = {node for node, name in map(reporter, charges if of_run else ()) if name == UNNAMED}
    reasons = _reasons(header, sites)
    several = any(len(count_events(site_charges)) > 1 for site_charges in by_site.values())
    declared = any(not site["verified"] for site in sites)
    allowed = sorted({name for charge in charges for name in charge.get("guard", {}).get("allow", ())})
    costs = {accountant: max((site["costs"][accountant] for site in sites), default=0.0) for accountant in _ACCOUNTANTS}
    return {
        "certified": not reasons,
        "reasons": reasons,
        "of": "run" if of_run else "site",
        "unit": RecordPlan.unit,
        "adjacency": RecordPlan.adjacency,
        "epsilon": finite(max((site["epsilon"] for site in sites), default=0.0)),
        "accountants": {accountant_title(name): finite(value) for name, value in costs.items()},
        "epsilon_budget": header["epsilon"],
        "delta": header["delta"],
        "charges": len(charges),
        "sites": [
            {key: value for key, value in {**site, "epsilon": finite(site["epsilon"])}.items() if key != "costs"}
            | ({"nodes": len({reporter(charge)[0] for charge in by_site[site["site"]]})} if of_run else {})
            for site in sites
        ],
        "verified": list(_VERIFIED) if any(site["verified"] for site in sites) else [],
        "assumed": [*_ASSUMED, *[_NAMED] * of_run, *[_SEVERAL] * several, *[_DECLARED] * declared],
        "outside": [*(f"{name}, by permission of the owner" for name in allowed), *_OUTSIDE, *([_OF_RUN] * of_run)],
        "notes": [f"{len(unnamed)} {_COMPOSED}"] if unnamed else [],
        "coterie": version("coterie"),
    }


def costs_of(events: Mapping[Event, int], delta: float) -> dict[str, float]:
    """Epsilon by accountant; inf by PLD if it is large by RDP, for which PLD takes gigabytes."""
    return _costs(frozenset(events.items()), delta)


@lru_cache(maxsize=1024)
def _costs(events: frozenset[tuple[Event, int]], delta: float) -> dict[str, float]:
    rdp = epsilon(dict(events), delta, "rdp")
    return {"pld": epsilon(dict(events), delta, "pld") if rdp <= MAX_RDP else math.inf, "rdp": rdp}


def _site(name: str, charges: Sequence[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """One site; a charge without an entry of the guard is of Coterie's own ClientApp, which verifies its steps."""
    entries = [charge["guard"] for charge in charges if "guard" in charge]
    costs = costs_of(count_events(charges), delta)
    return {
        "site": name,
        "epsilon": min(costs.values()),  # both are upper bounds, and a ledger accepts what one of them allows
        "costs": costs,
        "charges": len(charges),
        "num_examples": max(entry["num_examples"] for entry in entries),
        "verified": all(entry["verified"] for entry in entries),
    }


def _reasons(header: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> list[str]:
    budget = math.inf if header["epsilon"] is None else header["epsilon"]
    reasons = []
    for site in sites:
        name, cost = site["site"], site["epsilon"]
        if not site["verified"]:
            reasons.append(f"{name}: {_DECLARED}")
        if not cost <= budget * SLACK:
            reasons.append(f"{name}: the charges amount to epsilon {cost:.4f}, above {budget:g}")
        if header["delta"] > SLACK / site["num_examples"]:
            reasons.append(f"{name}: delta = {header['delta']:g} is above 1/{site['num_examples']}")
    return reasons
