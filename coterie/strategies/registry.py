"""Every method by its name in a configuration: files of this subpackage are discovered, others are imported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from coterie import strategies
from coterie.fields.plugins import PluginError, accepts, load, provided
from coterie.fields.settings import ConfigError, Settings
from coterie.strategies import ClusteredStrategy, StrategyError

_UNITS = ("client", "record", "none")
#: Options that depend on data and device, which a method may need (``Declarations.needs``).
NEEDS = ("true_groups", "example_shape", "feature_range", "device")


def _declared() -> Iterator[type[ClusteredStrategy]]:
    """Every strategy that declares a name, in the module that defines it."""
    for module in iter_modules(strategies.__path__, f"{strategies.__name__}."):
        if module.name == __name__:
            continue
        for value in vars(import_module(module.name)).values():
            strategy = isinstance(value, type) and issubclass(value, ClusteredStrategy)
            if strategy and value.__module__ == module.name and "name" in vars(value):
                yield value


#: The methods of Coterie.
STRATEGIES: dict[str, type[ClusteredStrategy]] = {}
for _method in _declared():
    _other = STRATEGIES.setdefault(_method.name, _method)
    if _other is not _method:
        raise ValueError(f"strategy {_method.name!r} is defined in {_other.__module__} and in {_method.__module__}")


def strategy_class(name: str) -> type[ClusteredStrategy]:
    """Return the class of a method.

    Args:
        name: a key of :data:`STRATEGIES`, a custom ``module:Class``, or an entry point of the group
            ``coterie.strategies``.

    Raises:
        StrategyError: the name is unknown, or the class cannot be imported or breaks the contract of a method.
    """
    return STRATEGIES[name] if name in STRATEGIES else _custom(name)


@cache
def _custom(name: str) -> type[ClusteredStrategy]:
    if not provided("strategy", name):
        raise StrategyError(f"unknown strategy {name!r}; `coterie strategies` lists all, or use module:Class")
    try:
        candidate = load("strategy", name)
    except PluginError as error:
        raise StrategyError(str(error)) from error
    for problem in contract_problems(candidate):
        raise StrategyError(f"strategy '{name}': {problem}")
    checked: type[ClusteredStrategy] = candidate
    return checked


def contract_problems(candidate: Any) -> list[str]:
    """Return how a class breaks the contract of a user's strategy, without running it; empty if it does not."""
    if not (isinstance(candidate, type) and issubclass(candidate, ClusteredStrategy)):
        what = candidate.__name__ if isinstance(candidate, type) else f"a {type(candidate).__name__}"
        return [f"{what} is not a subclass of coterie.strategies.ClusteredStrategy"]
    declared, problems = vars(candidate), []
    for name in ("name", "title", "paper"):
        if not isinstance(getattr(candidate, name, None), str) or (name == "name" and name not in declared):
            problems.append(f"{candidate.__name__} must declare {name}, a string")
    if "name" in declared and STRATEGIES.get(str(candidate.name), candidate) is not candidate:
        problems.append(f"name = {candidate.name!r} is that of a method of Coterie: choose another one")
    if not isinstance(declared.get("row_wise"), bool):
        problems.append(
            f"{candidate.__name__} must declare row_wise itself: True if a client's label is a function of its own "
            "data and released values only, else False"
        )
    if not candidate.units or set(candidate.units) - set(_UNITS):
        problems.append(f"units = {candidate.units!r} must name some of {', '.join(_UNITS)}")
    if candidate.produces != "models":
        problems.append("produces must be 'models': only methods of coterie/strategies cluster records")
    if unknown := sorted(set(candidate.needs) - set(NEEDS)):
        problems.append(f"needs = {', '.join(unknown)}: must be some of {', '.join(NEEDS)}")
    if inspect.isabstract(candidate) and candidate.__new__ is object.__new__:  # else it may choose a subclass
        problems.append(f"{candidate.__name__} must define {', '.join(sorted(candidate.__abstractmethods__))}")
    elif not accepts(candidate.round, 3):
        problems.append(f"round{inspect.signature(candidate.round)} must accept (self, number, models)")
    if not accepts(candidate, 2, ["options"]):
        problems.append(
            f"{candidate.__name__}{inspect.signature(candidate)} must accept (plan, settings) and the options of "
            "ClusteredStrategy: add **options and pass them to super().__init__"
        )
    return problems + _settings_problems(candidate)


def _settings_problems(candidate: type[ClusteredStrategy]) -> list[str]:
    settings_class = candidate.settings_class
    if not (isinstance(settings_class, type) and issubclass(settings_class, Settings) and is_dataclass(settings_class)):
        return ["settings_class must be a frozen dataclass derived from coterie.fields.settings.Settings"]
    undecorated = settings_class is not Settings and "__dataclass_fields__" not in vars(settings_class)
    if undecorated or not settings_class.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return [f"{settings_class.__name__} must be decorated with @dataclass(frozen=True)"]
    try:
        settings_class()
    except (ConfigError, AssertionError, KeyError) as error:
        return [f"{settings_class.__name__}: declare every field as name: type = setting(default, help): {error}"]
    if settings_class.declared() and not settings_class.table:
        return [f"{settings_class.__name__} must declare table, the name of its table of settings"]
    return []
