"""Hostile data files: a simulation rejects each; a deployed client rejects the file or leaves the record out."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
import zlib
from io import BytesIO

import numpy as np
import pytest
from kit.own_files import read_shard, write_parquet, write_pictures
from kit.tiers import mark_slow
from PIL import Image

from coterie.datasets import DataError, own_shard

SHAPE = (1, 6, 5)
RECORDS = 12
GIB = 2**30

pytestmark = pytest.mark.timeout(60)


def images():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (RECORDS, *SHAPE), np.uint8), rng.integers(0, 4, RECORDS)


X, Y = images()


# ---- archives --------------------------------------------------------------------------------------------------------


def npy(values=None, shape=None, descr="|u1", data=b"", version=(1, 0)):
    """An array in NumPy's format; with a shape, its header claims that."""
    out = BytesIO()
    if values is not None:
        np.lib.format.write_array(out, values)
        return out.getvalue()
    header = str({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(header)) + header + data


def npz(method=zipfile.ZIP_DEFLATED, **members):
    """Members are bytes, or functions that return them where they are large."""

    def write(path):
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, data in {"x": npy(X), "y": npy(Y), **members}.items():
                archive.writestr(f"{name}.npy", data() if callable(data) else data)

    return write


def claiming(size, *names, width=1000):
    """An archive whose directory, which readers trust, claims sizes that its members do not have."""

    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("y.npy", npy(Y))
            for name in names:
                archive.writestr(f"{name}.npy", npy(shape=(size // width, width), data=bytes(2**20)))
                archive.getinfo(f"{name}.npy").file_size = size + 1000

    return write


def binary(content):
    return lambda path: path.write_bytes(content() if callable(content) else content)


def truncated(write, keep):
    def cut(path):
        write(path)
        os.truncate(path, int(path.stat().st_size * keep))

    return cut


def sparse(size, start=b""):
    """A file that claims a size, and takes no room on a disk."""

    def write(path):
        path.write_bytes(start)
        os.truncate(path, size)

    return write


def damaged_zip(path):
    npz(method=zipfile.ZIP_STORED)(path)
    content = bytearray(path.read_bytes())
    content[200] ^= 255
    path.write_bytes(content)


def raw_member(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"no array")
        archive.writestr("y", b"no array")


def many_members(path):
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(5_000):
            archive.writestr(f"{i}.npy", b"")


def header_of(size):
    """The header claims to be long, and is."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + bytes(size)


NAN_PAYLOADS = np.where(np.arange(12)[:, None] == 3, np.uint32(0x7FC0DEAD), 0).repeat(30, 1).astype("u4")
NO_ARCHIVE = "is not a numpy archive of numeric arrays"
#: The file, the complaint, and how many records a deployed client keeps; without a number, it rejects all.
ARCHIVES = {
    "8 GB": (claiming(8 * 10**9, "x"), r"unpacks to 8,000,000,\d+ bytes, but the limit is 4,294,967,296"),
    "two times 3 GB": (claiming(3 * 10**9, "x", "x_test"), r"unpacks to 6,000,000,\d+ bytes"),
    "3 GB that are not there": (claiming(3 * 10**9, "x"), NO_ARCHIVE),
    "shape of an exabyte": (npz(x=npy(shape=(2**30, 2**30))), r"shape \(1073741824, 1073741824\)"),
    "shape beyond 64 bits": (npz(x=npy(shape=(2**62, 2**62))), "has shape"),
    "negative shape": (npz(x=npy(shape=(-12, 30), data=bytes(360))), r"shape \(-12, 30\)"),
    "no records of any size": (npz(x=npy(shape=(0, 2**40)), y=npy(Y[:0])), "no records|1099511627776 numbers"),
    "many records of a byte": (claiming(6 * 10**8, "x", width=1), r"unpacks to 4,800,000,\d+ bytes"),
    "many records of no size": (npz(x=npy(shape=(2**40, 0))), "unpacks to 8,796,093,022,304"),
    "shape that is code": (npz(x=npy(shape="__import__('os')")), NO_ARCHIVE),
    "nested header": (npz(x=npy(descr="(" * 4000, shape=(1,)).replace(b"'((", b"(((")), NO_ARCHIVE),
    "long header": (npz(x=lambda: header_of(300 * 2**20)), NO_ARCHIVE),
    "version 9": (npz(x=npy(shape=(12, 30), data=bytes(360), version=(9, 0))), r"version \(9, 0\)"),
    "objects": (npz(x=npy(np.array([{1: 2}] * 12))), "[Pp]ickled objects"),
    "object array": (lambda path: np.savez(path, x=np.array([{1: 2}] * 12), y=Y), "[Pp]ickled objects"),
    "numbers of 1 MB": (npz(x=npy(shape=(1,), descr="|S1000000")), NO_ARCHIVE),
    "structures": (npz(x=npy(np.zeros(12, "i4,f4"))), "not a numeric type"),
    "complex numbers": (npz(x=npy(X.astype(complex))), "not a numeric type"),
    "dates": (npz(x=npy(X.astype("M8[s]"))), "not a numeric type"),
    "NaN payloads": (npz(x=npy(NAN_PAYLOADS.view("f4"))), "record 3, .* has NaN", 11),
    "labels of 1e300": (npz(y=npy(np.where(np.arange(12) == 3, 1e300, Y))), r"a label is 1e\+300", 11),
    "lzma": (npz(zipfile.ZIP_LZMA), "unsupported compression method 14"),
    "bzip2": (npz(zipfile.ZIP_BZIP2), "unsupported compression method 12"),
    "truncated archive": (truncated(npz(), 0.6), NO_ARCHIVE),
    "damaged archive": (damaged_zip, NO_ARCHIVE),
    "members that are no arrays": (raw_member, "has no array 'x'"),
    "5,000 members": (many_members, "has no array 'x'"),
    "archive of holes": (sparse(8 * GIB, b"PK\x03\x04"), NO_ARCHIVE),
}

# ---- tables ----------------------------------------------------------------------------------------------------------

ROWS = "label,a\n" + "1,2\n" * RECORDS


def csv(content):
    return lambda path: path.write_text(content, encoding="utf-8")


def parquet(columns, **settings):
    return lambda path: write_parquet(path, columns(), **settings)


def long_parquet(path):
    """Rows that take little room in the file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    part = pyarrow.table({name: pyarrow.nulls(2**20, pyarrow.int8()) for name in ("label", *"abcdefg")})
    with parquet.ParquetWriter(path, part.schema) as file:
        for _ in range(80):
            file.write_table(part, row_group_size=2**20)


def damaged_parquet(path):
    parquet(lambda: {"label": Y, "a": np.arange(12)}, compression="none")(path)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)


TABLES = {
    "line of 50 MB.csv": (csv(ROWS + "1," * (25 * 2**20) + "\n"), "a line of more than 8,388,608 characters"),
    "cell of 50 MB.csv": (csv(ROWS + "1," + "7" * (50 * 2**20)), "a line of more than"),
    "first line of 50 MB.csv": (csv("label," + "ab," * 17_000_000), "the first line has more than 8,388,608"),
    "1,000,000 columns.csv": (
        csv("label" + ",ab" * 10**6 + "\n1,2\n"),
        "contains records of 1,000,000 numbers; the limit is 262,144",
    ),
    "4,000,000 columns.csv": (csv("label" + ",a" * (4 * 10**6)), "records of 4,000,000 numbers; the limit is 262,144"),
    "200,000 columns and one row.csv": (
        csv("label" + ",ab" * 200_000 + "\n1" + ",2" * 200_000 + "\n"),
        "but the run expects 1 numbers",
    ),
    "open quote.csv": (csv(ROWS + '"' + "1,2\n" * 10**5), "begins in line 14 .* of more than 1,000 lines"),
    "long field.csv": (csv(ROWS + '1,"' + "2" * 200_000 + '"\n'), "line 14 cannot be read .field larger"),
    "zero bytes.csv": (csv(ROWS + "1,\0\n"), "column 'a': zero bytes, .*: row 14", 12),
    "no text.csv": (binary(ROWS.encode() + b"1,\xff\xfe\n"), "column 'a': bytes that are not utf-8, .*: row 14", 12),
    "UTF-16.csv": (binary(ROWS.encode("utf-16-le")), "must have one column named label"),
    "quoted first line.csv": (csv('"label,a\n1,2\n'), "column"),
    "long name.csv": (csv("a" * 10**6 + "\n1\n"), "must have one column named label, .*; its columns are none"),
    "huge numbers.csv": (csv(ROWS + "1,1e999\n"), "column 'a': not a number, .*: row 14 .1e999.", 12),
    "NaN.csv": (csv(ROWS + "nan,-nan\n"), "column 'a': not a number, .*: row 14 .-nan.", 12),
    "truncated.csv": (csv(ROWS + "1,"), "column 'a': missing, 1 record dropped: row 14;", 12),
    "holes.csv": (sparse(2 * GIB, ROWS.encode()), "holds 2,147,483,648 bytes, but the limit is 1,073,741,824"),
    "a line of holes.csv": (sparse(200 * 2**20, ROWS.encode()), "a line of more than"),
    "rows.parquet": (long_parquet, r"unpacks to 5,368,709,120 bytes, but the limit is 4,294,967,296"),
    "text of 1 GB.parquet": (
        parquet(lambda: {"label": Y, "a": ["a" * 10**6] * 12}),
        "column 'a': string is not a numeric type",
    ),
    "lists.parquet": (parquet(lambda: {"label": Y, "a": [[1, 2]] * 12}), "list<.*not a numeric type"),
    "10,000 columns.parquet": (
        parquet(lambda: {"label": Y, **{f"a{i}": Y for i in range(10_000)}}),
        "but the run expects",
    ),
    "two labels.parquet": (parquet(lambda: {"label": Y, "target": Y}), "but has 2"),
    "truncated.parquet": (truncated(parquet(lambda: {"label": Y, "a": Y}), 0.6), "is not a valid parquet file"),
    "damaged.parquet": (damaged_parquet, "is not a valid parquet file"),
    "footer.parquet": (binary(b"PAR1" + b"\0" * 64 + b"\xff\xff\xff\x7fPAR1"), "is not a valid parquet file"),
    "holes.parquet": (sparse(8 * GIB, b"PAR1"), "is not a valid parquet file"),
}

# ---- pictures --------------------------------------------------------------------------------------------------------


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *more, pixels=None):
    """A PNG in grey whose header claims a size."""
    rows = b"".join(b"\0" + bytes(width) for _ in range(height)) if pixels is None else pixels
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def saved(form, **settings):
    out = BytesIO()
    Image.fromarray(X[0, 0]).save(out, form, **settings)
    return out.getvalue()


def cut(content, keep=0.6):
    return content[: int(len(content) * keep)]


def tagged(tags, size):
    """A TIFF of many tags that have the same large value."""
    needed = {256: 5, 257: 6, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 6, 279: 30}
    start = 8 + 2 + 12 * (len(needed) + tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in needed.items())
    entries += b"".join(struct.pack("<HHII", 40_000 + i, 7, size, start) for i in range(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(needed) + tags) + entries + bytes(4) + bytes(size)


def frames(number):
    out = BytesIO()
    first, second = Image.fromarray(X[0, 0]), Image.fromarray(X[1, 0])
    first.save(out, "GIF", save_all=True, append_images=[second, first] * (number // 2))
    return out.getvalue()


def comments(number):
    """A GIF whose comment has many parts."""
    plain = saved("GIF")
    size = 13 + 3 * 2 ** ((plain[10] & 7) + 1)  # of the header and its palette
    return plain[:size] + b"!\xfe" + (b"\xff" + b"a" * 255) * number + b"\0" + plain[size:]


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n%%EndComments\n%%EOF\n"
NO_IMAGE = "is not a (readable|supported) image"
TOO_MANY = "has too many pixels"
PICTURES = {
    "eps.png": (POSTSCRIPT, "none of PNG, JPEG, BMP, GIF, TIFF, WEBP"),
    "pdf.png": (b"%PDF-1.4\n1 0 obj <<>> endobj\ntrailer <<>>\n%%EOF\n", NO_IMAGE),
    "ppm.png": (b"P5 5 6 255\n" + bytes(30), NO_IMAGE),
    "icon.png": (saved("ICO"), NO_IMAGE),
    "svg.png": (b"<svg xmlns='http://www.w3.org/2000/svg' width='5' height='6'/>", NO_IMAGE),
    "13000.png": (png(13_000, 13_000, pixels=bytes(30)), r"too many pixels \(.*169,?000,?000|13,000 x 13,000"),
    "9000.png": (png(9_000, 9_000, pixels=bytes(30)), r"\(9,000 x 9,000\); the limit is 32,000,000"),
    "huge.png": (png(2**31 - 1, 2**31 - 1, pixels=bytes(30)), TOO_MANY),
    "long.png": (png(2**31 - 1, 1, pixels=bytes(30)), TOO_MANY),
    "empty.png": (png(0, 0, pixels=b""), NO_IMAGE),
    "short.png": (png(8_000, 4_000, pixels=bytes(30)), NO_IMAGE),
    "text.png": (lambda: png(5, 6, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20 * 2**20)))), NO_IMAGE),
    "profile.png": (lambda: png(5, 6, chunk(b"eXIf", tagged(4000, 2**20))), "Exif data exceed 65,536 bytes"),
    "cut.png": (cut(saved("PNG")), NO_IMAGE),
    "cut.jpg": (cut(saved("JPEG")), NO_IMAGE),
    "cut.gif": (cut(saved("GIF"), 0.2), NO_IMAGE),
    "cut.bmp": (cut(saved("BMP")), NO_IMAGE),
    "cut.tif": (cut(saved("TIFF")), NO_IMAGE),
    "cut.webp": (cut(saved("WEBP", lossless=True)), NO_IMAGE),
    "wide.bmp": (saved("BMP")[:18] + struct.pack("<ii", 2**30, 2**30) + saved("BMP")[26:], TOO_MANY),
    "wide.gif": (b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + saved("GIF")[10:], TOO_MANY),
    "tags.tif": (lambda: tagged(5_000, 2**20), "referenced repeatedly"),
    "holes.webp": (b"RIFF\xff\xff\xff\x7fWEBP", NO_IMAGE),
    "nothing.png": (b"", NO_IMAGE),
}


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    home = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(home)


def linked(target):
    return lambda path: path.symlink_to(target)


def itself(path):
    path.symlink_to(path)


SPECIAL = {"named pipe": fifo, "socket": unix_socket, "endless device": linked("/dev/zero")}
SPECIAL |= {"terminal": linked("/dev/tty"), "folder": lambda path: path.mkdir()}


def picture(name, make):
    """Good pictures, and one that is not."""

    def write(path):
        write_pictures(path, X, Y)
        make(path / "0" / name)

    return write


def with_classes(content):
    def write(path):
        write_pictures(path, X, Y)
        content(path / "classes.txt")

    return write


NOT_REGULAR = "is not a regular file"
FOLDERS = {f"a picture {name}": (picture(name, binary(data)), says, 12) for name, (data, says) in PICTURES.items()}
FOLDERS |= {f"{name} as a picture": (picture("a.png", make), NOT_REGULAR, 12) for name, make in SPECIAL.items()}
FOLDERS |= {
    "picture that is a link to itself": (picture("a.png", itself), NOT_REGULAR, 12),
    "picture of holes": (
        picture("a.webp", sparse(8 * GIB, b"RIFF\xff\xff\xff\x7fWEBPVP8 ")),
        "holds 8,589,934,592 bytes, but the limit is 128,000,000",
        12,
    ),
    "class of 200 digits": (
        lambda path: (write_pictures(path, X, Y), (path / "0").rename(path / ("9" * 200))),
        r"a label is 1e\+200",
        9,
    ),
    "named pipe of classes": (with_classes(fifo), NOT_REGULAR),
    "classes of holes": (with_classes(sparse(8 * GIB)), "classes.txt holds 8,589,934,592 bytes"),
    "classes that are no text": (with_classes(binary(b"\xff\xfe\0")), "is not a text file"),
}

CASES = {f"{name}.npz": case for name, case in ARCHIVES.items()} | TABLES | FOLDERS
CASES |= {f"{name}.npz": (make, NOT_REGULAR) for name, make in SPECIAL.items() if name != "folder"}


# ---- tests -----------------------------------------------------------------------------------------------------------


def shape_of(path):
    return (1,) if path.suffix in (".csv", ".parquet") else SHAPE


def shard(path, strict):
    return read_shard(path, shape_of(path), 4, strict=strict)


def number(found):
    return len(found.y) + (0 if found.test.y is found.y else len(found.test.y))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes a case once, and returns its path."""
    home, paths = tmp_path_factory.mktemp("hostile"), {}

    def make(name):
        if name not in paths:
            paths[name] = home / str(len(paths)) / name.replace(" ", "-")
            paths[name].parent.mkdir()
            CASES[name][0](paths[name])
        return paths[name]

    yield make
    shutil.rmtree(home)


#: Cases that take more than a second.
LARGE = {
    "10,000 columns.parquet",
    "200,000 columns and one row.csv",
    "4,000,000 columns.csv",
    "long header.npz",
    "rows.parquet",
}


@pytest.mark.parametrize("name", mark_slow(CASES, LARGE))
def test_a_hostile_file_is_rejected_or_its_record_left_out(made, name):
    path, (_, complaint, *kept) = made(name), CASES[name]
    with pytest.raises(DataError, match=complaint) as refusal:
        shard(path, strict=True)
    assert len(str(refusal.value)) < 1000
    if kept:
        assert [number(shard(path, strict=False))] == kept
    else:
        with pytest.raises(DataError, match=complaint):
            shard(path, strict=False)


READER = """
import json, sys
from coterie.datasets import DataError, Declared, describe
from coterie.tasks import task_of

def memory(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(kind))

for module in ("PIL.Image", "PIL.TiffImagePlugin", "pyarrow.parquet"):
    try:
        __import__(module)
    except ImportError:
        pass
before, read = memory("VmRSS"), 0
for path, shape in json.load(sys.stdin):
    try:
        describe(path, Declared("images" if len(shape) == 3 else "vectors", tuple(shape), task_of(4)))
    except DataError:
        pass
    read += 1
print(read, memory("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak memory of a process is in /proc on Linux")
@pytest.mark.slow
def test_hostile_files_take_little_memory(made, tmp_path):
    """Not by its resource usage: that of a new process begins with the memory of its parent."""
    (tmp_path / "0").mkdir()
    Image.new("RGB", (8_000, 4_000)).save(tmp_path / "0" / "largest.webp", lossless=True, method=0)
    paths = [(str(path), shape_of(path)) for path in [tmp_path, *map(made, CASES)]]
    done = subprocess.run(
        [sys.executable, "-c", READER], input=json.dumps(paths), capture_output=True, text=True, check=True, timeout=50
    )
    read, megabytes = map(int, done.stdout.split())
    assert read == len(paths)
    assert megabytes < 500 + 3 * 8_000 * 4_000 / 2**20  # beyond the pixels of the largest picture


def test_a_limit_is_not_one_too_low(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", X.nbytes + Y.nbytes)  # int64 labels
    assert number(shard(tmp_path / "a.npz", strict=True)) == RECORDS
    write_pictures(tmp_path / "a", X, Y)
    monkeypatch.setattr("coterie.datasets.array_files.MAX_PIXELS", 30)
    assert number(shard(tmp_path / "a", strict=True)) == RECORDS
    monkeypatch.setattr("coterie.datasets.array_files.MAX_PIXELS", 29)
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", X.nbytes + Y.nbytes - 1)
    own_shard.cache_clear()
    for name in ("a", "a.npz"):
        with pytest.raises(DataError, match="the limit is"):
            shard(tmp_path / name, strict=True)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_archives_in_either_version_of_the_format_are_read(tmp_path, version):
    out = BytesIO()
    np.lib.format.write_array(out, np.asfortranarray(X), version)
    npz(x=out.getvalue())(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", x=X, y=Y)
    one, other = (shard(tmp_path / name, strict=True) for name in ("a.npz", "b.npz"))
    np.testing.assert_array_equal(one.x, other.x)


@pytest.mark.parametrize(("make", "number_of_parts"), [(frames, 3000), (comments, 20_000)])
def test_of_a_long_gif_the_first_frame_is_read(tmp_path, make, number_of_parts):
    write_pictures(tmp_path / "own", X, Y)
    (tmp_path / "own" / "0" / "long.gif").write_bytes(make(number_of_parts))
    found = shard(tmp_path / "own", strict=True)
    assert number(found) == RECORDS + 1
    expected = 2 * (X[0].astype(np.float32) / 255) - 1
    twice = [record for part in (found, found.test) for record in part.x if np.array_equal(record, expected)]
    assert len(twice) == 2


FORMATS = {"PNG": {}, "BMP": {}, "GIF": {}, "WEBP": {"lossless": True, "method": 0}, "TIFF": {}}
FORMATS |= {"TIFF of LZW": {"compression": "tiff_lzw"}, "TIFF of deflate": {"compression": "tiff_adobe_deflate"}}
FORMATS |= {"JPEG": {"quality": 100}, "JPEG in steps": {"quality": 100, "progressive": True}}


@pytest.mark.parametrize("name", FORMATS)
def test_large_pictures_of_every_format_are_read(tmp_path, name):
    """Noise, so that a file is about as large as its pixels, which the bound on reading again must allow."""
    pixels = np.random.default_rng(0).integers(0, 256, (1250, 1000), np.uint8)
    (tmp_path / "0").mkdir()
    form = name.split()[0]
    Image.fromarray(pixels).save(tmp_path / "0" / "a.png", form, **FORMATS[name])
    found = read_shard(tmp_path, (1, 1250, 1000), 1, strict=False)
    read = found.x if len(found.x) else found.test.x
    assert len(read) == 1
    difference = np.abs((read[0, 0] + 1) * 127.5 - pixels).max()
    assert difference <= (3 if form == "JPEG" else 1e-3)


def test_deep_and_other_folders_are_not_entered(tmp_path):
    write_pictures(tmp_path / "own", X, Y)
    room = tmp_path / "own" / "0"
    for _ in range(200):
        room = room / "0"
        room.mkdir()
    Image.fromarray(X[0, 0]).save(tmp_path / "own" / "0" / "0" / "deep.png")
    assert number(shard(tmp_path / "own", strict=True)) == RECORDS


def test_symbolic_links_are_the_owner_s_business(tmp_path):
    write_pictures(tmp_path / "far" / "away", X, Y)
    np.savez(tmp_path / "far" / "a.npz", x=X, y=Y)
    (tmp_path / "own").mkdir()
    for room in (tmp_path / "far" / "away").iterdir():
        (tmp_path / "own" / room.name).symlink_to(room)
    (tmp_path / "own.npz").symlink_to(tmp_path / "far" / "a.npz")
    assert number(shard(tmp_path / "own", strict=True)) == RECORDS
    assert number(shard(tmp_path / "own.npz", strict=True)) == RECORDS


def test_a_named_pipe_of_a_part_is_not_taken_for_nothing(tmp_path):
    np.savez(tmp_path / "train.npz", x=X, y=Y)
    os.mkfifo(tmp_path / "test.npz")
    with pytest.raises(DataError, match=r"test\.npz is not a regular file"):
        shard(tmp_path, strict=False)
