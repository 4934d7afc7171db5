"""Data of clients' own: the same records in every form give the same shard, and what cannot be read says why."""

import csv
import pickle
import sys

import numpy as np
import pytest
from kit.own_files import read_shard, write_parquet, write_pictures
from kit.workbooks import write_xlsx
from PIL import Image

from coterie.datasets import DataError, Declared, Facts, describe, facts, own_federation, own_shard
from coterie.models import features
from coterie.tasks import task_of

SHAPE = (1, 6, 5)


def images(n=60, classes=4, shape=SHAPE):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, classes, n)


def vectors(n=60):
    rng = np.random.default_rng(1)
    return rng.standard_normal((n, 7)).astype(np.float32), rng.integers(0, 3, n)


def write_npz(path, x, y, **more):
    np.savez(path.with_suffix(".npz"), x=x, y=y, **more)
    return path.with_suffix(".npz")


def write_csv(path, x, y, target="label"):
    with path.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([target, *(f"f{i}" for i in range(x[0].size))])
        rows.writerows([label, *record.ravel()] for record, label in zip(x, y, strict=True))
    return path.with_suffix(".csv")


def write_records(path, x, y, target="label"):
    columns = {f"f{i}": column for i, column in enumerate(x.reshape(len(x), -1).T)}
    return write_parquet(path.with_suffix(".parquet"), columns | {target: y})


def write_excel(path, x, y, target="label"):
    pytest.importorskip("python_calamine")
    rows = [[label.item(), *record.ravel().tolist()] for record, label in zip(x, y, strict=True)]
    return write_xlsx(path.with_suffix(".xlsx"), {"Sheet": [[target, *(f"f{i}" for i in range(x[0].size))], *rows]})


def write_named_pictures(path, x, y):
    names = [f"class {chr(ord('d') - i)}" for i in range(4)]  # neither in the order of their names
    path.mkdir()
    (path / "classes.txt").write_text("\n".join(names) + "\n\n")
    return write_pictures(path, x, y, names)


WRITERS = [write_npz, write_csv, write_records, write_excel, write_pictures, write_named_pictures]


def shard(path, shape=SHAPE, classes=4, transform=None):
    return read_shard(path, shape, classes, transform, client=3)


def by_content(x, y):
    """Records in an order of their own: files have others."""
    flat = np.concatenate([x.reshape(len(x), -1), y[:, None]], axis=1)
    return flat[np.lexsort(flat.T)]


def assert_same(one, other):
    for mine, its in ((one, other), (one.test, other.test)):
        np.testing.assert_array_equal(by_content(mine.x, mine.y), by_content(its.x, its.y))
        assert (mine.x.dtype, mine.y.dtype) == (its.x.dtype, its.y.dtype)


@pytest.mark.parametrize("write", WRITERS)
def test_images_in_every_form_are_the_same_shard(tmp_path, write):
    x, y = images()
    path = write(tmp_path / "data", x, y)
    found = shard(path)
    assert (found.client_id, found.group, found.x.dtype, found.y.dtype) == (3, 0, np.float32, np.int64)
    assert found.x.shape[1:] == found.test.x.shape[1:] == SHAPE
    both = np.concatenate([found.x, found.test.x]), np.concatenate([found.y, found.test.y])
    np.testing.assert_array_equal(by_content(*both), by_content(2 * (x.astype(np.float32) / 255) - 1, y))
    assert_same(found, shard(write_npz(tmp_path / "reference", x, y)))
    many = len(found.test.y)
    what = "images of 1x6x5" if write in (write_npz, write_pictures, write_named_pictures) else "records of 30 numbers"
    assert describe(str(path)) == f"60 {what}, classes 0..3, {many} held out"
    assert 5 <= many <= 20


@pytest.mark.parametrize("write", WRITERS[:4])
def test_vectors_in_every_form_are_the_same_shard(tmp_path, write):
    x, y = vectors()
    path = write(tmp_path / "data", x, y)
    found = shard(path, (7,), 3)
    both = np.concatenate([found.x, found.test.x]), np.concatenate([found.y, found.test.y])
    np.testing.assert_array_equal(by_content(*both), by_content(x, y))  # as they are
    assert_same(found, shard(write_npz(tmp_path / "reference", x, y), (7,), 3))
    assert describe(str(path)).startswith("60 records of 7 numbers, classes 0..2, ")


