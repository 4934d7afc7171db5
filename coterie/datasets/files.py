"""Read user files: archives, tables and image folders. See :mod:`coterie.datasets.own`."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import warnings
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
#: Functions that read training and, if present, test records from a file, by suffix.
Readers: TypeAlias = "Mapping[str, Callable[[Path, bool], tuple[Records, Records | None]]]"

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_CLASSES = "classes.txt"
# Pillow's format names. Pillow detects formats by content and would pass PostScript files to Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
#: Limits, checked before loading data into memory: uncompressed size of a file in bytes,
MAX_BYTES = 4 * 2**30
#: line length of a table in characters,
MAX_LINE = 8 * 2**20
#: number of pixels of an image. Pillow uses up to 16 bytes per pixel (WEBP), 4 in a file.
MAX_PIXELS = 32_000_000
_MAX_PICTURE_BYTES = 4 * MAX_PIXELS
_MAX_EXIF_BYTES = _MAX_HEADER_BYTES = 64 * 2**10
_MAX_CLASSES_BYTES = 2**20
#: Column names of labels and of real-valued targets.
_TARGETS = ("label", "target")
_NO_NUMBERS = "is not a numeric type; use integers or floats"
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
        fitted = fitted._labelled()
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
            raise DataError(f"{self.where} contains {self.what}, but the run expects {_sizes(shape)}; {way}")
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

    def _labelled(self) -> Records:
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


def read(
    path: Path, shape: Shape | None, readers: Readers | None = None, *, need_targets: bool = True
) -> tuple[Records, Records | None]:
    """Read the training records and, if present, the test records.

    Args:
        path: a file or a folder.
        shape: (C, H, W) to which images are converted, or (F,); None only inspects images.
        need_targets: whether records must have labels or targets. Otherwise an archive may lack `y`, a table the
            column, and a folder may hold images without folders of classes.
        readers: of files, by suffix; None: `READERS`.

    Raises:
        DataError: the path does not exist or cannot be read.
    """
    root = path.expanduser()
    readers = READERS if readers is None else readers
    try:
        if not root.is_dir():
            return _file(root, readers, need_targets)
        train, test = find(root, "train"), find(root, "test")
        if train is None and test is None:
            return _pictures(root, root, shape, need_targets), None
        if train is None:
            raise DataError(f"{root} contains test data but no training data; add train.* or the folder train")
        return _part(train, root, shape, readers), None if test is None else _part(test, root, shape, readers)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror or error}") from None


def find(folder: Path, stem: str) -> Path | None:
    """Find the data named `stem` in a folder; None if there are none.

    Raises:
        DataError: there are several matches.
    """
    found = [path for suffix in READERS if (path := folder / f"{stem}{suffix}").exists()]
    found += [folder / stem] if (folder / stem).is_dir() else []
    if len(found) > 1:
        raise DataError(f"{folder} contains {' and '.join(path.name for path in found)}; keep one of them")
    return found[0] if found else None


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


# ---- one file --------------------------------------------------------------------------------------------------------


def _file(path: Path, readers: Readers, need_targets: bool = True) -> tuple[Records, Records | None]:
    forms = f"{', '.join(readers)}, a folder of images, or a folder of train.* and test.*"
    if not path.exists():
        raise DataError(f"{path} does not exist; supported data: {forms}")
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: unsupported file type {path.suffix or '(no suffix)'}; supported data: {forms}")
    need_regular(path)
    return readers[path.suffix.lower()](path, need_targets)


def need_regular(path: Path) -> None:
    """Reject named pipes and devices: reading from them may never end."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; replace it by a regular file or a symbolic link to one")


def need_at_most(limit: int, size: int, where: str, action: str) -> None:
    """Reject a size in bytes above a limit."""
    if size > limit:
        raise DataError(f"{where} {action} {size:,} bytes, but the limit is {limit:,}; reduce its size")


def _part(path: Path, home: Path, shape: Shape | None, readers: Readers) -> Records:
    """Read `train` or `test` of the folder `home`."""
    if path.is_dir():
        return _pictures(path, home, shape)
    records, more = _file(path, readers)
    if more is not None:
        raise DataError(
            f"{path} contains x_test and y_test, but {home} has separate test data; keep only one of the two"
        )
    return records


