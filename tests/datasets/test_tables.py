"""Tables by a schema: rules of columns, files as spreadsheets write them, and records that stay apart."""

import tracemalloc

import numpy as np
import pytest
from kit.own_files import read_shard, write_parquet
from kit.site_tables import AGE, OUTCOME, SEX
from kit.tables import for_rows

from coterie.cli.drafts import draft
from coterie.datasets import DataError, TableSchema, own_shard, read_table
from coterie.datasets.table_cells import Notation
from coterie.datasets.tables import unscaled

SCHEMA = '\nversion = 1\nignore = ["id"]\n' + OUTCOME + AGE + 'missing = "mean"\n' + SEX
HEADER = "id,age,sex,outcome"


def schema(*changes):
    text = SCHEMA
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return TableSchema.parse(text)


def rule(text):
    """A schema with a rule for missing ages."""
    return schema(('missing = "mean"', text))


def written(path, *lines, header=HEADER, encoding="utf-8"):
    path.write_bytes("\n".join([header, *lines, ""]).encode(encoding))
    return path


@pytest.fixture
def table(tmp_path):
    """Reads lines by a schema."""

    def read(*lines, by=None, header=HEADER, encoding="utf-8", **options):
        return read_table(
            written(tmp_path / "t.csv", *lines, header=header, encoding=encoding), by or schema(), **options
        )

    return read


def found(read):
    """Column, what, effect, whether the schema expects it, and rows of all findings."""
    return [(each.column, each.what, each.effect, each.expected, each.rows) for each in read.findings]


def test_numbers_are_scaled_and_categories_are_one_hot_in_the_order_of_the_schema(table):
    read = table("dead,m,70,1", "alive, f ,45.5,2", header="outcome,sex,age,id")
    np.testing.assert_allclose(read.x, [[2, 0, 1], [-0.45, 1, 0]])
    assert (read.x.dtype, read.y.tolist(), read.index.tolist(), read.records) == (np.float32, [1, 0], [0, 1], 2)
    assert (read.findings, read.missing, read.labelled) == ((), {}, True)


def test_numbers_out_of_the_declared_range_are_clamped_and_counted(table):
    read = table("1,200,f,dead", "2,-1,f,dead", "3,100,f,dead", "4,1e300,f,dead")
    assert read.x[:, 0].tolist() == [5, -5, 5, 5]
    assert found(read) == [("age", "above 100", "clamped", True, [2, 5]), ("age", "below 0", "clamped", True, [3])]
    assert str(read.findings[0]) == "column 'age': above 100, 2 records clamped: row 2 (200), 5 (1e300)"


@pytest.mark.parametrize(
    ("missing", "age", "expected"),
    [
        ('missing = "mean"', [0], True),
        ("missing = {value = 40}", [-1], True),
        ('missing = "indicator"', [0, 1], True),
        ('missing = "drop"', None, True),
        ("", None, False),
    ],
)
@pytest.mark.parametrize("cell", ["", "NA", " ", "?"])
def test_rules_for_missing_numbers(table, cell, missing, age, expected):
    read = table(f"1,{cell},f,dead", "2,60,m,dead", by=rule(missing))
    assert read.missing["age"] == 1
    others = [1, *([0] if "indicator" in missing else []), 0, 1]
    assert read.x.tolist() == [*([[*age, 1, 0]] if age else []), others]
    assert found(read) == ([] if age else [("age", "missing", "dropped", expected, [2])])
    assert [each.column for each in read.errors] == ([] if expected else ["age"])


@pytest.mark.parametrize(
    ("rules", "empty", "other"),
    [
        ('missing = {value = "m"}\nunknown = "ignore"', [0, 1], [0, 0]),
        ('missing = "indicator"\nunknown = "indicator"', [0, 0, 0, 1], [0, 0, 1, 0]),
        ('missing = "indicator"\nunknown = "drop"', [0, 0, 1], None),
        ("", None, None),
    ],
)
def test_rules_for_missing_and_unknown_categories(table, rules, empty, other):
    by = schema(('values = ["f", "m"]', f'values = ["f", "m"]\n{rules}'))
    read = table("1,50,,dead", "2,50,x,dead", by=by)
    assert read.x[:, 1:].tolist() == [each for each in (empty, other) if each]
    assert len(read.errors) == (2 if not rules else 0)


