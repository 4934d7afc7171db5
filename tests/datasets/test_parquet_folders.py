"""Folders of parquet files, partitioned or not: one table, of which nothing is lost or read twice."""

import os

import numpy as np
import pytest
from kit.own_files import write_parquet
from kit.site_tables import category_column, label_column, number_column
from PIL import Image

from coterie.datasets import DataError, Declared, TableSchema, facts, own_federation, read_table, report
from coterie.datasets.client_data import fingerprint, first_columns
from coterie.datasets.local_files import local_records
from coterie.tasks import task_of

pyarrow = pytest.importorskip("pyarrow")

SCHEMA = "version = 1\n" + label_column("no", "yes") + number_column("age")
SCHEMA += category_column("site", ["a", "b c", "d/e"], 'missing = "indicator"')
BY = TableSchema.parse(SCHEMA)


def write(path, **columns):
    return write_parquet(path, columns)


@pytest.fixture
def folder(tmp_path):
    """Four records in three partitions, as Spark writes them."""
    home = tmp_path / "client-0"
    write(home / "site=a" / "part-0.parquet", age=[1, 2], outcome=["no", "yes"])
    write(home / "site=b%20c" / "part-0.parquet", age=[3.0], outcome=["no"])
    write(home / "site=__HIVE_DEFAULT_PARTITION__" / "part-0.parquet", age=[4], outcome=["yes"])
    for name in ("_SUCCESS", "_metadata", "_common_metadata", "._SUCCESS.crc"):
        (home / name).touch()
    return home


def losses(table):
    return [(loss.reason, loss.examples) for loss in table.beside]


def test_partitions_are_columns(folder):
    table = read_table(folder, BY)
    expected = [[4, 0, 0, 0, 1], [1, 1, 0, 0, 0], [2, 1, 0, 0, 0], [3, 0, 1, 0, 0]]
    assert (table.x.tolist(), table.y.tolist(), table.missing) == (expected, [1, 0, 1, 0], {"site": 1})
    assert (table.index.tolist(), table.findings, table.beside) == ([0, 1, 2, 3], (), [])


def test_pyarrow_writes_and_reads_the_same(tmp_path):
    from pyarrow import dataset

    values = {"age": [*range(6)], "site": ["a", "b c", "d/e", "a", None, "d/e"], "outcome": ["no", "yes"] * 3}
    dataset.write_dataset(
        pyarrow.table(values),
        tmp_path / "t",
        format="parquet",
        partitioning=dataset.partitioning(pyarrow.schema([("site", pyarrow.string())]), flavor="hive"),
    )
    theirs = dataset.dataset(tmp_path / "t", partitioning="hive").to_table().to_pylist()
    table = read_table(tmp_path / "t", BY)
    places = [*BY.columns[1].values, None]
    mine = [(x[0], places[int(np.argmax(x[1:]))], ["no", "yes"][int(y)]) for x, y in zip(table.x, table.y, strict=True)]
    assert sorted(mine) == sorted((row["age"], row["site"], row["outcome"]) for row in theirs)


def test_training_and_test_data_may_be_folders(folder, tmp_path):
    home = tmp_path / "client-1"
    home.mkdir()
    folder.rename(home / "train")
    write(home / "test" / "part-0.parquet", age=[9], outcome=["no"], site=["a"])
    found = report(home, Declared("vectors", (5,), task_of(2), BY))
    assert (found.usable, found.training, found.left_out.files) == (5, 4, 0)


def test_a_folder_with_the_suffix_of_a_file(folder, tmp_path):
    folder.rename(tmp_path / "client-0.parquet")
    own_federation.cache_clear()
    shard = own_federation(str(tmp_path), 1, facts("own", "", None, None, SCHEMA), None).shard(0)
    assert len(shard.y) >= 1


def test_files_that_are_not_read_are_counted(folder):
    write(folder / "site=a" / "_part-9.parquet", age=[1], outcome=["no"])
    write(folder / "site=a" / ".part-8.parquet", age=[1], outcome=["no"])
    write(folder / "old" / "part-7.parquet", age=[1], outcome=["no"])
    (folder / "notes.txt").touch()
    table = read_table(folder, BY)
    assert len(table.y) == 4
    assert losses(table) == [
        ("hidden file", ("site=a/.part-8.parquet",)),
        (".parquet file beside the data that are read", ("site=a/_part-9.parquet",)),
        ("unsupported file type .txt", ("notes.txt",)),
        ("in a folder 'old'", ("old/part-7.parquet",)),
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"age": [1]}, "has no column 'outcome', unlike .*site=__HIVE"),
        ({"age": [1], "outcome": ["no"], "crp": [1]}, "has column 'crp', unlike"),
        ({"Age": [1], "outcome": ["no"]}, "has no column 'age' and has column 'Age', unlike"),
        ({"age": ["1"], "outcome": ["no"]}, "has texts in column 'age' in place of numbers, unlike"),
        ({"age": [True], "outcome": ["no"]}, "has bool in column 'age' in place of numbers, unlike"),
        ({"age": [1], "outcome": ["no"], "site": ["a"]}, "has a column 'site', but so has the name of its folder"),
    ],
)
def test_files_with_other_columns_are_named(folder, columns, message):
    write(folder / "site=d%2Fe" / "part-3.parquet", **columns)
    with pytest.raises(DataError, match=f"site=d%2Fe/part-3.parquet {message}"):
        read_table(folder, BY)


