"""Clients' own data in the format of a run: files on a client's machine, or those of all clients in a simulation.

The shape of a record and the number of classes are public settings of the run. How a record is read and scaled, and
whether it is held out, depends only on the record and the file format: record-level guarantees would not hold if one
record influenced the processing of others. :mod:`coterie.datasets.client_data` says what files there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from logging import INFO, WARNING
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log

from coterie.datasets.client_data import EmptySiteError, find, is_table, usable_records
from coterie.datasets.data_files import SUFFIXES
from coterie.datasets.facts import Declared, Facts
from coterie.datasets.federation import Federation, Shard, Transform
from coterie.datasets.records import Records, Shape
from coterie.datasets.shifts import no_shift
from coterie.datasets.sources import DataError, Source
from coterie.datasets.split import Split
from coterie.datasets.tables import records_of_sites, unscaled

# Losses in one line of a log.
_MAX_LOSSES = 20


class OwnFederation:
    """Clients with local data, in one group; has the interface of a `Federation`.

    Attributes:
        clients: number of clients.
        num_groups, group_of, task, num_classes, kind, input_shape: as in a `Federation`.
        has_units: whether the schema names the unit of each record, such as its patient.

    Args:
        paths: data path of each client, by id; of a table of all clients, that for each.
        known: required facts about the data.
        transform: see `federate`.
        deployed: deployed clients, with the declaration of each. Their invalid records are dropped or clamped and
            reported only in the client's log, because an error would leak information about a record to the server.
        divided: whether the path is a table of all clients, which the column `site` of the schema divides.

    Raises:
        DataError: files do not support the run's kind of data.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        known: Facts,
        transform: Transform | None,
        deployed: Mapping[int, Declared | None] | None = None,
        *,
        divided: bool = False,
    ) -> None:
        if known.kind == "tokens":
            raise DataError("the run uses text, but clients' own data must be images or vectors")
        self.clients, self.num_groups, self.kind = len(paths), 1, known.kind
        self.task, self.num_classes = known.task, known.task.num_classes
        self.group_of = np.zeros(self.clients, np.int64)
        self._paths, self._known, self._transform = paths, known, transform
        probe = np.zeros((1, *known.shape), np.float32)
        self.input_shape: Shape = (probe if transform is None else transform(probe)).shape[1:]
        self._deployed = deployed or {}
        schemas = [known.schema, *(declared.schema for declared in self._deployed.values() if declared)]
        self.has_units = any(schema is not None and schema.unit is not None for schema in schemas)
        self._shards: dict[int, Shard] = {}
        self._warned, self._empty, self._divided = False, 0, divided

    def shard(self, client_id: int) -> Shard:
        """Return the data of a client; repeated calls return the same object.

        Raises:
            DataError: the client does not exist, or its data cannot be read or do not match the run.
        """
        if client_id not in self._paths:
            raise DataError(f"client {client_id} does not exist; there are {self.clients} clients")
        if client_id not in self._shards:
            known, declared = self._known, self._deployed.get(client_id)
            simulated = client_id not in self._deployed
            columns = known.columns if declared is None or declared.columns == () else declared.columns
            required = Declared(
                known.kind,
                known.shape,
                known.task,
                known.schema if simulated else declared.schema if declared else None,
                columns=None if self.kind == "images" else columns,  # names of pixels are not compared
                span=declared.span if declared else None,
            )
            path, given = self._path(client_id), self._of_sites[client_id] if self._divided else None
            read = partial(own_shard, path, client_id, required, self._transform, given=given)
            try:
                shard = read(strict=simulated)
            except EmptySiteError as error:
                self._empty += 1
                if self._empty & (self._empty - 1) == 0:  # of many, at every doubling
                    count = f"{self._empty} of {self.clients} clients so far"
                    message = "client %s is left out, as it has no training records (%s): %s"
                    _log(simulated, WARNING, message, client_id, count, error)
                shard = read(strict=False)
            if shard.x.ndim == 2 and not self._warned and (what := unscaled(shard.x, shard.y, known.schema)):
                self._warned = True
                _log(simulated, WARNING, "client %s: %s", client_id, what)
            self._shards.setdefault(client_id, shard)
        return self._shards[client_id]

    @cached_property
    def _of_sites(self) -> list[Records]:
        """The records of every client, of a table of all."""
        path, schema = self._paths[0], self._known.schema
        assert schema is not None
        whole, parts = records_of_sites(Path(path), schema)
        for warning in whole.warnings:
            _log(True, WARNING, "%s", warning)
        for loss in () if whole.problems else whole.left_out.losses[:_MAX_LOSSES]:  # an error names problems
            _log(True, INFO, "%s: by the rules of the schema: %s", path, loss)
        return parts

    def _path(self, client_id: int) -> str:
        """Return the data path of a client; a simulation looks up its suffix here, so errors stay local."""
        path = self._paths[client_id]
        if client_id in self._deployed or self._divided:
            return path
        data_path = find(Path(path).parent, Path(path).name)
        if data_path is None:
            name, clients = Path(path).name, self.clients
            raise DataError(
                f"dataset 'own': {Path(path).parent} has no data for client {client_id} of {clients} (clients = "
                f"{clients}); expected {name}{f', {name}'.join(SUFFIXES)} or a folder {name}"
            )
        return str(data_path)


