"""A deployed federation on this machine: do rounds end, how long do they take, and is a node left out?

    python benchmarks/load.py [--nodes 30] [--rounds 3] [--unit none|record]
    python benchmarks/load.py --churn --rounds 20 --nodes 8 [--away 0.25]
    python benchmarks/load.py --churn --rounds 100 --nodes 30 --limit 7200

Starts a SuperLink with TLS, SuperNode authentication and a SQLite database, and one SuperNode for each client, as
``coterie client`` does, all as processes of this machine, the SuperNodes at a lower priority; then runs FedAvg on a
linear model. With ``--churn`` a share of the nodes stops in the middle of each round, by SIGTERM or SIGKILL at random.
Every second of these starts again at once, the others when the round has ended. Node 0 always stays.

Prints seconds per round, seconds until the SuperLink has the first, median and last reply of a round,
CPU seconds during the run by program, the peak of the proportional set size (PSS) in sum and by program, how many
rounds each node took part in, the most rounds in turn that it missed, and the nodes that took part in none of the last
``--window``. ``sizes`` are those of SuperLink, ServerApp, and SuperNode and SuperExec of node 0 after about ten of the
rounds (resident set in MB, and open descriptors), and of the database and all logs (MB); ``growth`` is the slope of a
line through all rounds from the tenth on, per 10 rounds.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.deploy.certificates import create
from coterie.deploy.edge import Edge, command
from coterie.server.resolution import combine
from coterie.site.node import NodeConfig

ROOT, BIN = Path(__file__).resolve().parents[1], Path(sys.executable).parent
SHAPE, CLASSES, RECORDS = "1x8x8", 10, 60
# Lines of a SuperNode's log: the round of the message that it sends next, and that the SuperLink has it.
ROUND, SENDING, SENT = re.compile(r"\[RUN \d+, ROUND (\d+)\]"), re.compile(r"Sending: (\S+)"), "Sent successfully"
SERVERS = ("superlink", "flwr-serverapp")
# Counted in the logs of SuperLink and SuperNodes.
TROUBLES = ("database is locked", "Internal server error")


class Memory(threading.Thread):
    """The proportional set size of this process's descendants, by program: the largest sum that was seen.

    Args:
        seconds: between two looks, each of which takes a while for many processes.
    """

    def __init__(self, seconds: int = 20) -> None:
        super().__init__(daemon=True)
        self.peak: collections.Counter[str] = collections.Counter()
        self.resident: dict[str, int] = {}  # largest resident set size of a process of a server program
        self._seconds, self._done = seconds, threading.Event()

    def run(self) -> None:
        ticks = 0
        while not self._done.wait(1.0):
            ticks += 1
            for pid, _ in descendants():
                with contextlib.suppress(OSError, StopIteration):
                    if (name := program(pid)) in SERVERS:
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        peak = next(line for line in lines if line.startswith("VmHWM:"))
                        self.resident[name] = max(self.resident.get(name, 0), int(peak.split()[1]) // 1024)
            if ticks % self._seconds == 0:
                now = self._look()
                if now.total() > self.peak.total():
                    self.peak = now

    def stop(self) -> None:
        self._done.set()
        self.join()

    @staticmethod
    def _look() -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for pid, _ in descendants():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                pss = next(line for line in lines if line.startswith("Pss:"))
                found[program(pid)] += int(pss.split()[1]) // 1024
        return found


def descendants(root: int = 0) -> list[tuple[int, float]]:
    """Descendants of a process, by default of this one: id, and CPU seconds with those of children that ended."""
    root = root or os.getpid()
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        if ancestor == root and pid != root:
            found.append((pid, seconds[pid]))
    return found


def resident(pid: int) -> float:
    """Resident set of a process, MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def program(pid: int) -> str:
    """What a process runs: one of Flower's programs or the SuperLink; forked ClientApps count as what forks them."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    names = {"deploy.superexec": "flower-superexec", "deploy.fork_server": "fork server and ClientApps"}
    names |= {"deploy.supernode": "flower-supernode"}
    found = [name for part, name in names.items() if part in line]
    return next(iter(found + [Path(word).name for word in line.split() if "/fl" in word]), "superlink")


def cpu() -> dict[str, float]:
    """CPU seconds of this process's descendants so far, by program."""
    found: dict[str, float] = collections.defaultdict(float)
    for pid, seconds in descendants():
        with contextlib.suppress(OSError):
            found[program(pid)] += seconds
    return found


