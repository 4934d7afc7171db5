"""`coterie status`: against a real SuperLink with a node and a run, and every way in which there is none."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from kit.commands import assert_refused, document, tree
from kit.servers import free_port, listening, running, tls, until
from kit.superlinks import flwr, register, secured_superlink

from coterie.deploy.certificates import create
from coterie.deploy.status import Node, Run, Status

BIN = Path(sys.executable).parent

# A ServerApp that logs two rounds, one as text and one as JSON, and then waits for a file; no clients needed.
APP = """
import time
from logging import INFO, WARNING
from pathlib import Path
from flwr.common.logger import log
from flwr.serverapp import ServerApp
from coterie import logs
from coterie.flower import run_log
from coterie.results import RoundRecord

app = ServerApp()

@app.main()
def main(grid, context):
    replies = {"asked": 10, "accepted": 7, "dropped": {"late": 3}}
    first = RoundRecord(round=1, epsilon=0.5, accuracy=0.25, replies=replies)
    log(INFO, run_log.progress_message(first, 4))
    logs.install(run=str(context.run_id))
    log(INFO, run_log.progress_message(RoundRecord(round=2, epsilon=0.75), 4))
    log(WARNING, "reply of client 3 dropped: %s", logs.printable("failed\\nround 9/9: epsilon 0.001 (1.00 s)"))
    while not Path(context.run_config["end"]).exists():
        time.sleep(0.1)
    log(WARNING, "4 replies were dropped")
    raise ValueError("the budget is exhausted")
"""
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rounds"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "rounds:app"
clientapp = "rounds:app"
[tool.flwr.app.config]
end = ""
"""


@pytest.fixture
def connections(tmp_path, monkeypatch):
    """Writes config.toml of a Flower home."""
    home = tmp_path / "flwr"
    home.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(home))
    return lambda text: (home / "config.toml").write_text(text)


@pytest.mark.slow
def test_a_superlink_its_nodes_and_a_run(coterie, pki, tmp_path, connections):
    end, rounds = tmp_path / "end", tmp_path / "rounds"
    rounds.mkdir()
    (rounds / "rounds.py").write_text(APP)
    (rounds / "pyproject.toml").write_text(PYPROJECT)
    supernode = [sys.executable, "-m", "coterie.deploy.supernode", "--certificate", pki / "nodes" / "node-0.crt"]
    supernode += ["--certificate-key", pki / "nodes" / "node-0.tls.key", "--root-certificates", pki / "ca.crt"]
    supernode += ["--auth-supernode-private-key", pki / "nodes" / "node-0.key", "--port", free_port()]

    def asked(*words):
        status, out, err = coterie("status", *words, "--json")
        assert (status, err) == (0, "")
        return document(out)

    log, node_log = tmp_path / "superlink.log", tmp_path / "supernode.log"
    with secured_superlink(pki, tmp_path, "subprocess", COTERIE_LOG="json") as (server, fleet, control, variables):
        supernode += ["--superlink", f"127.0.0.1:{fleet}"]
        nothing = {"connection": "here", "address": f"localhost:{control}", "nodes": [], "runs": [], "progress": None}
        assert asked() == nothing
        assert_refused(coterie("status", "--run", 5), "connection here", "run 5 not found")

        for number in (0, 1):
            register(pki, number, variables, "--name", f"client {number}")
        words = ["run", rounds, "here", "--run-config", f'end="{end}"']
        flwr(os.environ | variables, *words, timeout=90).check_returncode()
        with running(supernode, node_log, **variables) as process:
            until(lambda: asked()["nodes"][0]["status"] == "online", process, node_log)
            until(lambda: (asked()["progress"] or {}).get("round") == 2, server, log)
            found = asked("here")
            (first, second), (run,) = found["nodes"], found["runs"]
            assert (first["name"], first["status"]) == ("client 0", "online")
            assert 0 <= first["last-seen-seconds"] < 60
            assert first["online-since"] > run["started"][:10]
            absent = {"name": "client 1", "status": "registered", "last-seen-seconds": None, "online-since": None}
            assert second == {"id": second["id"], **absent}
            assert (run["status"], run["detail"], run["app"]) == ("running", None, "tests/rounds 1.0.0")
            assert run["seconds"] > 0
            progress = {"round": 2, "rounds": 4, "epsilon": 0.75, "accuracy": 0.25, "dropped": 3}
            assert found["progress"] == {"run": run["id"], **progress}

            status, out, err = coterie("status")
            assert (status, err) == (0, "")
            lines = out.splitlines()
            assert lines[0] == f"here (localhost:{control}): 1 of 2 nodes online"
            assert lines[2].split()[:4] == [first["id"], "client", "0", "online"]
            assert lines[-1] == f"run {run['id']}: round 2/4, ε 0.750, accuracy 25.0 %, 3 replies dropped"

        until(lambda: asked()["nodes"][0]["status"] == "offline", server, log)
        gone = asked()["nodes"][0]
        assert (gone["online-since"], 0 <= gone["last-seen-seconds"] < 60) == (None, True)
        end.touch()
        until(lambda: asked()["runs"][0]["status"] == "finished:failed", server, log)
        found = asked("--run", run["id"])
        assert "the budget is exhausted" in found["runs"][0]["detail"]
        assert found["progress"] == {"run": run["id"], **progress, "dropped": 4}

        connections(f'[superlink.here]\naddress = "127.0.0.1:{control}"\ninsecure = true\n')
        assert_refused(coterie("status", "here"), "connection here", "no valid response", "root-certificates")
        connections(f'[superlink.here]\naddress = "localhost:{fleet}"\nroot-certificates = "{pki}/ca.crt"\n')
        assert_refused(coterie("status", "here"), "connection here")  # the Fleet API in place of the Control API


