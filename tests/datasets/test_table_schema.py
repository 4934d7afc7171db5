"""Schemas of tables: what they determine, that every error is named, and that both forms of text are the same."""

import pytest
from kit.tables import for_rows

from coterie.datasets import SchemaError, TableSchema
from coterie.datasets.schema import MAX_CHARACTERS

GOOD = """
version = 1
ignore = ["id"]

[label]
column = "outcome"
classes = [0, 1]
names = ["alive", "dead"]

[file]
delimiter = "tab"
decimal = ","
missing-values = ["", "-"]

[[columns]]
name = "age"
type = "number"
mean = 50
scale = 15
range = [0, 120]
missing = "indicator"
missing-values = [-9]

[[columns]]
name = "sex"
type = "category"
values = ["f", "m"]
unknown = "indicator"
missing = {value = "f"}

[[columns]]
name = "stage"
type = "category"
values = [1, 2]
unknown = "ignore"
missing = "indicator"
"""


def errors(text):
    with pytest.raises(SchemaError) as refusal:
        TableSchema.parse(text)
    return refusal.value.errors


def changed(old, new):
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_a_schema_fixes_features_and_classes_in_its_order():
    schema = TableSchema.parse(GOOD)
    features = "age; age (missing); sex = f; sex = m; sex (other); stage = 1; stage = 2; stage (missing)"
    assert schema.feature_names == tuple(features.split("; "))
    assert (schema.num_features, schema.num_classes, schema.class_names) == (8, 2, ("alive", "dead"))
    assert (schema.label.name, schema.label.values, schema.ignore) == ("outcome", ("0", "1"), ("id",))
    assert (schema.file.delimiter, schema.file.decimal, schema.file.missing_values) == ("\t", ",", ("", "-"))


def test_its_text_is_the_same_schema():
    for text in (GOOD, changed('ignore = ["id"]', 'ignore = "others"'), GOOD[: GOOD.index("[file]")] + TARGET_COLUMN):
        schema = TableSchema.parse(text)
        again = TableSchema.parse(str(schema))
        assert again == schema
        assert hash(again) == hash(schema)
        assert "\n" not in str(schema)


TARGET_COLUMN = '[[columns]]\nname = "x"\ntype = "number"\nmean = 0.1\nscale = 1e-3\nmissing = {value = 0.25}\n'


def test_a_real_target_is_scaled_by_public_constants():
    schema = TableSchema.parse(
        f'version = 1\n[target]\ncolumn = "days"\nmean = 7\nscale = 5\nrange = [0, 60]\n{TARGET_COLUMN}'
    )
    assert (schema.num_classes, schema.class_names, schema.label.mean, schema.label.scale) == (0, (), 7.0, 5.0)
    assert TableSchema.parse(str(schema)) == schema


def test_the_fingerprint_is_that_of_the_contract_alone():
    schema = TableSchema.parse(GOOD)
    assert TableSchema.parse(changed('decimal = ","', 'decimal = "."')).fingerprint == schema.fingerprint
    assert TableSchema.parse(changed('ignore = ["id"]', "")).fingerprint == schema.fingerprint
    assert TableSchema.parse(changed("mean = 50", "mean = 50.0")).fingerprint == schema.fingerprint
    for old, new in (
        ("mean = 50", "mean = 51"),
        ("scale = 15", "scale = 1e-300"),
        ("[0, 120]", "[0, 121]"),
        ("[-9]", "[-8]"),
        ('["f", "m"]', '["m", "f"]'),
        ('unknown = "ignore"', 'unknown = "drop"'),
        ("classes = [0, 1]", "classes = [1, 0]"),
        ('names = ["alive", "dead"]', ""),
        ('column = "outcome"', 'column = "result"'),
    ):
        assert TableSchema.parse(changed(old, new)).fingerprint != schema.fingerprint, old


