import os
import shutil
import subprocess
from pathlib import PurePath

import pytest
from stack import CANARY, COMPOSE, ROOT, Stack, docker
from xdist.scheduler import LoadScopeScheduling

#: Files that share the deployment of ``stack``: the first finds it as it was made, the last changes a container. They
#: are tests of one worker; those with deployments of their own are tests of another, since both wait most of the time.
SHARED = ("test_deployment", "test_deployment_faults", "test_deployment_recovery", "test_deployment_hostile")


class Deployments(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        return str(PurePath(nodeid.partition("::")[0]).stem in SHARED)


def pytest_xdist_make_scheduler(config, log):
    return Deployments(config, log)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(SHARED)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built here, in a checkout where somebody left secrets; skips without an engine."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker: the program docker is not there")
    for question in (("info",), ("compose", "version")):
        said = docker(*question, check=False)
        if said.returncode:
            pytest.skip(f"no Docker: {(said.stderr.strip().splitlines() or ['no answer'])[-1]}")
    left = [folder / f"secrets-of-tests-{os.getpid()}" for folder in (ROOT, ROOT / "docker")]
    try:
        for folder in left:
            folder.mkdir()
            (folder / "node.key").write_text(CANARY)
        build = ["docker", "compose", "-f", str(COMPOSE), "build", "--quiet", "server"]
        subprocess.run(build, cwd=ROOT, env={**os.environ, "SERVER_DIR": "/"}, check=True, timeout=900)
    finally:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
    return "coterie"


@pytest.fixture(scope="session")
def stack(image, tmp_path_factory):
    """A deployment of three clients, which takes a minute to start."""
    deployment = Stack(tmp_path_factory.mktemp("deployment"), "coterie-test-deployment")
    deployment.folder.chmod(0o755)
    deployment.prepare()
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.down()