def test_text_of_others_is_escaped_on_the_terminal(coterie, monkeypatch):
    node = Node(1, "eve\x1b[2J\u202e", "online", None, None)
    run = Run(2, "app 1", "finished:failed", "failed\nround 9/9\x1b[2J", None, 0.0)
    monkeypatch.setattr(
        "coterie.deploy.status.query_status", lambda connection, run_id: Status("a", "a:1", (node,), (run,), None)
    )
    status, out, err = coterie("status")
    assert (status, err) == (0, "")
    assert r"eve\x1b[2J\u202e" in out
    assert r"run 2: failed\nround 9/9\x1b[2J" in out.splitlines()
    for text in (out, coterie("status", "--json")[1]):
        assert not {"\x1b", "\u202e"} & set(text)


# ---- no such connection -----------------------------------------------------------------------------------


def test_no_configuration(coterie, tmp_path, connections):
    before = tree(tmp_path)
    assert_refused(coterie("status"), "flwr/config.toml", "does not exist", "FLWR_HOME")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "words", "parts"),
    [
        ("", [], ["no default connection", "CONNECTION"]),
        ('[superlink.a]\naddress = "a:1"\n[superlink.b]\naddress = "b:1"\n', ["c"], ["connection c (available: a, b)"]),
        ('[superlink]\ndefault = "c"\n', [], ["connection c (available: none)", "root-certificates"]),
        ("[superlink", [], ["config.toml"]),
        ('[superlink.a]\naddress = "a:1"\nroot-certificates = "ca.crt"\n', ["a"], ["root-certificates", "absolute"]),
        ("[superlink.a]\naddress = 5\n", ["a"], ["address"]),
        ('[superlink.a]\naddress = "a:1"\nroot-certificates = "/nowhere/ca.crt"\n', ["a"], ["/nowhere/ca.crt"]),
        ('[superlink.a]\naddress = "a:b"\ninsecure = true\n', ["a"], ["HOST:PORT"]),
        ('[superlink.a]\naddress = "http://a:1"\ninsecure = true\n', ["a"], ["connection a"]),
        (
            '[superlink.a]\naddress = "nowhere.invalid:1"\ninsecure = true\n',
            ["a"],
            ["cannot resolve host nowhere.invalid", "DNS"],
        ),
    ],
)
def test_a_connection_that_is_none(coterie, connections, text, words, parts):
    connections(text)
    assert_refused(coterie("status", *words), *parts)


def test_a_local_superlink_is_not_started(coterie, connections, monkeypatch):
    monkeypatch.setattr("flwr.cli.constant.LOCAL_SUPERLINK_HTTP_API_PORT", str(free_port()))
    connections('[superlink.a]\naddress = ":local:"\n')
    assert_refused(coterie("status", "a"), "connection a (127.0.0.1:", "refused", "is the SuperLink running")


def test_json_once_or_again_and_again(coterie):
    assert_refused(coterie("status", "--json", "--watch", 1), "--json and --watch")


def test_watch_asks_until_ctrl_c(coterie, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("coterie.deploy.status.query_status", lambda connection, run: Status("a", "a:1", (), (), None))
    assert coterie("status", "--watch", 7) == (0, 2 * "a (a:1): 0 of 0 nodes online\nno runs\n", "")
    assert waits == [7, 7]


# ---- no way to the SuperLink ------------------------------------------------------------------------------


def test_tls_that_fails(coterie, pki, tmp_path, connections):
    other = create(tmp_path / "other", 1, ["superlink"]).folder
    with listening(tls(other, grpc=False)) as port:
        connections(f'[superlink.a]\naddress = "localhost:{port}"\nroot-certificates = "{pki}/ca.crt"\n')
        assert_refused(coterie("status", "a"), "connection a", "not signed by", f"{pki}/ca.crt")
        connections(f'[superlink.a]\naddress = "localhost:{port}"\nroot-certificates = "{pki}/ca.key"\n')
        assert_refused(coterie("status", "a"), "connection a", f"{pki}/ca.key", "no certificate")
        connections(f'[superlink.a]\naddress = "localhost:{port}"\n')
        assert_refused(coterie("status", "a"), "connection a", "an authority that this machine trusts")


@pytest.mark.parametrize("insecure", [True, False])
def test_another_program(coterie, connections, insecure):
    def serve(connection):
        with contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with listening(serve) as port:
        connections(f'[superlink.a]\naddress = "localhost:{port}"\ninsecure = {str(insecure).lower()}\n')
        expected = ["HTTP status 404", "Control API"] if insecure else ["TLS handshake failed", "--insecure"]
        assert_refused(coterie("status", "a"), "connection a", *expected)


def test_an_answer_that_is_none(coterie, connections):
    def serve(connection):
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    with listening(serve) as port:
        connections(f'[superlink.a]\naddress = "localhost:{port}"\ninsecure = true\n')
        assert_refused(coterie("status", "a"), "connection a", "does not speak Flower's Control API")
