"""What commands import before they answer: libraries that take seconds only where they are used."""

import io
import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from rich.console import Console

from coterie import __version__

SLOW = {"dp_accounting", "fastapi", "matplotlib", "opacus", "ray", "sklearn", "sqlalchemy", "torch", "torchvision"}

CALL = """
import json, sys
from coterie.cli import main
sys.argv = ["coterie", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code or 0, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def called(*words, folder):
    command = [sys.executable, "-W", "ignore", "-c", CALL, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=folder)
    status, imported = json.loads(done.stdout.splitlines()[-1])
    return status, set(imported), done.stderr


def test_help(tmp_path):
    status, imported, _ = called("--help", folder=tmp_path)
    assert status == 0
    assert not imported & (SLOW | {"flwr", "numpy", "scipy"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("clusterz=3", "did you mean 'clusters'?"),
        ("rounds=-1", "rounds = '-1'"),
        ("strategy=fedagv", "'fedavg'"),
        ("privacy.accountant=pdl", "'pdl'"),
    ],
)
def test_a_wrong_setting(setting, message, tmp_path):
    status, imported, error = called("run", "--set", setting, folder=tmp_path)
    assert (status, list(tmp_path.iterdir())) == (1, [])
    assert message in error
    assert not imported & SLOW


def test_version(tmp_path):
    command = [sys.executable, "-m", "coterie.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert done.stdout == f"coterie {__version__}\n"


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("run --strategy rc", ["rc-dpfl"]),
        ("run --dataset pen", ["pendigits"]),
        ("run --model mlp-2", ["mlp-200"]),
        ("run --set accoun", ["accountant="]),
        ("run --set accountant=p", ["accountant=pld"]),
        ("run --set privacy.accountant=p", ["privacy.accountant=pld"]),
        ("run --set rounds=", []),
    ],
)
def test_completion(words, completions, tmp_path):
    words = f"coterie {words}"
    variables = {"_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from coterie.cli import main; main()"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | variables,
    )
    assert done.stdout.split() == completions, done.stderr


def test_the_run_says_what_it_does_before_it_imports(monkeypatch):
    run = import_module("coterie.cli.run")
    screen = io.StringIO()
    monkeypatch.setattr(run, "console_for", lambda as_json: Console(file=screen, force_terminal=True))
    monkeypatch.setattr(run, "settings_of", lambda *_: pytest.fail("nothing shown") if not screen.getvalue() else {})
    monkeypatch.setattr(run, "_open", lambda values, engine: None)
    monkeypatch.setattr(run, "_run", lambda *_: None)
    run.run(assignments=[])
    assert "preparing the run" in screen.getvalue()
