"""Commands of README and docs: each runs with small settings, or a test that is named here runs its kind."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
# docs/extending.md has a test of its own.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMAND = re.compile(r"^ {4}(?:\$ )?(coterie (?:.*\\\n)*.*)$", re.MULTILINE)


def commands():
    """Commands of all pages, as lists of words."""
    found = [match for page in PAGES for match in _COMMAND.findall(page.read_text())]
    return list(dict.fromkeys(tuple(shlex.split(text.replace("\\\n", " "), comments=True)[1:]) for text in found))


# The first words of commands that need a network or more than a few seconds, and the file whose tests run them.
ELSEWHERE = {
    ("run", "--engine", "ray"): "engine/test_ray_cluster.py",
    ("bench",): "bench/test_bench.py",
    ("audit",): "audit/test_audit_runs.py",
    ("privacy", "spent"): "cli/test_cli_privacy.py",
    ("client",): "deploy/test_edge.py",
    ("status",): "deploy/test_status.py",
    ("purge",): "deploy/test_purge.py",
}
# Settings that make a run short; the last value of a setting counts.
SHORT = ["--set", "local-epochs=1"]
SMALL = {
    "ifca": ["--rounds", "1"],
    "fedavg": ["--rounds", "1"],
    "rc-dpfl": ["--rounds", "2"],
    "lcfl": ["--rounds", "2"],
    "ppfc-gan": ["--set", "samples-per-client=100"],
}


def elsewhere(words):
    return next((file for first, file in ELSEWHERE.items() if words[: len(first)] == first), None)


def test_what_is_not_run_here_is_run_elsewhere():
    assert len(commands()) >= 20
    for first, file in ELSEWHERE.items():
        assert any(words[: len(first)] == first for words in commands()), f"{first}: not documented"
        assert (ROOT / "tests" / file).exists(), file


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


@pytest.mark.slow
@pytest.mark.parametrize("words", [w for w in commands() if not elsewhere(w)], ids=" ".join)
def test_a_documented_command_runs(coterie, tmp_path, request, words):
    words = list(words)
    if "DIR" in words and words[0] != "export":
        own = "own" in words
        words[words.index("DIR")] = str(request.getfixturevalue("own_data" if own else "data_dir"))
    if words[-1] == ".":
        words[-1] = str(ROOT)
    if "FILE" in words:
        words[words.index("FILE")] = str(digits_of_a_site(tmp_path))
    words = [{"RUN": "runs/NAME"}.get(word, word) for word in words]
    for name in ("runs/NAME", "runs/ONE", "runs/OTHER"):
        if name in words:
            stop = ["--set", "stop-after=1"] if "--resume" in words else []
            level = ["--set", "privacy-unit=none"] if "--site" in words else []
            status, _, err = coterie("run", "--clients", 60, *level, "--rounds", 2, *SHORT, *stop, "--out", name)
            assert status == 0, err
    if words[0] == "run" and "--resume" not in words and "--keys" not in words:
        strategy = words[words.index("--strategy") + 1] if "--strategy" in words else "ifca"
        words += [*SMALL[strategy], *SHORT]
    if words[0] == "sweep":
        words += ["--set", "rounds=1", *SHORT, "--seeds", "0-1"]
    status, out, err = coterie(*words)
    assert status == 0, err
    assert out or "--out" in words