def test_a_value_of_a_category_is_no_missing_value(table):
    by = schema(('["f", "m"]', '["None", "NA"]'))
    assert table("1,50,None,dead", "2,50,NA,dead", by=by).x[:, 1:].tolist() == [[1, 0], [0, 1]]


def test_codes_of_missing_values(table):
    codes = rule('missing = "indicator"\nmissing-values = [-9, "n/k"]')
    read = table("1,-9,f,dead", "2,n/k,f,dead", "3,-8,f,dead", by=codes)
    assert read.x[:, :2].tolist() == [[0, 1], [0, 1], [-5, 0]]
    assert table("1,-9,f,dead", "3,-8,f,dead", by=codes).x[:, :2].tolist() == [[0, 1], [-5, 0]]
    everywhere = TableSchema.parse(SCHEMA + '[file]\nmissing-values = ["", "-9"]')
    assert table("1,-9,f,dead", "2,NA,f,dead", by=everywhere).x[:, 0].tolist() == [0]


@pytest.mark.parametrize("cell", ["abc", "1_0", "nan?", "inf", "-Infinity", "1e999", "0x10", "١٢", "5 0", "<5", "12,5"])
def test_what_is_no_number_is_an_error(table, cell):
    read = table(f'1,"{cell}",f,dead', "2,60,m,dead")
    assert read.index.tolist() == [1]
    ((column, what, *rest),) = found(read)
    assert (column, rest) == ("age", ["dropped", False, [2]])
    assert what == "not a number"
    hints = {"12,5": '"12,5" would be 12.5 with decimal = ","', "<5": '"<5" would be 5 with censored = "limit"'}
    assert read.findings[0].hint == hints.get(cell, "")


def test_labels_by_name_and_other_labels(table):
    read = table("1,50,f,dead", "2,50,f,lost", "3,50,f,", "4,50,f,alive")
    assert read.y.tolist() == [1, 0]
    assert [each[:2] for each in found(read)] == [("outcome", "not one of its values"), ("outcome", "missing")]
    by = schema(('["alive", "dead"]', '["alive", "dead"]\nmissing = "drop"\nunknown = "drop"'))
    assert table("2,50,f,lost", "3,50,f,", "4,50,f,alive", by=by).errors == ()


def test_whole_numbers_as_labels_may_have_a_fraction_of_zero(table):
    by = schema(('["alive", "dead"]', "[0, 1]"))
    assert table("1,50,f,1", "2,50,f,0.0", "3,50,f,1.00", by=by).y.tolist() == [1, 0, 1]
    assert len(table("1,50,f,1.5", "2,50,f,.0", by=by).errors[0].rows) == 2


def test_real_targets(table):
    by = schema(
        ('[label]\ncolumn = "outcome"\nclasses = ["alive", "dead"]', '[target]\ncolumn = "outcome"\nscale = 1e3')
    )
    read = table("1,50,f,2500", "2,50,f,x", "3,50,f,", by=by)
    assert read.y.tolist() == [2.5]
    assert [each.what for each in read.errors] == ["not a number", "missing"]


def test_a_table_without_labels(table):
    assert table("1,70,f", header="id,age,sex", labelled=False).x.tolist() == [[2, 1, 0]]
    assert table("1,70,f,lost", labelled=False).y.tolist() == [0]
    assert not table("1,70,f", header="id,age,sex", labelled=None).labelled
    assert table("1,70,f,dead", labelled=None).y.tolist() == [1]
    with pytest.raises(DataError, match="has no column 'outcome'"):
        table("1,70,f", header="id,age,sex")


