"""Changed replies of registered nodes, pushed over TLS into a real SuperLink: its run ends, and honest ones count."""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy as np
import oracle
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.task_identity import TaskIdentity
from kit.hostile import mutate
from safetensors.numpy import load_file

from coterie.server.resolution import combine

ROOT, BIN = Path(__file__).resolve().parents[2], Path(sys.executable).parent
sys.path.append(str(ROOT / "tests" / "deploy"))

from kit.servers import fleet_connection, free_port, open_port, running, until  # noqa: E402

from coterie.client.app import app  # noqa: E402
from coterie.deploy.certificates import create  # noqa: E402
from coterie.deploy.supernode import present_certificate  # noqa: E402
from coterie.flower.transport import nodes_speak_http  # noqa: E402
from coterie.privacy import Streams  # noqa: E402
from coterie.server import RunConfig  # noqa: E402
from coterie.server.run import initial_models  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HONEST, HOSTILE = 3, 9
CLIENTS = HONEST + HOSTILE
RUN = {
    "strategy": "fedavg",
    "clusters": 1,
    "dataset": "own",
    "input-shape": "1x4x4",
    "num-classes": 2,
    "model": "linear",
    "device": "cpu",
    "clients": CLIENTS,
    "privacy-unit": "client",
    "noise-multiplier": 0.05,
    "epsilon": 1e6,
    "delta": 0.01,
    "clip-norm": 0.3,
    "server-lr": 1.0,
    "sampling-rate": 1.0,
    "reseed-every": 0,
    "batch-size": 8,
    "rounds": 6,
    "evaluate": "diagnostic",
    "evaluate-every": 1,
    "seed": 3,
    "registration-timeout": 120.0,
    "min-clients": CLIENTS,
    "round-timeout": 120.0,
}
# One process for all nodes: it takes seconds to start.
_REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "here"], standalone_mode=False)
"""
_CONSTANTS = oracle.Run(CLIENTS, (1, 4, 4), 0)


class Nodes:
    """All nodes of a federation, in one thread: each answers by the real ClientApp, and most change what it says.

    Attributes:
        changed: replies that reached the SuperLink after a change.
        valid: (round, client) of changed evaluations that are valid all the same.
    """

    def __init__(self, pki, address, data):
        self._pki, self._address, self._data = pki, address, data
        self._stop, self._rng = threading.Event(), random.Random(0)
        self._thread = threading.Thread(target=self._serve)
        self._seen, self.changed, self.valid, self.failed = [], 0, set(), None

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _serve(self):
        try:
            with contextlib.ExitStack() as stack:
                links = [stack.enter_context(self._link(client)) for client in range(CLIENTS)]
                while not self._stop.wait(0.2):
                    for client, link in enumerate(links):
                        while (received := link[1]()) is not None:
                            self._answer(client, link, *received)
        except BaseException as error:  # Flower ends a process that cannot connect
            self.failed = error

    def _link(self, client):
        key = load_ssh_private_key((self._pki / "nodes" / f"node-{client}.key").read_bytes(), None)
        return fleet_connection(self._address, self._pki / "ca.crt", key)

    def _answer(self, client, link, envelope, tree):
        node, _, send, _, _, pull, push, confirm = link
        run, question = envelope.metadata.run_id, envelope.metadata.message_id
        message = pull_and_inflate_object_from_tree(
            tree, lambda key: pull(run, key), lambda key: confirm(run, key), return_type=Message
        )
        message.metadata.__dict__["_message_id"] = question
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run, node
        config = {"client-id": client, "data": str(self._data), "state-dir": str(self._data.parent / str(client))}
        config["guarantee"] = "trusted-server"
        honest = app(message, Context(run, node, config, RecordDict(), {})).content
        self._seen.append(honest)
        verb, sent = message.metadata.message_type, False
        if client >= HONEST and verb != "query.identity":
            for delivery in mutate(self._rng, message, honest, self._seen):
                with contextlib.suppress(Exception):  # what Flower cannot carry, or its SuperLink refuses
                    self._send(message, delivery, node, send, push)
                    self.changed += 1
                    if delivery.reply_to is not None:  # it answers no message
                        continue
                    if not sent and verb == "evaluate" and self._is_valid(message, delivery.content, client):
                        self.valid.add((message.content["config"]["round"], client))
                    sent = True
        if not sent:
            content = honest if client < HONEST or verb == "query.identity" else Error(1, "nothing could be sent")
            self._push(Message(content, reply_to=message), node, send, push)

    def _is_valid(self, message, content, client):
        return oracle.verdict("evaluate", message.content, content, client, _CONSTANTS)[0] is None

    def _send(self, message, delivery, node, send, push):
        content = delivery.content
        reply = Message(content if isinstance(content, Error) else RecordDict(), reply_to=message)
        if not isinstance(content, Error):
            reply.__dict__["_content"] = content
        if delivery.reply_to is not None:
            reply.metadata.__dict__["_reply_to_message_id"] = delivery.reply_to
        self._push(reply, node, send, push)

    def _push(self, reply, node, send, push):
        reply.metadata.__dict__["_src_node_id"] = node
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
        tree = get_object_tree(reply)
        wanted, session = send(remove_content_from_message(reply) if reply.has_content() else reply, tree, 0.0)
        for key in wanted:
            push(reply.metadata.run_id, session, key, objects[key])


@pytest.fixture
def presenting(monkeypatch):
    """Lets all connections of this process to a SuperLink present a certificate, until the end of the test."""
    parts = [("grpc", "ssl_channel_credentials")]
    parts += [("flwr.supernode.fleet_http_connection", "FleetHttpClient")] * nodes_speak_http()
    for module, name in parts:
        monkeypatch.setattr(import_module(module), name, getattr(import_module(module), name))
    return present_certificate


def test_changed_replies_over_tls_end_no_run_and_honest_ones_count(tmp_path, presenting):
    pki = create(tmp_path / "pki", CLIENTS, ["superlink"]).folder
    presenting(pki / "nodes" / "node-0.crt", pki / "nodes" / "node-0.tls.key")  # keys tell nodes apart
    control, fleet, out = free_port(), free_port(), tmp_path / "run"
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{control}"\nroot-certificates = "{pki}/ca.crt"\n'
    )
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (24, 1, 4, 4), np.uint8), y=np.arange(24) % 2)
    variables = {
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    superlink = [BIN / "coterie", "superlink", "--enable-supernode-auth", "--isolation", "subprocess"]
    superlink += ["--ssl-ca-certfile", pki / "ca.crt", "--ssl-certfile", pki / "server.crt"]
    superlink += ["--ssl-keyfile", pki / "server.key", "--host", "127.0.0.1", "--port", control]
    superlink += ["--fleet-api-address", f"127.0.0.1:{fleet}", "--database", tmp_path / "superlink.db"]
    log = tmp_path / "superlink.log"

    def execute(*words):
        done = subprocess.run(
            words, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    with running(superlink, log, **variables) as server:
        until(lambda: open_port(control) and open_port(fleet), server, log)
        execute(sys.executable, "-c", _REGISTER, *(pki / "nodes" / f"node-{client}.pub" for client in range(CLIENTS)))
        with Nodes(pki, f"127.0.0.1:{fleet}", tmp_path / "own.npz") as nodes:
            settings = " ".join(
                f"{name}={json.dumps(value)}" for name, value in combine({**RUN, "out": str(out)}).items()
            )
            execute(BIN / "flwr", "run", ROOT, "here", "--run-config", settings)
            until(lambda: nodes.failed or (out / "result.json").exists(), server, log, seconds=400)
        assert nodes.failed is None

    assert nodes.changed >= 100
    assert json.loads((out / "result.json").read_text())["rounds"] == RUN["rounds"]
    scores = json.loads((out / "diagnostics.json").read_text())
    counted = {client for number, client in nodes.valid if number == RUN["rounds"]}
    assert len(scores["client_accuracy"]) == HONEST + len(counted)
    config = RunConfig(RUN, deployed=True)
    start, layout = initial_models(config, Streams(RUN["seed"]))
    (model,) = (out / "models").iterdir()
    moved = layout.flatten(load_file(model)) - start[0]
    noise = RUN["noise-multiplier"] * RUN["clip-norm"] * np.sqrt(start.size) / CLIENTS
    assert 0 < np.linalg.norm(moved) < RUN["rounds"] * (RUN["clip-norm"] + 6 * noise)
