"""Fingerprints of clients' data: any change of what is read changes them, and nothing else does."""

import os
from dataclasses import replace

import numpy as np
import pytest

from coterie.datasets import DataError, load
from coterie.datasets.client_data import fingerprint, fingerprints
from coterie.datasets.sources import source_fingerprint


@pytest.fixture
def folder(tmp_path):
    for name in ("a/one.png", "a/two.png", "b/one.png", "classes.txt"):
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "site"


CHANGES = {
    "content": lambda site: (site / "a/one.png").write_bytes(b"other"),
    "a list of classes": lambda site: (site / "classes.txt").write_text("b\na\n"),
    "a new file": lambda site: (site / "b/two.png").write_bytes(b""),
    "a lost file": lambda site: (site / "b/one.png").unlink(),
    "another name": lambda site: (site / "a/two.png").rename(site / "a/three.png"),
    "another class": lambda site: (site / "a/two.png").rename(site / "b/two.png"),
    "two names swapped": lambda site: (
        (site / "a/one.png").write_bytes(b"a/two.png"),
        (site / "a/two.png").write_bytes(b"a/one.png"),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_folder_changes_its_fingerprint(folder, change):
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) != before


def test_times_and_hidden_files_do_not_count(folder, tmp_path):
    before = fingerprint(folder)
    os.utime(folder / "a/one.png", (0, 0))
    (folder / ".DS_Store").write_bytes(b"1")
    (folder / "a/.thumbnails").mkdir()
    (folder / "a/.thumbnails/one.png").write_bytes(b"1")
    assert fingerprint(folder) == before
    assert fingerprint(folder.rename(tmp_path / "moved")) == before


def test_linked_folders_are_read_once(folder, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/one.png").write_bytes(b"1")
    (folder / "c").symlink_to(tmp_path / "c")
    (folder / "c/again").symlink_to(folder)
    before = fingerprint(folder)
    (tmp_path / "c/one.png").write_bytes(b"2")
    assert fingerprint(folder) != before


def test_every_client_has_a_fingerprint_by_the_name_of_its_data(folder, tmp_path):
    folder.rename(tmp_path / "client-0")
    (tmp_path / "client-1.csv").write_text("x,label\n1,0\n")
    (tmp_path / "client-7.csv").write_text("x,label\n1,0\n")
    assert list(fingerprints(tmp_path, 3)) == ["client-0", "client-1.csv"]


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/link.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"link\.png cannot be read"):
        fingerprint(tmp_path / "gone")


def test_a_data_set_has_the_fingerprint_of_its_arrays():
    source = load("digits")
    flipped = np.array(source.train_y)
    flipped[0] = (flipped[0] + 1) % source.num_classes
    assert source_fingerprint(source) == source_fingerprint(replace(source))
    assert source_fingerprint(source) != source_fingerprint(replace(source, train_y=flipped))
