"""Read folders of images, one folder per class."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from coterie.datasets.sources import DataError
from coterie.datasets.user_records import (
    SUFFIXES,
    Array,
    Records,
    Shape,
    is_held_out,
    need_at_most,
    need_regular,
    shortened,
    sizes_text,
)

_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_CLASSES = "classes.txt"
# Pillow's format names. Pillow detects formats by content and would pass PostScript files to Ghostscript.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
#: Largest number of pixels of an image, checked before they are loaded. Pillow uses up to 16 bytes per pixel (WEBP), 4
#: in a file.
MAX_PIXELS = 32_000_000
_MAX_PICTURE_BYTES = 4 * MAX_PIXELS
_MAX_EXIF_BYTES = 64 * 2**10
_MAX_CLASSES_BYTES = 2**20


def read_images(folder: Path, home: Path, shape: Shape | None, need_targets: bool = True) -> Records:
    """Read the images of FOLDER/CLASS/*; `home` holds the class names.

    If no targets are needed and there are no folders of classes, read FOLDER/*.
    """
    if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3)):
        raise DataError(
            f"{folder} contains images, which have 1 or 3 channels, but the run expects {sizes_text(shape)}"
        )
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
                original, asked = _picture(file, shape)
            except DataError as error:
                problems.append(str(error))
                continue
            x.append(asked)
            y.append(label)
            held_out.append(is_held_out(original, label))
            sizes.add(original.shape)
    if not x:
        problems.append(
            f"{folder} contains neither images in one folder per class, such as {folder}/0/*.png (supported: "
            f"{', '.join(_PICTURES)}), nor train{', train'.join(SUFFIXES)}, nor the folder train"
        )
    what = f"images of {sizes_text(sizes.pop())}" if len(sizes) == 1 else "images of different sizes"
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
        raise DataError(f"{file} is not a readable image ({shortened(error)}); replace or remove it") from None
    if image.mode in ("I", "F") or ";" in image.mode:
        raise DataError(
            f"{file} has more than 8 bits per pixel channel (Pillow mode {image.mode}); convert it to 8 bits"
        )
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    original = _channels_first(image)
    if shape is None:
        return original, np.zeros(0, np.uint8)
    image = image.convert("L" if shape[0] == 1 else "RGB")
    if image.size != (shape[2], shape[1]):
        image = image.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
    return original, _channels_first(image)


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
