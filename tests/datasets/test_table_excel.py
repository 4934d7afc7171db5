"""Excel tables: the values that their owner sees, or an error or a count of what is not one."""

import os
import re
import sys
import warnings
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from coterie.datasets import DataError, Declared, TableSchema, describe, own_shard, read_table
from coterie.tasks import task_of

openpyxl = pytest.importorskip("openpyxl")

SCHEMA = """version = 1
ignore = ["note"]
[label]
column = "outcome"
classes = ["no", "yes"]
[[columns]]
name = "age"
type = "number"
mean = 0
scale = 1
missing = "mean"
[[columns]]
name = "sex"
type = "category"
values = ["f", "m"]
unknown = "ignore"
"""
HEAD = ["age", "sex", "outcome"]
ROWS = [[70, "m", "yes"], [45.5, "f", "no"], [60, "f", "yes"]]


def schema(file="", old="", new=""):
    text = SCHEMA.replace(old, new) if old else SCHEMA
    return TableSchema.parse(f"{text}[file]\n{file}\n" if file else text)


@pytest.fixture
def workbook(tmp_path):
    """Writes rows, lets a function change the workbook, then its parts, and returns the path."""

    def write(rows=ROWS, head=HEAD, change=None, parts=None, name="t.xlsx"):
        book = openpyxl.Workbook()
        for row in ([head] if head else []) + list(rows):
            book.active.append(row)
        if change:
            change(book)
        path = tmp_path / name
        book.save(path)
        if parts:
            with zipfile.ZipFile(path) as archive:
                contents = {each.filename: archive.read(each) for each in archive.infolist()}
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for each, content in contents.items():
                    archive.writestr(each, parts(each, content))
        return path

    return write


def saved(path_name, content):
    """The part of a workbook as Excel saves it: nothing asks it to compute."""
    return re.sub(rb' fullCalcOnLoad="1"', b"", content) if path_name == "xl/workbook.xml" else content


def sheet_part(old, new):
    def change(name, content):
        return saved(name, content.replace(old, new) if name == "xl/worksheets/sheet1.xml" else content)

    return change


