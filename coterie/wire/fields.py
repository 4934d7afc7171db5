"""Dataclasses that are read from a ConfigRecord of another machine: every field has a type and bounds.

A key is the field's name in kebab-case. A missing key is an error unless the field may be None or is a flag: then its
absence has that one meaning. No number has a default.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Self, Union, get_args, get_origin, get_type_hints

from coterie.bounds import MAX_TEXT, Bounds

# Characters of a value in an error.
_LONGEST_SHOWN = 60


class RequestError(ValueError):
    """A request with a field that is missing, of another type, or out of bounds."""


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a string."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Length:
    """Maximum number of entries of a list, or of characters of a string."""

    maximum: int


class Fields:
    """Base of frozen dataclasses that are read by :meth:`from_record`."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read every field; other keys of ``record`` are ignored.

        Raises:
            RequestError: a key is missing, or its value has another type or is out of bounds.
        """
        return cls(**{name: _read(name, hint, record) for name, hint in cls._hints().items()})

    def to_record(self) -> dict[str, Any]:
        """Values of a ConfigRecord from which :meth:`from_record` reads the same object.

        Raises:
            RequestError: a field has another type or is out of bounds.
        """
        values = {name: getattr(self, name) for name in self._hints()}
        record = {
            name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }
        self.from_record(record)
        return record

    @classmethod
    def keys(cls) -> frozenset[str]:
        """The key of every field."""
        return frozenset(name.replace("_", "-") for name in cls._hints())

    @classmethod
    @cache
    def _hints(cls) -> dict[str, Any]:
        hints = get_type_hints(cls, include_extras=True)
        return {field.name: hints[field.name] for field in fields(cls) if field.init}  # type: ignore[arg-type]


def _read(name: str, hint: Any, record: Mapping[str, Any]) -> Any:
    key = name.replace("_", "-")
    limits: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        limits = tuple(rest)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if key not in record:
        if types.NoneType in kinds:
            return None
        if kinds == (bool,):
            return False
        raise RequestError(f"{key} is missing")
    return _checked(key, record[key], tuple(kind for kind in kinds if kind is not types.NoneType), limits)


def _checked(key: str, value: Any, kinds: tuple[Any, ...], limits: tuple[Any, ...]) -> Any:
    shown = repr(value)[:_LONGEST_SHOWN]
    longest = next((limit.maximum for limit in limits if isinstance(limit, Length)), MAX_TEXT)
    if get_origin(kinds[0]) is tuple:
        if not isinstance(value, list | tuple) or len(value) > longest:
            raise RequestError(f"{key} must be a list of at most {longest} entries")
        return tuple(_checked(key, one, get_args(kinds[0])[:1], limits) for one in value)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise RequestError(f"{key} is {shown}; expected {' or '.join(_KINDS[kind] for kind in kinds)}")
    for limit in limits:
        if isinstance(limit, Bounds) and not isinstance(value, str) and value not in limit:
            what = "a finite number" if type(value) is float else "an integer"
            raise RequestError(f"{key} is {shown}; expected {what} in {limit}")
        if isinstance(limit, OneOf) and isinstance(value, str) and value not in limit.choices:
            raise RequestError(f"{key} is {shown}; expected one of {', '.join(limit.choices)}")
    if type(value) is float and not math.isfinite(value):
        raise RequestError(f"{key} is {shown}; expected a finite number")
    if isinstance(value, str) and len(value) > longest:
        raise RequestError(f"{key} has {len(value)} characters; expected at most {longest}")
    return value


_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
