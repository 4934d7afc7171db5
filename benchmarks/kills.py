"""`kill -9` at random moments of every process of a deployment on this machine: does the run end, and what is charged?

    python benchmarks/kills.py FOLDER [--seed 0] [--kills 30] [--rounds 15]

Starts `coterie server` and three `coterie client` in FOLDER, which is new, starts each again two seconds after it has
ended, as systemd does, and submits a run with record-level privacy, again with `resume` until it is complete. Then it
kills, every 10 to 22 s, a process of a kind that was killed least: SuperLink, SuperExec of the server, ServerApp,
SuperNode, SuperExec of a client, the process that forks ClientApps, or one that it has forked.

Prints for each kill after how many seconds a log of its site names it, and how many rounds are done; at the end, the
kinds, the kills that were not named within 10 s, the rounds, how often the run was submitted, and how often each
client has charged each round.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.deploy.trial import free_ports

ROOT, BIN = Path(__file__).resolve().parents[1], Path(sys.executable).parent
CLIENTS, WITHIN = 3, 10.0
OF_SERVER = ("SuperLink", "SuperExec of the server", "ServerApp")
OF_CLIENT = ("SuperNode", "SuperExec", "what imports libraries", "what forks ClientApps", "ClientApp or its template")
RUN = """
strategy = "fedavg"
clusters = 1
rounds = {rounds}
out = "{out}"
data = {{dataset = "own", table-schema = "{schema}", clients = 3, samples-per-client = 90}}
training = {{model = "linear", local-epochs = 1, batch-size = 90, lr = 4.0}}
privacy = {{privacy-unit = "record", epsilon = 30.0, delta = 1e-4, clip-norm = 1.0}}
deployment = {{min-clients = 3, min-replies = 1.0}}
"""


class Deployment:
    """Server and clients in a folder, each started again when it ends, and a run."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.out, self.over, self.submitted = folder, folder / "out", False, 0
        self.variables = {**os.environ, "HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        self.variables.pop("FLWR_HOME", None)
        schema = ROOT / "examples" / "hospital-csv" / "schema.toml"
        self.call(sys.executable, schema.with_name("write_sites.py"), "sites")
        fleet, control, *runtime = free_ports(2 + CLIENTS)
        self.call("coterie", "certs", "fl/pki", "--nodes", CLIENTS, "--host", "localhost")
        said = self.call("coterie", "certs", "fl/pki", "--bundle", "all", "--superlink", f"localhost:{fleet}")
        passphrases = re.findall(r"passphrase (\S+)\n", said)
        self.keep("server", ["coterie", "server", "fl", "--port", fleet, "--control-port", control])
        while "nodes are registered" not in self.log("server"):
            time.sleep(0.5)
        for i, passphrase in enumerate(passphrases):
            (folder / f"site-{i}").mkdir()
            (folder / "sites" / f"client-{i}.csv").rename(folder / f"site-{i}" / "train.csv")
            words = ["coterie", "client", f"fl/pki/sites/node-{i}.coterie", "--data", f"site-{i}", "--schema", schema]
            words += ["--epsilon", 50, "--delta", 1e-4, "--guarantee", "record-level", "--port", runtime[i]]
            self.keep(f"client-{i}", words, {"COTERIE_PASSPHRASE": passphrase})
        (folder / "run.toml").write_text(RUN.format(rounds=rounds, out=self.out, schema=schema))
        threading.Thread(target=self.submit, daemon=True).start()

    def call(self, *words: object) -> str:
        """Run a command in the folder to its end."""
        return subprocess.run(
            list(map(str, words)), cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def log(self, name: str) -> str:
        """What a site has said."""
        path = self.folder / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def keep(self, name: str, words: list[Any], more: Mapping[str, str] | None = None) -> None:
        """Start a command, and start it again whenever it ends."""

        def run() -> None:
            while not self.over:
                with (self.folder / f"{name}.log").open("ab") as log:
                    process = subprocess.Popen(
                        list(map(str, words)),
                        cwd=self.folder,
                        env=self.variables | dict(more or {}),
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                    log.write(f"{name} ended with status {process.wait()}\n".encode())
                with suppress(ProcessLookupError):  # as systemd ends a unit
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(2)

        threading.Thread(target=run, daemon=True).start()

    def submit(self) -> None:
        """Submit the run, and again until it is complete."""
        while not self.over and not self.complete:
            known = (self.out / "config.toml").exists()
            settings = f'resume=true out="{self.out}"' if known else str(self.folder / "run.toml")
            self.submitted += 1
            with (self.folder / "run.log").open("ab") as log:
                words = [str(BIN / "flwr"), "run", str(ROOT), "coterie", "--stream", "--run-config", settings]
                home = {"FLWR_HOME": str(self.folder / "fl" / "flwr")}
                subprocess.run(words, env=self.variables | home, stdout=log, stderr=log, check=False)
            time.sleep(3)

    @property
    def complete(self) -> bool:
        """Whether the run is."""
        return (self.out / "result.json").exists()

    @property
    def rounds(self) -> int:
        """Number of rounds that are done."""
        path = self.out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def processes(self) -> dict[str, list[tuple[int, str]]]:
        """Living processes and the sites that they are of, by their kinds."""
        parents, words, found = {}, {}, dict[str, list[tuple[int, str]]]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and f"HOME={self.folder}\0".encode() in (entry / "environ").read_bytes():
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    words[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        for number in parents:
            chain = [number]
            while parents[chain[-1]] in parents:
                chain.append(parents[chain[-1]])
            top = words[chain[-1]]
            client = re.search(r"client-id=(\d)|node-(\d)\.coterie", top)
            if client or " server fl" in top:
                kinds = OF_CLIENT if client else OF_SERVER
                site = f"client-{client[1] or client[2]}" if client else "server"
                found.setdefault(kinds[min(len(chain), len(kinds)) - 1], []).append((number, site))
        return found

    def end(self) -> None:
        """End all processes."""
        self.over = True
        while found := self.processes():
            for number, _ in (each for listed in found.values() for each in listed):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.5)


def charges(deployment: Deployment, client: int) -> Counter[int]:
    """How many rounds a client has charged how often."""
    lines = (deployment.folder / f"site-{client}" / ".coterie-budget.jsonl").read_text().splitlines()[1:]
    return Counter(Counter(json.loads(line).get("round") for line in lines).values())


def main() -> None:
    """Kill, wait for the run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    options.folder.mkdir()
    rng, began = random.Random(options.seed), time.monotonic()
    deployment = Deployment(options.folder.resolve(), options.rounds)
    killed, unnamed = Counter[str](), []
    while killed.total() < options.kills and not deployment.complete:
        time.sleep(rng.uniform(10, 22))
        found = deployment.processes()
        if not found:
            continue
        least = min(killed[kind] for kind in found)
        kind = rng.choice(sorted(kind for kind in found if killed[kind] <= least + 1))
        number, site = rng.choice(found[kind])
        before, start = len(deployment.log(site)), time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        killed[kind] += 1
        while "ended" not in deployment.log(site)[before:] and time.monotonic() - start < WITHIN:
            time.sleep(0.2)
        seconds = time.monotonic() - start
        unnamed += [(kind, site)] * (seconds >= WITHIN)
        print(
            f"{start - began:6.1f} s  {kind} of {site}: named after {seconds:.1f} s; round {deployment.rounds}",
            flush=True,
        )
    while not deployment.complete and time.monotonic() - began < 3600:
        time.sleep(1)
    print(f"kills {dict(killed)}, not named within {WITHIN:g} s: {unnamed or 'none'}")
    print(f"rounds {deployment.rounds}, complete {deployment.complete}, submitted {deployment.submitted} times")
    for client in range(CLIENTS):
        print(f"client {client}: rounds by number of charges {dict(charges(deployment, client))}")
    deployment.end()


if __name__ == "__main__":
    main()
