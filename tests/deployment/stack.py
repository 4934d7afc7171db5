"""A deployment of docker/compose.yml in real containers, under a name and in a folder of its own."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import yaml

from coterie.server.resolution import combine

# What somebody left in the checkout before the image was built.
CANARY = secrets.token_hex(32)
ROOT = Path(__file__).parents[2]
# Of runs on the demo's data.
OWN_DATA = {"dataset": "own", "input-shape": "1x8x8", "num-classes": 10}
#: A run of three clients at record level, in which none may be missing.
OF_RECORDS = {
    **OWN_DATA,
    "strategy": "fedavg",
    "clusters": 1,
    "clients": 3,
    "privacy-unit": "record",
    "samples-per-client": 480,
    "batch-size": 48,
    "local-epochs": 1,
    "epsilon": 8.0,
    "sampling-rate": 1.0,
    "evaluate": "off",
    "registration-timeout": 240.0,
    "min-clients": 3,
    "min-replies": 1.0,
    "round-timeout": 45.0,
}
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


def further_clients(clients: int) -> dict:
    """What compose.yml says of client 2, for each client from 3: services, with networks, volumes and secrets."""
    whole = yaml.safe_load(COMPOSE.read_text())
    further: dict = {"services": {"server": {"networks": {}}}, "networks": {}, "volumes": {}, "secrets": {}}
    of_client_2 = re.compile(r"\b(client-|fleet-|node-|state-|PASSPHRASE_)2\b")
    for client in range(3, clients):
        for section in further:
            entries = {name: entry for name, entry in whole[section].items() if of_client_2.search(name)}
            further[section] |= json.loads(of_client_2.sub(rf"\g<1>{client}", json.dumps(entries)))
        further["services"]["server"]["networks"][f"fleet-{client}"] = {}
    return further


class Stack:
    """A server and three clients, or what else a compose file has of them."""

    def __init__(self, folder: Path, name: str, file: Path = COMPOSE, clients: int = 3, **environment: str) -> None:
        self.name, self.folder, self._file, self._clients = name, folder, file, clients
        self.secrets, self.data, self.runs = folder / "secrets", folder / "data", folder / "server" / "runs"
        self.passphrases: list[str] = []
        self.started: list[str] = []
        self._results: dict[str, Path] = {}
        self._containers: dict[str, str] = {}
        self._overrides: list[Path] = []
        self._environment = {
            **os.environ,
            "COTERIE_USER": USER,
            "SERVER_DIR": str(self.runs.parent),
            "DATA": str(self.data),
            "BUDGETS": str(folder / "budgets"),
            "CLIENT_ARGS": "--guarantee trusted-server",
            **environment,
        }

    def prepare(self) -> None:
        """Certificates, keys, bundles, and data of the demo's; the server gets what it needs, and no other key."""
        pki = self.runs.parent / "pki"
        for folder in (self.data, pki / "nodes"):
            folder.mkdir(parents=True)
        subprocess.run(["chown", "-R", USER, str(self.folder)], check=True)
        in_image(self.folder, "coterie", "certs", "/out/secrets", "--nodes", self._clients, "--host", "server")
        made = json.loads(in_image(self.folder, "coterie", "certs", "/out/secrets", "--bundle", "all", "--json").stdout)
        self.passphrases = [bundle["passphrase"] for bundle in made["bundles"]]
        self._environment |= {f"PASSPHRASE_{client}": word for client, word in enumerate(self.passphrases)}
        for pattern in ("ca.crt", "server.*", "roster.json", "nodes/*.pub"):
            for path in self.secrets.glob(pattern):
                shutil.copy(path, pki / path.relative_to(self.secrets))
        shutil.copytree(self.secrets / "sites", pki / "sites")
        data = [sys.executable, str(ROOT / "docker" / "demo" / "data.py"), str(self.data), str(self._clients)]
        subprocess.run(data, check=True)
        subprocess.run(["chown", "-R", USER, str(self.data), str(pki)], check=True)

    def compose(self, *words, environment=None, **options):
        files = [word for file in (self._file, *self._overrides) for word in ("-f", file)]
        variables = self._environment | (environment or {})
        return docker("compose", "-p", self.name, *files, *words, env=variables, **options)

    def override(self, services: dict, **further: dict) -> None:
        """Something of compose.yml that is different here."""
        file = self.folder / f"{self.name}-{len(self._overrides)}.json"
        file.write_text(json.dumps({"services": services, **further}))
        self._overrides.append(file)

    @contextmanager
    def changed(self, service: str, **differences):
        """Replaces a container by one that is different, for the time of a block."""
        self.override({service: differences})
        file = self._overrides[-1]
        self._replace(service)
        try:
            yield
        finally:
            self._overrides.remove(file)
            self._replace(service)

    def _replace(self, service: str) -> None:
        self._containers.pop(service, None)
        self.compose("up", "--detach", "--wait", "--no-deps", service, timeout=300)

    def up(self) -> None:
        self.compose("up", "--detach", "--wait", timeout=600)

    def cli(self, *words, **options):
        """Runs a command of the operator's."""
        return self.execute("server", *words, **options)

    def execute(self, service: str, *words, **options):
        """Runs a command in the container of a service."""
        return docker("exec", self.container(service), *words, **options)

    def submit(self, **settings) -> str:
        """Start a run; its id."""
        named = combine({key.replace("_", "-"): value for key, value in settings.items()})
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in named.items())
        said = self.cli("flwr", "run", "/app", "coterie", "--run-config", config, "--format", "json").stdout
        self.started.append(str(json.loads(said[said.index("{") :])["run-id"]))
        self._results[self.started[-1]] = self.runs / Path(settings["out"]).name / "result.json"
        return self.started[-1]

    def status(self, run: str) -> dict:
        status = json.loads(self.cli("coterie", "status", "--run", run, "--json").stdout)
        return {**status, "run": status["runs"][0]}

    def wait(self, run: str, seconds: float = 600) -> dict:
        """Wait for the end of a run; its status."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._sleep(run)
            status = self.status(run)
            if status["run"]["status"] in ENDED:
                return status
        self.tell()
        raise AssertionError(f"run {run} after {seconds} s: {status}")

    def _sleep(self, run: str) -> None:
        """Wait for the result of a run, but not for long: each question for its status takes seconds of a core."""
        for _ in range(10):
            time.sleep(1)
            if self._results[run].exists():
                return

    def complete(self, run: str, **options) -> None:
        """Wait for a run to end as it should."""
        status = self.wait(run, **options)["run"]
        assert status["status"] == "finished:completed", f"{status}\n{self.log(run)}"

    def result(self, name: str) -> dict:
        return json.loads((self.runs / name / "result.json").read_text())

    def diagnostics(self, name: str) -> dict:
        return json.loads((self.runs / name / "diagnostics.json").read_text())

    def logs(self, *services) -> str:
        done = self.compose("logs", "--no-color", "--timestamps", *services, check=False)
        return done.stdout + done.stderr

    def log(self, run: str) -> str:
        """What the ServerApp said, which the SuperLink keeps."""
        return self.cli("flwr", "log", run, "coterie", "--show").stdout

    def tell(self) -> None:
        """Prints what containers said last, and then of the last run what only a SuperLink that answers can say."""
        print(self.logs("--tail", "20"))
        for run in self.started[-1:]:
            for words in (("coterie", "status", "--run", run), ("flwr", "log", run, "coterie", "--show")):
                done = self.cli(*words, check=False)
                print(done.stdout + done.stderr)

    def container(self, service: str) -> str:
        """The id of a service's container, which a restart does not change."""
        if service not in self._containers:
            self._containers[service] = self.compose("ps", "--quiet", "--all", service).stdout.strip()
        return self._containers[service]

    def pid(self, service: str) -> int:
        return int(docker("inspect", "--format", "{{.State.Pid}}", self.container(service)).stdout)

    def kill(self, service: str, program: str) -> None:
        """Ends a process of a container without a goodbye; Docker restarts the container if it ends with that."""
        listed = docker("top", self.container(service), "-eo", "pid,args").stdout.splitlines()[1:]
        (pid, *_) = [int(line.split()[0]) for line in listed if program in line and "docker-init" not in line]
        os.kill(pid, signal.SIGKILL)

    @contextmanager
    def paused(self, service: str):
        """A container that stands still."""
        self.compose("pause", service)
        try:
            yield
        finally:
            self.compose("unpause", service)

    @contextmanager
    def cut_off(self, service: str, network: str):
        """Takes a container out of a network, and puts it back."""
        container, name = self.container(service), f"{self.name}_{network}"
        docker("network", "disconnect", name, container)
        try:
            yield
        finally:
            docker("network", "connect", "--alias", service, name, container)

    def in_network_of(self, service: str, *words) -> str:
        """Runs a program of this machine in the network namespace of a container."""
        done = subprocess.run(
            ["nsenter", "--net", "--target", str(self.pid(service)), *words], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def lines(self, name: str) -> list:
        """Of the run folder's metrics.jsonl."""
        file = self.runs / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, there: Callable[[], bool], seconds: float = 600) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() >= end:
                self.tell()
                raise AssertionError(f"nothing after {seconds} s")
            time.sleep(1)

    def paid(self, client: int) -> list[int]:
        """Rounds that the client has charged itself for, on its own disk."""
        said = self.execute(f"client-{client}", "cat", f"/state/client-{client}.ledger.jsonl").stdout
        return [line["round"] for line in map(json.loads, said.splitlines()) if "charge" in line]

    def spent(self, service: str, client: int) -> dict:
        """What the client's own ledger comes to."""
        ledger = f"/state/client-{client}.ledger.jsonl"
        return json.loads(self.execute(service, "coterie", "budget", "show", ledger, "--json").stdout)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "3", check=False, timeout=120)
