"""docs/threats.md: every row names a test that exists."""

import re

from kit.documented import ROOT
from kit.tables import for_rows

ROWS = [
    line.strip("|").split(" | ")
    for line in (ROOT / "docs" / "threats.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| Attack")
]


def test_there_are_enough_rows_and_none_twice():
    assert len(ROWS) >= 40
    assert len({row[0] for row in ROWS} - {" The same"}) >= len(ROWS) - 1


@for_rows("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_a_row_names_a_test(row):
    _, happens, named = row
    assert happens
    file, name = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)` ?", named).groups()
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text()
