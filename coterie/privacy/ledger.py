"""The ledger: every charge is synced to disk before its release, and is never reused or refunded.

The first line describes the run: its plan, delta, budget and accountant. Every further line is a charge, which covers
one attempt at one release. A round that is repeated after a crash is charged again, and the remaining rounds are
recalibrated so that the total stays within the budget.

Every charge ends with a ``chain``: a prefix of the SHA-256 of the previous chain and the rest of the line. The chain of
the first line is that of its bytes. A lost or changed line in the middle breaks the chain. A checkpoint stores the last
chain, so lost lines at the end are detected as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, ClassVar, NamedTuple, TypeAlias

from coterie.files import FileError, open_regular, private_folder, read_text, sync_folder
from coterie.privacy.accountants import Accountant, Event, PrivacyError
from coterie.privacy.accounting import Budget, composed, composed_further
from coterie.privacy.anchors import Anchor, Anchors
from coterie.privacy.charge_times import clock_time, elapsed_of, times_after
from coterie.privacy.filter import Filter

_KEYS = ("charge", "round", "sampling_rate", "noise_multiplier", "sampler")
_FORMAT = 1
#: Entry of the first charge of a filtered ledger.
PINNED = "pinned"
#: Entry of a charge that is for held-out records instead of an event: its epsilon, at delta 0.
HELD_OUT = "held_out_epsilon"
#: Entry ``for`` of charges that a ledger had lost.
RECONCILED = "reconciled"
#: Entry of a first line: the run whose models are the initial ones, and its events if its clients are the same.
START = "start"
#: Entry of the charges after a run was continued beyond its plan: the terms of the plan that changed.
EXTENDED = "extended"
_RESTORE = "; restore the ledger from a copy, or use a new file: a damaged ledger gives no certificate"
# A line of a ledger, and its chain, which is its last key.
_CHAINED = re.compile(rb'(.*), "chain": "([0-9a-f]{16})"\}', re.DOTALL)


#: Accountants after a charge by name, and the epsilon of the budget's.
_Composed: TypeAlias = tuple[dict[str, Accountant], float]


class LedgerError(RuntimeError):
    """The ledger cannot be used: it is in use by another process, damaged, or of another run."""


class BudgetError(PrivacyError):
    """A further charge would exceed the budget."""


@dataclass
class Permit:
    """Single-use permission to draw the noise of one release. Only a :class:`Ledger` creates permits."""

    charge: int
    round: int
    event: Event | None
    epsilon: float
    _open: bool = field(default=True, repr=False)

    def use(self) -> None:
        """Use the permit.

        Raises:
            LedgerError: it was already used.
        """
        if not self._open:
            raise LedgerError(f"the permit of charge {self.charge} (round {self.round}) was already used")
        self._open = False

    def use_for(self, event: Event) -> None:
        """Use the permit for a release with this event.

        Raises:
            LedgerError: it is for another one, or was already used.
        """
        if self.event != event:
            raise LedgerError(f"charge {self.charge} is for {self.event}, not for {event}")
        self.use()


class Ledger:
    """Charges of one run, in memory or in ``path`` (JSON lines, appended and synced, locked while open).

    Args:
        delta: the delta at which epsilon is reported, in (0, 1).
        epsilon: the budget; inf for a run without privacy.
        path: the file; None: the charges are kept in memory only, and do not survive a crash.
        accountant: accountant of the budget; pld and rdp are also tracked.
        about: further entries of the first line; JSON-ready.

    Attributes:
        header: the first line, for :func:`~coterie.privacy.certificate`.
        charges: the other lines.

    Raises:
        LedgerError: the file is in use by another process, damaged, or of another run.
    """

    # Whether rounds of several runs have the same numbers.
    _several_runs: ClassVar[bool] = False
    # What a user does after a write error.
    _then: ClassVar[str] = "continue with --resume"

    def __init__(
        self,
        delta: float,
        epsilon: float = math.inf,
        path: str | Path | None = None,
        accountant: str = "pld",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.delta = delta
        self.budget = epsilon
        self.accountant = accountant
        self._limit = Budget(epsilon, delta, accountant)
        self.charges: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        path = None if path is None else Path(path)
        self._path = path
        self._chain, self._last_line = "", 0
        self._shared: SharedBudget | None = None
        self._extended: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._expected: tuple[Event, int, Future[_Composed]] | None = None
        self.header: dict[str, Any] = {
            "ledger": _FORMAT,
            "delta": delta,
            "epsilon": None if math.isinf(epsilon) else epsilon,
            "accountant": accountant,
            **(about or {}),
        }
        self._count, self._events = 0, earlier_events(self.header)
        self._held_out = 0.0
        if path is not None:
            self._file = _open_locked(path)
            try:
                self._load(self._file, path)
            except BaseException:
                self._file.close()
                raise

    def _load(self, file: IO[bytes], path: Path) -> None:
        """Read the charges of the file."""
        self.charges, self._chain = _take_over(file, path, self.header, self._then)
        self._count, self._events = len(self.charges), count_events(self.charges) + earlier_events(self.header)
        self._held_out = held_out_epsilon(self.charges)

    @cached_property
    def _by_round(self) -> defaultdict[int, list[dict[str, Any]]]:
        """The charges of each round."""
        rounds = defaultdict(list)
        for charge in self.charges:
            rounds[charge["round"]].append(charge)
        return rounds

    @cached_property
    def _live(self) -> dict[str, Accountant]:
        return {name: composed(self.events, name) for name in dict.fromkeys((self.accountant, "pld", "rdp"))}

    @property
    def chain(self) -> str:
        """The chain of the last charge; empty in memory."""
        return self._chain

    @property
    def path(self) -> Path | None:
        """The file; None in memory."""
        return self._path

    @property
    def events(self) -> Counter[Event]:
        """All charged events, with those of the run from whose models this one started, on the same clients."""
        return Counter(self._events)

    @property
    def training_rounds(self) -> set[int]:
        """Numbers of the rounds with a charge for training."""
        return {charge["round"] for charge in self.charges if charge.get("for") == "training"}

    @property
    def evaluated_rounds(self) -> set[int]:
        """Numbers of the rounds with a charge for a private evaluation."""
        return {charge["round"] for charge in self.charges if charge.get("for") in ("evaluation", "histogram")}

    def spent(self, accountant: str | None = None) -> float:
        """Epsilon of all charges, by the ledger's accountant or another tracked one."""
        return self._live[accountant or self.accountant].epsilon(self.delta)

    def expect(self, event: Event, count: int = 1) -> None:
        """Compose this charge in another thread while replies arrive; nothing is charged before `charge_round`."""
        self._expected = event, count, self._thread.submit(self._composed, event, count)

    def _composed(self, event: Event, count: int) -> _Composed:
        after = composed_further(self._live, self.events, event, count, self._limit)
        return after, after[self.accountant].epsilon(self.delta)

    def charge_round(self, number: int, event: Event, count: int = 1, **details: object) -> Permit:
        """Charge one attempt at a release of round ``number``, sync it to disk, and return its permit.

        A shared budget is charged first, so that a crash in between can only overcount.

        Args:
            number: the round, from 1.
            event: event of the release.
            count: number of such events (the steps of a client's DP-SGD).
            details: further public entries of the charge.

        Raises:
            BudgetError: the charge would exceed this budget or the shared one; nothing was written.
            LedgerError: the round was charged before, and clients of a slot contribute to a round once.
        """
        once = event.slot is not None and not self._several_runs
        if once and event in count_events(self._by_round[number]):
            raise LedgerError(
                f"round {number} was charged before: its clients cannot contribute again, continue with the next round"
            )
        expected, self._expected = self._expected, None  # it holds for the next charge only
        if expected is not None and expected[:2] == (event, count):
            after, cost = expected[2].result()
        else:
            after, cost = self._composed(event, count)
        details |= self._check(number, {event: count}, cost)
        if self._extended:
            details[EXTENDED] = self._extended
        if self._shared is not None:
            details["shared"] = self._shared.charge(number, event, count)
        self._write(number, {event: count}, {**details, "epsilon": cost if math.isfinite(cost) else None})
        self._live = after
        return Permit(self._count, number, event, cost)

    def charge_held_out(self, number: int, epsilon: float, **details: object) -> Permit:
        """Charge a release of held-out records, of which none is in any training, and return its permit.

        A record is trained on or held out, so what both cost does not add up: all releases of held-out records together
        may cost the budget's epsilon, at delta 0, and all of training the budget (docs/privacy.md, Theorem 7).

        Args:
            number: the round, from 1.
            epsilon: of the release, at delta 0.
            details: further public entries of the charge.

        Raises:
            BudgetError: the charge would exceed the budget; nothing was written.
            LedgerError: nothing was charged for training before.
        """
        self._spend_held_out(number, epsilon, details)
        return Permit(self._count, number, None, self.spent())

    def _spend_held_out(self, number: int, epsilon: float, details: Mapping[str, object]) -> None:
        if not 0 < epsilon < math.inf:
            raise BudgetError(f"epsilon of held-out records must be positive and finite, not {epsilon}")
        if not self._count:
            raise LedgerError("held-out records are evaluated after training, for which nothing is charged yet")
        if not self._held_out + epsilon <= self.budget * (1 + 1e-9):
            raise BudgetError(
                f"round {number} would raise epsilon of held-out records to {self._held_out + epsilon:g}, above the "
                f"budget of {self.budget:g}"
            )
        self._write_held_out(number, epsilon, details)

    def _write_held_out(self, number: int, epsilon: float, details: Mapping[str, object]) -> None:
        charge = {"charge": self._count + 1, "round": number, HELD_OUT: epsilon, **details, **self._times()}
        self._append_charges([charge])
        self._held_out += epsilon

    def _check(self, number: int, events: Mapping[Event, int], cost: float) -> dict[str, object]:
        """Check that further events fit the budget, and return entries for their charge.

        Args:
            number: the round.
            events: the further events.
            cost: epsilon of all events, if they are fixed beforehand.

        Raises:
            BudgetError: they do not.
        """
        if not self._limit.allows(cost):
            raise BudgetError(
                f"round {number} would raise epsilon to {cost:.4f}, above the budget of {self.budget:g}; "
                f"{self._count} charges were made before it"
            )
        return {}

    def extend(self, **terms: int) -> None:
        """State in every further charge that these terms replace those of the plan, for :func:`extended_terms`."""
        self._extended = terms

    def share(self, budget: SharedBudget) -> None:
        """Also charge ``budget`` from now on, and close it with this ledger.

        Raises:
            LedgerError: charges of this ledger are missing in ``budget``.
        """
        self._shared = budget
        for charge in self.charges:
            number = charge.get("shared", {}).get("charge", 0)
            if not 0 < number <= len(budget.charges) or event_of(budget.charges[number - 1]) != event_of(charge):
                raise LedgerError(
                    f"{budget.path} does not contain charge {charge['charge']} of this run: use the budget file with "
                    "which the run started"
                )

    def is_charged(self, number: int, charges: Mapping[Event, int], digest: str) -> bool:
        """Whether the ledger contains these charges of a round for the request with this digest."""
        made = count_events(c for c in self._by_round[number] if c.get("question") == digest)
        return all(made[event] >= count for event, count in charges.items())

    def replay_permit(self, number: int, event: Event) -> Permit:
        """Return a permit for a replayed reply to a request that was already charged."""
        return Permit(self._count, number, event, self.spent())

    def uncharged_permit(self, number: int) -> Permit:
        """Return a permit without a charge, for replies of clients that are charged in their own ledgers only."""
        return Permit(self._count, number, None, self.spent())

    def _write(
        self,
        number: int,
        events: Mapping[Event, int],
        details: Mapping[str, object],
        first: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Append a charge for every event, and sync; ``first`` are entries of the first of them alone."""
        times = self._times()
        charges = [
            {
                "charge": self._count + index,
                "round": number,
                "sampling_rate": event.sampling_rate,
                "noise_multiplier": event.noise_multiplier,
                "sampler": event.sampler,
                **({} if event.slot is None else {"slot": event.slot, "slots": event.slots}),
                **({"count": count} if count > 1 else {}),
                **details,
                **(first if index == 1 else {}),
                **times,
            }
            for index, (event, count) in enumerate(events.items(), 1)
        ]
        self._append_charges(charges)
        self._events = self._events + Counter(events)

    def _times(self) -> dict[str, Any]:
        """Return the entries of a further charge that state when it is made."""
        return {"time": clock_time()}

    def _append_charges(self, charges: list[dict[str, Any]]) -> None:
        if self._file is not None and self._path is not None:
            text, chain = _chained(self._chain, charges)
            _append(self._file, self._path, text, self._then)
            self._chain, self._last_line = chain, len(text) - text.rfind(b"\n", 0, -1) - 1
        for charge in charges:
            self._by_round[charge["round"]].append(charge)
        self.charges += charges
        self._count += len(charges)

    def close(self) -> None:
        """Release the file and its lock, and those of a shared budget."""
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()
        if self._shared is not None:
            self._shared.close()


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
            raise LedgerError(f"{self._path}: {error}{_RESTORE}") from None
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
        if path.exists() and b"\n" in _read(path):
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
        self.charges, self._chain = _take_over_after(file, path, self.header, self._anchor, way_out)
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
            content = _read(self._path)
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


def event_of(charge: Mapping[str, Any]) -> Event:
    """Return the event of a charge."""
    slot, slots = charge.get("slot"), charge.get("slots", 0)
    return Event(charge["sampling_rate"], charge["noise_multiplier"], charge["sampler"], slot, slots)


def count_of(charge: Mapping[str, Any]) -> int:
    """Return the number of events of a charge."""
    return int(charge.get("count", 1))


def count_events(charges: Iterable[Mapping[str, Any]]) -> Counter[Event]:
    """Return the events of all charges."""
    total: Counter[Event] = Counter()
    for charge in charges:
        if HELD_OUT not in charge:
            total[event_of(charge)] += count_of(charge)
    return total


def held_out_epsilon(charges: Iterable[Mapping[str, Any]]) -> float:
    """Return the epsilon of held-out records of all charges, at delta 0."""
    return math.fsum(charge.get(HELD_OUT, 0.0) for charge in charges)


def earlier_events(header: Mapping[str, Any]) -> Counter[Event]:
    """Return the events of the run whose models are the initial ones, as a first line states them; often empty."""
    return count_events(header.get(START, {}).get("events", ()))


def header_digest(header: Mapping[str, Any]) -> str:
    """Return a digest of a first line, which identifies a run."""
    return chain_digest(json.dumps(header, sort_keys=True).encode())


def extended_terms(charges: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the terms of the plan that charges extended, such as ``rounds``; the largest values, empty if none did."""
    largest: dict[str, int] = {}
    for charge in charges:
        for name, value in charge.get(EXTENDED, {}).items():
            largest[name] = max(largest.get(name, 0), int(value))
    return largest


class Mark(NamedTuple):
    """A charge of a ledger, and where its line is.

    Attributes:
        start: offset in bytes of the line.
        end: offset in bytes after the line.
        charges: number of the charge.
        chain: of the charge.
    """

    start: int
    end: int
    charges: int
    chain: str


class Lines(NamedTuple):
    """The contents of a ledger.

    Attributes:
        header: the first line; None in an empty file.
        charges: the other lines, without their chains.
        chains: the chain up to each line, the first line included.
    """

    header: dict[str, Any] | None
    charges: list[dict[str, Any]]
    chains: list[str]


def read_ledger(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the first line and the charges of a ledger, which may be in use.

    Raises:
        LedgerError: the ledger is missing or damaged.

    Examples:
        >>> header, charges = read_ledger("runs/ifca/ledger.jsonl")
        >>> header["plan"]["mechanism"], len(charges)
        ('joint', 2)
    """
    header, charges, _ = read_chained(Path(path))
    return header, charges


def read_chained(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Same as :func:`read_ledger`, with the chain up to each line, including the first one.

    Raises:
        LedgerError: the ledger is missing or damaged.
    """
    content = _read(path)
    header, charges, chains = _parse(content[: content.rfind(b"\n") + 1], path)
    if header is None:
        raise LedgerError(f"{path} is empty: it contains neither a plan nor charges")
    return header, charges, chains


def charges_since(path: Path, mark: Mark | None) -> tuple[list[dict[str, Any]], Mark | None, bool]:
    """Read the charges after a mark; all charges without one, or if the ledger does not contain it.

    Returns:
        the charges, a mark of the last charge (None without charges), and whether these are all charges.

    Raises:
        LedgerError: the ledger is missing or damaged.
    """
    if mark is not None:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                file.seek(mark.start)
                after = _after(file.read(), mark)
        except (FileError, OSError) as error:
            raise LedgerError(str(error)) from None
        if after is not None:
            whole = after[: after.rfind(b"\n") + 1]
            _, charges, chains = _parse(whole, path, mark.charges + 1, mark.chain)
            return charges, _mark(whole, mark.end, mark.charges, chains) or mark, False
    content = _read(path)
    whole = content[: content.rfind(b"\n") + 1]
    _, charges, chains = _parse(whole, path)
    return charges, _mark(whole, 0, 0, chains[1:]), True


def _mark(content: bytes, start: int, before: int, chains: Sequence[str]) -> Mark | None:
    """Return a mark of the last line of ``content``, which begins at an offset after so many charges."""
    if not chains:
        return None
    last = content.rfind(b"\n", 0, -1) + 1
    return Mark(start + last, start + len(content), before + len(chains), chains[-1])


def _after(content: bytes, mark: Mark | Anchor) -> bytes | None:
    """Return what follows the line of a mark in the content of a ledger from there on; None if it is another line."""
    size = mark.end - mark.start
    chained = _CHAINED.fullmatch(content[:size].rstrip(b"\n"))
    return content[size:] if len(content) >= size and chained and chained[2].decode() == mark.chain else None


def _read(path: Path) -> bytes:
    try:
        return read_text(path).encode()
    except FileError as error:
        raise LedgerError(str(error)) from None


def chain_digest(*parts: bytes) -> str:
    """Return the link of a chain: the first 16 hexadecimal digits of the SHA-256 of these bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _chained(chain: str, charges: Iterable[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Return lines for these charges with their chains, and the last chain."""
    lines = []
    for charge in charges:
        content = json.dumps(charge).encode()
        chain = chain_digest(chain.encode(), content)
        lines.append(content[:-1] + f', "chain": "{chain}"}}\n'.encode())
    return b"".join(lines), chain


def _append(file: IO[bytes], path: Path, content: bytes, then: str) -> None:
    """Append and sync; a failure leaves the file unchanged, and ``then`` is what its user does afterwards.

    Raises:
        LedgerError: the file cannot be written.
    """
    if file.closed:
        raise LedgerError(f"{path} was closed after a write error: {then}")
    size = os.fstat(file.fileno()).st_size
    try:
        left = content
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(size)
        file.close()  # prevent writes after an incomplete line
        raise LedgerError(
            f"{path} cannot be written: {error.strerror or error}; nothing was released for this charge: free the disk "
            f"or make the file writable, then {then}"
        ) from None


def _open_locked(path: Path) -> IO[bytes]:
    try:
        file = os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0)
    except FileError as error:
        raise LedgerError(f"{error}; a ledger must be a writable regular file") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LedgerError(
            f"{path} is in use by another process: wait for it, or choose another file or --out"
        ) from None
    sync_folder(path.parent)
    return file


def _take_over(file: IO[bytes], path: Path, header: dict[str, Any], then: str) -> tuple[list[dict[str, Any]], str]:
    """Return all charges, and the last chain; write the header if there are no charges.

    An incomplete last line was never synced, so nothing was released for it, and it is removed.
    """
    content = _read(path)
    whole = content[: content.rfind(b"\n") + 1]
    before, charges, chains = _parse(whole, path)
    if not charges:  # without charges, another plan may replace the header
        first = json.dumps(header).encode() + b"\n"
        if whole != first or content != whole:
            file.truncate(0)
            _append(file, path, first, then)
        return [], chain_digest(first)
    _check_header(before, header, path)
    if whole != content:
        file.truncate(len(whole))
    return charges, chains[-1]


def _take_over_after(
    file: IO[bytes], path: Path, header: Mapping[str, Any], anchor: Anchor, way_out: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the charges after an anchor, and the last chain; an incomplete last line is removed.

    Raises:
        LedgerError: the ledger does not contain the charge of the anchor, is damaged after it, or has another header.
    """
    file.seek(anchor.start)
    after = _after(file.read(), anchor)
    if after is None:
        raise LedgerError(
            f"{path} lacks charge {anchor.charges}, which this client made in {anchor.ledger}: the ledger was deleted, "
            f"shortened or replaced by an older copy. Restore the newest copy, or run: {way_out}"
        )
    file.seek(0)
    _check_header(json.loads(file.readline()), header, path)
    whole = after[: after.rfind(b"\n") + 1]
    if whole != after:
        file.truncate(anchor.end + len(whole))
    _, charges, chains = _parse(whole, path, anchor.charges + 1, anchor.chain)
    return charges, chains[-1] if chains else anchor.chain


def _check_header(before: Mapping[str, Any] | None, header: Mapping[str, Any], path: Path) -> None:
    """Raise LedgerError unless the first line of a ledger is that of this run."""
    expected = json.loads(json.dumps(header))
    if before == expected:
        return
    plans = [set(first.get("plan") or ()) for first in (before or {}, expected)]
    if all(plans) and plans[0] != plans[1]:
        raise LedgerError(
            f"{path} was written by another version of Coterie, whose plans have other entries: continue the run with "
            "that version, or start another run with its models (--from)"
        )
    raise LedgerError(f"{path} belongs to a run with another plan; choose another --out")


def _parse(content: bytes, path: Path, start: int = 0, chain: str = "") -> Lines:
    """Parse the lines of a ledger, from line ``start`` on, after the line with this chain.

    Raises:
        LedgerError: a line is damaged, or its chain does not match the preceding lines.
    """
    lines: list[dict[str, Any]] = []
    chains: list[str] = []
    for number, line in enumerate(content.splitlines(keepends=True), start):
        chained = _CHAINED.fullmatch(line.rstrip(b"\n")) if number else None
        text = chained[1] + b"}" if chained else line
        chain = chain_digest(chain.encode(), text) if number else chain_digest(line)
        try:
            read = json.loads(text)
            held_out = HELD_OUT in read
            keys = ("round", HELD_OUT) if held_out else _KEYS
            good = read["charge"] == number and all(key in read for key in keys) if number else "ledger" in read
            if good and number and held_out:
                good = isinstance(read[HELD_OUT], float | int) and 0 < read[HELD_OUT] < math.inf
            elif good and number:
                event_of(read)
                good = good and count_of(read) >= 1
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            what = "a charge of this ledger" if number else "the beginning of a ledger"
            raise LedgerError(f"{path}, line {number + 1} is not {what}: {line.decode().rstrip()[:80]!r}{_RESTORE}")
        if number and (not chained or chained[2].decode() != chain):
            raise LedgerError(f"{path}, line {number + 1}: its chain does not match the preceding lines{_RESTORE}")
        chains.append(chain)
        lines.append(read)
    return Lines(None, lines, chains) if start else Lines(lines[0] if lines else None, lines[1:], chains)
