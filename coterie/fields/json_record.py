"""Base of what is stored as JSON: each type writes and reads its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of types that are stored as JSON. A field that is None or empty is not stored."""

    #: Fields that are stored even then, and fields that are stored in another file.
    always: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @cache
    def stored(cls) -> dict[str, Any]:
        """Return the type of every stored field by name."""
        hints = get_type_hints(cls)
        return {
            stored_field.name: hints[stored_field.name]
            for stored_field in fields(cls)
            if stored_field.name not in cls.elsewhere
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read a stored record; null is the default of a field, and keys that are no field are ignored.

        Raises:
            ValueError: a value is missing or has another type.
        """
        given = {name: (hint, document[name]) for name, hint in cls.stored().items() if document.get(name) is not None}
        try:
            return cls(**{name: _parsed(name, *value) for name, value in given.items()})
        except (TypeError, OverflowError) as error:  # a field without default, or a number that is too large
            raise ValueError(str(error).removeprefix(f"{cls.__name__}.__init__() ")) from None

    def to_json(self) -> dict[str, Any]:
        """Return the stored fields as JSON values; numbers that are not finite become null."""
        values = {name: plain(getattr(self, name)) for name in self.stored()}
        return {name: value for name, value in values.items() if value not in (None, [], {}) or name in self.always}


def finite(value: float | None) -> float | None:
    """Return ``value``, or None for infinity and NaN, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def _parsed(name: str, hint: Any, value: Any) -> Any:
    """Return a JSON value as the type of a field; no number that is not finite, except in lists and without None."""
    value_type, *others = get_args(hint) if NoneType in get_args(hint) else (hint,)
    origin = get_origin(value_type) or value_type
    if value is None and (others or value_type is float):
        return None if others else math.nan
    if value_type is float and type(value) in (int, float):
        return finite(float(value)) if others else float(value)
    if origin is tuple and isinstance(value, list):
        return tuple(_parsed(name, get_args(value_type)[0], entry) for entry in value)
    if value_type is Any or type(value) is value_type or (origin is Mapping and isinstance(value, Mapping)):
        return value
    if isinstance(value_type, type) and issubclass(value_type, Record) and isinstance(value, Mapping):
        return value_type.from_json(value)
    raise ValueError(f"{name} is {repr(value)[:60]}; expected {_EXPECTED.get(origin, 'an object')}")


_EXPECTED = {int: "an integer", float: "a number", str: "a string", bool: "true or false", tuple: "a list"}


def plain(value: Any) -> Any:
    """Return a value as JSON, in which numbers that are not finite are null."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
