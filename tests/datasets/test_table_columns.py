"""Tables without a schema: their columns are those of the run, by name, wherever they are read."""

import numpy as np
import pytest
from kit.own_files import read_shard, write_parquet

from coterie.datasets import DataError, Declared, describe, facts, own_federation, own_shard
from coterie.datasets.client_data import first_columns
from coterie.datasets.local_files import local_records
from coterie.datasets.tables import columns_text, parse_columns
from coterie.server import ConfigError, RunConfig

NAMES = ("age", "chol", "bmi")
KNOWN = facts("own", "3", 2, columns="age,chol,bmi")
#: The same four records, as in the second column in other orders.
ORDERS = {
    "equal": "age,chol,bmi,label\n1,2,3,0\n4,5,6,1\n7,8,9,0\n1,1,1,1\n",
    "swapped": "chol,age,bmi,label\n2,1,3,0\n5,4,6,1\n8,7,9,0\n1,1,1,1\n",
    "label first": "label;bmi;chol;age\n0;3;2;1\n1;6;5;4\n0;9;8;7\n1;1;1;1\n",
    "spaces": 'bmi , "age",label, chol\n3,1,0,2\n6,4,1,5\n9,7,0,8\n1,1,1,1\n',
}


def written(path, text):
    path.write_text(text)
    return path


def features(shard):
    rows = np.concatenate([shard.x, shard.test.x]).tolist()
    return sorted(rows)


@pytest.fixture(autouse=True)
def _fresh():
    own_shard.cache_clear()
    own_federation.cache_clear()


@pytest.mark.parametrize("order", ORDERS)
def test_columns_are_aligned_by_their_names(tmp_path, order):
    path = written(tmp_path / "client-0.csv", ORDERS[order])
    expected = [[1, 1, 1], [1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert features(read_shard(path, (3,), columns=NAMES)) == expected
    assert features(own_federation(tmp_path, 1, KNOWN, None).shard(0)) == expected
    read = local_records(path, KNOWN, None)
    assert read.x.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    assert describe(path, Declared.of(None, "3", 2, None, "age,chol,bmi")).startswith("4 records of 3 numbers")


def test_parquet_columns_are_aligned_by_their_names(tmp_path):
    path = write_parquet(tmp_path / "client-0.parquet", {"bmi": [3.0], "age": [1.0], "label": [0], "chol": [2.0]})
    assert local_records(path, KNOWN, None).x.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("age,chol,weight,label", "has no column 'bmi'; the columns of the run are 'age', 'chol', 'bmi'$"),
        ("age,chol,bmi,id,label", "has columns that are not of the run: 'id'; the columns of the run are 'age',"),
        ("age,chol,label", "has no column 'bmi'"),
        ("age,Chol,bmi,label", r"has no column 'chol' \(is it 'Chol'\?\); the columns of the run"),
        ("age,age,chol,bmi,label", "has two columns of one name"),
        (",age,chol,bmi,label", "column 1 has no name, like the index that pandas writes; remove it"),
        ("age,chol,bmi,,label", "column 4 has no name"),
    ],
)
def test_other_names_are_refused(tmp_path, header, message):
    path = written(tmp_path / "client-0.csv", header + "\n" + ",".join(["1"] * len(header.split(","))) + "\n")
    for read in (
        lambda: own_federation(tmp_path, 1, KNOWN, None).shard(0),
        lambda: local_records(path, KNOWN, None),
        lambda: describe(path, Declared.of(None, "3", 2, None, "age,chol,bmi")),
    ):
        with pytest.raises(DataError, match=message):
            read()


def test_names_are_those_of_the_first_client_of_a_simulation(tmp_path):
    settings = {"dataset": "own", "data-dir": str(tmp_path), "num-classes": 2, "model": "linear", "strategy": "fedavg"}
    settings |= {"clients": 3, "clusters": 1, "privacy-unit": "none", "input-shape": "3"}
    for i, order in enumerate(("equal", "swapped", "label first")):
        written(tmp_path / f"client-{i}.csv", ORDERS[order])
    config = RunConfig(settings)
    assert (config.data.columns, config.facts.columns) == ("age,chol,bmi", NAMES)
    assert RunConfig(settings, deployed=True).data.columns == ""
    shards = own_federation(tmp_path, 3, config.facts, None)
    assert features(shards.shard(0)) == features(shards.shard(1)) == features(shards.shard(2))
    assert RunConfig({**settings, "columns": "by-position"}).facts.columns is None
    with pytest.raises(ConfigError, match="columns = 'age,chol,bmi' names 3 features, but input-shape is 4 numbers"):
        RunConfig({**settings, "input-shape": "4"})
    with pytest.raises(ConfigError, match=r"columns = 'a' is for tables of dataset = 'own' without a schema"):
        RunConfig({**settings, "columns": "a", "input-shape": "1x2x2"})