@for_rows(
    ("old", "new", "message"),
    [
        ("version = 1", "version = 2", "version = 2; this release reads version = 1"),
        ("version = 1", "version = true", "version = True; this"),
        ("version = 1", "", "version is missing"),
        ("ignore = [", "ignored = [", "unknown key 'ignored'; known: columns, file, ignore"),
        ('["id"]', '["id", "id"]', "ignore = ['id', 'id']; must be a list of distinct strings, integers or booleans"),
        ('["id"]', '["age"]', "column 'age' is named twice"),
        (
            "[label]",
            "[target]",
            "[target]: unknown key 'classes'; known: censored, column, mean, missing, range, scale, unit",
        ),
        ("[label]", "[labelled]", "must have one of [label], for classes, [target]"),
        ("classes = [0, 1]", "classes = [0]", "[label]: classes = [0]; must be a list of at least 2 distinct"),
        ("classes = [0, 1]", "classes = [0.5, 1]", "[label]: classes = [0.5, 1]; must be"),
        ("classes = [0, 1]", "classes = ['', 'a']", "[label]: classes = ['', 'a']; must be"),
        ('["alive", "dead"]', '["a", "b", "c"]', "[label]: names has 3 entries, but classes has 2"),
        ('"tab"', '"#"', "[file]: delimiter = '#'; must be 'auto' or 'tab'"),
        ('"tab"', '","', "[file]: decimal and delimiter are both ','"),
        ("decimal", "encoding", "[file]: encoding = ','; must be a text encoding of Python, such as 'utf-8'"),
        ('decimal = ","', 'encoding = "rot13"', "[file]: encoding = 'rot13'; must be a text encoding"),
        ('decimal = ","', 'encoding = "idna"', "[file]: encoding = 'idna'; must be a text encoding"),
        ('decimal = ","', 'decimal = ","\nthousands = ","', "[file]: decimal and thousands are both ','"),
        ('decimal = ","', "skip-lines = -1", "[file]: skip-lines = -1; must be a number of first lines, or a list"),
        ('decimal = ","', "skip-lines = [0]", "[file]: skip-lines = [0]; must be"),
        ('decimal = ","', "trailing-delimiter = 1", "[file]: trailing-delimiter = 1; must be true or false"),
        ("mean = 50", 'mean = 50\ncensored = "zero"', "column 'age': censored = 'zero'; must be 'error' or 'drop'"),
        ("mean = 50", "mean = 50\nunit = 1", "column 'age': unit = 1; must be a text"),
        ('name = "age"', 'name = " "', "column ' ': name = ' '; must be the name of a column"),
        ('name = "age"', "", "column 1: name is missing"),
        ('"number"', '"text"', "column 'age': type = 'text'; must be 'number' or 'category' or 'boolean'"),
        ("mean = 50", "", "column 'age': mean is missing; must be a finite number, from public knowledge"),
        ("mean = 50", "mean = nan", "column 'age': mean = nan; must be"),
        ("mean = 50", "mean = true", "column 'age': mean = True; must be"),
        ("scale = 15", "scale = 0", "column 'age': scale = 0; must be a positive finite number"),
        ("[0, 120]", "[120, 0]", "column 'age': range = [120, 0]; must be [minimum, maximum]"),
        ("[0, 120]", "5", "column 'age': range = 5; must be"),
        ('"indicator"\nmissing-v', '"guess"\nmissing-v', "column 'age': missing = 'guess'; must be 'error' or 'drop'"),
        ('"indicator"\nmissing-v', "{value = 500}\nmissing-v", "column 'age': missing: value 500 is outside the range"),
        ('"indicator"\nmissing-v', "{value = 'x'}\nmissing-v", "column 'age': missing: value must be a finite number"),
        ('{value = "f"}', '{value = "x"}', "column 'sex': missing: value 'x' is not one of values"),
        (
            '{value = "f"}',
            '{fill = "f"}',
            "column 'sex': missing = {'fill': 'f'}; must be 'error', 'drop', 'indicator'",
        ),
        ('{value = "f"}', '"mean"', "column 'sex': missing = 'mean'; must be 'error' or 'drop' or 'indicator'"),
        ("values = [1, 2]", "", "column 'stage': values = []; must be a list of at least 1 distinct"),
        ("values = [1, 2]", "values = [1, 2]\nscale = 1", "column 'stage': unknown key 'scale'"),
        ("values = [1, 2]", "values = [1, 2]\nmissing-values = [1]", "missing-values: '1' is also one of values"),
    ],
)
def test_an_error_is_named(old, new, message):
    assert any(message in error for error in errors(changed(old, new))), errors(changed(old, new))


def test_all_errors_are_named_at_once():
    text = changed("mean = 50", "mean = 'x'").replace('values = ["f", "m"]', "").replace("version = 1", "")
    assert len(errors(text)) == 4  # the replacement of a missing sex is no value any more
    with pytest.raises(SchemaError, match=r"^table-schema: version is missing.*; column 'age': mean = 'x'.*values = "):
        TableSchema.parse(text)
    columns = "".join(f'[[columns]]\nname = "c{i}"\ntype = "number"\n' for i in range(50))
    assert len(errors(f"version = 1\n[label]\ncolumn = 'y'\nclasses = [0, 1]\n{columns}")) == 100
    with pytest.raises(SchemaError, match=r"; and 95 more errors$"):
        TableSchema.parse(f"version = 1\n[label]\ncolumn = 'y'\nclasses = [0, 1]\n{columns}")


@for_rows(
    "text",
    ["x", "[", "{", "{}", "[" * 100_000, "{" * 100_000, "x = " + "[" * 10_000, '{"version": 1e999}', "\0", "1" * 5000],
)
def test_what_is_no_schema_is_refused(text):
    assert errors(text)


def test_a_schema_is_of_bounded_size():
    assert "has 1,048,577 characters; the limit is 1,048,576" in errors(" " * (MAX_CHARACTERS + 1))[0]
    values = str(list(range(30_000))).replace(" ", "")
    columns = "".join(f'[[columns]]\nname = "c{i}"\ntype = "category"\nvalues = {values}\n' for i in range(4))
    assert errors(f"version = 1\n[label]\ncolumn = 'y'\nclasses = [0, 1]\n{columns}") == (
        "120,000 features; the limit is 100,000",
    )
    assert "has 201 characters; the limit is 200" in errors(changed('["f", "m"]', f'["f", "{"m" * 201}"]'))[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SchemaError, match=r"absent\.toml: cannot be read: No such file"):
        TableSchema.load(tmp_path / "absent.toml")
    with pytest.raises(SchemaError, match="a directory"):
        TableSchema.load(tmp_path)
    (tmp_path / "s.toml").write_text(GOOD)
    assert TableSchema.load(tmp_path / "s.toml") == TableSchema.parse(GOOD)
    (tmp_path / "s.toml").write_bytes(b"\xff")
    with pytest.raises(SchemaError, match="it is not text"):
        TableSchema.load(tmp_path / "s.toml")


def test_a_large_declared_range_is_warned_of_from_the_schema_alone():
    assert TableSchema.parse(GOOD).warnings() == []
    (warning,) = TableSchema.parse(changed("scale = 15", "scale = 1")).warnings()
    assert "values of column 'age' reach 70 after scaling; choose mean and scale" in warning
