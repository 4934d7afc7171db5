"""Units of privacy that hold several records of a client, such as patients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.fields import UNIT_SHARES

# One in this many records or units is held out.
_HELD_OUT = 5


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a client's records.

    Attributes:
        of_record: (n,) index of each record's unit, from 0.
        most: largest number of records of a unit in a step of DP-SGD.
        names: (U,) of the units; None: they have none.
    """

    of_record: npt.NDArray[np.int64]
    most: int
    names: npt.NDArray[np.str_] | None = None

    @classmethod
    def named(cls, names: Sequence[str] | npt.NDArray[Any], most: int) -> Units:
        """Return the units of records that have these names.

        Examples:
            >>> Units.named(["P7", "P3", "P7"], most=8).of_record
            array([1, 0, 1])
        """
        distinct, of_record = np.unique(np.asarray(names, dtype=str), return_inverse=True)
        return cls(of_record.astype(np.int64), most, distinct)

    def only(self, rows: npt.NDArray[Any]) -> Units:
        """Return the units of some of the records."""
        units, of_record = np.unique(self.of_record[rows], return_inverse=True)
        return Units(of_record.astype(np.int64), self.most, None if self.names is None else self.names[units])

    def held_out_shares(self, trained: Units) -> npt.NDArray[np.int64]:
        """Return the (n,) shares of held-out records in a count of their units.

        The records of a unit share :data:`~coterie.fields.UNIT_SHARES` equally, rounded down. Those of a unit that is
        trained on have none, so that what a unit adds to a count is a function of its own records.

        Args:
            trained: units of the training records.

        Examples:
            >>> Units.named(["P1", "P2", "P1", "P3"], 8).held_out_shares(Units.named(["P3", "P4"], 8))
            array([2520, 5040, 2520,    0])
        """
        assert self.names is not None
        assert trained.names is not None
        shares = np.where(np.isin(self.names, trained.names), 0, UNIT_SHARES // np.bincount(self.of_record))
        return np.asarray(shares[self.of_record], np.int64)

    def __len__(self) -> int:
        return int(self.of_record.max(initial=-1)) + 1

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """(U, most) records of each unit in the order of the file, at most the first ones; -1 where it has no more."""
        order = np.argsort(self.of_record, kind="stable")
        sizes = np.bincount(self.of_record, minlength=len(self))
        place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # among the records of its unit
        kept = place < self.most
        rows = np.full((len(self), self.most), -1, np.int64)
        rows[self.of_record[order[kept]], place[kept]] = order[kept]
        return rows


def is_held_out_unit(name: str) -> bool:
    """Decide by a hash of its name whether all records of a unit are held out."""
    return is_held_out_by(hashlib.sha256(name.encode()).digest())


def is_held_out_by(digest: bytes) -> bool:
    """Decide by a SHA-256 whether what it is of is held out."""
    return int.from_bytes(digest) % _HELD_OUT == 0
