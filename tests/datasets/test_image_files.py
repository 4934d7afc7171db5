"""One drawing, as different programs save it, has the same pixels."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from coterie.datasets import DataError
from coterie.datasets.array_files import read_image
from coterie.datasets.data_files import image_format

GREY = np.tile(np.array([0, 17, 85, 255], np.uint8), (6, 2))[:, :5]
#: Where nothing is drawn.
EMPTY = np.zeros((6, 5), bool)
EMPTY[:2] = True
SHOWN = np.where(EMPTY, 255, GREY).astype(np.uint8)
COLOURS = np.stack([GREY, GREY[::-1], 255 - GREY], axis=2)
SHOWN_COLOURS = np.where(EMPTY[..., None], 255, COLOURS).astype(np.uint8)


def alpha(hidden):
    """The drawing, with colours behind its transparent pixels."""
    return np.where(EMPTY[..., None], hidden, COLOURS).astype(np.uint8), np.where(EMPTY, 0, 255).astype(np.uint8)


def saved(image, form="PNG", **settings):
    out = BytesIO()
    image.save(out, form, **settings)
    return out.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(bits, colour, rows, transparent=b""):
    """A PNG file of packed rows, which Pillow does not write in all depths."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 6, bits, colour, 0, 0, 0))
    hidden = chunk(b"tRNS", transparent) if transparent else b""
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + header + hidden + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def packed(values, bits):
    """Rows of samples of fewer than 8 bits."""
    rows = []
    for row in values:
        text = "".join(format(value, f"0{bits}b") for value in row)
        rows.append(int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8)))
    return rows


def of_16_bits(values):
    return [(row.astype(">u2") * 257).tobytes() for row in values]


def palette(hidden, **settings):
    """One entry of the palette is transparent."""
    indices = np.where(EMPTY, 3, np.searchsorted([0, 17, 85, 255], GREY) % 3 + 4 * (GREY == 255)).astype(np.uint8)
    image = Image.frombytes("P", (5, 6), indices.tobytes())
    image.putpalette([0, 0, 0, 17, 17, 17, 85, 85, 85, *[hidden] * 3, 255, 255, 255])
    return saved(image, transparency=3, **settings)


def rgba(hidden, form="PNG", **settings):
    colours, opacity = alpha(hidden)
    return saved(Image.fromarray(np.dstack([colours, opacity])), form, **settings)


