"""300 generated sites: what is read equals the source record by record, or is accounted for; nothing else."""

import csv
import gzip
import io
import json
import random
from collections import Counter

import numpy as np
import pytest
from kit.site_tables import category_column, label_column, number_column

from coterie.datasets import DataError, TableSchema, read_table

SITES = 300
SCHEMA = 'version = 1\nignore = ["note"]\n' + label_column("no", "yes")
SCHEMA += number_column("age", 0, 1, 'missing = "indicator"') + category_column("yaş", ["kadın", "erkek"])
SCHEMA += '[[columns]]\nname = "smoker"\ntype = "boolean"\n'
NAMES = ["age", "yaş", "smoker", "outcome", "note"]
MARKERS = ["", "NA", "NaN", "null", "?"]
#: Texts of notes, some of which hold lines of a table; the cells of each are those of a record.
NOTES = ["", "stable", 'said "no"', "fever\ncough", "a;b,c\td|e", "earlier:\n{rows}end", "\n\n", "naïve"]
BOOLEANS = [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("t", "f"), ("1", "0")]
ENCODINGS = ["utf-8", "utf-8-sig", "cp1254", "iso-8859-9", "utf-16", "utf-16-le"]


def grouped(whole, separator):
    return f"{whole:,}".replace(",", separator)


class Site:
    """A site: its records, how its program writes them, and the bytes of its file."""

    def __init__(self, rng):
        self.rng = rng
        self.encoding, self.delimiter = rng.choice(ENCODINGS), rng.choice(",;\t|")
        self.decimal = rng.choice(".," if self.delimiter != "," else ".")
        self.thousands = rng.choice(["none", *({",", ".", " ", "'"} - {self.decimal})])
        self.order, self.yes_no = rng.sample(NAMES, len(NAMES)), rng.choice(BOOLEANS)
        self.quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        self.end, self.title = rng.choice(["\n", "\r\n"]), rng.choice([0, 0, 2])
        self.trailing = rng.random() < 0.2
        self.sep = rng.random() < 0.2 and not self.title
        self.records = [self.record(i) for i in range(rng.randint(0, 25))]

    def record(self, i):
        """Features, as they must be read, and the label. Every age is another one."""
        rng = self.rng
        age = None if rng.random() < 0.1 else rng.choice([i + 0.5, 1000 + i, 1_000_000 + i + 0.25])
        sex, smoker, label = rng.choice(["kadın", "erkek"]), rng.randrange(2), rng.randrange(2)
        features = [age or 0, float(age is None), float(sex == "kadın"), float(sex == "erkek"), float(smoker)]
        return features, label, {"age": self.number(age), "yaş": sex, "smoker": self.yes_no[1 - smoker]}

    def number(self, value):
        if value is None:
            return self.rng.choice(MARKERS)
        whole, fraction = int(value), f"{value % 1:.2f}"[1:] if value % 1 else ""
        text = grouped(whole, self.thousands) if self.thousands != "none" else str(whole)
        return text + fraction.replace(".", self.decimal)

    def rows(self):
        fake = self.delimiter.join(["77"] * len(NAMES)) + "\n"
        for _, label, cells in self.records:
            note = self.rng.choice(NOTES).replace("{rows}", fake)
            cells = cells | {"outcome": ("no", "yes")[label], "note": note}
            yield [cells[name] for name in self.order]

    def written(self):
        """The text of the file, and the position of its first record."""
        text = f"Laboratory{self.end}{self.end}" if self.title else f"sep={self.delimiter}{self.end}" * self.sep
        begin = 0
        for row in (self.order, *self.rows()):
            line = io.StringIO()
            csv.writer(line, delimiter=self.delimiter, quoting=self.quoting, lineterminator="\n").writerow(row)
            last = self.delimiter if self.trailing and begin else ""
            text += line.getvalue()[:-1] + last + self.end
            begin = begin or len(text)
        return text, begin

    def schema(self):
        file = {"delimiter": "tab" if self.delimiter == "\t" else self.delimiter, "decimal": self.decimal}
        file |= {"thousands": self.thousands, "encoding": self.encoding, "skip-lines": self.title}
        file["trailing-delimiter"] = self.trailing
        lines = [f"{key} = {json.dumps(value)}" for key, value in file.items()]
        return TableSchema.parse("\n".join([f"{SCHEMA}[file]", *lines]))


def damaged(text, begin, site, rng):
    """The bytes of a file with one change after its column names, and the kind of change."""
    if begin == len(text):
        return text.encode(site.encoding), "nothing"
    place, bad = rng.randrange(begin, len(text)), {"utf-8": b"\xff", "cp1254": b"\x81"}.get(site.encoding)
    kind = rng.choice(["truncated", "zero", "quote", "line break", "bytes" if bad else "quote"])
    if kind == "bytes":
        return text[:place].encode(site.encoding) + bad + text[place:].encode(site.encoding), kind
    added, rest = {"zero": "\0", "quote": '"', "line break": "\n"}.get(kind, ""), text[place:]
    return (text[:place] + added + (rest if added else "")).encode(site.encoding), kind


def source(site):
    """Features and label of every record, as text that identifies it."""
    return [(*np.float32(features).tolist(), label) for features, label, _ in site.records]


def read(site, path, content):
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    table = read_table(path, site.schema())
    rows = [(*features, int(label)) for features, label in zip(table.x.tolist(), table.y.tolist(), strict=True)]
    return table, rows


@pytest.mark.parametrize("part", range(6))
def test_what_is_read_is_the_source(tmp_path, part):
    for seed in range(part, SITES, 6):
        site = Site(random.Random(seed))
        path = tmp_path / ("t.csv.gz" if seed % 5 == 0 else "t.csv")
        table, rows = read(site, path, site.written()[0].encode(site.encoding))
        assert rows == source(site), seed
        assert (table.records, table.errors) == (len(rows), ()), seed
        assert table.missing.get("age", 0) == sum(features[1] for features, *_ in site.records), seed


@pytest.mark.parametrize("part", range(6))
def test_what_is_damaged_is_accounted_for(tmp_path, part):
    refused = []
    for seed in range(part, SITES, 6):
        rng = random.Random(seed)
        site = Site(rng)
        content, kind = damaged(*site.written(), site, rng)
        try:
            table, rows = read(site, tmp_path / "t.csv", content)
        except DataError as error:
            refused.append(kind if "the record that begins in line" in str(error) else "nothing")
            continue
        rest = Counter(source(site))
        others = [row for row in rows if not (rest[row] > 0 and not rest.subtract([row]))]
        # A truncated number, or one after a line break, looks like a valid number.
        assert len(others) <= (kind in ("truncated", "line break")), (seed, kind, others)
        assert table.findings or not others, (seed, kind)
        dropped = sum(finding.count for finding in table.errors)
        assert table.records - len(rows) <= dropped, (seed, kind)
        if kind != "truncated":
            assert len(site.records) - len(rows) <= dropped, (seed, kind)
    assert "nothing" not in refused
    assert refused.count("quote") > 0
    assert len(refused) < SITES / 6 / 2
