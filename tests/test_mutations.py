"""The list of mutations (tests/mutations.txt) matches the code: each old line is there, once, and each test exists."""

import ast
from functools import cache

from mutations import MUTATIONS, ROOT


@cache
def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def problems(mutation):
    """What is wrong with an entry of the list."""
    source = (ROOT / mutation.file).read_text()
    if source.count(mutation.old) != 1:
        yield f"{mutation.file} has the line {source.count(mutation.old)} times"
    try:
        ast.parse(source.replace(mutation.old, mutation.new))
    except SyntaxError as error:
        yield f"{mutation.new} is no Python: {error}"
    file, _, name = mutation.test.partition("::")
    if name not in functions_of(ROOT / file):
        yield f"{mutation.test} is no test"


def test_each_line_occurs_once_and_each_test_exists():
    assert {mutation.name: found for mutation in MUTATIONS if (found := list(problems(mutation)))} == {}


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
