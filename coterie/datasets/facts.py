"""Public facts about the data of a run, and what an owner declares of local data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from coterie.datasets.catalog import DATASETS, load
from coterie.datasets.data_files import shortened
from coterie.datasets.records import Shape, sizes_text
from coterie.datasets.schema import TYPICAL, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.tables import columns_text, parse_columns
from coterie.fields.removed import removal
from coterie.tasks import Task, TaskError, multi_label, task_of

#: Name of the data set that consists of local client data.
OWN_DATA = "own"


@dataclass(frozen=True)
class Facts:
    """Public facts about the data of a run.

    Attributes:
        kind: "images", "tokens" or "vectors".
        shape: shape of an example, before fixed features.
        task: what models predict.
        schema: of tables; None: labels and features are numbers, see the module.
        feature_range: public bound on the absolute value of a feature, to which methods that need one clamp.
        columns: names of the features of tables without a schema, in order; empty: not known; None: not compared.
    """

    kind: str
    shape: Shape
    task: Task
    schema: TableSchema | None = None
    feature_range: float = field(default=1.0, compare=False)
    columns: tuple[str, ...] | None = ()

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        schema = f" by schema {self.fingerprint[:12]}" if self.schema else ""
        columns = f" and columns {shortened(columns_text(self.columns))}" if self.columns else ""
        return f"examples of {sizes} with {self.task}{schema}{columns}"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the schema; empty without one."""
        return self.schema.fingerprint if self.schema else ""


@dataclass(frozen=True)
class Declared(Facts):
    """Facts that a data owner declares in advance, independently of the server.

    Attributes:
        span: minimum and maximum to which vectors are clamped; None for no limit.
    """

    span: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        schema: str | None,
        input_shape: str | None,
        num_classes: int | None,
        value_range: str | None,
        columns: str | None = None,
        task: str | None = None,
    ) -> Declared | None:
        """Return the declaration of a node configuration; None: it declares nothing.

        Args:
            schema: file of a schema, which determines all else; None: there is none.
            input_shape: such as `"1x28x28"`, or `"16"`.
            num_classes: 0 for real targets.
            value_range: such as `"0:1"`; None for no limit.
            columns: names of the features of a table without a schema, as in the setting; None: those of the run.
            task: what models predict, as in the setting; None: classes or real targets.

        Raises:
            DataError: a value is invalid, or the schema has errors.
        """
        if schema is not None:
            loaded = TableSchema.load(schema)
            return cls("vectors", (loaded.num_features,), loaded.task, loaded)
        if input_shape is None or num_classes is None:
            return None
        shape = _shape(input_shape)
        kind = "images" if len(shape) == 3 else "vectors"
        named = own_task(task or "auto", num_classes)
        return cls(kind, shape, named, columns=_columns(columns or "", shape), span=_span(value_range))


def facts(
    dataset: str,
    input_shape: str,
    num_classes: int | None,
    data_dir: str | Path | None = None,
    table_schema: str | None = None,
    columns: str = "",
    task: str = "auto",
) -> Facts:
    """Return the facts about a data set; only a `module:function` is loaded.

    Args:
        dataset: `OWN_DATA`, or a name accepted by `load`.
        input_shape: shape of `OWN_DATA`: `"1x28x28"`, or `"16"`.
        num_classes: number of classes of `OWN_DATA`; None if a schema determines it.
        data_dir: see `load`.
        table_schema: schema of the tables of `OWN_DATA` as text, which determines shape and classes; None for none.
        columns: names of the features of tables without a schema, as in the setting.
        task: what models of `OWN_DATA` predict, as in the setting.

    Raises:
        DataError: the shape or the schema is invalid, or the data set unknown.

    Examples:
        >>> str(facts("own", "2", 2))
        'examples of 2 with 2 classes'
    """
    if dataset == OWN_DATA:
        if table_schema:
            schema = TableSchema.parse(table_schema)
            return Facts("vectors", (schema.num_features,), schema.task, schema, schema.reach or TYPICAL)
        shape = _shape(input_shape)
        predicted = own_task(task, num_classes)
        if len(shape) == 3:
            return Facts("images", shape, predicted)
        return Facts("vectors", shape, predicted, None, TYPICAL, _columns(columns, shape))
    if dataset in DATASETS:
        info = DATASETS[dataset]
        return Facts(info.kind, info.shape, task_of(info.num_classes))
    source = load(dataset, data_dir)
    return Facts(source.kind, source.train_x.shape[1:], source.task)


def own_task(name: str, num_classes: int | None) -> Task:
    """Return the task of clients' own data without a schema.

    Args:
        name: as the setting `task` has it; only "multi-label" differs from what the classes say.
        num_classes: number of classes, or of labels; 0: real targets.

    Raises:
        DataError: the number is missing, or the task cannot have it.
    """
    if text := removal(f"task = {name}"):
        raise DataError(text)
    try:
        if num_classes is None:
            raise DataError("num-classes is missing: set the number of classes or labels, or 0 for real targets")
        return multi_label(num_classes) if name == "multi-label" else task_of(num_classes)
    except TaskError as error:
        raise DataError(str(error)) from None


def _span(text: str | None) -> tuple[float, float] | None:
    if not text:
        return None
    low, _, high = text.partition(":")
    try:
        span = float(low), float(high)
    except ValueError:
        span = math.nan, math.nan
    if not (-math.inf < span[0] < span[1] < math.inf):
        raise DataError(f"value-range = {text!r}: must be the minimum and the maximum, such as 0:1")
    return span


def _columns(text: str, shape: Shape) -> tuple[str, ...] | None:
    columns = parse_columns(text)
    if columns and (len(columns),) != shape:
        raise DataError(
            f"columns = {shortened(text)!r} names {len(columns)} features, but input-shape is {sizes_text(shape)}; "
            "change one of the two (columns of a simulation are those of its first table, unless they are set)"
        )
    return columns


def _shape(text: str) -> Shape:
    parts = text.split("x")
    if len(parts) not in (1, 3) or not all(size.isdecimal() and int(size) > 0 for size in parts):
        raise DataError(
            f"input-shape = {text!r}: must be channels x height x width of images, such as 1x28x28, or the number of "
            "features, such as 16"
        )
    return tuple(map(int, parts))
