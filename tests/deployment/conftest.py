import fcntl
import os
import shutil
import subprocess

import pytest
from stack import CANARY, COMPOSE, ROOT, Stack, docker

#: Files run at the same time, each with a stack of its own; these take longest, and begin.
FIRST = ("test_deployment_recovery", "test_deployment_masked", "test_deployment_faults")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in FIRST)


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
