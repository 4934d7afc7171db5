"""Records in files of people's own: archives, tables, folders of images. :mod:`coterie.datasets.own` says which."""

from __future__ import annotations

import csv
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.datasets.sources import DataError

Shape = tuple[int, ...]
Array = npt.NDArray[Any]

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_CLASSES = "classes.txt"
#: Columns that hold labels, or real targets.
_TARGETS = ("label", "target")
# One record in so many is held out.
_HELD_OUT = 5


@dataclass(frozen=True, eq=False)
class Records:
    """Records as they are in a file.

    Attributes:
        where: they are, for messages.
        what: they are, such as "images of 1x28x28".
        x: (n, ...) whole numbers or float32; pictures are (n, C, H, W), or (n, 0) where no shape was asked for.
        y: (n,) float64.
        held_out: (n,) whether each is, where no test data are given.
        whole: whether pixels are whole numbers 0..255, or else fractions in [0, 1].
        labelled: whether `y` are labels, or else real targets; None: the file does not say.
        problems: what is wrong with records that were left out or clamped.
    """

    where: str
    what: str
    x: Array
    y: npt.NDArray[np.float64]
    held_out: npt.NDArray[np.bool_]
    whole: bool
    labelled: bool | None
    problems: tuple[str, ...] = ()

    def divided(self) -> tuple[Records, Records]:
        """Those to train on, and those held out; the same object twice where none is."""
        if not self.held_out.any():
            return self, self
        train, test = self._only(~self.held_out), replace(self._only(self.held_out), problems=())
        if not len(train.y):
            problem = f"{self.where}: all {len(self.y)} records are held out; add records, or give test data"
            train = replace(train, problems=(*train.problems, problem))
        return train, test

    def fitted(self, shape: Shape, num_classes: int, span: tuple[float, float] | None = None) -> Records:
        """Examples and targets as a run has them: `x` is (n, *shape), `y` int64 labels or float32 targets.

        Images are uint8, or float32 in [0, 1]; vectors are float32. Records without a target of the run are left out,
        pixels are clamped, and vectors where there is a `span`; `problems` lists both. What becomes of a record
        depends on that record alone.

        Args:
            shape: of an example.
            num_classes: of the run; 0 for real targets.
            span: least and largest number of a vector; None: any.

        Raises:
            DataError: the whole file holds examples of another shape, or targets of the other kind.
        """
        examples, clamped = self._examples(shape, span)
        if self.labelled not in (None, num_classes > 0):
            has, column = ("labels", "target") if self.labelled else ("real targets", "label")
            raise DataError(
                f"{self.where} holds {has}, and the run has {num_classes} classes; give it column {column!r}"
            )
        fitted = replace(self, x=examples, problems=self.problems + clamped)
        if num_classes == 0:
            return replace(fitted, y=self.y.astype(np.float32))
        fitted = fitted._labelled()
        above = fitted.y >= num_classes
        if above.any():
            problem = (
                f"{self.where}: a label is {fitted.y[above].max():g}, and the run has {num_classes} classes, from 0; "
                "leave such records out, or start a run with more classes"
            )
            fitted = replace(fitted._only(~above), problems=(*fitted.problems, problem))
        return replace(fitted, y=fitted.y.astype(np.int64))

    def _examples(self, shape: Shape, span: tuple[float, float] | None) -> tuple[Array, tuple[str, ...]]:
        """Examples in range, and what was out of it."""
        x = self.x
        if len(shape) == 1 and x.shape[1:] == shape:
            x = x.astype(np.float32)
            return (
                (x, ()) if span is None else self._clamped(x, *span, f"numbers are declared in {span[0]:g}:{span[1]:g}")
            )
        rows = x.ndim == 2 and x.shape[1] == math.prod(shape)
        if len(shape) == 1 or not (rows or x.shape[1:] == shape or (1, *x.shape[1:]) == shape):
            last = x.shape[1:] == (*shape[1:], *shape[:1])
            way = "put channels first: x.transpose(0, 3, 1, 2)" if last else "bring them to that shape"
            raise DataError(f"{self.where} holds {self.what}, and the run's examples are {_sizes(shape)}; {way}")
        problems: tuple[str, ...] = ()
        if x.dtype != np.uint8:
            allowed = "whole numbers from 0 to 255" if self.whole else "fractions in [0, 1] where they are floats"
            hint = f"pixels are {allowed} (.npz and .parquet tell whole numbers from floats, .csv holds whole numbers)"
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
        """Those whose target is a label."""
        wrong = ~_are_labels(self.y)
        if not wrong.any():
            return self
        problem = (
            f"{self.where}: a label is {self.y[wrong][0]:g}; labels are whole numbers from 0; call real targets "
            "'target'"
        )
        return replace(self._only(~wrong), problems=(*self.problems, problem))

    def _only(self, rows: npt.NDArray[np.bool_]) -> Records:
        return replace(self, x=self.x[rows], y=self.y[rows], held_out=self.held_out[rows])