def test_labels_written_as_floats_make_no_fractions_of_pixels(tmp_path):
    x, y = images()
    assert_same(shard(write_records(tmp_path / "a", x, y.astype(float))), shard(write_npz(tmp_path / "b", x, y)))


@pytest.mark.parametrize("write", WRITERS[:4])
def test_real_targets(tmp_path, write):
    x, _ = vectors()
    y = np.linspace(-1, 2, 60)
    path = write(tmp_path / "data", x, y, **({} if write is write_npz else {"target": "target"}))
    found = shard(path, (7,), 0)
    assert found.y.dtype == found.test.y.dtype == np.float32
    assert sorted([*found.y, *found.test.y]) == sorted(y.astype(np.float32))
    assert "targets -1..2" in describe(str(path))


def test_channels_and_sizes_of_images(tmp_path):
    x, y = images()
    grey = shard(write_npz(tmp_path / "a", x, y))
    assert_same(shard(write_npz(tmp_path / "b", x[:, 0], y)), grey)  # (n, H, W)
    assert_same(shard(write_npz(tmp_path / "c", x.reshape(60, 30), y)), grey)  # rows
    fractions = shard(write_npz(tmp_path / "d", x / 255, y))
    assert fractions.x.min() == -1
    assert fractions.x.max() == 1
    colours, y = images(shape=(3, 6, 5))
    pictures = shard(write_pictures(tmp_path / "e", colours, y), (3, 6, 5))
    assert_same(pictures, shard(write_npz(tmp_path / "f", colours, y), (3, 6, 5)))
    resized = shard(tmp_path / "e", (1, 12, 10))
    assert resized.x.shape[1:] == (1, 12, 10)
    assert len(resized.y) == len(shard(tmp_path / "e", (3, 6, 5)).y)  # who is held out is nobody's to choose
    assert describe(str(tmp_path / "e")).startswith("60 images of 3x6x5")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "e" / "0" / "another.png")
    assert describe(str(tmp_path / "e")).startswith("61 images of different sizes")


def test_features_are_applied_to_scaled_images(tmp_path):
    path = write_npz(tmp_path / "a", *images())
    plain, pooled = shard(path), shard(path, transform=features("pool2"))
    np.testing.assert_array_equal(pooled.x, features("pool2")(plain.x))
    assert pooled.test.x.shape[1:] == (1, 3, 2)


@pytest.mark.parametrize("write", WRITERS)
def test_train_and_test_may_be_given(tmp_path, write):
    x, y = images()
    (tmp_path / "own").mkdir()
    write(tmp_path / "own" / "train", x[:40], y[:40])
    write(tmp_path / "own" / "test", x[40:], y[40:])
    if write is write_named_pictures:  # of both parts
        (tmp_path / "own" / "train" / "classes.txt").rename(tmp_path / "own" / "classes.txt")
        (tmp_path / "own" / "test" / "classes.txt").unlink()
    found = shard(tmp_path / "own")
    assert (len(found.y), len(found.test.y)) == (40, 20)
    named = shard(write_npz(tmp_path / "one", x[:40], y[:40], x_test=x[40:], y_test=y[40:]))
    assert_same(found, named)
    assert describe(str(tmp_path / "own")).startswith("40 ")
    assert describe(str(tmp_path / "own")).endswith("classes 0..3, 20 more for testing")


def held_out(path):
    found = shard(path)
    return {record.tobytes() for record in found.x}, {record.tobytes() for record in found.test.x}


@pytest.mark.parametrize("write", [write_npz, write_csv, write_pictures])
def test_whether_a_record_is_held_out_depends_on_it_alone(tmp_path, write):
    """Else a record that is removed would move others, and a guarantee for one record would not hold."""
    x, y = images(30)
    train, test = held_out(write(tmp_path / "all", x, y))
    assert train
    assert test
    for left_out in range(30):
        rows = np.delete(np.random.default_rng(left_out).permutation(30), left_out)
        fewer, tests = held_out(write(tmp_path / f"without {left_out}", x[rows], y[rows]))
        assert fewer <= train
        assert tests <= test
        assert len(fewer) + len(tests) == 29


def test_about_a_fifth_is_held_out(tmp_path):
    x, y = images(4000)
    tests = shard(write_npz(tmp_path / "a", x, y)).test
    assert abs(len(tests.y) - 800) < 4 * 25.3  # four deviations; the data are fixed