def read(path, by=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_table(path, by or schema(), **options)


def found(table):
    return [(finding.column, finding.what, finding.effect, finding.rows) for finding in table.findings]


def test_a_workbook_is_the_same_table_as_text(workbook, tmp_path):
    (tmp_path / "t.csv").write_text("age,sex,outcome\n70,m,yes\n45.5,f,no\n60,f,yes\n")
    expected, table = read(tmp_path / "t.csv"), read(workbook())
    np.testing.assert_array_equal(table.x, expected.x)
    np.testing.assert_array_equal(table.y, expected.y)
    assert (table.records, table.findings, table.beside) == (3, (), [])


def test_rows_before_and_between_records_count_as_in_the_sheet(workbook):
    path = workbook([["Ward A"], [], HEAD, ["years", "-", "-"], *ROWS[:2], [None, "  "], ["x", "f", "no"]], head=None)
    table = read(path, schema("skip-lines = [1, 4]"))
    assert (table.records, table.index.tolist()) == (3, [0, 1])
    assert found(table) == [("age", "not a number", "dropped", [8])]
    assert str(table.findings[0]).endswith("row 8 (x)")


def test_cells_beyond_the_names_and_short_rows(workbook):
    table = read(workbook([[70, "m", "yes", "and more"], [50], *ROWS]))
    assert found(table) == [
        ("", "cells beyond the 3 column names", "dropped", [2]),
        ("sex", "missing", "dropped", [3]),
        ("outcome", "missing", "dropped", [3]),
    ]
    assert (table.records, table.index.tolist()) == (5, [2, 3, 4])


def test_errors_of_the_spreadsheet_are_no_category_and_no_gap(workbook):
    def change(book):
        sheet = book.active
        sheet["A2"], sheet["B3"], sheet["C4"] = "#DIV/0!", "#N/A", "#REF!"

    path = workbook([*ROWS, [30, "m", "no"]], change=change)
    what = "an error of the spreadsheet"
    assert found(read(path)) == [(name, what, "dropped", [row]) for row, name in enumerate(HEAD, 2)]
    table = read(path, schema('missing-values = ["#N/A", "#DIV/0!"]', "unknown =", 'missing = "indicator"\nunknown ='))
    assert (table.missing, len(table.y)) == ({"age": 1, "sex": 1}, 3)
    assert [finding.column for finding in table.findings] == ["outcome"]


def test_dates_are_no_numbers(workbook):
    rows = [[datetime(2020, 1, 2), "f", "no"], [40, datetime(2020, 3, 4), "yes"], *ROWS]
    table = read(workbook(rows), schema("", '"ignore"', '"error"'))
    assert [str(finding) for finding in table.errors] == [
        "column 'age': not a number, 1 record dropped: row 2 (2020-01-02)",
        "column 'sex': not one of its values, 1 record dropped: row 3 (2020-03-04)",
    ]


def test_a_date_beyond_the_calendar_is_an_error_of_its_cell(workbook):
    def change(book):
        book.active["A2"].number_format = "yyyy-mm-dd"

    table = read(workbook([[10**9, "f", "no"], *ROWS], change=change))
    assert found(table) == [("age", "an error of the spreadsheet", "dropped", [2])]


def test_percentages_are_read_as_they_are_shown(workbook):
    def change(book):
        book.active["A2"].number_format = "0.0%"
        book.active["A3"].number_format = '0" %"'  # shows 5 as 5 %

    path = workbook([[0.07, "f", "no"], [5, "m", "no"]], change=change)
    assert read(path, schema("", "scale = 1", 'scale = 1\nunit = "%"')).x[:, 0].tolist() == [7, 5]
    assert read(path).errors[0].hint == '"7%" would be 7 with unit = "%"'


def test_a_formula_has_its_saved_value(workbook):
    def change(book):
        for row in range(2, 5):
            book.active[f"A{row}"] = f"=D{row}+1"

    def parts(name, content):
        content = saved(name, content)
        if name == "xl/worksheets/sheet1.xml":  # what Excel would compute: a number, an empty text, an error
            cells = [b"<v>71</v>", b"<v></v>", b"<v>#VALUE!</v>"]
            for row, (value, kind) in enumerate(zip(cells, (b"", b' t="str"', b' t="e"'), strict=True), 2):
                place = b'<c r="A%d"' % row
                old = re.search(place + rb".*?</c>", content)[0]
                content = content.replace(old, place + kind + b"><f>D%d+1</f>" % row + value + b"</c>")
        return content

    table = read(workbook(change=change, parts=parts))
    assert found(table) == [("age", "an error of the spreadsheet", "dropped", [4])]
    assert (table.x[:, 0].tolist(), table.missing) == ([71, 0], {"age": 1})


@pytest.mark.parametrize("value", [b"<v></v>", b"<v />", b"", b"<v>0</v>"], ids=["empty", "closed", "none", "to do"])
def test_a_formula_that_nobody_computed_is_not_a_missing_value(workbook, value):
    """Programs such as openpyxl save formulas without values, others save 0; both ask Excel to compute them."""

    def change(book):
        book.active["A2"] = "=1+1"

    def parts(name, content):
        content = re.sub(rb"(<f>1\+1</f>)<v ?/?>(</v>)?", rb"\1" + value, content)
        return content if value == b"<v>0</v>" else saved(name, content)

    table = read(workbook(change=change, parts=parts))
    assert found(table) == [("age", "formula without a saved value", "dropped", [2])]
    assert "open the file in a spreadsheet program" in table.findings[0].hint


def test_only_used_columns_count(workbook):
    def change(book):
        book.active["D2"] = "=1+1"
        book.active["D3"] = "#REF!"

    assert read(workbook(head=[*HEAD, "note"], change=change)).findings == ()


def test_merged_cells_are_not_missing_values(workbook):
    def change(book):
        book.active.merge_cells("A2:A4")

    table = read(workbook(change=change))
    assert found(table) == [("age", "part of merged cells", "dropped", [3, 4])]
    assert (table.x[:, 0].tolist(), table.findings[0].values) == ([70], ["row 2", "row 2"])


def test_hidden_rows_are_read_and_named(workbook):
    def change(book):
        book.active.row_dimensions[3].hidden = True

    table = read(workbook(change=change))
    assert len(table.y) == 3
    assert found(table) == [("", "hidden row", "kept", [3])]
    assert not table.errors


def test_an_other_sheet_is_counted(workbook, tmp_path):
    def change(book):
        for name, rows in (("ward b", [HEAD, [1, "f", "no"]]), ("empty", []), ("codes", [["f", "female"]])):
            for row in rows:
                book[name].append(row) if name in book.sheetnames else book.create_sheet(name).append(row)
        book.create_sheet("nothing")

    path = workbook(change=change)
    table = read(path)
    assert (len(table.y), [loss.examples for loss in table.beside]) == (3, [("ward b",), ("codes",)])
    known = Declared("vectors", (3,), task_of(2), schema())
    assert "sheets beside 'Sheet', which is read, 2 sheets left out, such as ward b, codes" in describe(path, known)
    assert len(read(path, schema('sheet = "ward b"')).y) == 1
    assert "3 sheets" not in describe(path, known)
    with pytest.raises(DataError, match="has no sheet 'ward c'; its sheets are 'Sheet', 'ward b'"):
        read(path, schema('sheet = "ward c"'))


def test_the_first_visible_sheet_is_read(workbook):
    def change(book):
        book.create_sheet("shown")
        for row in [HEAD, *ROWS[:2]]:
            book["shown"].append(row)
        book.active = 1
        book["Sheet"].sheet_state = "hidden"

    table = read(workbook([["x", "y", "z"]], change=change))
    assert (len(table.y), table.beside[0].examples) == (2, ("Sheet",))


def test_wrong_dimensions_lose_no_row(workbook):
    parts = sheet_part(b'<dimension ref="A1:C4"', b'<dimension ref="A1:B2"')
    assert len(read(workbook(parts=parts)).y) == 3


def test_tables_without_a_schema(workbook):
    path = workbook([[1, 2, 0], [3, 4, 1], [5, 6, 1]], head=["b", "a", "label"])
    shard = own_shard(str(path), 0, (2,), 2, None, columns=("a", "b"))
    records = {*map(tuple, np.concatenate([shard.x, shard.test.x]).tolist())}
    assert records == {(2, 1), (4, 3), (6, 5)}
    with pytest.raises(DataError, match="column 1 has no name"):
        own_shard(str(workbook([[0, 1, 1]], head=[None, "a", "label"])), 0, (2,), 2, None)


def test_what_is_no_workbook_is_said(workbook, tmp_path, monkeypatch):
    (tmp_path / "a.xlsx").write_bytes(b"\xd0\xcf\x11\xe0 a workbook with a password")
    with pytest.raises(DataError, match=r"is not a valid \.xlsx file .*without a password"):
        read(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match="expected column names"):
        read(workbook([], head=None))
    with pytest.raises(DataError, match=r"is not a valid \.xlsx file"):
        read(workbook(parts=sheet_part(b"</sheetData>", b"")))
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"pip install 'coterie\[excel\]'"):
        read(tmp_path / "t.xlsx")


