"""Account of what is left out of a client's data. It is for the owner of the data alone, and never sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.datasets import Table

#: Examples that are kept of each loss.
MAX_EXAMPLES = 3
# Rows and values that are kept of each kind of finding, and characters of a value.
_FIRST, _LONGEST = 5, 40
# Classes differ in their losses if their shares do by this much, and the larger one consists of this many records.
_DIFFERENCE, _FEWEST = 0.1, 5


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


@dataclass(frozen=True)
class Loss:
    """What is left out or changed for one reason.

    Attributes:
        reason: such as "unsupported file type .dcm".
        unit: "record"; "cell"; or "file", "sheet" or "array" if it was not read, and so may hold several records.
        count: number of them.
        effect: "left out"; or, of records that are used, such as "clamped".
        examples: their first names or rows.
        classes: number by class, of those whose class is known.
        by_rule: whether a schema or a declaration demands it.
    """

    reason: str
    unit: str = "record"
    count: int = 1
    effect: str = "left out"
    examples: tuple[str, ...] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    by_rule: bool = False

    def __add__(self, other: Loss) -> Loss:
        """Return both as one loss; the reason is that of the first."""
        return replace(
            self,
            count=self.count + other.count,
            examples=(self.examples + other.examples)[:MAX_EXAMPLES],
            classes=Counter(self.classes) + Counter(other.classes),
        )

    def __str__(self) -> str:
        text = f"{self.reason}, {self.count:,} {self.unit}{'s' * (self.count != 1)} {self.effect}"
        text += " by rule" * self.by_rule
        if self.classes:
            text += f" ({', '.join(f'{count:,} of class {name}' for name, count in self.classes.items())})"
        return text + (f", such as {', '.join(self.examples)}" if self.examples else "")


@dataclass(frozen=True)
class LeftOut:
    """All losses of a client.

    Attributes:
        losses: one for each reason, in the order of their first occurrence.
        records: number of records that are left out; a record with several losses counts once.
        classes: number of records and files that are left out, by class, of those whose class is known.
    """

    losses: tuple[Loss, ...] = ()
    records: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, losses: Iterable[Loss], records: int | None = None, classes: Mapping[str, int] | None = None
    ) -> LeftOut:
        """Merge losses of the same reason.

        Args:
            losses: in any number and order.
            records: number of records left out, if a record may have several losses; None: each has one.
            classes: the same by class; None: each record or file has one loss.
        """
        merged: dict[tuple[str, str, str, bool], Loss] = {}
        for loss in losses:
            key = loss.reason, loss.unit, loss.effect, loss.by_rule
            merged[key] = merged[key] + loss if key in merged else replace(loss, examples=loss.examples[:MAX_EXAMPLES])
        every = tuple(merged.values())
        out = [loss for loss in every if loss.effect == "left out"]
        if records is None:
            records = sum(loss.count for loss in out if loss.unit == "record")
        if classes is None:
            classes = sum((Counter(loss.classes) for loss in out), Counter())
        return cls(every, records, dict(classes))

    @classmethod
    def of_table(cls, table: Table) -> LeftOut:
        """Return the account of a table, whose findings may concern the same records."""
        losses = []
        for finding in table.findings:
            values = zip(finding.rows, finding.values, strict=True)
            losses.append(
                Loss(
                    f"column {finding.column!r}: {finding.what}" if finding.column else finding.what,
                    count=finding.count,
                    effect="left out" if finding.effect == "dropped" else finding.effect,
                    examples=tuple(f"row {row}" + f" ({value})" * bool(value) for row, value in values),
                    classes={name: number for name, number in finding.by_class.items() if name},
                    by_rule=finding.expected,
                )
            )
        return cls.of((*losses, *table.beside), table.records - len(table.y), table.lost)

    @property
    def files(self) -> int:
        """Number of files that were not read."""
        return self._count("file")

    def _count(self, unit: str) -> int:
        return sum(loss.count for loss in self.losses if loss.unit == unit)

    def __bool__(self) -> bool:
        """Whether anything is left out or changed."""
        return bool(self.losses)

    def __add__(self, other: LeftOut) -> LeftOut:
        """Return the account of two parts of the data."""
        return LeftOut.of(
            self.losses + other.losses, self.records + other.records, Counter(self.classes) + Counter(other.classes)
        )

    def __str__(self) -> str:
        """Return the totals in one line."""
        counts = ((self.records, "record"), *((self._count(unit), unit) for unit in ("file", "sheet", "array")))
        return " and ".join(f"{n:,} {unit}{'s' * (n != 1)}" for n, unit in counts if n) or "nothing"

    def to_json(self) -> dict[str, Any]:
        """Return all of it, with the keys of the attributes."""
        losses = [
            {
                "reason": loss.reason,
                "unit": loss.unit,
                "count": loss.count,
                "effect": loss.effect,
                "examples": list(loss.examples),
                "classes": dict(loss.classes),
                "by-rule": loss.by_rule,
            }
            for loss in self.losses
        ]
        return {"records": self.records, "files": self.files, "classes": dict(self.classes), "losses": losses}


def unequal_losses(kept: Mapping[str, int], lost: Mapping[str, int]) -> str:
    """Return a warning if classes lose different shares of their records; empty if they do not.

    Models learn such a difference as if it were one of the classes.

    Args:
        kept: number of usable records by class.
        lost: number of records left out by class.
    """
    totals = {name: kept.get(name, 0) + lost.get(name, 0) for name in {**kept, **lost}}
    shares = {name: lost.get(name, 0) / total for name, total in totals.items() if total}
    if len(shares) < 2:
        return ""
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    if shares[most] - shares[least] < _DIFFERENCE or lost.get(most, 0) < _FEWEST:
        return ""
    worst, best = (f"{lost.get(name, 0):,} of {totals[name]:,} of class {name}" for name in (most, least))
    return f"losses differ between classes: {worst} are left out, and {best}; models learn from what remains"