# ---- files as they are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_delimiter_mark_and_line_ends_are_found(tmp_path, delimiter, mark, end):
    lines = ["id,age,sex,outcome", '"a","70","m","dead"', "", "  ", ",,,", "b, 45 ,f, alive "]
    (tmp_path / "t.csv").write_bytes((mark + end.join(lines) + end).replace(",", delimiter).encode())
    read = read_table(tmp_path / "t.csv", schema())
    assert (read.x[:, 0].tolist(), read.records, read.errors) == ([2, -0.5], 2, ())
    assert read.index.tolist() == [0, 1]


NAMED = r"or give its name in \[file.columns\]"


@for_rows(
    ("header", "message"),
    [
        ("id,Age,sex,outcome", rf"has no column 'age' \(is it 'Age'\?\); rename or add it, {NAMED}$"),
        ("id,sex", r"has no column 'age', 'outcome'; rename or add each, or give its name in \[file.columns\]"),
        ("id,aeg,sex,outcom", r"has no column 'age' \(is it 'aeg'\?\), 'outcome' \(is it 'outcom'\?\); rename"),
        ("ID,AGE,SEX,OUTCOME", r"column 'age' \(is it 'AGE'\?\), 'sex' \(is it 'SEX'\?\), 'outcome' \(is it 'OUTCOME'"),
        ("id,age,sex,x", rf"has no column 'outcome'; rename or add it, {NAMED}$"),
        ("id,sex,outcome", rf"has no column 'age'; .*, {NAMED}, or declare it absent there$"),
        ("id,age,sex,outcome,x,y", "does not name: 'x', 'y'; add them to ignore$"),
        ("id,age,age,sex,outcome", "has two columns 'age'; rename or remove one$"),
        (
            "id:age:sex:outcome",
            "'id:age:sex:outcome'; expected column names in utf-8; separate its cells by comma, sem",
        ),
        (
            "\ufffdge,id,sex,outcome",
            "no column 'age': its first line is .* set encoding in .file., such as 'cp1252' or",
        ),
        ("1,2,3,4", "its first line is '1,2,3,4'; expected column names in utf-8"),
        ("", "expected column names"),
    ],
)
def test_columns_must_match_the_schema(table, header, message):
    with pytest.raises(DataError, match=message):
        table("1,2,3,4", header=header)


def test_columns_that_are_not_read_may_have_any_name_or_none(table):
    any_other = schema(('["id"]', '"others"'))
    assert table("1,50,f,dead,7", header=f"{HEADER},x", by=any_other).records == 1
    assert table("0,1,50,f,dead", header=f",{HEADER}").records == 1  # the index that pandas writes


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "t.csv").mkdir()
    for name, message in (("t.txt", "a schema is for tables"), ("a.csv", "does not exist"), ("t.csv", "not a regular")):
        with pytest.raises(DataError, match=message):
            read_table(tmp_path / name, schema())


def test_parquet_is_the_same_table(tmp_path, table):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    by = schema(('["alive", "dead"]', "[0, 1]"), ('["f", "m"]', '["f", "m"]\nmissing = {value = "m"}'))
    expected = table("1,70,m,1", "2,,f,0", "3,45.5,,1", by=by)
    columns = {"id": ["a", "b", "c"], "age": [70, None, 45.5], "sex": ["m", "f", None], "outcome": [1, 0, 1]}
    forms = [
        columns,
        columns | {"age": ["70", None, "45.5"], "outcome": ["1", "0", "1"]},
        columns | {"outcome": [1.0, 0.0, 1.0], "sex": pyarrow.array(["m", "f", None]).dictionary_encode()},
    ]
    for form in forms:
        read = read_table(write_parquet(path, form), by)
        np.testing.assert_array_equal(read.x, expected.x)
        assert (read.y.tolist(), read.index.tolist(), read.missing) == ([1, 0, 1], [0, 1, 2], expected.missing)
    assert read_table(write_parquet(path, {**columns, "age": [b"x"] * 3}), by).errors[0].count == 3
    with pytest.raises(DataError, match="column 'sex' holds struct<a: int64>; expected numbers or texts"):
        read_table(write_parquet(path, {**columns, "sex": [{"a": 1}] * 3}), by)


