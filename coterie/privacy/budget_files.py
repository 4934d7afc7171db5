"""Care of the budget files of clients: what is spent, copies, and charges that a file has lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.files import private_folder, write_atomic, write_new
from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.accounting import epsilon
from coterie.privacy.anchors import Anchors
from coterie.privacy.certificate import plan_of
from coterie.privacy.filter import Filter, is_within
from coterie.privacy.filtered_ledgers import PINNED, ClientLedger
from coterie.privacy.ledger_lines import LedgerError, count_events, held_out_epsilon, read_chained, read_ledger
from coterie.privacy.record import RecordPlan


@dataclass(frozen=True)
class Spending:
    """What a budget file holds.

    Attributes:
        file: path of the file.
        epsilon: spent, at ``delta``, as the client's filter counts it.
        epsilon_budget: the budget; inf without one.
        delta: of the budget.
        charges: number of charges.
        last: time of the last charge; None without charges.
        runs: number of charges by the run that asked and who has started it, such as "17 by alice: 3, 23: 1"; empty
            where no run is known.
        held_out: epsilon of held-out records, at delta 0, which have the same budget to themselves.
    """

    file: str
    epsilon: float
    epsilon_budget: float
    delta: float
    charges: int
    last: str | None
    runs: str
    held_out: float = 0.0

    def __str__(self) -> str:
        since = f", the last at {self.last}" if self.last else ""
        return (
            f"epsilon {self.epsilon:.4g} of {self.epsilon_budget:g} spent at delta {self.delta:g}, "
            f"{f'epsilon {self.held_out:.4g} of held-out records, ' if self.held_out else ''}"
            f"{self.charges} charges{since}, {self.file}"
        )


def spending(path: Path) -> Spending:
    """Read and verify a whole budget file.

    Raises:
        LedgerError: it is missing, damaged, or not the ledger of a client.
    """
    header, charges = read_ledger(path)
    if "delta" not in header or "plan" in header:
        raise LedgerError(f"{path} is not the budget file of a client or of runs")
    budget = math.inf if header["epsilon"] is None else header["epsilon"]
    events = count_events(charges)
    spent = epsilon_spent(events, budget, header["delta"], charges[0].get(PINNED)) if charges else 0.0
    last = charges[-1].get("time") if charges else None
    by_run = Counter(map(_origin, charges))
    del by_run[""]
    runs = ", ".join(f"{run}: {count}" for run, count in by_run.items())
    return Spending(str(path), spent, budget, header["delta"], len(charges), last, runs, held_out_epsilon(charges))


def _origin(charge: Mapping[str, Any]) -> str:
    """Return which run asked, and who has started it; empty where no run is known."""
    run, submitter = charge.get("run"), charge.get("submitter")
    if not isinstance(run, str):
        return ""
    return f"{run} by {submitter}" if isinstance(submitter, str) else run


def epsilon_spent(events: Counter[Event], budget: float, delta: float, pinned: Any) -> float:
    """Return the epsilon of all events of a ledger, as its filter counts them.

    Args:
        events: charged events.
        budget: epsilon of the budget.
        delta: of the budget.
        pinned: entry of the filter in the first charge; None without one.

    Raises:
        LedgerError: the entry is malformed.
    """
    fixed = epsilon(events, delta)
    if pinned is None:
        return fixed
    try:
        allowed = Filter.parse(pinned, budget, delta)
    except PrivacyError as error:
        raise LedgerError(str(error)) from None
    return fixed if is_within(events, allowed.pinned) else max(fixed, allowed.epsilon_of(events))


def backup(path: Path, copy: Path) -> int:
    """Copy a budget file, verified, to a new file or over an older copy of it.

    Returns:
        the number of charges.

    Raises:
        LedgerError: the file is damaged, or the copy is of another file or has further charges.
    """
    charges = _checked_copy(path, copy)
    content = path.read_bytes()
    if copy.exists():
        write_atomic(copy, content)
    else:
        private_folder(copy.parent)
        write_new(copy, content)
    return charges


def restore(copy: Path, path: Path) -> int:
    """Put a copy in the place of a missing budget file, or of one that the copy continues.

    Returns:
        the number of charges.

    Raises:
        LedgerError: the copy is damaged, or the file has charges that the copy lacks.
    """
    if _is_empty(path):
        return backup(copy, path)
    header, _ = read_ledger(path)
    budget = math.inf if header["epsilon"] is None else header["epsilon"]
    with closing(ClientLedger(header["delta"], budget, path, header["accountant"])):  # no client charges it now
        return backup(copy, path)


def reconcile_run(path: Path, run: Path, client: int, head: str | None = None) -> Spending:
    """Charge to a budget file what a run at record level has charged: an upper bound of what the file has lost of it.

    Args:
        path: the file.
        run: ledger of the run, from its operator.
        client: id of the client in the run.
        head: of the lost charge, so that the client goes on in the run; None: it does not.

    Returns:
        the spending afterwards, which may exceed the budget.

    Raises:
        LedgerError: a file is damaged, or ``run`` is not the ledger of a run at record level.
    """
    header, charges = read_ledger(run)
    profiles = header.get("profiles")
    if not profiles:
        raise LedgerError(f"{run} is not the ledger of a run at record level")
    plans = [plan_of(profile["plan"]) for profile in (header, profiles[client % len(profiles)])]
    charged, terms = (plan for plan in plans if isinstance(plan, RecordPlan))
    lost = terms.charged(charges, charged)
    own, _ = read_ledger(path)
    budget = math.inf if own["epsilon"] is None else own["epsilon"]
    with closing(ClientLedger(own["delta"], budget, path, own["accountant"])) as ledger:
        held_out = terms.held_out_epsilon if held_out_epsilon(charges) else 0.0
        ledger.reconcile_run(lost, held_out, client_id=client, **({} if head is None else {"head": head}))
    return spending(path)


def _is_empty(path: Path) -> bool:
    """Whether the file is missing, or empty: a client that finds none makes it before it refuses."""
    return not path.exists() or not path.stat().st_size


def _checked_copy(source: Path, target: Path) -> int:
    """Check that ``target`` is missing, or an older copy of ``source``; return the number of charges of ``source``."""
    _, charges, chains = read_chained(source)
    if not _is_empty(target):
        _, _, former = read_chained(target)
        if chains[: len(former)] != former:
            raise LedgerError(
                f"{target} has charges that {source} lacks, or is of another client: nothing was replaced. "
                "coterie budget reconcile adds lost charges"
            )
    return len(charges)


def reconcile(path: Path, anchors: Path) -> Spending:
    """Charge to a budget file what the anchors of a client state and the file lacks, and make a missing file.

    Returns:
        the spending afterwards, which may exceed the budget.

    Raises:
        LedgerError: the file is damaged, or has another budget than the anchors.
        FileError: there are no anchors, or they cannot be read.
    """
    own = Anchors(anchors)
    lost = own.all()
    if not lost:
        raise LedgerError(f"{anchors} contains no anchors")
    header = lost[-1].header
    budget = math.inf if header["epsilon"] is None else header["epsilon"]
    private_folder(path.parent)
    with closing(ClientLedger(header["delta"], budget, path, header["accountant"])) as ledger:
        ledger.reconcile(own, lost)
    return spending(path)
