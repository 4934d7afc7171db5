"""Records of a user's file, and the conversion to the format of a run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError

Shape = tuple[int, ...]
Array = npt.NDArray[Any]

#: Suffixes of tables, and of all files.
TABLE_SUFFIXES = (".csv", ".parquet", ".tsv", ".csv.gz", ".tsv.gz")
SUFFIXES = (".npz", *TABLE_SUFFIXES)
#: Largest uncompressed size of a file in bytes, checked before its data are loaded into memory.
MAX_BYTES = 4 * 2**30
NOT_NUMERIC = "is not a numeric type; use integers or floats"
# One in this many records is held out.
_HELD_OUT = 5


@dataclass(frozen=True, eq=False)
class Records:
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
        notes: what a schema drops or clamps by its own rules.
        warnings: features that look wrong, for the owner alone.
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
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def divided(self) -> tuple[Records, Records]:
        """Return the training and the held-out records; the same object twice if none is held out."""
        if not self.held_out.any():
            return self, self
        train, test = self._only(~self.held_out), replace(self._only(self.held_out), problems=(), notes=())
        if not len(train.y):
            problem = f"{self.where}: all {len(self.y)} records are held out; add records or test data"
            train = replace(train, problems=(*train.problems, problem))
        return train, test

    def fitted(self, shape: Shape, num_classes: int, span: tuple[float, float] | None = None) -> Records:
        """Convert to the run's format: `x` is (n, *shape), `y` int64 labels or float32 targets.

        Images are uint8, or float32 in [0, 1]; vectors are float32. Records without a valid target are dropped;
        pixels are clamped, and so are vectors if there is a `span`. `problems` lists both. Each record is processed
        independently of all others.

        Args:
            shape: shape of an example.
            num_classes: number of classes of the run; 0 for real-valued targets.
            span: minimum and maximum value of a vector; None for no limit.

        Raises:
            DataError: the examples of the file have another shape, or the targets are of the other kind.
        """
        examples, clamped = self._examples(shape, span)
        if self.labelled not in (None, num_classes > 0):
            has, column = ("labels", "target") if self.labelled else ("real targets", "label")
            raise DataError(
                f"{self.where} contains {has}, but the run has {num_classes} classes; use a column {column!r}"
            )
        fitted = replace(self, x=examples, problems=self.problems + clamped)
        if num_classes == 0:
            return replace(fitted, y=self.y.astype(np.float32))
        fitted = fitted.only_labels()
        above = fitted.y >= num_classes
        if above.any():
            problem = (
                f"{self.where}: a label is {fitted.y[above].max():g}, but the run has {num_classes} classes, numbered "
                "from 0; remove such records, or start a run with more classes"
            )
            fitted = replace(fitted._only(~above), problems=(*fitted.problems, problem))
        return replace(fitted, y=fitted.y.astype(np.int64))

    def _examples(self, shape: Shape, span: tuple[float, float] | None) -> tuple[Array, tuple[str, ...]]:
        """Return the examples, clamped, and the problems found."""
        x = self.x
        if len(shape) == 1 and x.shape[1:] == shape:
            x = x.astype(np.float32)
            return (
                (x, ()) if span is None else self._clamped(x, *span, f"the declared range is {span[0]:g}:{span[1]:g}")
            )
        rows = x.ndim == 2 and x.shape[1] == math.prod(shape)
        if len(shape) == 1 or not (rows or x.shape[1:] == shape or (1, *x.shape[1:]) == shape):
            last = x.shape[1:] == (*shape[1:], *shape[:1])
            way = "put channels first: x.transpose(0, 3, 1, 2)" if last else "convert them to that shape"
            raise DataError(f"{self.where} contains {self.what}, but the run expects {sizes_text(shape)}; {way}")
        problems: tuple[str, ...] = ()
        if x.dtype != np.uint8:
            allowed = "integers from 0 to 255" if self.whole else "floats in [0, 1]"
            hint = f"pixels must be {allowed} (.npz and .parquet distinguish integers from floats; .csv has integers)"
            x, problems = self._clamped(x, 0, 255 if self.whole else 1, hint, whole=self.whole)
        return x.reshape(len(x), *shape).astype(np.uint8 if self.whole else np.float32), problems

    def _clamped(
        self, x: Array, low: float, high: float, allowed: str, whole: bool = False
    ) -> tuple[Array, tuple[str, ...]]:
        right = np.clip(x, low, high)
        right = np.floor(right) if whole else right
        wrong = x != right
        if not wrong.any():
            return x, ()
        noun = "pixel" if allowed.startswith("pixels") else "number"
        return right, (f"{self.where}: a {noun} is {x[wrong][0]:g}; {allowed}",)

    def only_labels(self) -> Records:
        """Return the records whose target is a label."""
        wrong = ~_are_labels(self.y)
        if not wrong.any():
            return self
        problem = (
            f"{self.where}: a label is {self.y[wrong][0]:g}; labels must be integers from 0; name the column of real "
            "targets 'target'"
        )
        return replace(self._only(~wrong), problems=(*self.problems, problem))

    def _only(self, rows: npt.NDArray[np.bool_]) -> Records:
        return replace(self, x=self.x[rows], y=self.y[rows], held_out=self.held_out[rows])


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


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, such as `.csv` or `.csv.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def need_regular(path: Path) -> None:
    """Reject named pipes and devices: reading from them may never end."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; replace it by a regular file or a symbolic link to one")


def need_at_most(limit: int, size: int, where: str, action: str) -> None:
    """Reject a size in bytes above a limit."""
    if size > limit:
        raise DataError(f"{where} {action} {size:,} bytes, but the limit is {limit:,}; reduce its size")


def shortened(message: object) -> str:
    """Shorten an error message, which may contain parts of the file."""
    text = str(message)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _are_labels(y: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return np.asarray((y >= 0) & (y == np.floor(y)))


def is_held_out(x: Array, y: float) -> bool:
    """Decide by a hash of the record's values, identical for every file format."""
    digest = hashlib.sha256()
    for channel in x if x.ndim == 3 else (x,):  # one channel at a time: images may be large
        digest.update(np.ascontiguousarray(channel, "<f4").data)
    digest.update(np.float64(y).astype("<f8").tobytes())
    return int.from_bytes(digest.digest()) % _HELD_OUT == 0


def sizes_text(shape: Shape) -> str:
    """Return a shape as text, such as 1x28x28, or 16 numbers."""
    return "x".join(map(str, shape)) + (" numbers" if len(shape) == 1 else "")
