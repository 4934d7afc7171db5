"""Clients' own data in the format of a run: files on a client's machine, or those of all clients in a simulation.

The shape of a record and the number of classes are public settings of the run. How a record is read and scaled, and
whether it is held out, depends only on the record and the file format: record-level guarantees would not hold if one
record influenced the processing of others. :mod:`coterie.datasets.client_data` says what files there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from logging import INFO, WARNING
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from coterie.datasets.client_data import EmptySiteError, find, read, usable_records
from coterie.datasets.data_files import SUFFIXES
from coterie.datasets.facts import Declared, Facts
from coterie.datasets.federation import Federation, Shard, Transform, centred, fractions
from coterie.datasets.left_out import LeftOut
from coterie.datasets.records import Shape
from coterie.datasets.shifts import no_shift
from coterie.datasets.sources import DataError, Source
from coterie.datasets.split import Split
from coterie.datasets.tables import column_texts, read_table, rows_held_out, unscaled

# Losses in one line of a log.
_MAX_LOSSES = 20


class OwnFederation:
    """Clients with local data, in one group; has the interface of a `Federation`.

    Attributes:
        clients: number of clients.
        num_groups, group_of, task, num_classes, kind, input_shape: as in a `Federation`.
        has_units: whether the schema names the unit of each record, such as its patient.

    Args:
        paths: data path of each client, by id.
        known: required facts about the data.
        transform: see `federate`.
        deployed: deployed clients, with the declaration of each. Their invalid records are dropped or clamped and
            reported only in the client's log, because an error would leak information about a record to the server.

    Raises:
        DataError: files do not support the run's kind of data.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        known: Facts,
        transform: Transform | None,
        deployed: Mapping[int, Declared | None] | None = None,
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
        self._warned, self._empty = False, 0

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
            read = partial(own_shard, self._path(client_id), client_id, required, self._transform)
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

    def _path(self, client_id: int) -> str:
        """Return the data path of a client; a simulation looks up its suffix here, so errors stay local."""
        path = self._paths[client_id]
        if client_id in self._deployed:
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

    Raises:
        DataError: the folder is missing. Clients with no data, or data in two formats, fail when their shard is read.
    """
    if not folder:
        raise DataError("dataset 'own' requires the folder of the clients' data: --data-dir DIR, or COTERIE_DATA=DIR")
    home = Path(folder).expanduser()
    return OwnFederation({client: str(home / f"client-{client}") for client in range(clients)}, known, transform)


@lru_cache(maxsize=1)  # called for every message to a deployed client
def own_shard(
    path: str, client_id: int, required: Declared, transform: Transform | None, *, strict: bool = True
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

    Raises:
        DataError: the data cannot be read or do not match the run, or the transform does not fit them.
    """
    parts = usable_records(path, required, strict=strict)
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


@dataclass(frozen=True, eq=False)
class LocalRecords:
    """Records of a local file, prepared for a trained model.

    Attributes:
        where: their location, for messages.
        x: (n, ...) prepared examples.
        y: (n,) labels or real targets; None if the file has none.
        unused: number of other records in the same file, for testing or for training, which are not read.
        index: (n,) position of each record in the file, if a schema dropped some; None: 0 to n - 1.
        left_out: account of all other records and files.
        ids: (n,) texts of the column that names the records, or their patients; None: it was not read.
    """

    where: str
    x: npt.NDArray[Any]
    y: npt.NDArray[Any] | None
    unused: int = 0
    index: npt.NDArray[np.int64] | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    ids: tuple[str, ...] | None = None

    @property
    def units(self) -> npt.NDArray[Any]:
        """(n,) id of each record, or its number."""
        return np.arange(len(self.x)) if self.ids is None else np.array(self.ids)


def local_records(
    path: str | Path, known: Facts, transform: Transform | None, ids: str | None = None, *, held_out: bool = False
) -> LocalRecords:
    """Read the records of a file and prepare them as for training.

    None is dropped or clamped, except by the rules of a schema. A table with a schema is read without its labels if one
    of them is missing or unknown, so that all of its records can be used.

    Args:
        path: of the file.
        known: public facts about the records.
        transform: fixed features of images.
        ids: column that names each record, of a table with a schema; None: there is none.
        held_out: return only the records on which a client tests: separate ones, or those that it holds out.

    Raises:
        DataError: the file cannot be read, a record does not match ``known``, or none is held out.

    Examples:
        >>> from coterie.datasets import facts
        >>> local_records("patients.csv", facts("own", "2", 2), None).x
        array([[ 63., 233.],
               [ 41., 204.],
               [ 56., 250.],
               [ 57., 354.]], dtype=float32)
    """
    if known.kind == "tokens":
        raise DataError("the models expect text, but files contain images or vectors; use coterie.load in Python")
    if known.schema is not None:
        return _table_records(path, known, ids, held_out)
    if ids is not None:
        raise DataError(
            f"column {ids!r} cannot name the records: only tables with a schema have columns beside features"
        )
    records, test = read(Path(path), replace(known, columns=known.columns or None), need_targets=False)
    unused = 0 if test is None else len(test.y)
    if held_out:
        _need_held_out(path, test is not None or bool(records.held_out.any()))
        records, unused = (records.divided()[1], 0) if test is None else (test, len(records.y))
    records = records.fitted(known.shape, known.task.num_targets)
    if records.problems:
        raise DataError(records.problems[0])
    x = centred(fractions(records.x), transform) if known.kind == "images" else records.x
    y = records.y if records.has_targets else None
    return LocalRecords(str(path), x, y, unused, left_out=records.left_out)


def _need_held_out(path: str | Path, some: bool) -> None:
    if not some:
        raise DataError(f"{path}: no record is held out, so that clients test on all of them; evaluate other records")


def _table_records(path: str | Path, data_facts: Facts, ids: str | None, held_out: bool) -> LocalRecords:
    schema = data_facts.schema
    assert schema is not None
    if data_facts.shape != (schema.num_features,) or data_facts.task != schema.task:
        raise DataError(f"the models expect {data_facts}, but their schema has {schema.num_features} features")
    table = read_table(path, schema, labelled=None, units=held_out)
    targets = {column.name for column in schema.targets}
    if any(finding.column in targets and finding.effect == "dropped" for finding in table.findings):
        table = read_table(path, schema, labelled=False, units=held_out)
    if table.errors:
        raise DataError(f"{path}: {table.errors[0]}; `coterie data check` lists all errors")
    if not len(table.x):
        raise DataError(f"{path}: no usable records")
    if held_out:
        kept = rows_held_out(replace(table, y=table.y.astype(np.float32).astype(np.float64)))
        _need_held_out(path, bool(kept.any()))
        table = replace(table, x=table.x[kept], y=table.y[kept], index=table.index[kept])
    y = table.y.astype(schema.task.dtype)
    texts = None if ids is None else column_texts(path, schema, ids)
    names = None if texts is None else tuple(texts[i] for i in table.index.tolist())
    labels = y if table.labelled else None
    return LocalRecords(str(path), table.x, labels, 0, table.index, LeftOut.of_table(table), names)