def la(hidden):
    pixels = np.where(EMPTY, hidden, GREY).astype(np.uint8)
    return saved(Image.merge("LA", [Image.fromarray(pixels), Image.fromarray(alpha(0)[1])]))


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown a quarter turn clockwise
    return saved(Image.fromarray(SHOWN).transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def reserved_grey():
    """The value 1 of 16 bits is transparent; 0 is not."""
    levels = np.where(EMPTY, 1, GREY.astype(np.uint16) * 257)
    return png(16, 0, [row.astype(">u2").tobytes() for row in levels], struct.pack(">H", 1))


def reserved_colour():
    levels = np.where(EMPTY[..., None], [257, 514, 771], COLOURS.astype(np.uint16) * 257)
    return png(16, 2, [row.astype(">u2").tobytes() for row in levels], struct.pack(">HHH", 257, 514, 771))


EQUAL_CHANNELS = Image.fromarray(np.dstack([*[np.where(EMPTY, 3, GREY).astype(np.uint8)] * 3, alpha(0)[1]]))
LEVELS_OF_4 = np.where(EMPTY, 7, GREY // 17)
GREYS = {
    "opaque": saved(Image.fromarray(SHOWN)),
    "LA on black": la(0),
    "LA on white": la(255),
    "LA on grey": la(77),
    "RGBA": saved(EQUAL_CHANNELS),
    "palette on black": palette(0),
    "palette on white": palette(255),
    "GIF palette": palette(9, form="GIF"),
    "4 bits": png(4, 0, packed(SHOWN // 17, 4)),
    "4 bits, a transparent grey": png(4, 0, packed(LEVELS_OF_4, 4), struct.pack(">H", 7)),
    "16 bits": png(16, 0, of_16_bits(SHOWN)),
    "16 bits, a transparent grey": reserved_grey(),
    "16-bit TIFF": saved(Image.fromarray(SHOWN.astype(np.uint16) * 257), "TIFF"),
    "16 bits and alpha": png(16, 4, of_16_bits(np.dstack([GREY, alpha(0)[1]]))),
    "turned": turned(),
    "TIFF": saved(Image.fromarray(SHOWN), "TIFF"),
    "CMYK TIFF": saved(Image.fromarray(SHOWN).convert("CMYK"), "TIFF"),
    "RGB": saved(Image.fromarray(SHOWN).convert("RGB")),
    "WEBP": saved(EQUAL_CHANNELS, "WEBP", lossless=True, exact=True),
}
IN_COLOUR = {
    "opaque": saved(Image.fromarray(SHOWN_COLOURS)),
    "RGBA on black": rgba(0),
    "RGBA on white": rgba(255),
    "RGBA on orange": rgba([255, 128, 0]),
    "RGBA TIFF": rgba(40, "TIFF"),
    "WEBP": rgba(40, "WEBP", lossless=True, exact=True),
    "CMYK TIFF": saved(Image.fromarray(SHOWN_COLOURS).convert("CMYK"), "TIFF"),
    "a transparent colour": saved(Image.fromarray(alpha([1, 2, 3])[0]), transparency=(1, 2, 3)),
    "16 bits": png(16, 2, of_16_bits(SHOWN_COLOURS)),
    "16 bits, a transparent colour": reserved_colour(),
    "16 bits and alpha": png(16, 6, of_16_bits(np.dstack(alpha(99)))),
    "palette": saved(Image.fromarray(SHOWN_COLOURS).quantize(64)),
}


def read(tmp_path, content, channels):
    (tmp_path / "image.png").write_bytes(content)
    return read_image(tmp_path / "image.png", (channels, 6, 5)).pixels


@pytest.mark.parametrize("program", GREYS)
def test_a_drawing_in_grey_has_the_same_pixels(tmp_path, program):
    np.testing.assert_array_equal(read(tmp_path, GREYS[program], 1)[0], SHOWN)
    np.testing.assert_array_equal(read(tmp_path, GREYS[program], 3), [SHOWN] * 3)


@pytest.mark.parametrize("program", IN_COLOUR)
def test_a_drawing_in_colour_has_the_same_pixels(tmp_path, program):
    np.testing.assert_array_equal(read(tmp_path, IN_COLOUR[program], 3), SHOWN_COLOURS.transpose(2, 0, 1))


def test_half_transparent_pixels_are_mixed_with_white(tmp_path):
    for content in (
        saved(Image.merge("LA", [Image.new("L", (5, 6), 0), Image.new("L", (5, 6), 128)])),
        saved(Image.new("RGBA", (5, 6), (0, 0, 0, 128))),
    ):
        assert np.unique(read(tmp_path, content, 1)).tolist() == [127]


@pytest.mark.parametrize(
    "image", [Image.fromarray(np.full((6, 5), 70_000, np.int32)), Image.fromarray(np.full((6, 5), 0.5, np.float32))]
)
def test_more_bits_are_refused(tmp_path, image):
    with pytest.raises(DataError, match=r"has more than 16 bits per pixel channel .*; convert it to 8 bits"):
        read(tmp_path, saved(image, "TIFF"), 1)


@pytest.mark.parametrize(("largest", "is_dark"), [(4095, True), (4096, False), (0, False)])
def test_scans_of_12_bits_are_marked(tmp_path, largest, is_dark):
    (tmp_path / "a.png").write_bytes(saved(Image.fromarray(np.full((6, 5), largest, np.uint16))))
    assert read_image(tmp_path / "a.png", (1, 6, 5)).is_dark is is_dark


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"])
def test_the_format_is_known_by_its_content(form):
    assert image_format(saved(Image.fromarray(SHOWN), form)[:16]) == form


@pytest.mark.parametrize(
    "start", [b"", b"BMW and others", b"RIFF1234WAVE", b"PK\3\4", b"%PDF-1.4", b"\x89PN", bytes(16)]
)
def test_other_contents_are_no_images(start):
    assert image_format(start) == ""
