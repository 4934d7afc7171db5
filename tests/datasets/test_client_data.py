"""Reports on a client's data, and clients with few or no records."""

import csv
import json
import logging
import re
import stat

import numpy as np
import pytest
from kit.commands import assert_refused
from kit.own_files import read_shard, write_parquet, write_pictures
from kit.site_tables import AGE, OUTCOME, label_column, number_column

from coterie.datasets import DataError, Declared, TableSchema, describe, facts, own_federation, own_shard, report
from coterie.datasets.client_data import EmptySiteError, find

SHAPE = (1, 6, 5)
DECLARED = Declared.of(None, "1x6x5", 2, None)
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (40, *SHAPE), np.uint8), np.arange(40) % 2
SCHEMA = "version = 1\n" + OUTCOME + AGE


def table(path, *cells):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "outcome"], *cells])
    return path


@pytest.fixture(autouse=True)
def _fresh():
    own_shard.cache_clear()
    own_federation.cache_clear()


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_of_images(tmp_path):
    write_pictures(tmp_path / "own", X, Y)
    for i in range(30):
        (tmp_path / "own" / "1" / f"{i}.dcm").write_bytes(b"DICM")
    (tmp_path / "own" / "0" / "broken.png").write_bytes(b"no image")
    found = report(tmp_path / "own", DECLARED)
    assert (found.usable, found.classes, found.passes) == (40, {"0": 20, "1": 20}, False)
    assert (found.left_out.records, found.left_out.files, found.left_out.classes) == (1, 30, {"0": 1, "1": 30})
    lines = found.lines()
    assert lines[0].startswith("40 images of 1x6x5, classes 0..1, ")
    assert lines[1].startswith("image that cannot be read, 1 record left out (1 of class 0), such as 0/broken.png")
    assert lines[2].startswith("unsupported file type .dcm, 30 files left out (30 of class 1)")
    assert lines[3].startswith("the first problem is: ")
    assert lines[4] == (
        "warning: losses differ between classes: 30 of 50 of class 1 are left out, and 1 of 21 of class 0; models "
        "learn from what remains"
    )
    assert describe(tmp_path / "own", DECLARED) == "; ".join(lines)
    with pytest.raises(DataError, match="is not a readable image"):
        describe(tmp_path / "own")


def test_a_report_of_a_table_names_classes_and_rules(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    cells = [[i, ["alive", "dead"][i % 2]] for i in range(20)]
    path = table(tmp_path / "t.csv", *cells, [120, "dead"], ["x", "dead"], [5, "Dead"])
    found = report(path, Declared.of(str(tmp_path / "s.toml"), None, None, None))
    assert (found.usable, found.classes, found.left_out.records) == (21, {"alive": 10, "dead": 11}, 2)
    assert [(loss.reason, loss.effect, loss.by_rule) for loss in found.left_out.losses] == [
        ("column 'age': not a number", "left out", False),
        ("column 'age': above 100", "clamped", True),
        ("column 'outcome': not one of its values", "left out", False),
    ]
    assert not found.passes


def test_a_record_with_several_findings_counts_once_by_class(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA + number_column("weight", 70, 9))
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "outcome", "weight"])
        writer.writerows([[40, "alive", 60]] * 10 + [["x", "dead", "y"]] * 6 + [[40, "dead", 80]] * 4)
    found = report(tmp_path / "t.csv", Declared.of(str(tmp_path / "s.toml"), None, None, None))
    assert (found.left_out.records, found.left_out.classes, len(found.left_out.losses)) == (6, {"dead": 6}, 2)
    assert found.warnings == (
        "losses differ between classes: 6 of 10 of class dead are left out, and 0 of 10 of class alive; models learn "
        "from what remains",
    )


def test_what_rules_leave_out_is_no_problem(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA.replace('"dead"]', '"dead"]\nunknown = "drop"'))
    path = table(tmp_path / "t.csv", *[[i, "alive"] for i in range(9)], [5, "lost"], [101, "dead"])
    found = report(path, Declared.of(str(tmp_path / "s.toml"), None, None, None))
    assert (found.usable, found.left_out.records, found.passes) == (10, 1, True)
    assert all(loss.by_rule for loss in found.left_out.losses)
    vectors = tmp_path / "v.npz"
    np.savez(vectors, x=np.array([[0.5], [7.0]]), y=[0, 1])
    found = report(vectors, Declared.of(None, "1", 2, "0:1"))
    clamped = "number out of the declared range 0:1, 1 record clamped by rule (1 of class 1)"
    assert (found.passes, str(found.left_out.losses[0])) == (True, clamped)