def read(path: Path, shape: Shape | None) -> tuple[Records, Records | None]:
    """Records to train on, and those to test on where they are given.

    Args:
        path: a file or a folder.
        shape: (C, H, W) to which pictures are brought, or (F,); None: pictures are only looked at.

    Raises:
        DataError: there is nothing, or what is there cannot be read.
    """
    root = path.expanduser()
    try:
        if not root.is_dir():
            return _file(root)
        train, test = find(root, "train"), find(root, "test")
        if train is None and test is None:
            return _pictures(root, root, shape), None
        if train is None:
            raise DataError(f"{root} holds test data and no train data; add train.* or the folder train")
        return _part(train, root, shape), None if test is None else _part(test, root, shape)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror or error}") from None


def find(folder: Path, stem: str) -> Path | None:
    """The data called `stem` in a folder; None: there are none.

    Raises:
        DataError: there are several.
    """
    found = [path for suffix in READERS if (path := folder / f"{stem}{suffix}").is_file()]
    found += [folder / stem] if (folder / stem).is_dir() else []
    if len(found) > 1:
        raise DataError(f"{folder} holds {' and '.join(path.name for path in found)}; keep one of them")
    return found[0] if found else None


def labels(y: npt.NDArray[np.float64], labelled: bool | None) -> str:
    """What labels or targets there are, in words."""
    present = np.unique(y)
    if not len(present):
        return "no targets"
    if labelled is False or not _are_labels(y).all():
        return f"targets {present[0]:g}..{present[-1]:g}"
    if len(present) == present[-1] - present[0] + 1:
        return f"classes {present[0]:g}..{present[-1]:g}"
    return "classes " + ", ".join(f"{label:g}" for label in present)


# ---- one file --------------------------------------------------------------------------------------------------------


def _file(path: Path) -> tuple[Records, Records | None]:
    forms = f"{', '.join(READERS)}, a folder of images, or a folder of train.* and test.*"
    if not path.exists():
        raise DataError(f"{path} does not exist; a client's data are {forms}")
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path}: unsupported file type {path.suffix or '(no suffix)'}; a client's data are {forms}")
    return READERS[path.suffix.lower()](path)


def _part(path: Path, home: Path, shape: Shape | None) -> Records:
    """`train` or `test` of the folder `home`."""
    if path.is_dir():
        return _pictures(path, home, shape)
    records, more = _file(path)
    if more is not None:
        raise DataError(f"{path} holds x_test, y_test, and {home} a file of each part: keep the ones or the other")
    return records


def _npz(path: Path) -> tuple[Records, Records | None]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name in ("x", "y", "x_test", "y_test")}
    except Exception as error:  # whatever a broken archive makes zipfile and numpy say
        raise DataError(
            f"{path} is not an archive of plain numbers ({error}); write it with numpy.savez(path, x=..., y=...): "
            "pickled objects, which could run code, are not read"
        ) from None
    needed = ["x", "y"] + (["x_test", "y_test"] if arrays.keys() & {"x_test", "y_test"} else [])
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}; it needs {', '.join(needed)}")
    train = _records(f"{path}: x, y", arrays["x"], arrays["y"])
    return train, _records(f"{path}: x_test, y_test", arrays["x_test"], arrays["y_test"]) if needed[2:] else None


