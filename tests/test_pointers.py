"""Every pointer `path.py::name` of code and pages names a file of the repository and a definition in it."""

import ast
import re
from functools import cache
from pathlib import Path

from kit.tables import for_rows

ROOT = Path(__file__).parents[1]
FOLDERS = ("coterie", "benchmarks", "docs", "examples", "docker")
FILES = [
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md"}),
    *ROOT.glob("*.md"),
]
MODULES = [path for folder in ("coterie", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
_POINTER = re.compile(r"([\w/.-]+\.py)::(\w+)((?:, _?\w+(?=[,`)\n]|$))*)")


def pointers(text):
    """(path, name) of every pointer; more names may follow the first, after commas."""
    for path, name, more in _POINTER.findall(text):
        yield from ((path, each) for each in [name, *more.split(", ")[1:]])


def resolves(path, name):
    """Whether one file that ends in the path defines the name: a function, class, method or variable."""
    found = [file for file in MODULES if f"/{file.relative_to(ROOT)}".endswith(f"/{path}")]
    return len(found) == 1 and name in definitions(found[0])


@cache
def definitions(path):
    """Names of the functions, classes, methods and variables of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_every_pointer_resolves():
    found = {(path, name) for file in FILES for path, name in pointers(file.read_text())}
    assert ("client/handlers.py", "_assign") in found
    assert [pointer for pointer in sorted(found) if not resolves(*pointer)] == []


@for_rows(
    ("pointer", "there"),
    [
        ("client/handlers.py::train", False),
        ("client/local_evaluation.py::evaluate", True),
        ("client/no_file.py::train", False),
        ("__init__.py::PLANS", False),
        ("mechanisms/__init__.py::PLANS", True),
    ],
)
def test_what_resolves(pointer, there):
    assert resolves(*pointer.split("::")) == there


def test_every_answer_of_the_architecture_page_names_one_or_two_files():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| Question | Answer |\n| --- | --- |\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert len(rows) >= 10
    for question, answer in rows:
        paths = re.findall(r"`([\w/]+\.py|[\w/]+/)`", answer)
        assert 1 <= len(paths) <= 2 or "](privacy.md)" in answer, question
        assert all((ROOT / "coterie" / path).exists() for path in paths), question