def test_few_records_are_tested_on_themselves_or_refused(tmp_path):
    x, y = images()
    train, _ = held_out(write_npz(tmp_path / "all", x, y))
    kept = np.array([(2 * (record.astype(np.float32) / 255) - 1).tobytes() in train for record in x])
    path = write_npz(tmp_path / "kept", x[kept], y[kept])
    found = shard(path)
    assert found.test.x is found.x
    assert describe(str(path)).endswith("none held out, so all are used for testing")
    path = write_npz(tmp_path / "held", x[~kept], y[~kept])
    with pytest.raises(DataError, match=r"all \d+ records are held out; add records or test data"):
        shard(path)


def test_classes_that_a_client_lacks(tmp_path):
    x, y = images()
    names = ["ant", "bee", "cat", "dog"]
    path = write_pictures(tmp_path / "own", x[y != 1], y[y != 1], names)
    (path / "classes.txt").write_text("\n".join(names))
    (path / ".cache").mkdir()
    (path / "cat" / "Thumbs.db").write_bytes(b"not an image")
    assert set(shard(path).y) == {0, 2, 3}
    assert "classes 0, 2, 3" in describe(str(path))


# ---- errors ----------------------------------------------------------------------------------------------------------

X, Y = images(12)


def text(path, content):
    path.write_text(content)
    return path


def broken_picture(path):
    write_pictures(path, X, Y)
    text(path / "0" / "broken.png", "no image")
    return path


def deep_picture(path):
    write_pictures(path, X, Y)
    Image.fromarray(np.full((6, 5), 0.5, np.float32)).save(path / "0" / "deep.tif")
    return path


def unnamed_class(path, listed=""):
    write_pictures(path, X, np.zeros(12, int), ["bird"])
    if listed:
        text(path / "classes.txt", listed)
    return path


def folder(path, *files):
    path.mkdir()
    for name, arrays in files:
        np.savez(path / name, **arrays)
    return path


ARCHIVES = {
    r"x, y must have shapes .*, not \(12, 1, 6, 5\) and \(5,\)": (X, Y[:5]),
    r"must have shapes .*, not .* and \(12, 2\)": (X, np.stack([Y, Y], axis=1)),
    r"x, y must have shapes .*, not \(12,\)": (X[:, 0, 0, 0], Y),
    "no records": (X[:0], Y[:0]),
    "bool is not a numeric type": (X.astype(bool), Y),
    "record 5, .* infinite": (np.where(np.arange(12)[:, None, None] == 5, 1e300, X[:, 0] / 255), Y),
    "record 7, .* has NaN": (X, np.where(np.arange(12) == 7, np.nan, Y)),
    "a label is -1; labels must be integers from 0": (X, np.where(Y == 0, -1, Y)),
    r"a label is 0\.5; labels must be integers": (X, np.where(Y == 0, 0.5, Y)),
    "a label is 4, but the run has 4 classes, numbered from 0": (X, np.where(Y == 0, 4, Y)),
    "contains images of 1x5x5, but the run expects 1x6x5; convert": (X[:, :, :5], Y),
    r"images of 6x5x1, .* put channels first: x.transpose\(0, 3, 1, 2\)": (X[:, 0, :, :, None], Y),
    "records of 20 numbers, but the run expects 1x6x5": (X.reshape(12, 30)[:, :20], Y),
    r"a pixel is \d{4,}; pixels must be integers from 0 to 255": (X.astype(int) * 256, Y),
    r"a pixel is -\d+; pixels must be integers": (X.astype(int) - 300, Y),
    r"a pixel is \d+; pixels must be floats in \[0, 1\]": (X.astype(float), Y),
}


@pytest.mark.parametrize("complaint", ARCHIVES)
def test_what_is_wrong_in_an_archive_is_said(tmp_path, complaint):
    with pytest.raises(DataError, match=complaint):
        shard(write_npz(tmp_path / "own", *ARCHIVES[complaint]))


