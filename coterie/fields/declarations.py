"""Fields of what comes from another machine or a file: each is declared once, with its type and bounds.

    @dataclass(frozen=True, kw_only=True)
    class Question(Fields):
        round: Annotated[int, Bounds(0, 1_000_000)]
        precision: Annotated[str | None, OneOf(("float32", "bfloat16"))] = None

:meth:`Fields.from_record` reads the object from a mapping whose keys are the fields' names in kebab-case. A missing key
is an error unless the field may be None or is a flag: then its absence has that one meaning. No number has a default.

:class:`Bounded` checks the bounds of objects that are made in this process.
"""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from coterie.fields.removed import removal

#: Characters of a text, and of the schema of tables.
MAX_TEXT, MAX_SCHEMA = 4096, 2**20
# Characters of a value in an error.
_LONGEST_SHOWN = 60
_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", bytes: "bytes"}


class FieldError(ValueError):
    """A field is missing, of another type, or out of bounds."""


@dataclass(frozen=True)
class Bounds:
    """A closed range of finite numbers; ``above`` and ``below`` leave out its ends."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        least = self.low < value if self.above else self.low <= value  # NaN is not in it
        most = value < self.high if self.below else value <= self.high
        return least and most and (isinstance(value, int) or math.isfinite(value))

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{_text(self.low)}, {_text(self.high)}{')' if self.below else ']'}"

    @property
    def in_words(self) -> str:
        """The finite ends, such as "above 0 and at most 1"."""
        ends = {"above" if self.above else "at least": self.low, "below" if self.below else "at most": self.high}
        return " and ".join(f"{name} {_text(end)}" for name, end in ends.items() if math.isfinite(end))


def _text(end: float) -> str:
    return str(end) if isinstance(end, int) else f"{end:g}"


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a string."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Length:
    """Maximum number of entries of a list, of characters of a string, or of bytes."""

    maximum: int


@dataclass(frozen=True)
class Kind:
    """Type and limits of a value.

    Attributes:
        types: allowed types; an int is also a float.
        optional: whether it may be absent.
        many: whether it is a list of such values.
        bounds: range of a number.
        choices: allowed strings; empty: any.
        longest: maximum number of entries of a list, of characters of a string, and of bytes.
    """

    types: tuple[type, ...]
    optional: bool = False
    many: bool = False
    bounds: Bounds = Bounds()
    choices: tuple[str, ...] = ()
    longest: float = MAX_TEXT

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """The kind that an annotation describes."""
        hint, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        present = tuple(value_type for value_type in kinds if value_type is not types.NoneType)
        many = get_origin(present[0]) is tuple
        return cls(
            types=get_args(present[0])[:1] if many else present,
            optional=len(present) < len(kinds),
            many=many,
            bounds=next((limit for limit in limits if isinstance(limit, Bounds)), Bounds()),
            choices=next((limit.choices for limit in limits if isinstance(limit, OneOf)), ()),
            longest=next((limit.maximum for limit in limits if isinstance(limit, Length)), MAX_TEXT),
        )

    def allows(self, value: Any) -> bool:
        """Whether a value of this process, whose numbers may be NumPy's, is within the limits."""
        if value is None or str in self.types:
            return self.optional if value is None else value in self.choices
        right = isinstance(value, numbers.Real if float in self.types else numbers.Integral)
        return right and not isinstance(value, bool) and value in self.bounds

    @property
    def in_words(self) -> str:
        """What is allowed, such as "an integer, at least 1"."""
        if self.types[0] not in (int, float):
            return " or ".join(self.choices) or ("true or false" if self.types[0] is bool else "a string")
        noun, limits = "an integer," if self.types[0] is int else "a finite number", self.bounds.in_words
        return f"{noun} {limits}" if limits else noun.rstrip(",")

    def read(self, key: str, record: Mapping[str, Any]) -> Any:
        """Return the value of a key.

        Raises:
            FieldError: it is missing, has another type, or is out of bounds.
        """
        if key in record:
            values = record[key]
            if not self.many:
                return self._checked(key, values)
            if not isinstance(values, list | tuple) or len(values) > self.longest:
                raise FieldError(f"{key} must be a list of at most {self.longest} entries")
            return tuple(self._checked(key, value) for value in values)
        if not self.optional and self.types != (bool,):
            raise FieldError(f"{key} is missing")
        return None if self.optional else False

    def _checked(self, key: str, value: Any) -> Any:
        shown = repr(value)[:_LONGEST_SHOWN]
        if float in self.types and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        if type(value) not in self.types:
            raise FieldError(
                f"{key} is {shown}; expected {' or '.join(_NOUNS[value_type] for value_type in self.types)}"
            )
        if isinstance(value, str):
            self._check_text(key, value)
        elif isinstance(value, bytes):
            if len(value) > self.longest:
                raise FieldError(f"{key} has {len(value)} bytes; expected at most {self.longest}")
        elif value not in self.bounds:
            noun = "a finite number" if type(value) is float else "an integer"
            limits = "" if self.bounds == Bounds() else f" in {self.bounds}"
            raise FieldError(f"{key} is {shown}; expected {noun}{limits}")
        return value

    def _check_text(self, key: str, text: str) -> None:
        if self.choices and text not in self.choices:
            expected = f"{key} is {repr(text)[:_LONGEST_SHOWN]}; expected one of {', '.join(self.choices)}"
            raise FieldError(removal(f"{key} = {text}") or expected)
        if len(text) > self.longest:
            raise FieldError(f"{key} has {len(text)} characters; expected at most {self.longest}")


