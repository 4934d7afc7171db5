"""Read images: one file, a folder for each class, or a folder with a list of labels or numbers.

Transparent images are drawn on white, so that colours of hidden pixels, which depend on the program that saved the
file, have no effect. Images of 16 bits per channel are reduced to their upper 8 bits, CMYK and palettes are converted
to RGB without colour profiles, and images are turned upright as their Exif data say.
"""

from __future__ import annotations

import codecs
import io
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

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
from coterie.datasets.records import Array, Records, Shape, is_held_out, sizes_text
from coterie.datasets.schema import BOOLEAN, SITE_SUFFIX, Column, TableSchema
from coterie.datasets.sources import DataError
from coterie.datasets.tables import column_texts, read_table
from coterie.tasks import Task

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
        image = _upper_bits(image)
    if image.mode in ("I", "F") or ";" in image.mode:
        raise _TooDeepError(f"has more than 16 bits per pixel channel (Pillow mode {image.mode}); convert it to 8 bits")
    mode = "L" if image.mode in _GREY else "RGB"
    if image.has_transparency_data:
        drawn = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", drawn.size, _BACKGROUND), drawn)
    return image if image.mode == mode else image.convert(mode)


def _upper_bits(image: Any) -> Any:
    """Return a grey image of 16 bits in mode L, or LA if one of its greys is transparent."""
    from PIL import Image

    levels = np.asarray(image)
    grey = Image.fromarray((levels >> 8).astype(np.uint8))
    hidden = image.info.get("transparency")
    if hidden is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(levels == hidden, 0, 255).astype(np.uint8))))


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
    if shape is not None and not suited and any(map(is_image, _files(folder))):
        raise DataError(
            f"{folder} contains images, which have 1 or 3 channels, but the run expects {sizes_text(shape)}"
        )
    names = _class_names(home / CLASSES)
    if task is not None:
        listed = read_labels(folder, home, task, names)
        if listed is None and need_targets and not task.real:
            raise DataError(no_labels(folder, task))
        if listed is not None:
            return _Reader(folder, shape).listed(listed, task)
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


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and of those in it."""
    for entry in folder.iterdir():
        yield from entry.iterdir() if entry.is_dir() else [entry]


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
        try:
            label = _label(subfolder, names)
        except DataError as error:
            images = [entry for entry in entries if is_image(entry)]
            self._problems += [str(error)] * bool(images)
            self._losses += [Loss(f"unknown class {_name(subfolder)!r}", examples=self._named(file)) for file in images]
            self.leave_out([entry for entry in entries if entry not in images])
        else:
            self.read_files(entries, label, names[label] if names else str(label))

    def read_files(self, entries: list[Path], label: int, class_name: str = "") -> None:
        """Read images of one class."""
        for entry in entries:
            if is_image(entry):
                self._read(entry, label, class_name)
            else:
                self.leave_out([entry], class_name)

    def listed(self, of_list: ImageLabels, task: Task) -> Records:
        """Return the images that a list names; others are left out."""
        self._problems += of_list.problems
        names = task.target_names(of_list.names)
        for file in files_below(self._folder):
            if file in of_list.targets:
                target = of_list.targets[file]
                self._read(file, target, names[int(target)] if names else "")
            elif is_image(file):
                reason = (
                    f"image whose row in {LABELS} has an error"
                    if file in of_list.named
                    else f"image without a row in {LABELS}"
                )
                self._losses.append(Loss(reason, examples=self._named(file)))
            elif file.name != CLASSES:
                self.leave_out([file])
        nothing = f"{self._folder}: no image has a row in {LABELS}, such as a.png"
        return replace(self.records(True, names, nothing, not task.real), label_names=of_list.names)

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


def _label(subfolder: Path, names: list[str] | None) -> int:
    name = _name(subfolder)
    if names is not None and name in names:
        return names.index(name)
    if names is None and name.isdecimal():
        return int(name)
    listed = "not found" if names is None else f"it lists {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
    raise DataError(
        f"{subfolder}: unknown class {name!r}; name folders 0, 1, ..., or list all class names of the run, "
        f"one per line and in the same order for all clients, in {CLASSES} ({listed})"
    )


def _name(subfolder: Path) -> str:
    return unicodedata.normalize("NFC", subfolder.name)


@dataclass(frozen=True)
class ImageLabels:
    """What a list says of the images of a folder.

    Attributes:
        targets: target of each image, by its file.
        names: of the labels.
        named: all files that it names.
        problems: rows that name no image of the folder, or have no target, and what to do.
    """

    targets: Mapping[Path, float]
    names: tuple[str, ...]
    named: frozenset[Path]
    problems: tuple[str, ...]


def read_labels(folder: Path, home: Path, task: Task, names: list[str] | None) -> ImageLabels | None:
    """Read the list in a folder of images, or else in its home; None: there is none.

    Args:
        folder: of the images.
        home: folder that holds it.
        task: a multi-label task, or a regression.
        names: of the labels, in the order of the run; None: they are named 0, 1, ....

    Raises:
        DataError: the list cannot be read, has other columns, or the names are not those of the task.
    """
    base = next((base for base in (folder, home) if (base / LABELS).exists()), None)
    if base is None:
        return None
    path = base / LABELS
    columns = (_REAL,) if task.real else _label_names(path, task, names)
    schema = _schema(columns, task)
    table = read_table(path, schema)
    texts = column_texts(path, schema, _FILE)
    problems = [f"{path}: {finding}; {task.rule}: fix or remove these rows" for finding in table.errors]
    targets: dict[Path, float] = {}
    for i, target in zip(table.index.tolist(), table.y.tolist(), strict=True):
        file = base / PurePosixPath(texts[i])
        problem = _problem(texts[i], file, file in targets)
        if problem:
            problems.append(f"{path}: row {i + 2}: {problem}")
        elif base == folder or file.is_relative_to(folder):
            targets[file] = target
    named = frozenset(base / PurePosixPath(text) for text in texts.values())
    return ImageLabels(targets, () if task.real else columns, named, tuple(problems))


def no_labels(folder: Path, task: Task) -> str:
    """Return an error: a folder has no list, which the task needs."""
    columns = ",".join((_FILE, *map(str, range(task.num_outputs))))
    return (
        f"{folder} has no {LABELS}; for {task}, write one with the columns {columns} and one row for each image, such "
        "as a.png"
    )


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, in order, but those of the list and hidden ones."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from files_below(entry)
        elif entry.name not in LIST_FILES:
            yield entry


def _schema(columns: tuple[str, ...], task: Task) -> TableSchema:
    """Return how the list is read: as the targets of a table without features."""
    if task.real:
        return TableSchema(Column(columns[0]), (), (), None)
    first, *others = (Column(name, "boolean", values=BOOLEAN) for name in columns)
    return TableSchema(first, columns, (), None, more_targets=tuple(others))


def _label_names(path: Path, task: Task, names: list[str] | None) -> tuple[str, ...]:
    """Return the columns of the labels, in the order of the run."""
    if names is None:
        return tuple(map(str, range(task.num_outputs)))
    if len(names) != task.num_outputs:
        raise DataError(
            f"{path}: classes.txt lists {len(names)} labels, but the run has {task.num_outputs}; list those of the run"
        )
    return tuple(names)


def _problem(name: str, file: Path, is_twice: bool) -> str:
    """Return why a row gives no image a target; empty: it does."""
    if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{name!r} is no path of an image below the folder of the list; write one such as a.png"
    if is_twice:
        return f"{name!r} has a row already; keep one of them"
    if not file.is_file():
        return f"there is no image {name!r}; add it, or remove the row"
    return ""
