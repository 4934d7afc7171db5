"""`coterie superexec`: every message has a process of its own, forked with the libraries and without the package."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.deploy.edge import SUPEREXEC

# Launches ClientApps that, instead of asking a SuperNode, write down what they are, and do what their address says.
LAUNCHES = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
import coterie.client.identity  # as if the SuperExec had imported a module of the app's name
from coterie.deploy import superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor
from flwr.supernode.runtime import run_clientapp as flower

folder = Path(sys.argv[1])

def run_clientapp(*, runtime_api_address, token, insecure, certificates, parent_pid, runtime_dependency_install):
    found = {
        "pid": os.getpid(), "parent": parent_pid, "certificates": certificates, "insecure": insecure,
        "random": [random.random(), np.random.random()],
        "modules": [name for name in sys.modules if name.split(".")[0] == "coterie"],
        "commands": [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if token in read(path)],
        "open": [link for fd in os.listdir("/proc/self/fd") if "pipe:" in (link := read_link(fd))],
    }
    name = token.split("-")[0]
    (folder / f"{name}.part").write_text(json.dumps(found))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    if runtime_api_address == "crashes:1":
        os.kill(os.getpid(), signal.SIGKILL)
    if runtime_api_address == "hangs:1":
        time.sleep(60)

def read(path):
    try:
        return path.read_text()
    except OSError:
        return ""

def read_link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

flower.run_clientapp = run_clientapp
cold = []
SubprocessExecutor.launch = lambda self, spec: cold.append(spec.token.split("-")[0])
executor = superexec.ForkingExecutor()
(folder / "server").write_text(str(executor._server.pid))

def launch(name, address="works:1", task=TaskType.CLIENT_APP):
    token = f"{name}-{os.getpid()}"  # which is not in this script, and so on no command line
    executor.launch(ExecutionSpec(task, address, token, True, None, False, os.getpid(), False, 1))

def wait(name):
    deadline = time.monotonic() + 30
    while not (folder / f"{name}.json").exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
    return json.loads((folder / f"{name}.json").read_text())
"""


def launched(tmp_path, script, **options):
    words = [sys.executable, "-W", "ignore", "-c", LAUNCHES + script, tmp_path]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)


def output(tmp_path, script):
    process = launched(tmp_path, script)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    return json.loads(out)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids):
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_for_each_message(tmp_path):
    one, two, three, cold, pipe = output(
        tmp_path,
        """
launch("first", "crashes:1")
first = wait("first")
launch("second")
second = wait("second")
launch("third", "hangs:1")
third = wait("third")
launch("other", task=TaskType.SERVER_APP)  # Flower's program
os.kill(executor._server.pid, signal.SIGKILL)
executor._server.join()
launch("fourth")  # as well, where nothing can be forked any more
print(json.dumps([first, second, third, cold, os.readlink(f"/proc/self/fd/{executor._requests.fileno()}")]))
os.kill(third["pid"], signal.SIGKILL)
executor.close()
""",
    )
    assert len({each["pid"] for each in (one, two, three)}) == 3
    drawn = [number for each in (one, two, three) for number in each["random"]]
    assert len(set(drawn)) == 6  # no generator goes on where its parent's was
    for each in (one, two, three):
        assert each["modules"] == []
        assert each["commands"] == []  # any user may read a command line
        assert (each["insecure"], each["certificates"]) == (True, None)
        assert pipe not in each["open"]  # not the pipe by which the next message's token comes
    assert cold == ["other", "fourth"]


@pytest.mark.parametrize("how", ["close", "kill"])
def test_all_end_with_the_superexec(tmp_path, how):
    end = {"close": "executor.close()", "kill": "os.kill(os.getpid(), signal.SIGKILL)"}[how]
    process = launched(tmp_path, f"launch('one', 'hangs:1'); wait('one'); {end}")
    assert process.wait(60) == {"close": 0, "kill": -signal.SIGKILL}[how]
    process.stdout.close()
    gone(int((tmp_path / "server").read_text()), json.loads((tmp_path / "one.json").read_text())["pid"])


PRELOADED = """
import json, sys
from coterie.deploy import clientapp
clientapp.preload()
before = set(sys.modules)
import coterie.client.app, coterie.client.handlers, coterie.client.reply_cache
import torch
files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
new = [name for name, file in files.items() if "site-packages" in file and name.split(".")[0] != "coterie"]
print(json.dumps([new, torch.cuda.is_initialized()]))
"""


def test_a_message_imports_no_library():
    words = [sys.executable, "-W", "ignore", "-c", PRELOADED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [[], False]  # a GPU cannot be used after a fork if it was before


def test_flags_are_those_of_flower():
    done = subprocess.run([*SUPEREXEC, "--help"], capture_output=True, text=True, timeout=120, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert "--runtime-api-address" in done.stdout
