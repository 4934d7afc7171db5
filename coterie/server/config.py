"""Configuration of a run: merging of settings from all sources, and values derived from them.

Explicit values take precedence over the defaults of the method, these over the defaults of the data set, and these over
the default of the setting. "auto" means that a setting is not set. The same rules apply to the command line, TOML files
and Flower's run configuration. All settings are checked before a run starts.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import numpy as np

from coterie import models as networks
from coterie.datasets import OWN_DATA, DataError, Facts, Partition, TableSchema
from coterie.datasets.client_data import first_columns
from coterie.datasets.settings import DataSettings
from coterie.fields import MAX_REDRAWN
from coterie.fields.removed import removal
from coterie.fields.settings import AUTO, ConfigError, Setting, Settings, flat, suggestion
from coterie.models.settings import NOT_AT_RECORD_LEVEL, TrainingSettings
from coterie.privacy import PLANS, Plan, PrivacyError
from coterie.privacy.settings import PrivacySettings, RecordLevelSettings
from coterie.rounds.aggregation import Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.run_state import StrategyError
from coterie.server import planning
from coterie.server.settings import DeploymentSettings, EvaluationSettings, RunSettings
from coterie.strategies import ClusteredStrategy, Reseeding, StrategyOptions
from coterie.strategies.registry import STRATEGIES, strategy_class
from coterie.strategies.server_optimizer import ServerOptimizer
from coterie.strategies.settings import AggregationSettings
from coterie.tasks import Task, TaskError
from coterie.wire import ClientConfig

if TYPE_CHECKING:
    from torch import Tensor

S = TypeVar("S", bound=Settings)


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


_TABLES: dict[str, type[Settings]] = get_type_hints(Tables)
#: Their declarations.
COMMON: tuple[type[Settings], ...] = tuple(_TABLES.values())

_COMMON: dict[str, Setting] = {name: setting for table in COMMON for name, setting in table.named().items()}

#: All settings by full name: common settings, then those of each method of Coterie.
SETTINGS: dict[str, Setting] = _COMMON | {
    name: setting for method in STRATEGIES.values() for name, setting in method.settings_class.named().items()
}

_STRATEGY = "strategy"
_UNIT = "privacy.privacy-unit"
_SCHEMA, _COLUMNS = "data.table-schema", "data.columns"
_MECHANISM = "privacy.mechanism"
# Settings that have no effect without privacy.
_REQUIRE_PRIVACY = ("privacy.epsilon", "privacy.delta", "privacy.noise-multiplier", _MECHANISM)
_KEYS_HINT = "`coterie run --keys` lists all settings"

# Settings that partition or shift a data set, with the values required for clients' own data.
_UNPARTITIONED = {
    name: value
    for name, value in Partition(groups="1", shift="none").values().items()
    if name not in ("data.clients", "data.samples-per-client")
}


# ---- names and precedence ---------------------------------------------------------------------------------


def full_name(name: str, method: type[ClusteredStrategy]) -> str:
    """Return the full name of a common setting or one of the method, from its full name or its last part.

    Raises:
        ConfigError: the setting does not exist.
    """
    used = _used(method)
    if name in used or name in SETTINGS:
        return name
    keys = {setting.key: setting.name for setting in used.values()}
    if name in keys:
        return keys[name]
    others = [setting.name for setting in SETTINGS.values() if setting.key == name]
    if others:
        return others[0]
    if text := removal(name) or removal(name.rpartition(".")[2]):
        raise ConfigError(text)
    hint = suggestion(name, [*keys, *used, *SETTINGS])
    raise ConfigError(f"unknown setting {name!r}{hint} ({_KEYS_HINT})")


def combined(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values from several sources, by full name; later sources take precedence.

    Args:
        sources: names or their last parts, also in tables.

    Raises:
        ConfigError: a name is unknown, or a source sets it twice.
    """
    tables = [flat(source) for source in sources]
    chosen = [table[_STRATEGY] for table in tables if table.get(_STRATEGY, AUTO) != AUTO]
    method = _method(chosen[-1] if chosen else AUTO)
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


