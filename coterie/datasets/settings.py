"""Settings of the data and of its split among clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.datasets.catalog import DATASETS
from coterie.datasets.own import OWN_DATA
from coterie.datasets.shifts import SHIFTS
from coterie.fields import COUNT, MAX_SCHEMA, SIZE
from coterie.settings import Settings, setting


@dataclass(frozen=True)
class DataSettings(Settings):
    """The data set, the clients that share it, and how the data of hidden groups differ."""

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
        "folder of the data, or of client-0.* and so on (own); empty: COTERIE_DATA",
        allowed="a folder",
        client=True,
        place=True,
    )
    input_shape: str = setting(
        "",
        "own: public shape of an example: channels x height x width of images, or a number of features",
        allowed="such as 1x28x28, or 16",
        client=True,
    )
    num_classes: int | None = setting(
        None, "own: public number of classes; 0: real targets", at_least=0, at_most=1_000_000, client=True
    )
    table_schema: str = setting(
        "",
        "own: file with the public schema of the clients' tables, which sets input-shape and num-classes "
        "(docs/tables.md); kept as text",
        allowed="a TOML file",
        longest=MAX_SCHEMA,
        client=True,
    )
    clients: int = setting(500, "number of clients, M; public", within=COUNT, client=True)
    groups: str = setting(
        "4", "hidden groups: a number, or proportions such as 2:1:1", allowed="4 or 2:1:1", client=True
    )
    shift: str = setting("rotation", "how the data of hidden groups differ", choices=sorted(SHIFTS), client=True)
    dirichlet_alpha: float = setting(
        0.0,
        "label distribution of each client is drawn from Dirichlet(alpha); 0: off",
        at_least=0,
        at_most=1e9,
        client=True,
    )
    classes_per_client: int = setting(0, "number of classes of each client; 0: off", within=SIZE, client=True)
    non_iid_level: float = setting(
        -1.0,
        "clients divide training and test data together; share of each class that goes to one client; -1: off",
        at_least=-1,
        at_most=1,
        allowed="-1, or a number from 0 to 1",
        check=lambda level: level == -1 or level >= 0,
        client=True,
    )
    validation_clients: int = setting(
        0,
        "additional clients that never train and whose data replace the test data, for tuning",
        within=SIZE,
        client=True,
    )
    samples_per_client: int = setting(0, "training examples of a client; 0: divide all", within=SIZE, client=True)
