"""Imports point one way: cli -> server -> strategies -> rounds -> wire -> privacy, and client -> wire."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "coterie"

#: Rooms that each room may import.
ALLOWED = {
    "fields": set(),
    "files": set(),
    "privacy": {"fields", "files"},
    "logs": set(),
    "tasks": {"fields"},
    "deploy": {"fields", "files"},
    "datasets": {"fields", "files", "tasks"},
    "models": {"fields", "files", "tasks"},
    "clustering": {"fields", "logs", "models"},
    "wire": {"datasets", "fields", "models", "privacy", "tasks"},
    "flower": {"deploy", "fields", "files", "logs", "results", "wire"},
    "rounds": {"fields", "logs", "privacy", "results", "wire"},
    "strategies": {"clustering", "fields", "models", "privacy", "rounds", "wire"},
    "client": {
        "clustering",
        "datasets",
        "deploy",
        "fields",
        "files",
        "flower",
        "logs",
        "models",
        "privacy",
        "tasks",
        "wire",
    },
    "engine": {"client", "flower", "logs", "privacy", "rounds", "wire"},
    "report": {"deploy", "fields", "files", "models", "privacy", "results", "strategies", "tasks"},
    "guard": {"client", "fields", "files", "logs", "models", "privacy", "wire"},
    "inference": {"client", "datasets", "fields", "files", "models", "results", "tasks", "wire"},
    "server": {
        "client",
        "datasets",
        "deploy",
        "engine",
        "fields",
        "files",
        "flower",
        "logs",
        "models",
        "privacy",
        "report",
        "results",
        "rounds",
        "strategies",
        "tasks",
        "wire",
    },
    "testing": {"client", "engine", "fields", "flower", "privacy", "rounds", "strategies", "tasks", "wire"},
    "audit": {"client", "datasets", "engine", "fields", "models", "privacy", "rounds", "strategies", "wire"},
    "bench": {
        "client",
        "clustering",
        "datasets",
        "engine",
        "files",
        "flower",
        "logs",
        "models",
        "privacy",
        "report",
        "results",
        "server",
        "strategies",
        "wire",
    },
    "cli": {
        "audit",
        "bench",
        "client",
        "datasets",
        "deploy",
        "fields",
        "files",
        "flower",
        "guard",
        "inference",
        "logs",
        "models",
        "privacy",
        "report",
        "results",
        "server",
        "strategies",
        "tasks",
    },
    "results": {"fields", "files", "tasks"},
}


@cache
def imports_of(path):
    """The imports of a file, and whether each is executed when the file is imported."""

    def walk(nodes, loaded):
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node, loaded
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.body, loaded=False)
                yield from walk(node.orelse, loaded)
            else:
                later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(ast.iter_child_nodes(node), loaded and not later)

    return list(walk(ast.parse(path.read_text()).body, loaded=True))


def rooms_imported(path):
    for node, _ in imports_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{path}: import by full name"
            names = [node.module] if node.module != "coterie" else [f"coterie.{a.name}" for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "coterie" and len(parts) > 1 and not parts[1].startswith("__"):
                yield parts[1]


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    room = room_of(path)
    if room != "__init__":
        wrong = set(rooms_imported(path)) - ALLOWED[room] - {room}
        assert not wrong, f"{room} may not import {sorted(wrong)}"


def test_every_room_is_governed():
    assert {room_of(p) for p in PACKAGE.rglob("*.py")} == {*ALLOWED, "__init__"}


def test_there_are_at_most_24_rooms_on_10_layers():
    depth = {}
    for room in TopologicalSorter(ALLOWED).static_order():  # raises CycleError, which names a circle
        depth[room] = 1 + max((depth[used] for used in ALLOWED[room]), default=0)
    assert len(depth) <= 24
    assert max(depth.values()) <= 10, depth


def test_no_file_is_called_utils():
    assert not list(PACKAGE.rglob("*utils*"))


def imported_at_load(path):
    """Modules of the package that are imported when this file is."""
    for node in (node for node, loaded in imports_of(path) if loaded):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in MODULES)
            if any(name not in MODULES for name in inner):
                yield node.module


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def test_no_modules_import_each_other_in_a_circle():
    imports = {name: set(imported_at_load(path)) & set(MODULES) for name, path in MODULES.items()}
    assert imports["coterie.bench.central"] >= {"coterie.logs", "coterie.clustering"}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