def test_no_usable_record_does_not_pass(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA.replace('"dead"]', '"dead"]\nunknown = "drop"'))
    path = table(tmp_path / "t.csv", *[[i, "Alive"] for i in range(114)])
    found = report(path, Declared.of(str(tmp_path / "s.toml"), None, None, None))
    assert (found.usable, found.problems, found.left_out.records, found.passes) == (0, (), 114, False)


def test_a_schema_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "s.toml").write_bytes(SCHEMA.encode("utf-8-sig"))
    assert TableSchema.load(tmp_path / "s.toml").fingerprint == TableSchema.parse(SCHEMA).fingerprint


def test_a_saved_report_is_private(tmp_path):
    found = report(write_pictures(tmp_path / "own", X, Y), DECLARED)
    found.save(tmp_path / "state" / "client-0")
    path = tmp_path / "state" / "client-0" / "data-report.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(path.read_text()) == json.loads(json.dumps(found.to_json()))


# ---- few records -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Rows of records that are held out, and of the others."""
    path, flags = tmp_path_factory.mktemp("small") / "one.npz", []
    for i in range(len(X)):
        np.savez(path, x=X[i : i + 1], y=Y[i : i + 1])
        flags.append(report(path, DECLARED).training == 0)
    return np.flatnonzero(flags), np.flatnonzero(~np.array(flags))


@pytest.mark.parametrize(("tested", "trained"), [(1, 0), (2, 0), (3, 0), (1, 1), (0, 1), (0, 3), (1, 2)])
def test_clients_with_one_to_three_records(small, tmp_path, tested, trained):
    rows = [*small[0][:tested], *small[1][:trained]]
    np.savez(tmp_path / "client-0.npz", x=X[rows], y=Y[rows])
    found = report(tmp_path / "client-0.npz", DECLARED)
    assert (found.usable, found.training, found.passes) == (tested + trained, trained, True)
    shard = own_federation(str(tmp_path), 1, facts("own", "1x6x5", 2), None).shard(0)
    assert (len(shard.y), len(shard.test.y)) == (trained, tested or trained)
    if not trained:
        assert found.warnings == (
            f"all {tested} records are held out; add records or test data: until then, this client contributes nothing",
        )
        with pytest.raises(EmptySiteError, match=f"all {tested} records are held out"):
            read_shard(tmp_path / "client-0.npz", SHAPE)


HEADER = ",".join(["label", *(f"p{i}" for i in range(30))]) + "\n"
EMPTY = {
    "archive": lambda path: np.savez(path.with_suffix(".npz"), x=X[:0], y=Y[:0]),
    "table": lambda path: path.with_suffix(".csv").write_text(HEADER),
    "folders": lambda path: [(path / name).mkdir(parents=True) for name in ("0", "1")],
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_an_empty_site_ends_nobody_s_run(tmp_path, caplog, make):
    make(tmp_path / "client-0")
    np.savez(tmp_path / "client-1.npz", x=X, y=Y)
    clients = own_federation(str(tmp_path), 2, facts("own", "1x6x5", 2), None)
    assert clients.shard(0).x.shape == clients.shard(0).test.x.shape == (0, *SHAPE)
    assert len(clients.shard(0).y) == len(clients.shard(0).test.y) == 0
    assert "client 0 is left out, as it has no training records (1 of 2 clients so far): " in caplog.text
    assert len(clients.shard(1).y)
    assert report(tmp_path / ("client-1.npz"), DECLARED).passes


@pytest.mark.parametrize("names", [(), ("0", "1"), ("0/scan.dcm",)])
def test_a_folder_without_images_ends_no_run_on_vectors(tmp_path, caplog, names):
    for name in ("client-0", *(f"client-0/{name}" for name in names)):
        (tmp_path / name).mkdir(parents=True)
    clients = own_federation(str(tmp_path), 1, facts("own", "4", 2), None)
    assert clients.shard(0).x.shape == clients.shard(0).test.x.shape == (0, 4)
    assert "client 0 is left out, as it has no training records" in caplog.text


def test_an_empty_site_of_many_is_logged_at_every_doubling(tmp_path, caplog):
    for i in range(9):
        EMPTY["table"](tmp_path / f"client-{i}")
    caplog.set_level(logging.WARNING, "flwr")
    clients = own_federation(str(tmp_path), 9, facts("own", "1x6x5", 2), None)
    assert sum(len(clients.shard(i).y) for i in range(9)) == 0
    assert [record.args[1] for record in caplog.records] == [f"{i} of 9 clients so far" for i in (1, 2, 4, 8)]


def alone(path, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: alone(path / "1" / "scan.dcm", b"DICM"), "contains neither images"),
        (lambda path: alone(path / "1" / "scan.png", b"PNG"), r"scan\.png"),
        (lambda path: np.savez(path, x=np.full(X.shape, np.nan), y=Y), "NaN, infinite or missing"),
        (lambda path: np.savez(path, x=X, y=Y + 7), "a label is 8, but the run has 2 classes"),
        (lambda path: path.with_suffix(".csv").write_text(HEADER + "a," * 30 + "a\n"), "column 'p0': not a number"),
    ],
    ids=["type", "image", "gaps", "labels", "words"],
)
def test_a_site_that_loses_all_of_its_records_ends_nobody_s_run(tmp_path, caplog, make, reason):
    make(tmp_path / "client-0")
    np.savez(tmp_path / "client-1.npz", x=X, y=Y)
    clients = own_federation(str(tmp_path), 2, facts("own", "1x6x5", 2), None)
    assert len(clients.shard(0).y) == len(clients.shard(0).test.y) == 0
    log = r"client 0 is left out, as it has no training records .1 of 2 clients so far.: .*"
    assert re.search(log + reason, caplog.text)
    assert len(clients.shard(1).y)
    with pytest.raises(EmptySiteError, match=reason):
        read_shard(find(tmp_path, "client-0"), SHAPE)


