import os
import shutil
import subprocess

import pytest
from stack import CANARY, COMPOSE, ROOT, Stack, docker


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built here, in a checkout where somebody left secrets; skips without an engine."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker: the program docker is not there")
    for question in (("info",), ("compose", "version")):
        said = docker(*question, check=False)
        if said.returncode:
            pytest.skip(f"no Docker: {(said.stderr.strip().splitlines() or ['no answer'])[-1]}")
    environment = {**os.environ, "COTERIE_USER": "0", "SECRETS": "/", "DATA": "/", "RUNS": "/"}
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
