"""Excel and OpenDocument tables: the values that their owner sees, or an error or a count of what is not one."""

import zipfile
from datetime import date

import numpy as np
import pytest
from kit.own_files import read_shard
from kit.site_tables import category_column, label_column, number_column
from kit.workbooks import XLS, Raw, write_ods, write_xlsb, write_xlsx

from coterie.datasets import DataError, Declared, TableSchema, binary_tables, describe, read_table
from coterie.tasks import task_of

pytest.importorskip("python_calamine")

SCHEMA = 'version = 1\nignore = ["note"]\n' + label_column("no", "yes") + number_column("age", 0, 1, 'missing = "mean"')
SCHEMA += category_column("sex", ["f", "m"], 'unknown = "ignore"')
HEAD = ["age", "sex", "outcome"]
ROWS = [[70, "m", "yes"], [45.5, "f", "no"], [60, "f", "yes"]]


def schema(file="", old="", new=""):
    text = SCHEMA.replace(old, new) if old else SCHEMA
    return TableSchema.parse(f"{text}[file]\n{file}\n" if file else text)


@pytest.fixture
def workbook(tmp_path):
    """Writes rows as the first sheet, and returns the path."""

    def write(rows=ROWS, head=HEAD, others=None, **options):
        sheets = {"Sheet": [*([head] if head else []), *rows], **(others or {})}
        return write_xlsx(tmp_path / "t.xlsx", sheets, **options)

    return write


def sheet_part(old, new):
    return lambda name, content: content.replace(old, new) if name == "xl/worksheets/sheet1.xml" else content


def found(table):
    return [(finding.column, finding.what, finding.effect, finding.rows) for finding in table.findings]


def test_a_workbook_is_the_same_table_as_text(workbook, tmp_path):
    (tmp_path / "t.csv").write_text("age,sex,outcome\n70,m,yes\n45.5,f,no\n60,f,yes\n")
    expected = read_table(tmp_path / "t.csv", schema())
    rows = [HEAD, *ROWS]
    for path in (workbook(), write_ods(tmp_path / "t.ods", rows), write_xlsb(tmp_path / "t.xlsb", rows)):
        table = read_table(path, schema())
        np.testing.assert_array_equal(table.x, expected.x)
        np.testing.assert_array_equal(table.y, expected.y)
        assert (table.records, table.findings, table.beside) == (3, (), [])


def test_an_xls_file_is_read(tmp_path):
    (tmp_path / "t.xls").write_bytes(XLS)
    table = read_table(tmp_path / "t.xls", schema())
    assert (table.x.tolist(), table.y.tolist(), table.findings) == ([[70, 0, 1], [45.5, 1, 0]], [1, 0], ())


def test_rows_before_and_between_records_count_as_in_the_sheet(workbook):
    path = workbook([["Ward A"], [], HEAD, ["years", "-", "-"], *ROWS[:2], [None, "  "], ["x", "f", "no"]], head=None)
    table = read_table(path, schema("skip-lines = [1, 4]"))
    assert (table.records, table.index.tolist()) == (3, [0, 1])
    assert found(table) == [("age", "not a number", "dropped", [8])]
    assert str(table.findings[0]).endswith("row 8 (x)")


def test_a_title_above_the_names_is_named(workbook):
    with pytest.raises(DataError, match=r"its first line is 'Ward A'; .* line 3 has them; set skip-lines = 2 in"):
        read_table(workbook([["Ward A"], [], HEAD, *ROWS], head=None), schema())


def test_columns_before_the_names_have_no_names(workbook):
    assert len(read_table(workbook([[None, *row] for row in ROWS], head=[None, *HEAD]), schema()).y) == 3


def test_cells_beyond_the_names_and_short_rows(workbook):
    table = read_table(workbook([[70, "m", "yes", "and more"], [50], *ROWS]), schema())
    missing = [(column, "missing", "dropped", [3]) for column in ("sex", "outcome")]
    assert found(table) == [("", "cells beyond the 3 column names", "dropped", [2]), *missing]
    assert (table.records, table.index.tolist()) == (5, [2, 3, 4])