def test_other_orders_and_types_of_one_kind_are_read(folder):
    write(folder / "site=d%2Fe" / "a.parquet", outcome=pyarrow.array(["yes"]).dictionary_encode(), age=[5])
    write(folder / "site=d%2Fe" / "b.parquet", outcome=["no"], age=pyarrow.array([None], pyarrow.null()))
    table = read_table(folder, BY)
    assert table.x[-1].tolist() == [5, 0, 0, 1, 0]
    assert [(finding.column, finding.what, finding.rows) for finding in table.findings] == [("age", "missing", [6])]


def test_partitions_in_some_folders_only_are_refused(folder):
    write(folder / "part-0.parquet", age=[1], outcome=["no"])
    with pytest.raises(DataError, match=r"part-0\.parquet has column 'site', unlike"):
        read_table(folder, BY)


def test_a_damaged_file_is_named(folder):
    (folder / "site=a" / "part-1.parquet").touch()
    with pytest.raises(DataError, match=r"site=a/part-1\.parquet is not a valid parquet file"):
        read_table(folder, BY)
    (folder / "site=a" / "part-1.parquet").unlink()
    os.mkfifo(folder / "site=a" / "part-2.parquet")
    with pytest.raises(DataError, match=r"site=a/part-2\.parquet is not a regular file"):
        read_table(folder, BY)


@pytest.mark.parametrize(("log", "name"), [("_delta_log", "Delta Lake"), (".hoodie", "Apache Hudi")])
def test_formats_with_deleted_records_are_refused(folder, log, name):
    (folder / log).mkdir()
    with pytest.raises(DataError, match=f"is a table of {name}, whose files also hold deleted records"):
        read_table(folder, BY)


def test_tables_without_a_schema(tmp_path):
    for stage in (1, 2):
        write(tmp_path / "client-0" / f"stage={stage}" / "a.parquet", label=[0, 1], age=[3.5, 4.5])
    assert first_columns(tmp_path) == "age,stage"
    records = local_records(tmp_path / "client-0", facts("own", "2", 2, None, columns="stage,age"), None)
    assert records.x.tolist() == [[1, 3.5], [1, 4.5], [2, 3.5], [2, 4.5]]
    (tmp_path / "client-0" / "stage=1").rename(tmp_path / "client-0" / "stage=x")
    with pytest.raises(DataError, match="column 'stage': string is not a numeric type"):
        local_records(tmp_path / "client-0", facts("own", "2", 2, None, columns="stage,age"), None)


def test_labels_may_be_partitions_alone(tmp_path):
    for label in (0, 1):
        write(tmp_path / "t" / f"label={label}" / "a.parquet", a=[1, 2])
    assert local_records(tmp_path / "t", facts("own", "1", 2), None).y.tolist() == [0, 0, 1, 1]
    site = SCHEMA[SCHEMA.rindex("[[columns]]") :].replace('"a"', '"0"').replace('"site"', '"label"')
    by = TableSchema.parse(f'version = 1\nignore = ["b"]\n[target]\ncolumn = "a"\n{site}')
    assert read_table(tmp_path / "t", by).errors[0].count == 2
    by = TableSchema.parse(f'version = 1\nignore = ["a"]\n[target]\ncolumn = "b"\n{site}')
    assert read_table(tmp_path / "t", by, labelled=False).x[:, 0].tolist() == [1, 1]


def test_images_beside_a_parquet_file_stay_images(tmp_path):
    (tmp_path / "0").mkdir()
    Image.new("L", (5, 6)).save(tmp_path / "0" / "a.png")
    write(tmp_path / "labels.parquet", a=[1])
    found = report(tmp_path, Declared("images", (1, 6, 5), task_of(2)))
    assert (found.usable, found.left_out.losses[0].reason) == (1, ".parquet file beside the data that are read")


def test_the_size_of_all_files_counts(folder, monkeypatch):
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"client-0 unpacks to .* but the limit is 100"):
        read_table(folder, BY)


def test_a_changed_partition_has_another_fingerprint(folder):
    before = fingerprint(folder)
    (folder / "site=a").rename(folder / "site=d%2Fe")
    assert fingerprint(folder) != before


def test_files_of_several_splits_are_refused(tmp_path):
    for part in ("train", "test"):
        write(tmp_path / "data" / f"{part}-00000-of-00001.parquet", label=[0], age=[1])
    with pytest.raises(DataError, match="data holds test and train; move each into a folder, train and test"):
        report(tmp_path / "data")
    for part in ("train", "test"):
        (tmp_path / "data" / part).mkdir()
        name = f"{part}-00000-of-00001.parquet"
        (tmp_path / "data" / name).rename(tmp_path / "data" / part / name)
    assert report(tmp_path / "data").summary == "1 records of 1 numbers, classes 0..0, 1 more for testing"
