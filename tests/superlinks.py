"""A SuperLink that runs Flower's simulations, and calls of ``flwr``."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray_nodes

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


@contextlib.contextmanager
def simulating_superlink(tmp_path, **variables):
    """A SuperLink with a home, a port and a Ray of its own, ended with everything that it started; its environment."""
    port = ray_nodes.free_port()
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
    with ray_nodes.one_node(**variables) as address, (tmp_path / "superlink.log").open("w") as log:
        variables["RAY_ADDRESS"] = address
        superlink = subprocess.Popen(
            [BIN / "flower-superlink", *arguments], env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            for _ in range(120):
                if ray_nodes.answers(port):
                    break
                assert superlink.poll() is None, (tmp_path / "superlink.log").read_text()
                time.sleep(0.5)
            yield variables
        finally:
            superlink.terminate()
            try:
                superlink.wait(20)
            except subprocess.TimeoutExpired:
                superlink.kill()
                superlink.wait()


def flwr(environment, *words, timeout=600):
    return subprocess.run(
        [BIN / "flwr", *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def latest(environment):
    runs = json.loads(flwr(environment, "list", "--format", "json").stdout)["runs"]
    return max(runs, key=lambda run: run["pending-at"])
