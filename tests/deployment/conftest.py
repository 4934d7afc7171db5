import os
import shutil
import subprocess

import pytest
from stack import COMPOSE, ROOT, Stack, docker


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built here; skips without an engine."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker: the program docker is not there")
    for question in (("info",), ("compose", "version")):
        said = docker(*question, check=False)
        if said.returncode:
            pytest.skip(f"no Docker: {(said.stderr.strip().splitlines() or ['no answer'])[-1]}")
    environment = {**os.environ, "COTERIE_USER": "0", "SECRETS": "/", "DATA": "/", "RUNS": "/"}
    subprocess.run(
        ["docker", "compose", "-f", str(COMPOSE), "build", "--quiet", "superlink"],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=900,
    )
    return "coterie"


@pytest.fixture(scope="module")
def stack(image, tmp_path_factory, request):
    """A deployment for the tests of a file."""
    deployment = Stack(tmp_path_factory.mktemp("deployment"), f"coterie-{request.module.__name__.replace('_', '-')}")
    deployment.folder.chmod(0o755)
    deployment.prepare()
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.down()
