"""The settings that a run uses, and those in which runs differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from coterie.fields.settings import Setting, Settings

if TYPE_CHECKING:
    from coterie.strategies import ClusteredStrategy

Config = Mapping[str, Any]

#: Paths, devices, timeouts and ports: where a run takes place, which does not change what it computes.
PLACES = frozenset(
    {
        *(
            "out",
            "resume",
            "signed-request",
            "data-dir",
            "pretrained",
            "device",
            "budget-file",
            "client-names",
            "train-alone",
        ),
        *("round-timeout", "registration-timeout"),
        *("min-clients", "min-replies"),
        *("recorders", "record-diagnostics"),
    }
)
_SEED = "seed"


def _is(key: str, *values: Any) -> Callable[[Config], bool]:
    return lambda config: config.get(key) in values


def _is_not(key: str, *values: Any) -> Callable[[Config], bool]:
    return lambda config: config.get(key, values[0]) not in values


def _method(declares: Callable[[type[ClusteredStrategy]], bool]) -> Callable[[Config], bool]:
    """Whether the method declares something; True for methods that this version does not have."""

    def holds(config: Config) -> bool:
        from coterie.strategies.registry import STRATEGIES

        method = STRATEGIES.get(str(config.get("strategy")))
        return method is None or declares(method)

    return holds


def _overrides(name: str) -> Callable[[Config], bool]:
    """Whether the method overrides a class method."""
    return _method(lambda method: sum(name in vars(base) for base in method.__mro__) > 1)


def _one_of(*conditions: Callable[[Config], bool]) -> Callable[[Config], bool]:
    return lambda config: any(holds(config) for holds in conditions)


_PRIVATE = _is_not("privacy-unit", "none")
_CLIENT_LEVEL = _is("privacy-unit", "client")
_MODELS = _method(lambda method: method.produces == "models")
_LABELS = _method(lambda method: method.produces == "labels")
_CLUSTERED = _method(lambda method: method.clustered)
_SEARCHES = _method(lambda method: method.searches)
_SELECTS, _COMPARES = _overrides("max_selections"), _overrides("released_losses")
_PARTITIONED = _is_not("dataset", "own")

#: Conditions under which settings have an effect, beside those of their declarations; the others always have.
_USED: dict[str, tuple[Callable[[Config], bool], ...]] = {
    "clusters": (_one_of(_CLUSTERED, _LABELS),),
    "max-clusters": (_SEARCHES, _is("clusters", 0)),
    **dict.fromkeys(("accountant", "epsilon", "delta", "noise-multiplier"), (_PRIVATE,)),
    **dict.fromkeys(("clipping", "clip-norm"), (_PRIVATE,)),
    **dict.fromkeys(("mechanism", "identifier-share", "identifier-noise", "identifiers"), (_CLIENT_LEVEL,)),
    **dict.fromkeys(("participation", "min-separation"), (_CLIENT_LEVEL,)),
    "divisor": (_is_not("privacy-unit", "record"),),
    **dict.fromkeys(("selection", "selection-epsilon"), (_SELECTS,)),
    "loss-noise": (_COMPARES,),
    "loss-bound": (_one_of(_SELECTS, _COMPARES),),
    **dict.fromkeys(("input-shape", "num-classes", "table-schema", "columns"), (_is("dataset", "own"),)),
    **dict.fromkeys(("groups", "shift", "dirichlet-alpha", "classes-per-client", "non-iid-level"), (_PARTITIONED,)),
    "validation-clients": (_PARTITIONED,),
    **dict.fromkeys(("model", "features", "server-lr", "optimizer", "aggregator", "average-last"), (_MODELS,)),
    **dict.fromkeys(("loss", "trainer"), (_MODELS, _is_not("privacy-unit", "record"))),
    "server-optimizer": (_MODELS,),
    **dict.fromkeys(("evaluate-every", "lr-decay", "sampling-rate"), (_MODELS,)),
    "evaluate-clients": (_MODELS, _is("evaluate", "diagnostic")),
    "train-alone": (_MODELS, _is("evaluate", "diagnostic")),
    "personalize": (_MODELS, _is_not("evaluate", "off")),
    "byzantine-share": (_MODELS,),
    **dict.fromkeys(("rebalance-min", "reseed-every"), (_MODELS, _CLUSTERED)),
    "rebalance-train": (_MODELS, _CLUSTERED, _is_not("rebalance-min", "auto", 0)),
    "evaluate-noise": (_is("evaluate", "private"), _is_not("privacy-unit", "record")),
    "score-share": (_is("evaluate", "private"),),
}

#: Values that turn a setting off.
_OFF: dict[str, Any] = {
    "stop-after": 0,
    "dirichlet-alpha": 0,
    "classes-per-client": 0,
    "non-iid-level": -1,
    "validation-clients": 0,
    "average-last": 0,
    "rebalance-min": 0,
    "reseed-every": 0,
    "lr-decay": 1,
    "identifier-noise": 0,
    "profiles": "",
    "table-schema": "",
    "columns": "",
}
_UNSET = (None, "", 0, False, "auto")


@cache
def _declared(strategy: str) -> dict[str, Setting]:
    """Return the settings with conditions of their own, and those on which they depend, by the last part of the name.

    Those of a method that this version does not have are missing.
    """
    from coterie.models.settings import TrainingSettings
    from coterie.privacy.settings import PrivacySettings, RecordLevelSettings
    from coterie.strategies.registry import STRATEGIES
    from coterie.strategies.settings import AggregationSettings

    tables: list[type[Settings]] = [PrivacySettings, RecordLevelSettings, AggregationSettings, TrainingSettings]
    if strategy in STRATEGIES:
        tables.append(STRATEGIES[strategy].settings_class)
    return {setting.key: setting for table in tables for setting in table.declared().values()}


def _depends(config: Config, key: str) -> bool:
    """Whether the setting on which a setting depends has one of the values for which it has an effect."""
    declared = _declared(str(config.get("strategy")))
    only = declared[key].only if key in declared else None
    if only is None:
        return True
    name, values = only
    other = name.rpartition(".")[2]
    return config.get(other, declared[other].default) in values


def has_effect(config: Config, key: str) -> bool:
    """Return whether a setting has an effect on a run, given all settings by the last part of their names."""
    return _depends(config, key) and all(holds(config) for holds in _USED.get(key, ()))


def used_settings(config: Config) -> dict[str, Any]:
    """Return the settings that have an effect on a run, without places and the seed.

    Args:
        config: all settings of the run, by the last part of their names.
    """
    return {
        key: value for key, value in config.items() if key not in PLACES and key != _SEED and has_effect(config, key)
    }


def shown_settings(config: Config) -> dict[str, Any]:
    """Return the settings for a reader: those with an effect that are not off, the seed, and places that are set."""
    shown = {key: value for key, value in used_settings(config).items() if key not in _OFF or value != _OFF[key]}
    kept = {key for key in PLACES | {_SEED} if config.get(key) not in _UNSET}
    return {key: value for key, value in config.items() if key in shown or key in kept - {"out", "resume"}}


def differing_settings(configs: Sequence[Config]) -> list[str]:
    """Return the settings in which runs differ, in the order of the first run.

    A setting that some runs do not use, such as an option of another method, counts only if the others differ in it.
    """
    used = [used_settings(config) for config in configs]
    keys = dict.fromkeys(key for settings in used for key in settings)
    values = {key: [settings[key] for settings in used if key in settings] for key in keys}
    return [key for key, present in values.items() if any(value != present[0] for value in present)]
