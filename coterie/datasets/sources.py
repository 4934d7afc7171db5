"""Labelled images by name: embedded, in torchvision's layout in a folder, or from a user's own function."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class DataError(ValueError):
    """A data set, shift or split that cannot be had; the message says which and what to do."""


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is split and shifted.

    Attributes:
        name: what it is called in messages.
        train_x, test_x: images (n, C, H, W), float32 in [0, 1], or uint8, which shards scale to [0, 1].
        train_y, test_y: labels (n,), int64 in 0..num_classes-1.
        num_classes: number of classes.
        reuse: every group of clients holds all training images (for small sets), instead of a part of them.

    Raises:
        DataError: an array has another shape or type, a value that is not finite, or a label out of range.
    """

    name: str
    train_x: npt.NDArray[Any]
    train_y: npt.NDArray[np.int64]
    test_x: npt.NDArray[Any]
    test_y: npt.NDArray[np.int64]
    num_classes: int
    reuse: bool = False

    def __post_init__(self) -> None:
        if not self.num_classes >= 1:
            raise DataError(f"{self.name}: num_classes is {self.num_classes}; it must be at least 1")
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            where = f"{self.name}: {part}_x and {part}_y"
            if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
                raise DataError(f"{where} must be numpy arrays, not {type(x).__name__} and {type(y).__name__}")
            if x.ndim != 4 or y.shape != x.shape[:1] or x.size == 0:
                raise DataError(f"{where} have shapes {x.shape} and {y.shape}; needed: (n, C, H, W) and (n,), n > 0")
            if x.dtype not in (np.float32, np.uint8) or y.dtype != np.int64:
                raise DataError(f"{where} are {x.dtype} and {y.dtype}; needed: float32 or uint8, and int64")
            if x.dtype == np.float32 and not np.isfinite(x).all():
                raise DataError(f"{where}: an image has a value that is not finite")
            if not (y.min() >= 0 and y.max() < self.num_classes):
                raise DataError(f"{where}: labels span {y.min()}..{y.max()}; allowed: 0..{self.num_classes - 1}")
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: train images are {self.train_x.shape[1:]}, test images {self.test_x.shape[1:]}"
            )


@dataclass(frozen=True)
class DatasetInfo:
    """What a shipped data set is: `shape` is (C, H, W), sizes count images, `obtain` says how to get it.

    `folder` is the name of torchvision's class and of its folder; None where the data is embedded.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    num_classes: int
    train_size: int
    test_size: int
    licence: str
    obtain: str
    folder: str | None = None


DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo(
            "digits",
            "Handwritten digits (UCI Optical Recognition, the copy inside scikit-learn)",
            (1, 8, 8),
            10,
            1400,
            397,
            "CC BY 4.0",
            "embedded: nothing to download",
        ),
        DatasetInfo(
            "mnist",
            "MNIST handwritten digits (LeCun, Cortes, Burges)",
            (1, 28, 28),
            10,
            60_000,
            10_000,
            "CC BY-SA 3.0",
            "coterie datasets --download mnist --data-dir DIR",
            "MNIST",
        ),
        DatasetInfo(
            "fashion-mnist",
            "Fashion-MNIST clothes (Zalando, arXiv:1708.07747)",
            (1, 28, 28),
            10,
            60_000,
            10_000,
            "MIT",
            "coterie datasets --download fashion-mnist --data-dir DIR",
            "FashionMNIST",
        ),
    )
}

_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def load(name: str, data_dir: str | None = None) -> Source:
    """The data set `name`, read once per process.

    Args:
        name: a key of `DATASETS`, or `module:function` of the user's, which returns a `Source`.
        data_dir: folder with torchvision's layout (`MNIST/raw/...`); default: the variable COTERIE_DATA.

    Raises:
        DataError: unknown name, files missing or broken, torchvision unusable, or a user's function that
            does not return a `Source`. Nothing is ever downloaded here.
    """
    if ":" in name:
        return _load(name, None)
    if name not in DATASETS:
        raise DataError(f"{unknown('dataset', name, DATASETS)}, or module:function of your own")
    if DATASETS[name].folder is None:
        return _load(name, None)
    return _load(name, data_dir or os.environ.get("COTERIE_DATA") or None)


def download(name: str, data_dir: str) -> Path:
    """Fetch a data set through torchvision into `data_dir`, made if needed; returns the folder of its files.

    Files that are already there are left alone.

    Raises:
        DataError: unknown name, nothing to download for it, torchvision unusable, or the download failed.
    """
    if name not in DATASETS:
        raise DataError(unknown("dataset", name, DATASETS))
    folder = DATASETS[name].folder
    if folder is None:
        raise DataError(f"dataset '{name}' is {DATASETS[name].obtain}")
    root = Path(data_dir).expanduser()
    try:
        _torchvision_class(name, folder)(root, download=True)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"could not download '{name}' to {root}: {error}; check the network and the folder, and try again"
        ) from error
    return root / folder / "raw"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not among `known`: the nearest one, then all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    return f"unknown {kind} '{name}'; the nearest is '{nearest}'; there are {', '.join(names)}"


@lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None) -> Source:
    if ":" in name:
        return _load_own(name)
    folder = DATASETS[name].folder
    return _load_digits() if folder is None else _load_idx(name, folder, data_dir)


def _load_digits() -> Source:
    """Split by NumPy's legacy generator, whose stream is frozen, so that the split is the same everywhere."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    x = (bunch.images[order, None] / 16).astype(np.float32)
    y = bunch.target[order].astype(np.int64)
    n = DATASETS["digits"].train_size
    return Source("digits", x[:n], y[:n], x[n:], y[n:], DATASETS["digits"].num_classes, reuse=True)