NAMES = ",".join("p" * 30)
TABLES = {
    "one column named label, or target for real targets, but has 0; its columns are none": "",
    "but has 0; its columns are 1, 2, 3": "1,2,3\n1,2,3\n",
    "but has 2; its columns are label, target, a": "label,target,a\n1,2,3\n",
    "column 'b': not a number, 1 record dropped: row 2 .2,5.; \"2,5\" would be 2.5 .* by a schema": "b;label\n2,5;3\n",
    "no records": "label,a\n",
    "records without features": "label\n1\n",
    "column 'a': not a number, 1 record dropped: row 3 .red.; expected plain numbers: fix": "label,a\n1,2\n1,red\n",
    "column 'a': missing, 1 record dropped: row 2;": "label,a\n1,\n",
    "column 'a': missing, 2 records dropped: row 2, 3;": "label,a\n1,nan\n2,NA\n",
    "column 'label': too large, 1 record dropped: row 2 .1e300.;": "label,a\n1e300,1\n",
    "another number of cells than the 2 column names, 1 record dropped: row 3 .1 cells.": "label,a\n1,2\n1\n",
    "than the 2 column names, 1 record dropped: row 2 .3 cells.": "label,a\n1,2,3\n",
    "a label is -1; labels": "label,a\n-1,2\n",
    "contains real targets, but the run has 4 classes; use a column 'label'": f"target,{NAMES}\n1{',1' * 30}\n",
    r"a pixel is 0\.5; pixels must be integers .*\.csv has integers": f"label,{NAMES}\n1{',0.5' * 30}\n",
}


@pytest.mark.parametrize("complaint", TABLES)
def test_what_is_wrong_in_a_table_is_said(tmp_path, complaint):
    with pytest.raises(DataError, match=complaint):
        shard(text(tmp_path / "own.csv", TABLES[complaint]))


def test_what_is_wrong_in_parquet_is_said(tmp_path):
    for columns, complaint in (
        ({"label": [1, 2], "a": [1, None]}, "column 'a': missing, 1 record dropped: row 2;"),
        ({"a": [1, 2]}, "its columns are a"),
        ({"label": np.zeros(0), "a": np.zeros(0)}, "no records"),
    ):
        with pytest.raises(DataError, match=complaint):
            shard(write_parquet(tmp_path / "own.parquet", columns), (1,))


def test_without_pyarrow_the_way_to_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'coterie\[parquet\]'"):
        shard(text(tmp_path / "own.parquet", ""))


FOLDERS = {
    r"none.npz does not exist; supported data: \.npz, \.csv, .*, \.ods, a folder": lambda p: p / "none.npz",
    r"data.txt: unsupported file type \.txt; supported data:": lambda p: text(p / "data.txt", "1"),
    r"unsupported file type \(no suffix\)": lambda p: text(p / "data", "1"),
    "a.npz is not a numpy archive of numeric arrays": lambda p: text(p / "a.npz", "no zip"),
    "b.npz is not a numpy archive of numeric arrays": lambda p: text(p / "b.npz", ""),
    "has no array 'y'; its arrays are 'x'; write it with": lambda p: folder(p / "b", ("a.npz", {"x": X})) / "a.npz",
    r"has no array 'y_test'; .* numpy.savez\(path, x=..., y=..., x_test=..., y_test=": lambda p: write_npz(
        p / "a", X, Y, x_test=X
    ),
    "own/0/broken.png is not a (readable|supported) image": lambda p: broken_picture(p / "own"),
    "deep.tif has more than 16 bits per pixel": lambda p: deep_picture(p / "own"),
    r"own/bird: unknown class 'bird'; .* in classes.txt \(not found\)": lambda p: unnamed_class(p / "own"),
    r"'bird'; .* \(it lists cat, dog\)": lambda p: unnamed_class(p / "own", "cat\ndog"),
    "own contains neither images in one folder per class": lambda p: folder(p / "own"),
    "own contains test data but no training data": lambda p: folder(p / "own", ("test", {"x": X, "y": Y})),
    "x_test and y_test, but .* keep only one": lambda p: folder(
        p / "own", ("train", {"x": X, "y": Y, "x_test": X, "y_test": Y})
    ),
    "own contains train.npz and train.csv; keep one of them": lambda p: (
        text(folder(p / "own", ("train", {"x": X, "y": Y})) / "train.csv", "").parent
    ),
}


@pytest.mark.parametrize("complaint", FOLDERS)
def test_what_is_wrong_with_a_path_is_said(tmp_path, complaint):
    with pytest.raises(DataError, match=complaint):
        shard(FOLDERS[complaint](tmp_path))


