"""Folders of images: what is read, and an account of every file that is not."""

import os
import unicodedata

import numpy as np
import pytest
from PIL import Image

from coterie.datasets import DataError, facts
from coterie.datasets.client_data import read

KNOWN = facts("own", "1x9x9", 2)


def save(path, seed, form="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 9), np.uint8)).save(path, form)


@pytest.fixture
def home(tmp_path):
    """Two classes of four images each."""
    for i in range(8):
        save(tmp_path / "own" / str(i % 2) / f"{i}.png", i)
    return tmp_path / "own"


def lines(records):
    return [str(loss) for loss in records.left_out.losses]


def touch(path, content=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("x{}.jfif", "JPEG"),
        ("x{}.JPE", "JPEG"),
        ("x{}.apng", "PNG"),
        ("IM{}", "PNG"),
        ("IM{}", "TIFF"),
        ("IM{}", "WEBP"),
        ("1.2.840.{}", "JPEG"),
    ],
)
def test_the_content_decides_without_a_known_type(home, name, form):
    for i in range(5):
        save(home / "1" / name.format(i), 50 + i, form)
    records, _ = read(home, KNOWN)
    assert (records.counts(), lines(records)) == ({"0": 4, "1": 9}, [])


def links_in_a_circle(home):
    (home / "1" / "a").mkdir()
    (home / "1" / "a" / "again").symlink_to(home, target_is_directory=True)
    touch(home / "1" / "a" / "note")


