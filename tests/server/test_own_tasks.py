"""Several labels of own archives and image folders, as their users type it."""

import json

import numpy as np
import pytest
from kit.commands import assert_refused, document
from kit.site_tables import rows_of
from kit.tables import for_rows
from PIL import Image

from coterie.datasets import DataError, Declared, describe, facts, report
from coterie.datasets.facts import own_task
from coterie.datasets.local_files import local_records
from coterie.inference import load
from coterie.tasks import multi_label

DECLARED = "--set", "task=multi-label", "--set", "num-classes=2"


def archives(folder, sites=3, n=120):
    for site in range(sites):
        rng = np.random.default_rng(site)
        x = rng.normal(size=(n, 4)).astype(np.float32)
        np.savez(folder / f"client-{site}.npz", x=x, y=(x[:, :2] + 0.3 * rng.normal(size=(n, 2)) > 0).astype(int))


def images(folder, n=60, seed=0, names=("0", "1")):
    """Images whose left and right halves are light or dark, and their list."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    bits = rng.integers(2, size=(n, 2))
    for i, (left, right) in enumerate(bits):
        pixels = rng.integers(60, size=(6, 6)) + 150 * np.repeat([left, right], 3)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    rows = [["file", *names], *([f"{i}.png", *row] for i, row in enumerate(bits))]
    (folder / "labels.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return bits


def run(coterie, shape, *more, sites=3):
    words = ("--set", "dataset=own", "--set", f"input-shape={shape}", *DECLARED, "--data-dir", "sites")
    words += ("--strategy", "fedavg", "--clients", sites, "--set", "model=linear", "--set", "sampling-rate=1.0")
    words += ("--set", "rounds=8", "--set", "lr=0.1", "--seed", "1", "--out", "run", *more)
    return coterie("run", *words)


def score(folder):
    """The least area under the ROC curve of a label."""
    return min(json.loads((folder / "diagnostics.json").read_text())["label_roc_auc"])


@pytest.fixture
def sites(tmp_path):
    (tmp_path / "sites").mkdir()
    return tmp_path / "sites"


# ---- runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_archives(sites, coterie):
    archives(sites)
    status, _, error = run(coterie, 4, "--set", "privacy-unit=none")
    assert status == 0, error
    assert score(sites.parent / "run") > 0.9
    assert load(sites.parent / "run").task == multi_label(2)
    assert coterie("evaluate", "run", sites / "client-0.npz", "--held-out")[0] == 0
    np.savez("new.npz", x=np.load(sites / "client-0.npz")["x"])
    assert coterie("predict", "run", "new.npz", "--out", "p.csv")[0] == 0
    assert [*rows_of(sites.parent / "p.csv")[0]][2:4] == ["prediction_0", "prediction_1"]


def test_a_run_on_image_folders(sites, coterie):
    for site in range(3):
        images(sites / f"client-{site}", seed=site)
    status, _, error = run(coterie, "1x6x6", "--set", "privacy-unit=none")
    assert status == 0, error
    assert score(sites.parent / "run") > 0.9
    (sites / "client-0" / "labels.csv").unlink()
    assert coterie("predict", "run", sites / "client-0", "--out", "p.csv")[0] == 0


def test_a_regression_on_image_folders(sites, coterie):
    for site in range(3):
        bits = images(sites / f"client-{site}", seed=site)
        rows = ["file,target", *(f"{i}.png,{left - 0.5 * right:g}" for i, (left, right) in enumerate(bits))]
        (sites / f"client-{site}" / "labels.csv").write_text("\n".join(rows) + "\n")
    good = (sites / "client-0" / "labels.csv").read_text()
    (sites / "client-0" / "labels.csv").write_text(good + "59.png,warm\n")
    words = ("--set", "task=regression", "--set", "input-shape=1x6x6", "--set", "dataset=own", "--data-dir", "sites")
    words += ("--strategy", "fedavg", "--clients", 3, "--set", "model=linear", "--set", "privacy-unit=none")
    words += ("--rounds", 30, "--set", "lr=0.1", "--seed", 1, "--out", "run")
    status, _, error = coterie("run", *words)
    assert status == 1
    assert "column 'target': not a number, 1 record dropped: row 62 (warm)" in error
    (sites / "client-0" / "labels.csv").write_text(good)
    status, _, error = coterie("run", *words)
    assert status == 0, error
    scores = json.loads((sites.parent / "run" / "diagnostics.json").read_text())
    assert scores["rmse"] < 0.6 * scores["baseline_rmse"]
    assert coterie("predict", "run", sites / "client-1", "--out", "p.csv")[0] == 0


# ---- files ------------------------------------------------------------------------------------------------


def test_test_arrays_are_read_too(tmp_path):
    x, y = np.zeros((30, 4), np.float32), np.tile([[0, 1], [1, 1]], (15, 1))
    declared = Declared.of(None, "4", 2, None, None, "multi-label")
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:10], y_test=y[:10])
    assert "10 more for testing" in describe(tmp_path / "a.npz", declared)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:10])
    with pytest.raises(DataError, match="has no array 'y_test'; its arrays are 'x', 'y', 'x_test'; write"):
        describe(tmp_path / "a.npz", declared)


def test_labels_of_images_have_the_names_of_the_run(tmp_path):
    bits = images(tmp_path / "site", names=("effusion", "nodule"))
    (tmp_path / "site" / "classes.txt").write_text("nodule\neffusion\n")
    declared = Declared.of(None, "1x6x6", 2, None, None, "multi-label")
    known = facts("own", "1x6x6", 2, task="multi-label")
    files = sorted((tmp_path / "site").glob("*.png"))
    order = [int(file.stem) for file in files]
    expected = bits[order][:, ::-1] @ [1, 2]  # by name, in whatever order the list has its columns
    np.testing.assert_array_equal(local_records(tmp_path / "site", known, None).y, expected)
    counts = bits.sum(axis=0)
    assert f"2 labels (nodule {counts[1]}, effusion {counts[0]})" in describe(tmp_path / "site", declared)


def test_one_list_beside_train_and_test(tmp_path):
    images(tmp_path / "site" / "train", n=8)
    images(tmp_path / "site" / "test", n=3, seed=1)
    rows = ["file,0,1"]
    for part in ("train", "test"):
        file = tmp_path / "site" / part / "labels.csv"
        rows += [f"{part}/{line}" for line in file.read_text().splitlines()[1:]]
        file.unlink()
    (tmp_path / "site" / "labels.csv").write_text("\n".join(rows) + "\n")
    stated = report(tmp_path / "site", Declared.of(None, "1x6x6", 2, None, None, "multi-label"))
    assert (stated.usable, stated.training, stated.problems, stated.left_out.losses) == (11, 8, (), ())


def problem(path, declared):
    """What is wrong with data: an error, or the first problem of a report."""
    try:
        return report(path, declared).problems[0]
    except DataError as error:
        return str(error)


# ---- what is wrong ----------------------------------------------------------------------------------------


@for_rows(
    ("arrays", "task", "words"),
    [
        (
            {"y": [[1, 0], [2, 0], [0, 1]]},
            "multi-label",
            "a.npz: x, y: record 1, counted from 0, has 2, 0; labels must",
        ),
        ({"y": [[1, 0, 1]] * 3}, "multi-label", "must have shapes (n, ...) and (n, 2), not (3, 4) and (3, 3)"),
        ({"y": [0, 1, 0]}, "multi-label", "must have shapes (n, ...) and (n, 2), not (3, 4) and (3,)"),
        ({"y": [[1, 0], [0, 0], [0, 1]]}, None, "for several labels of a record set task = multi-label"),
        ({"y": [["a", "b"]] * 3}, "multi-label", "is not a numeric type"),
    ],
)
def test_what_an_archive_must_hold(tmp_path, arrays, task, words):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 4), np.float32), **arrays)
    assert words in problem(tmp_path / "a.npz", Declared.of(None, "4", 2, None, None, task))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [*rows, "x.png,1,0"], "labels.csv: row 10: there is no image 'x.png'; add it, or remove the row"),
        (lambda rows: [*rows, rows[1]], "labels.csv: row 10: '0.png' has a row already; keep one of them"),
        (lambda rows: [*rows, "../0.png,1,0"], "row 10: '../0.png' is no path of an image below the folder"),
        (
            lambda rows: [rows[0], "0.png,7,0", *rows[2:]],
            "labels.csv: column '0': not one of its values, 1 record dropped: row 2 (7); labels must be 0 or 1:",
        ),
        (lambda rows: [rows[0], "0.png,,0", *rows[2:]], "labels.csv: column '0'"),
        (lambda rows: ["file,0,2", *rows[1:]], "labels.csv has no column '1'"),
        (lambda rows: ["image,0,1", *rows[1:]], "labels.csv has no column 'file'"),
    ],
)
def test_what_a_list_must_hold(tmp_path, change, words):
    images(tmp_path / "site", n=8)
    file = tmp_path / "site" / "labels.csv"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")
    assert words in problem(tmp_path / "site", Declared.of(None, "1x6x6", 2, None, None, "multi-label"))


def test_images_without_a_row_are_counted(tmp_path):
    images(tmp_path / "site", n=8)
    file = tmp_path / "site" / "labels.csv"
    file.write_text("\n".join(file.read_text().splitlines()[:-2]) + "\n")
    (tmp_path / "site" / "notes.doc").write_text("x")
    stated = report(tmp_path / "site", Declared.of(None, "1x6x6", 2, None, None, "multi-label"))
    assert stated.usable == 6
    reasons = {loss.reason: loss.count for loss in stated.left_out.losses}
    assert reasons == {"image without a row in labels.csv": 2, "unsupported file type .doc": 1}


def test_a_folder_without_a_list_says_what_to_write(sites, coterie):
    images(sites / "client-0")
    (sites / "client-0" / "labels.csv").unlink()
    answer = run(coterie, "1x6x6", sites=1)
    assert_refused(answer, "client-0 has no labels.csv", "with the columns file,0,1")


def test_a_table_needs_a_schema(sites, coterie):
    (sites / "client-0.csv").write_text("a,b,label\n1,2,0\n")
    answer = run(coterie, 2, "--set", "columns=a,b", sites=1)
    assert_refused(answer, "client-0.csv: a table of 2 labels needs a schema with [labels]: set table-schema")


@for_rows(
    ("name", "classes", "words"),
    [
        ("multi-label", None, "num-classes is missing"),
        ("multi-label", 1, "a multi-label task has 2 to 20 labels, not 1"),
        ("survival", 3, "task = survival was removed"),
    ],
)
def test_a_declaration_that_contradicts_itself(name, classes, words):
    with pytest.raises(DataError, match=words):
        own_task(name, classes)


def test_data_check_takes_the_task(sites, coterie):
    archives(sites, sites=1)
    words = "data", "check", sites / "client-0.npz", "--task", "multi-label"
    status, shown, _ = coterie(*words, "--input-shape", 4, "--num-classes", 2, "--json")
    assert status == 0
    assert "2 labels (0 " in document(shown)["summary"]
    assert_refused(coterie(*words), "--task is for data of a shape: give --input-shape too")
