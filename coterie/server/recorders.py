"""Recorders: the values of a run as series in TensorBoard and MLflow, updated after every round.

The series hold what metrics.jsonl holds, which is released or charged, and exact scores of runs without
privacy. A resumed run continues its series: values that are already there are not written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from logging import WARNING
from typing import Any, NamedTuple

from flwr.common.logger import log

from coterie.fields.settings import ConfigError
from coterie.files import FileError, read_bytes, read_object
from coterie.logs import printable
from coterie.results import RoundRecord
from coterie.server.folder import RunFolder

#: Environment variable that names the recorders, separated by commas.
VARIABLE = "COTERIE_RECORDERS"
_SKIPPED = ("round", "notes")
# Limits of one request to MLflow: metrics, parameters, and characters of a parameter.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500


class Value(NamedTuple):
    """A number of a round, and when it was seen, in milliseconds; equal values with equal times are one in MLflow."""

    name: str
    round: int
    value: float
    time: int


def configured() -> list[str]:
    """Return the recorders that COTERIE_RECORDERS names.

    Raises:
        ConfigError: it names another one, or the library of one is missing.
    """
    text = os.environ.get(VARIABLE, "")
    names = text.split(",") if text else []
    if len(set(names)) < len(names) or not set(names) <= _SERIES.keys():
        raise ConfigError(f"{VARIABLE} = {text!r}: must be {', '.join(_SERIES)}, or both separated by a comma")
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"{VARIABLE} = {text!r} requires {name}: pip install 'coterie[{name}]', or leave it out")
    return names


@contextmanager
def recording(folder: RunFolder) -> Iterator[None]:
    """Record the folder's run while the context lasts, and its result at the end.

    Raises:
        ConfigError: a library is missing, or a recorder cannot be opened.
    """
    opened = [_Recording(name, folder) for name in configured()]
    previous = folder.on_metrics

    def observe(record: RoundRecord) -> None:
        for recorder in opened:
            recorder.add([record])
        previous(record)

    if opened:
        folder.on_metrics = observe
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        folder.on_metrics = previous
        for recorder in opened:
            recorder.finish(status)


class _Recording:
    """One recorder of a run. A failure of the recorder never stops the run: its values are written later."""

    def __init__(self, name: str, folder: RunFolder) -> None:
        self._name, self._folder = name, folder
        self._exact = not folder.plan.private
        self._pending: list[Value] = []
        try:
            self._series = _SERIES[name](folder)
            self._known = self._series.known()
            self._add(folder.rounds())
        except Exception as error:  # of a library, a network or a database
            raise ConfigError(f"{name} cannot be opened: {_described(error)}") from None

    def add(self, records: Sequence[RoundRecord]) -> None:
        """Write the values of these rounds; warn if that fails."""
        try:
            self._add(records)
        except Exception as error:
            log(WARNING, "%s cannot record a round now, and later rounds retry it: %s", self._name, _described(error))

    def finish(self, status: str) -> None:
        """Write what is missing, also what a crash kept from the series, and the result."""
        try:
            self._add(self._folder.rounds())
            facts: dict[str, Any] = {}
            path = self._folder.path / "privacy.json"  # it does not exist before the end of the run
            with suppress(FileError):
                guarantee, digest = read_object(path), hashlib.sha256(read_bytes(path)).hexdigest()
                facts = {key: guarantee.get(key) for key in ("certified", "unit", "epsilon", "delta")}
                facts["certificate-sha256"] = digest
            self._series.finish(status, facts)
        except Exception as error:
            log(WARNING, "%s did not record the end of the run: %s", self._name, _described(error))

    def _add(self, records: Sequence[RoundRecord]) -> None:
        values = [value for record in records for value in values_of(record.to_json())]
        if self._exact:
            values += [value for record in records for value in values_of(record.exact())]
        waiting = {(value.name, value.round) for value in self._pending}
        missing = (value for value in values if (value.name, value.round) not in self._known)
        self._pending += [value for value in missing if (value.name, value.round) not in waiting]
        if self._pending:
            self._series.write(self._pending)
            self._known |= {(value.name, value.round) for value in self._pending}
            self._pending = []


def values_of(line: Mapping[str, Any]) -> Iterator[Value]:
    """Yield the finite numbers of a line; numbers in a list or a table get names such as ``histogram/0``.

    Texts are left out, and so are tables in tables, whose names come from clients.
    """
    now = int(time.time() * 1000)
    for key, value in line.items():
        if key in _SKIPPED:
            continue
        inner: Mapping[Any, Any] = {key: value}
        if isinstance(value, Mapping):
            inner = {f"{key}/{name}": entry for name, entry in value.items()}
        elif isinstance(value, list | tuple):
            inner = {f"{key}/{index}": entry for index, entry in enumerate(value)}
        for name, number in inner.items():
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                yield Value(name, line["round"], float(number), now)


def _described(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}")


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run folder; numbers in double precision.

    As of MLflow, `known` returns the names and rounds of the values that are there, `write` appends values, and
    `finish` ends the run with a status of MLflow and with facts about its result.
    """

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder.path / "tensorboard"
        self._writer: Any = SummaryWriter(str(self._path))

    def known(self) -> set[tuple[str, int]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # an incomplete event of a crash is left out
        events = EventAccumulator(str(self._path), size_guidance={"tensors": 0}).Reload()
        return {(name, event.step) for name in events.Tags()["tensors"] for event in events.Tensors(name)}

    def write(self, values: Sequence[Value]) -> None:
        for value in values:
            self._writer.add_scalar(value.name, value.value, value.round, new_style=True, double_precision=True)
        self._writer.flush()

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        self._writer.close()


class _MLflow:
    """A run of MLflow, whose id is in ``mlflow.json`` of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        # MLflow sends telemetry unless these are set when it is imported.
        os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # a later round retries
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        config, path = folder.config, folder.path.absolute()
        default_uri = f"sqlite:///{path}/mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or default_uri
        self._client: Any = MlflowClient(uri)
        identity = {"uri-sha256": hashlib.sha256(uri.encode()).hexdigest()}  # a URI may contain a password
        stored = read_object(path / "mlflow.json") if (path / "mlflow.json").exists() else {}
        if stored.get("uri-sha256") == identity["uri-sha256"]:
            self._run = str(stored["run"])
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Coterie"
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            number = experiment.experiment_id
        else:
            number = self._client.create_experiment(name, (path / "mlflow").as_uri() if uri == default_uri else None)
        self._run = self._client.create_run(number, run_name=folder.path.name).info.run_id
        # The settings, without paths, addresses and other places.
        values = {name: value for name, value in config.values.items() if not config.declared[name].place}
        settings = [Param(name, str(value)[:_CHARACTERS]) for name, value in values.items()]
        for start in range(0, len(settings), _PARAMETERS):
            self._client.log_batch(self._run, params=settings[start : start + _PARAMETERS])
        folder.write_json("mlflow.json", {**identity, "run": self._run})

    def known(self) -> set[tuple[str, int]]:
        names = self._client.get_run(self._run).data.metrics
        return {(name, metric.step) for name in names for metric in self._client.get_metric_history(self._run, name)}

    def write(self, values: Sequence[Value]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(value.name, value.value, value.time, value.round) for value in values]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS])

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            self._client.set_tag(
                self._run, f"coterie.{name}", json.dumps(value) if not isinstance(value, str) else value
            )
        self._client.set_terminated(self._run, status)


_SERIES: Mapping[str, Callable[[RunFolder], _TensorBoard | _MLflow]] = {"tensorboard": _TensorBoard, "mlflow": _MLflow}
