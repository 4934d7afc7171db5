"""`coterie superexec`: every message has a process of its own, forked with the libraries and without the package."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.apps import app_folder, fab_of

from coterie.deploy import superexec

# A fork server whose ClientApps do not ask a SuperNode.
SERVER = """
import json, os, signal, sys, time
from pathlib import Path
import coterie.client.identity  # as if the server had imported a module of the app's name
from coterie.deploy import clientapp, fork_server
from flwr.supernode.runtime import run_clientapp as flower

preload, clientapp.preload = clientapp.preload, lambda: None
folder = Path(sys.argv[1])

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

"""
SERVE = """
flower.run_clientapp = run_clientapp
fork_server.main()
"""
LAUNCHES = """
import json, os, signal, sys, time
from pathlib import Path
from coterie.deploy import superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor

folder = Path(sys.argv[1])
cold = []
SubprocessExecutor.launch = lambda self, spec: cold.append(spec.token.split("-")[0])
superexec.FORK_SERVER = (sys.executable, "-W", "ignore", folder / "server.py", folder)
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
# ClientApps that write down what they are, and do what their address says.
WRITING = """
def run_clientapp(*, runtime_api_address, token, insecure, certificates, parent_pid, runtime_dependency_install):
    found = {
        "pid": os.getpid(), "server": os.getppid(), "parent": parent_pid,
        "certificates": certificates, "insecure": insecure,
        "modules": [name for name in sys.modules if name.split(".")[0] == "coterie"],
        "commands": [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if token in read(path)],
        "open": [link for fd in os.listdir("/proc/self/fd") if "pipe:" in (link := read_link(fd))],
    }
    name = token.split("-")[0]
    while runtime_api_address == "waits:1" and not (folder / "go").exists():
        time.sleep(0.01)
    (folder / f"{name}.part").write_text(json.dumps(found))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    if runtime_api_address == "crashes:1":
        os.kill(os.getpid(), signal.SIGKILL)
    if runtime_api_address == "hangs:1":
        time.sleep(60)
"""


def launched(tmp_path, script, apps=WRITING, **options):
    (tmp_path / "server.py").write_text(SERVER + apps + SERVE)
    words = [sys.executable, "-W", "ignore", "-c", LAUNCHES + script, tmp_path]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)


