"""What a round costs on a Ray cluster of two nodes on this machine: bytes over the network, and CPU seconds.

    python benchmarks/ray_nodes.py [--clients 240] [--rounds 6] [--model cnn-small] [--repeat 3]

The same run alternates between the cluster and the local engine, with one core for each node and as many workers.
Prints one JSON document. Bytes are those that the loopback interface receives from the end of the first round to the
end of the last one: messages, sums, and what Ray's processes tell each other. Data are made up.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent / "simulators"))

from measure import Tree

from coterie.client.cohort import federation
from coterie.engine.in_process import LocalGrid, SummingGrid
from coterie.server import RunConfig, RunFolder, run
from coterie.wire.messages import Layout

NODES = 2
_RAY = Path(sys.executable).parent / "ray"
_SECONDS = 60.0


def settings(chosen: argparse.Namespace) -> dict[str, Any]:
    """Every client takes part in every round, one epoch of 60 images; the noise is added to the sum."""
    return {
        "dataset": "made_up:images",
        "strategy": "fedavg",
        "clusters": 1,
        "clients": chosen.clients,
        "groups": "1",
        "shift": "none",
        "samples-per-client": 60,
        "model": chosen.model,
        "local-epochs": 1,
        "rounds": chosen.rounds,
        "sampling-rate": 1.0,
        "noise-multiplier": 5.0,
        "epsilon": 1000.0,
        "evaluate": "off",
        "seed": 0,
    }


@contextmanager
def cluster() -> Iterator[None]:
    """Start the nodes, and connect to them."""
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, address = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp")), f"127.0.0.1:{port}"
    common = ["--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    common += ["--object-store-memory=500000000", "--min-worker-port=0", "--max-worker-port=0"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for words in (head, *[[f"--address={address}"]] * (NODES - 1)):
            with (folder / f"node-{len(nodes)}.log").open("w") as log:
                nodes.append(
                    subprocess.Popen([_RAY, "start", *words, *common], stdout=log, stderr=log, start_new_session=True)
                )
            _wait(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
        _wait(lambda: sum(node["Alive"] for node in ray.nodes()) == NODES)  # type: ignore[no-untyped-call]
        yield
    finally:
        ray.shutdown()
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + _SECONDS
    while not ready():
        if time.monotonic() > ends:
            raise TimeoutError("the Ray nodes do not start")
        time.sleep(0.2)


def received() -> int:
    """Return the bytes that the loopback interface has received."""
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


def measured(chosen: argparse.Namespace, grid: LocalGrid) -> dict[str, float]:
    """Run, and return costs of the rounds after the first one, each per round."""
    tree = Tree(os.getpid())
    noted: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(settings(chosen))
        federation(config.for_clients())
        with closing(RunFolder.create(Path(folder) / "run", config)) as made:
            made.on_metrics = lambda _: noted.append((time.monotonic(), tree.cpu_seconds(), received()))
            run(made, grid)
    (began, cpu, before), (ended, cpu_after, after) = noted[0], noted[-1]
    rounds = len(noted) - 1
    return {
        "seconds": (ended - began) / rounds,
        "cpu_ms_per_client": 1000 * (cpu_after - cpu) / rounds / chosen.clients,
        "bytes": (after - before) / rounds,
    }


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", default="cnn-small")
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    from coterie.engine.ray import ray_workers
    from coterie.engine.ray_workers import RayGrid

    runs: dict[str, list[dict[str, float]]] = {"ray": [], "local": []}
    with cluster():
        for _ in range(chosen.repeat):
            with ray_workers() as workers:
                runs["ray"].append(measured(chosen, RayGrid(chosen.clients, workers)))
            grid = SummingGrid(chosen.clients, NODES)
            try:
                runs["local"].append(measured(chosen, grid))
            finally:
                grid.close()
    size = Layout.of(federation_network(chosen)).size
    document: dict[str, Any] = {
        "clients": chosen.clients,
        "parameters": size,
        "bytes_of_all_updates": 4 * size * chosen.clients,
    }
    for engine, found in runs.items():
        document[engine] = {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
    document["ray_over_local"] = round(document["ray"]["cpu_ms_per_client"] / document["local"]["cpu_ms_per_client"], 3)
    print(json.dumps(document, indent=2))


def federation_network(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of the network."""
    from coterie.models import initialise

    config = RunConfig(settings(chosen))
    return dict(initialise(config.training.model, *config.examples, 0))


if __name__ == "__main__":
    main()
