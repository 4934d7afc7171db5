"""The structure of the package: names of files and variables, sizes of classes."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "coterie"
#: Files of one meaning in every subpackage.

SHARED = {"__init__.py", "settings.py", "app.py", "errors.py"}
#: A file of a command has the name of the command, that of an attack the name of its target.
NAMED_AFTER_OTHERS = ("cli", "audit")
#: Names that do not say what they hold.
VAGUE = {"found", "each", "own", "part", "place", "known", "kind", "about"}
LARGEST_SHARE = 0.01
MAX_MEMBERS, MAX_FIELDS = 20, 12
REASON = "  # large: "
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_one_file_name_has_one_meaning():
    names = Counter(path.name for path in SOURCES if path.relative_to(PACKAGE).parts[0] not in NAMED_AFTER_OTHERS)
    assert {name for name, number in names.items() if number > 1} <= SHARED


def large_classes(source):
    """Names of the classes with many public members or fields and no reason beside them."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or REASON in lines[node.lineno - 1]:
            continue
        functions = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
        annotated = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        fields = [part for part in annotated if "ClassVar" not in ast.unparse(part.annotation)]
        if sum(not name.startswith("_") for name in functions) > MAX_MEMBERS or len(fields) > MAX_FIELDS:
            yield node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_large_class_has_a_reason(path):
    assert list(large_classes(SOURCES[path])) == []


def test_what_a_large_class_is():
    fields = "".join(f"    field_{i}: int\n" for i in range(MAX_FIELDS + 1))
    assert list(large_classes(f"class Large:\n{fields}")) == ["Large"]
    assert list(large_classes(f"class Large:{REASON}a table\n{fields}")) == []
    members = "".join(f"    def member_{i}(self): ...\n" for i in range(MAX_MEMBERS + 1))
    assert list(large_classes(f"class Large:\n{members}")) == ["Large"]


def bindings(source):
    """Names that a module gives to variables and parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_say_what_they_hold():
    names = [name for source in SOURCES.values() for name in bindings(source)]
    vague = [name for name in names if name in VAGUE]
    assert len(vague) < LARGEST_SHARE * len(names), Counter(vague)
