"""Text tables as other programs write them: their records, and the report of lost ones."""

import gzip
import re

import numpy as np
import pytest
from kit.own_files import write_parquet
from kit.site_tables import category_column, label_column, number_column

from coterie.datasets import DataError, TableSchema, read_table
from coterie.datasets.text_tables import MAX_RECORD_LINES

SCHEMA = 'version = 1\nignore = ["note"]\n' + label_column("no", "yes")
SCHEMA += number_column("age", 50, 15) + number_column("crp", 30, 40)


def schema(file="", **changes):
    text = SCHEMA
    for old, new in changes.items():
        text = text.replace(old, new)
    return TableSchema.parse(f"{text}[file]\n{file}\n" if file else text)


def values(read):
    return (read.x * [15, 40] + [50, 30]).round().tolist()


@pytest.fixture
def table(tmp_path):
    """Reads a text or bytes by a schema."""

    def read(content, by=None, name="t.csv", **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_table(path, by or schema(), **options)

    return read


PASTED = "earlier values:\n40,none,3,no\n41,none,4,no\nend"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f'age,note,crp,outcome\n61,"{PASTED}",90,yes\n', [[61, 90]]),
        (f'age,crp,outcome,note\n61,90,yes,"{PASTED}"\n62,91,no,\n', [[61, 90], [62, 91]]),
        (f'note,age,crp,outcome\r\n"{PASTED}",61,90,yes\r\n'.replace("\n4", "\r\n4"), [[61, 90]]),
        ('age,note,crp,outcome\n61,"say ""a\nb""\n\n",90,yes\n62,x,91,no', [[61, 90], [62, 91]]),
        ('age,"free\nnote",crp,outcome\n61,"a\n",90,yes\n'.replace("free\nnote", "note\n"), [[61, 90]]),
        ('age;note;crp;outcome\n61;"a\n;;\n";90;yes\n', [[61, 90]]),
        ('"age","note","crp","outcome"\n"61","a\rb","90","yes"\n', [[61, 90]]),
    ],
    ids=["pasted lines", "last column", "first column", "quotes", "column name", "semicolons", "all quoted"],
)
def test_a_record_ends_where_its_quotes_do(table, content, expected):
    read = table(content)
    assert values(read) == expected
    assert (read.records, read.errors) == (len(expected), ())


def test_a_file_without_a_last_line_end_may_be_truncated(table):
    (note,) = table("age,note,crp,outcome\n61,,90,yes\n62,,91,no").findings
    assert note.expected
    assert str(note) == "no line end after the last record, 1 record kept: row 3; is the file complete?"


LINES = "62,,91,no\n" * (MAX_RECORD_LINES + 1)