LEFT_OUT = {
    "dicom": (
        lambda home: [touch(home / "1" / f"{i}.dcm", bytes(128) + b"DICM") for i in range(4)],
        ["unsupported file type .dcm, 4 files left out (4 of class 1), such as 1/0.dcm, 1/1.dcm, 1/2.dcm"],
    ),
    "a folder for each patient": (
        lambda home: [save(home / "1" / f"patient-{i}" / "a.png", i) for i in range(2)],
        [
            "in a folder below that of its class, 2 files left out (2 of class 1), such as 1/patient-0/a.png, "
            "1/patient-1/a.png"
        ],
    ),
    "a copy": (
        lambda home: save(home / "0" / "0.png.bak", 0),
        [
            "unsupported file type .bak with the content of a PNG image, 1 file left out (1 of class 0), such as "
            "0/0.png.bak"
        ],
    ),
    "no image without a suffix": (
        lambda home: touch(home / "0" / "README"),
        ["unsupported file type (no suffix), 1 file left out (1 of class 0), such as 0/README"],
    ),
    "loose images": (
        lambda home: save(home / "a.png", 1),
        ["image in no folder of a class, 1 file left out, such as a.png"],
    ),
    "an archive": (
        lambda home: touch(home / "1.zip"),
        ["archive .zip, which is not unpacked, 1 file left out, such as 1.zip"],
    ),
    "a table": (
        lambda home: touch(home / "labels.csv"),
        [".csv file beside the data that are read, 1 file left out, such as labels.csv"],
    ),
    "a hidden image": (
        lambda home: save(home / "1" / ".a.png", 3),
        ["hidden file, 1 file left out (1 of class 1), such as 1/.a.png"],
    ),
    "a hidden folder": (
        lambda home: save(home / ".trash" / "a.png", 3),
        ["in a hidden folder, 1 file left out, such as .trash/a.png"],
    ),
    "a named pipe": (
        lambda home: os.mkfifo(home / "1" / "pipe"),
        ["not a regular file, 1 file left out (1 of class 1), such as 1/pipe"],
    ),
    "links in a circle": (
        links_in_a_circle,
        ["in a folder below that of its class, 2 files left out (2 of class 1), such as 1/a/again, 1/a/note"],
    ),
    "files of the system": (
        lambda home: [touch(home / "1" / name) for name in ("Thumbs.db", ".DS_Store", "._0.png", "desktop.ini")],
        [],
    ),
    "files of Coterie": (lambda home: touch(home / ".coterie-budget.jsonl"), []),
    "empty folders": (lambda home: (home / "1" / "a" / "b").mkdir(parents=True), []),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_every_other_file_is_accounted_for(home, case):
    make, expected = LEFT_OUT[case]
    make(home)
    records, _ = read(home, KNOWN)
    assert (lines(records), len(records.y), records.problems) == (expected, 8, ())


def test_images_of_an_unknown_class_and_broken_ones_are_records(home):
    for i in range(3):
        save(home / "val" / f"{i}.png", i)
    touch(home / "val" / "note.txt")
    touch(home / "0" / "broken.png")
    records, _ = read(home, KNOWN)
    assert (records.left_out.records, records.left_out.files, len(records.problems)) == (4, 1, 2)
    assert lines(records) == [
        "image that cannot be read, 1 record left out (1 of class 0), such as 0/broken.png",
        "unknown class 'val', 3 records left out, such as val/0.png, val/1.png, val/2.png",
        "unsupported file type .txt, 1 file left out, such as val/note.txt",
    ]


def test_labels_that_the_run_lacks_are_in_the_account(home):
    (home / "1").rename(home / "7")
    (records, _) = read(home, KNOWN)
    assert lines(records.fitted((1, 9, 9), 2)) == [
        "label that is not one of 2 classes, 4 records left out (4 of class 7)"
    ]


def test_dark_scans_are_named_and_used(home):
    for i in range(3):
        Image.fromarray(np.full((9, 9), 100 * i + 1, np.uint16)).save(home / "1" / f"scan{i}.png")
    records, _ = read(home, KNOWN)
    assert (len(records.y), records.left_out.records) == (11, 0)
    assert (
        "image of 16 bits without a value above 4,095 of 65,535, 3 records nearly black (3 of class 1)"
        in lines(records)[0]
    )


def test_what_lies_beside_train_and_test(home, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    home.rename(site / "train")
    for i in range(3):
        save(site / "val" / "0" / f"{i}.png", i)
    touch(site / "more.zip")
    touch(site / "classes.txt", b"0\n1\n")
    touch(site / "test.txt")
    records, test = read(site, KNOWN)
    assert test is None
    assert lines(records) == [
        "archive .zip, which is not unpacked, 1 file left out, such as more.zip",
        "unsupported file type .txt, 1 file left out, such as test.txt",
        "in a folder 'val', 3 files left out, such as val/0/0.png, val/0/1.png, val/0/2.png",
    ]


def test_other_tables_beside_train_are_left_out(tmp_path):
    for name in ("train.csv", "ward-b.csv", "train.txt"):
        touch(tmp_path / name, b"a,label\n1,0\n2,1\n")
    records, _ = read(tmp_path, facts("own", "1", 2, columns="by-position"))
    assert (len(records.y), records.left_out.files) == (2, 2)


# ---- names of classes ------------------------------------------------------------------------------------------------

CAFE = "caf\u00e9"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("listed", ["NFC", "NFD"])
@pytest.mark.parametrize("folder", ["NFC", "NFD"])
def test_class_names_with_marks_and_in_either_form(tmp_path, encoding, listed, folder):
    for i, name in enumerate((CAFE, "malignant")):
        for j in range(3):
            save(tmp_path / unicodedata.normalize(folder, name) / f"{j}.png", 10 * i + j)
    text = unicodedata.normalize(listed, f"{CAFE}\r\nmalignant\r\n")
    if encoding.endswith(("le", "be")):
        text = f"\ufeff{text}"
    (tmp_path / "classes.txt").write_bytes(text.encode(encoding))
    records, _ = read(tmp_path, KNOWN)
    assert (records.counts(), records.problems) == ({CAFE: 3, "malignant": 3}, ())


def test_a_list_with_one_name_in_two_forms_has_duplicates(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "classes.txt").write_text(f"{CAFE}\n{unicodedata.normalize('NFD', CAFE)}\n", "utf-8")
    with pytest.raises(DataError, match="contains duplicate class names"):
        read(tmp_path, KNOWN)
