"""Cells of a table: what counts as a number, a text or a boolean."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

#: A cell: text, a value of a typed file, or a `BadCell`; None is missing.
Cell = Any

# A decimal comma before three digits, which may also separate thousands.
_AMBIGUOUS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
# A number below or above a limit, and a number before its unit.
_CENSORED, _UNIT = re.compile(r"[<>≤≥]=?\s*(.*)"), re.compile(r"(.*\d)\s*([^\d\s_+.,-][^\d]*)")
_WORDS = {
    word: truth for truth, texts in enumerate(("false", "true")) for word in (texts, texts.title(), texts.upper())
}
#: 0 and 1 as pandas, polars, R, databases and spreadsheets write booleans; parquet's are "false" and "true" here.
BOOLEANS = {**_WORDS, "f": 0, "F": 0, "0": 0, "t": 1, "T": 1, "1": 1}

# No-break spaces that separate thousands where a space is declared.
_SPACES = str.maketrans({"\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " "})
_NOTATIONS = (".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'")


@dataclass(frozen=True)
class BadCell:
    """A cell whose content is lost.

    Attributes:
        what: why.
        text: what stands in its place, such as #REF!.
        hint: what to do.
    """

    what: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Notation:
    """How a file writes numbers.

    Attributes:
        decimal: "." or ",".
        thousands: between groups of three digits; empty: none.
        comma_separated: whether commas separate the cells. Then `1,234` is no number with a decimal comma, unless the
            separator of thousands is declared.
    """

    decimal: str = "."
    thousands: str = ""
    comma_separated: bool = False

    def number(self, cell: Cell) -> float | None:
        """Return a finite number; None for any other cell."""
        if isinstance(cell, str):
            text = self._plain(cell.strip())
            if "_" in text or not text.isascii():  # float accepts more than a table should hold
                return None
            cell = text
        elif cell is None or isinstance(cell, bool):
            return None
        try:
            number = float(cell)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None

    def numbers(self, cells: Sequence[Cell]) -> npt.NDArray[np.float64]:
        """Return the finite numbers; NaN for other cells."""
        values = self.numbers_at_once(cells)
        if values is not None:
            return values
        numbers = map(self.number, cells)
        return np.fromiter((math.nan if number is None else number for number in numbers), np.float64, len(cells))

    def numbers_at_once(self, cells: Sequence[Cell]) -> npt.NDArray[np.float64] | None:
        """Return what `number` returns for every cell, if all are numbers, or all texts of one; otherwise None."""
        types = set(map(type, cells))
        numbers: Iterator[Any] = iter(cells)
        if types == {str}:
            text = "".join(cells)
            if "_" in text or not text.isascii() or (self.thousands and self.thousands in text):
                return None
            if self.decimal == ",":
                if "." in text or (self.comma_separated and "," in text):
                    return None
                numbers = (cell.replace(",", ".") for cell in cells)
            numbers = map(float, numbers)
        elif not types <= {int, float}:
            return None
        try:
            values = np.fromiter(numbers, np.float64, len(cells))
        except (ValueError, OverflowError):
            return None
        return values if np.isfinite(values).all() else None

    def hint(self, text: str) -> str:
        """Return what other settings of the file would make of a text that is not a number; empty: nothing."""
        effects: dict[float, str] = {}
        for decimal, thousands in _NOTATIONS:
            value = replace(self, decimal=decimal, thousands=thousands).number(text)
            if value is not None and value not in effects:
                changes = [f'decimal = "{decimal}"'] * (decimal != self.decimal)
                changes += [f'thousands = "{thousands}"'] * (thousands != self.thousands)
                effects[value] = f"{value:.15g} with {' and '.join(changes)}"
        if effects:
            return f'"{text}" would be {", or ".join(effects.values())}'
        if text in BOOLEANS:
            return f'"{text}" would be {BOOLEANS[text]} with type = "boolean"'
        censored = _CENSORED.fullmatch(text)
        plain = censored[1] if censored else text
        unit = _UNIT.fullmatch(plain) if self.number(plain) is None else None
        number = self.number(unit[1] if unit else plain)
        if number is None or not (censored or unit):
            return ""
        changes = ['censored = "limit"'] * bool(censored) + ([f'unit = "{unit[2]}"'] if unit else [])
        return f'"{text}" would be {number:.15g} with {" and ".join(changes)}'

    def measured(self, text: str, unit: str) -> tuple[float | None, str]:
        """Return the number of a text with a unit or a limit, or None, and the sign of the limit: "<", ">" or empty."""
        sign = {"≤": "<", "≥": ">"}.get(text[:1], text[:1])
        censored = _CENSORED.fullmatch(text)
        text = censored[1] if censored else text
        number = self.number(text.removesuffix(unit))
        return number, sign if censored else ""

    def _plain(self, text: str) -> str:
        """Return the text as Python writes numbers; empty if it is none."""
        if self.thousands:
            text = text.translate(_SPACES) if self.thousands == " " else text
            whole, point, fraction = text.partition(self.decimal)
            first, *groups = whole.lstrip("+-").split(self.thousands)
            right = not groups or 1 <= len(first) <= 3
            right = right and all(len(group) == 3 and group.isdecimal() for group in groups)
            if not right or self.thousands in fraction:
                return ""
            text = whole.replace(self.thousands, "") + point + fraction
        elif self.comma_separated and self.decimal == "," and _AMBIGUOUS.fullmatch(text):
            return ""
        if self.decimal == ",":
            return text.replace(",", ".") if "." not in text else ""
        return text


def spellings(values: Sequence[str]) -> dict[str, int]:
    """Return the position of every text of a category; true and false may be written as any program writes them."""
    positions = {value: i for i, value in enumerate(values)}
    if not all(value in _WORDS for value in values):
        return positions
    truths = {_WORDS[value]: i for i, value in enumerate(values)}
    return {text: truths[truth] for text, truth in BOOLEANS.items() if truth in truths} | positions


def codes(texts: Sequence[str], notation: Notation) -> frozenset[str]:
    """Return the texts for missing values that are numbers, such as -9."""
    return frozenset(text for text in texts if notation.number(text) is not None)


def as_text(cell: Cell) -> str:
    """Return a cell as a table would show it, in Unicode's form NFC; whole numbers without a fraction."""
    if isinstance(cell, str):
        return composed(cell.strip())
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell)


def composed(text: str) -> str:
    """Return a text in Unicode's form NFC, so that composed and decomposed letters are equal."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def integer(text: str) -> str:
    """Return the text of a whole number without its fraction, such as 1 for 1.0; other texts unchanged."""
    whole, dot, fraction = text.partition(".")
    return whole if dot and whole.lstrip("-").isdecimal() and not fraction.strip("0") else text


class Positions(dict[str, int]):
    """The position of every text of a category; -2 for other cells."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        super().__init__(positions)

    def of(self, cells: Sequence[Cell]) -> npt.NDArray[np.int64]:
        """Return the (n,) positions of cells; of a cell that is no text, -2."""
        if set(map(type, cells)) == {str}:
            return np.fromiter(map(self.__getitem__, cells), np.int64, len(cells))
        return np.full(len(cells), -2)

    def __missing__(self, key: str) -> int:
        return -2
