"""Mechanisms, one file each. A new mechanism requires a file and an entry here."""

import math
from collections.abc import Mapping
from typing import Any

from coterie.privacy.mechanisms.banded import PARTICIPATION, Banded
from coterie.privacy.mechanisms.dp_sgd import WEIGHTS, RecordLevel
from coterie.privacy.mechanisms.joint import Joint, NoPrivacy
from coterie.privacy.mechanisms.rebalancing import IDENTIFIERS, Paper, RRSlot, move_members, redraw_matrix
from coterie.privacy.mechanisms.secure import Secure
from coterie.privacy.plan import Plan

#: Plans by the name of their mechanism.
PLANS: dict[str, type[Plan]] = {plan.mechanism: plan for plan in (Joint, Banded, Secure, RRSlot, Paper, NoPrivacy)}

#: Mechanisms available in configurations, with one-line descriptions.
MECHANISMS = {name: plan.title for name, plan in PLANS.items() if plan.unit == "client"}


def plan_from_terms(terms: Mapping[str, Any]) -> Plan:
    """Return the plan described by :meth:`Plan.terms`.

    Args:
        terms: the mechanism and all parameters of the plan by name, with None for infinity.

    Examples:
        >>> from coterie.privacy import read_ledger
        >>> header, charges = read_ledger("runs/ifca/ledger.jsonl")
        >>> plan_from_terms(header["plan"]).mechanism
        'joint'
    """
    values: dict[str, Any] = {key: math.inf if value is None else value for key, value in terms.items()}
    return PLANS[values.pop("mechanism")](**values)


__all__ = [
    "IDENTIFIERS",
    "MECHANISMS",
    "PARTICIPATION",
    "PLANS",
    "WEIGHTS",
    "Banded",
    "Joint",
    "NoPrivacy",
    "Paper",
    "RRSlot",
    "RecordLevel",
    "Secure",
    "move_members",
    "plan_from_terms",
    "redraw_matrix",
]
