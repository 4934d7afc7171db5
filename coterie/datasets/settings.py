"""Settings of the data and of its split among clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.datasets.catalog import DATASETS
from coterie.datasets.facts import OWN_DATA, Facts, facts
from coterie.datasets.partition import Partition
from coterie.fields import MAX_SCHEMA
from coterie.fields.settings import Settings, setting
from coterie.tasks import NAMES


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
            folder: of a data set; None: none.

        Raises:
            DataError: they are incomplete, or contradict each other.
        """
        names = self.dataset, self.input_shape, self.num_classes, folder, self.table_schema, self.columns
        return facts(*names, self.task)


@dataclass(frozen=True)
class DataSettings(Partition, DataFiles):
    """The data set, the clients that share it, and how the data of hidden groups differ."""