def _npz(path: Path, need_targets: bool) -> tuple[Records, Records | None]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: f"{name}.npy" for name in ("x", "y", "x_test", "y_test")}
            members = {name: member for name, member in members.items() if member in archive.namelist()}
            size = sum(_unpacked(archive, member) for member in members.values())
            need_at_most(MAX_BYTES, size, str(path), "unpacks to")
            arrays = {name: _array(archive, member) for name, member in members.items()}
    except DataError:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile and numpy say
        raise DataError(
            f"{path} is not a numpy archive of numeric arrays ({_short(error)}); write it with numpy.savez(path, "
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


def _csv(path: Path, need_targets: bool) -> tuple[Records, None]:
    need_at_most(MAX_BYTES // 4, path.stat().st_size, str(path), "holds")  # a cell of 2 bytes takes 8 in memory
    try:
        with _text(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty table is detected below
            names = _names(path, file)
            values = np.loadtxt(map(_one_line, lines(file)), delimiter=",", quotechar='"', comments=None, ndmin=2)
    except csv.Error as error:
        raise DataError(f"{path}: {error} in the first line; expected column names separated by commas") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        problem = (
            f"{path}: {_short(error)} (rows counted from 0 below the first line); expected a line of column names, "
            "then lines of numbers, separated by commas"
        )
        names, values = _csv_rows(path)
        if need_targets and not set(names) & set(_TARGETS):
            raise DataError(problem) from None
        problems: tuple[str, ...] = (problem,)
    else:
        problems = ()
    values = values if values.size else np.zeros((0, len(names)))
    own = _target(path, names, need_targets)
    if values.shape[1] != len(names):  # rows with another number of columns; there may be only one row
        problems += (f"{path}: the first line names {len(names)} columns, but rows have {values.shape[1]}",)
        values = np.zeros((0, len(names)))
    if own is None:
        return _records(str(path), values, None, whole=True, problems=problems), None
    x, y = np.delete(values, own, axis=1), values[:, own]
    return _records(str(path), x, y, whole=True, labelled=names[own] == "label", problems=problems), None


def _text(path: Path) -> TextIO:
    return path.open(newline="", encoding="utf-8-sig", errors="replace")


def _names(path: Path, file: TextIO) -> list[str]:
    """Read the column names from the first line."""
    first = next(lines(file), "")
    if first is None:
        raise DataError(f"{path}: the first line has more than {MAX_LINE:,} characters; expected column names")
    return [name.strip() for name in next(csv.reader([first]), [])]


def lines(file: TextIO) -> Iterator[str | None]:
    """Yield the lines; None instead of a line that is too long."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while line and not line.endswith(("\n", "\r")):
            line = file.readline(MAX_LINE)
        yield None


def _one_line(line: str | None) -> str:
    """Return a line that holds a complete row.

    Raises:
        ValueError: the line is too long, or the row spans several lines.
    """
    if line is None:
        raise ValueError(f"a line has more than {MAX_LINE:,} characters")
    if line.count('"') % 2:
        raise ValueError("a line has an unclosed quote")
    return line


def _csv_rows(path: Path) -> tuple[list[str], Array]:
    """Return the column names and the rows with a number in each column."""
    values = array("d")
    with _text(path) as file:
        names = _names(path, file)
        for line in lines(file):
            try:
                row = array("d", map(float, next(csv.reader([_one_line(line)]), [])))
            except (ValueError, csv.Error):
                continue
            if len(row) == len(names):
                values.extend(row)
    return names, np.array(values, np.float64).reshape(-1, len(names) or 1)


def _parquet(path: Path, need_targets: bool) -> tuple[Records, None]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet requires pyarrow: pip install 'coterie[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            schema, groups = file.schema_arrow, file.metadata.num_row_groups
            for field in schema:
                kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
                if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
                    raise DataError(f"{path}: column {_short(field.name)!r}: {_short(kind)} {_NO_NUMBERS}")
            own = _target(path, schema.names, need_targets)
            rows = max(file.metadata.num_rows, sum(file.metadata.row_group(i).num_rows for i in range(groups)))
            need_at_most(MAX_BYTES, 8 * rows * len(schema), str(path), "unpacks to")
            columns = [column.to_numpy() for column in file.read().columns]
    except DataError:
        raise
    except Exception as error:  # whatever a broken file makes pyarrow say
        raise DataError(f"{path} is not a valid parquet file ({_short(error)}); write it again") from None
    # Use the schema: a missing value turns an integer column into floats.
    whole = all(pyarrow.types.is_integer(field.type) for i, field in enumerate(schema) if i != own)
    features = [column for i, column in enumerate(columns) if i != own]
    x = np.column_stack(features) if features else np.zeros((rows, 0))
    if own is None:
        return _records(str(path), x, None, whole), None
    return _records(str(path), x, columns[own], whole, labelled=schema.names[own] == "label"), None


def _target(path: Path, names: Sequence[str], needed: bool) -> int | None:
    """Return the index of the label or target column; None if there is none, and none is needed."""
    targets = [i for i, name in enumerate(names) if name in _TARGETS]
    if not targets and not needed:
        return None
    if len(targets) != 1:
        some = _short(", ".join(names[:8]) + (", ..." if len(names) > 8 else ""))
        raise DataError(
            f"{path} must have one column named label, or target for real targets, but has {len(targets)}; its columns "
            f"are {some or 'none'}"
        )
    return targets[0]


def _short(message: object) -> str:
    """Shorten an error message, which may contain parts of the file."""
    text = str(message)
    return text if len(text) <= 200 else f"{text[:200]}..."


#: File readers by suffix.
READERS: Readers = {".npz": _npz, ".csv": _csv, ".parquet": _parquet}


def _records(
    where: str,
    x: Array,
    y: Array | None,
    whole: bool | None = None,
    labelled: bool | None = None,
    problems: tuple[str, ...] = (),
) -> Records:
    """Validate records independently of a run; drop records with missing values."""
    has_targets = y is not None
    y = np.zeros(len(x) if x.ndim else 0) if y is None else y
    _need_numbers(where, x)
    _need_numbers(where, y)
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise DataError(f"{where} must have shapes (n, ...) and (n,), not {x.shape} and {y.shape}")
    if not math.prod(x.shape[1:]):
        raise DataError(f"{where}: no records, or records without features")
    if not len(x):
        problems += (f"{where}: no records, or records without features",)
    y = y.astype(np.float64)
    whole = x.dtype.kind in "iu" if whole is None else whole
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # values outside the float32 range become infinite
            x = x.astype(np.float32)
    good = np.isfinite(x).reshape(len(x), math.prod(x.shape[1:])).all(axis=1) & np.isfinite(y)
    if not good.all():
        problems += (
            f"{where}: record {good.argmin()}, counted from 0, has NaN, infinite or missing values; fix or remove it",
        )
        x, y = x[good], y[good]
    images = (1, *x.shape[1:])[-3:] if x.ndim in (3, 4) else None
    what = f"images of {_sizes(images)}" if images else f"records of {_sizes(x.shape[1:])}"
    held_out = np.fromiter(map(is_held_out, x, y), bool, len(y))
    records = Records(where, what, x, y, held_out, whole, labelled, problems, has_targets)
    return records._labelled() if labelled else records


def _need_numbers(where: str, values: Array) -> None:
    if values.dtype.kind not in "iuf":
        raise DataError(f"{where}: {_short(values.dtype)} {_NO_NUMBERS}")


def _are_labels(y: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return np.asarray((y >= 0) & (y == np.floor(y)))


def is_held_out(x: Array, y: float) -> bool:
    """Decide by a hash of the record's values, identical for every file format."""
    digest = hashlib.sha256()
    for part in x if x.ndim == 3 else (x,):  # one channel at a time: images may be large
        digest.update(np.ascontiguousarray(part, "<f4").data)
    digest.update(np.float64(y).astype("<f8").tobytes())
    return int.from_bytes(digest.digest()) % _HELD_OUT == 0


def _sizes(shape: Shape) -> str:
    return "x".join(map(str, shape)) + (" numbers" if len(shape) == 1 else "")


# ---- a folder of images ----------------------------------------------------------------------------------------------


def _pictures(folder: Path, home: Path, shape: Shape | None, need_targets: bool = True) -> Records:
    """Read the images of FOLDER/CLASS/*; `home` holds the class names.

    If no targets are needed and there are no folders of classes, read FOLDER/*.
    """
    if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3)):
        raise DataError(f"{folder} contains images, which have 1 or 3 channels, but the run expects {_sizes(shape)}")
    names = _class_names(home / _CLASSES)
    x, y, held_out, sizes, problems = [], [], [], set(), []
    subfolders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    has_targets = need_targets or bool(subfolders)
    for subfolder in subfolders if has_targets else [folder]:
        for file in sorted(subfolder.iterdir()):
            if file.suffix.lower() not in _PICTURES or file.name.startswith("."):
                continue
            try:
                label = _label(subfolder, names) if has_targets else 0
                own, asked = _picture(file, shape)
            except DataError as error:
                problems.append(str(error))
                continue
            x.append(asked)
            y.append(label)
            held_out.append(is_held_out(own, label))
            sizes.add(own.shape)
    if not x:
        problems.append(
            f"{folder} contains neither images in one folder per class, such as {folder}/0/*.png (supported: "
            f"{', '.join(_PICTURES)}), nor train{', train'.join(READERS)}, nor the folder train"
        )
    what = f"images of {_sizes(sizes.pop())}" if len(sizes) == 1 else "images of different sizes"
    pixels = np.stack(x) if x else np.zeros((0, *(shape or (0,))), np.uint8)
    every = np.array(held_out, bool)
    labelled = True if has_targets else None
    return Records(str(folder), what, pixels, np.array(y, float), every, True, labelled, tuple(problems), has_targets)


def _class_names(path: Path) -> list[str] | None:
    if not path.exists():
        return None
    need_regular(path)
    need_at_most(_MAX_CLASSES_BYTES, path.stat().st_size, str(path), "holds")
    try:
        names = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{path} is not a text file ({error}); write one class name per line") from None
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} contains duplicate class names; each line is the name of one class, in the order 0, 1, ..."
        )
    return names


