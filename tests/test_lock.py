"""The lock files: they satisfy pyproject.toml, are complete, have hashes for all, and every package has a licence."""

import ast
import contextlib
import itertools
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from licences import ROOT, TABLE, UNLOCKED, licence, locked, table
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coterie.flower import SUPPORTED

LOCKS = {
    "requirements.lock": ("deploy", "excel", "images", "metrics", "parquet"),
    "requirements-dev.lock": (
        "deploy",
        "docs",
        "excel",
        "images",
        "metrics",
        "mlflow",
        "onnx",
        "parquet",
        "simulation",
        "tensorboard",
        "vision",
        "dev",
    ),
}
PYTHONS = ("3.11.9", "3.12.7", "3.13.0")
# By device: PyTorch's own and CUDA's.
_BY_DEVICE = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")


def pinned(lock, python):
    """Version by name, on Linux."""
    here = {"python_full_version": python, "python_version": python.rpartition(".")[0], "sys_platform": "linux"}
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in locked(ROOT / lock)
        if each.marker is None or each.marker.evaluate(here)
    }


def wanted(extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
    return [each for each in map(Requirement, lines) if each.name != "coterie" and not _BY_DEVICE.fullmatch(each.name)]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_satisfies_what_is_wanted(lock, python):
    versions = pinned(lock, python)
    unmet = [
        str(each)
        for each in wanted(LOCKS[lock])
        if not each.specifier.contains(versions.get(canonicalize_name(each.name), "0"))
    ]
    assert unmet == [], "run make lock"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_is_complete(lock):
    """Of what is installed as locked, every requirement is locked, or depends on the device."""
    versions, missing, seen = pinned(lock, "3.11.9"), set(), 0
    for name, version in versions.items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if found.version != version:
            continue
        seen += 1
        for each in map(Requirement, found.requires or ()):
            needed = each.marker is None or each.marker.evaluate({"extra": ""})
            if needed and canonicalize_name(each.name) not in versions and not _BY_DEVICE.fullmatch(each.name):
                missing.add((name, str(each)))
    assert missing == set()
    assert seen > 0, "no package is installed as it is locked: make clean, then make test"


@pytest.mark.parametrize("lock", [*LOCKS, "requirements-newest.lock"])
def test_every_package_has_hashes_and_no_place(lock):
    text = (ROOT / lock).read_text()
    assert re.fullmatch(r"# Renewed by make lock on \d{4}-\d\d-\d\d\.", text.splitlines()[0])
    entries = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert len(entries) == len(locked(ROOT / lock))
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+( ; .+?)? \\\n", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry
    assert not re.search(r"://|--(extra-)?index|--find-links|@ ", text)
    assert not [each.name for each in locked(ROOT / lock) if _BY_DEVICE.fullmatch(each.name)]


@pytest.mark.parametrize("python", PYTHONS)
def test_development_has_the_versions_of_deployment(python):
    assert pinned("requirements.lock", python).items() <= pinned("requirements-dev.lock", python).items()


def test_the_image_and_make_install_what_is_locked():
    install = "--require-hashes --no-deps "
    assert f"{install}-r requirements.lock" in (ROOT / "docker" / "Dockerfile").read_text()
    assert "!requirements.lock" in (ROOT / ".dockerignore").read_text().split()
    make = (ROOT / "Makefile").read_text()
    assert f"{install}--requirement $(LOCK)" in make
    assert "LOCK   ?= requirements-dev.lock" in make


@pytest.mark.parametrize("python", PYTHONS)
def test_the_newest_flower_is_locked_over_the_other(python):
    versions = pinned("requirements.lock", python) | pinned("requirements-newest.lock", python)
    assert Requirement(f"flwr{SUPPORTED}").specifier.contains(versions["flwr"])
    assert versions["flwr"] > pinned("requirements.lock", python)["flwr"]
    unmet = [
        str(each) for each in wanted(LOCKS["requirements.lock"]) if not each.specifier.contains(versions[each.name])
    ]
    assert unmet == []


def test_every_package_has_a_row_and_a_licence():
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| [^|\n]*\w[^|\n]* \|$", TABLE.read_text(), re.MULTILINE))
    versions = {name: ["not locked"] for name in UNLOCKED}
    for each in locked(ROOT / "requirements.lock"):
        versions.setdefault(each.name, []).append(str(each.specifier).removeprefix("=="))
    assert rows == {name: ", ".join(numbers) for name, numbers in versions.items()}, "run make licences"


def imported():
    """Names of the packages that Coterie's modules import, without Python's own."""
    names = set()
    for path in (ROOT / "coterie").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"coterie"}


def modules_of(package):
    """Names of the modules that a package installs; none if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        record = distribution(package).read_text("RECORD") or ""
        return set(re.findall(r"^(\w+)(?:/|\.py,)", record, re.MULTILINE))
    return set()


def test_every_imported_package_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    under_other_names = {name for name in imported() if canonicalize_name(name) not in declared}
    assert under_other_names - {name for package in declared for name in modules_of(package)} == set()


def test_no_package_of_a_deployment_is_licensed_under_the_gpl():
    assert re.findall(r"^\|.*(?:GPL|General Public).*$", TABLE.read_text(), re.MULTILINE) == []
    assert "kmedoids" not in pinned("requirements.lock", "3.11.9")


def test_the_table_is_made_from_what_packages_state():
    assert licence("pyyaml") == "MIT License"
    assert licence("flwr") == "Apache-2.0"
    assert table().startswith(TABLE.read_text().partition("| absl-py")[0])