@pytest.mark.slow
def test_a_text_that_a_parquet_file_repeats_takes_its_memory_once(tmp_path):
    columns = {"age": [50] * 400, "sex": ["x" * 2**20] * 400, "outcome": ["dead"] * 400}
    path = write_parquet(tmp_path / "t.parquet", columns)
    tracemalloc.start()
    read = read_table(path, schema())
    assert (len(read.y), read.errors[0].count) == (0, 400)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


# ---- records stay apart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2,60,f", "another number of cells than the 4 column names"),
        ("2,60,f,alive,", "another number of cells than the 4 column names"),
        ('2,60,"f\nm",alive', "not one of its values"),
    ],
)
def test_a_damaged_record_changes_no_other(table, line, what):
    read = table("1,70,m,dead", line, "3,50,f,alive")
    assert read.x.tolist() == [[2, 0, 1], [0, 1, 0]]
    assert ([each.what for each in read.errors], read.index.tolist()) == ([what], [0, 2])


def test_chunks_are_put_together(table, monkeypatch):
    monkeypatch.setattr("coterie.datasets.table_encoder._CHUNK_FEATURES", 7)  # two records
    lines = [f"{i},{i},f,{'dead' if i % 3 else 'lost'}" for i in range(1, 30)]
    read = table(*lines)
    assert read.index.tolist() == [i - 1 for i in range(1, 30) if i % 3]
    assert read.x[:, 0].tolist() == pytest.approx([(i - 50) / 10 for i in range(1, 30) if i % 3])
    assert (read.records, read.findings[0].count) == (29, 9)


def test_limits_of_size(table, monkeypatch):
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", 20)
    with pytest.raises(DataError, match="the limit is 5; reduce its size"):
        table("1,70,m,dead")
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", 300)
    by = schema(('["f", "m"]', str([*"abcdefghijklmnopqrstuvwxyz"])))
    with pytest.raises(DataError, match="has features of 324 bytes"):
        table(*["1,70,m,dead"] * 3, by=by)


def test_a_record_is_encoded_from_its_own_cells_alone(table):
    rng = np.random.default_rng(0)
    cells = ["", "NA", "12", "-3", "999", "abc", "f", "m", "x", '"x"', "dead", "alive", "0.5", "1;5"]
    lines = [",".join(rng.choice(cells, 4)) for _ in range(300)]
    lines += [f"{i},{rng.normal(50, 60):.3f},{rng.choice(['f', 'm'])},dead" for i in range(100)]
    together = table(*lines)
    by_row = dict(zip(together.index.tolist(), together.x.tolist(), strict=True))
    assert 100 <= len(by_row) < 400
    for row in rng.choice(len(lines), 60, replace=False):
        alone = table(lines[row])
        assert alone.x.tolist() == ([by_row[row]] if row in by_row else [])


def test_all_numbers_at_once_are_the_numbers_one_by_one():
    rng = np.random.default_rng(1)
    kinds = ["1", " 2.5 ", "-3e5", "1,5", ".5", "5.", "+7", "1_0", "nan", "inf", "", "x", "١", "1\n", "1e400"]
    for decimal in ".,":
        for _ in range(300):
            cells = rng.choice(kinds, rng.integers(1, 4)).tolist()
            notation = Notation(decimal)
            each, at_once = [notation.number(cell) for cell in cells], notation.numbers_at_once(cells)
            assert (at_once is None) or at_once.tolist() == each
        assert Notation(decimal).numbers_at_once(["1", " 2 "]) is not None
    assert Notation().numbers_at_once([1, 2.5]).tolist() == [1, 2.5]
    for mixed in ([True, 1], [None, 1.0], ["1", 1], [b"1"]):
        assert Notation().numbers_at_once(mixed) is None


