"""The list of mutations (tests/mutations.py) matches the code: each old line is there, once, and each test exists."""

import ast

import pytest
from mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_occurs_once_and_the_test_exists(mutation):
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    ast.parse(source.replace(mutation.old, mutation.new))
    file, _, name = mutation.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
