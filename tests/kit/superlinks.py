"""A SuperLink that runs Flower's simulations, and calls of ``flwr``."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import ray_nodes
from kit.servers import free_port, open_port, running, until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


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


def flwr(environment, *words, timeout=600):
    return subprocess.run(
        [BIN / "flwr", *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def latest(environment):
    runs = json.loads(flwr(environment, "list", "--format", "json").stdout)["runs"]
    return max(runs, key=lambda run: run["pending-at"])
