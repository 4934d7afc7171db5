"""Size of functions; ruff checks their complexity."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "coterie"
MAX_LINES = 60


def too_long(source):
    """Functions of more lines than allowed, without ``# long: reason`` on the line of their def."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            reason = lines[node.lineno - 1].partition("# long:")[2].strip()
            if length > MAX_LINES and not reason:
                yield f"{node.name}: {length} lines"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_fit_on_a_screen(path):
    assert not list(too_long(path.read_text()))


def test_a_long_function_needs_a_reason():
    body = "    x = 1\n" * MAX_LINES
    assert list(too_long(f"def f():\n{body}")) == [f"f: {MAX_LINES + 1} lines"]
    assert list(too_long(f"def f():  # long:\n{body}"))
    assert not list(too_long(f"def f():  # long: a table\n{body}"))
    assert not list(too_long(f"def f():\n{body}".removesuffix("    x = 1\n")))