def test_a_site_that_loses_all_by_rule_names_the_rule(tmp_path):
    by = TableSchema.parse("version = 1\n" + label_column(0, 1) + number_column("a", 0, 1, 'missing = "drop"'))
    (tmp_path / "a.csv").write_text("a,outcome\n,1\n,0\n")
    reason = "all records are left out; column 'a': missing, 2 records left out by rule"
    with pytest.raises(EmptySiteError, match=reason):
        read_shard(tmp_path / "a.csv", (1,), schema=by)


def test_a_table_that_is_none_is_no_empty_site(tmp_path):
    table(tmp_path / "client-0.csv", ["x", "1"])
    clients = own_federation(str(tmp_path), 1, facts("own", "1x6x5", 2), None)
    with pytest.raises(DataError, match="must have one column named label") as refusal:
        clients.shard(0)
    assert not isinstance(refusal.value, EmptySiteError)


@pytest.mark.parametrize("strict", [True, False])
def test_test_data_without_records_are_replaced_by_the_training_data(tmp_path, strict):
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_test=X[:0], y_test=Y[:0])
    shard = read_shard(tmp_path / "a.npz", SHAPE, strict=strict)
    assert shard.test.x is shard.x
    assert len(shard.y) == 40
    assert report(tmp_path / "a.npz", DECLARED).lines()[0].endswith("none held out, so all are used for testing")


def test_a_simulation_warns_of_files_that_are_left_out(tmp_path, caplog):
    write_pictures(tmp_path / "client-0", X, Y)
    (tmp_path / "client-0" / "1" / "scan.dcm").write_bytes(b"DICM")
    assert len(own_federation(str(tmp_path), 1, facts("own", "1x6x5", 2), None).shard(0).y)
    assert "client 0: 40 usable records: unsupported file type .dcm, 1 file left out (1 of class 1)" in caplog.text


# ---- files of Hugging Face -------------------------------------------------------------------------------------------


def test_a_folder_of_save_to_disk_is_named_with_the_way_out(coterie, tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    for name, files, recipe in (
        ("part", ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"), ".to_parquet('data.parquet')"),
        ("parts", ("dataset_dict.json", "train/state.json"), "['train'].to_parquet('train.parquet')"),
    ):
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).touch()
        message = f"{name} was saved by save_to_disk; for a file that is read, call datasets.load_from_disk("
        for more in ((), ("--schema", "s.toml")):
            assert_refused(coterie("data", "check", name, *more), message, recipe)


def test_images_in_a_parquet_file_are_named_with_the_way_out(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    images = {"age": [{"bytes": b"\x89PNG", "path": "a.png"}]}
    write_parquet(tmp_path / "a.parquet", images | {"label": [0]})
    write_parquet(tmp_path / "b.parquet", images | {"outcome": ["alive"]})
    for name, declared in (("a", DECLARED), ("b", Declared.of(str(tmp_path / "s.toml"), None, None, None))):
        with pytest.raises(DataError, match=f"{name}.parquet: column 'age' holds images; write each one as a file in"):
            report(tmp_path / f"{name}.parquet", declared)
