"""Records of a user's file, and the conversion to the format of a run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.left_out import LeftOut, Loss
from coterie.datasets.sources import DataError
from coterie.datasets.units import Units, is_held_out_by

Shape = tuple[int, ...]
Array = npt.NDArray[Any]

NOT_NUMERIC = "is not a numeric type; use integers or floats"


@dataclass(frozen=True, eq=False)
class Records:  # large: one field per fact about a file
    """Records read from a file.

    Attributes:
        where: their location, for messages.
        what: their description, such as "images of 1x28x28".
        x: (n, ...) integers or float32; images are (n, C, H, W), or (n, 0) if no shape was requested.
        y: (n,) float64.
        held_out: (n,) whether each record is held out if there are no test data.
        whole: whether pixels are integers in 0..255; otherwise fractions in [0, 1].
        labelled: whether `y` holds labels; otherwise real-valued targets. None if the file does not specify it.
        problems: the problems of records that were dropped or clamped.
        has_targets: whether the file has labels or targets; otherwise `y` is zero.
        left_out: account of all that is left out or changed, with and without a rule.
        class_names: names of the classes, or of all distinct targets; empty if they are numbers.
        label_names: names of the labels, of which a record may have several; empty if they are numbers.
        warnings: features that look wrong, for the owner alone.
        units: of the records; None: each record is its own.
    """

    where: str
    what: str
    x: Array
    y: npt.NDArray[np.float64]
    held_out: npt.NDArray[np.bool_]
    whole: bool
    labelled: bool | None
    problems: tuple[str, ...] = ()
    has_targets: bool = True
    left_out: LeftOut = field(default_factory=LeftOut)
    class_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    units: Units | None = None

    def divided(self) -> tuple[Records, Records]:
        """Return the training and the held-out records; the same object twice if none is held out."""
        if not self.held_out.any():
            return self, self
        train = self.only(~self.held_out)
        test = replace(self.only(self.held_out), problems=(), left_out=LeftOut())
        return train, test

    def fitted(self, shape: Shape, num_classes: int, span: tuple[float, float] | None = None) -> Records:
        """Convert to the run's format: `x` is (n, *shape), `y` int64 labels or float32 targets.

        Images are uint8, or float32 in [0, 1]; vectors are float32. Records without a valid target are dropped,
        and pixels are clamped, which `problems` lists. Vectors are clamped to a `span`. `left_out` lists all. Each
        record is processed independently of all others.

        Args:
            shape: shape of an example.
            num_classes: number of classes of the run; 0 for real-valued targets.
            span: minimum and maximum value of a vector; None for no limit.

        Raises:
            DataError: the examples of the file have another shape, or the targets are of the other kind.
        """
        fitted = replace(self, labelled=num_classes > 0)._with_examples(shape, span)
        if self.labelled not in (None, num_classes > 0):
            has, column = ("labels", "target") if self.labelled else ("real targets", "label")
            raise DataError(
                f"{self.where} contains {has}, but the run has {num_classes} classes; use a column {column!r}"
            )
        if num_classes == 0:
            return replace(fitted, y=fitted.y.astype(np.float32))
        fitted = fitted.only_labels()
        above = fitted.y >= num_classes
        if above.any():
            problem = (
                f"{self.where}: a label is {fitted.y[above].max():g}, but the run has {num_classes} classes, numbered "
                "from 0; remove such records, or start a run with more classes"
            )
            fitted = fitted._without(above, problem, f"label that is not one of {num_classes} classes")
        return replace(fitted, y=fitted.y.astype(np.int64))

    def _with_examples(self, shape: Shape, span: tuple[float, float] | None) -> Records:
        """Return the records with examples of this shape and range."""
        x = self.x
        if len(shape) == 1 and x.shape[1:] == shape:
            records = replace(self, x=x.astype(np.float32))
            if span is None:
                return records
            low, high = span
            reason = f"number out of the declared range {low:g}:{high:g}"
            return records._changed(np.clip(records.x, low, high), reason, by_rule=True)[0]
        rows = x.ndim == 2 and x.shape[1] == math.prod(shape)
        if len(shape) == 1 or not (rows or x.shape[1:] == shape or (1, *x.shape[1:]) == shape):
            last = x.shape[1:] == (*shape[1:], *shape[:1])
            way = "put channels first: x.transpose(0, 3, 1, 2)" if last else "convert them to that shape"
            raise DataError(f"{self.where} contains {self.what}, but the run expects {sizes_text(shape)}; {way}")
        records = self
        if x.dtype != np.uint8:
            right = np.floor(np.clip(x, 0, 255)) if self.whole else np.clip(x, 0, 1)
            allowed = "integers from 0 to 255" if self.whole else "floats in [0, 1]"
            records, first = self._changed(right, f"pixel that is not among {allowed}")
            if records is not self:
                problem = (
                    f"{self.where}: a pixel is {first:g}; pixels must be {allowed} (.npz and .parquet distinguish "
                    "integers from floats; .csv has integers)"
                )
                records = replace(records, problems=(*self.problems, problem))
        return replace(records, x=records.x.reshape(len(x), *shape).astype(np.uint8 if self.whole else np.float32))

    def _changed(self, right: Array, reason: str, by_rule: bool = False) -> tuple[Records, float]:
        """Return the records with these examples, and an account of the change; and the first value that differs."""
        wrong = self.x != right
        if not wrong.any():
            return self, math.nan
        rows = wrong.reshape(len(wrong), -1).any(axis=1)
        loss = Loss(reason, count=int(rows.sum()), effect="clamped", classes=self.only(rows).counts(), by_rule=by_rule)
        return replace(self, x=right, left_out=self.left_out + LeftOut.of([loss])), float(self.x[wrong][0])

    def only_labels(self) -> Records:
        """Return the records whose target is a label."""
        wrong = ~_are_labels(self.y)
        if not wrong.any():
            return self
        problem = (
            f"{self.where}: a label is {self.y[wrong][0]:g}; labels must be integers from 0; name the column of real "
            "targets 'target'"
        )
        return self._without(wrong, problem, "label that is not an integer from 0")

    def counts(self) -> dict[str, int]:
        """Return the number of records by class name; empty for real targets."""
        return {} if self.labelled is False else class_counts(self.y, self.class_names)

    def _without(self, rows: npt.NDArray[np.bool_], problem: str, reason: str) -> Records:
        """Return the other records, with an account of these."""
        lost = self.only(rows)
        loss = Loss(reason, count=len(lost.y), classes=lost.counts())
        return replace(
            self.only(~rows), problems=(*self.problems, problem), left_out=self.left_out + LeftOut.of([loss])
        )

    def only(self, rows: npt.NDArray[np.bool_]) -> Records:
        """Return some of the records, with the account of all."""
        units = None if self.units is None else self.units.only(rows)
        return replace(self, x=self.x[rows], y=self.y[rows], held_out=self.held_out[rows], units=units)


def class_counts(y: npt.NDArray[np.float64], names: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the number of records by class: its name, or else its number. Values that are no labels do not count."""
    present, numbers = np.unique(y[np.isfinite(y)], return_counts=True)
    counts = zip(present.tolist(), numbers.tolist(), strict=True)
    return {
        names[int(label)] if label < len(names) else f"{label:g}": number
        for label, number in counts
        if label >= 0 and label == math.floor(label)
    }


def labels(y: npt.NDArray[np.float64], labelled: bool | None) -> str:
    """Describe the labels or targets in words."""
    present = np.unique(y)
    if not len(present):
        return "no targets"
    if labelled is False or not _are_labels(y).all():
        return f"targets {present[0]:g}..{present[-1]:g}"
    if len(present) == present[-1] - present[0] + 1:
        return f"classes {present[0]:g}..{present[-1]:g}"
    return "classes " + ", ".join(f"{label:g}" for label in present)


def _are_labels(y: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return np.asarray((y >= 0) & (y == np.floor(y)))


def is_held_out(x: Array, y: float) -> bool:
    """Decide by a hash of the record's values, identical for every file format."""
    digest = hashlib.sha256()
    for channel in x if x.ndim == 3 else (x,):  # one channel at a time: images may be large
        digest.update(np.ascontiguousarray(channel, "<f4").data)
    digest.update(np.float64(y).astype("<f8").tobytes())
    return is_held_out_by(digest.digest())


def sizes_text(shape: Shape) -> str:
    """Return a shape as text, such as 1x28x28, or 16 numbers."""
    return "x".join(map(str, shape)) + (" numbers" if len(shape) == 1 else "")
