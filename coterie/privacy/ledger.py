"""The ledger: every charge is synced to disk before its release, and is never reused or refunded.

The first line describes the run: its plan, delta, budget and accountant. Every further line is a charge, which covers
one attempt at one release. A round that is repeated after a crash is charged again, and the remaining rounds are
recalibrated (strategies/loop.py) so that the total stays within the budget. There are two exceptions. A slot
contributes to a round once, so that a round of a slot is not repeated. Clients that keep ledgers replay their replies
to the same request, which the first charge covers (:meth:`Ledger.replay_permit`).

A chain of hashes shows whether lines are lost or changed (privacy/ledger_lines.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeAlias

from coterie.privacy.accountants import Accountant, Event, PrivacyError
from coterie.privacy.accounting import Budget, composed, composed_further
from coterie.privacy.charge_times import clock_time
from coterie.privacy.ledger_lines import (
    EXTENDED,
    HELD_OUT,
    LedgerError,
    append_synced,
    chained_lines,
    count_events,
    earlier_events,
    event_of,
    held_out_epsilon,
    open_locked,
    take_over,
)

if TYPE_CHECKING:
    from coterie.privacy.filtered_ledgers import SharedBudget

_FORMAT = 1
#: Accountants after a charge by name, and the epsilon of the budget's.
_Composed: TypeAlias = tuple[dict[str, Accountant], float]


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

    # Whether the ledger has the charges of several runs, whose rounds have the same numbers.
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
            self._file = open_locked(path)
            try:
                self._load(self._file, path)
            except BaseException:
                self._file.close()
                raise

    def _load(self, file: IO[bytes], path: Path) -> None:
        """Read the charges of the file."""
        self.charges, self._chain = take_over(file, path, self.header, self._then)
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

        No record is both trained on and held out. So there are two sums, each within the budget: epsilon of all
        releases of held-out records, at delta 0, and the cost of all training (docs/privacy.md, Theorem 7).

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
        """State in every further charge which terms of the plan, such as ``rounds``, have larger values from now on."""
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
            text, chain = chained_lines(self._chain, charges)
            append_synced(self._file, self._path, text, self._then)
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
