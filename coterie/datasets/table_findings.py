"""What is left out of a table, clamped, or looks wrong. It is for the owner of the table alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# Difference between the shares of two classes that is called uneven, and lost records of a class, at least.
_UNEVEN, _LOST = 0.1, 5
# Rows and values that are kept of each kind of finding, and characters of a value.
_FIRST, _LONGEST = 5, 40


@dataclass
class Finding:
    """A kind of problem of a table, and how often it occurs.

    Attributes:
        column: name of the column; empty: of whole rows.
        what: such as "not a number".
        effect: what happens to the record: "dropped" or "clamped".
        expected: whether the schema has a rule for it; otherwise it is an error.
        hint: what a setting would make of the first value, such as `'12,5' would be 12.5 with decimal = ","`.
        count: number of records.
        rows: the first rows; the row of a text file is the number of its first line, from 1, and row 1 of other files
            is the first record.
        values: their values.
        by_class: number of records of each class, by name; "" if a label cannot be read.
    """

    column: str
    what: str
    effect: str
    expected: bool
    hint: str = ""
    count: int = 0
    rows: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    by_class: Counter[str] = field(default_factory=Counter)

    def add(self, row: int, value: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.rows) < _FIRST:
            self.rows.append(row)
            self.values.append(value[:_LONGEST])

    def __str__(self) -> str:
        what = f"column {self.column!r}: {self.what}" if self.column else self.what
        records = f"{self.count:,} record{'s' * (self.count > 1)} {self.effect}"
        first = [f"{row} ({value})" if value else str(row) for row, value in zip(self.rows, self.values, strict=True)]
        more = ", ..." if self.count > len(first) else ""
        return f"{what}, {records}: row {', '.join(first)}{more}{self.hint and '; ' + self.hint}"


def uneven_losses(lost: Mapping[str, int], kept: Mapping[str, int]) -> str:
    """Return a warning if records of one class are left out far more often than those of another; otherwise empty.

    Args:
        lost: number of records that are left out, by class; "" if the class is not known.
        kept: number of the others, of every class.
    """
    totals = {name: count + lost.get(name, 0) for name, count in kept.items()}
    shares = {name: lost.get(name, 0) / total for name, total in totals.items() if total}
    if not shares:
        return ""
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if shares[most] - shares[least] < _UNEVEN or lost.get(most, 0) < _LOST:
        return ""
    return (
        f"{lost.get(most, 0):,} of {totals[most]:,} records of class {most!r} are left out, but "
        f"{lost.get(least, 0):,} of {totals[least]:,} of class {least!r}: what is left out is no chance"
    )
