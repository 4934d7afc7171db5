"""Read archives of numpy arrays."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from coterie.datasets import data_files
from coterie.datasets.data_files import need_at_most, shortened
from coterie.datasets.left_out import LeftOut, Loss
from coterie.datasets.records import NOT_NUMERIC, Array, Records, class_counts, is_held_out, sizes_text
from coterie.datasets.sources import DataError
from coterie.tasks import Task

_MAX_HEADER_BYTES = 64 * 2**10
_WAY = "fix or remove it"
_TRAIN, _TEST = ("x", "y"), ("x_test", "y_test")


def read_archive(path: Path, need_targets: bool, task: Task | None = None) -> tuple[Records, Records | None]:
    """Read the training records of an `.npz` archive and, if present, its test records.

    Args:
        path: the archive.
        need_targets: whether it must have targets.
        task: what models predict, if a target is made of several numbers; None: `y` holds (n,) targets.

    Raises:
        DataError: it cannot be read, or lacks an array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            given = {member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")}
            members = {name: f"{name}.npy" for name in (*_TRAIN, *_TEST) if name in given}
            size = sum(_unpacked(archive, member) for member in members.values())
            need_at_most(data_files.MAX_BYTES, size, str(path), "unpacks to")
            arrays = {name: _array(archive, member) for name, member in members.items()}
    except DataError:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile and numpy say
        raise DataError(
            f"{path} is not a numpy archive of numeric arrays ({shortened(error)}); write it with numpy.savez(path, "
            "x=..., y=...). Pickled objects are rejected because they could run code"
        ) from None
    if not need_targets and arrays.keys() == {"x"}:
        return _records(f"{path}: x", arrays["x"], None), None
    parts = (_TRAIN, _TEST) if arrays.keys() & {*_TEST} else (_TRAIN,)
    needed = [name for names in parts for name in names]
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}; expected {', '.join(needed)}")
    train, *test = (_records(f"{path}: {x}, {y}", arrays[x], arrays[y], task) for x, y in parts)
    return train, test[0] if test else None


def _unpacked(archive: zipfile.ZipFile, member: str) -> int:
    """Return the uncompressed size of an array in bytes, from its header; at least 8 per record for the target.

    Raises:
        ValueError: the header is invalid, or the size exceeds that of the member.
    """
    info = archive.getinfo(member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile limits no other method
        raise ValueError(f"{member} has unsupported compression method {info.compress_type}; use deflate")
    with archive.open(info) as opened:
        start = io.BytesIO(opened.read(_MAX_HEADER_BYTES))
    version = np.lib.format.read_magic(start)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"{member} has unsupported version {version} of NumPy's format")
    shape, _, dtype = readers[version](start)
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size > info.file_size - start.tell():
        raise ValueError(f"{member} has shape {shape} of {dtype}, but {info.file_size:,} bytes")
    return max(size, 8 * shape[0] if shape else 0)


def _array(archive: zipfile.ZipFile, member: str) -> Array:
    with archive.open(member) as opened:
        values: Array = np.lib.format.read_array(opened, allow_pickle=False)
    return values


def _records(where: str, x: Array, y: Array | None, task: Task | None = None) -> Records:
    """Validate records independently of a run; drop records with missing values."""
    has_targets = y is not None
    y = np.zeros(len(x) if x.ndim else 0) if y is None else y
    cells = task.num_cells if task is not None and has_targets else 1
    _check_arrays(where, x, y, cells)
    problems: tuple[str, ...] = () if len(x) else (f"{where}: no records",)
    y, whole = y.astype(np.float64).reshape(len(y), cells), x.dtype.kind in "iu"
    if not whole:
        with np.errstate(over="ignore"):  # values outside the float32 range become infinite
            x = x.astype(np.float32)
    finite = np.isfinite(x).reshape(len(x), math.prod(x.shape[1:])).all(axis=1) & np.isfinite(y).all(axis=1)
    valid = finite if task is None or cells == 1 else task.are_valid(y) | ~finite
    losses = LeftOut()
    if not finite.all():
        problems += (f"{where}: {_first(finite)}, counted from 0, has NaN, infinite or missing values; {_WAY}",)
        counts = class_counts(y[~finite, 0]) if cells == 1 else {}
        loss = Loss(
            "NaN, infinite or missing value", "record", int((~finite).sum()), "left out", (_first(finite),), counts
        )
        losses += LeftOut.of([loss])
    if task is not None and not valid.all() and cells > 1:
        values = ", ".join(f"{cell:g}" for cell in y[valid.argmin()])
        problems += (f"{where}: {_first(valid)}, counted from 0, has {values}; {task.rule}; {_WAY}",)
        loss = Loss("target that is none of the task", count=int((~valid).sum()), examples=(_first(valid),))
        losses += LeftOut.of([loss])
    x, y = x[finite & valid], y[finite & valid]
    y = y[:, 0] if task is None or cells == 1 else task.encoded(y)
    images = (1, *x.shape[1:])[-3:] if x.ndim in (3, 4) else None
    what = f"images of {sizes_text(images)}" if images else f"records of {sizes_text(x.shape[1:])}"
    held_out = np.fromiter(map(is_held_out, x, y), bool, len(y))
    return Records(where, what, x, y, held_out, whole, None, problems, has_targets, left_out=losses)


def _check_arrays(where: str, x: Array, y: Array, cells: int) -> None:
    """Check types and shapes of arrays, of which y has so many numbers for each record."""
    for values, allowed in ((x, "iuf"), (y, "iuf" if cells == 1 else "biuf")):
        if values.dtype.kind not in allowed:
            raise DataError(f"{where}: {shortened(values.dtype)} {NOT_NUMERIC}")
    of_target = () if cells == 1 else (cells,)
    if not y.ndim or y.shape[1:] != of_target or x.ndim < 2 or len(x) != len(y):
        ways = "; for several labels of a record set task = multi-label"
        shape = "(n,)" if cells == 1 else f"(n, {cells})"
        way = ways if cells == 1 and y.ndim == 2 else ""
        raise DataError(f"{where} must have shapes (n, ...) and {shape}, not {x.shape} and {y.shape}{way}")
    if not math.prod(x.shape[1:]):
        raise DataError(f"{where}: no records, or records without features")


def _first(right: Array | np.bool_) -> str:
    return f"record {np.argmin(right)}"
