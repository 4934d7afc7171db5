"""Three clients in containers: the result is the local engine's, strangers are refused, secrets stay where they are."""

import json
import os
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file
from stack import CANARY, OWN_DATA, ROOT, USER, docker, in_image

from coterie.engine.in_process import LocalGrid
from coterie.flower.transport import nodes_speak_http
from coterie.server import RunConfig
from coterie.server.folder import RunFolder
from coterie.server.run import run

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]

PARITY = {
    **OWN_DATA,
    "strategy": "ifca",
    "clusters": 2,
    "clients": 3,
    "privacy-unit": "none",
    "sampling-rate": 1.0,
    "rounds": 2,
    "evaluate-every": 2,
    "seed": 7,
    "registration-timeout": 120.0,
    "min-clients": 3,
    "min-replies": 1.0,
    "round-timeout": 240.0,
}
KEY, AUTHORITY = "--auth-supernode-private-key", ("--root-certificates", "/out/secrets/ca.crt")
CERTIFICATE = ("--certificate", "/out/secrets/nodes/node-0.crt")
CERTIFICATE += ("--certificate-key", "/out/secrets/nodes/node-0.tls.key")
CLOSED = "Failed to initialize the connection" if nodes_speak_http() else "Socket closed"
# SuperNodes as strangers would start them, and why they fail: with a key that nobody registered, without a node's
# certificate, without the authority, without TLS.
STRANGERS = {
    "unregistered": (
        "is not registered" if nodes_speak_http() else "Failed to activate SuperNode",
        *("python3", "-m", "coterie.deploy.supernode", *CERTIFICATE, KEY, "/out/stranger/nodes/node-0.key", *AUTHORITY),
    ),
    "no-certificate": (CLOSED, "flower-supernode", KEY, "/out/secrets/nodes/node-0.key", *AUTHORITY),
    "no-authority": ("CERTIFICATE_VERIFY_FAILED", "flower-supernode", KEY, "/out/secrets/nodes/node-0.key"),
    "plaintext": (CLOSED, "flower-supernode", "--insecure"),
}


def test_a_run_is_the_local_engine_s_and_strangers_are_refused_meanwhile(stack, tmp_path):
    in_image(stack.folder, "coterie", "certs", "/out/stranger", "--nodes", 1, "--host", "server")
    run_id = stack.submit(**PARITY, out="/server/runs/parity")
    for name, (_, *words) in STRANGERS.items():
        docker(
            "run",
            "--detach",
            "--name",
            f"{stack.name}-{name}",
            "--user",
            USER,
            "--network",
            f"{stack.name}_fleet-0",
            "--volume",
            f"{stack.folder}:/out:ro",
            "coterie",
            *words,
            "--superlink",
            "server:9092",
            "--max-retries",
            2,
        )
    try:
        stack.complete(run_id)
        for name, (why, *_) in STRANGERS.items():
            docker("wait", f"{stack.name}-{name}", timeout=60)
            assert docker("inspect", "--format", "{{.State.ExitCode}}", f"{stack.name}-{name}").stdout.strip() != "0"
            said = docker("logs", f"{stack.name}-{name}")
            assert why in said.stdout + said.stderr
        nodes = stack.status(run_id)["nodes"]
        assert [node["status"] for node in nodes] == ["online"] * 3
    finally:
        for name in STRANGERS:
            docker("rm", "--force", f"{stack.name}-{name}", check=False)
    config = RunConfig({**PARITY, "data-dir": str(stack.data)})
    with_local = RunFolder.create(tmp_path / "local", config)
    run(with_local, LocalGrid(3))
    with_local.close()
    for cluster in range(2):
        there, here = (
            load_file(path / "models" / f"cluster-{cluster}.safetensors")
            for path in (stack.runs / "parity", tmp_path / "local")
        )
        assert there.keys() == here.keys()
        for name, values in here.items():
            np.testing.assert_allclose(there[name], values, atol=1e-5)
    exact = json.loads((tmp_path / "local" / "diagnostics.json").read_text())
    assert stack.diagnostics("parity")["accuracy"] == pytest.approx(exact["accuracy"], abs=1e-5)


def test_secrets_are_in_no_image_no_log_and_no_run_folder(stack):
    secrets = [path for path in stack.secrets.rglob("*") if path.suffix in (".key", ".secret")]
    assert len(secrets) == 10  # of three nodes two each, authority, SuperLink, SuperExec, operator
    # What is looked for: every line of a secret that is one of its own.
    parts = {
        line for path in secrets for line in path.read_text().splitlines() if len(line) > 20 and "-----" not in line
    }
    assert len(parts) > 20
    parts |= {CANARY, *stack.passphrases}
    shipped = max((ROOT / "coterie" / "cli" / "program.py").read_text().splitlines(), key=len)
    assert layers_with({*parts, shipped}) == {shipped}
    places = {
        "history": docker("history", "--no-trunc", "coterie").stdout.encode(),
        "logs": stack.logs().encode(),
        **{f"log of run {run}": stack.log(run).encode() for run in stack.started},
        **{str(path): path.read_bytes() for path in stack.runs.rglob("*") if path.is_file()},
    }
    for name, content in places.items():
        assert content
        assert not [part for part in parts if part.encode() in content], name


def layers_with(parts):
    """Which of these texts are somewhere in the layers of the image, which are not compressed."""
    with subprocess.Popen(["docker", "save", "coterie"], stdout=subprocess.PIPE) as saved:
        words = ["grep", "--text", "--only-matching", "--fixed-strings", *(f"--regexp={part}" for part in parts)]
        environment = {**os.environ, "LC_ALL": "C"}
        found = subprocess.run(words, stdin=saved.stdout, capture_output=True, env=environment, check=True, timeout=300)
    assert saved.returncode == 0
    return {line.decode() for line in found.stdout.splitlines()}


def test_nobody_runs_as_root_or_may_write_where_nothing_is_to_be_written(stack):
    for service in ("server", "client-0"):
        assert stack.execute(service, "id", "-u").stdout.strip() == USER.split(":")[0]
        assert stack.execute(service, "touch", "/opt/coterie/x", "/usr/x", check=False).returncode
    assert stack.execute("client-0", "touch", "/data/x", check=False).returncode
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    for service, host, port, there in (
        ("client-0", "server", 9092, True),
        ("client-0", "server", 8000, False),
        ("client-0", "client-1", 9094, False),
        ("server", "localhost", 8000, True),
        ("server", "client-0", 9094, False),
    ):
        said = stack.execute(service, "python3", "-c", reach, host, port, check=False)
        assert (said.returncode == 0) == there, (service, host, said.stderr)