def test_a_row_number_beyond_excel_is_refused(workbook):
    with pytest.raises(DataError, match="more than 1,048,576 rows"):
        read(workbook(parts=sheet_part(b'<row r="3"', b'<row r="99999999999"')))


def test_a_workbook_unpacks_to_a_limited_size(workbook, monkeypatch):
    path = workbook()
    with zipfile.ZipFile(path) as archive:
        sizes = {part.filename: part.file_size for part in archive.infolist()}
    sheets = sum(size for name, size in sizes.items() if name.startswith("xl/worksheets/"))
    texts = sum(sizes.values()) - sheets
    limits = [(32 * texts, None), (32 * texts - 1, "has texts and styles that unpack to"), (32, "texts and styles")]
    for limit, message in limits:
        monkeypatch.setattr("coterie.datasets.user_records.MAX_BYTES", limit)
        if message is None:
            assert len(read(path).y) == 3
        else:
            with pytest.raises(DataError, match=f"{message}.* but the limit is"):
                read(path)


NAMESPACE = 'xmlns:x="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PARTS = {
    "[Content_Types].xml": """<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
<Override PartName="/xl/workbook.xml" ContentType="KIND.sheet.main+xml"/>
<Override PartName="/xl/sharedStrings.xml" ContentType="KIND.sharedStrings+xml"/>
<Override PartName="/xl/styles.xml" ContentType="KIND.styles+xml"/></Types>""".replace(
        "KIND", "application/vnd.openxmlformats-officedocument.spreadsheetml"
    ),
    "xl/_rels/workbook.xml.rels": f"""<Relationships
xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
<Relationship Id="r1" Type="{RELATIONS}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>""",
    "xl/workbook.xml": f"""<x:workbook {NAMESPACE} xmlns:r="{RELATIONS}">
<x:sheets><x:sheet name="patients" sheetId="1" r:id="r1"/></x:sheets></x:workbook>""",
    "xl/styles.xml": f"<x:styleSheet {NAMESPACE}/>",
    "xl/sharedStrings.xml": f"""<x:sst {NAMESPACE}>
<x:si><x:t>age</x:t></x:si><x:si><x:t>sex</x:t></x:si><x:si><x:t>outcome</x:t></x:si>
<x:si><x:r><x:t>f</x:t></x:r><x:r><x:t xml:space="preserve"> </x:t></x:r></x:si><x:si><x:t>yes</x:t></x:si></x:sst>""",
    "xl/worksheets/sheet1.xml": f"""<x:worksheet {NAMESPACE}><x:sheetData>
<x:row><x:c t="s"><x:v>0</x:v></x:c><x:c t="s"><x:v>1</x:v></x:c><x:c t="s"><x:v>2</x:v></x:c></x:row>
<x:row><x:c><x:v>70</x:v></x:c><x:c t="s"><x:v>3</x:v></x:c><x:c t="s"><x:v>4</x:v></x:c></x:row>
<x:row><x:c><x:f>1+1</x:f></x:c><x:c t="s"><x:v>3</x:v></x:c><x:c t="s"><x:v>4</x:v></x:c></x:row>
<x:row><x:c r="C4" t="s"><x:v>4</x:v></x:c></x:row>
</x:sheetData></x:worksheet>""",
}


