"""The private parts of Flower on which Coterie relies; this file fails first with another version of Flower."""

import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.tables import for_rows

import coterie
from coterie.flower import PRIVATE, SUPPORTED, check, find
from coterie.flower.transport import nodes_speak_http
from coterie.site.errors import DeployError

PACKAGE = Path(coterie.__file__).parent
#: How source code reaches for names that a module does not export.
PRIVATE_USE = re.compile(r"vars\(flower\)|__dict__\[|flower\._[a-z]|\.__kwdefaults__")


#: The parts that the installed version of Flower needs.
PARTS = [part for part in PRIVATE if nodes_speak_http() or not part.over_http]
by_name = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


def holder(name):
    """The object of Flower that has a private part, and the name of the attribute."""
    container, _, attribute = name.rpartition(".")
    owner = find(container)
    if not inspect.ismodule(owner) or not owner.__name__.startswith("flwr"):  # a class, or such as time
        return holder(container)
    return owner, attribute


def test_the_supported_versions_are_those_that_pip_installs():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert f"flwr{SUPPORTED}" in project["dependencies"]
    assert f"flwr[simulation]{SUPPORTED}" in project["optional-dependencies"]["simulation"]


def test_the_installed_version_has_all_parts():
    check(*{part.user for part in PRIVATE})


@by_name
def test_a_part_that_is_gone_is_one_line(part, monkeypatch):
    monkeypatch.delattr(*holder(part.name))
    with pytest.raises(DeployError) as refused:
        check(part.user)
    assert str(refused.value).count(f"it has no {part.name} ") == 1


@pytest.mark.parametrize("part", [part for part in PARTS if part.parameters], ids=lambda part: part.name)
def test_a_part_with_other_parameters_is_one_line(part, monkeypatch):
    container, _, attribute = part.name.rpartition(".")
    monkeypatch.setattr(find(container), attribute, lambda *, other: other)
    with pytest.raises(DeployError) as refused:
        check(part.user)
    (line,) = [line for line in str(refused.value).splitlines() if part.name in line]
    assert all(name in line for name in part.parameters)


START = """
from importlib import import_module
delattr(import_module("flwr.{module}"), "{name}")
{start}
"""
MAIN = "from coterie.deploy.{} import main; main({})"
SUPERLINK = "import sys; from coterie.cli import main; sys.argv = ['coterie', 'superlink']; main()"
FLEET = ("main", "create_app") if nodes_speak_http() else ("cli.flower_superlink", "generic_create_grpc_server")
PROGRAMS = {
    "supernode": ("supernode.start_client_internal", "_push_messages", MAIN.format("supernode", [])),
    "superexec": ("supercore.superexec.run_superexec", "get_executor", MAIN.format("superexec", "")),
    "superlink": (f"superlink.{FLEET[0]}", FLEET[1], SUPERLINK),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_not_start_without_a_part(program):
    module, name, start = PROGRAMS[program]
    code = START.format(module=module, name=name, start=start)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    first, *lines = done.stderr.strip().splitlines()
    assert first.startswith(f"error: flwr {version('flwr')} is not supported: install flwr")
    assert [name in line for line in lines] == [True]


@for_rows("part", PRIVATE, ids=lambda part: part.name)
def test_its_user_names_it(part):
    source = (PACKAGE / f"{part.user.replace('.', '/')}.py").read_text()
    assert part.name.removesuffix(".sleep").removesuffix(".Popen").rpartition(".")[2] in source


def test_no_other_module_uses_private_parts():
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if PRIVATE_USE.search(path.read_text())}
    listed = {f"{part.user.replace('.', '/')}.py" for part in PRIVATE}
    assert users - listed == {"flower/metadata.py", "flower/sizes.py", "plugins.py"} & users
