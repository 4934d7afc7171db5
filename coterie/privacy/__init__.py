"""Mechanisms, accounting, ledger and certificate."""

from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.accounting import ACCOUNTANTS, NO_PRIVACY, calibrate, composed, epsilon
from coterie.privacy.certificate import certificate, plan_of
from coterie.privacy.clipping import MAX_CLIP_NORM, MIN_CLIP_NORM, check_clip_norm, clip, clip_rows
from coterie.privacy.contributions import Collected, Contributions, Gathered, Summed
from coterie.privacy.filtered_ledgers import ClientLedger, SharedBudget
from coterie.privacy.first_round import FirstRound
from coterie.privacy.ledger import BudgetError, Ledger, Permit
from coterie.privacy.ledger_lines import LedgerError, read_ledger
from coterie.privacy.losses import noisy_losses
from coterie.privacy.mechanisms import (
    MECHANISMS,
    PLANS,
    WEIGHTS,
    Banded,
    Joint,
    NoPrivacy,
    RecordLevel,
    RRSlot,
    Secure,
    plan_from_terms,
    redraw_matrix,
)
from coterie.privacy.plan import Plan
from coterie.privacy.private_values import PerRecord, PerUnit
from coterie.privacy.randomness import Streams, gaussian
from coterie.privacy.record import SELECTIONS, RecordPlan
from coterie.privacy.releases import (
    MechanismOutput,
    NothingReleasedError,
    Released,
    ReleasedPoints,
    ReleasedSums,
    ReleasedUpdates,
)
from coterie.privacy.selection import noisy_argmin, selection_event
from coterie.privacy.statement import Guarantee, PricedRequest, Pricing, ReleaseSpec

__all__ = [
    "ACCOUNTANTS",
    "MAX_CLIP_NORM",
    "MECHANISMS",
    "MIN_CLIP_NORM",
    "NO_PRIVACY",
    "PLANS",
    "SELECTIONS",
    "WEIGHTS",
    "Banded",
    "BudgetError",
    "ClientLedger",
    "Collected",
    "Contributions",
    "Event",
    "FirstRound",
    "Gathered",
    "Guarantee",
    "Joint",
    "Ledger",
    "LedgerError",
    "MechanismOutput",
    "NoPrivacy",
    "NothingReleasedError",
    "PerRecord",
    "PerUnit",
    "Permit",
    "Plan",
    "PricedRequest",
    "Pricing",
    "PrivacyError",
    "RRSlot",
    "RecordLevel",
    "RecordPlan",
    "ReleaseSpec",
    "Released",
    "ReleasedPoints",
    "ReleasedSums",
    "ReleasedUpdates",
    "Secure",
    "SharedBudget",
    "Streams",
    "Summed",
    "calibrate",
    "certificate",
    "check_clip_norm",
    "clip",
    "clip_rows",
    "composed",
    "epsilon",
    "gaussian",
    "noisy_argmin",
    "noisy_losses",
    "plan_from_terms",
    "plan_of",
    "read_ledger",
    "redraw_matrix",
    "selection_event",
]