def _csv(path: Path) -> tuple[Records, None]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a table without rows, which is found below
            names = [name.strip() for name in next(csv.reader(file), [])]
            values = np.loadtxt(file, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except (ValueError, csv.Error) as error:
        problem = (
            f"{path}: {error} (rows counted from 0 below the first line); it needs a line of column names, then "
            "numbers between commas"
        )
        try:
            names, values = _csv_rows(path)
        except (ValueError, csv.Error):
            names = []
        if not set(names) & set(_TARGETS):
            raise DataError(problem) from None
        problems = (problem,)
    else:
        problems = ()
    columns = values.T if values.size else [np.zeros(0)] * len(names)
    if values.size and len(columns) != len(names):
        raise DataError(f"{path}: the first line names {len(names)} columns, and rows have {len(columns)}")
    return _table(path, names, columns, whole=True, problems=problems), None


def _csv_rows(path: Path) -> tuple[list[str], Array]:
    """Column names, and the rows that hold a number in each column."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        names = [name.strip() for name in next(lines, [])]
        rows = []
        for line in lines:
            try:
                row = [float(cell) for cell in line]
            except ValueError:
                continue
            if len(row) == len(names):
                rows.append(row)
    return names, np.array(rows, np.float64).reshape(-1, len(names))


def _parquet(path: Path) -> tuple[Records, None]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path} is read with pyarrow, which is not there: pip install 'coterie[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
            columns = [column.to_numpy() for column in table.columns]
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a parquet file ({error}); write it anew") from None
    for name, column in zip(table.column_names, columns, strict=True):
        _need_numbers(f"{path}: column {name!r}", column)
    # By the schema: a gap in one record turns a column of whole numbers into floats.
    kinds = [field.type for field in table.schema if field.name not in _TARGETS]
    return _table(path, table.column_names, columns, whole=all(map(pyarrow.types.is_integer, kinds))), None


def _table(
    path: Path, names: Sequence[str], columns: Sequence[Array], whole: bool, problems: tuple[str, ...] = ()
) -> Records:
    targets = [i for i, name in enumerate(names) if name in _TARGETS]
    if len(targets) != 1:
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise DataError(
            f"{path} needs one column called label, or target for real targets, and has {len(targets)}; its columns "
            f"are {some or 'none'}"
        )
    (own,) = targets
    features = [column for i, column in enumerate(columns) if i != own]
    x = np.column_stack(features) if features else np.zeros((len(columns[own]), 0))
    return _records(str(path), x, columns[own], whole, labelled=names[own] == "label", problems=problems)


#: What reads a file, by its suffix.
READERS: dict[str, Callable[[Path], tuple[Records, Records | None]]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _records(
    where: str,
    x: Array,
    y: Array,
    whole: bool | None = None,
    labelled: bool | None = None,
    problems: tuple[str, ...] = (),
) -> Records:
    """Checked for what can be wrong whatever the run; records with gaps are left out."""
    _need_numbers(where, x)
    _need_numbers(where, y)
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise DataError(f"{where} have shapes {x.shape} and {y.shape}; needed: (n, ...) and (n,), as many of both")
    if not math.prod(x.shape[1:]):
        raise DataError(f"{where}: there are no records, or none with features")
    if not len(x):
        problems += (f"{where}: there are no records, or none with features",)
    y = y.astype(np.float64)
    whole = x.dtype.kind in "iu" if whole is None else whole
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
            x = x.astype(np.float32)
    good = np.isfinite(x).reshape(len(x), math.prod(x.shape[1:])).all(axis=1) & np.isfinite(y)
    if not good.all():
        problems += (
            f"{where}: record {good.argmin()}, counted from 0, holds NaN, a gap or infinity; mend it or leave it out",
        )
        x, y = x[good], y[good]
    images = (1, *x.shape[1:])[-3:] if x.ndim in (3, 4) else None
    what = f"images of {_sizes(images)}" if images else f"records of {_sizes(x.shape[1:])}"
    held_out = np.array([_is_held_out(one, label) for one, label in zip(x, y, strict=True)], bool)
    records = Records(where, what, x, y, held_out, whole, labelled, problems)
    return records._labelled() if labelled else records


def _need_numbers(where: str, values: Array) -> None:
    if values.dtype.kind not in "iuf":
        raise DataError(f"{where}: {values.dtype} is no type of numbers; write whole numbers or floats")


def _are_labels(y: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return (y >= 0) & (y == np.floor(y))


def _is_held_out(x: Array, y: float) -> bool:
    """By the record's own numbers, alike in every form of file."""
    digest = hashlib.sha256(x.astype("<f4").tobytes() + np.float64(y).astype("<f8").tobytes()).digest()
    return int.from_bytes(digest) % _HELD_OUT == 0


def _sizes(shape: Shape) -> str:
    return "x".join(map(str, shape)) + (" numbers" if len(shape) == 1 else "")


# ---- a folder of images ----------------------------------------------------------------------------------------------


def _pictures(folder: Path, home: Path, shape: Shape | None) -> Records:
    """Images of FOLDER/CLASS/*; the names of classes are in `home`."""
    if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3)):
        raise DataError(f"{folder} holds images, of 1 or 3 channels, and the run's examples are {_sizes(shape)}")
    names = _class_names(home / _CLASSES)
    x, y, held_out, sizes, problems = [], [], [], set(), []
    for room in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        for file in sorted(room.iterdir()):
            if file.suffix.lower() not in _PICTURES or file.name.startswith("."):
                continue
            try:
                label = _label(room, names)
                own, asked = _picture(file, shape)
            except DataError as error:
                problems.append(str(error))
                continue
            x.append(asked)
            y.append(label)
            held_out.append(_is_held_out(own, label))
            sizes.add(own.shape)
    if not x:
        problems.append(
            f"{folder} holds no images: they lie in folders, one a class, as {folder}/0/*.png; read are "
            f"{', '.join(_PICTURES)}; nor does it hold train{', train'.join(READERS)} or the folder train"
        )
    what = f"images of {_sizes(sizes.pop())}" if len(sizes) == 1 else "images of different sizes"
    pixels = np.stack(x) if x else np.zeros((0, *(shape or (0,))), np.uint8)
    every = np.array(held_out, bool)
    return Records(str(folder), what, pixels, np.array(y, float), every, True, True, tuple(problems))


