"""Read one image file: its own pixels, and those that a run asks for.

Transparent images are drawn on white, so that colours of hidden pixels, which depend on the program that saved the
file, have no effect. Images of 16 bits per channel are reduced to their upper 8 bits, CMYK and palettes are converted
to RGB without colour profiles, and images are turned upright as their Exif data say.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.datasets.sources import DataError
from coterie.datasets.user_records import Array, Shape, need_at_most, need_regular, shortened

#: Suffixes of images.
IMAGE_SUFFIXES = (*(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif"), *(".bmp", ".gif", ".tif", ".tiff", ".webp"))
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


def image_format(start: bytes) -> str:
    """Return the format of a file by its first 16 bytes, as "PNG"; empty if it is not an image."""
    signatures = (
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\xff\xd8\xff", "JPEG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
    )
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[:2] == b"BM" and start[6:10] == bytes(4):  # four reserved bytes
        return "BMP"
    return next((name for signature, name in signatures if start.startswith(signature)), "")


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
