"""Data sets before partition and shift, and descriptions of the built-in ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.tasks import Task, TaskError, named_task


class DataError(ValueError):
    """A data set, shift or partition is unavailable; the message states which and what to do."""


#: Kind of examples, by rank and type of their array.
_KINDS = {(4, "float32"): "images", (4, "uint8"): "images", (2, "int64"): "tokens", (2, "float32"): "vectors"}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before partition and shift.

    Attributes:
        name: name for messages.
        train_x, test_x: images (n, C, H, W), float32 in [0, 1], or uint8, which shards scale to [0, 1]; or tokens
            (n, L), int64 in 0..num_classes-1, where the label is the next token; or vectors (n, F), float32.
        train_y, test_y: labels (n,), int64 in 0..num_classes-1; or, without classes, real targets (n,), float32.
        num_classes: number of classes, or of labels; 0 for real targets.
        reuse: whether every group of clients holds all training examples instead of a part of them (for small data
            sets).
        train_owner, test_owner: int64 (n,) in 0..owners-1, the owner of each row if the data have natural clients.
            Each owner has training and test rows.
        may_be_empty: whether the data set may have no rows.
        predicts: the task, such as "multi-label", whose targets :func:`coterie.tasks.encode_labels` returns; "auto":
            classes or real targets.

    Raises:
        DataError: an array has a wrong shape or type or a non-finite value, a label or token is out of range, or an
            owner has no rows.
    """

    name: str
    train_x: npt.NDArray[Any]
    train_y: npt.NDArray[Any]
    test_x: npt.NDArray[Any]
    test_y: npt.NDArray[Any]
    num_classes: int
    reuse: bool = False
    train_owner: npt.NDArray[np.int64] | None = None
    test_owner: npt.NDArray[np.int64] | None = None
    may_be_empty: bool = False
    predicts: str = "auto"

    def __post_init__(self) -> None:
        if not self.num_classes >= 0:
            raise DataError(
                f"{self.name}: num_classes is {self.num_classes}; it must be at least 1, or 0 for regression"
            )
        try:
            _ = self.task
        except TaskError as error:
            raise DataError(f"{self.name}: {error}") from None
        for subset, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            self._check(f"{self.name}: {subset}_x and {subset}_y", x, y)
        if self.train_x.shape[1:] != self.test_x.shape[1:] or self.kind != _kind(self.test_x):
            raise DataError(
                f"{self.name}: train {self.kind} are {self.train_x.shape[1:]}, "
                f"test {_kind(self.test_x)} {self.test_x.shape[1:]}; they must match"
            )
        self._check_owners()

    @property
    def task(self) -> Task:
        """What models of it predict."""
        return named_task(self.predicts, self.num_classes)

    @property
    def kind(self) -> str:
        """Kind of examples: `images`, `tokens` or `vectors`."""
        return _kind(self.train_x)

    @property
    def owners(self) -> int:
        """Number of natural clients; 0 if there are none."""
        return 0 if self.train_owner is None else int(self.train_owner.max()) + 1

    @cached_property
    def whole(self) -> Source:
        """All rows, training rows first, as both training and test arrays; cached.

        Raises:
            DataError: training and test images have different types.
        """
        if self.train_x.dtype != self.test_x.dtype:
            raise DataError(
                f"{self.name}: train_x and test_x must have the same dtype to be merged, not {self.train_x.dtype} and "
                f"{self.test_x.dtype}"
            )
        x, y = np.concatenate([self.train_x, self.test_x]), np.concatenate([self.train_y, self.test_y])
        return Source(self.name, x, y, x, y, self.num_classes, predicts=self.predicts)

    def _check(self, where: str, x: Any, y: Any) -> None:
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            raise DataError(f"{where} must be numpy arrays, not {type(x).__name__} and {type(y).__name__}")
        if x.ndim not in (2, 4) or y.shape != x.shape[:1] or not (x.size or self.may_be_empty):
            raise DataError(
                f"{where} have shapes {x.shape} and {y.shape}; expected images (n, C, H, W), tokens (n, L) or vectors "
                "(n, F), and (n,), with n > 0"
            )
        if (x.ndim, x.dtype.name) not in _KINDS or y.dtype != self.task.dtype:
            raise DataError(
                f"{where} are {x.dtype} and {y.dtype}, and num_classes is {self.num_classes}; expected "
                "float32 or uint8 images, int64 tokens or float32 vectors, int64 labels (0 classes: float32 targets)"
            )
        if any(array.dtype == np.float32 and not np.isfinite(array).all() for array in (x, y)):
            raise DataError(f"{where}: a value is not finite")
        if not len(y):
            return
        if not self.task.real and not (y.min() >= 0 and y.max() < self.task.num_targets):
            raise DataError(f"{where}: labels span {y.min()}..{y.max()}; allowed: 0..{self.task.num_targets - 1}")
        if _kind(x) == "tokens" and not (x.min() >= 0 and x.max() < self.num_classes):
            raise DataError(
                f"{where}: tokens span {x.min()}..{x.max()}; allowed: 0..num_classes-1, and num_classes is "
                f"{self.num_classes}"
            )

    def _check_owners(self) -> None:
        if self.train_owner is None and self.test_owner is None:
            return
        for subset, owner, y in (("train", self.train_owner, self.train_y), ("test", self.test_owner, self.test_y)):
            where = f"{self.name}: {subset}_owner"
            if not (isinstance(owner, np.ndarray) and owner.dtype == np.int64 and owner.shape == y.shape):
                raise DataError(
                    f"{where} must be an int64 array of shape {y.shape}, as the other owner array is given, not "
                    f"{getattr(owner, 'dtype', type(owner).__name__)} {getattr(owner, 'shape', '')}".rstrip()
                )
            if owner.min() < 0 or owner.max() >= self.owners or not np.bincount(owner, minlength=self.owners).all():
                raise DataError(
                    f"{where} spans {owner.min()}..{owner.max()}; each owner 0..{self.owners - 1} needs "
                    "rows of training and of test data: remove the others and renumber the rest"
                )


def source_fingerprint(source: Source) -> str:
    """Return the SHA-256 of the arrays of a data set, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in (source.train_x, source.train_y, source.test_x, source.test_y):
        digest.update(f"{array.dtype} {array.shape}".encode())
        if array.size:
            digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def _kind(x: npt.NDArray[Any]) -> str:
    return _KINDS[x.ndim, x.dtype.name]


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a built-in data set.

    Attributes:
        name: name in the registry.
        title: content and origin.
        shape: shape of an example: (C, H, W), (L,) or (F,).
        num_classes: number of classes; 0 for real targets.
        train_size, test_size: numbers of examples; None if they depend on the files.
        licence: licence of the data.
        obtain: how to obtain the data.
        read: creates the `Source` from this description and the data folder; the files must exist.
        files: required files, relative to the data folder; empty for embedded data.
        fetch: downloads the files to the data folder, which it creates, and returns their folder; None if there is
            nothing to download.
        kind: kind of examples: `images`, `tokens` or `vectors`.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    num_classes: int
    train_size: int | None
    test_size: int | None
    licence: str
    obtain: str
    read: Callable[[DatasetInfo, Path], Source]
    files: tuple[str, ...] = ()
    fetch: Callable[[str, Path], Path] | None = None
    kind: str = "images"
