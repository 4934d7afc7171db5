"""A SuperLink that runs Flower's simulations, one for registered nodes, and calls of ``flwr``."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from kit import ray_nodes
from kit.servers import free_port, open_port, running, until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
#: The command, where data are described without a look at them.
DESCRIBED = """
import coterie.datasets as d
d.report = lambda path, declared: d.DataReport(path, "12 images", 12, 10, {}, d.LeftOut(), (), ())
from coterie.cli import main
main()
"""


@contextlib.contextmanager
def simulating_superlink(tmp_path, **variables):
    """A SuperLink with a home, a port and a Ray of its own, ended with everything that it started; its environment."""
    port = free_port()
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    variables = (
        os.environ
        | variables
        | {
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
    )
    arguments = ["--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    arguments += ["--port", str(port)]
    log = tmp_path / "superlink.log"
    with (
        tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ray_nodes.head(Path(folder), **variables) as (_, address),
        running([BIN / "flower-superlink", *arguments], log, **{**variables, "RAY_ADDRESS": address}) as superlink,
    ):
        until(lambda: open_port(port), superlink, log)
        yield variables


class Secured(NamedTuple):
    """A SuperLink, the ports of its Fleet API and its Control API, and the variables with which ``flwr`` finds it."""

    process: subprocess.Popen
    fleet: int
    control: int
    variables: dict


@contextlib.contextmanager
def secured_superlink(pki, tmp_path, isolation="process", **variables):
    """A SuperLink for registered nodes, which is the connection ``here`` of its home."""
    control, fleet, home, log = free_port(), free_port(), tmp_path / "flwr", tmp_path / "superlink.log"
    home.mkdir(exist_ok=True)
    connection = f'address = "localhost:{control}"\nroot-certificates = "{pki}/ca.crt"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{connection}')
    variables = {"FLWR_HOME": str(home), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"} | variables
    variables["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    command = [BIN / "coterie", "superlink", "--enable-supernode-auth", "--isolation", isolation]
    command += ["--ssl-ca-certfile", pki / "ca.crt", "--ssl-certfile", pki / "server.crt"]
    command += ["--ssl-keyfile", pki / "server.key"]
    command += ["--superexec-auth-secret-file", pki / "superexec.secret"] if isolation == "process" else []
    command += ["--host", "127.0.0.1", "--port", control, "--fleet-api-address", f"127.0.0.1:{fleet}"]
    with running(command, log, **variables) as process:
        until(lambda: open_port(control) and open_port(fleet), process, log)
        yield Secured(process, fleet, control, variables)


def register(pki, node, variables, *more):
    """Register a node with the SuperLink that is ``here``."""
    public = pki / "nodes" / f"node-{node}.pub"
    flwr(os.environ | variables, "supernode", "register", public, "here", *more, timeout=90).check_returncode()


def flwr(environment, *words, timeout=600):
    return subprocess.run(
        [BIN / "flwr", *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def latest(environment):
    runs = json.loads(flwr(environment, "list", "--format", "json").stdout)["runs"]
    return max(runs, key=lambda run: run["pending-at"])