def write_parts(path, **changes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in PARTS.items():
            archive.writestr(name, changes.get(name.rpartition("/")[2], content))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_workbooks_of_other_programs(tmp_path, encoding):
    """Texts that cells share, rich text, no styles, prefixes, no places of cells, UTF-16."""
    sheet = f"<?xml version='1.0' encoding='{encoding}'?>{PARTS['xl/worksheets/sheet1.xml']}".encode(encoding)
    table = read(write_parts(tmp_path / "t.xlsx", **{"sheet1.xml": sheet}))
    assert table.x.tolist() == [[70, 1, 0]]
    assert [finding[:2] for finding in found(table)] == [("age", "formula without a saved value"), ("sex", "missing")]


@pytest.mark.parametrize("part", ["sharedStrings.xml", "sheet1.xml", "workbook.xml"])
def test_entities_that_expand_are_refused(tmp_path, part):
    entities = "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    head = f'<!DOCTYPE x [<!ENTITY a "{"a" * 100}">{entities}]>'
    content = next(content for name, content in PARTS.items() if name.endswith(part))
    changed = head + re.sub(r">\n?<x:(?=r|si|sheets)", ">&i;<x:", content, count=1)
    with pytest.raises(DataError, match=r"is not a valid \.xlsx file .*amplification"):
        read(write_parts(tmp_path / "t.xlsx", **{part: changed}))
    open_files = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    assert str(tmp_path / "t.xlsx") not in open_files