class Federation:
    """SuperLink and SuperNodes, ended with all that they started.

    Args:
        folder: of keys, data, states, logs and the run.
        nodes: number of SuperNodes.
        database: whether the SuperLink keeps its state in a file, not in memory.
        plain: start flower-superlink, not coterie superlink.
        nice: of SuperNodes; machines of their own would not take the SuperLink's time.
    """

    def __init__(self, folder: Path, nodes: int, database: bool, plain: bool, nice: int) -> None:
        self.folder, self.nodes, self._nice = folder, nodes, nice
        self.port, self.fleet, *self._ports = _free_ports(nodes + 2)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        create(folder / "pki", nodes, ["localhost"])
        home = folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "load"\n[superlink.load]\naddress = "localhost:{self.port}"\n'
            f'root-certificates = "{folder}/pki/ca.crt"\n'
        )
        self.variables = _variables(home)
        pki, rng = folder / "pki", np.random.default_rng(0)
        for i in range(nodes):
            own = folder / f"client-{i}"
            own.mkdir()
            x = rng.integers(0, 256, (RECORDS, 1, 8, 8), np.uint8)
            np.savez(own / "train.npz", x=x, y=np.arange(RECORDS) % CLASSES)
        words = ["--ssl-ca-certfile", pki / "ca.crt", "--ssl-certfile", pki / "server.crt"]
        words += ["--ssl-keyfile", pki / "server.key", "--enable-supernode-auth", "--host", "127.0.0.1"]
        words += ["--port", self.port, "--fleet-api-address", f"127.0.0.1:{self.fleet}", "--isolation", "subprocess"]
        words += ["--database", folder / "superlink.db"] if database else []
        program = [str(BIN / "flower-superlink")] if plain else [sys.executable, "-m", "coterie.cli", "superlink"]
        self._start("superlink", [*program, *map(str, words)], self.variables)
        _until(lambda: _open(self.fleet) and _open(self.port), 120)

    def _start(self, name: str, words: list[str], variables: dict[str, str]) -> None:
        process = self._processes[name] = subprocess.Popen(
            words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

        def write() -> None:
            with (self.folder / f"{name}.log").open("ab", buffering=0) as out:
                for line in process.stdout or ():
                    out.write(f"{time.monotonic():.3f} ".encode() + line)

        threading.Thread(target=write, daemon=True).start()

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *words], env=self.variables, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise SystemExit(f"flwr {words[0]}: {done.stdout}{done.stderr}")
        return done.stdout

    def register(self) -> None:
        for i in range(self.nodes):
            self.flwr(
                "supernode", "register", str(self.folder / f"pki/nodes/node-{i}.pub"), "load", "--name", f"node-{i}"
            )

    def come(self, i: int) -> None:
        """Start SuperNode i."""
        edge = Edge(
            superlink=f"localhost:{self.fleet}",
            key=self.folder / f"pki/nodes/node-{i}.key",
            ca=self.folder / "pki/ca.crt",
            node=NodeConfig(
                client_id=i,
                data=str(self.folder / f"client-{i}"),
                state_dir=str(self.folder / f"state-{i}"),
                guarantee="trusted-server",
            ),
            port=self._ports[i],
        )
        edge.state_dir.mkdir(exist_ok=True)
        self._start(f"node-{i}", ["nice", "-n", str(self._nice), *command(edge)], _variables(edge.state_dir / "flwr"))

    def ready(self) -> bool:
        """Whether every SuperNode waits for messages."""
        logs = [log.read_text(errors="replace") for log in self.folder.glob("node-*.log")]
        return sum("Flower SuperExec" in log for log in logs) == self.nodes

    def go(self, i: int, how: signal.Signals = signal.SIGTERM) -> None:
        """End SuperNode i with all that it started."""
        process = self._processes.pop(f"node-{i}")
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def sizes(self) -> dict[str, float]:
        """Memory (MB) and descriptors of SuperLink, ServerApp, SuperNode and SuperExec of node 0, and files (MB)."""
        link, node = self._processes["superlink"].pid, self._processes["node-0"].pid
        pids = {"superlink": link, "supernode": node}
        for root, name in ((link, "flwr-serverapp"), (node, "flower-superexec")):
            for pid, _ in sorted(descendants(root), reverse=True):  # the SuperExec comes last
                with contextlib.suppress(OSError):
                    pids |= {name: pid} if program(pid) == name else {}
        databases, logs = self.folder.glob("superlink.db*"), self.folder.glob("*.log")
        found = {"database": sum(map(_megabytes, databases)), "logs": sum(map(_megabytes, logs))}
        for name, pid in pids.items():
            with contextlib.suppress(OSError):  # the ServerApp has ended
                found[name] = resident(pid)
                found[f"descriptors of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
        return found

    def dead(self) -> list[str]:
        """Programs that ended by themselves."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def replies(self, i: int) -> dict[int, float]:
        """When the SuperLink had the reply of SuperNode i to the training request of a round."""
        number, kind, rounds = 0, "", dict[int, float]()
        for line in (self.folder / f"node-{i}.log").read_text(errors="replace").splitlines():
            if found := ROUND.search(line):
                number = int(found[1])
            elif found := SENDING.search(line):
                kind = found[1]
            elif SENT in line and kind == "train":
                rounds[number] = float(line.split()[0])
                kind = ""
        return rounds


def _megabytes(file: Path) -> float:
    return file.stat().st_size / 2**20


def _variables(home: Path) -> dict[str, str]:
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(number)]


def _open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(happened: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(f"nothing in {seconds:g} s")
        time.sleep(0.5)


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, object]:  # noqa: C901
    """One run: what became of its rounds, its nodes and the memory."""
    federation, memory = Federation(folder, chosen.nodes, not chosen.in_memory, chosen.plain, chosen.nice), Memory()
    out, rng = folder / "run", np.random.default_rng(chosen.seed)
    lines: list[dict[str, Any]] = []
    try:
        federation.register()
        for i in range(chosen.nodes):
            federation.come(i)
        _until(federation.ready, 600)
        memory.start()
        values = {
            "strategy": "fedavg",
            "dataset": "own",
            "input-shape": SHAPE,
            "num-classes": CLASSES,
            "model": chosen.model,
            "device": "cpu",
            "clients": chosen.nodes,
            "privacy-unit": chosen.unit,
            "batch-size": 20,
            "local-epochs": 1,
            "sampling-rate": 1.0,
            "rounds": chosen.rounds,
            "evaluate": "off",
            "registration-timeout": chosen.wait,
            "round-timeout": chosen.timeout,
            "out": str(out),
        }
        if chosen.unit == "record":
            values |= {"epsilon": 8.0, "samples-per-client": RECORDS}
        settings = " ".join(f"{name}={json.dumps(value)}" for name, value in combine(values).items())
        began, left, used = time.monotonic(), collections.Counter[int](), cpu()
        ends: list[float] = []
        sizes: dict[int, dict[str, float]] = {}
        threading.Thread(target=_note_ends, args=(out, ends, chosen.rounds), daemon=True).start()
        away: list[int] = []
        federation.flwr("run", ".", "load", "--run-config", settings)
        failed = 0.0  # the last time when the run was asked for
        while len(lines) < chosen.rounds and time.monotonic() - began < chosen.limit:
            time.sleep(1.0)
            there = _metrics(out)
            if len(there) > len(lines):
                sizes[len(there)] = federation.sizes()
                for i in away:
                    federation.come(i)
                if chosen.churn and len(there) < chosen.rounds:
                    away = [int(i) for i in 1 + rng.choice(chosen.nodes - 1, round(chosen.away * chosen.nodes), False)]
                    for i in away:
                        federation.go(i, signal.SIGKILL if rng.random() < 0.5 else signal.SIGTERM)
                        left[i] += 1
                    for i in away[::2]:
                        federation.come(i)
                    away = away[1::2]
                for line in there[len(lines) :]:
                    print(f"round {line['round']}: {json.dumps(line)}", file=sys.stderr)
                lines = there
            if time.monotonic() - failed > 15:
                failed = time.monotonic()
                (run,) = json.loads(federation.flwr("list", "load", "--format", "json"))["runs"]
                if run["status"] == "finished:failed":
                    raise SystemExit(federation.flwr("log", str(run["run-id"]), "load", "--show")[-3000:])
            for name in federation.dead():
                print(f"{name} ended by itself", file=sys.stderr)
                if not name.startswith("node-"):
                    raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
                federation.go(int(name[5:]))
                federation.come(int(name[5:]))
        ended = time.monotonic()
        seconds = [round(float(str(line["seconds"])), 1) for line in lines]
        used = {name: more for name, now in cpu().items() if (more := now - used.get(name, 0.0)) > 0}
        replies = {i: federation.replies(i) for i in range(chosen.nodes)}
        took = {i: set(there) for i, there in replies.items()}
        window = {int(str(line["round"])) for line in lines[-chosen.window :]}
        memory.stop()
        logs = "".join(file.read_text(errors="replace") for file in folder.glob("*.log"))
        return {
            "nodes": chosen.nodes,
            "rounds": f"{len(lines)} of {chosen.rounds}",
            "seconds in all": round(ended - began, 1),
            "seconds per round": seconds,
            "seconds to the first, median, last reply": [
                _reaction([at[line["round"]] for at in replies.values() if line["round"] in at], end - line["seconds"])
                for line, end in zip(lines, ends, strict=False)
            ],
            "CPU seconds by program": {name: round(seconds, 1) for name, seconds in used.items()},
            "accepted replies": [line["replies"]["accepted"] for line in lines],
            "clients present": [line["clients_present"] for line in lines],
            "PSS peak, MB": memory.peak.total(),
            "by program": dict(memory.peak),
            "RSS peak of the server, MB": memory.resident,
            "sizes": {number: _rounded(sizes[number]) for number in sorted(sizes)[:: max(1, len(sizes) // 10)]},
            "growth": _rounded(growth(sizes)),
            "rounds of each node": [len(took[i]) for i in took],
            "longest absence": [_gap(took[i], len(lines)) for i in took],
            "left out": [i for i in took if not took[i] & window],
            "stops of each node": [left[i] for i in took],
            "troubles": {trouble: logs.count(trouble) for trouble in TROUBLES},
            "load average": os.getloadavg(),
        }
    finally:
        federation.close()


def _note_ends(out: Path, ends: list[float], rounds: int) -> None:
    """Note when the run folder has the line of each round."""
    while len(ends) < rounds:
        ends += [time.monotonic()] * (len(_metrics(out)) - len(ends))
        time.sleep(0.02)


def growth(sizes: dict[int, dict[str, float]], first: int = 10) -> dict[str, float]:
    """Slope of the memory of each program over the rounds from ``first`` on, in MB per 10 rounds."""
    slopes = {}
    for name in {name for number, size in sizes.items() if number >= first for name in size}:
        later = {number: size[name] for number, size in sizes.items() if number >= first and name in size}
        if len(later) > 1:
            slopes[name] = 10 * float(np.polyfit(list(later), list(later.values()), 1)[0])
    return slopes


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


def _reaction(times: list[float], began: float) -> list[float]:
    """Seconds from the begin of a round to its first, median and last reply."""
    return [round(pick(times) - began, 2) for pick in (min, statistics.median, max)] if times else []


def _gap(rounds: set[int], last: int) -> int:
    """The most rounds in turn, up to the last, that are not among some."""
    there = [0, *sorted(number for number in rounds if number <= last), last + 1]
    return max(later - earlier - 1 for earlier, later in itertools.pairwise(there))


def _metrics(out: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit", choices=("none", "record"), default="none")
    parser.add_argument("--model", default="linear", help="resnet18-gn has 11 million parameters")
    parser.add_argument("--churn", action="store_true", help="nodes leave and return in each round")
    parser.add_argument("--away", type=float, default=0.25, help="share of nodes that leave in a round")
    parser.add_argument("--window", type=int, default=5, help="left out: misses the last so many rounds")
    parser.add_argument("--wait", type=float, default=120.0)
    parser.add_argument("--timeout", type=float, default=300.0, help="round-timeout")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which the measurement ends")
    parser.add_argument("--in-memory", action="store_true", help="a SuperLink without a database file")
    parser.add_argument("--plain", action="store_true", help="flower-superlink, not coterie superlink")
    parser.add_argument("--nice", type=int, default=10, help="niceness of SuperNodes and what they start")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and the run, which is left there")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # SuperLink and SuperNodes end with this process
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for what, value in measure(chosen, folder.resolve()).items():
            print(f"{json.dumps(what)}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