def test_the_first_table_names_the_columns(tmp_path):
    assert first_columns(None) == first_columns(tmp_path) == ""
    (tmp_path / "client-2").mkdir()
    written(tmp_path / "client-2" / "train.csv", 'label,"a, b",ç\n')
    assert first_columns(tmp_path) == '"a, b",ç'
    np.savez(tmp_path / "client-1.npz", x=np.zeros((2, 2)), y=[0, 1])
    assert first_columns(tmp_path) == ""
    written(tmp_path / "client-0.csv", "a,b\n")  # no label
    assert first_columns(tmp_path) == ""


def test_a_table_whose_names_cannot_be_compared_is_refused(tmp_path):
    path = written(tmp_path / "client-0.csv", ORDERS["equal"])
    unknown = facts("own", "3", 2)
    with pytest.raises(DataError, match="the run names none to compare: set columns = 'age,chol,bmi' or 'by-position'"):
        own_federation(tmp_path, 1, unknown, None).shard(0)
    by_position = facts("own", "3", 2, columns="by-position")
    assert len(features(own_federation(tmp_path, 1, by_position, None).shard(0))) == 4
    assert local_records(path, by_position, None).x.shape == (4, 3)
    written(path, "0.5,1.5,2.5\n1,2,3\n")
    with pytest.raises(DataError, match="its first line holds numbers; expected column names"):
        local_records(path, by_position, None)
    written(path, "0,1,2\n1,2,3\n")  # names of columns that have none in pandas
    assert local_records(path, by_position, None).x.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("line", ["1,10,3", "0,1,1", "1,1,0", "2,7,9", "0,1,3", "1.0,2.5,3", "-1,0,1"])
def test_a_record_is_no_line_of_names(tmp_path, line):
    path = written(tmp_path / "f.csv", f"{line}\n1,2,3\n")
    with pytest.raises(DataError, match="its first line holds numbers; expected column names"):
        local_records(path, facts("own", "3", 2, columns="by-position"), None)


@pytest.mark.parametrize("names", ["0,1,2", "1,2,3", "2,0,1", "2,7,9"])
def test_numbers_may_be_names(tmp_path, names):
    path = written(tmp_path / "f.csv", f"{names}\n1,2,3\n")
    assert len(local_records(path, facts("own", "3", 2, columns=names), None).x) == 1


def test_what_the_owner_declares_counts():
    assert Declared.of(None, "3", 2, None).columns == ()
    assert Declared.of(None, "3", 2, None, "by-position").columns is None
    assert str(Declared.of(None, "3", 2, None, "a,b,c")) == "examples of 3 with 2 classes and columns a,b,c"
    with pytest.raises(DataError, match="columns = 'a,b' names 2 features, but input-shape is 3 numbers"):
        Declared.of(None, "3", 2, None, "a,b")


def test_names_as_text():
    for names in (("a", "b"), ("a, b", 'say "c"'), ("é",)):
        assert parse_columns(columns_text(names)) == names
    assert (parse_columns(""), parse_columns("by-position"), parse_columns("a, e\u0301")) == ((), None, ("a", "é"))
    for wrong in ("a,a", "a,,b", 'a,"b', ","):
        with pytest.raises(DataError, match="columns = "):
            parse_columns(wrong)


@pytest.mark.parametrize("name", ["Unnamed: 0", "index", "patient_id", "Case ID", "id", "MRN", "row"])
def test_indices_and_identifiers_are_named(tmp_path, caplog, name):
    rows = "".join(f"{i},{i % 3},{i % 2}\n" for i in range(30))
    path = written(tmp_path / "t.csv", f"{name},age,label\n{rows}")
    assert f"column '{name}' looks like an index (its values count up), and is a feature" in describe(path)
    read_shard(path, (2,))
    assert "client 0: " in caplog.text
    assert "looks like an index" in caplog.text
    squares = "".join(f"{i * i},{i % 3},{i % 2}\n" for i in range(30))
    other = written(tmp_path / "o.csv", f"{name},age,label\n{squares}")
    assert ("looks like an identifier" in describe(other)) == (name != "row")
    assert "looks like" not in describe(written(path, f"age,bmi,label\n{squares}"))
