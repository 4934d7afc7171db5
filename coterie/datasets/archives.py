"""Read archives of numpy arrays."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np

from coterie.datasets import user_records
from coterie.datasets.left_out import LeftOut, Loss
from coterie.datasets.sources import DataError
from coterie.datasets.user_records import (
    NOT_NUMERIC,
    Array,
    Records,
    class_counts,
    is_held_out,
    need_at_most,
    shortened,
    sizes_text,
)

_MAX_HEADER_BYTES = 64 * 2**10


def read_archive(path: Path, need_targets: bool) -> tuple[Records, Records | None]:
    """Read the training records of an `.npz` archive and, if present, its test records.

    Raises:
        DataError: it cannot be read, or lacks an array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: f"{name}.npy" for name in ("x", "y", "x_test", "y_test")}
            members = {name: member for name, member in members.items() if member in archive.namelist()}
            size = sum(_unpacked(archive, member) for member in members.values())
            need_at_most(user_records.MAX_BYTES, size, str(path), "unpacks to")
            arrays = {name: _array(archive, member) for name, member in members.items()}
    except DataError:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile and numpy say
        raise DataError(
            f"{path} is not a numpy archive of numeric arrays ({shortened(error)}); write it with numpy.savez(path, "
            "x=..., y=...). Pickled objects are rejected because they could run code"
        ) from None
    needed = ["x", "y"] + (["x_test", "y_test"] if arrays.keys() & {"x_test", "y_test"} else [])
    if not need_targets and arrays.keys() == {"x"}:
        return _records(f"{path}: x", arrays["x"], None), None
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}; expected {', '.join(needed)}")
    train = _records(f"{path}: x, y", arrays["x"], arrays["y"])
    return train, _records(f"{path}: x_test, y_test", arrays["x_test"], arrays["y_test"]) if needed[2:] else None


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


def _records(where: str, x: Array, y: Array | None) -> Records:
    """Validate records independently of a run; drop records with missing values."""
    has_targets = y is not None
    y = np.zeros(len(x) if x.ndim else 0) if y is None else y
    for values in (x, y):
        if values.dtype.kind not in "iuf":
            raise DataError(f"{where}: {shortened(values.dtype)} {NOT_NUMERIC}")
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise DataError(f"{where} must have shapes (n, ...) and (n,), not {x.shape} and {y.shape}")
    if not math.prod(x.shape[1:]):
        raise DataError(f"{where}: no records, or records without features")
    problems: tuple[str, ...] = () if len(x) else (f"{where}: no records",)
    y, whole = y.astype(np.float64), x.dtype.kind in "iu"
    if not whole:
        with np.errstate(over="ignore"):  # values outside the float32 range become infinite
            x = x.astype(np.float32)
    losses = LeftOut()
    good = np.isfinite(x).reshape(len(x), math.prod(x.shape[1:])).all(axis=1) & np.isfinite(y)
    if not good.all():
        problems += (
            f"{where}: record {good.argmin()}, counted from 0, has NaN, infinite or missing values; fix or remove it",
        )
        first = f"record {good.argmin()}"
        loss = Loss(
            "NaN, infinite or missing value", "record", int((~good).sum()), "left out", (first,), class_counts(y[~good])
        )
        x, y, losses = x[good], y[good], LeftOut.of([loss])
    images = (1, *x.shape[1:])[-3:] if x.ndim in (3, 4) else None
    what = f"images of {sizes_text(images)}" if images else f"records of {sizes_text(x.shape[1:])}"
    held_out = np.fromiter(map(is_held_out, x, y), bool, len(y))
    return Records(where, what, x, y, held_out, whole, None, problems, has_targets, left_out=losses)