def test_more_records_than_a_batch_keep_their_numbers(workbook, monkeypatch):
    monkeypatch.setattr(binary_tables, "_ROWS", 2)
    table = read_table(workbook([*ROWS, ["x", "f", "no"], *ROWS]), schema())
    assert (table.index.tolist(), table.errors[0].rows) == ([0, 1, 2, 4, 5, 6], [5])


@pytest.mark.parametrize("block", [2**20, 300])
@pytest.mark.parametrize(
    "cell",
    [
        *('<c t="e"><v>#REF!</v></c>', "<c><f>1+1</f><v></v></c>", "<c><f>1+1</f><v /></c>"),
        *("<c><f>1+1</f></c>", '<c><f t="shared" si="0"/></c>'),
    ],
)
def test_cells_without_a_value_are_missing_and_counted(workbook, monkeypatch, cell, block):
    monkeypatch.setattr(binary_tables, "_BLOCK", block)
    path = workbook([*ROWS, [Raw(cell), "f", "no"], [Raw(cell), Raw(cell), "no"]])
    table = read_table(path, schema())
    assert (table.missing, found(table)) == ({"age": 2, "sex": 1}, [("sex", "missing", "dropped", [6])])
    assert [str(loss) for loss in table.beside] == [
        "cell with an error such as #REF!, or a formula without a saved value, 3 cells read as missing"
    ]


def test_a_formula_has_its_saved_value(workbook):
    table = read_table(workbook([[Raw("<c><f>1+1</f><v>71</v></c>"), "m", "yes"]]), schema())
    assert (table.x[:, 0].tolist(), table.beside) == ([71], [])


def test_dates_are_no_numbers(workbook):
    rows = [[date(2020, 1, 2), "f", "no"], [40, date(2020, 3, 4), "yes"], *ROWS]
    table = read_table(workbook(rows), schema("", '"ignore"', '"error"'))
    assert [str(finding) for finding in table.errors] == [
        "column 'age': not a number, 1 record dropped: row 2 (2020-01-02)",
        "column 'sex': not one of its values, 1 record dropped: row 3 (2020-03-04)",
    ]


def test_booleans_and_whole_numbers_are_categories(workbook):
    by = schema("", '["f", "m"]\nunknown = "ignore"', '["true", "false"]').at_site("t")
    assert read_table(workbook([[1, True, "no"], [2, False, "no"]]), by).x[:, 1:].tolist() == [[1, 0], [0, 1]]
    by = schema("", '["f", "m"]\nunknown = "ignore"', '["1", "2"]')
    assert read_table(workbook([[1, 2, "no"], [2, 1.0, "no"]]), by).x[:, 1:].tolist() == [[0, 1], [1, 0]]


def test_merged_cells_are_not_missing_values(workbook):
    rows = [[70, "m", "yes"], [None, "f", "no"], [None, "f", "yes"], [5, "f", "no"]]
    table = read_table(workbook(rows, more='<mergeCells><mergeCell ref="A2:A4"/></mergeCells>'), schema())
    assert found(table) == [("age", "part of merged cells", "dropped", [3, 4])]
    assert (table.x[:, 0].tolist(), table.findings[0].values) == ([70, 5], ["row 2", "row 2"])
    many = "".join(f'<mergeCell ref="A{i}:A{i + 1}"/>' for i in range(2, 2004, 2))
    with pytest.raises(DataError, match="sheet 'Sheet' has 1,001 ranges of merged cells; unmerge them"):
        read_table(workbook(rows, more=f"<mergeCells>{many}</mergeCells>"), schema())


def test_an_other_sheet_is_counted(workbook):
    others = {"ward b": [HEAD, [1, "f", "no"]], "empty": [], "codes": [["f", "female"]], "blanks": [[" "]]}
    path = workbook(others=others)
    table = read_table(path, schema())
    assert (len(table.y), [loss.examples for loss in table.beside]) == (3, [("ward b",), ("codes",)])
    known = Declared("vectors", (3,), task_of(2), schema())
    assert "sheets beside 'Sheet', which is read, 2 sheets left out, such as ward b, codes" in describe(path, known)
    assert len(read_table(path, schema('sheet = "ward b"')).y) == 1
    with pytest.raises(DataError, match="has no sheet 'ward c'; its sheets are 'Sheet', 'ward b'"):
        read_table(path, schema('sheet = "ward c"'))