@pytest.mark.parametrize("block", [20, 2**18])
@pytest.mark.parametrize(
    ("records", "line", "problem"),
    [
        (f'60,,1,no\n61,"{PASTED}', 3, "unexpected end of data"),
        (f'61,"{PASTED}"x,90,yes\n62,,91,no\n', 2, "',' expected after '\"'"),
        ('61,"x,90,yes\n62,,91,no\n', 2, "unexpected end of data"),
        ('60,,1,no\n\n61,"say "hi".",90,yes\n62,,91,no\n', 4, "',' expected after '\"'"),
        ('61,"a"b,1\n62,"",91,no\n', 2, "',' expected after '\"'"),
        ('60,,1,no\n61,"x,90,yes\n62,x",91,no\n', 3, ""),
        ('61,"x,90,yes\n62,x",91\n', 2, "3 cells in 2 lines, expected 4"),
        (f'60,,1,no\n61,"x,90,yes\n{LINES}', 3, "a record of more than 1,000 lines"),
        (f'61,"{"2" * 200_000}",90,yes\n', 2, "field larger than field limit"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_by_its_line(table, monkeypatch, records, line, problem, block):
    monkeypatch.setattr("coterie.datasets.text_tables._BLOCK", block)
    if not problem:  # the quotes of two records make one of the right number of cells
        assert values(table(f"age,note,crp,outcome\n{records}")) == [[60, 1], [61, 91]]
        return
    words = f"t.csv: the record that begins in line {line} cannot be read ({problem}"
    with pytest.raises(DataError, match=re.escape(words) + ".*; close every quote, and double those"):
        table(f"age,note,crp,outcome\n{records}")


def test_records_across_blocks_are_whole(table, monkeypatch):
    rows = [[20 + i % 60, ("plain", 'a "quoted"\nnote', "x\n\ny,z")[i % 3], i % 90, "no"] for i in range(60)]
    lines = ["age,note,crp,outcome"]
    lines += [f'{age},"{note.replace(chr(34), chr(34) * 2)}",{crp},no' for age, note, crp, _ in rows]
    for size in (7, 64, 301):
        monkeypatch.setattr("coterie.datasets.text_tables._BLOCK", size)
        read = table("\n".join(lines))
        assert values(read) == [[age, crp] for age, _, crp, _ in rows]
        assert (read.index.tolist(), read.errors) == (list(range(60)), ())


@pytest.mark.parametrize("unknown", ["error", "drop", "ignore", "indicator"])
def test_undecodable_bytes_are_reported_whatever_the_rule(table, unknown):
    column = category_column("cinsiyet", ["kadın", "erkek"], f'unknown = "{unknown}"', 'missing = "indicator"')
    by = TableSchema.parse("version = 1\n" + label_column("yok", "var", column="sonuc") + column)
    read = table("cinsiyet;sonuc\nkadın;yok\nerkek;var\n".encode("cp1254"), by)
    words = "bytes that are not utf-8, 1 record dropped: row 2 (kad\ufffdn); set the encoding of the file"
    assert [str(finding) for finding in read.errors] == [f"column 'cinsiyet': {words}"]
    assert (read.x[:, 1].tolist(), read.errors[0].by_class) == ([1], {"yok": 1})


def test_undecodable_bytes_in_an_ignored_column_lose_no_record(table):
    read = table("age,note,crp,outcome\n61,kadın,90,yes\n".encode("cp1254"))
    assert (values(read), read.findings) == ([[61, 90]], ())


def test_losses_are_counted_by_class(table):
    read = table("age,note,crp,outcome\nx,,1,yes\ny,,2,yes\nz,,3,no\n1,,4,maybe\n1,,5,yes\n1,2\n")
    by_class = {(finding.column, finding.what): dict(finding.by_class) for finding in read.errors}
    assert by_class == {
        ("age", "not a number"): {"yes": 2, "no": 1},
        ("outcome", "not one of its values"): {"": 1},
        ("", "another number of cells than the 4 column names"): {"": 1},
    }


def test_decomposed_letters_are_those_of_the_schema(table):
    by = TableSchema.parse(SCHEMA.replace('"age"', '"âge"').replace('"yes"', '"dé"'))
    read = table("a\u0302ge,note,crp,outcome\n61,,90,de\u0301\n", by)
    assert (values(read), read.y.tolist()) == ([[61, 90]], [1])


# ---- other programs --------------------------------------------------------------------------------------------------

PLAIN = "age,crp,outcome\n61,90,yes\n62,91.5,no\n"
SEMICOLONS = PLAIN.replace(",", ";")


@pytest.mark.parametrize(
    ("content", "name", "file"),
    [
        ("sep=;\n" + SEMICOLONS, "t.csv", ""),
        ('\ufeff"sep=;"\r\n' + SEMICOLONS, "t.csv", ""),
        ("SEP=\t\n" + PLAIN.replace(",", "\t"), "t.csv", ""),
        ("sep=;;;\n" + SEMICOLONS, "t.csv", 'delimiter = ";"'),
        (PLAIN.replace(",", "^").join(("sep=^\n", "")), "t.csv", ""),
        (PLAIN.replace(",", "\t"), "t.tsv", ""),
        ("Laboratory; 2026\n\nsex: all\n" + SEMICOLONS, "t.csv", "skip-lines = 3"),
        ("Title\nage,crp,outcome\nyears,mg/L,\n61,90,yes\n62,91.5,no\n", "t.csv", "skip-lines = [1, 3]"),
        ("\n\n" + PLAIN, "t.csv", ""),
        ("age,crp,outcome\n61,90,yes,\n62,91.5,no,\n", "t.csv", "trailing-delimiter = true"),
        ("age,crp,outcome,\n61,90,yes,\n62,91.5,no,\n", "t.csv", ""),
        (PLAIN.encode("utf-16"), "t.csv", ""),
        (PLAIN.encode("utf-16"), "t.csv", 'encoding = "utf-16"'),
        ('\ufeff"age"'.encode("utf-16-le") + PLAIN[3:].encode("utf-16-le"), "t.csv", 'encoding = "utf-16-le"'),
        (PLAIN.encode("utf-32"), "t.csv", ""),
        (PLAIN, "t.csv", 'encoding = "shift_jis"'),
        (gzip.compress(PLAIN.encode(), mtime=0), "t.csv.gz", ""),
        (gzip.compress(PLAIN.replace(",", "\t").encode("utf-8-sig"), mtime=0), "t.b.tsv.gz", ""),
        ('age,crp,outcome\n"1,061",90,yes\n62,91.5,no\n'.replace("1,061", "61"), "t.csv", 'thousands = ","'),
    ],
)
def test_files_as_other_programs_write_them(table, content, name, file):
    read = table(content, schema(file), name)
    assert (values(read), read.y.tolist(), read.findings) == ([[61, 90], [62, 92]], [1, 0], ())
    assert TableSchema.parse(str(schema(file))) == schema(file)


@pytest.mark.parametrize(
    ("content", "name", "file", "message"),
    [
        ("sep=;\n" + SEMICOLONS, "t.csv", 'delimiter = ","', "line 'sep=;' contradicts delimiter = ','; remove one"),
        ("\ufeff" + PLAIN, "t.csv", 'encoding = "cp1252"', "mark of utf-8, which contradicts encoding = 'cp1"),
        (PLAIN.encode("utf-16-le"), "t.csv", 'encoding = "utf-16"', "set its encoding, such as 'utf-16-le'"),
        ("Lab\n2026\n" + PLAIN, "t.csv", "", r"names in utf-8; line 3 has them; set skip-lines = 2 in \[file\]$"),
        ("\nExport of 2024-01-02\n\n" + SEMICOLONS, "t.csv", "", r"line 4 has them; set skip-lines = 3 in \[file\]$"),
        ("Export\n" + PLAIN.upper(), "t.csv", "", r"line 2 has them; set skip-lines = 1 in \[file\]$"),
        ("outcome,,\n" + PLAIN, "t.csv", "", r"no column 'age', 'crp': its first line .* set skip-lines = 1 in"),
        (PLAIN, "t.csv", 'delimiter = ";"', r"utf-8; set delimiter = ',' in \[file\]$"),
        ("Export\n" + PLAIN, "t.tsv", "", r"line 2 has them; set skip-lines = 1 and delimiter = ',' in \[file\]$"),
        ("sep=;\n", "t.csv", "", "its first line is ''; expected column names"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:-9], "t.csv.gz", "", "is not a complete gzip file"),
        (PLAIN, "t.csv.gz", "", "cannot be read: Not a gzipped file"),
    ],
)
def test_a_contradiction_is_refused_with_the_way_out(table, content, name, file, message):
    with pytest.raises(DataError, match=message):
        table(content, schema(file), name)


def test_records_that_end_with_a_delimiter_are_hinted_at(table):
    (error,) = table("age,crp,outcome\n61,90,yes,\n").errors
    assert error.hint == "every record may end with a delimiter with trailing-delimiter = true"
    (error,) = table("age,crp,outcome\n61,90,5,yes\n62,91,no,\n", schema("trailing-delimiter = true")).errors
    assert (error.what, error.rows, error.values) == ("text after the last delimiter", [2], ["yes"])


@pytest.mark.parametrize(
    ("file", "cells", "expected"),
    [
        ('thousands = ","', ["1,234", "1,234,567.5", "245", "-1,000"], [1234, 1234567.5, 245, -1000]),
        ('thousands = "."\ndecimal = ","', ["1.234", "1.234,5", "2,5"], [1234, 1234.5, 2.5]),
        ('thousands = " "', ["1 234", "1\u00a0234", "1\u202f234.5"], [1234, 1234, 1234.5]),
        ('thousands = "\'"', ["1'234", "12"], [1234, 12]),
        ('decimal = ","', ["12,5", "0,125", "-0,5", "1,2345"], [12.5, 0.125, -0.5, 1.2345]),
        ('thousands = "."\ndecimal = ","', ["1,234"], [1.234]),
    ],
)
def test_separators_of_thousands(table, file, cells, expected):
    by = schema(f"{file}\n", note="x")
    lines = "".join(f'"{cell}",1,no\n' for cell in cells)
    read = table(f"age,crp,outcome\n{lines}", by)
    np.testing.assert_allclose(read.x[:, 0] * 15.0 + 50, expected, rtol=1e-5)
    assert read.errors == ()


@pytest.mark.parametrize(
    ("file", "cell", "hint"),
    [
        ("", "1,234", '"1,234" would be 1234 with thousands = ",", or 1.234 with decimal = "," and thousands = "."'),
        ("", "1,234.5", '"1,234.5" would be 1234.5 with thousands = ","'),
        ("", "1.234,5", '"1.234,5" would be 1234.5 with decimal = "," and thousands = "."'),
        ("", "1 234", '"1 234" would be 1234 with thousands = " "'),
        ('decimal = ","', "1,234", '"1,234" would be 1234 with decimal = "." and thousands = ",", or 1.234 with tho'),
        ('decimal = ","', "1.234,5", '"1.234,5" would be 1234.5 with thousands = "."'),
        ('thousands = ","', "12,34", '"12,34" would be 12.34 with decimal = "," and thousands = ""'),
        ('thousands = ","', "1,2345", '"1,2345" would be 1.2345'),
        ("", "<5", '"<5" would be 5 with censored = "limit"'),
        ("", "12 mg/L", '"12 mg/L" would be 12 with unit = "mg/L"'),
        ("", "<0.5 µg/L", '"<0.5 μg/L" would be 0.5 with censored = "limit" and unit'.replace("μ", "µ")),
        ("", "TRUE", '"TRUE" would be 1 with type = "boolean"'),
        ("", "abc", ""),
    ],
)
def test_a_hint_shows_its_effect_and_changes_nothing(table, file, cell, hint):
    read = table(f'age,crp,outcome\n"{cell}",1,no\n', schema(file))
    (error,) = read.errors
    assert (len(read.y), error.what, error.hint[: len(hint)]) == (0, "not a number", hint)


@pytest.mark.parametrize(
    ("rule", "expected", "effects"),
    [
        ("", [12], ["dropped", "dropped"]),
        ('censored = "drop"', [12], ["dropped", "dropped"]),
        ('censored = "limit"', [5, 90, 12, 3], ["replaced by the limit"] * 2),
        ('censored = "half"', [2.5, 90, 12, 1.5], ["replaced by half the limit", "replaced by the limit"]),
    ],
)
def test_censored_values_and_units(table, rule, expected, effects):
    by = TableSchema.parse(SCHEMA.replace('name = "crp"', f'name = "crp"\nunit = "mg/L"\n{rule}'))
    read = table('age,crp,outcome\n1,<5,no\n1,"≥ 90 mg/L",no\n1,12 mg/L,yes\n1,12 g/L,no\n1,<= 3,no\n', by)
    np.testing.assert_allclose(read.x[:, 1] * 40 + 30, expected, rtol=1e-6)
    assert sorted({finding.effect for finding in read.findings}) == sorted({*effects, "dropped"})
    assert by.fingerprint != schema().fingerprint
    assert TableSchema.parse(str(by)) == by


TARGET = 'version = 1\n[target]\ncolumn = "crp"\n{}' + number_column("age")
TARGETS = "age,crp\n1,<5\n2,≥ 90 mg/L\n3,12 mg/L\n4,12 g/L\n5,7\n6,<\n7,\n"


@pytest.mark.parametrize(
    ("rule", "expected", "errors"),
    [
        ("", {5: 7}, {"not a number": 5, "missing": 1}),
        ('unit = "mg/L"\n', {3: 12, 5: 7}, {"not a number": 4, "missing": 1}),
        ('censored = "drop"\n', {5: 7}, {"not a number": 4, "missing": 1}),
        ('unit = "mg/L"\ncensored = "drop"\n', {3: 12, 5: 7}, {"not a number": 2, "missing": 1}),
        ('unit = "mg/L"\ncensored = "error"\n', {3: 12, 5: 7}, {"not a number": 4, "missing": 1}),
    ],
)
def test_a_censored_target_is_left_out_and_never_changed(table, rule, expected, errors):
    by = TableSchema.parse(TARGET.format(rule))
    read = table(TARGETS, by)
    assert dict(zip(read.x[:, 0].tolist(), read.y.tolist(), strict=True)) == expected
    assert {finding.what: finding.count for finding in read.errors} == errors
    assert sum(finding.count for finding in read.findings) == 7 - len(expected)
    assert {finding.effect for finding in read.findings} == {"dropped"}
    assert TableSchema.parse(str(by)) == by
    assert len({TableSchema.parse(TARGET.format(each)).fingerprint for each in ("", rule)}) == 1 + (
        rule not in ("", 'censored = "error"\n')
    )


def test_the_hint_for_a_censored_target_changes_no_value(table):
    (error,) = table("age,crp\n1,<5\n", TableSchema.parse(TARGET.format(""))).errors
    assert error.hint == 'a target that is censored can be left out by censored = "drop"'
    (error,) = table("age,crp\n1,5 mg\n", TableSchema.parse(TARGET.format(""))).errors
    assert error.hint == '"5 mg" would be 5 with unit = "mg"'
    for rule in ("limit", "half"):
        with pytest.raises(DataError, match=f"censored = '{rule}'; must be 'error' or 'drop'"):
            TableSchema.parse(TARGET.format(f'censored = "{rule}"\n'))


BOOLEAN = 'version = 1\n[label]\ncolumn = "died"\nclasses = [false, true]\n[[columns]]\nname = "smoker"\n'


@pytest.mark.parametrize(
    "texts",
    [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("t", "f"), ("T", "F"), ("1", "0"), ("1.0", "0.0")],
)
@pytest.mark.parametrize("rule", ['type = "boolean"', 'type = "category"\nvalues = [true]\nunknown = "ignore"'])
def test_booleans_of_all_programs_are_read_by_one_schema(table, texts, rule):
    yes, no = texts
    read = table(f"smoker,died\n{yes},{no}\n{no},{yes}\n", TableSchema.parse(BOOLEAN + rule))
    assert (read.x.tolist(), read.y.tolist(), read.errors) == ([[1], [0]], [0, 1], ())


def test_booleans_of_parquet_and_rules_for_missing_ones(table, tmp_path):
    by = TableSchema.parse(f'{BOOLEAN}type = "boolean"\nmissing = "indicator"\n')
    read = table("smoker,died\nTrue,0\n,1\nmaybe,1\nNA,0\nf,t\n", by)
    assert (read.x.tolist(), read.y.tolist()) == ([[1, 0], [0, 1], [0, 1], [0, 0]], [0, 1, 0, 1])
    (error,) = read.errors
    assert str(error) == "column 'smoker': not one of its values, 1 record dropped: row 4 (maybe)"
    filled = TableSchema.parse(f'{BOOLEAN}type = "boolean"\nmissing = {{value = true}}\n')
    assert table("smoker,died\n,1\n", filled).x.tolist() == [[1]]
    assert TableSchema.parse(str(filled)) == filled
    path = write_parquet(tmp_path / "t.parquet", {"smoker": [True, None, False], "died": [1, 0, 0]})
    assert read_table(path, by).x.tolist() == [[1, 0], [0, 1], [0, 0]]