def _log(simulated: bool, level: int, *message: Any) -> None:
    """Log, but not in the workers of a simulation: the process that started them has read all data before."""
    if not (simulated and parent_process()):
        log(level, *message)


@lru_cache(maxsize=2)
def own_federation(folder: str | Path | None, clients: int, known: Facts, transform: Transform | None) -> OwnFederation:
    """Return the clients of a simulation, with data `client-0.npz`, `client-1/` and so on in a folder.

    If the schema names the column of the site, the folder is one table of all clients.

    Raises:
        DataError: the folder is missing, or is no table but should be one, or vice versa. Clients with no data, or data
            in two formats, fail when their shard is read.
    """
    if not folder:
        raise DataError("dataset 'own' requires the folder of the clients' data: --data-dir DIR, or COTERIE_DATA=DIR")
    home, divided = Path(folder).expanduser(), bool(known.schema and known.schema.site)
    if divided and home.is_dir() and not is_table(home):
        raise DataError(
            f"dataset 'own': {home} is a folder, but the schema has [site], the column that divides one table among "
            "all clients; set data-dir to that table, or remove [site]"
        )
    if divided:
        return OwnFederation(dict.fromkeys(range(clients), str(home)), known, transform, divided=True)
    if home.is_file():
        raise DataError(
            f"dataset 'own': {home} is a file; set data-dir to the folder of client-0.csv and so on, or name the "
            "column of the client in the schema: [site] (docs/tables.md)"
        )
    return OwnFederation({client: str(home / f"client-{client}") for client in range(clients)}, known, transform)


@lru_cache(maxsize=1)  # called for every message to a deployed client
def own_shard(
    path: str,
    client_id: int,
    required: Declared,
    transform: Transform | None,
    *,
    strict: bool = True,
    given: Records | None = None,
) -> Shard:
    """Return the local data of a client, scaled as in a `Federation`; read once per process.

    Without test data, a fifth of the records is held out: those whose unit, or else whose values, have a SHA-256
    that is divisible by five. If the position of a record or chance decided, removing one record would move others
    between training and test. If no record is held out, the training data are also the test data.

    Args:
        path: see the module.
        client_id: the client.
        required: what the records must be. Image files are converted and resized to its shape; image arrays may be
            (n, H, W) if C is 1, or rows of C·H·W. Pixels are integers in 0..255; in typed file formats, floats are
            fractions in [0, 1]. Vectors are used unchanged.
        transform: see `federate`.
        strict: raise an error for dropped or clamped records instead of logging them; what the schema drops or clamps
            by its own rules is logged in any case.
        given: the records, if they were read before.

    Raises:
        DataError: the data cannot be read or do not match the run, or the transform does not fit them.
    """
    parts = usable_records(path, required, strict=strict, given=given)
    train, test = parts.train, parts.test
    for warning in dict.fromkeys(train.warnings + test.warnings):
        _log(strict, WARNING, "client %s: %s", client_id, warning)
    for by_rule, level in ((False, WARNING), (True, INFO)):  # messages repeat these lines
        losses = [str(loss) for loss in parts.left_out.losses if loss.by_rule is by_rule]
        first = [] if by_rule else [f"the first problem is: {problem}" for problem in parts.problems()[:1]]
        head = "by the rules of the schema" if by_rule else f"{parts.usable} usable records"
        if losses:
            _log(strict, level, "client %s: %s: %s", client_id, head, "; ".join(losses[:_MAX_LOSSES] + first))
    rows = [np.arange(len(train.y))]
    alone = Federation(
        Source(path, train.x, train.y, test.x, test.y, required.task.num_targets, may_be_empty=not strict),
        Split(rows, rows if test is train else [np.arange(len(test.y))]),
        group_of=np.zeros(1, np.int64),
        set_aside=0,
        shift=no_shift,
        seed=0,
        transform=transform,
    )
    shares = None
    if test is not train and test.units is not None and train.units is not None:
        shares = test.units.held_out_shares(train.units)
    return replace(alone.shard(0), client_id=client_id, units=train.units, test_shares=shares)
