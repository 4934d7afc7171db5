"""Participation in turn: every client belongs to one of b slots, by a public function of its id.

The cohort of round t is slot (t - 1) mod b, so a client contributes at most ceil(T / b) times, and whoever sees who
takes part learns nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from coterie.privacy.accountants import Event, PrivacyError
from coterie.privacy.plan import Plan
from coterie.privacy.releases import IntArray


@dataclass(frozen=True, kw_only=True)
class InTurn(Plan):
    """A plan whose clients take part in turn; neighbouring inputs have the contributions of one client, or zeros."""

    adjacency: ClassVar[str] = "zero out the contributions of one client, at a fixed public number of clients"
    repeats_rounds: ClassVar[bool] = False

    @property
    @abstractmethod
    def slots(self) -> int:
        """b."""

    @property
    def rate(self) -> float:
        """Share of the clients in a cohort, 1/b."""
        return 1 / self.slots

    def slot(self, number: int) -> int:
        """Return the slot of a round."""
        return (number - 1) % self.slots

    def members(self, number: int) -> IntArray:
        """Return the clients of the slot of a round, increasing."""
        return np.flatnonzero(slots_of(self.clients, self.slots) == self.slot(number))

    def sample(self, rng: np.random.Generator, number: int) -> IntArray:
        """Return all clients of the slot."""
        return self.members(number)

    def round_event(self, number: int) -> Event:
        """The event of one contribution in the slot of a round."""
        return replace(self.event(), slot=self.slot(number), slots=self.slots)

    def participations(self, rounds: int) -> int:
        """A client contributes at most ceil(rounds / b) times."""
        return -(-rounds // self.slots)

    def check_slots(self, name: str) -> None:
        """Check that every slot has a client and a round.

        Raises:
            PrivacyError: there are too few of them for the slots, whose number the setting ``name`` determines.
        """
        for what, most in (("clients", self.clients), ("rounds", self.rounds)):
            if self.slots > most:
                raise PrivacyError(
                    f"{name} exceeds the number of {what}, {most}: every slot requires a client and a round; increase "
                    "sampling-rate"
                )


@lru_cache(maxsize=8)
def slots_of(clients: int, slots: int) -> IntArray:
    """(M,) slot of every client: the ids in the order of a fixed public hash, in turn.

    Slots have equal sizes, up to one client. The hash (splitmix64) keeps them apart from groups of clients with regular
    ids, and no version of a library changes it.
    """
    ids = np.arange(1, clients + 1, dtype=np.uint64)
    hashes = ids * np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    slot_of_client = np.empty(clients, np.int64)
    slot_of_client[np.argsort(hashes ^ (hashes >> np.uint64(31)), kind="stable")] = np.arange(clients) % slots
    return slot_of_client
