"""Imports point one way: cli -> server -> one_shot -> strategies -> rounds -> wire -> privacy, and client -> wire."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "coterie"

#: Rooms that each room may import.
ALLOWED = {
    "backoff": set(),
    "bounds": set(),
    "files": set(),
    "generators": set(),
    "privacy": {"bounds", "files", "settings"},
    "datasets": {"bounds", "files", "plugins", "settings"},
    "models": {"plugins"},
    "clustering": {"models", "plugins", "progress"},
    "messages": set(),
    "model_card": {"bounds", "wire"},
    "inference": {"client", "datasets", "files", "messages", "model_card", "models"},
    "wire": {"bounds", "messages", "privacy"},
    "logs": set(),
    "progress": set(),
    "plugins": set(),
    "settings": {"bounds", "plugins"},
    "report": {"files", "methods", "privacy", "settings", "strategies"},
    "rounds": {"privacy", "wire", "messages", "logs"},
    "strategies": {"bounds", "rounds", "clustering", "models", "privacy", "settings", "wire", "messages"},
    "one_shot": {"bounds", "strategies", "rounds", "clustering", "models", "privacy", "settings", "wire", "messages"},
    "methods": {"strategies", "one_shot", "plugins", "settings"},
    "client": {"files", "clustering", "datasets", "models", "privacy", "wire", "messages", "logs", "progress"},
    "engine": {"client", "generators", "rounds", "privacy", "messages", "logs", "progress"},
    "server": {
        "bounds",
        "backoff",
        "files",
        "methods",
        "rounds",
        "settings",
        "strategies",
        "privacy",
        "datasets",
        "models",
        "wire",
        "messages",
        "model_card",
        "logs",
        "report",
        "progress",
    },
    "guard": {"client", "files", "logs", "privacy"},
    "deploy": {"backoff", "files", "generators", "logs"},
    "audit": {"engine", "client", "rounds", "strategies", "privacy", "datasets", "messages"},
    "bench": {
        "progress",
        "files",
        "generators",
        "report",
        "server",
        "engine",
        "client",
        "clustering",
        "methods",
        "one_shot",
        "strategies",
        "rounds",
        "privacy",
        "datasets",
        "models",
        "messages",
    },
    "testing": {"engine", "methods", "rounds", "strategies", "privacy", "settings", "wire", "messages"},
    "cli": {
        "inference",
        "progress",
        "files",
        "guard",
        "audit",
        "bench",
        "deploy",
        "report",
        "server",
        "engine",
        "client",
        "methods",
        "privacy",
        "datasets",
        "models",
        "logs",
        "plugins",
        "settings",
    },
}


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
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


def test_no_file_is_called_utils():
    assert not list(PACKAGE.rglob("*utils*"))


def imported_at_load(path):
    """Modules of the package that are imported when this file is."""

    def walk(nodes):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse)
                continue
            yield node
            yield from walk(ast.iter_child_nodes(node))

    for node in walk(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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
    assert imports["coterie.bench.central"] >= {"coterie.progress", "coterie.clustering"}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
