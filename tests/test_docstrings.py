"""Every public name has a docstring: modules, classes, functions and methods without a leading underscore."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "coterie"


def undocumented(source):
    """Public names of a module that lack a docstring."""
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        yield "the module"

    def names(node, prefix):
        for each in node.body:
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or each.name.startswith("_"):
                continue
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in each.decorator_list}
            if not ast.get_docstring(each) and not decorators & {"overload", "override", "setter"}:
                yield f"{prefix}{each.name}"
            if isinstance(each, ast.ClassDef):
                yield from names(each, f"{prefix}{each.name}.")

    yield from names(tree, "")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_names_have_docstrings(path):
    assert list(undocumented(path.read_text())) == []


SOURCE = '''"""A module."""

class A:
    """A."""

    def f(self): ...
    def _g(self): ...
    @f.setter
    def f(self, x): ...

def h(): ...
'''


def test_what_counts():
    assert list(undocumented(SOURCE)) == ["A.f", "h"]
    assert list(undocumented("x = 1")) == ["the module"]
