"""Mechanisms, one file each. A new mechanism requires a file and an entry here."""

import math
from collections.abc import Mapping
from typing import Any

from coterie.fields.removed import removal
from coterie.privacy.accountants import PrivacyError
from coterie.privacy.mechanisms.banded import PARTICIPATION, Banded
from coterie.privacy.mechanisms.dp_sgd import WEIGHTS, RecordLevel
from coterie.privacy.mechanisms.joint import Joint, NoPrivacy
from coterie.privacy.mechanisms.rebalancing import IDENTIFIERS, RRSlot, move_members, redraw_matrix
from coterie.privacy.mechanisms.secure import Secure
from coterie.privacy.plan import Plan

#: Plans by the name of their mechanism.
PLANS: dict[str, type[Plan]] = {plan.mechanism: plan for plan in (Joint, Banded, Secure, RRSlot, NoPrivacy)}

#: Mechanisms available in configurations, with one-line descriptions.
MECHANISMS = {name: plan.title for name, plan in PLANS.items() if plan.unit == "client"}


def register(plan: type[Plan]) -> None:
    """Add a mechanism of another package to :data:`PLANS` and :data:`MECHANISMS`."""
    PLANS[plan.mechanism] = plan
    MECHANISMS[plan.mechanism] = plan.title


def plan_from_terms(terms: Mapping[str, Any]) -> Plan:
    """Return the plan described by :meth:`Plan.terms`.

    Args:
        terms: the mechanism and all parameters of the plan by name, with None for infinity.

    Raises:
        PrivacyError: this process knows no such mechanism.

    Examples:
        >>> from coterie.privacy import read_ledger
        >>> header, charges = read_ledger("runs/ifca/ledger.jsonl")
        >>> plan_from_terms(header["plan"]).mechanism
        'joint'
    """
    values: dict[str, Any] = {key: math.inf if value is None else value for key, value in terms.items()}
    mechanism = values.pop("mechanism")
    if mechanism not in PLANS:
        raise PrivacyError(removal(f"mechanism = {mechanism}") or f"unknown mechanism {mechanism!r}")
    return PLANS[mechanism](**values)


__all__ = [
    "IDENTIFIERS",
    "MECHANISMS",
    "PARTICIPATION",
    "PLANS",
    "WEIGHTS",
    "Banded",
    "Joint",
    "NoPrivacy",
    "RRSlot",
    "RecordLevel",
    "Secure",
    "move_members",
    "plan_from_terms",
    "redraw_matrix",
    "register",
]
