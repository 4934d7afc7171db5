"""Commands of README and docs: each runs with small settings, or a test that is named here runs its kind."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from kit.documented import ROOT, commands_of, hook

from coterie.strategies.registry import STRATEGIES

#: Pages whose commands another test runs, all in order.
IN_ORDER = {
    "deploy-without-docker.md": "deploy/test_without_docker.py",
    "extending.md": "test_extending.py",
    "first-hour.md": "test_first_hour.py",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in IN_ORDER),
]
_COMMAND = re.compile(r"^ {4}(?:\$ )?(coterie (?:.*\\\n)*.*)$", re.MULTILINE)


def commands():
    """Commands of all pages, as lists of words."""
    found = [match for page in PAGES for match in _COMMAND.findall(page.read_text())]
    found += [hook("strategies").command(method).strip() for method in STRATEGIES.values()]  # on the pages of the site
    return list(dict.fromkeys(tuple(shlex.split(text.replace("\\\n", " "), comments=True)[1:]) for text in found))


# The first words of commands that need a network or more than a few seconds, and the file whose tests run them.
ELSEWHERE = {
    ("run", "--config", "run.toml"): "examples/test_hospital_csv.py",
    ("run", "--engine", "ray"): "engine/test_ray_cluster.py",
    ("run", "--model", "cnn-small", "--set", "pretrained=base.safetensors"): "server/test_own_networks.py",
    ("run", "--model", "mlp-200", "--set", "pretrained=base.safetensors"): "server/test_own_networks.py",
    ("run", "--recorders", "tensorboard,mlflow"): "server/test_recorders.py",
    ("run", "--set", "task=multi-label"): "server/test_own_tasks.py",
    ("bench",): "bench/test_bench.py",
    ("audit",): "audit/test_audit_runs.py",
    ("datasets", "--download"): "datasets/test_images.py",
    ("privacy", "guard"): "guard/test_guarded_site.py",
    ("client",): "deploy/test_edge.py",
    ("certs", "pki", "--submitter"): "deploy/test_run_request.py",
    ("certs", "pki", "--operator-key"): "deploy/test_operator_keys.py",
    ("handover",): "handover/test_pack.py",
    ("sign",): "deploy/test_run_request.py",
    ("audit-log",): "privacy/test_audit_log.py",
    ("data",): "cli/test_cli_data.py",
    ("backup",): "deploy/test_backups.py",
    ("budget",): "cli/test_cli_budget.py",
    ("run", "--set", "table-schema=schema.toml"): "examples/test_hospital_csv.py",
    ("poc",): "cli/test_cli_poc.py",
    ("status",): "flower/test_status.py",
    ("purge",): "flower/test_purge.py",
    ("predict", "STATE/client-3.own-model"): "client/test_own_model.py",
}
# The same for other programs.
OTHERS = {
    "make": "test_documented_commands.py",
    "flwr run": "engine/test_flwr_run.py",
    "flwr supernode register": "deploy/test_without_docker.py",
    "flower-supernode": "deployment/test_deployment.py",
    "python benchmarks/load.py": "test_documented_commands.py",
    "python benchmarks/page.py": "bench/test_results.py",
    "python verify.py": "handover/test_pack.py",
    "python write_sites.py": "examples/test_hospital_csv.py",
    "python3 -m venv": "test_first_hour.py",
    "pip install .": "test_first_hour.py",
    "pip install torch": "release.py",
    "pip install --require-hashes": "test_lock.py",
    "pip install 'coterie[": "test_release.py",
    "docker": "deployment/test_deployment.py",
    "ray": "engine/test_ray_cluster.py",
    "tensorboard": "server/test_recorders.py",
}
_PROGRAMS = ("docker", "flower-", "flwr", "make", "pip", "python", "ray ", "tensorboard")
# Settings that make a run short; the last value of a setting counts.
SHORT = ["--set", "local-epochs=1"]
FEW = ["--set", "samples-per-client=60"]
SMALL = {
    "ifca": ["--rounds", "1"],
    "fedavg": ["--rounds", "1"],
    "rc-dpfl": ["--rounds", "2"],
    "lcfl": ["--rounds", "2", "--clients", "20"],
    "local": ["--rounds", "1", "--clients", "20"],
    "ppfc-gan": [*FEW, "--set", "pretrain-epochs=1", "--set", "joint-epochs=1"],
    "kfed": FEW,
    "ffcm": FEW,
}


def elsewhere(words):
    return next((file for first, file in ELSEWHERE.items() if words[: len(first)] == first), None)


def test_what_is_not_run_here_is_run_elsewhere():
    assert len(commands()) >= 20
    for first, file in ELSEWHERE.items():
        assert any(words[: len(first)] == first for words in commands()), f"{first}: not documented"
        assert (ROOT / "tests" / file).exists(), file


def test_commands_of_other_programs_are_run_somewhere():
    found = [each for page in PAGES for each in commands_of(page) if each.startswith(_PROGRAMS)]
    assert [each for each in found if not each.startswith(tuple(OTHERS))] == []
    for first, file in OTHERS.items():
        assert any(each.startswith(first) for each in found), f"{first}: not documented"
        assert (ROOT / "tests" / file).exists(), file
    for page, file in IN_ORDER.items():
        assert (ROOT / "docs" / page).exists()
        assert (ROOT / "tests" / file).exists()


def documented_targets():
    """Of make, in commands and in text."""
    text = "\n".join(page.read_text() for page in [*PAGES, ROOT / "SECURITY.md"])
    found = re.findall(r"(?:^ {4}|`)make ([a-z][a-z -]*)", text, re.MULTILINE)
    return sorted({target for line in found for target in line.split()})


def test_documented_targets_are_there():
    """`.ci/run` runs lint, test, test-slow, release-check and test-deployment, which runs deploy-demo."""
    assert {"demo", "docs", "lint", "lock", "release-check", "test", "test-all"} <= set(documented_targets())
    done = subprocess.run(
        ["make", "--dry-run", *documented_targets()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_load_of_a_federation_is_measured(tmp_path):
    words = [sys.executable, ROOT / "benchmarks" / "load.py", "--nodes", "2", "--rounds", "1"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    measured = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert {"superlink", "supernode", "flower-superexec"} <= json.loads(measured['"sizes"'])["1"].keys()
    assert json.loads(measured['"growth"']) == {}


def test_the_reading_of_a_table_is_measured(tmp_path):
    words = [sys.executable, ROOT / "benchmarks" / "table_reading.py", "--rows", "500", "--repeat", "1"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["this"]["records"] == 500


@pytest.fixture
def own_data(tmp_path):
    folder, rng = tmp_path / "own", np.random.default_rng(0)
    folder.mkdir()
    for client in range(12):
        x = rng.integers(0, 256, (30, 1, 28, 28), np.uint8)
        np.savez(folder / f"client-{client}.npz", x=x, y=np.arange(30) % 10)
    return folder


def digits_of_a_site(folder):
    """A file with records of the demo's kind."""
    x = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8), np.uint8)
    np.savez(folder / "site.npz", x=x, y=np.arange(30) % 10)
    return folder / "site.npz"


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """A folder of runs by the options that made them; commands that read a run need few kinds of it."""
    return {}, tmp_path_factory.mktemp("finished")


