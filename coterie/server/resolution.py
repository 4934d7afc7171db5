"""Names and precedence of settings: from the sources of a run to one value of every setting.

    sources --combine--> given values by full name --resolve--> values --from_values--> tables

Explicit values take precedence over the defaults of the method, these over the defaults of the data set, and these over
the default of the setting. "auto" means that a setting is not set. The same rules apply to the command line, TOML files
and Flower's run configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from coterie.datasets.settings import DataSettings, add_determined, default_settings
from coterie.fields.removed import removal
from coterie.fields.settings import AUTO, ConfigError, Setting, Settings, flat, suggestion
from coterie.models.settings import TrainingSettings
from coterie.privacy.settings import REQUIRE_PRIVACY, UNIT, PrivacySettings, RecordLevelSettings
from coterie.rounds.run_state import StrategyError
from coterie.server.settings import DeploymentSettings, EvaluationSettings, RunSettings
from coterie.strategies import ClusteredStrategy
from coterie.strategies.registry import STRATEGIES, strategy_class
from coterie.strategies.settings import AggregationSettings


class Tables:
    """The tables of every run, in display order."""

    run: RunSettings
    data: DataSettings
    training: TrainingSettings
    aggregation: AggregationSettings
    privacy: PrivacySettings
    record_level: RecordLevelSettings
    evaluation: EvaluationSettings
    deployment: DeploymentSettings


#: Their declarations, by the name of the attribute, and alone.
TABLES: dict[str, type[Settings]] = get_type_hints(Tables)
COMMON = tuple(TABLES.values())

_COMMON: dict[str, Setting] = {name: setting for table in COMMON for name, setting in table.named().items()}

#: All settings by full name: common settings, then those of each method of Coterie.
SETTINGS: dict[str, Setting] = _COMMON | {
    name: setting for method in STRATEGIES.values() for name, setting in method.settings_class.named().items()
}

_STRATEGY = "strategy"


# ---- names ------------------------------------------------------------------------------------------------


def method_of(values: Mapping[str, Any]) -> type[ClusteredStrategy]:
    """Return the method of a run, by its values.

    Raises:
        ConfigError: the method does not exist, or its table has the name of another one.
    """
    declared = SETTINGS[_STRATEGY]
    strategy = values.get(_STRATEGY, AUTO)
    name = declared.parse(declared.default if strategy == AUTO else strategy)
    try:
        method = strategy_class(name)
    except StrategyError as error:
        raise ConfigError(str(error)) from error
    tables = {table.table for table in COMMON}
    if name not in STRATEGIES and method.settings_class.declared() and method.settings_class.table in tables:
        raise ConfigError(f"strategy '{name}': table = {method.settings_class.table!r} is taken: choose another one")
    return method


def declarations(method: type[ClusteredStrategy]) -> dict[str, Setting]:
    """Return the declarations of all settings of a run with the method, by full name."""
    return _COMMON | method.settings_class.named()


def full_name(name: str, method: type[ClusteredStrategy]) -> str:
    """Return the full name of a common setting or one of the method, from its full name or its last part.

    Raises:
        ConfigError: the setting does not exist.
    """
    declared = declarations(method)
    if name in declared or name in SETTINGS:
        return name
    keys = {setting.key: setting.name for setting in declared.values()}
    others = {setting.key: setting.name for setting in reversed(SETTINGS.values())}  # the first one of a key wins
    if name in keys or name in others:
        return keys.get(name) or others[name]
    if text := removal(name) or removal(name.rpartition(".")[2]):
        raise ConfigError(text)
    hint = suggestion(name, [*keys, *declared, *SETTINGS])
    raise ConfigError(f"unknown setting {name!r}{hint} (`coterie run --keys` lists all settings)")


# ---- precedence -------------------------------------------------------------------------------------------


def combine(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values from several sources, by full name; later sources take precedence.

    Args:
        sources: values by full name or its last part, also in tables.

    Raises:
        ConfigError: a name is unknown, or a source sets it twice.
    """
    tables = [flat(source) for source in sources]
    chosen = [table[_STRATEGY] for table in tables if table.get(_STRATEGY, AUTO) != AUTO]
    method = method_of({_STRATEGY: chosen[-1]} if chosen else {})
    values: dict[str, Any] = {}
    for table in tables:
        named: dict[str, Any] = {}
        for name, value in table.items():
            full = full_name(name, method)
            if full in named:
                raise ConfigError(f"{name} = {value!r}: {full} is set twice (also to {named[full]!r})")
            named[full] = value
        values |= named
    return values


def explicit_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are set."""
    return {name: value for name, value in given.items() if value is not None and value != AUTO}


def resolve(given: Mapping[str, Any], *, deployed: bool) -> dict[str, Any]:
    """Return the value of every setting of the run; precedence: explicit, method, data set, default.

    Args:
        given: values by full name.
        deployed: whether clients are deployed instead of simulated.

    Raises:
        ConfigError: the method does not use a given setting, or privacy that it does not have by default.
    """
    method = method_of(given)
    declared = declarations(method)
    explicit = add_determined(explicit_values(given), deployed=deployed)
    for name, value in explicit.items():
        if name not in declared:
            raise ConfigError(f"{name} = {value!r}: strategy = {method.name!r} does not use it; leave it out")
    unit = declared[UNIT].default if declared[UNIT].default in method.units else method.units[0]
    for name in REQUIRE_PRIVACY:
        if name in explicit and unit == "none" and UNIT not in explicit:
            units = " or ".join(unit for unit in method.units if unit != "none")
            remedy = f" by default; set privacy-unit to {units}, or" if units else ";"
            raise ConfigError(f"{name} = {explicit[name]}: {explicit[_STRATEGY]} has no privacy{remedy} leave it out")
    unit = explicit.get(UNIT, unit)
    return {
        **{name: setting.default for name, setting in declared.items()},
        **default_settings(explicit),
        UNIT: unit,
        **{full_name(key, method): value for key, value in method.default_settings(unit).items()},
        **explicit,
    }


def check_effect(given: Mapping[str, Any], values: Mapping[str, Any], declared: Mapping[str, Setting]) -> None:
    """Check that no other setting disables one of the given ones, by the values and declarations of all."""
    for name, value in given.items():
        only = declared[name].only if name in declared else None
        if only is None or value == AUTO or values[name] == declared[name].shown_default:
            continue
        other, allowed = only
        if values[other] not in allowed:
            raise ConfigError(
                f"{name} = {value!r} has no effect with {other} = {values[other]!r}, only with "
                f"{' or '.join(allowed)}; leave it out, or change {other}"
            )


# ---- stored and swept runs --------------------------------------------------------------------------------


def applicable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by full name, without the settings of other methods."""
    named = combine(values)
    declared = declarations(method_of(named))
    return {name: value for name, value in named.items() if name in declared}


def stored_values(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed values of a run folder that have an effect; others may have defaults of another version.

    Raises:
        ConfigError: an earlier version had further settings, or a change has an unknown name.
    """
    for name in flat(values):
        if text := removal(name) or removal(name.rpartition(".")[2]):
            raise ConfigError(
                f"the run was written by another version of Coterie ({text}): resume the run with the version that "
                "began it, or start another run with its models (--from)"
            )
    named = applicable(values)
    only = {name: setting.only for name, setting in declarations(method_of(named)).items()}
    effective = {
        name: value
        for name, value in named.items()
        if (condition := only[name]) is None or named.get(condition[0], AUTO) in (AUTO, *condition[1])
    }
    return combine(effective, explicit_values(changes))