def test_nothing_is_ever_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return text, (tmp_path / "sprung", "")

    for path in (tmp_path / "a.npz", tmp_path / "b.npz"):
        np.savez(path, x=np.array([Trap()], object), y=[0])
    (tmp_path / "b.npz").write_bytes(pickle.dumps(Trap()))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(DataError, match="Pickled objects are rejected because they could run code"):
            describe(str(tmp_path / name))
    assert not (tmp_path / "sprung").exists()


def test_labels_are_no_targets_and_pictures_no_vectors(tmp_path):
    with pytest.raises(DataError, match="contains labels, but the run has 0 classes; use a column 'target'"):
        shard(write_csv(tmp_path / "a", X, Y), (30,), 0)
    with pytest.raises(DataError, match="contains images, which have 1 or 3 channels, but the run expects 30 numbers"):
        shard(write_pictures(tmp_path / "b", X, Y), (30,))
    with pytest.raises(DataError, match="features require images"):
        shard(write_npz(tmp_path / "c", *vectors()), (7,), transform=features("pool2"))


# ---- simulations -----------------------------------------------------------------------------------------------------


def test_what_is_public_of_a_data_set():
    assert facts("own", "1x28x28", 10) == Facts("images", (1, 28, 28), task_of(10))
    assert facts("own", "16", 0) == Facts("vectors", (16,), task_of(0))
    assert facts("digits", "", "none") == Facts("images", (1, 8, 8), task_of(10))
    assert facts("shakespeare", "", "none").kind == "tokens"  # without its files
    for wrong in ("", "28x28", "1x28x", "1x0x28", "-16", "1,28,28"):
        with pytest.raises(DataError, match=f"input-shape = '{wrong}': must be"):
            facts("own", wrong, 10)


def test_a_federation_of_files(tmp_path):
    x, y = images()
    write_npz(tmp_path / "client-0", x[:30], y[:30])
    write_csv(tmp_path / "client-1", x[30:50], y[30:50])
    write_pictures(tmp_path / "client-2", x[50:], y[50:])
    known = facts("own", "1x6x5", 4)
    data = own_federation(str(tmp_path), 3, known, features("pool2"))
    assert (data.clients, data.num_groups, data.num_classes, data.input_shape) == (3, 1, 4, (1, 3, 2))
    assert data.group_of.tolist() == [0, 0, 0]
    shards = [data.shard(i) for i in range(3)]
    assert [s.client_id for s in shards] == [0, 1, 2]
    assert [len(s.y) + len(s.test.y) for s in shards] == [30, 20, 10]
    assert data.shard(1) is shards[1]
    assert own_federation(str(tmp_path), 3, known, features("pool2")) is data
    with pytest.raises(DataError, match="client 3 does not exist; there are 3 clients"):
        data.shard(3)
    missing = r"has no data for client 3 of 4 \(clients = 4\); expected client-3.npz, client-3.csv"
    with pytest.raises(DataError, match=missing):
        own_federation(str(tmp_path), 4, known, None).shard(3)
    with pytest.raises(DataError, match="requires the folder of the clients' data: --data-dir"):
        own_federation(None, 3, known, None)
    with pytest.raises(DataError, match="the run uses text"):
        own_federation(str(tmp_path), 3, facts("shakespeare", "", "none"), None)
    write_npz(tmp_path / "client-1", x, y)
    with pytest.raises(DataError, match=r"client-1\.npz and client-1\.csv; keep one"):
        own_federation(str(tmp_path), 2, known, None).shard(1)
    assert len(own_federation(str(tmp_path), 2, known, None).shard(0).y)  # the other client's are as good as before


# ---- deployed clients: records that do not fit -----------------------------------------------------------------------


def kept(path, num_classes=4, span=None):
    own_shard.cache_clear()
    return read_shard(path, (1, 6, 5), num_classes, span=span, strict=False)


def rows(own):
    """All examples, to train and to test on."""
    return {tuple(each.ravel()) for each in [*own.x, *own.test.x]}


def test_records_that_do_not_fit_are_left_out_and_the_others_stay(tmp_path, caplog):
    path = write_csv(tmp_path / "table", X, Y)
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines[2][1] = "red"
    lines[3][0], lines[4][0], lines[5][0] = "-1", "0.5", "9"
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")
    own = kept(path)
    assert len(rows(own)) == 8
    assert set(own.y) <= {0, 1, 2, 3}
    assert "client 0: 8 usable records: " in caplog.text
    assert f"the first problem is: {path}" in caplog.text
    with pytest.raises(DataError):
        shard(path)
    write_npz(tmp_path / "archive", np.where(np.arange(12)[:, None, None, None] == 1, np.nan, X / 255), Y)
    assert len(rows(kept(tmp_path / "archive.npz"))) == 11


