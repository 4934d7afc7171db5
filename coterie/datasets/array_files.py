"""Read examples that are arrays: NumPy archives, and images, which are converted.

Images are files in a folder for each class, or in a folder with a list of labels or numbers. Transparent images are
drawn on white, so that colours of hidden pixels, which depend on the program that saved the file, have no effect.
Images of 16 bits per channel are reduced to their upper 8 bits, CMYK and palettes are converted to RGB without colour
profiles, and images are turned upright as their Exif data say.
"""

from __future__ import annotations

import codecs
import io
import math
import unicodedata
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from coterie.datasets import data_files
from coterie.datasets.data_files import (
    IMAGE_SUFFIXES,
    SUFFIXES,
    is_image,
    losses_of,
    need_at_most,
    need_regular,
    shortened,
)
from coterie.datasets.left_out import LeftOut, Loss
from coterie.datasets.records import NOT_NUMERIC, Array, Records, Shape, class_counts, is_held_out, sizes_text
from coterie.datasets.schema import BOOLEAN, SITE_SUFFIX, Column, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.table_encoder import Table
from coterie.datasets.tables import column_texts, read_table, some_names
from coterie.tasks import Task

_MAX_HEADER_BYTES = 64 * 2**10
_WAY = "fix or remove it"
# Names of the arrays of an archive; the others are those of MedMNIST and Keras.
_MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")
_KERAS = ("x_train", "y_train", "x_test", "y_test")
_NAMES: tuple[tuple[str, ...], ...] = (("x", "y", "x_test", "y_test"), _MEDMNIST, _KERAS)
#: List of the class names of a run.
CLASSES = "classes.txt"
_MAX_CLASSES_BYTES = 2**20
#: Name of the list.
LABELS = "labels.csv"
#: Files of a folder that belong to the list.
LIST_FILES = (LABELS, str(Path(LABELS).with_suffix(SITE_SUFFIX)))
# Column of the paths of images, relative to the folder of the list.
_FILE = "file"
# Column of a real target.
_REAL = "target"
# Pillow's format names. Pillow detects formats by content and would pass PostScript files to Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
#: Largest number of pixels of an image, checked before they are loaded. Pillow uses up to 16 bytes per pixel (WEBP), 4
#: in a file.
MAX_PIXELS = 32_000_000
_MAX_IMAGE_BYTES = 4 * MAX_PIXELS
_MAX_EXIF_BYTES = 64 * 2**10
# Colour behind transparent pixels.
_BACKGROUND = (255, 255, 255, 255)
# Factors from the levels of a PNG file with fewer than 8 bits, in which it states its transparent grey.
_LEVELS = {"1": 255, "L;2": 85, "L;4": 17}
_LARGEST_OF_12_BITS = 4095
_GREY = ("1", "L", "LA")


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
            given = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
            names = next((names for names in _NAMES if names[0] in given), _NAMES[0])
            members = {name: f"{name}.npy" for name in names if name in given}
            size = sum(_unpacked(archive, member) for member in members.values())
            need_at_most(data_files.MAX_BYTES, size, str(path), "unpacks to")
            arrays: dict[str, Array] = {}
            for name, member in members.items():
                with archive.open(member) as opened:
                    arrays[name] = np.lib.format.read_array(opened, allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # whatever a broken archive makes zipfile and numpy say
        raise DataError(
            f"{path} is not a numpy archive of numeric arrays ({shortened(error)}); write it with numpy.savez(path, "
            "x=..., y=...). Pickled objects are rejected because they could run code"
        ) from None
    if not arrays.keys() & {*names[2:]}:
        names = names[:1] if not need_targets and names[1] not in arrays else names[:2]
    if missing := [name for name in names if name not in arrays]:
        raise DataError(
            f"{path} has no array {missing[0]!r}; its arrays are {some_names(given) or 'none'}; write it with "
            f"numpy.savez(path, {', '.join(f'{name}=...' for name in names)})"
        )
    parts = []
    for pair in filter(None, (names[:2], names[2:])):
        x, *y = (arrays[name] for name in pair)
        if names == _MEDMNIST and x.ndim == 4 and x.shape[-1] == 3:  # colours, which come first here
            x = np.moveaxis(x, -1, 1)
        parts.append(_records(f"{path}: {', '.join(pair)}", x, y[0] if y else None, task))
    lost = [Loss("array beside those that are read", "array", examples=(name,)) for name in given if name not in names]
    train = replace(parts[0], left_out=parts[0].left_out + LeftOut.of(lost))
    return train, parts[1] if parts[1:] else None


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


def _records(where: str, x: Array, y: Array | None, task: Task | None = None) -> Records:
    """Validate records independently of a run; drop records with missing values."""
    has_targets = y is not None
    y = np.zeros(len(x) if x.ndim else 0) if y is None else y
    cells = task.num_cells if task is not None and has_targets else 1
    y = y[:, 0] if cells == 1 and y.shape[1:] == (1,) else y
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
    for values, allowed in ((x, "iuf"), (y, "biuf")):
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


class FileImage(NamedTuple):
    """An image as it is in a file, and as a run asks for it.

    Attributes:
        original: uint8 (C, H, W).
        pixels: uint8 in the requested shape; (0,) if no shape is requested.
        is_dark: whether it has 16 bits per channel, of which it uses 12 at most, so that it is nearly black.
    """

    original: Array
    pixels: Array
    is_dark: bool


def read_image(file: Path, shape: Shape | None) -> FileImage:
    """Read an image.

    Args:
        file: its file.
        shape: (C, H, W) to which it is converted and resized; None: none.

    Raises:
        DataError: it is not a readable image, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    need_regular(file)
    need_at_most(_MAX_IMAGE_BYTES, file.stat().st_size, str(file), "holds")
    try:
        with warnings.catch_warnings(), _Bounded(file) as raw:
            warnings.simplefilter("ignore")  # Pillow warns about skipped metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = _upright(raw)
            is_dark = image.mode.startswith("I;16") and 0 < np.asarray(image).max() <= _LARGEST_OF_12_BITS
            image = _opaque(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{file} has too many pixels ({error}); the limit is {MAX_PIXELS:,}; reduce its size") from None
    except UnidentifiedImageError:
        raise DataError(f"{file} is not a readable image: it is none of {', '.join(_FORMATS)}") from None
    except _TooDeepError as error:
        raise DataError(f"{file} {error}") from None
    except Exception as error:  # Pillow raises arbitrary errors for corrupt images
        raise DataError(f"{file} is not a readable image ({shortened(error)}); replace or remove it") from None
    original = _channels_first(image)
    if shape is None:
        return FileImage(original, np.zeros(0, np.uint8), bool(is_dark))
    image = image.convert("L" if shape[0] == 1 else "RGB")
    if image.size != (shape[2], shape[1]):
        image = image.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
    return FileImage(original, _channels_first(image), bool(is_dark))


class _TooDeepError(Exception):
    """An image has more bits per channel than 16, or real numbers."""


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


def _upright(raw: _Bounded) -> Any:
    """Load an image, turned as its Exif data say, with a transparent grey in the levels of its pixels."""
    from PIL import Image, ImageOps

    image: Any = Image.open(raw, formats=_FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{width:,} x {height:,}")
    if len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES:
        raise ValueError(f"its Exif data exceed {_MAX_EXIF_BYTES:,} bytes")
    levels = _LEVELS.get(str(image.tile[0][3])) if image.format == "PNG" and image.tile else None
    ImageOps.exif_transpose(image, in_place=True)
    image.load()
    hidden = image.info.get("transparency")
    if isinstance(hidden, int) and levels and image.mode in _GREY:
        image.info["transparency"] = hidden * levels
    elif isinstance(hidden, tuple) and max(hidden) > 255:  # of 16 bits, of which Pillow loads the upper 8
        image.info["transparency"] = tuple(value >> 8 for value in hidden)
    return image


def _opaque(image: Any) -> Any:
    """Return an image in mode L or RGB, on the background."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        levels, hidden = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray((levels >> 8).astype(np.uint8))
        if hidden is not None:
            opacity = Image.fromarray(np.where(levels == hidden, 0, 255).astype(np.uint8))
            image = Image.merge("LA", (image, opacity))
    if image.mode in ("I", "F") or ";" in image.mode:
        raise _TooDeepError(f"has more than 16 bits per pixel channel (Pillow mode {image.mode}); convert it to 8 bits")
    mode = "L" if image.mode in _GREY else "RGB"
    if image.has_transparency_data:
        drawn = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", drawn.size, _BACKGROUND), drawn)
    return image if image.mode == mode else image.convert(mode)


def _channels_first(image: Any) -> Array:
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_images(
    folder: Path, home: Path, shape: Shape | None, need_targets: bool = True, task: Task | None = None
) -> Records:
    """Read the images of FOLDER/CLASS/*, or those of a list.

    If no targets are needed and there are no folders of classes, read FOLDER/*.

    Args:
        folder: of the images.
        home: folder with the names of the classes or labels.
        shape: (C, H, W) to which images are converted; None only inspects them.
        need_targets: whether images must have targets.
        task: what models predict, if a list says it, or may (real targets); None: folders are classes.

    Raises:
        DataError: a list cannot be read, or is missing.
    """
    suited = shape is None or (len(shape) == 3 and shape[0] in (1, 3))
    files = (file for entry in folder.iterdir() for file in (entry.iterdir() if entry.is_dir() else [entry]))
    if shape is not None and not suited and any(map(is_image, files)):
        raise DataError(
            f"{folder} contains images, which have 1 or 3 channels, but the run expects {sizes_text(shape)}"
        )
    names = _class_names(home / CLASSES)
    if task is not None:
        base = next((base for base in (folder, home) if (base / LABELS).exists()), None)
        if base is not None:
            return _Reader(folder, shape).listed(base, task, names)
        if need_targets and not task.real:
            columns = ",".join((_FILE, *map(str, range(task.num_outputs))))
            raise DataError(
                f"{folder} has no {LABELS}; for {task}, write one with the columns {columns} and one row for each "
                "image, such as a.png"
            )
    entries = sorted(entry for entry in folder.iterdir() if entry.name != CLASSES)
    subfolders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    has_targets = need_targets or bool(subfolders)
    reader = _Reader(folder, shape)
    if has_targets:
        for subfolder in subfolders:
            reader.read_class(subfolder, names)
        reader.leave_out([entry for entry in entries if entry not in subfolders])
    else:
        reader.read_files(entries, 0)
    return reader.records(has_targets, tuple(names or ()))


class _Reader:
    """Collects the images of a folder, and what it leaves out."""

    def __init__(self, folder: Path, shape: Shape | None) -> None:
        self._folder, self._shape = folder, shape
        self._x: list[Array] = []
        self._y: list[float] = []
        self._held_out: list[bool] = []
        self._sizes: set[Shape] = set()
        self._problems: list[str] = []
        self._losses: list[Loss] = []

    def read_class(self, subfolder: Path, names: list[str] | None) -> None:
        """Read a folder of one class; images of an unknown class are left out."""
        entries = sorted(subfolder.iterdir())
        name = unicodedata.normalize("NFC", subfolder.name)
        if names is not None and name in names:
            self.read_files(entries, names.index(name), name)
        elif names is None and name.isdecimal():
            self.read_files(entries, int(name), str(int(name)))
        else:
            listed = "not found" if names is None else f"it lists {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            problem = (
                f"{subfolder}: unknown class {name!r}; name folders 0, 1, ..., or list all class names of the run, "
                f"one per line and in the same order for all clients, in {CLASSES} ({listed})"
            )
            images = [entry for entry in entries if is_image(entry)]
            self._problems += [problem] * bool(images)
            self._losses += [Loss(f"unknown class {name!r}", examples=self._named(file)) for file in images]
            self.leave_out([entry for entry in entries if entry not in images])

    def read_files(self, entries: list[Path], label: int, class_name: str = "") -> None:
        """Read images of one class."""
        for entry in entries:
            if is_image(entry):
                self._read(entry, label, class_name)
            else:
                self.leave_out([entry], class_name)

    def listed(self, base: Path, task: Task, names: list[str] | None) -> Records:
        """Return the images that a list names; others are left out.

        Args:
            base: folder with the list.
            task: a multi-label task, or a regression.
            names: of the labels, in the order of the run; None: they are named 0, 1, ....

        Raises:
            DataError: the list cannot be read, has other columns, or the names are not those of the task.
        """
        path = base / LABELS
        if task.real:
            schema = TableSchema(Column(_REAL), (), (), None)
        else:
            labels = [*map(str, range(task.num_outputs))] if names is None else names
            if len(labels) != task.num_outputs:
                raise DataError(
                    f"{path}: classes.txt lists {len(labels)} labels, but the run has {task.num_outputs}; list those "
                    "of the run"
                )
            first, *others = (Column(name, "boolean", values=BOOLEAN) for name in labels)
            schema = TableSchema(first, tuple(labels), (), None, more_targets=tuple(others))
        table, texts = read_table(path, schema), column_texts(path, schema, _FILE)
        self._problems += [f"{path}: {finding}; {task.rule}: fix or remove these rows" for finding in table.errors]
        targets, named = self._targets(base, table, texts), {base / PurePosixPath(text) for text in texts.values()}
        class_names = task.target_names(schema.class_names)
        for file in _files_below(self._folder):
            if file in targets:
                target = targets[file]
                self._read(file, target, class_names[int(target)] if class_names else "")
            elif is_image(file):
                reason = (
                    f"image whose row in {LABELS} has an error" if file in named else f"image without a row in {LABELS}"
                )
                self._losses.append(Loss(reason, examples=self._named(file)))
            elif file.name != CLASSES:
                self.leave_out([file])
        nothing = f"{self._folder}: no image has a row in {LABELS}, such as a.png"
        records = self.records(True, class_names, nothing, not task.real)
        return replace(records, label_names=schema.class_names)

    def _targets(self, base: Path, table: Table, texts: Mapping[int, str]) -> dict[Path, float]:
        """Return the target of each image, by its file, from a list that lies in a folder."""
        targets: dict[Path, float] = {}
        for i, target in zip(table.index.tolist(), table.y.tolist(), strict=True):
            name, file, problem = texts[i], base / PurePosixPath(texts[i]), ""
            if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
                problem = f"{name!r} is no path of an image below the folder of the list; write one such as a.png"
            elif file in targets:
                problem = f"{name!r} has a row already; keep one of them"
            elif not file.is_file():
                problem = f"there is no image {name!r}; add it, or remove the row"
            elif file.is_relative_to(self._folder):
                targets[file] = target
            if problem:
                self._problems.append(f"{base / LABELS}: row {i + 2}: {problem}")
        return targets

    def leave_out(self, entries: list[Path], class_name: str = "") -> None:
        """Account for files and folders that are not read."""
        for entry in entries:
            self._losses += losses_of(entry, self._folder, class_name)

    def records(
        self, has_targets: bool, class_names: tuple[str, ...], nothing: str = "", labelled: bool = True
    ) -> Records:
        """Return all images that were read; with what to say if there are none, and whether targets are labels."""
        if not self._x:
            self._problems.append(
                nothing
                or f"{self._folder} contains neither images in one folder per class, such as {self._folder}/0/*.png "
                f"(supported: {', '.join(IMAGE_SUFFIXES)}), nor train{', train'.join(SUFFIXES)}, nor the folder train"
            )
        sizes = [sizes_text(size) for size in self._sizes]
        return Records(
            where=str(self._folder),
            what=f"images of {sizes[0]}" if len(sizes) == 1 else "images of different sizes",
            x=np.stack(self._x) if self._x else np.zeros((0, *(self._shape or (0,))), np.uint8),
            y=np.array(self._y, float),
            held_out=np.array(self._held_out, bool),
            whole=True,
            labelled=labelled if has_targets else None,
            problems=tuple(self._problems),
            has_targets=has_targets,
            left_out=LeftOut.of(self._losses),
            class_names=class_names,
        )

    def _read(self, file: Path, label: float, class_name: str) -> None:
        classes = {class_name: 1} if class_name else {}
        try:
            image = read_image(file, self._shape)
        except DataError as error:
            self._problems.append(str(error))
            self._losses.append(Loss("image that cannot be read", examples=self._named(file), classes=classes))
            return
        if image.is_dark:
            reason = "image of 16 bits without a value above 4,095 of 65,535"
            self._losses.append(Loss(reason, effect="nearly black", examples=self._named(file), classes=classes))
        self._x.append(image.pixels)
        self._y.append(label)
        self._held_out.append(is_held_out(image.original, label))
        self._sizes.add(image.original.shape)

    def _named(self, file: Path) -> tuple[str]:
        return (str(file.relative_to(self._folder)),)


def _class_names(path: Path) -> list[str] | None:
    """Return the names in `classes.txt`, in Unicode's composed form (NFC); None without that file."""
    if not path.exists():
        return None
    need_regular(path)
    need_at_most(_MAX_CLASSES_BYTES, path.stat().st_size, str(path), "holds")
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        lines = unicodedata.normalize("NFC", content.decode(encoding)).splitlines()
    except ValueError as error:
        raise DataError(f"{path} is not a text file ({error}); write one class name per line") from None
    names = [line.strip() for line in lines if line.strip()]
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} contains duplicate class names; each line is the name of one class, in the order 0, 1, ..."
        )
    return names


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, in order, but those of the list and hidden ones."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _files_below(entry)
        elif entry.name not in LIST_FILES:
            yield entry
