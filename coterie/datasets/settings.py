"""Settings of the data and of its split among clients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coterie.datasets.catalog import DATASETS
from coterie.datasets.client_data import first_columns
from coterie.datasets.facts import OWN_DATA, Facts, facts
from coterie.datasets.partition import Partition
from coterie.datasets.schema import TableSchema
from coterie.datasets.sources import DataError
from coterie.fields import MAX_SCHEMA
from coterie.fields.settings import ConfigError, Settings, setting
from coterie.tasks import NAMES

_DATASET, _SCHEMA, _SHAPE, _CLASSES, _COLUMNS = (
    f"data.{key}" for key in ("dataset", "table-schema", "input-shape", "num-classes", "columns")
)


@dataclass(frozen=True)
class DataFiles(Settings):
    """The data set, and what is public of clients' own data."""

    table: ClassVar[str] = "data"

    dataset: str = setting(
        "digits",
        "data set; own: files of the clients",
        choices=(*sorted(DATASETS), OWN_DATA),
        custom="dataset",
        client=True,
    )
    data_dir: str = setting(
        "",
        "folder of the data, or of client-0.* and so on, or a table of all clients (own); empty: COTERIE_DATA",
        allowed="a folder or a file",
        client=True,
        place=True,
        path=True,
    )
    input_shape: str = setting(
        "",
        "own: public shape of an example: channels x height x width of images, or a number of features",
        allowed="such as 1x28x28, or 16",
        client=True,
    )
    num_classes: int | None = setting(
        None, "own: public number of classes or labels; 0: real targets", at_least=0, at_most=1_000_000, client=True
    )
    task: str = setting(
        "auto",
        "what models predict; auto: as the table-schema or the data set says; own data without a schema: classes, "
        "or real targets",
        choices=("auto", *NAMES),
        client=True,
    )
    table_schema: str = setting(
        "",
        "own: file with the public schema of the clients' tables, which sets input-shape and num-classes "
        "(docs/tables.md); kept as text",
        allowed="a TOML file",
        longest=MAX_SCHEMA,
        client=True,
        path=True,
    )
    columns: str = setting(
        "",
        "own: names of the features of tables without a schema, in order, separated by commas; empty in a simulation: "
        "those of the first client; by-position: names are not compared",
        allowed="names, or by-position",
        longest=MAX_SCHEMA,
        client=True,
    )

    def facts(self, folder: str | None = None) -> Facts:
        """Return the public facts about the data.

        Args:
            folder: folder of a data set; None: none.

        Raises:
            DataError: they are incomplete, or contradict each other.
        """
        names = self.dataset, self.input_shape, self.num_classes, folder, self.table_schema, self.columns
        return facts(*names, self.task)


@dataclass(frozen=True)
class DataSettings(Partition, DataFiles):
    """The data set, the clients that share it, and how the data of hidden groups differ.

    Raises:
        ConfigError: a setting of clients' own data is missing, or given for another data set.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        own_data = self.dataset == OWN_DATA
        if self.table_schema and not own_data:
            raise ConfigError(f"table-schema is for dataset = 'own'; leave it out with {self.dataset!r}")
        if self.columns and (self.table_schema or "x" in self.input_shape or not own_data):
            raise ConfigError(
                f"columns = {self.columns[:60]!r} is for tables of dataset = 'own' without a schema; leave it out"
            )
        for field, value in (("input_shape", self.input_shape or None), ("num_classes", self.num_classes)):
            declared = self.declared()[field]
            if own_data and value is None:
                raise ConfigError(
                    f"dataset = 'own' requires {declared.key}, {declared.help.removeprefix('own: ')}; set it"
                )
            if not own_data and value is not None:
                raise ConfigError(
                    f"{declared.key} = {value!r} is for dataset = 'own'; leave it out with {self.dataset!r}"
                )
        values = self.values()
        for name, neutral in _UNDIVIDED.items() if own_data else ():
            if values[name] != neutral:
                raise ConfigError(
                    f"{name} = {values[name]!r}: clients' own data are neither partitioned nor shifted; set it to "
                    f"{neutral!r}"
                )


# Settings that partition or shift a data set, with the values required for clients' own data.
_UNDIVIDED = {
    name: value
    for name, value in Partition(groups="1", shift="none").values().items()
    if name not in ("data.clients", "data.samples-per-client")
}


# ---- what explicit settings, by full name, say of others --------------------------------------------------------


def default_settings(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the data set for common settings; those of a method take precedence."""
    targets = explicit.get(_DATASET) == OWN_DATA and str(explicit.get(_CLASSES)) == "0"
    return {"training.model": "regression"} if targets else {}


def add_determined(explicit: Mapping[str, Any], *, deployed: bool) -> dict[str, Any]:
    """Add to explicit settings those that clients' own data determine, whatever the method.

    The content of a schema replaces its path, and determines shape and classes. In a simulation, the first client's
    table gives the names of columns.

    Raises:
        ConfigError: the schema has errors, or contradicts another setting.
    """
    own_data = explicit.get(_DATASET) == OWN_DATA
    values = {**(_UNDIVIDED if own_data else {}), **explicit}
    if text := str(explicit.get(_SCHEMA, "")).strip():
        return values | _by_schema(text, explicit)
    classes = {"binary": 2, "regression": 0}.get(str(explicit.get("data.task")))
    if own_data and classes is not None:
        values.setdefault(_CLASSES, classes)
    if own_data and not (deployed or explicit.get(_COLUMNS) or "x" in str(explicit.get(_SHAPE, ""))):
        values[_COLUMNS] = first_columns(explicit.get("data.data-dir") or os.environ.get("COTERIE_DATA"))
    return values


def _by_schema(text: str, explicit: Mapping[str, Any]) -> dict[str, Any]:
    try:
        schema = TableSchema.parse(text) if text.startswith("{") else TableSchema.load(Path(text))
    except DataError as error:
        raise ConfigError(str(error)) from None
    determined = {_SHAPE: str(schema.num_features), _CLASSES: schema.task.num_outputs}
    determined |= {"data.clients": len(schema.site.values)} if schema.site else {}
    for name, value in determined.items():
        if str(explicit.get(name, value)) != str(value):
            raise ConfigError(f"{name} = {explicit[name]!r}: the table-schema makes it {value}; leave it out")
    return {**determined, _SCHEMA: str(schema)}
