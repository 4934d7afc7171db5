"""docs/extending.md: every change applies to a copy of the package, and its commands run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
_NEW = re.compile(r"^`(\S+)` \(new\):\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CHANGED = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections():
    """Text of every section by its title."""
    text = (ROOT / "docs/extending.md").read_text()
    titles = [*re.finditer(r"^## (.*)$", text, re.MULTILINE), None]
    return {one[1]: text[one.end() : other.start() if other else None] for one, other in pairwise(titles)}


SECTIONS = {title: text for title, text in sections().items() if _COMMANDS.search(text)}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "coterie", tmp_path / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def applied(text, folder):
    """Apply the change of a section; return the files that it adds or changes."""
    files = []
    for name, content in _NEW.findall(text):
        assert not (folder / name).exists(), name
        (folder / name).write_text(content)
        files.append(name)
    for change in _CHANGED.findall(text):
        outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, env=outside, check=True)
        files += re.findall(r"^\+\+\+ b/(\S+)$", change, re.MULTILINE)
    assert all((folder / name).read_text() != _text(ROOT / name) for name in files)
    return files


def _text(path):
    return path.read_text() if path.exists() else ""


def coterie(folder, *words):
    """Run a command with the package of a folder."""
    command = [sys.executable, "-c", "from coterie.cli import main; main()", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, **_CAPTURED)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_CAPTURED = {"capture_output": True, "text": True, "timeout": 240, "check": False}


def test_every_kind_of_extension_has_a_change():
    assert list(SECTIONS) == ["A method", "A mechanism", "A data set", "A setting"]


@pytest.mark.parametrize("title", SECTIONS)
def test_a_change_applies_touches_two_files_at_most_and_passes_lint(title, copy):
    files = applied(SECTIONS[title], copy)
    assert 1 <= len(files) <= 2
    shutil.copy(ROOT / "pyproject.toml", copy)
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *check, *files], cwd=copy, **_CAPTURED)
        assert done.returncode == 0, done.stdout


def listed(folder):
    """Names of all mechanisms, methods and data sets of the package in a folder."""
    call = (
        "import json; from coterie.datasets import DATASETS; from coterie.strategies.registry import STRATEGIES; "
        "from coterie.privacy.mechanisms import PLANS; "
        "print(json.dumps([sorted(each) for each in (PLANS, STRATEGIES, DATASETS)]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", call], cwd=folder, env=environment, **_CAPTURED)
    assert done.returncode == 0, done.stderr
    return [set(names) for names in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def names_before():
    """Of the package without a change."""
    names = listed(ROOT)
    assert all(names)
    return names


@pytest.mark.parametrize(
    ("title", "added"),
    [
        ("A method", [set(), {"ifca-huber"}, set()]),
        ("A mechanism", [{"shrunk"}, set(), set()]),
        ("A data set", [set(), set(), {"rings"}]),
        ("A setting", [set(), set(), set()]),
    ],
)
def test_a_change_adds_its_name_and_removes_none(title, added, copy, names_before):
    applied(SECTIONS[title], copy)
    assert listed(copy) == [names | new for names, new in zip(names_before, added, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_its_commands_run(title, copy):
    applied(SECTIONS[title], copy)
    for line in "".join(_COMMANDS.findall(SECTIONS[title])).splitlines():
        program, *words = shlex.split(line)
        assert program == "coterie"
        coterie(copy, *words)


@pytest.mark.slow
def test_the_method_s_option_changes_what_clients_compute(copy):
    applied(SECTIONS["A method"], copy)
    common = "run --set clients=20 --set groups=2 --set clusters=2 --set rounds=2 --set seed=1 --set privacy-unit=none"
    found = {}
    for label, more in {
        "ifca": "--set strategy=ifca",
        "off": "--set strategy=ifca-huber --set huber-mu=0",
        "on": "--set strategy=ifca-huber --set huber-mu=5",
    }.items():
        coterie(copy, *shlex.split(f"{common} {more} --out {label}"))
        files = sorted((copy / label / "models").glob("*.safetensors"))
        found[label] = [{name: values.tobytes() for name, values in load_file(file).items()} for file in files]
    assert found["ifca"] == found["off"] != found["on"]
