"""The settings that a run uses, and those in which runs differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.fields.settings import Setting
    from coterie.strategies import ClusteredStrategy

Config = Mapping[str, Any]

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
    **dict.fromkeys(("accountant", "epsilon", "delta", "noise-multiplier", "clip-norm"), (_PRIVATE,)),
    **dict.fromkeys(("mechanism", "identifier-share"), (_CLIENT_LEVEL,)),
    "divisor": (_is_not("privacy-unit", "record"),),
    "selection": (_SELECTS,),
    "loss-noise": (_COMPARES,),
    "loss-bound": (_one_of(_SELECTS, _COMPARES),),
    **dict.fromkeys(("input-shape", "num-classes", "table-schema", "columns"), (_is("dataset", "own"),)),
    **dict.fromkeys(("groups", "shift", "label-skew"), (_PARTITIONED,)),
    "validation-clients": (_PARTITIONED,),
    **dict.fromkeys(("model", "features", "loss", "trainer", "lr-decay"), (_MODELS,)),
    **dict.fromkeys(("server-lr", "server-optimizer", "aggregator", "average-last", "sampling-rate"), (_MODELS,)),
    "evaluate-every": (_MODELS,),
    "evaluate-clients": (_MODELS, _is("evaluate", "diagnostic")),
    "train-alone": (_MODELS, _is("evaluate", "diagnostic")),
    "personalize": (_MODELS, _is_not("evaluate", "off")),
    **dict.fromkeys(("rebalance-min", "reseed-every"), (_MODELS, _CLUSTERED)),
    "rebalance-train": (_MODELS, _CLUSTERED, _is_not("rebalance-min", "auto", 0)),
    "evaluate-noise": (_is("evaluate", "private"), _is_not("privacy-unit", "record")),
    "score-share": (_is("evaluate", "private"),),
}

#: Values that turn a setting off.
_OFF: dict[str, Any] = {
    "stop-after": 0,
    "label-skew": "none",
    "validation-clients": 0,
    "average-last": 0,
    "rebalance-min": 0,
    "reseed-every": 0,
    "lr-decay": 1,
    "profiles": "",
    "table-schema": "",
    "columns": "",
}
_UNSET = (None, "", 0, False, "auto")


@cache
def _declared(strategy: str) -> dict[str, Setting]:
    """Return the declarations of a run's settings by the last part of the name; of this version's methods only."""
    from coterie.server.resolution import declarations
    from coterie.strategies import ClusteredStrategy
    from coterie.strategies.registry import STRATEGIES

    method = STRATEGIES.get(strategy, ClusteredStrategy)  # which has no settings of its own
    return {setting.key: setting for setting in declarations(method).values()}


def _places() -> set[str]:
    """Return the settings of the place of a run, such as paths and ports, which do not change what it computes."""
    return {key for key, declared in _declared("").items() if declared.place}


def has_effect(config: Config, key: str) -> bool:
    """Return whether a setting has an effect on a run, given all settings by the last part of their names."""
    declared = _declared(str(config.get("strategy")))
    if key in declared and (only := declared[key].only):
        other = only[0].rpartition(".")[2]
        if config.get(other, declared[other].default) not in only[1] or not has_effect(config, other):
            return False
    return all(holds(config) for holds in _USED.get(key, ()))


def used_settings(config: Config) -> dict[str, Any]:
    """Return the settings that have an effect on a run, without places and the seed.

    Args:
        config: all settings of the run, by the last part of their names.
    """
    kept = config.keys() - _places() - {_SEED}
    return {key: value for key, value in config.items() if key in kept and has_effect(config, key)}


def shown_settings(config: Config) -> dict[str, Any]:
    """Return the settings for a reader: those with an effect that are not off, the seed, and places that are set."""
    shown = {key: value for key, value in used_settings(config).items() if key not in _OFF or value != _OFF[key]}
    kept = {key for key in _places() | {_SEED} if config.get(key) not in _UNSET}
    return {key: value for key, value in config.items() if key in shown or key in kept - {"out", "resume"}}


def differing_settings(configs: Sequence[Config]) -> list[str]:
    """Return the settings in which runs differ, in the order of the first run.

    A setting that some runs do not use, such as an option of another method, counts only if the others differ in it.
    """
    used = [used_settings(config) for config in configs]
    keys = dict.fromkeys(key for settings in used for key in settings)
    values = {key: [settings[key] for settings in used if key in settings] for key in keys}
    return [key for key, present in values.items() if any(value != present[0] for value in present)]
