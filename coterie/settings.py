"""Declarations of settings, their values as they are read from text or TOML, and names that earlier versions used.

Every part of Coterie declares its settings as a frozen dataclass beside its code, one table each:

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
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

#: The value of a setting that is not set. It then has the method's, the data set's, or its own default.
AUTO = "auto"

_SETTING = "setting"


class ConfigError(ValueError):
    """An invalid configuration; the message names the setting, the value, and what is allowed."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Attributes:
        name: its full name, such as ``privacy.epsilon``.
        kind: int, float, str or bool.
        optional: whether None is a value: it is written "auto", and its meaning depends on other settings.
        default: its default.
        help: one line.
        allowed: description of the allowed values.
        ok: whether a value of the right type is allowed.
        tuned: whether it is usually tuned on results, outside the guarantee of one run.
        client: whether clients receive it.
        place: whether it may change when a run resumes: paths, timeouts, ports.
        only: the setting on which its use depends, and the values of that with which it is used.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    allowed: str
    ok: Callable[[Any], bool]
    tuned: bool
    client: bool
    place: bool
    only: tuple[str, Collection[Any]] | None

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def shown_default(self) -> Any:
        """The default as it is written to files."""
        return AUTO if self.default is None else self.default

    def parse(self, value: Any) -> Any:
        """``value``, or the number or flag that a text stands for.

        Raises:
            ConfigError: it has the wrong type or is not allowed.
        """
        if self.optional and (value is None or value == AUTO):
            return None
        parsed = _convert(self.kind, value)
        if parsed is None or not self.ok(parsed):
            words = f"{AUTO!r} or " if self.optional else ""
            hint = nearest(str(value), self.allowed.split(", ")) if self.kind is str else ""
            raise ConfigError(f"{self.name} = {value!r}: must be {words}{self.allowed}{hint}")
        return parsed


def setting(
    default: Any,
    help: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    choices: Iterable[str] = (),
    custom: bool = False,
    allowed: str = "",
    check: Callable[[Any], bool] = lambda value: True,
    tuned: bool = False,
    client: bool = False,
    place: bool = False,
    only: tuple[str, Collection[Any]] | None = None,
) -> Any:
    """A field of a :class:`Settings` dataclass; numbers are finite.

    Args:
        default: its default; None where it depends on other settings.
        help: one line.
        at_least, above, at_most, below: bounds of a number.
        choices: all values of a text.
        custom: whether ``module:function`` is allowed beside the choices.
        allowed: description of the allowed values; derived from bounds and choices where it is empty.
        check: whether a number within the bounds is allowed.
        tuned, client, place, only: see :class:`Setting`.
    """
    words = tuple(choices)

    def ok(value: Any) -> bool:
        if isinstance(value, str):
            return not words or value in words or (custom and ":" in value)
        if isinstance(value, bool):
            return True
        return math.isfinite(value) and at_least <= value <= at_most and above < value < below and check(value)

    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    bounds = " and ".join(f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit))
    if words:
        allowed = allowed or ", ".join(words) + (", or module:function" if custom else "")
    about = {"help": help, "allowed": allowed, "bounds": bounds, "ok": ok}
    about |= {"tuned": tuned, "client": client, "place": place, "only": only}
    return field(default=default, metadata={_SETTING: about})


@dataclass(frozen=True)
class Settings:
    """Base of frozen dataclasses of settings; values are checked when an object is made.

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
        """The declaration of every field."""
        hints = get_type_hints(cls)
        return {each.name: _declaration(cls.table, each, hints[each.name]) for each in fields(cls)}

    @classmethod
    def named(cls) -> dict[str, Setting]:
        """The declarations by the full names of the settings."""
        return {declared.name: declared for declared in cls.declared().values()}

    def values(self) -> dict[str, Any]:
        """Every value by the full name of its setting; None is written "auto"."""
        return {
            declared.name: AUTO if getattr(self, name) is None else getattr(self, name)
            for name, declared in self.declared().items()
        }


def _declaration(table: str, each: Any, hint: Any) -> Setting:
    about = dict(each.metadata[_SETTING])
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next(one for one in kinds if one is not types.NoneType)
    bounds = about.pop("bounds")
    numbers = {int: ("an integer, ", "an integer"), float: ("a finite number ", "a finite number")}
    if not about["allowed"]:
        stem, alone = numbers.get(kind, ("", "true or false" if kind is bool else "a string"))
        about["allowed"] = stem + bounds if bounds else alone
    name = ".".join(filter(None, (table, each.name.replace("_", "-"))))
    assert each.default is not MISSING, f"{name} has no default"
    return Setting(name=name, kind=kind, optional=types.NoneType in kinds, default=each.default, **about)


def _convert(kind: type, value: Any) -> Any:
    """``value`` as ``kind``; None if it cannot be converted."""
    if kind is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(str(value).lower())
    if isinstance(value, bool) or value is None:
        return None
    try:
        if kind is int:
            number = float(value)
            return int(number) if number.is_integer() else None
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        return None


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint at the most similar of some words; empty if there is none."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of settings as one mapping of full names, as Flower flattens a run configuration."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            found[name] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flat`; plain names come first, as TOML needs."""
    found = {name: value for name, value in values.items() if "." not in name}
    for name, value in values.items():
        table, dot, key = name.rpartition(".")
        if dot:
            found.setdefault(table, {})[key] = value
    return found


#: Names of settings in earlier versions, whose run folders have one table without subtables.
RENAMED = {
    "clip": "clip-norm",
    "respawn-every": "reseed-every",
    "first-noise": "first-round-noise-ratio",
    "within": "cluster-optimizer",
    "gan-average": "ema-decay",
    "wait": "registration-timeout",
}


def current(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run folder with their present names, which may lack the table."""
    return {
        RENAMED.get(name, name): AUTO if (name, value) in (("seed", "none"), ("num-classes", "none")) else value
        for name, value in flat(stored).items()
    }
