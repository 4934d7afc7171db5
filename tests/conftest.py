import functools
import gc
import os
import random
import secrets
import shutil
import sys
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Before torch is loaded, as the command does: threads that spin make a loaded machine ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

# The same examples every time, however slow the machine is: no property fails by chance.
hypothesis.settings.register_profile(
    "coterie", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("coterie")


@pytest.fixture(scope="session", autouse=True)
def runs_of_servers(tmp_path_factory):
    """Run folders and audit logs of servers that tests start are not in the user's home."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COTERIE_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks():
    """No test loses its power, and a suite that waits for its disk 30,000 times takes a minute longer.

    What must be synchronised before what is asserted by tests that replace ``os.fsync`` themselves.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)  # what is no open file is still an error
        yield


class _PinnedSecrets:
    """What a process draws from the operating system, drawn from one seed for each test and each fixture.

    Runs without a seed are the certified ones, and what they release is noisy: without this, an assertion on it would
    fail once in so many suites. With it, a test passes always or never. TEST_SEED draws other noise. Keys of OpenSSL
    and processes that tests start draw real secrets: no figure may depend on them by more than its bound allows.
    """

    def __init__(self, patched):
        self._source, self._numbers = random.Random(), np.random.default_rng
        patched.setattr(secrets, "randbits", self._source.getrandbits)
        patched.setattr(secrets, "randbelow", self._source.randrange)
        patched.setattr(secrets, "token_bytes", lambda size=32: self._source.randbytes(size))
        patched.setattr(secrets, "token_hex", lambda size=32: self._source.randbytes(size).hex())
        patched.setattr(np.random, "default_rng", self._seeded)

    def restart(self, name):
        """Begin with the seed of a test or a fixture."""
        self._source.seed(f"{os.environ.get('TEST_SEED', '0')} {name}")
        random.seed(self._source.getrandbits(64))
        np.random.seed(self._source.getrandbits(32))
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(self._source.getrandbits(62))

    def _seeded(self, seed=None):
        return self._numbers(self._source.getrandbits(128) if seed is None else seed)


_PINNED = pytest.StashKey[_PinnedSecrets]()


@pytest.fixture(scope="session", autouse=True)
def pinned_secrets(request):
    """No test fails by chance."""
    with pytest.MonkeyPatch.context() as patched:
        request.config.stash[_PINNED] = _PinnedSecrets(patched)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if _PINNED in request.config.stash:
        request.config.stash[_PINNED].restart(f"{request.node.nodeid} {fixturedef.argname} {request.param_index}")
    return (yield)


@pytest.fixture(scope="session")
def data_dir() -> str:
    """The folder of real data: COTERIE_DATA, else ../shared/data beside the repository; skips without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("COTERIE_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no real data: there is no folder {folder}; set COTERIE_DATA to one")
    return str(folder)


@pytest.fixture(scope="session")
def commands_once():
    """Typer's function that makes the commands of an app, which takes longer than most of them; it makes them once."""
    import flwr.supercore.logger  # noqa: F401 (its handler keeps the standard error of its import: no test's own)
    import typer.main

    return functools.cache(typer.main.get_command)


@pytest.fixture
def coterie(tmp_path, monkeypatch, capsys, commands_once):
    """Calls the command in an empty folder: exit status, standard output, standard error."""
    from coterie.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("typer.main.get_command", commands_once)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests of pages."""
    from kit.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def submitters_once(tmp_path_factory):
    from coterie.deploy.certificates import add_submitter, create

    folder = create(tmp_path_factory.mktemp("submitters") / "pki", 1, ["superlink"]).folder
    add_submitter(folder, "alice")
    add_submitter(folder, "bob")
    return folder


@pytest.fixture
def pki_of_submitters(submitters_once, tmp_path):
    """A folder of certificates with the keys of two submitters, alice and bob, which the test may change."""
    return shutil.copytree(submitters_once, tmp_path / "pki")


@pytest.fixture(scope="session")
def pki_once(tmp_path_factory):
    from coterie.deploy.certificates import create

    return create(tmp_path_factory.mktemp("certificates") / "pki", 3, ["superlink"]).folder


@pytest.fixture
def pki(pki_once, tmp_path):
    """A folder of certificates of three nodes, which the test may change."""
    return shutil.copytree(pki_once, tmp_path / "pki")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keep what is collected out of the garbage collector, which would walk a million objects in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _FailuresAtOnce:
    """Names each failed test when it fails: a suite that is stopped before its end prints no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            lines = report.longreprtext.splitlines()
            errors = [line for line in lines if line.startswith("E ")]
            self.config.get_terminal_writer().line(f"\nFAILED {report.nodeid}: {(errors or lines or [''])[0]}")


class _LongTests:
    """Lists the fast tests that take the most CPU time, over a second each: they say why."""

    def __init__(self):
        self.tests = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.tests += [
                (seconds, report.nodeid) for name, seconds in report.user_properties if name == "CPU seconds"
            ]

    def pytest_terminal_summary(self, terminalreporter):
        for seconds, name in sorted(self.tests, reverse=True)[:20]:
            terminalreporter.write_line(f"{seconds:4.1f} CPU seconds: {name}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))
        config.pluginmanager.register(_LongTests())


#: Files of slow tests of minutes: they begin first, so that no worker is left with one of them at the end.
_LONGEST = ("test_first_hour.py", "test_without_docker.py", "test_flwr_run.py", "test_guard.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in _LONGEST)


#: CPU seconds that a test of `make test` may take in its own process, on a processor half as fast as usual.
_CPU_SECONDS = 20.0
#: CPU seconds above which a test says why, in its docstring or beside what takes them.
_LONG = 1.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that is too slow for ``make test``; CPU time does not depend on what else the machine does."""
    item.config.stash[_PINNED].restart(item.nodeid)
    began = time.process_time()
    result = yield
    taken = time.process_time() - began
    if taken > _LONG:
        item.user_properties.append(("CPU seconds", taken))
    if taken > _CPU_SECONDS and not {"slow", "deployment"} & {mark.name for mark in item.iter_markers()}:
        pytest.fail(
            f"the test took {taken:.0f} CPU seconds, more than {_CPU_SECONDS:g}: make it faster, or mark it slow"
        )
    return result