def _class_names(path: Path) -> list[str] | None:
    if not path.exists():
        return None
    try:
        names = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{path} is not text ({error}); write the names of classes, one a line") from None
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a class twice; each line is a class, 0, 1, ... in turn")
    return names


def _label(room: Path, names: list[str] | None) -> int:
    if names is not None and room.name in names:
        return names.index(room.name)
    if names is None and room.name.isdecimal():
        return int(room.name)
    listed = "there is none" if names is None else f"it lists {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    raise DataError(
        f"{room}: which class is {room.name!r}? Call folders 0, 1, ..., or list the names of all classes of the run, "
        f"one a line, alike for all clients, in {_CLASSES} ({listed})"
    )


def _picture(file: Path, shape: Shape | None) -> tuple[Array, Array]:
    """One image, (C, H, W) uint8, as it is, and of the asked shape; (0,) where none is."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
    except Exception as error:  # a broken image can make Pillow's readers say anything
        raise DataError(f"{file} is not an image that can be read ({error}); replace or remove it") from None
    if image.mode in ("I", "F") or ";" in image.mode:
        raise DataError(f"{file} has pixels of more than 8 bits (Pillow's mode {image.mode}); save it with 8")
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    own = _channels_first(image)
    if shape is None:
        return own, np.zeros(0, np.uint8)
    image = image.convert("L" if shape[0] == 1 else "RGB")
    if image.size != (shape[2], shape[1]):
        image = image.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
    return own, _channels_first(image)


def _channels_first(image: Any) -> Array:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
