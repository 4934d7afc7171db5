"""Ledgers of several runs: of one client, kept by the client itself, and of all runs that share a budget.

A server may choose each request by earlier replies, and a run may follow from the results of another one. A filter
decides which requests fit the budget (privacy/filter.py); anchors show whether charges are lost (privacy/anchors.py).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from coterie.files import private_folder
from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.accounting import composed
from coterie.privacy.anchors import Anchor, Anchors
from coterie.privacy.charge_times import elapsed_of, times_after
from coterie.privacy.filter import Filter
from coterie.privacy.ledger import BudgetError, Ledger
from coterie.privacy.ledger_lines import (
    RESTORE,
    LedgerError,
    count_events,
    held_out_epsilon,
    read_bytes,
    read_chained,
    read_ledger,
    take_over_after,
)

#: Entry of the first charge of a filtered ledger.
PINNED = "pinned"
#: Entry ``for`` of charges that a ledger had lost.
RECONCILED = "reconciled"


class _FilteredLedger(Ledger):
    """A ledger whose later requests may depend on earlier releases: a filter decides which of them fit the budget.

    The first charge states the filter, so that nothing that comes later changes it.
    """

    #: All events of the run that charges next, if they are known. The first charge pins them.
    planned: Mapping[Event, int] | None = None

    @property
    def pinned_entry(self) -> Any:
        """The entry of the filter in the first charge; None without one."""
        return self.charges[0].get(PINNED)

    def _filtered(self, number: int, events: Mapping[Event, int]) -> dict[str, object]:
        """Check that the filter accepts further events, and return entries for their charge.

        Raises:
            BudgetError: it does not.
            LedgerError: the filter in the ledger is missing or malformed.
        """
        total = self.events + Counter(events)
        if not total or math.isinf(self.budget):
            return {}
        first = not self._count
        if not first and self.pinned_entry is None:
            raise LedgerError(
                f"{self._path} has charges of version 0.2.0, which did not state what its filter pins: they cannot be "
                "continued. Keep the file (coterie budget show states what is spent), and give what is left to a new "
                "--budget-file with a new --state-dir: epsilon and delta of both files add up"
            )
        try:
            if first:
                allowed = Filter.pin(total, self.budget, self.delta, planned=self.planned, accountant=self.accountant)
            else:
                allowed = Filter.parse(self.pinned_entry, self.budget, self.delta)
        except PrivacyError as error:
            raise LedgerError(f"{self._path}: {error}{RESTORE}") from None
        if allowed is None or not allowed.accepts(total):
            cost = composed(total, "rdp").epsilon(self.delta) if allowed is None else allowed.epsilon_of(total)
            beyond = "" if allowed is None else "; it is not one of the events that the first request pinned"
            raise BudgetError(
                f"round {number} would raise epsilon to {cost:.4f}, above the budget of {self.budget:g} at delta "
                f"{self.delta:g}{beyond}"
            )
        return {PINNED: allowed.entry()} if first else {}


class SharedBudget(_FilteredLedger):
    """One budget for several client-level runs on the same clients: a ledger with the charges of all of them.

    Args:
        path: the file. An existing file keeps its budget; a new one uses ``epsilon`` and ``delta``.
        clients: M of every run.
        sampler: sampler of every run, which defines the adjacency.
        epsilon: the budget of a new file.
        delta: the delta of a new file, in (0, 1).
        planned: all events of the next run, if they are known.

    Raises:
        LedgerError: the file is in use by another process, damaged, or for other clients or another sampler.
    """

    _several_runs: ClassVar[bool] = True

    def __init__(
        self,
        path: str | Path,
        *,
        clients: int,
        sampler: str,
        epsilon: float,
        delta: float,
        planned: Mapping[Event, int] | None = None,
    ) -> None:
        self.planned, path = planned, Path(path)
        private_folder(path.parent)
        if path.exists() and b"\n" in read_bytes(path):
            header, _ = read_ledger(path)
            if (header.get("clients"), header.get("sampler")) != (clients, sampler):
                whose = "is not a budget file"
                if "clients" in header:
                    whose = f"is for {header['clients']} clients and {header['sampler']} sampling"
                raise LedgerError(
                    f"{path} {whose}; this run has {clients} clients and {sampler} sampling: choose another budget-file"
                )
            epsilon, delta = header["epsilon"], header["delta"]
        super().__init__(delta, epsilon, path, about={"clients": clients, "sampler": sampler})

    def charge(self, number: int, event: Event, count: int) -> dict[str, Any]:
        """Charge a release of round ``number`` of a run, as :meth:`charge_round` does.

        Returns:
            entries for the charge in the run's own ledger.

        Raises:
            BudgetError: the charge would exceed the budget; nothing was written.
        """
        try:
            permit = self.charge_round(number, event, count)
        except BudgetError as error:
            raise BudgetError(f"{self.path}: {error}") from None
        return {"charge": permit.charge, "epsilon": permit.epsilon, "delta": self.delta, "epsilon_budget": self.budget}

    def _check(self, number: int, events: Mapping[Event, int], cost: float) -> dict[str, object]:
        return self._filtered(number, events)


class ClientLedger(_FilteredLedger):
    """Ledger of one client over all of its runs, kept by the client itself, so that no server has to be trusted.

    Its lines contain no epsilon, which would have to be composed again at every start of the client.

    Args:
        delta: the delta of the budget.
        epsilon: the budget.
        path: the file; None: in memory only.
        accountant: accountant of the budget.
        about: further entries of the first line; JSON-ready.
        anchors: file of the client's anchors, in another folder. With anchors, :attr:`charges` are those after the
            last anchor.

    Raises:
        LedgerError: see :class:`Ledger`; or the file lacks a charge that this client has made.
        FileError: the anchors cannot be read.
    """

    _then: ClassVar[str] = "the next request is charged"

    def __init__(
        self,
        delta: float,
        epsilon: float = math.inf,
        path: str | Path | None = None,
        accountant: str = "pld",
        about: Mapping[str, Any] | None = None,
        anchors: str | Path | None = None,
    ) -> None:
        self._anchors = None if anchors is None else Anchors(Path(anchors))
        self._anchor: Anchor | None = None
        self._anchored: dict[str, Any] = {}  # the charge of the anchor
        super().__init__(delta, epsilon, path, accountant, about)

    def _load(self, file: IO[bytes], path: Path) -> None:
        self._anchor = None if self._anchors is None else self._anchors.last()
        if self._anchors is None or self._anchor is None:
            super()._load(file, path)
            return
        way_out = f"coterie budget reconcile {path} --anchors {self._anchors.path}"
        self.charges, self._chain = take_over_after(file, path, self.header, self._anchor, way_out)
        file.seek(self._anchor.start)
        self._anchored = json.loads(file.readline())
        self._count = self._anchor.charges + len(self.charges)
        self._events = Counter(self._anchor.events) + count_events(self.charges)
        self._held_out = self._anchor.held_out + held_out_epsilon(self.charges)

    @property
    def pinned_entry(self) -> Any:
        """The entry of the filter in the first charge, which the last anchor states, too; None without one."""
        return super().pinned_entry if self._anchor is None else self._anchor.pinned

    @property
    def elapsed(self) -> float:
        """Seconds that have passed for certain since the first charge (:mod:`coterie.privacy.charge_times`)."""
        return elapsed_of(self._times())

    def _times(self) -> dict[str, Any]:
        return times_after(self.charges[-1] if self.charges else self._anchored)

    def spend(
        self, number: int, events: Mapping[Event, int], *, planned: Mapping[Event, int] | None = None, **details: object
    ) -> int:
        """Charge all events of round ``number`` atomically, and sync them to disk before noise is drawn.

        Args:
            number: the round.
            events: what the round releases.
            planned: all events of the run; those of the first request of all are pinned.
            details: further entries of the charges; JSON-ready.

        Returns:
            the number of the first charge, which is unique to this attempt.

        Raises:
            BudgetError: the charges would exceed the budget; nothing was written.
        """
        self.planned = planned
        pinned = self._filtered(number, events)
        first = self._count + 1
        self._write(number, events, details, pinned)
        if events:
            self._add_anchor()
        return first

    def spend_held_out(self, number: int, epsilon: float, **details: object) -> int:
        """Charge a release of held-out records, and sync it to disk before noise is drawn; see :meth:`charge_held_out`.

        Returns:
            the number of the charge, which is unique to this attempt.

        Raises:
            BudgetError: the charge would exceed the budget; nothing was written.
            LedgerError: nothing was charged for training before.
        """
        self._spend_held_out(number, epsilon, details)
        self._add_anchor()
        return self._count

    def sync(self) -> None:
        """Sync all charges to disk, and add the anchor of the last one: a crash may have come after it was written."""
        if self._file is not None and self._path is not None and self._count:
            os.fsync(self._file.fileno())
            content = read_bytes(self._path)
            self._last_line = len(content) - content.rfind(b"\n", 0, -1) - 1
            self._add_anchor()

    def reconcile(self, anchors: Anchors, made: Sequence[Anchor]) -> None:
        """Charge what the ledger has lost, and add an anchor; the ledger must have been opened without anchors.

        The last anchor that the ledger contains ends what it has kept. All later events are charged, whatever else it
        contains, because that may be charges of other clients with the same data.

        Args:
            anchors: file of the client's anchors.
            made: its contents.
        """
        assert self._path is not None
        _, _, chains = read_chained(self._path)
        kept = (anchor for anchor in reversed(made) if chains[anchor.charges : anchor.charges + 1] == [anchor.chain])
        before = next(kept, None)
        missing = Counter(made[-1].events) - Counter({} if before is None else before.events)
        if missing:
            first = {} if self._count or made[-1].pinned is None else {PINNED: made[-1].pinned}
            self._write(0, missing, {"for": RECONCILED, "lost": made[-1].chain}, first)
        unseen = made[-1].held_out - (0.0 if before is None else before.held_out)
        if unseen > 0:
            self._write_held_out(0, unseen, {"for": RECONCILED, "lost": made[-1].chain})
        if missing or unseen > 0:
            self._anchors = anchors
            self._add_anchor()

    def reconcile_run(self, lost: Mapping[Event, int], held_out: float = 0.0, **details: object) -> None:
        """Charge what a run has charged and the ledger may have lost, whatever the budget allows.

        Args:
            lost: the events.
            held_out: epsilon of held-out records.
            details: further entries of the charges; JSON-ready.
        """
        first: dict[str, object] = {}
        if not self._count and not math.isinf(self.budget):
            allowed = Filter.pin(Counter(lost), self.budget, self.delta, planned=lost, accountant=self.accountant)
            first = {} if allowed is None else {PINNED: allowed.entry()}
        self._write(0, lost, {"for": RECONCILED, **details}, first)
        if held_out:
            self._write_held_out(0, held_out, {"for": RECONCILED, **details})

    def _add_anchor(self) -> None:
        if self._anchors is None or self._file is None or self._path is None:
            return
        end = os.fstat(self._file.fileno()).st_size
        anchor = Anchor(
            ledger=str(self._path),
            header=self.header,
            start=end - self._last_line,
            end=end,
            charges=self._count,
            chain=self._chain,
            events=self._events,
            held_out=self._held_out,
            pinned=self.pinned_entry,
        )
        self._anchors.append(anchor)

    def record(self, number: int, events: Mapping[Event, int], **details: object) -> None:
        """Add charges of another ledger regardless of the budget, because these releases have happened."""
        self._write(number, events, details)
