"""Types of the public API."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from kit.tables import for_rows

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coterie"
#: Packages, and modules, whose names users import.
ROOMS = [
    *("clustering", "datasets", "models", "privacy", "server", "strategies"),
    *("client.backend", "client.cohort", "client.handlers", "client.scores", "client.state"),
    *("engine.in_process", "engine.nodes", "engine.ray", "engine.workers"),
    *("report.comparison", "report.page", "report.plots", "report.runs"),
    *("rounds.client_registry", "rounds.exchange", "rounds.phases", "rounds.recorder", "rounds.run_state"),
]


def untyped_keywords(source):
    """Public functions and methods that take ``**names: Any``."""

    def visit(nodes):
        for node in nodes:
            private = getattr(node, "name", "").startswith("_") and not getattr(node, "name", "").startswith("__")
            if isinstance(node, ast.ClassDef) and not private:
                yield from visit(node.body)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not private:
                kind = node.args.kwarg and node.args.kwarg.annotation
                if kind is not None and ast.unparse(kind) == "Any":
                    yield node.name

    return list(visit(ast.parse(source).body))


def test_no_public_function_takes_keywords_of_any_type():
    untyped = {str(path): untyped_keywords(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in untyped.items() if names} == {}


def test_untyped_keywords_are_found():
    source = "class A:\n def f(self, **n: Any): ...\n def _g(self, **n: Any): ...\n def h(self, **n: int): ...\n"
    assert untyped_keywords(source + "def __call__(**n: Any): ...\ndef _p(**n: Any): ...\n") == ["f", "__call__"]


def names_of(module):
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]


def signatures(module):
    for name in names_of(module):
        found = getattr(module, name)
        if not callable(found):
            continue
        yield name, found
        if inspect.isclass(found):
            yield from (
                (f"{name}.{each}", getattr(found, each))
                for each, value in vars(found).items()
                if (each == "__init__" or not each.startswith("_"))
                and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
            )


@for_rows("room", ROOMS)
def test_paths_may_be_strings(room):
    module, read = import_module(f"coterie.{room}"), 0
    for name, found in signatures(module):
        if not getattr(found, "__module__", "").startswith("coterie"):
            continue
        try:
            parameters = inspect.signature(found).parameters.values()
        except (TypeError, ValueError):
            continue
        read += 1
        stored = inspect.isclass(found) and found.__init__.__qualname__.startswith("__create_fn__")
        for parameter in parameters:
            kinds = {kind.strip() for kind in str(parameter.annotation).split("|")}
            assert stored or "Path" not in kinds or "str" in kinds, f"{name}({parameter})"
    assert read


#: Planted lines of coterie/client/record_level.py, and what the type check says.
PLANTED = {
    "an exact sum": (
        "    return losses.per_unit(None if shard.units is None else shard.units.of_record)",
        "    cohort.request.round = float(losses.sum())\n    return losses.per_unit(None)",
        '"PerRecord" has no attribute "sum"',
    ),
    "values of records where those of units belong": (
        "    return losses.per_unit(None if shard.units is None else shard.units.of_record)",
        "    return losses",
        'got "PerRecord", expected "PerUnit"',
    ),
    "exact counts of scores": (
        "histograms.append(counts.noisy(cohort.plan(client.client_id).held_out_epsilon, rng).tolist())",
        "histograms.append(counts.tolist())",
        '"UnitCounts" has no attribute "tolist"',
    ),
    "an exact number of records": (
        "histograms.append(counts.noisy(cohort.plan(client.client_id).held_out_epsilon, rng).tolist())",
        "histograms.append([float(counts)])",
        'Argument 1 to "float" has incompatible type "UnitCounts"',
    ),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """What mypy says of a user's program, of it with two mistakes, and of a module with each planted line, by file.

    One run, by the options of `make lint`, strict among them, whose cache this shares.
    """
    folder, program = tmp_path_factory.mktemp("typed"), ROOT / "tests" / "typing" / "program.py"
    text = program.read_text()
    wrong = text.replace("clip_norm=0.3", "clip_nrom=0.3").replace("server_lr=1.5", 'server_lr="fast"')
    assert wrong != text
    (folder / "wrong.py").write_text(wrong)
    source = (PACKAGE / "client" / "record_level.py").read_text()
    for number, (line, planted, _) in enumerate(PLANTED.values()):
        assert source.count(line) == 1
        (folder / f"planted_{number}.py").write_text(source.replace(line, planted))
    paths = [program, *sorted(folder.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--no-pretty", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {path.stem: "\n".join(line for line in lines if f"{path.name}:" in line) for path in paths}


@pytest.mark.slow
def test_a_user_s_program_passes_mypy_strict(complaints):
    assert complaints["program"] == ""
    assert 'Unexpected keyword argument "clip_nrom"' in complaints["wrong"]
    assert 'has incompatible type "str"; expected "float"' in complaints["wrong"]


@pytest.mark.slow
def test_exact_values_of_records_in_a_reply_fail_the_type_check(complaints):
    missing = [name for n, (name, (*_, said)) in enumerate(PLANTED.items()) if said not in complaints[f"planted_{n}"]]
    assert missing == [], complaints
