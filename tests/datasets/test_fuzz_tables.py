"""Schemas and tables with random damage: each is read, as finite numbers of the right shape, or refused."""

import random

import numpy as np
import pytest
from kit.own_files import write_parquet

from coterie.datasets import DataError, TableSchema, read_table

CASES = 400
SCHEMA = """version = 1
ignore = ["id"]
[label]
column = "outcome"
classes = ["a", "b"]
unknown = "drop"
[[columns]]
name = "age"
type = "number"
mean = 50
scale = 10
range = [0, 100]
missing = "indicator"
missing-values = [-9]
[[columns]]
name = "weight"
type = "number"
mean = 70
scale = 1e-3
[[columns]]
name = "sex"
type = "category"
values = ["f", "m"]
unknown = "indicator"
missing = {value = "f"}
[file]
decimal = ","
delimiter = "auto"
"""
TABLE = "\ufeffid;age;weight;sex;outcome\n" + "".join(
    f'{i};{20 + i},5;{"NA" if i % 7 == 0 else 70 + i};"{"fm?"[i % 3]}";{"ab"[i % 2]}\n' for i in range(40)
)
#: What damage inserts beside random bytes.
TOKENS = [
    *(b"\n", b"\r", b"\0", b'"', b"'", b";", b",", b"[", b"]", b"{", b"}", b"=", b"#", b"\xff", b"\xef\xbb\xbf"),
    *(b"nan", b"inf", b"1e999", b"-1", b"0", b"true", b"1979-05-27", b'"""', b"9" * 400, b"x" * 300),
    *(b"version", b"columns", b"[[columns]]", b"[label]", b"[target]", b"missing", b'"drop"', "é\u2028".encode()),
]


def damaged(content, rng, most):
    """A copy of some bytes with one or more changes: bytes, tokens, deletions, repetitions and swaps."""
    content = bytearray(content)
    for _ in range(rng.randint(1, most)):
        begin, length = rng.randrange(len(content) + 1), rng.choice((1, 1, 2, 5, 40))
        kind = rng.randrange(5)
        if kind == 0:
            content[begin : begin + 1] = bytes([rng.randrange(32, 128)])
        elif kind == 1:
            content[begin:begin] = rng.choice(TOKENS)
        elif kind == 2:
            del content[begin : begin + length]
        elif kind == 3:
            content[begin:begin] = content[begin : begin + length] * rng.randint(1, 20)
        else:
            end = rng.randrange(len(content) + 1)
            content[begin:begin] = content[end : end + length]
    return bytes(content)


def check(read, schema):
    """A table that was read is one that a client can train on."""
    n = len(read.index)
    assert (read.x.shape, read.y.shape, read.x.dtype) == ((n, schema.num_features), (n,), np.float32)
    assert np.isfinite(read.x).all()
    assert np.isfinite(read.y).all()
    assert n <= read.records
    assert not schema.num_classes or set(read.y) <= set(range(schema.num_classes))
    assert (np.diff(read.index) > 0).all()
    dropped = sum(each.count for each in read.findings if each.effect == "dropped")
    assert read.records - n <= dropped  # every record that is left out is reported


def attempt(call, *arguments):
    """The result of a call; None if it is refused, in a message of bounded length."""
    try:
        return call(*arguments)
    except DataError as error:
        message = str(error)
    assert 0 < len(message) < 3000
    return None


def test_damaged_schemas(tmp_path):
    rng, path, loaded, read = random.Random(0), tmp_path / "t.csv", 0, 0
    path.write_text(TABLE)
    for _ in range(CASES):
        (tmp_path / "s.toml").write_bytes(damaged(SCHEMA.encode(), rng, 2))
        if (schema := attempt(TableSchema.load, tmp_path / "s.toml")) is None:
            continue
        loaded += 1
        assert TableSchema.parse(str(schema)) == schema
        if (found := attempt(read_table, path, schema)) is not None:
            check(found, schema)
            read += 1
    assert CASES / 50 < loaded < CASES
    assert CASES / 100 < read < loaded


def test_damaged_json_of_a_server():
    rng, text, loaded = random.Random(1), str(TableSchema.parse(SCHEMA)), 0
    for _ in range(CASES):
        schema = attempt(TableSchema.parse, damaged(text.encode(), rng, 2).decode("utf-8", "replace"))
        if schema is not None:
            assert TableSchema.parse(str(schema)) == schema
            loaded += 1
    assert 0 < loaded < CASES


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_damaged_tables(tmp_path, form):
    schema, rng, path, read = TableSchema.parse(SCHEMA), random.Random(2), tmp_path / f"t.{form}", 0
    content = TABLE.encode()
    if form == "parquet":
        rows = [line.replace('"', "").split(";") for line in TABLE.lstrip("\ufeff").splitlines()]
        columns = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
        content = write_parquet(path, columns).read_bytes()
    for _ in range(CASES // 3):
        path.write_bytes(damaged(content, rng, 8 if form == "csv" else 1))
        if (found := attempt(read_table, path, schema)) is not None:
            check(found, schema)
            read += 1
    assert CASES / 60 < read


def test_the_undamaged_table_is_read():
    schema = TableSchema.parse(SCHEMA)
    assert schema.feature_names == ("age", "age (missing)", "weight", "sex = f", "sex = m", "sex (other)")
