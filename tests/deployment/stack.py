"""A deployment of docker/compose.yml in real containers, under a name and in a folder of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yml"
# Containers of tests run as nobody in particular, and never as root.
USER = "10001:10001" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
ENDED = ("finished:completed", "finished:failed", "finished:stopped")


def docker(*words, timeout=120, check=True, **options):
    done = subprocess.run(["docker", *map(str, words)], capture_output=True, text=True, timeout=timeout, **options)
    if check and done.returncode:
        raise AssertionError(
            f"docker {' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


def in_image(folder, *words, **options):
    """Runs a command of the image, without a network, with the folder as /out."""
    return docker(
        "run", "--rm", "--user", USER, "--network", "none", "--volume", f"{folder}:/out", "coterie", *words, **options
    )


class Stack:
    """SuperLink, ServerApp and three clients."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self.secrets, self.data, self.runs = folder / "secrets", folder / "data", folder / "runs"
        self._environment = {
            **os.environ,
            "COTERIE_USER": USER,
            "SECRETS": str(self.secrets),
            "DATA": str(self.data),
            "RUNS": str(self.runs),
        }

    def prepare(self) -> None:
        """Certificates, keys, and data of the demo's."""
        for folder in (self.data, self.runs):
            folder.mkdir(parents=True)
        subprocess.run(["chown", "-R", USER, str(self.folder)], check=True)
        in_image(self.folder, "coterie", "certs", "/out/secrets", "--nodes", 3, "--host", "superlink")
        subprocess.run([sys.executable, str(ROOT / "docker" / "demo" / "data.py"), str(self.data)], check=True)
        subprocess.run(["chown", "-R", USER, str(self.data)], check=True)

    def compose(self, *words, **options):
        return docker("compose", "-p", self.name, "-f", COMPOSE, *words, env=self._environment, **options)

    def up(self) -> None:
        self.compose("up", "--detach", "--wait", "superlink", "serverapp", timeout=300)
        for i in range(3):
            self.register(i)
        self.compose("up", "--detach", "--wait", timeout=300)

    def register(self, i: int) -> None:
        self.cli(
            "flwr",
            "supernode",
            "register",
            "/node.pub",
            "coterie",
            "--name",
            f"client-{i}",
            volumes=[f"{self.secrets}/nodes/node-{i}.pub:/node.pub:ro"],
        )

    def cli(self, *words, volumes=(), **options):
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        return self.compose("run", "--rm", "--no-deps", "-T", *mounts, "cli", *words, **options)

    def submit(self, **settings) -> str:
        """Start a run; its id."""
        config = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in settings.items())
        said = self.cli("flwr", "run", "/app", "coterie", "--run-config", config, "--format", "json").stdout
        return str(json.loads(said[said.index("{") :])["run-id"])

    def status(self, run: str) -> dict:
        said = json.loads(self.cli("coterie", "status", "--run", run, "--json").stdout)
        return {**said, "run": said["runs"][0]}

    def wait(self, run: str, seconds: float = 300) -> dict:
        """Wait for the end of a run; its status."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            said = self.status(run)
            if said["run"]["status"] in ENDED:
                return said
            time.sleep(2)
        raise AssertionError(f"run {run} after {seconds} s: {said}\n{self.logs()}")

    def result(self, name: str) -> dict:
        return json.loads((self.runs / name / "result.json").read_text())

    def logs(self, *services) -> str:
        done = self.compose("logs", "--no-color", "--timestamps", *services, check=False)
        return done.stdout + done.stderr

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "3", check=False, timeout=120)
