"""Which app may run at a client: its hash, and what a SuperNode does with another one, at a real SuperLink."""

import ast
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.task_identity import TaskIdentity
from kit.apps import app_folder, fab_of
from kit.commands import assert_refused, document
from kit.servers import free_port, running, until
from kit.superlinks import DESCRIBED, flwr, register, secured_superlink

from coterie import __version__
from coterie.deploy import supernode
from coterie.deploy.app_bundle import bundle
from coterie.deploy.certificates import create
from coterie.flower import backoff

ROOT, BIN = Path(__file__).resolve().parents[2], Path(sys.executable).parent


# ---- the hash ---------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_what_is_sent(coterie, tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # as the image has it
        shutil.copy(ROOT / name, app)
    shutil.copytree(ROOT / "coterie", app / "coterie")
    subprocess.run([BIN / "flwr", "build", "--app", app], check=True, cwd=tmp_path, capture_output=True, timeout=60)
    (fab,) = tmp_path.glob("coterie.coterie.*.fab")
    printed = [coterie("fab-hash", each) for each in (ROOT, app, fab)]
    assert len(set(printed)) == 1
    status, out, err = printed[0]
    assert (status, err) == (0, "")
    assert len(out.strip()) == 64
    with zipfile.ZipFile(fab) as archive:  # no compressor, whose versions differ, has a part in the hash
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    found = document(coterie("fab-hash", fab, "--json")[1])
    assert (found["hash"], found["id"], found["version"]) == (out.strip(), "coterie/coterie", __version__)
    assert {"pyproject.toml", "coterie/client/app.py"} < set(found["files"])
    assert not any(name.startswith(("tests/", "docker/")) for name in found["files"])

    with (app / "coterie" / "files.py").open("a") as file:
        file.write("\n")
    assert bundle(app).hash != out.strip()


#: Of Coterie's own bundle, which every client would have to review.
MAX_FILES, MAX_LINES = 244, 43_300
# Imports every module below argv[1] with nothing else of Coterie on the path.
IMPORTED = """
import pathlib, sys, warnings
from importlib import import_module
bundle, checkout = sys.argv[1:]
sys.path[:] = [bundle, *(path for path in sys.path if path not in ("", checkout))]
warnings.simplefilter("ignore")
for path in sorted(pathlib.Path(bundle).glob("coterie/**/*.py")):
    name = ".".join(path.relative_to(bundle).with_suffix("").parts).removesuffix(".__init__")
    assert import_module(name).__file__ == str(path), name
print(import_module("coterie.server.app").app, import_module("coterie.client.app").app)
"""


