"""Mechanisms, one file each; a new one is a file and a line here."""

import math
from collections.abc import Mapping
from typing import Any

from coterie.privacy.mechanisms.dp_sgd import WEIGHTS, RecordLevel
from coterie.privacy.mechanisms.joint import Joint, NoPrivacy
from coterie.privacy.mechanisms.rr_cluster import IDENTIFIERS, Paper, RRSlot, move_members, redraw_matrix
from coterie.privacy.plan import Plan

#: Every plan by its mechanism's name.
PLANS: dict[str, type[Plan]] = {plan.mechanism: plan for plan in (Joint, RRSlot, Paper, NoPrivacy)}

#: Mechanisms that a configuration can name, with a line for a person who chooses.
MECHANISMS = {name: plan.title for name, plan in PLANS.items() if plan.unit == "client"}


def plan_from_terms(terms: Mapping[str, Any]) -> Plan:
    """The plan that :meth:`Plan.terms` describes.

    Args:
        terms: every number of the plan by name, None for infinity, and its mechanism.
    """
    values: dict[str, Any] = {key: math.inf if value is None else value for key, value in terms.items()}
    return PLANS[values.pop("mechanism")](**values)


__all__ = [
    "IDENTIFIERS",
    "MECHANISMS",
    "PLANS",
    "WEIGHTS",
    "Joint",
    "NoPrivacy",
    "Paper",
    "RRSlot",
    "RecordLevel",
    "move_members",
    "plan_from_terms",
    "redraw_matrix",
]
