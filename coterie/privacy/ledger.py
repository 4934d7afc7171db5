"""The ledger: a charge is on disk before the release it pays for, and is never reused or refunded.

A charge covers one attempt at one round. A round that is repeated after a crash is charged again, and the
rounds that remain are calibrated anew so that everything together stays within the budget.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from coterie.privacy.accounting import Event, LiveAccountant, PrivacyError, calibrate

_KEYS = ("charge", "round", "sampling_rate", "noise_multiplier")


class LedgerError(RuntimeError):
    """The ledger cannot be used: another process has it, or it is damaged."""


class BudgetError(PrivacyError):
    """A further round would cost more than the run's budget."""


@dataclass
class Permit:
    """Allows the draws of one release, once. Only a :class:`Ledger` hands them out."""

    charge: int
    round: int
    event: Event
    epsilon: float
    _open: bool = field(default=True, repr=False)

    def use(self) -> None:
        """Spend the permit.

        Raises:
            LedgerError: it was spent before.
        """
        if not self._open:
            raise LedgerError(f"charge {self.charge} paid for one release of round {self.round}, already made")
        self._open = False


class Ledger:
    """Charges of one run, in memory or in ``path`` (JSON lines, appended and synced, locked while open).

    Args:
        delta: the delta at which epsilon is reported, in (0, 1).
        epsilon: the budget; inf when the run has no privacy.
        path: the file; None keeps the charges in memory, which no crash survives.

    Raises:
        LedgerError: another process holds the file, or a line of it cannot be read.
    """

    def __init__(self, delta: float, epsilon: float = math.inf, path: Path | None = None) -> None:
        self.delta = delta
        self.budget = epsilon
        self.charges: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if path is not None:
            self._file = _open_locked(path)
            try:
                self.charges = _read(self._file, path)
            except BaseException:
                self._file.close()
                raise
        self._live = LiveAccountant(self.events)

    @property
    def events(self) -> list[Event]:
        """What was charged, in order."""
        return [Event(line["sampling_rate"], line["noise_multiplier"]) for line in self.charges]

    def spent(self) -> float:
        """Epsilon of every charge ever made."""
        return self._live.epsilon(self.delta)

    def calibrate(self, sampling_rate: float, rounds: int) -> float:
        """Noise multiplier with which ``rounds`` further rounds still fit into the budget."""
        return calibrate(self.budget, self.delta, sampling_rate, rounds, spent=self.events)

    def round(self, number: int, event: Event, **details: Any) -> Permit:
        """Charge one attempt at round ``number``, sync it to disk, then allow its draws.

        Args:
            number: the round, from 1.
            event: what the release is, for the accountant.
            details: further public facts to keep beside the charge.

        Raises:
            BudgetError: the charge would exceed the budget; nothing was written.
        """
        after = self._live.with_rounds(event, 1)
        cost = after.epsilon(self.delta)
        if not cost <= self.budget * (1 + 1e-9):
            raise BudgetError(
                f"round {number} would raise epsilon to {cost:.4f}, above the budget of {self.budget:g}; "
                f"{len(self.charges)} charges were made before it"
            )
        charge = {
            "charge": len(self.charges) + 1,
            "round": number,
            "sampling_rate": event.sampling_rate,
            "noise_multiplier": event.noise_multiplier,
            **details,
            "epsilon": cost if math.isfinite(cost) else None,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if self._file is not None:
            self._file.write(json.dumps(charge) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.charges.append(charge)
        self._live = after
        return Permit(len(self.charges), number, event, cost)

    def close(self) -> None:
        """Release the file and its lock."""
        if self._file is not None:
            self._file.close()


def _open_locked(path: Path) -> IO[str]:
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LedgerError(f"{path.parent} is in use by another process; wait for it, or choose another --out") from None
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return file


def _read(file: IO[str], path: Path) -> list[dict[str, Any]]:
    """All charges; an incomplete last line was never synced, so nothing was released for it: it is cut off."""
    file.seek(0)
    text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.truncate(len(whole.encode()))
    charges = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            charge = json.loads(line)
            if charge["charge"] != number or any(key not in charge for key in _KEYS):
                raise KeyError
        except (json.JSONDecodeError, KeyError, TypeError):
            raise LedgerError(f"{path}, line {number} is not a charge of this ledger: {line[:80]!r}") from None
        charges.append(charge)
    return charges