@pytest.mark.slow  # a process imports the whole bundle
def test_the_bundle_is_small_and_complete(tmp_path):
    with zipfile.ZipFile(io.BytesIO(fab_of(ROOT))) as archive:
        archive.extractall(tmp_path)
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("coterie/**/*.py")}
    assert len(files) <= MAX_FILES
    assert sum(len(text.splitlines()) for text in files.values()) <= MAX_LINES
    # Also within functions, they import nothing that the bundle lacks, but for `coterie.load` and for apps of others.
    lacking = {
        (name, module)
        for name, text in files.items()
        for module in imported_from(text)
        if {f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")}.isdisjoint(files)
    }
    others = "coterie/client/__init__.py", "coterie.client.clustered"
    assert lacking == {("coterie/__init__.py", "coterie.inference"), others}
    command = [sys.executable, "-c", IMPORTED, tmp_path, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ServerApp" in done.stdout


def imported_from(text):
    """Modules of Coterie that a source imports anywhere."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "coterie":
            yield from (f"coterie.{each.name}" for each in node.names if each.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("coterie."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("coterie"))


def test_what_is_no_app(coterie, tmp_path):
    assert_refused(coterie("fab-hash", tmp_path), "not a valid Flower app", "pyproject.toml")
    (tmp_path / "text").write_text("text")
    assert_refused(coterie("fab-hash", tmp_path / "text"), "not a valid Flower app")
    assert_refused(coterie("fab-hash", tmp_path / "none"), "cannot be read: No such file")


# ---- a SuperLink that lies --------------------------------------------------------------------------------


@pytest.fixture
def pulled(tmp_path, monkeypatch):
    """Has a SuperLink deliver a message of a run; tells whether Flower took it, what was asked for, and the reply."""
    good, evil = fab_of(app_folder(tmp_path / "good")), fab_of(app_folder(tmp_path / "evil", "evil = 1\n"))
    pinned = bundle(tmp_path / "good").hash
    for name, number in (("task", 1), ("run", 7), ("node", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}_id", number)

    def deliver(content=good, name=pinned, id="coterie/coterie", version="0.1.0"):
        asked, replies = [], []
        message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.QUERY)

        def pull(state, object_store, node_config, receive, get_run, get_fab, trusted_entities):
            received, _ = receive()
            run = get_run(received.metadata.run_id)
            return ("taken", get_fab(run.fab_hash, 7).content)

        def get_fab(fab_hash, run_id):
            asked.append(fab_hash)
            return Fab(fab_hash, content, {})

        monkeypatch.setattr(supernode.flower, "_insert_message", lambda reply, *_: replies.append(reply))
        answer = supernode.guarded(pull, pinned)(
            state=None,
            object_store=None,
            node_config={},
            receive=lambda: (message, None),
            get_run=lambda run_id: SimpleNamespace(fab_hash=name, fab_id=id, fab_version=version),
            get_fab=get_fab,
            trusted_entities=None,
        )
        return answer, asked, replies

    return SimpleNamespace(deliver=deliver, good=good, evil=evil, pinned=pinned)


def test_a_pinned_app_is_taken(pulled):
    assert pulled.deliver() == (("taken", pulled.good), [pulled.pinned], [])


@pytest.mark.parametrize(
    ("lie", "downloads"),
    [
        ({"name": "0" * 64}, False),  # another app, under its own name
        ({"name": ""}, False),
        ({"content": None}, True),  # another app under the pinned one's name
        ({"id": "coterie/other"}, True),  # the pinned app, and the name of another that is installed
        ({"version": "0.1.0.90fa9372/../../elsewhere"}, True),
    ],
    ids=str,
)
def test_any_other_is_refused(pulled, lie, downloads, caplog):
    if "content" in lie:
        lie = {"content": pulled.evil}
    answer, asked, (reply,) = pulled.deliver(**lie)
    assert answer == 7  # Flower pushes the reply, and goes on
    assert bool(asked) == downloads
    assert reply.error.reason == "The FAB could not be verified."
    (line,) = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert line.startswith("run 7 rejected: ")
    assert line.endswith(f"--fab-hash allows only {pulled.pinned}")


def test_nothing_to_receive(pulled):
    guarded = supernode.guarded(lambda *, receive, get_run, get_fab: receive(), pulled.pinned)
    assert guarded(receive=lambda: None, get_run=None, get_fab=None) is None


def test_another_flower(monkeypatch):
    monkeypatch.setattr(supernode.flower, "_pull_and_store_message", lambda *, state, receive: None)
    with pytest.raises(SystemExit, match=r"(?s)^error: flwr .* has no parameter object_store, get_run, get_fab "):
        supernode.main(["--fab-hash", "0" * 64])


def test_an_empty_hash():
    with pytest.raises(SystemExit, match=r"^error: --fab-hash : must be"):
        supernode.main(["--fab-hash", ""])


@pytest.fixture
def flower(monkeypatch):
    """Flower's module, which is as before afterwards."""
    monkeypatch.setattr(supernode.flower, "subprocess", subprocess)
    monkeypatch.setattr(supernode.flower, "_pull_and_store_message", lambda: None)
    return supernode.flower


def test_the_superexec_that_is_started(flower, monkeypatch):
    watched = {}
    monkeypatch.setattr(
        supernode, "watch_superexec", lambda module, **options: watched.update(module=module, **options)
    )
    supernode.shorten_start()
    assert (watched["module"], watched["most_ends"]) == (flower, 1)  # a SuperNode ends with its SuperExec
    started = [sys.executable, "-P", "-m", "coterie.deploy.superexec", "--insecure"]
    assert watched["command"](["flower-superexec", "--insecure"]) == started
    assert watched["command"](["other", "--insecure"]) == ["other", "--insecure"]


def test_messages_are_pulled_soon_after_others(flower, monkeypatch):
    now, answers, pulls = [1000.0], [], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def pull(**options):
        assert options == {"state": 1}
        pulls[0] += 1
        return answers.pop(0) if answers else None

    monkeypatch.setattr(flower, "_pull_and_store_message", pull)
    supernode.shorten_polls()
    pull_soon = flower._pull_and_store_message
    assert pull_soon(state=1) is None  # no run: Flower waits as it does
    assert now == [1000.0]
    answers += [7]
    assert pull_soon(state=1) == 7
    answers += [None, None, 8]
    assert pull_soon(state=1) == 8
    assert 0 < now[0] - 1000.0 <= 2.0
    latest, before = now[0], pulls[0]
    assert pull_soon(state=1) is None
    assert 15.0 <= now[0] - latest < 18.0
    assert pulls[0] - before < 20
    ended = now[0]
    assert pull_soon(state=1) is None
    assert now[0] == ended


def test_a_task_and_a_reply_end_the_waits(flower, monkeypatch):
    from flwr.supernode.servicer.runtime import runtime_handlers

    tasks, naps = [], []
    monkeypatch.setattr(flower, "time", time)
    monkeypatch.setattr(flower, "_pull_and_store_message", lambda **options: options["run"])
    monkeypatch.setattr(
        runtime_handlers, "acquire_task", lambda request, state: SimpleNamespace(token=tasks.pop() if tasks else "")
    )
    monkeypatch.setattr(runtime_handlers, "push_messages", lambda request: "stored")
    monkeypatch.setattr(runtime_handlers, "push_object", lambda request: "stored")
    monkeypatch.setattr(supernode, "_LONG_POLL", 30.0)
    supernode.shorten_waits()

    def take():
        naps.append(runtime_handlers.acquire_task(None, None).token)

    flower._pull_and_store_message(run=6)  # a message that was taken before
    taker = threading.Thread(target=take)
    taker.start()
    assert flower._pull_and_store_message(run=None) is None  # no message
    taker.join(0.3)
    assert taker.is_alive()
    tasks.append("token")
    assert flower._pull_and_store_message(run=7) == 7
    taker.join(10)
    assert naps == ["token"]
    monkeypatch.setattr(supernode, "_LONG_POLL", 0.0)
    assert runtime_handlers.acquire_task(None, None).token == ""

    began = time.monotonic()
    sleeper = threading.Thread(target=flower.time.sleep, args=(30.0,))
    sleeper.start()
    assert runtime_handlers.push_object("request") == "stored"
    sleeper.join(10)
    flower.time.sleep(0.2)  # each reply ends one wait
    assert 0.2 <= time.monotonic() - began < 10


def test_flowers_pauses_are_short():
    backoff.shorten()
    asked = []

    def pull(object_id):
        asked.append(time.monotonic())
        if len(asked) < 4:
            raise inflatable_utils.ObjectUnavailableError(object_id)
        return b"content"

    assert inflatable_utils.pull_objects(["a"], pull) == {"a": b"content"}
    assert (np.diff(asked) >= [0.04, 0.08, 0.16]).all()  # doubled each time, with 20 % jitter
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        assert function.__kwdefaults__["initial_backoff"] == 0.05


def test_what_lies_in_the_pinned_apps_place_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for name in ("coterie.coterie.0.1.0.abababab", "coterie.coterie.0.1.0.cdcdcdcd"):
        (tmp_path / "apps" / name).mkdir(parents=True)
        (tmp_path / "apps" / name / "evil.py").write_text("")
    supernode.forget_installed("ab" * 32)
    assert [path.name for path in (tmp_path / "apps").iterdir()] == ["coterie.coterie.0.1.0.cdcdcdcd"]


# ---- a SuperLink and three clients ------------------------------------------------------------------------


@pytest.mark.slow
def test_only_the_pinned_app_runs(tmp_path):
    """One client pins the app that is sent, one pins Coterie, one nothing."""
    pki = create(tmp_path / "pki", 3, ["superlink"]).folder
    app = app_folder(tmp_path / "sent")
    out = tmp_path / "out.json"
    pins = [["--fab-hash", bundle(app).hash], ["--fab-hash", bundle(ROOT).hash], []]
    logs = [tmp_path / f"client-{i}.log" for i in range(3)]
    (tmp_path / "data").mkdir()
    with contextlib.ExitStack() as stack:
        _, fleet, _, variables = stack.enter_context(secured_superlink(pki, tmp_path, "subprocess"))
        for i in range(3):
            register(pki, i, variables)
            client = [sys.executable, "-c", DESCRIBED, "client", "--superlink", f"localhost:{fleet}"]
            client += ["--data", tmp_path / "data", "--key", pki / "nodes" / f"node-{i}.key", "--ca", pki / "ca.crt"]
            client += ["--state-dir", tmp_path / f"state-{i}", "--port", free_port(), *pins[i]]
            client += ["--guarantee", "trusted-server", "--set", f"trace={tmp_path}/trace-{i}"]
            own = variables | {"FLWR_HOME": str(tmp_path / f"home-{i}")}
            process = stack.enter_context(running(client, logs[i], **own))
        flwr(os.environ | variables, "run", app, "here", "--run-config", f'out="{out}"', timeout=90).check_returncode()
        until(out.exists, process, logs[2])
        until(lambda: out.read_text(), process, logs[2])
    told = json.loads(out.read_text())
    assert sorted(map(str, told.values())) == ["0", "2", "The FAB could not be verified."]
    # Without a pin, the code that runs is what the server sent, though a package of that name is installed.
    assert [(tmp_path / f"trace-{i}").exists() for i in range(3)] == [True, False, True]
    assert [(tmp_path / f"home-{i}" / "apps").exists() for i in range(3)] == [True, False, True]
    for i in (0, 2):
        package, *command = (tmp_path / f"trace-{i}").read_text().split()
        assert package.startswith(f"{tmp_path}/home-{i}/apps/")
        assert "coterie.deploy.fork_server" in command[0]  # forked
    (refusal,) = [line for line in logs[1].read_text().splitlines() if "rejected" in line]
    assert f"its FAB has the hash {bundle(app).hash}; --fab-hash allows only {bundle(ROOT).hash}" in refusal
    assert "Traceback" not in logs[1].read_text()
