"""Configuration of a run: the tables of settings, and the values and checks that join several of them.

All settings are checked before a run starts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coterie import models as networks
from coterie.datasets import OWN_DATA, DataError, Facts
from coterie.fields.settings import AUTO, ConfigError, Setting, Settings
from coterie.privacy import Plan, PrivacyError
from coterie.rounds.aggregation import Aggregator
from coterie.rounds.averaging import Averaging
from coterie.rounds.run_state import StrategyError
from coterie.server import planning, resolution
from coterie.server.resolution import TABLES, Tables
from coterie.strategies import ClusteredStrategy, Reseeding, StrategyOptions
from coterie.strategies.registry import strategy_class
from coterie.strategies.server_optimizer import ServerOptimizer
from coterie.tasks import Task, TaskError
from coterie.wire import ClientConfig

if TYPE_CHECKING:
    from torch import Tensor

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
        given = resolution.combine(values)
        values = resolution.resolve(given, deployed=deployed)
        for name, table in TABLES.items():
            setattr(self, name, table.from_values(values))
        self.options = self.method.settings_class.from_values(values)
        self._first_step: float | None = None
        self.aggregation = replace(self.aggregation, sampling_rate=planning.sampling_rate(self))
        resolution.check_effect(given, self.values, self.declared)
        try:
            self.method.check_settings(self.__getitem__)
            self._check_clients()
            self._check_data()
            if self.privacy.privacy_unit == "record":
                planning.check_records(self)
            self.privacy.check_shared_budget(self.seed)
            self.training.check_rounds(self.run.rounds)
            self._evaluation_warning = self._resolve_evaluation(deployed)
            self._check_evaluation(deployed)
            self._check_strategy()
        except (StrategyError, DataError, PrivacyError) as error:
            raise ConfigError(str(error)) from None

    def _resolve_evaluation(self, deployed: bool) -> str:
        """Replace "auto" in the table of evaluation; return a warning if private evaluations cannot be planned."""
        automatic, warning = self.evaluation.evaluate is None, ""
        self.evaluation = replace(self.evaluation, evaluate=planning.evaluate(self, deployed))
        if automatic and self.evaluation.evaluate == "private":
            try:
                planning.check_evaluation(self)
                _ = self.plan
            except (ConfigError, PrivacyError) as error:
                warning = f"evaluate = 'auto' is off: private evaluations cannot be planned ({error})"
                self.evaluation = replace(self.evaluation, evaluate="off")
        self.evaluation = replace(self.evaluation, evaluate_clients=planning.evaluate_clients(self, deployed))
        return warning

    @classmethod
    def stored(cls, values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the configuration of a run folder, also of an earlier version.

        Args:
            values: table of its settings.
            changes: settings to change.

        Raises:
            ConfigError: see the class; or an earlier version had further settings.
        """
        return cls(resolution.stored_values(values, changes or {}))

    @property
    def tables(self) -> tuple[Settings, ...]:
        """All tables."""
        return (*(getattr(self, name) for name in TABLES), self.options)

    @property
    def values(self) -> dict[str, Any]:
        """All values by full name, as written to files."""
        return {name: value for table in self.tables for name, value in table.values().items()}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting by its full name or its last part; None if it is "auto"."""
        full = resolution.full_name(name, self.method)
        value = self.values[full]
        return None if (setting := self.declared[full]).optional and value == setting.none else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.tables == other.tables

    def __hash__(self) -> int:
        return hash(self.tables)

    @property
    def declared(self) -> dict[str, Setting]:
        """The declarations of all settings of the run, by full name."""
        return resolution.declarations(self.method)

    def with_data_dir(self, folder: str) -> RunConfig:
        """Return this configuration with another folder of the data, which is no setting of the run."""
        return self._changed(data=replace(self.data, data_dir=folder))

    def with_plan(self, plan: Plan) -> RunConfig:
        """Return this configuration with another plan."""
        return self._changed(plan=plan)

    def with_step(self, server_lr: float | None) -> RunConfig:
        """Return this configuration with the step size with which the run began, maybe with fewer rounds."""
        return self._changed(_first_step=server_lr)

    def _changed(self, **attributes: Any) -> RunConfig:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

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

    def strategy(self, plan: Plan, options: Mapping[str, Any] = MappingProxyType({})) -> ClusteredStrategy:
        """The configured strategy.

        Args:
            plan: plan of the run; :func:`~coterie.server.planning.sketch` returns one for checks.
            options: options of a run in its folder, such as :attr:`server_lr`, which calibrates the noise; none for
                checks and initial models.
        """
        facts_of: dict[str, Callable[[], Any]] = {
            "true_groups": lambda: self.data.group_of()[: self.data.clients].tolist(),
            "example_shape": lambda: self.examples[0],
            "feature_range": lambda: self.facts.feature_range,
            "device": lambda: self.training.device,
            "precision": lambda: self.training.precision,
        }
        evaluation = self.evaluation
        configured = StrategyOptions(
            clusters=self.run.clusters,
            server_optimizer=self.server_optimizer,
            reseeding=self.reseeding,
            averaging=self.averaging,
            aggregator=self.aggregator,
            rebalance_train=self.aggregation.rebalance_train,
            evaluate="private" if evaluation.evaluate == "private" else "diagnostic",
            evaluate_every=evaluation.evaluate_every if evaluation.evaluate != "off" else 0,
            evaluate_clients=evaluation.evaluate_clients or 0,
            personalize=None if evaluation.personalize == "none" else evaluation.personalize,
            registration_timeout=self.deployment.registration_timeout,
            min_clients=self.deployment.min_clients,
            min_replies=self.deployment.min_replies,
            **{name: facts_of[name]() for name in self.method.needs},
        )
        return self.method(plan, self.options, options=replace(configured, **options))

    @property
    def seed(self) -> int | None:
        """The seed; None: secret randomness."""
        return self.run.seed

    @property
    def partition_seed(self) -> int:
        """Seed of the partition among simulated clients: the run's seed, or 0."""
        return self.run.seed or 0

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

    # ---- checks of settings in several tables ---------------------------------------------------------------

    def _check_clients(self) -> None:
        deployment, clients = self.deployment, self.data.clients
        if self.searches and self.models > clients:
            raise ConfigError(f"max-clusters = {self.models} exceeds the number of clients ({clients}); reduce it")
        if self.models > clients:
            raise ConfigError(
                f"clusters = {self.run.clusters} exceeds the number of clients ({clients}): reduce clusters or "
                "increase clients"
            )
        if deployment.min_clients > clients:
            raise ConfigError(f"min-clients = {deployment.min_clients} exceeds the number of clients ({clients})")
        if deployment.min_replies and self.privacy.privacy_unit == "client":
            raise ConfigError(
                f"min-replies = {deployment.min_replies:g}: with privacy-unit = client, rounds are released regardless "
                "of the number of replies, which repeated requests would reveal; set it to 0"
            )

    def _check_data(self) -> None:
        data, own_data = self.data, self.data.dataset == OWN_DATA
        if own_data and data.samples_per_client and self.privacy.privacy_unit != "record":
            raise ConfigError(
                f"samples-per-client = {data.samples_per_client}: clients use all of their own data, and only "
                "record-level privacy requires a public number of records; set it to 0"
            )
        if own_data or data.task != AUTO or self.training.class_weights:
            task = self.task
            if data.task not in (AUTO, *task.names):
                raise ConfigError(
                    f"task = {data.task!r}: the data have {task}, whose task is {task.name}; leave it out"
                )
            if own_data and self.method.produces == "labels" and not task.has_classes:
                raise ConfigError(
                    f"{self.method.name} compares clusters of records with classes, but the data have {task}; use "
                    "another strategy"
                )
        data.group_of()

    def _check_evaluation(self, deployed: bool) -> None:
        evaluation, labels = self.evaluation, self.method.produces == "labels"
        if evaluation.evaluate_clients and (evaluation.evaluate != "diagnostic" or labels):
            raise ConfigError(
                f"evaluate-clients = {evaluation.evaluate_clients} has no effect: only diagnostics of models read a "
                "sample of clients; set it to 0, or evaluate to diagnostic"
            )
        planning.check_evaluation(self)
        if deployed and evaluation.personalize != "none" and evaluation.evaluate != "private":
            raise ConfigError(
                f"personalize = {evaluation.personalize!r}: deployed clients report the accuracy of their own models "
                "only under noise (evaluate = private); set it to none here, and personalize in the clients' node "
                "configurations"
            )

    def _check_strategy(self) -> None:
        """Check that the method supports the plan and its options, which takes longest."""
        strategy, trainer = self.strategy(planning.sketch(self)), self.training.plugins.get("trainer")
        if strategy.penalises and trainer is not None:
            raise ConfigError(
                f"trainer = {trainer!r}: {self.run.strategy} adds a penalty to the loss, of which another training "
                "loop knows nothing; leave it out, or change strategy"
            )