def test_the_first_visible_sheet_is_read(workbook):
    path = workbook([["x", "y", "z"]], others={"shown": [HEAD, *ROWS[:2]]}, hidden=["Sheet"])
    table = read_table(path, schema())
    assert (len(table.y), table.beside[0].examples) == (2, ("Sheet",))
    with pytest.raises(DataError, match="has no visible sheet; name one by the key sheet"):
        read_table(workbook(hidden=["Sheet"]), schema())


def test_wrong_dimensions_lose_no_row(workbook):
    parts = sheet_part("<sheetData>", '<dimension ref="A1:B2"/><sheetData>')
    assert len(read_table(workbook(change=parts), schema()).y) == 3


def test_tables_without_a_schema(workbook):
    path = workbook([[1, 2, 0], [3, 4, 1], [5, 6, 1]], head=["b", "a", "label"])
    shard = read_shard(path, (2,), columns=("a", "b"))
    records = {*map(tuple, np.concatenate([shard.x, shard.test.x]).tolist())}
    assert records == {(2, 1), (4, 3), (6, 5)}
    with pytest.raises(DataError, match="column 1 has no name"):
        read_shard(workbook([[0, 1, 1]], head=[None, "a", "label"]), (2,))


ENTITIES = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [], "head": None}, "expected column names"),
        ({"change": sheet_part("</sheetData>", "")}, r"is not a valid \.xlsx file"),
        ({"change": sheet_part('r="A3"', 'r="A99999999999"')}, "needs more than 4,294,967,296 bytes of memory"),
        ({"rows": [[Raw('<c t="s"><v>7</v></c>'), "f", "no"]]}, r"is not a valid \.xlsx file"),
        ({"change": sheet_part('r="A3"', 'r="XFD1048576"')}, "needs more than .* remove cells that are far off"),
    ],
)
def test_a_damaged_workbook_is_refused(workbook, options, message):
    with pytest.raises(DataError, match=message) as raised:
        read_table(workbook(**options), schema())
    assert "\n" not in str(raised.value)


def test_the_memory_of_the_reader_is_limited(workbook, monkeypatch):
    monkeypatch.setattr(binary_tables, "_MAX_MEMORY", 2**28)
    far = workbook(change=sheet_part('r="A3"', 'r="Z1000000"'))  # 26 million cells of 32 bytes
    with pytest.raises(DataError, match="needs more than 268,435,456 bytes of memory"):
        read_table(far, schema())


@pytest.mark.parametrize("name", ["a.xlsx", "a.xls", "a.xlsb", "a.ods"])
@pytest.mark.parametrize("content", [b"\xd0\xcf\x11\xe0 with a password", b"", b"PK\5\6" + bytes(18)])
def test_what_is_no_workbook_is_said(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"is not a valid \{name[1:]} file .*without a password"):
        read_table(tmp_path / name, schema())


def test_entities_do_not_expand(workbook):
    head = f'<!DOCTYPE x [<!ENTITY a "{"a" * 100}">{ENTITIES}]>'
    path = workbook(change=lambda name, content: (head * name.endswith("1.xml")) + content.replace("yes", "&i;"))
    with pytest.raises(DataError, match=r"is not a valid \.xlsx file|not one of its values"):
        read_shard(path, (3,), schema=schema())


def test_without_the_package_one_line_says_what_to_install(workbook, monkeypatch):
    monkeypatch.setattr(binary_tables, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"reading \.xlsx requires python-calamine: pip install 'coterie\[excel\]'"):
        read_table(workbook(), schema())


def test_a_workbook_unpacks_to_a_limited_size(workbook, monkeypatch):
    path = workbook()
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    assert path.stat().st_size < size
    monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", 4 * size)
    assert len(read_table(path, schema()).y) == 3
    for limit, words in ((size - 1, "unpacks to"), (path.stat().st_size - 1, "holds")):
        monkeypatch.setattr("coterie.datasets.data_files.MAX_BYTES", 4 * limit)
        with pytest.raises(DataError, match=f"{words} .* but the limit is"):
            read_table(path, schema())