# ---- clients ---------------------------------------------------------------------------------------------------------


def shard(path, by, **options):
    own_shard.cache_clear()
    return read_shard(path, (by.num_features,), by.num_classes, schema=by, **options)


def test_a_client_s_table_is_its_shard(tmp_path, caplog):
    lines = [f"{i},{i % 130},{'fm'[i % 2]},{['alive', 'dead'][i % 2]}" for i in range(200)]
    by, path = schema(), written(tmp_path / "t.csv", *lines)
    caplog.set_level("INFO", "flwr")
    own = shard(path, by)
    assert (own.x.dtype, own.y.dtype, own.x.shape[1:]) == (np.float32, np.int64, (3,))
    assert (len(own.y) + len(own.test.y), 20 < len(own.test.y) < 60) == (200, True)
    assert "client 0: by the rules of the schema: column 'age': above 100, 29 records clamped" in caplog.text
    (tmp_path / "both").mkdir()
    written(tmp_path / "both" / "train.csv", *lines)
    written(tmp_path / "both" / "test.csv", lines[0])
    assert [len(part.y) for part in (shard(tmp_path / "both", by), shard(tmp_path / "both", by).test)] == [200, 1]
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=[0, 1])
    with pytest.raises(DataError, match=r"unsupported file type \.npz; supported data: \.csv, \.parquet"):
        shard(tmp_path / "a.npz", by)


def test_a_simulation_rejects_errors_and_a_deployed_client_leaves_them_out(tmp_path, caplog):
    lines = [f"{i},{i},f,dead" for i in range(50)]
    path = written(tmp_path / "t.csv", *lines, "50,abc,f,dead", "51,60,x,dead")
    words = r"t.csv: column 'age': not a number, 1 record dropped: row 52 \(abc\) \(2 kinds of errors\);"
    with pytest.raises(DataError, match=f"{words} `coterie data check` lists all"):
        shard(path, schema())
    own = shard(path, schema(), strict=False)
    assert len(own.y) + len(own.test.y) == 50
    assert "the first problem is: " in caplog.text
    empty = shard(written(tmp_path / "e.csv"), schema(), strict=False)
    assert (empty.x.shape, len(empty.test.y)) == ((0, 3), 0)
    with pytest.raises(DataError, match=r"e\.csv: no records"):
        shard(tmp_path / "e.csv", schema())


def test_data_that_are_plainly_not_scaled():
    x, y = np.ones((4, 2), np.float32), np.arange(4) % 2
    assert unscaled(x, y) == unscaled(x[:0], y[:0]) == ""
    assert "feature 1, counted from 0, reaches 255;" in unscaled(x * [1, -255], y)
    assert "feature 'age' reaches 99;" in unscaled(x * [99, 1], y, schema())
    assert "the target reaches 1e+05" in unscaled(x, np.array([0.0, 1e5], np.float32))
    assert unscaled(x, np.array([0.0, 1e5]), schema()) == ""  # labels


def test_a_draft_holds_names_and_no_numbers(tmp_path):
    path = written(tmp_path / "t.csv", "P 1;77,25;f;dead", header='id;"age ""now""";sex;outcome')
    text = draft(path, "outcome")
    assert "77" not in text
    assert "P 1" not in text
    with pytest.raises(DataError, match=r"""classes = .*column 'age "now"': mean is missing"""):
        TableSchema.parse(text)
    complete = text.replace('# classes = ["...", "..."]', 'classes = ["a", "b"]')
    complete = complete.replace("# mean =  ", "mean = 1").replace("# scale =", "scale = 2")
    loaded = TableSchema.parse(complete)
    assert (loaded.feature_names, loaded.ignore, loaded.file.decimal) == (('age "now"', "sex"), ("id",), ",")
    with pytest.raises(DataError, match="has no column 'label'; its columns are 'id', 'age \"now\"', 'sex', 'outcome'"):
        draft(path, "label")
