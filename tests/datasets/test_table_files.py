"""Text tables as other programs write them: which record a byte belongs to, and what is said of those that are lost."""

import csv

import numpy as np
import pytest

from coterie.datasets import TableSchema, own_shard, read_table
from coterie.datasets.table_files import MAX_RECORD_LINES

SCHEMA = """version = 1
ignore = ["note"]
[label]
column = "outcome"
classes = ["no", "yes"]
[[columns]]
name = "age"
type = "number"
mean = 50
scale = 15
[[columns]]
name = "crp"
type = "number"
mean = 30
scale = 40
"""


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


def test_a_quoted_line_break_loses_no_record_of_a_class(tmp_path):
    with open(tmp_path / "notes.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "note", "crp", "outcome"])
        for i in range(200):
            note = "fever since Monday\ncough" if i % 2 else "stable"
            out.writerow([40 + i % 40, note, i % 90, "yes" if i % 2 else "no"])
    own_shard.cache_clear()
    shard = own_shard(str(tmp_path / "notes.csv"), 0, (2,), 2, None, schema=schema(), strict=False)
    assert np.bincount(np.concatenate([shard.y, shard.test.y])).tolist() == [100, 100]


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


@pytest.mark.parametrize(
    ("content", "expected", "lost"),
    [
        (f'age,note,crp,outcome\n60,,1,no\n61,"{PASTED}', [[60, 1]], [3, 4, 5, 6]),
        (f'age,crp,outcome,note\n60,1,no,\n61,90,yes,"{PASTED}', [[60, 1]], [3, 4, 5, 6]),
        (f'age,note,crp,outcome\n61,"{PASTED}"x,90,yes\n62,,91,no\n', [[62, 91]], [2, 3, 4, 5]),
        ('age,note,crp,outcome\n61,"x,90,yes\n62,,91,no\n', [[62, 91]], [2]),
        ('age,note,crp,outcome\n61,x,90,"yes\n62,,91,no\n63,"b",92,no\n', [[62, 91], [63, 92]], [2]),
    ],
    ids=["truncated note", "truncated last cell", "quote in a note", "unclosed quote", "unclosed last quote"],
)
def test_damage_makes_no_record_of_a_note_and_is_counted_by_lines(table, content, expected, lost):
    read = table(content)
    assert values(read) == expected
    assert [row for finding in read.errors for row in finding.rows] == lost
    assert read.records == len(expected) + len(lost)


def test_an_unclosed_quote_does_not_swallow_the_file(table):
    lines = [f"{20 + i % 60},,{i % 90},no" for i in range(3 * MAX_RECORD_LINES)]
    read = table("\n".join(["age,note,crp,outcome", '61,"x,90,yes', *lines]))
    assert len(read.y) == len(lines)
    read = table("\n".join(["age,note,crp,outcome", '61,"x', *lines]))
    assert (read.errors[0].count, len(read.y)) == (MAX_RECORD_LINES + 1, 2 * MAX_RECORD_LINES)
    assert read.errors[0].what == "cells that cannot be read (a record of more than 1,000 lines)"


def test_records_across_blocks_are_whole(table, monkeypatch):
    rows = [[20 + i % 60, ("plain", 'a "quoted"\nnote', "x\n\ny,z")[i % 3], i % 90, "no"] for i in range(60)]
    lines = ["age,note,crp,outcome"]
    lines += [f'{age},"{note.replace(chr(34), chr(34) * 2)}",{crp},no' for age, note, crp, _ in rows]
    for size in (7, 64, 301):
        monkeypatch.setattr("coterie.datasets.table_files._BLOCK", size)
        read = table("\n".join(lines))
        assert values(read) == [[age, crp] for age, _, crp, _ in rows]
        assert (read.index.tolist(), read.errors) == (list(range(60)), ())


TURKISH = """version = 1
[file]
encoding = "{}"
[label]
column = "sonuc"
classes = ["yok", "var"]
[[columns]]
name = "cinsiyet"
type = "category"
values = ["kadın", "erkek"]
unknown = "{}"
missing = "indicator"
"""


@pytest.mark.parametrize("unknown", ["error", "drop", "ignore", "indicator"])
def test_undecodable_bytes_are_reported_whatever_the_rule(table, unknown):
    by = TableSchema.parse(TURKISH.format("utf-8", unknown))
    read = table("cinsiyet;sonuc\nkadın;yok\nerkek;var\n".encode("cp1254"), by)
    assert [str(finding) for finding in read.errors] == [
        "column 'cinsiyet': bytes that are not utf-8, 1 record dropped: row 2 (kad\N{REPLACEMENT CHARACTER}n); set the "
        "encoding of the file"
    ]
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