def output(tmp_path, script, apps=WRITING):
    process = launched(tmp_path, script, apps, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    (tmp_path / "err").write_text(err)
    return json.loads(out.splitlines()[-1])  # Flower reports installations before it


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
    one, two, three, four, cold, pipe = output(
        tmp_path,
        """
launch("first", "crashes:1")
first = wait("first")
launch("second")
second = wait("second")
launch("third", "hangs:1")
third = wait("third")
launch("other", task=TaskType.SERVER_APP)  # Flower's program
pipe = os.readlink(f"/proc/self/fd/{executor._requests.fileno()}")
os.kill(third["server"], signal.SIGKILL)
executor._server.wait()
launch("fourth")  # by a new server
fourth = wait("fourth")
executor._requests.close()
launch("fifth")  # Flower's program as well, where nothing can be forked
print(json.dumps([first, second, third, fourth, cold, pipe]))
os.kill(third["pid"], signal.SIGKILL)
executor.close()
""",
    )
    assert len({each["pid"] for each in (one, two, three, four)}) == 4
    for each in (one, two, three, four):
        assert each["modules"] == []
        assert each["commands"] == []  # any user may read a command line
        assert (each["insecure"], each["certificates"]) == (True, None)
        assert pipe not in each["open"]  # not the pipe by which the next message's token comes
    assert one["server"] == three["server"] != four["server"]
    assert cold == ["other", "fifth"]
    err = (tmp_path / "err").read_text()
    assert err.count("the ClientApp of a message ended (signal SIGKILL): did the machine") == 1
    assert err.count("the process that forks ClientApps ended (signal SIGKILL)") == 1


def test_a_server_without_messages_ends_and_is_started_again(tmp_path):
    one, two, running, ended = output(
        tmp_path,
        """
launch("one", "waits:1")
server, executor._latest = executor._server, time.monotonic() - superexec.IDLE_SECONDS + 60
executor.reconcile()
assert executor._server is server
executor._latest -= 60
executor.reconcile()
launch("two")
two, running = wait("two"), server.poll() is None  # it waits for its message
(folder / "go").touch()
print(json.dumps([wait("one"), two, running, server.wait(20)]))
executor.close()
""",
    )
    assert one["server"] != two["server"]
    assert (running, ended) == (True, 0)
    assert "ended" not in (tmp_path / "err").read_text()


PRELOADED = """
import json, sys
from coterie.deploy import clientapp
from coterie.flower.generators import collect_generators, reseed_generators
with collect_generators() as generators:
    clientapp.preload()
before = set(sys.modules)
import coterie.client.app, coterie.client.handlers, coterie.client.reply_cache
import numpy, torch
bits = numpy.random.get_bit_generator()
reseeded = {id(each) for each in (numpy.random.mtrand._rand, bits, bits.seed_seq, torch.default_generator)}
other = [repr(each) for each in generators if id(each) not in reseeded]
reseed_generators()
files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
new = [name for name, file in files.items() if "site-packages" in file and name.split(".")[0] != "coterie"]
print(json.dumps([new, other, torch.cuda.is_initialized()]))
"""


def test_a_message_imports_no_library_and_shares_no_generator():
    words = [sys.executable, "-W", "ignore", "-c", PRELOADED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [[], [], False]  # a GPU cannot be used after a fork if it was before


# ClientApps that install the app that their address names, import its code, and write down what they see.
INSTALLING = """
from flwr.supercore.object_ref import load_app

def run_clientapp(*, runtime_api_address, token, **options):
    name, before = token.split("-")[0], [each for each in sys.modules if each.split(".")[0] == "coterie"]
    pipes = open_pipes()
    place = flower.install_from_fab((folder / f"{runtime_api_address}.fab").read_bytes(), skip_prompt=True)
    closed = len(pipes - open_pipes())
    app = load_app("coterie.client.app:app", ValueError, str(place))
    module = sys.modules["coterie.client.app"]
    found = {"pid": os.getpid(), "before": len(before), "who": module.WHO, "importer": module.PID, "closed": closed,
             "paths": len([path for path in sys.path if "/apps/" in path])}
    (folder / f"{name}.part").write_text(json.dumps(found))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    if name.startswith("hangs"):
        time.sleep(60)
    if name.startswith("crashes"):
        sys.exit(3)

def open_pipes():
    return {link for fd in os.listdir("/proc/self/fd") if "pipe:" in (link := read_link(fd))}
"""
MESSAGES = """
number = 0

def message(app, name=None):
    global number
    number += 1
    launch(name := name or f"message{number}", app)
    return wait(name)

def from_template(app):
    deadline = time.monotonic() + 60
    while (found := message(app))["importer"] == found["pid"]:
        assert time.monotonic() < deadline
    return found
"""


@pytest.fixture
def apps(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    codes = {
        "one": "import os\nWHO, PID = 'one', os.getpid()\n",
        "two": "import os\nWHO, PID = 'two', os.getpid()\n",
        "threads": "import os, threading, time\nthreading.Thread(target=time.sleep, args=(2,)).start()\n"
        "WHO, PID = 'threads', os.getpid()\n",
    }
    for name, code in codes.items():
        (tmp_path / f"{name}.fab").write_bytes(fab_of(app_folder(tmp_path / name, code)))
    return tmp_path


def test_later_messages_import_nothing(apps):
    first, later, again, other, back, killed, after = output(
        apps,
        MESSAGES
        + """
first, later, again = message("one"), from_template("one"), message("one", "crashes")
other = message("two")
back = from_template("two")
os.kill(back["importer"], signal.SIGKILL)
time.sleep(1)
killed = message("two")
after = from_template("two")
print(json.dumps([first, later, again, other, back, killed, after]))
executor.close()
""",
        INSTALLING,
    )
    every = [first, later, again, other, back, killed, after]
    assert len({each["pid"] for each in every}) == 7
    assert [each["who"] for each in every] == ["one"] * 3 + ["two"] * 4
    for each in (first, other, killed):  # own imports; a message for another app forgets the template's
        assert each["importer"] == each["pid"]
    assert (first["before"], killed["before"]) == (0, 0)
    for each in (later, again, back, after):
        assert each["before"] > 0
    assert later["importer"] == again["importer"]
    assert after["importer"] not in (later["importer"], back["importer"])
    err = (apps / "err").read_text()
    assert err.count("the ClientApp of a message ended (status 3)\n") == 1
    assert err.count("the process that has imported the app ended (signal SIGKILL)") == 1
    assert {each["paths"] for each in every} == {1}
    assert {each["closed"] for each in every} == {1}  # the pipe of reports, before any code of the app runs


def test_no_fork_of_an_app_with_threads(apps):
    found = output(
        apps,
        MESSAGES
        + """
first = message("threads")
time.sleep(2)
print(json.dumps([first, message("threads")]))
executor.close()
""",
        INSTALLING,
    )
    assert all(each["importer"] == each["pid"] for each in found)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_all_end_with_the_superexec(apps, how):
    """The server, a process that imports its app itself, the template, and a process that is forked from it."""
    end = {"close": "executor.close()", "kill": "os.kill(os.getpid(), signal.SIGKILL)"}[how]
    messages = f"message('one', 'hangs1'); from_template('one'); message('one', 'hangs2'); {end}"
    process = launched(apps, MESSAGES + messages, INSTALLING)
    assert process.wait(90) == {"close": 0, "kill": -signal.SIGKILL}[how]
    process.stdout.close()
    first, last = (json.loads((apps / f"hangs{number}.json").read_text()) for number in (1, 2))
    assert first["importer"] == first["pid"] != last["importer"] != last["pid"]
    gone(int((apps / "server").read_text()), first["pid"], last["importer"], last["pid"])


# ClientApps of Flower's own code, with the libraries of the SuperExec; their messages do not come from a network.
OWN_CODE = """
from hashlib import sha256
from unittest.mock import Mock
import opacus, torch._dynamo  # an optimizer imports the latter; here once for all messages
from flwr.app import Context, Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

preload()
own = flower.run_clientapp

def run_clientapp(*, runtime_api_address, token, **options):
    def pull_task_input(client):
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        content = (folder / f"{runtime_api_address}.fab").read_bytes()
        run = Run.create_empty(1)
        run.fab_id, run.fab_version = "coterie/coterie", "0.1.0"
        message = Message(RecordDict(), dst_node_id=1, message_type="query.draw")
        return message, Context(1, 1, {}, RecordDict(), {}), run, Fab(sha256(content).hexdigest(), content, {})

    def push_message(client, reply, context):
        name = token.split("-")[0]
        found = {key: dict(record) for key, record in reply.content.items()}
        (folder / f"{name}.part").write_text(json.dumps(found | found["process"]))
        (folder / f"{name}.part").rename(folder / f"{name}.json")

    network = dict.fromkeys(("RuntimeHttpClient", "HeartbeatSender", "push_task_output"), Mock())
    vars(flower).update(network, pull_task_input=pull_task_input, push_message=push_message)
    own(runtime_api_address, token, **options | {"parent_pid": None})
"""
# An app that draws when it is imported and for each message. Its import also seeds all generators, two of its own.
DRAWING = """
import os, random
import numpy as np
import torch
from opacus.optimizers import DPOptimizer

def noise():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = DPOptimizer(
        torch.optim.SGD([parameter], lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
    )
    parameter.grad_sample = torch.zeros(1, 1)
    optimizer.step()
    return parameter.item()

def draw():
    return {"random": random.random(), "numpy": np.random.random(), "torch": torch.rand(()).item(), "opacus": noise()}

PID, IMPORT = os.getpid(), draw()
random.seed(0), np.random.seed(0), torch.manual_seed(0)
OWN = {"torch": torch.Generator()}

@app.query("draw")
def reply(message, context, rng=np.random.default_rng(0)):
    own = {"own of numpy": rng.random(), "own of torch": torch.rand((), generator=OWN["torch"]).item()}
    records = {"process": {"pid": os.getpid(), "importer": PID}, "import": IMPORT, "message": draw() | own}
    return Message(RecordDict({key: ConfigRecord(record) for key, record in records.items()}), reply_to=message)
"""
GLOBAL = ["random", "numpy", "torch", "opacus"]


@pytest.fixture(scope="module")
def draws(tmp_path_factory):
    """What an app draws in messages that import it themselves, in three of one template, and in one of the next."""
    folder = tmp_path_factory.mktemp("draws")
    (folder / "draws.fab").write_bytes(fab_of(app_folder(folder / "draws", DRAWING)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_HOME", str(folder / "flwr"))
        return output(
            folder,
            MESSAGES
            + """
first, forked = message("draws"), [from_template("draws"), message("draws"), message("draws")]
os.kill(forked[0]["importer"], signal.SIGKILL)
time.sleep(1)
print(json.dumps({"importing": [first, message("draws")], "forked": forked, "next": from_template("draws")}))
executor.close()
""",
            OWN_CODE,
        )


@pytest.mark.slow
@pytest.mark.parametrize("generator", [*GLOBAL, "own of numpy", "own of torch"])
def test_no_two_messages_draw_the_same(draws, generator):
    every = [*draws["importing"], *draws["forked"], draws["next"]]
    assert [len({each[key] for each in every}) for key in ("pid", "importer")] == [6, 4]
    assert len({each["message"][generator] for each in every}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("generator", GLOBAL)
def test_no_two_imports_of_an_app_draw_the_same(draws, generator):
    every = [*draws["importing"], draws["forked"][0], draws["next"]]
    assert len({each["import"][generator] for each in every}) == 4


def test_requests_begin_at_intervals(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), now.__setitem__(0, now[0] + seconds)))
    pace = superexec.Pace()
    for took in (0.1, 0.1, 2.0, 0.0):
        now[0] += took
        pace(0.5)
    assert slept == pytest.approx([0.0, 0.4, 0.0, 0.5])
