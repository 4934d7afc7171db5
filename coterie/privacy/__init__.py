"""Mechanisms, accounting, ledger and certificate. Imports nothing else of Coterie."""

from coterie.privacy.accounting import ACCOUNTANTS, NO_PRIVACY, Event, LiveAccountant, PrivacyError, calibrate, epsilon
from coterie.privacy.certificate import certificate
from coterie.privacy.ledger import BudgetError, Ledger, LedgerError, Permit
from coterie.privacy.plan import MECHANISMS, Plan, Released, clip
from coterie.privacy.randomness import Streams, gaussian

__all__ = [
    "ACCOUNTANTS",
    "MECHANISMS",
    "NO_PRIVACY",
    "BudgetError",
    "Event",
    "Ledger",
    "LedgerError",
    "LiveAccountant",
    "Permit",
    "Plan",
    "PrivacyError",
    "Released",
    "Streams",
    "calibrate",
    "certificate",
    "clip",
    "epsilon",
    "gaussian",
]