@pytest.fixture
def a_run(finished_runs, coterie, tmp_path):
    """Puts a run with these options into a folder, made once for all commands."""
    runs, folder = finished_runs

    def put(options, name):
        if options not in runs:
            runs[options] = folder / str(len(runs))
            words = ["run", "--clients", 60, "--rounds", 2, *SHORT, *options, "--out", runs[options]]
            status, _, err = coterie(*words)
            assert status == 0, err
        shutil.copytree(runs[options], tmp_path / name)

    return put


@pytest.mark.slow
@pytest.mark.parametrize("words", [w for w in commands() if not elsewhere(w)], ids=" ".join)
def test_a_documented_command_runs(coterie, tmp_path, request, a_run, words):
    words = list(words)
    if "DIR" in words and words[0] != "export":
        own = "own" in words
        words[words.index("DIR")] = str(request.getfixturevalue("own_data" if own else "data_dir"))
    if words[-1] == ".":
        words[-1] = str(ROOT)
    if "FILE" in words:
        words[words.index("FILE")] = str(digits_of_a_site(tmp_path))
    if "OWN" in words:
        words[words.index("OWN")] = str(digits_of_a_site(tmp_path))
    words = [{"RUN": "runs/NAME"}.get(word, word) for word in words]
    for name in ("runs/NAME", "runs/ONE", "runs/OTHER"):
        if name in words:
            stop = ("--set", "stop-after=1") if "--resume" in words else ()
            level = ("--set", "privacy-unit=none") if "--site" in words else ()
            a_run((*level, *stop), name)
    if words[0] == "run" and "--resume" not in words and "--keys" not in words:
        strategy = words[words.index("--strategy") + 1] if "--strategy" in words else "ifca"
        words += [
            *SMALL.get(strategy, ["--rounds", "1"]),
            *(["--rounds", "5"] if "mechanism=banded" in words else []),  # as many as slots
            *(SHORT if STRATEGIES[strategy].point_name != "centroids" else []),
        ]
    if words[0] == "sweep":
        words += ["--set", "rounds=1", *SHORT, "--seeds", "0-1"]
    status, out, err = coterie(*words)
    assert status == 0, err
    assert out or "--out" in words
