"""Declarations of settings, and parsing of their values.

Each part of Coterie declares its settings as a frozen dataclass, one per table:

    @dataclass(frozen=True)
    class LCFLSettings(Settings):
        table = "lcfl"
        landmarks: int = setting(0, "models that every client evaluates; 0: all pairs", at_least=0, tuned=True)

The command line, TOML files, Flower's run configuration, error messages, certificates and documentation use these
declarations. A name is ``table.field`` in kebab-case, such as ``lcfl.landmarks``; the table "" has plain names.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from decimal import Decimal
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from coterie.fields import MAX_TEXT, Bounds, Kind, key_of
from coterie.fields.plugins import form, provided
from coterie.fields.removed import removal

#: Value of a setting that is not set; the method, the data set or the setting provides the default.
AUTO = "auto"

_SETTING = "setting"


class ConfigError(ValueError):
    """An invalid configuration; the message names the setting, its value, and the allowed values."""


@dataclass(frozen=True, kw_only=True)
class Setting(Kind):  # large: one field per property of a setting
    """The declaration of one setting. An optional one may be None, which `none` writes: by default "auto", not set.

    Attributes:
        name: full name, such as ``privacy.epsilon``.
        default: default value.
        help: one-line description.
        allowed: description of the allowed values.
        check: whether a text, or a number within the bounds, is allowed.
        tuned: whether it is usually tuned on results, outside the guarantee of a single run.
        client: whether clients receive it.
        place: whether it may change when a run is resumed: paths, timeouts, ports.
        only: name of a setting on which it depends, and the values of that setting for which it has an effect.
        custom: whether it may also name an object of users.
        path: whether it names a file or folder, in which ``~`` is replaced.
        none: text of None. Another one than "auto" is a value that users set, beside a default that is a number.
    """

    name: str
    default: Any
    help: str
    allowed: str
    check: Callable[[Any], bool]
    tuned: bool
    client: bool
    place: bool
    only: tuple[str, Collection[Any]] | None
    custom: bool
    path: bool
    none: str

    @property
    def kind(self) -> type:
        """int, float, str or bool."""
        return self.types[0]

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def shown_default(self) -> Any:
        """The default as written to files."""
        return self.none if self.default is None else self.default

    def parse(self, value: Any) -> Any:
        """Convert ``value``, which may be text, to the type of the setting, and check it.

        Raises:
            ConfigError: it has the wrong type or is not allowed.
        """
        if self.optional and (value is None or value == self.none):
            return None
        parsed = _convert(self.kind, value)
        if self.kind is str and parsed is not None and len(parsed) > self.longest:
            raise ConfigError(f"{self.name} has {len(parsed)} characters: must have at most {self.longest}")
        number = self.kind in (int, float)
        if parsed is None or (number and parsed not in self.bounds) or not self.check(parsed):
            if text := removal(f"{self.key} = {value}"):
                raise ConfigError(text)
            auto = f"{self.none!r} or " if self.optional else ""
            hint = suggestion(str(value), self.allowed.split(", ")) if self.kind is str else ""
            raise ConfigError(f"{self.name} = {value!r}: must be {auto}{self.allowed}{hint}")
        return self._expanded(parsed) if self.path else parsed

    def _expanded(self, path: str) -> str:
        """Return a path with ``~`` replaced by the home folder: no shell does that in a file or after ``--out=``.

        Variables are refused instead: whoever submits a run could read the environment of the server.
        """
        if "\n" in path:  # the content of the file
            return path
        if re.search(r"\$[\w{]", path):
            raise ConfigError(f"{self.name} = {path!r}: variables are not replaced; write the path in full")
        expanded = os.path.expanduser(path)
        if expanded.startswith("~"):
            raise ConfigError(f"{self.name} = {path!r}: there is no user of this name; write the path in full")
        return expanded


def setting(
    default: Any,
    help: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    within: Bounds | None = None,
    longest: float | None = None,
    choices: Iterable[str] = (),
    custom: str = "",
    also: Callable[[str], bool] = lambda value: False,
    allowed: str = "",
    check: Callable[[Any], bool] = lambda value: True,
    tuned: bool = False,
    client: bool = False,
    place: bool = False,
    path: bool = False,
    only: tuple[str, Collection[Any]] | None = None,
    none: str = AUTO,
) -> Any:
    """Declare a field of a :class:`Settings` dataclass; numbers must be finite.

    Args:
        default: default value; None if it depends on other settings.
        help: one-line description.
        at_least: smallest value of a number.
        above: the same, excluded.
        at_most: largest value of a number.
        below: the same, excluded.
        within: range of a number, in place of these four.
        longest: maximum number of characters of a text; None: :data:`coterie.fields.MAX_TEXT` if clients receive it.
        choices: allowed values of a string.
        custom: kind of the objects of users that are allowed as well, a key of :data:`coterie.fields.plugins.GROUPS`;
            empty: none.
        also: whether a name beside the choices is allowed as well.
        allowed: description of the allowed values; by default derived from bounds and choices.

    The other arguments are attributes of :class:`Setting`.
    """
    names = tuple(choices)

    def ok(value: Any) -> bool:
        return check(value) and (
            not names or value in names or also(value) or (bool(custom) and provided(custom, value))
        )

    bounds = within or Bounds(max(at_least, above), min(at_most, below), above > at_least, below < at_most)
    if names:
        allowed = allowed or ", ".join(names) + (f", or {form(custom)}" if custom else "")
    if longest is None:
        longest = MAX_TEXT if client else math.inf
    limits = {"bounds": bounds, "longest": longest, "check": ok, "choices": names, "custom": bool(custom)}
    flags = {"tuned": tuned, "client": client, "place": place, "path": path, "only": only, "none": none}
    return field(default=default, metadata={_SETTING: {"help": help, "allowed": allowed, **limits, **flags}})


def accepted_by(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    """Return the check of a text by a parser, which raises a ValueError for what is not allowed."""

    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


@dataclass(frozen=True)
class Settings:
    """Base of frozen dataclasses of settings; the constructor checks all values.

    A setting is in the table of the class that declares it, so that methods may share a table by inheritance.

    Raises:
        ConfigError: a value has the wrong type or is not allowed.
    """

    #: Name of the table in files.
    table: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, declared in self.declared().items():
            object.__setattr__(self, name, declared.parse(getattr(self, name)))

    @classmethod
    @cache
    def declared(cls) -> dict[str, Setting]:
        """Return the declaration of every field."""
        hints = get_type_hints(cls)
        tables = {name: vars(base).get("table") for base in reversed(cls.__mro__) for name in vars(base)}
        declarations = {}
        for declared in fields(cls):
            metadata, kind = dict(declared.metadata[_SETTING]), Kind.of(hints[declared.name])
            metadata["allowed"] = metadata["allowed"] or replace(kind, bounds=metadata["bounds"]).in_words
            name = ".".join(filter(None, (tables[declared.name] or cls.table, key_of(declared.name))))
            assert declared.default is not MISSING, f"{name} has no default"
            declaration = Setting(kind.types, kind.optional, name=name, default=declared.default, **metadata)
            declarations[declared.name] = declaration
        return declarations

    @classmethod
    def named(cls) -> dict[str, Setting]:
        """Return the declarations by full name."""
        return {declared.name: declared for declared in cls.declared().values()}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Return the table with values by full name; other fields have their defaults."""
        return cls(**{field: values[each.name] for field, each in cls.declared().items() if each.name in values})

    def values(self) -> dict[str, Any]:
        """Return all values by full name; None is written as its text, such as "auto"."""
        return {
            declared.name: declared.none if getattr(self, name) is None else getattr(self, name)
            for name, declared in self.declared().items()
        }

    # ---- what clients receive ---------------------------------------------------------------------------------

    @classmethod
    @cache
    def received(cls) -> dict[str, Kind]:
        """Return the kind of every field that clients receive.

        Any text may name an object of users: whether it does depends on what is installed, which no reply reveals.
        """
        received = {name: declared for name, declared in cls.declared().items() if declared.client}
        return {name: replace(kind, choices=()) if kind.custom else kind for name, kind in received.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read the fields that clients receive from what a server sent; other fields have their defaults.

        Raises:
            FieldError: a key is missing, or its value has another type or is out of bounds.
        """
        table = object.__new__(cls)  # without the conversions and the search for installed objects of users
        values = {name: reader.read(key_of(name), record) for name, reader in cls.received().items()}
        for name, declared in cls.declared().items():
            object.__setattr__(table, name, values.get(name, declared.default))
        return table

    def to_record(self) -> dict[str, Any]:
        """Return the values that clients receive, by key."""
        values = {key_of(name): getattr(self, name) for name in self.received()}
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def keys(cls) -> frozenset[str]:
        """The keys of these values."""
        return frozenset(map(key_of, cls.received()))


def _convert(value_type: type, value: Any) -> Any:
    """Return ``value`` as ``value_type``; None if it cannot be converted."""
    if value_type is bool:
        flags = {"true": True, "false": False}
        return value if isinstance(value, bool) else flags.get(str(value).lower())
    if isinstance(value, bool) or value is None:
        return None
    try:
        if value_type is int:
            return int(Decimal(str(value))) if float(value).is_integer() else None  # exact, also above 2^53
        return value_type(value)
    except (TypeError, ValueError, OverflowError):
        return None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a hint at the most similar name; empty if there is none."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of settings as one mapping of full names, as Flower flattens a run configuration."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            values[name] = value
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Invert :func:`flat`; plain names come first, as TOML requires."""
    tables = {name: value for name, value in values.items() if "." not in name}
    for name, value in values.items():
        table, dot, key = name.rpartition(".")
        if dot:
            tables.setdefault(table, {})[key] = value
    return tables