class Fields:
    """Base of frozen dataclasses that are read by :meth:`from_record`.

    A field is a value, a list, or itself an object with `from_record` and `to_record`; its keys are in the same record.
    """

    #: The error of :meth:`from_record`.
    error: ClassVar[type[ValueError]] = FieldError

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read every field; other keys of ``record`` are ignored.

        Raises:
            ValueError: an :attr:`error`: a key is missing, or its value has another type or is out of bounds.
        """
        try:
            return cls(
                **{
                    name: field.read(key_of(name), record) if isinstance(field, Kind) else field.from_record(record)
                    for name, field in cls._kinds().items()
                }
            )
        except FieldError as error:
            raise cls.error(str(error)) from None

    def to_record(self) -> dict[str, Any]:
        """Values of a ConfigRecord from which :meth:`from_record` reads the same object.

        Raises:
            ValueError: an :attr:`error`: a field has another type or is out of bounds.
        """
        record: dict[str, Any] = {}
        try:
            for name, field in self._kinds().items():
                value, key = getattr(self, name), key_of(name)
                if not isinstance(field, Kind):
                    record |= value.to_record()
                elif value is not None:
                    record[key] = list(value) if isinstance(value, tuple) else value
                    field.read(key, record)
        except FieldError as error:
            raise self.error(str(error)) from None
        return record

    @classmethod
    def keys(cls) -> frozenset[str]:
        """The key of every value."""
        return frozenset(
            key
            for name, field in cls._kinds().items()
            for key in ([key_of(name)] if isinstance(field, Kind) else field.keys())
        )

    @classmethod
    @cache
    def _kinds(cls) -> dict[str, Any]:
        """The kind of every field, or the class of one that is an object."""
        hints = get_type_hints(cls, include_extras=True)
        return {
            field.name: hint if hasattr(hint := hints[field.name], "from_record") else Kind.of(hint)
            for field in fields(cls)  # type: ignore[arg-type]
            if field.init
        }


class Bounded:
    """Base of dataclasses whose annotated fields are within their limits, however an object is made."""

    #: The error of the constructor.
    error: ClassVar[type[Exception]] = FieldError

    def __post_init__(self) -> None:
        for name, kind in self._limits().items():
            if not kind.allows(value := getattr(self, name)):
                raise self.error(f"{key_of(name)} must be {kind.in_words}, not {value!r}")

    @classmethod
    @cache
    def _limits(cls) -> dict[str, Kind]:
        hints = get_type_hints(cls, include_extras=True)
        return {name: Kind.of(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}


def key_of(name: str) -> str:
    """Return the key of a field: its name in kebab-case."""
    return name.replace("_", "-")
