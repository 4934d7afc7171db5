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
        *(("x{}.jfif", "JPEG"), ("x{}.JPE", "JPEG"), ("x{}.apng", "PNG")),
        *(("IM{}", "PNG"), ("IM{}", "TIFF"), ("IM{}", "WEBP"), ("1.2.840.{}", "JPEG")),
    ],
)
def test_the_content_decides_without_a_known_type(home, name, form):
    for i in range(5):
        save(home / "1" / name.format(i), 50 + i, form)
    records, _ = read(home, KNOWN)
    assert (records.counts(), lines(records)) == ({"0": 4, "1": 9}, [])


@pytest.mark.parametrize(
    ("reason", "names", "of_class"),
    [
        ("unsupported file type .dcm", [f"1/{i}.dcm" for i in range(4)], "1"),
        ("in a folder below that of its class", ["1/patient-0/a.png", "1/patient-1/a.png"], "1"),
        ("unsupported file type .bak with the content of a PNG image", ["0/0.png.bak"], "0"),
        ("unsupported file type (no suffix)", ["0/README"], "0"),
        ("image in no folder of a class", ["a.png"], ""),
        ("archive .zip, which is not unpacked", ["1.zip"], ""),
        (".csv file beside the data that are read", ["labels.csv"], ""),
        ("hidden file", ["1/.a.png"], "1"),
        ("in a hidden folder", [".trash/a.png"], ""),
        ("", ["1/Thumbs.db", "1/.DS_Store", "1/._0.png", "1/desktop.ini", ".coterie-budget.jsonl"], ""),
    ],
)
def test_every_other_file_is_accounted_for(home, reason, names, of_class):
    for name in names:
        save(home / name, 3) if ".png" in name and reason else touch(home / name)
    records, _ = read(home, KNOWN)
    many = f"{len(names)} file{'s' * (len(names) > 1)} left out"
    many += f" ({len(names)} of class {of_class})" if of_class else ""
    expected = [f"{reason}, {many}, such as {', '.join(names[:3])}"] if reason else []
    assert (lines(records), len(records.y), records.problems) == (expected, 8, ())


def test_folders_pipes_and_links_in_a_circle_are_accounted_for(home):
    os.mkfifo(home / "1" / "pipe")
    (home / "1" / "a" / "b").mkdir(parents=True)
    (home / "1" / "a" / "again").symlink_to(home, target_is_directory=True)
    touch(home / "1" / "a" / "note")
    records, _ = read(home, KNOWN)
    assert len(records.y) == 8
    assert lines(records) == [
        "in a folder below that of its class, 2 files left out (2 of class 1), such as 1/a/again, 1/a/note",
        "not a regular file, 1 file left out (1 of class 1), such as 1/pipe",
    ]


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
    found = lines(read(home, KNOWN)[0].fitted((1, 9, 9), 2))
    assert found == ["label that is not one of 2 classes, 4 records left out (4 of class 7)"]


def test_dark_scans_are_named_and_used(home):
    for i in range(3):
        Image.fromarray(np.full((9, 9), 100 * i + 1, np.uint16)).save(home / "1" / f"scan{i}.png")
    records, _ = read(home, KNOWN)
    assert (len(records.y), records.left_out.records) == (11, 0)
    black = "image of 16 bits without a value above 4,095 of 65,535, 3 records nearly black (3 of class 1)"
    assert black in lines(records)[0]


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