def _label(subfolder: Path, names: list[str] | None) -> int:
    if names is not None and subfolder.name in names:
        return names.index(subfolder.name)
    if names is None and subfolder.name.isdecimal():
        return int(subfolder.name)
    listed = "not found" if names is None else f"it lists {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    raise DataError(
        f"{subfolder}: unknown class {subfolder.name!r}; name folders 0, 1, ..., or list all class names of the run, "
        f"one per line and in the same order for all clients, in {_CLASSES} ({listed})"
    )


def _picture(file: Path, shape: Shape | None) -> tuple[Array, Array]:
    """Read an image, uint8 (C, H, W), in its own shape and in the requested one; (0,) if no shape is requested."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    need_regular(file)
    need_at_most(_MAX_PICTURE_BYTES, file.stat().st_size, str(file), "holds")
    try:
        with warnings.catch_warnings(), _Bounded(file) as raw:
            warnings.simplefilter("ignore")  # Pillow warns about skipped metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(raw, formats=_FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{width:,} x {height:,}")
            if len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES:
                raise ValueError(f"its Exif data exceed {_MAX_EXIF_BYTES:,} bytes")
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{file} has too many pixels ({error}); the limit is {MAX_PIXELS:,}; reduce its size") from None
    except UnidentifiedImageError:
        raise DataError(f"{file} is not a readable image: it is none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow raises arbitrary errors for corrupt images
        raise DataError(f"{file} is not a readable image ({_short(error)}); replace or remove it") from None
    if image.mode in ("I", "F") or ";" in image.mode:
        raise DataError(
            f"{file} has more than 8 bits per pixel channel (Pillow mode {image.mode}); convert it to 8 bits"
        )
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    own = _channels_first(image)
    if shape is None:
        return own, np.zeros(0, np.uint8)
    image = image.convert("L" if shape[0] == 1 else "RGB")
    if image.size != (shape[2], shape[1]):
        image = image.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
    return own, _channels_first(image)


class _Bounded(io.FileIO):
    """A file that limits reads to twice its size: many tags of a TIFF may refer to the same bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._left = 2 * path.stat().st_size + 2**20

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("parts of the file are referenced repeatedly")
        return data


def _channels_first(image: Any) -> Array:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