def _method(strategy: Any) -> type[ClusteredStrategy]:
    declared = SETTINGS[_STRATEGY]
    name = declared.parse(declared.default if strategy == AUTO else strategy)
    try:
        method = strategy_class(name)
    except StrategyError as error:
        raise ConfigError(str(error)) from error
    tables = {table.table for table in COMMON}
    if name not in STRATEGIES and method.settings_class.declared() and method.settings_class.table in tables:
        raise ConfigError(f"strategy '{name}': table = {method.settings_class.table!r} is taken: choose another one")
    return method


def declarations(values: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the declarations of all settings that a run with these values by full name has.

    Raises:
        ConfigError: the method does not exist.
    """
    return _used(_method(values.get(_STRATEGY, AUTO)))


def applicable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by full name, without the settings of other methods."""
    named = combined(values)
    used = declarations(named)
    return {name: value for name, value in named.items() if name in used}


def _explicit(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != AUTO}


def _used(method: type[ClusteredStrategy]) -> dict[str, Setting]:
    """Return the settings of a run with the method, by full name."""
    return _COMMON | method.settings_class.named()


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every setting of the run; precedence: explicit, method, data set, default.

    Args:
        given: values by full name; "auto" means not set.

    Raises:
        ConfigError: the method does not use a given setting.
    """
    method = _method(given.get(_STRATEGY, AUTO))
    used = _used(method)
    explicit = _with_schema(_explicit(given))
    for name, value in explicit.items():
        if name not in used:
            raise ConfigError(f"{name} = {value!r}: strategy = {method.name!r} does not use it; leave it out")
    unit = SETTINGS[_UNIT].default
    unit = explicit.get(_UNIT, unit if unit in method.units else method.units[0])
    of_method = {full_name(key, method): value for key, value in method.default_settings(unit).items()}
    values = {name: declared.default for name, declared in used.items()}
    own_data = explicit.get("data.dataset") == OWN_DATA
    of_data = {"training.model": "regression"} if own_data and str(explicit.get("data.num-classes")) == "0" else {}
    required = _UNPARTITIONED if own_data else {}  # whatever the method's defaults
    return values | of_data | {_UNIT: unit} | of_method | required | explicit


def _with_schema(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the content of the schema in place of its file, and what the schema determines."""
    given = str(explicit.get(_SCHEMA, "")).strip()
    if not given:
        classes = {"binary": 2, "regression": 0}.get(str(explicit.get("data.task")))
        known = classes is None or explicit.get("data.dataset") != OWN_DATA
        return dict(explicit) if known else {"data.num-classes": classes, **explicit}
    try:
        schema = TableSchema.parse(given) if given.startswith("{") else TableSchema.load(Path(given))
    except DataError as error:
        raise ConfigError(str(error)) from None
    determined = {"data.input-shape": str(schema.num_features), "data.num-classes": schema.task.num_outputs}
    determined |= {"data.clients": len(schema.site.values)} if schema.site else {}
    for name, value in determined.items():
        if str(explicit.get(name, value)) != str(value):
            raise ConfigError(f"{name} = {explicit[name]!r}: the table-schema makes it {value}; leave it out")
    return {**explicit, **determined, _SCHEMA: str(schema)}


def _table(settings_class: type[S], values: Mapping[str, Any]) -> S:
    declared = settings_class.declared()
    return settings_class(
        **{field: values[setting.name] for field, setting in declared.items() if setting.name in values}
    )


# ---- the configuration ------------------------------------------------------------------------------------


# Clients that evaluate models in a simulation of more, unless a number is set.
_EVALUATED = 200
# Share of the last models that are averaged under client-level privacy, unless it is set.
_AVERAGED = 0.2
# Initial number of models of a search for the number of clusters, unless it is set.
_MAX_CLUSTERS = 8


class RunConfig(Tables):  # large: the tables of settings and all that follows from several of them
    """A validated configuration: one object per table of settings, and derived values.

    Args:
        values: settings by full name or its last part, also in tables; other settings have their defaults.
        deployed: whether clients are deployed instead of simulated, on which ``evaluate = "auto"`` depends.

    Attributes:
        options: the method's own table, beside those of :class:`Tables`.

    Raises:
        ConfigError: a setting is unknown, a value is not allowed, or settings are incompatible.
    """

    def __init__(self, values: Mapping[str, Any], *, deployed: bool = False) -> None:
        given = combined(values)
        values = resolved(given)
        named = values[_SCHEMA] or values[_COLUMNS] or "x" in str(values["data.input-shape"])
        if values["data.dataset"] == OWN_DATA and not deployed and not named:  # the columns of a simulation's tables
            values[_COLUMNS] = first_columns(values["data.data-dir"] or os.environ.get("COTERIE_DATA"))
        for name, table in _TABLES.items():
            setattr(self, name, _table(table, values))
        self.options = _table(self.method.settings_class, values)
        self._evaluation_warning = ""
        self._first_step: float | None = None
        if self.aggregation.sampling_rate is None:
            self.aggregation = replace(self.aggregation, sampling_rate=planning.sampling_rate(self))
        if self.evaluation.evaluate is None:
            unit = self.privacy.privacy_unit
            evaluate = "diagnostic" if not deployed or unit == "none" else "off" if unit == "record" else "private"
            self.evaluation = replace(self.evaluation, evaluate=evaluate)
            if evaluate == "private":  # only if private evaluations can be planned
                try:
                    self._check_combinations()
                    _ = self.plan
                except (ConfigError, PrivacyError) as error:
                    reason = f"private evaluations cannot be planned ({error})"
                    self._evaluation_warning = f"evaluate = 'auto' is off: {reason}"
                    self.evaluation = replace(self.evaluation, evaluate="off")
        if self.evaluation.evaluate_clients is None:  # diagnostics of a large simulation read some clients
            exact = self.evaluation.evaluate == "diagnostic" and self.method.produces == "models"
            some = exact and not deployed and self.data.clients > _EVALUATED
            self.evaluation = replace(self.evaluation, evaluate_clients=_EVALUATED if some else 0)
        self._check_effective(given)
        self._check_unit(given)
        self._check_combinations()
        self._check_personal(deployed)

    @classmethod
    def stored(cls, values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the configuration of a run folder, also of an earlier version.

        Args:
            values: its table of settings; those without effect may have defaults of another version.
            changes: settings to change.

        Raises:
            ConfigError: see the class; or an earlier version had further settings.
        """
        for name in flat(values):
            if text := removal(name) or removal(name.rpartition(".")[2]):
                raise ConfigError(
                    f"the run was written by another version of Coterie ({text}): resume the run with the version that "
                    "began it, or start another run with its models (--from)"
                )
        named = applicable(values)
        declared = declarations(named)
        effective = {
            name: value
            for name, value in named.items()
            if (only := declared[name].only) is None or named.get(only[0], AUTO) in (AUTO, *only[1])
        }
        return cls(combined(effective, _explicit(changes or {})))

    @property
    def tables(self) -> tuple[Settings, ...]:
        """All tables."""
        return (*(getattr(self, name) for name in _TABLES), self.options)

    @property
    def values(self) -> dict[str, Any]:
        """All values by full name, as written to files."""
        return {name: value for table in self.tables for name, value in table.values().items()}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting by its full name or its last part; None if it is "auto"."""
        full = full_name(name, self.method)
        value = self.values[full]
        return None if (setting := self.declared[full]).optional and value == setting.none else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.tables == other.tables

    def __hash__(self) -> int:
        return hash(self.tables)

    @property
    def declared(self) -> dict[str, Setting]:
        """The declarations of all settings of the run, by full name."""
        return _used(self.method)

    def with_data_dir(self, folder: str) -> RunConfig:
        """Return this configuration with another folder of the data, which is no setting of the run."""
        moved = copy.copy(self)
        moved.data = replace(self.data, data_dir=folder)
        return moved

    def with_plan(self, plan: Plan) -> RunConfig:
        """Return this configuration with the plan that is in force."""
        planned = copy.copy(self)
        planned.plan = plan  # in place of the cached one
        return planned

    def with_step(self, server_lr: float | None) -> RunConfig:
        """Return this configuration with the step size with which the run began, maybe with fewer rounds."""
        begun = copy.copy(self)
        begun._first_step = server_lr
        return begun

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the settings in which two runs differ, with both values; paths, timeouts and ports are ignored."""
        here, there = self.values, other.values
        return {
            name: (here.get(name), there.get(name))
            for name, declared in {**self.declared, **other.declared}.items()
            if not declared.place and here.get(name) != there.get(name)
        }

    # ---- derived values -----------------------------------------------------------------------------------

    @property
    def method(self) -> type[ClusteredStrategy]:
        """The strategy's class."""
        return strategy_class(self.run.strategy)

    @property
    def trainings(self) -> float:
        """Expected number of times that a client trains; inf if each trains a network of its own."""
        if self.method.produces == "labels":
            return math.inf
        return self.run.rounds * self.sampling_rate * self.data.clients

    @property
    def trains_alone(self) -> int:
        """Number of clients of a simulation that train a model alone, beside the run."""
        compared = self.method.produces == "models" and self.run.strategy != "local"
        exact = self.evaluation.evaluate == "diagnostic"
        return min(self.evaluation.train_alone, self.data.clients) if compared and exact else 0

    @property
    def searches(self) -> bool:
        """Whether the run searches for the number of clusters, from ``max-clusters`` models."""
        return self.method.searches and self.run.clusters == 0

    @property
    def models(self) -> int:
        """Initial number of models; 0 if the method determines it."""
        if self.searches:
            return self.run.max_clusters or min(_MAX_CLUSTERS, self.data.clients)
        return 1 if self.method.produces == "labels" else self.run.clusters

    @cached_property
    def facts(self) -> Facts:
        """Public facts about the data."""
        return self.data.facts(self.data.data_dir or None)

    @cached_property
    def task(self) -> Task:
        """What models predict, with the weights of its loss."""
        try:
            return self.facts.task.weighted(self.training.class_weights)
        except TaskError as error:
            raise ConfigError(str(error)) from None

    @property
    def units(self) -> str | None:
        """Column that names the unit of each record of the tables, such as its patient; None: there is none."""
        schema = self.facts.schema
        return schema.unit.name if schema and schema.unit else None

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers of the network of a user, by name."""
        if self.method.produces != "models":
            return {}
        return networks.constants_of(self.training.network, *self.examples)

    @cached_property
    def pretrained_hash(self) -> str | None:
        """SHA-256 of the file of initial parameters; None: there is none."""
        return networks.file_hash(self.training.pretrained) if self.training.pretrained else None

    @property
    def examples(self) -> tuple[tuple[int, ...], int]:
        """Shape of an example after the fixed features, and the number of outputs of a network."""
        features = networks.features(self.training.features)
        return features(np.zeros((1, *self.facts.shape), np.float32)).shape[1:], self.facts.task.num_outputs

    def strategy_options(self, server_lr: float) -> StrategyOptions:
        """The configured options of the strategy.

        Args:
            server_lr: the step size of the server; that of the run is :attr:`server_lr`, which calibrates the noise.
        """
        facts_of: dict[str, Callable[[], Any]] = {
            "true_groups": lambda: self.data.group_of()[: self.data.clients].tolist(),
            "example_shape": lambda: self.examples[0],
            "feature_range": lambda: self.facts.feature_range,
            "device": lambda: self.training.device,
            "precision": lambda: self.training.precision,
        }
        return StrategyOptions(
            clusters=self.run.clusters,
            server_lr=server_lr,
            server_optimizer=self.server_optimizer,
            reseeding=self.reseeding,
            averaging=self.averaging,
            aggregator=self.aggregator,
            rebalance_train=self.aggregation.rebalance_train,
            registration_timeout=self.deployment.registration_timeout,
            min_clients=self.deployment.min_clients,
            min_replies=self.deployment.min_replies,
            **{name: facts_of[name]() for name in self.method.needs},
        )

    def strategy(self, plan: Plan, options: StrategyOptions | None = None) -> ClusteredStrategy:
        """The configured strategy.

        Args:
            plan: plan of the run; :func:`~coterie.server.planning.sketch` returns one for checks.
            options: None: those of :meth:`strategy_options` with a step size of 1, for checks and initial models.
        """
        return self.method(plan, self.options, options=options or self.strategy_options(1.0))

    @property
    def seed(self) -> int | None:
        """The seed; None: secret randomness."""
        return self.run.seed

    @property
    def partition_seed(self) -> int:
        """Seed of the partition among simulated clients: the run's seed, or 0."""
        return self.run.seed or 0

    @property
    def delta(self) -> float:
        """The resolved delta; "auto" is 1/(100 M), or 1/(100 records) at record level."""
        return planning.delta(self)

    @property
    def sampling_rate(self) -> float:
        """The resolved sampling rate."""
        return cast(float, self.aggregation.sampling_rate)

    @property
    def server_lr(self) -> float:
        """The resolved step size of the server."""
        lr = self.training.mean_lr(self.run.rounds)
        set_or_first = self.aggregation.server_lr or self._first_step
        return set_or_first or planning.server_lr(self.plan, self.server_optimizer, lr, self.training.optimizer)

    @property
    def server_optimizer(self) -> ServerOptimizer:
        """The optimizer of the server."""
        name = self.aggregation.server_optimizer
        return ServerOptimizer(name, 0.0 if name == "adam" else 0.9)

    @property
    def budget(self) -> float:
        """The privacy budget; inf without privacy."""
        return self.privacy.epsilon if self.privacy.privacy_unit != "none" else float("inf")

    @property
    def reseeding(self) -> Reseeding | None:
        """The schedule of re-seeding; None: never."""
        every = self.aggregation.reseed_every
        used = every > 0 and self.models > 1 and not self.searches
        return Reseeding(every=every) if used else None

    @property
    def averaging(self) -> Averaging:
        """Averaging of released models, by default of those with much noise."""
        last = self.aggregation.average_last
        return Averaging((_AVERAGED if self.privacy.privacy_unit == "client" else 0.0) if last is None else last)

    @property
    def aggregator(self) -> Aggregator:
        """The aggregator of a cluster's updates."""
        by_records = self.record_level.weights == "records"
        return replace(Aggregator.parse(self.aggregation.aggregator), by_records=by_records)

    @cached_property
    def plan(self) -> Plan:
        """The privacy plan with calibrated noise, which takes about half a second.

        Raises:
            PrivacyError: no noise reaches the target.
        """
        return planning.plan(self)

    def for_clients(self) -> dict[str, Any]:
        """The configuration that clients receive with every message."""
        config = ClientConfig(
            data=self.data,
            training=self.training,
            partition_seed=self.partition_seed,
            seed=self.seed,
            strategy=self.run.strategy,
            loss_bound=self.record_level.loss_bound,
            run_request=self.run.signed_request or None,
        )
        return config.to_record() | self.options.to_record()

    def warnings(self) -> list[str]:
        """Warnings to show before the run starts."""
        warnings = [self._evaluation_warning] if self._evaluation_warning else []
        if self.facts.schema:
            warnings += self.facts.schema.warnings()
        if self.method.produces == "models" and self.unused:
            warnings.append(
                f"the outputs of model '{self.training.network}' do not depend on its parameters "
                f"{', '.join(self.unused)}: they are sent, and under privacy receive noise, to no effect; remove them, "
                "or freeze them at fixed values"
            )
        return warnings + planning.warnings(self)

    @cached_property
    def unused(self) -> list[str]:
        """Trainable parameters of the network on which its outputs do not depend; a network of a user is checked first.

        Raises:
            ModelError: it cannot be used, see :func:`coterie.models.check_network`.
        """
        return networks.check_network(self.training.network, *self.examples, self.facts.kind)

    # ---- checks -------------------------------------------------------------------------------------------

    def _check_effective(self, given: Mapping[str, Any]) -> None:
        """Check that no other setting disables one of the given ones."""
        values, declared = self.values, self.declared
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

    def _check_unit(self, given: Mapping[str, Any]) -> None:
        """Check that the unit of privacy uses the given settings of privacy."""
        unit, mechanism = self.privacy.privacy_unit, self.privacy.mechanism
        if unit == "record" and mechanism != self.declared[_MECHANISM].default:
            raise ConfigError(
                f"{_MECHANISM} = {mechanism!r} is for privacy-unit = client: at record level, clients train by DP-SGD; "
                "leave it out"
            )
        if unit == "record" and self.aggregator.by_records:
            raise ConfigError(
                "weights = 'records' is for privacy-unit = none: true numbers of records are private; use examples, "
                "the public ones, or equal"
            )
        if unit != "none" or given.get(_UNIT, AUTO) != AUTO:
            return
        units = [unit for unit in self.method.units if unit != "none"]
        for name in _REQUIRE_PRIVACY:
            if given.get(name, AUTO) != AUTO:
                remedy = f" by default; set privacy-unit to {' or '.join(units)}, or" if units else ";"
                raise ConfigError(f"{name} = {given[name]}: {self.run.strategy} has no privacy{remedy} leave it out")

    def _check_combinations(self) -> None:
        run, unit, clients = self.run, self.privacy.privacy_unit, self.data.clients
        try:
            if run.clusters == 0 and not self.method.finds_clusters:
                raise ConfigError(f"clusters = 0: {run.strategy} does not determine the number of clusters; set it")
            self._check_search()
            self._check_data()
            if unit == "record":
                planning.check_records(self)
                for kind, name in self.training.plugins.items():
                    raise ConfigError(f"{kind} = {name!r}: {NOT_AT_RECORD_LEVEL}")
            if not self.models <= clients:
                raise ConfigError(
                    f"clusters = {run.clusters} exceeds the number of clients ({clients}): reduce clusters or "
                    "increase clients"
                )
            self._check_participation()
            self._check_task()
            self._check_evaluation()
            if self.privacy.budget_file:
                self._check_shared_budget()
            self.data.group_of()
            plan = planning.sketch(self)
            self._check_rounds(plan)
            trainer = self.training.plugins.get("trainer")
            if self.strategy(plan).penalises and trainer is not None:
                raise ConfigError(
                    f"trainer = {trainer!r}: {run.strategy} adds a penalty to the loss, of which another training loop "
                    "knows nothing; leave it out, or change strategy"
                )
        except (StrategyError, DataError, PrivacyError) as error:
            raise ConfigError(str(error)) from None

    def _check_search(self) -> None:
        run, clients = self.run, self.data.clients
        if run.max_clusters is not None and not self.searches:
            raise ConfigError(
                f"max-clusters = {run.max_clusters} has no effect with strategy = {run.strategy} and clusters = "
                f"{run.clusters}, only with ifca and clusters = 0; leave it out"
            )
        if not self.searches:
            return
        if self.models > clients:
            raise ConfigError(f"max-clusters = {self.models} exceeds the number of clients ({clients}); reduce it")
        if not self.aggregation.reseed_every:
            raise ConfigError(
                "reseed-every = 0 with clusters = 0: the search for the number of clusters re-seeds models; leave "
                "reseed-every out, or set clusters"
            )

    def _check_participation(self) -> None:
        deployment, clients = self.deployment, self.data.clients
        if not deployment.min_clients <= clients:
            raise ConfigError(f"min-clients = {deployment.min_clients} exceeds the number of clients ({clients})")
        if deployment.min_replies and self.privacy.privacy_unit == "client":
            raise ConfigError(
                f"min-replies = {deployment.min_replies:g}: with privacy-unit = client, rounds are released regardless "
                "of the number of replies, which repeated requests would reveal; set it to 0"
            )
        if not self.method.clustered and self.aggregation.reseed_every:
            raise ConfigError(
                f"reseed-every = {self.aggregation.reseed_every}: {self.run.strategy} has no clusters to re-seed; set "
                "it to 0"
            )

    def _check_rounds(self, plan: Plan) -> None:
        """Check what the requests of a round hold beside the settings: a decayed step size, and a redraw matrix."""
        training, last = self.training, self.run.rounds - 1
        if not training.lr * training.lr_decay**last > 0:
            raise ConfigError(
                f"lr-decay = {training.lr_decay:g}: lr = {training.lr:g} falls to 0 by round {last + 1}; increase "
                "lr-decay, or reduce rounds"
            )
        if plan.redraws and plan.rebalance_min and self.models > MAX_REDRAWN:
            raise ConfigError(
                f"clusters = {self.models}: clients redraw their labels among at most {MAX_REDRAWN} clusters; reduce "
                "clusters, or set rebalance-min to 0"
            )

    def _check_personal(self, deployed: bool) -> None:
        """Check that the accuracy of clients' own models can be known, by noise or in a simulation."""
        evaluation, personalize = self.evaluation, self.evaluation.personalize
        if personalize == "none":
            return
        if self.method.produces == "labels":
            raise ConfigError(
                f"personalize = {personalize!r}: {self.run.strategy} clusters records and trains no model that a "
                "client could fit; set it to none"
            )
        if evaluation.evaluate == "off":
            raise ConfigError(
                f"personalize = {personalize!r} has no effect with evaluate = 'off'; set evaluate to diagnostic or "
                "private, or personalize to none"
            )
        if deployed and evaluation.evaluate != "private":
            raise ConfigError(
                f"personalize = {personalize!r}: deployed clients report the accuracy of their own models only under "
                "noise (evaluate = private); set it to none here, and personalize in the clients' node configurations"
            )

    def _check_task(self) -> None:
        asked, weights = self.data.task, self.training.class_weights
        if asked != AUTO and asked not in self.facts.task.names:
            task = self.facts.task
            raise ConfigError(f"task = {asked!r}: the data have {task}, whose task is {task.name}; leave it out")
        if weights and self.method.produces == "labels":
            raise ConfigError(f"class-weights: {self.method.name} has no loss of classes; leave them out")
        if weights:
            _ = self.task
        if self.method.produces == "labels" and self.data.dataset == OWN_DATA and not self.facts.task.has_classes:
            raise ConfigError(
                f"{self.method.name} compares clusters of records with classes, but the data have {self.facts.task}; "
                "use another strategy"
            )

    def _check_evaluation(self) -> None:
        sampled = self.evaluation.evaluate_clients
        if sampled and (self.evaluation.evaluate != "diagnostic" or self.method.produces == "labels"):
            raise ConfigError(
                f"evaluate-clients = {sampled} has no effect: only diagnostics of models read a sample of clients; set "
                "it to 0, or evaluate to diagnostic"
            )
        if share := self.evaluation.score_share:
            reason = planning.histogram_problem(self)
            if not reason and self.evaluation.evaluate != "private":
                reason = f"evaluate = {self.evaluation.evaluate!r} releases none; set it to private"
            if reason:
                raise ConfigError(f"score-share = {share:g}: {reason}; set score-share to 0 or auto")
        if self.evaluation.evaluate != "private":
            return
        if self.privacy.privacy_unit == "none":
            raise ConfigError("evaluate = 'private' requires privacy: change privacy-unit or evaluate")
        if self.data.validation_clients:
            raise ConfigError(
                f"validation-clients = {self.data.validation_clients} with evaluate = 'private': the records of one "
                "validation client are test data of many clients, so the noise does not protect it; set "
                "validation-clients to 0, or evaluate to diagnostic or off"
            )

    def _check_shared_budget(self) -> None:
        """Check that a run with a shared budget can be certified."""
        settings = {
            "privacy-unit": (self.privacy.privacy_unit, self.privacy.privacy_unit != "client"),
            "mechanism": (self.privacy.mechanism, bool(PLANS[self.privacy.mechanism].flaws)),
            "seed": (self.seed, self.seed is not None),
        }
        for name, (value, invalid) in settings.items():
            if invalid:
                raise ConfigError(
                    f"budget-file with {name} = {value!r}: a shared budget requires certified runs with client-level "
                    f"privacy; leave out budget-file or change {name}"
                )

    def _check_data(self) -> None:
        """Check the settings of clients' own data: required for these, rejected for other data sets."""
        data, own_data = self.data, self.data.dataset == OWN_DATA
        if data.table_schema and not own_data:
            raise ConfigError(f"table-schema is for dataset = 'own'; leave it out with {data.dataset!r}")
        if data.columns and (data.table_schema or "x" in data.input_shape or not own_data):
            raise ConfigError(
                f"columns = {data.columns[:60]!r} is for tables of dataset = 'own' without a schema; leave it out"
            )
        for field, value in (("input_shape", data.input_shape or None), ("num_classes", data.num_classes)):
            declared = data.declared()[field]
            if own_data and value is None:
                raise ConfigError(
                    f"dataset = 'own' requires {declared.key}, {declared.help.removeprefix('own: ')}; set it"
                )
            if not own_data and value is not None:
                raise ConfigError(
                    f"{declared.key} = {value!r} is for dataset = 'own'; leave it out with {data.dataset!r}"
                )
        if not own_data:
            return
        _ = self.facts
        values = self.values
        for name, neutral in _UNPARTITIONED.items():
            if values[name] != neutral:
                raise ConfigError(
                    f"{name} = {values[name]!r}: clients' own data are neither partitioned nor shifted; set it to "
                    f"{neutral!r}"
                )
        if data.samples_per_client and self.privacy.privacy_unit != "record":
            raise ConfigError(
                f"samples-per-client = {data.samples_per_client}: clients use all of their own data, and only "
                "record-level privacy requires a public number of records; set it to 0"
            )
