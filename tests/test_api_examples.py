"""Public functions have an example in their docstring, and it runs as written; so do the examples of classes."""

import doctest
import importlib
import inspect

import pytest

from coterie.engine.in_process import LocalGrid
from coterie.server import RunConfig, RunFolder, run

# Packages whose functions people call from their own code.
PACKAGES = ("coterie", "coterie.privacy", "coterie.datasets", "coterie.clustering", "coterie.engine", "coterie.client")
SETTINGS = {"strategy": "ifca", "dataset": "digits", "clients": 8, "clusters": 2, "rounds": 2, "epsilon": 8.0}
PATIENTS = """age,cholesterol,label
63,233,1
41,204,0
56,250,1
57,354,0
"""
SCHEMA = """version = 1

[label]
column = "label"
classes = ["0", "1"]

[[columns]]
name = "age"
type = "number"
mean = 50
scale = 10

[[columns]]
name = "cholesterol"
type = "number"
mean = 250
scale = 50
"""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_functions():
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            function = getattr(package, name)
            if inspect.isfunction(function) or (inspect.isclass(function) and ">>>" in (function.__doc__ or "")):
                yield pytest.param(function, id=f"{package.__name__}.{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run and the table of which the examples speak."""
    path = tmp_path_factory.mktemp("examples")
    (path / "runs").mkdir()
    run_folder = RunFolder.create(path / "runs" / "ifca", RunConfig(SETTINGS))
    run(run_folder, LocalGrid(SETTINGS["clients"]))
    run_folder.close()
    (path / "patients.csv").write_text(PATIENTS)
    (path / "schema.toml").write_text(SCHEMA)
    return path


@pytest.mark.parametrize("function", list(public_functions()))
def test_a_public_function_has_an_example_that_runs(function, folder, monkeypatch):
    monkeypatch.chdir(folder)
    module = inspect.getmodule(function)
    found = doctest.DocTestFinder(recurse=False).find(function, module=module, globs=dict(vars(module)))
    (example,) = (each for each in found if each.examples)
    result = doctest.DocTestRunner(optionflags=FLAGS).run(example)
    assert result.failed == 0
    assert result.attempted >= 1
