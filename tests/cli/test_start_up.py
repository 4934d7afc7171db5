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

# Calls the command once for each entry of standard input, words or environment variables: what came of each, as JSON.
CALLS = """
import contextlib, io, json, os, sys
from coterie.cli import main

answers = []
for words, variables in json.load(sys.stdin):
    sys.argv = ["coterie", *words]
    os.environ.update(variables)
    status, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    answers.append([status, out.getvalue(), err.getvalue(), sorted({name.split(".")[0] for name in sys.modules})])
json.dump(answers, sys.stdout)
"""


def called(calls, folder):
    """Status, output, error and the libraries imported so far, for each (words, environment variables)."""
    command = [sys.executable, "-W", "ignore", "-c", CALLS]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=90, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Prints these variables of a process that a command starts.
STARTED = """
import os, subprocess, sys
import coterie.cli.program
print(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0", "no_proxy": None}),
        ({"FLWR_DISABLE_UPDATE_CHECK": "0", "FLWR_TELEMETRY_ENABLED": ""}, {"FLWR_DISABLE_UPDATE_CHECK": "0"}),
        ({"NO_PROXY": "here"}, {"no_proxy": None}),
        ({"HTTPS_PROXY": "http://a:1", "NO_PROXY": "here"}, {"no_proxy": "here,localhost,127.0.0.1,::1"}),
        ({"http_proxy": "http://a:1", "no_proxy": "x", "NO_PROXY": "y"}, {"no_proxy": "x,localhost,127.0.0.1,::1"}),
        ({"grpc_proxy": "http://a:1"}, {"no_proxy": "localhost,127.0.0.1,::1"}),
    ],
)
def test_processes_of_flower_call_nobody_and_take_no_proxy_to_this_machine(given, expected):
    command = [sys.executable, "-W", "ignore", "-c", STARTED]
    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, check=True
    )
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {name: variables.get(name) for name in expected} == expected


# Ctrl-C while the module in argv[1] is imported; argv[2:] are the words of the command.
INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
from coterie.cli import main
main()
"""


@pytest.mark.parametrize(("module", "status"), [("coterie.cli.run", -2), ("torch", 130)])
def test_an_interrupt_during_imports_ends_without_a_traceback(module, status, tmp_path):
    words = [sys.executable, "-c", INTERRUPTED, module, "run", "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (status, "")


# Ctrl-C reaches all processes of a terminal, also those that import PyTorch for workers.
WORKERS = """
import os, signal, time
from coterie.engine.workers import start_server

signal.signal(signal.SIGINT, signal.default_int_handler)
os.setpgrp()
start_server()
for _ in range(40):
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
print(start_server().Pool(1).apply(os.getppid) > 1)
"""


@pytest.mark.slow
def test_an_interrupt_leaves_the_server_of_workers_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


WRONG = {
    "clusterz=3": "did you mean 'clusters'?",
    "rounds=-1": "rounds = '-1'",
    "strategy=fedagv": "'fedavg'",
    "privacy.accountant=pdl": "'pdl'",
}
COMPLETIONS = {
    "run --strategy rc": ["rc-dpfl"],
    "run --dataset pen": ["pendigits"],
    "run --model mlp-2": ["mlp-200"],
    "run --set accoun": ["accountant="],
    "run --set accountant=p": ["accountant=pld"],
    "run --set privacy.accountant=p": ["privacy.accountant=pld"],
    "run --set rounds=": [],
}


def test_help_and_wrong_settings_import_nothing_slow_and_words_are_completed(tmp_path):
    typed = [f"coterie {words}" for words in COMPLETIONS]
    variables = [{"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))} for words in typed]
    completing = [([], {"_COTERIE_COMPLETE": "complete_bash"} | each) for each in variables]
    refused = [(["run", "--set", setting], {}) for setting in WRONG]
    (status, _, _, imported), *answers = called([(["--help"], {}), *refused, *completing], tmp_path)
    assert status == 0
    assert not set(imported) & (SLOW | {"flwr", "numpy", "scipy"})
    for message, (status, _, error, imported) in zip(WRONG.values(), answers[: len(WRONG)], strict=True):
        assert (status, list(tmp_path.iterdir())) == (1, [])
        assert message in error
        assert not set(imported) & SLOW
    assert [out.split() for _, out, *_ in answers[len(WRONG) :]] == list(COMPLETIONS.values()), answers


def test_version(tmp_path):
    command = [sys.executable, "-m", "coterie.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert done.stdout == f"coterie {__version__}\n"


def test_the_run_says_what_it_does_before_it_imports(monkeypatch):
    run = import_module("coterie.cli.run")
    screen = io.StringIO()
    monkeypatch.setattr(run, "console_for", lambda as_json: Console(file=screen, force_terminal=True))
    monkeypatch.setattr(run, "settings_of", lambda *_: pytest.fail("nothing shown") if not screen.getvalue() else {})
    monkeypatch.setattr(run, "_open", lambda values, engine: None)
    monkeypatch.setattr(run, "_run", lambda *_: None)
    run.run(assignments=[])
    assert "preparing the run" in screen.getvalue()


def test_a_command_that_lacks_an_extra_says_which(tmp_path):
    words = ["-c", "import sys; sys.modules['yaml'] = None; from coterie.cli import main; main()", "fab-hash", "."]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: yaml is not installed: pip install 'coterie[deploy]'\n")


def test_a_missing_room_is_named_and_the_other_commands_work(tmp_path):
    words = ["-c", "import sys; sys.modules['coterie.deploy'] = None; from coterie.cli import main; main()", "--help"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stderr.startswith("the commands of deploy are missing: ")
    assert done.stderr.count("\n") == 1
    assert {"run", "report", "bench"} <= set(done.stdout.split())
