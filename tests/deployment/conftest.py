import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from stack import CANARY, COMPOSE, ROOT, Stack, docker

#: Tests of two groups run at the same time, with stacks of their own; these groups take longest, and begin.
FIRST = ("faults", "test_deployment_faults")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of a file share a stack, so that one process runs them, but for those of a group of their own."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    places = {id(item): place for place, item in enumerate(items)}
    items.sort(key=lambda item: (_group(item) not in FIRST, places[id(item)]))


def _group(item):
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else None


@pytest.fixture(scope="session")
def image(tmp_path_factory) -> str:
    """The image, built here, in a checkout where somebody left secrets; skips without an engine."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker: the program docker is not there")
    for question in (("info",), ("compose", "version")):
        said = docker(*question, check=False)
        if said.returncode:
            pytest.skip(f"no Docker: {(said.stderr.strip().splitlines() or ['no answer'])[-1]}")
    environment = {**os.environ, "COTERIE_USER": "0", "SECRETS": "/", "DATA": "/", "RUNS": "/"}
    with (tmp_path_factory.getbasetemp().parent / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, the others find its layers
        _build(environment)
    return "coterie"


def _build(environment):
    left = [ROOT / "secrets-of-tests", ROOT / "docker" / "secrets-of-tests"]
    try:
        for folder in left:
            folder.mkdir()
            (folder / "node.key").write_text(CANARY)
        build = ["docker", "compose", "-f", str(COMPOSE), "build", "--quiet", "superlink"]
        subprocess.run(build, cwd=ROOT, env=environment, check=True, timeout=900)
    finally:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(image, tmp_path_factory, request):
    """A deployment for the tests of a file."""
    name = "-".join((request.module.__name__.replace("_", "-"), os.environ.get("PYTEST_XDIST_WORKER", "")))
    deployment = Stack(tmp_path_factory.mktemp("deployment"), f"coterie-{name.strip('-')}")
    deployment.folder.chmod(0o755)
    deployment.prepare()
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.down()
