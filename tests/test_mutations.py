"""The list of mutations (tests/mutations.py) matches the code: each old line is there, once, and each test exists."""

import ast
from functools import cache

import pytest
from mutations import MUTATIONS, ROOT


@cache
def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_occurs_once_and_the_test_exists(mutation):
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    ast.parse(source.replace(mutation.old, mutation.new))
    file, _, name = mutation.test.partition("::")
    assert name in functions_of(ROOT / file)


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
