"""The structure of the package: names of files and variables, sizes of classes and functions; ruff: complexity."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "coterie"
#: Files of one meaning in every subpackage.

SHARED = {"__init__.py", "settings.py", "app.py", "errors.py"}
#: A file of a command has the name of the command, that of an attack the name of its target.
NAMED_AFTER_OTHERS = {"cli", "commands", "audit"}
#: Names that do not say what they hold.
VAGUE = {"found", "each", "own", "part", "place", "known", "kind", "about"}
LARGEST_SHARE = 0.01
MAX_MEMBERS, MAX_FIELDS, MAX_LINES = 20, 12, 60
REASON = "  # large: "
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports a file by its last name, and refuses the second one."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_one_file_name_has_one_meaning():
    named = [path for path in SOURCES if NAMED_AFTER_OTHERS.isdisjoint(path.relative_to(PACKAGE).parts)]
    names = Counter(path.name for path in named)
    assert {name for name, number in names.items() if number > 1} <= SHARED


def test_no_file_is_called_utils():
    assert not [path for path in SOURCES if "utils" in path.name]


@cache
def structure(source):
    """Names of large classes and of long functions without a reason beside them, and names of variables."""
    lines, large, long, bindings = source.split("\n"), [], [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bindings.append(node.id)
        elif isinstance(node, ast.arg):
            bindings.append(node.arg)
        elif isinstance(node, ast.ClassDef) and is_large(node) and REASON not in lines[node.lineno - 1]:
            large.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_LINES and not lines[node.lineno - 1].partition("# long:")[2].strip():
                long.append(f"{node.name}: {length} lines")
    return large, long, bindings


def is_large(node):
    """Whether a class has many public members or fields."""
    functions = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    annotated = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    fields = [part for part in annotated if "ClassVar" not in ast.unparse(part.annotation)]
    return sum(not name.startswith("_") for name in functions) > MAX_MEMBERS or len(fields) > MAX_FIELDS


def test_a_large_class_and_a_long_function_have_a_reason():
    without = {str(path): (large, long) for path, source in SOURCES.items() for large, long, _ in [structure(source)]}
    assert {path: names for path, names in without.items() if names != ([], [])} == {}


def test_what_a_large_class_is():
    fields = "".join(f"    field_{i}: int\n" for i in range(MAX_FIELDS + 1))
    assert structure(f"class Large:\n{fields}")[0] == ["Large"]
    assert structure(f"class Large:{REASON}a table\n{fields}")[0] == []
    members = "".join(f"    def member_{i}(self): ...\n" for i in range(MAX_MEMBERS + 1))
    assert structure(f"class Large:\n{members}")[0] == ["Large"]


def test_what_a_long_function_is():
    body = "    x = 1\n" * MAX_LINES
    assert structure(f"def f():\n{body}")[1] == [f"f: {MAX_LINES + 1} lines"]
    assert structure(f"def f():  # long:\n{body}")[1] != []
    assert structure(f"def f():  # long: a table\n{body}")[1] == []
    assert structure(f"def f():\n{body}".removesuffix("    x = 1\n"))[1] == []


def test_names_say_what_they_hold():
    names = [name for source in SOURCES.values() for name in structure(source)[2]]
    vague = [name for name in names if name in VAGUE]
    assert len(vague) < LARGEST_SHARE * len(names), Counter(vague)