def _load_idx(name: str, folder: str, data_dir: str | None) -> Source:
    ways = f"--data-dir DIR, COTERIE_DATA=DIR, or `{DATASETS[name].obtain}`"
    if data_dir is None:
        raise DataError(f"dataset '{name}' needs a folder that holds {folder}/raw/{_IDX_FILES[0]}: {ways}")
    root = Path(data_dir).expanduser()
    for file in _IDX_FILES:
        path = root / folder / "raw" / file
        if not path.is_file():
            missing = f"has no {path.relative_to(root)}" if root.is_dir() else "does not exist"
            raise DataError(f"dataset '{name}': the folder {root} {missing} (expected: {path}); use {ways}")
    read = _torchvision_class(name, folder)
    try:
        train, test = (read(root, train=train, download=False) for train in (True, False))
    except Exception as error:  # torchvision's reader asserts, indexes and views what the file claims
        raise DataError(
            f"dataset '{name}': a file in {root / folder / 'raw'} is not a valid idx file "
            f"({type(error).__name__}: {error}); remove that folder and use `{DATASETS[name].obtain}`"
        ) from error
    return Source(
        name,
        train.data.numpy()[:, None],
        train.targets.numpy(),
        test.data.numpy()[:, None],
        test.targets.numpy(),
        DATASETS[name].num_classes,
    )


def _torchvision_class(name: str, folder: str) -> Callable[..., Any]:
    try:
        from torchvision import datasets
    except (ImportError, OSError, RuntimeError) as error:  # the ways in which a build for another torch fails
        raise DataError(
            f"dataset '{name}' is read with torchvision, which cannot be imported ({error}); "
            "install the torchvision that matches your torch (`pip install torch torchvision`, one index), "
            "or use dataset 'digits', which needs neither"
        ) from error
    return getattr(datasets, folder)  # type: ignore[no-any-return]


def _load_own(name: str) -> Source:
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code
        raise DataError(
            f"dataset '{name}': cannot import {function or '(nothing)'} from {module or '(nothing)'} "
            f"({type(error).__name__}: {error}); write module:function, its folder on PYTHONPATH"
        ) from error
    if not callable(make):
        raise DataError(f"dataset '{name}': {function} is a {type(make).__name__}, not a function")
    try:
        source = make()
    except Exception as error:
        raise DataError(f"dataset '{name}': {function}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(source, Source):
        raise DataError(
            f"dataset '{name}': {function}() returned a {type(source).__name__}; it must return a "
            "coterie.datasets.Source"
        )
    return source