def test_values_out_of_range_are_clamped_record_by_record(tmp_path):
    write_npz(tmp_path / "right", X.astype(int), Y)
    write_npz(tmp_path / "wrong", np.where(np.arange(12)[:, None, None, None] == 0, 300, X.astype(int)), Y)
    right, wrong = kept(tmp_path / "right.npz"), kept(tmp_path / "wrong.npz")
    assert len(rows(right) & rows(wrong)) == 11
    assert max(max(row) for row in rows(wrong)) == 1.0


def test_a_declared_range_clamps_vectors_alone(tmp_path):
    x = np.array([[0.5, -3.0], [7.0, 0.25]], np.float32)
    np.savez(tmp_path / "v.npz", x=x, y=[0, 1], x_test=x, y_test=[0, 1])
    own_shard.cache_clear()
    own = read_shard(tmp_path / "v.npz", (2,), span=(-1.0, 1.0), strict=False)
    np.testing.assert_array_equal(own.x, [[0.5, -1.0], [1.0, 0.25]])


def test_a_row_with_another_number_of_cells_is_left_out_even_if_it_is_alone(tmp_path):
    path = write_csv(tmp_path / "own", X[:1], Y[:1])
    path.write_text(path.read_text().rstrip("\n") + ",7\n")
    assert len(rows(kept(path))) == 0
    with pytest.raises(DataError, match=r"than the 31 column names, 1 record dropped: row 2 \(32 cells\)"):
        shard(path)


def test_a_gap_in_a_parquet_column_changes_no_other_record(tmp_path):
    columns = {f"p{i}": X.reshape(12, 30)[:, i].astype(int).tolist() for i in range(30)} | {"label": Y.tolist()}
    whole = rows(kept(write_parquet(tmp_path / "whole.parquet", columns)))
    gap = rows(kept(write_parquet(tmp_path / "gap.parquet", columns | {"p3": [None, *columns["p3"][1:]]})))
    assert gap < whole
    assert len(whole - gap) == 1


def declared(input_shape, num_classes, value_range=None):
    return Declared.of(None, input_shape, num_classes, value_range)


def test_what_the_owner_declares_is_checked_before_a_run(tmp_path):
    write_npz(tmp_path / "own", X.astype(int), np.where(np.arange(12) == 5, 9, Y))
    assert "1 record left out (1 of class 9)" in describe(str(tmp_path / "own.npz"), declared("1x6x5", 4))
    assert "a label is 9" in describe(str(tmp_path / "own.npz"), declared("1x6x5", 4))
    assert "left out" not in describe(str(tmp_path / "own.npz"), declared("1x6x5", 10))
    with pytest.raises(DataError, match="but the run expects 1x5x5"):
        describe(str(tmp_path / "own.npz"), declared("1x5x5", 10))
    for shape, classes, span in (("1x6", 4, None), ("4", 2, "1"), ("4", 2, "1:1")):
        with pytest.raises(DataError, match="must be"):
            declared(shape, classes, span)


def test_a_run_reads_its_data_once_and_warns_once(coterie, tmp_path, monkeypatch, caplog):
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for client in range(3):
        x, y = 500 * rng.normal(size=(40, 2)).astype(np.float32), rng.integers(0, 2, 40)
        np.savez(tmp_path / "data" / f"client-{client}.npz", x=x, y=y)
    words = ["run", "--dataset", "own", "--data-dir", "data", "--strategy", "fedavg", "--clusters", 1, "--clients", 3]
    words += ["--rounds", 1, "--set", "input-shape=2", "--set", "num-classes=2", "--set", "privacy-unit=none"]
    status, _, err = coterie(*words, "--set", "train-alone=0")
    assert status in (0, 1), err  # such features diverge
    assert "describe the table by a schema" in caplog.text
    assert caplog.text.count("describe the table by a schema") == 1
    caplog.clear()
    monkeypatch.setattr("coterie.datasets.own.parent_process", lambda: "the first process of the run")
    own_federation.cache_clear()
    coterie(*words, "--set", "train-alone=0")
    assert "describe the table by a schema" not in caplog.text
