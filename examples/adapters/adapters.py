"""Prints accuracy, bytes and cost of adapters beside full training, under privacy of clients and of records.

COTERIE_DATA=DIR python adapters.py [--quick] [--seed N] [--out FILE]
"""

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import plays

from coterie.client.dpsgd import DPSGD, clipped_gradients
from coterie.engine.in_process import LocalGrid
from coterie.models import NetworkSpec, build, num_parameters
from coterie.server import RunConfig, RunFolder, run

#: Adapters, chosen on validation sites.
ADAPTERS = "lora:rank=1,layers=head"
COMMON = {
    "model": "plays:network", "groups": "1", "shift": "none", "samples-per-client": 0, "sampling-rate": 1.0,
    "train-alone": 0, "evaluate-every": 1000, "evaluate": "diagnostic", "local-epochs": 1,
}  # fmt: skip
#: Settings of each unit, chosen on validation sites with seed 100.
UNITS = {
    "client": {"dataset": "plays:private", "clients": 300, "rounds": 8, "batch-size": 25, "lr": 0.5},
    "record": {
        "dataset": "plays:large_private",
        "clients": 10,
        "samples-per-client": 2800,
        "rounds": 5,
        "batch-size": 100,
        "lr": 0.5,
    },
}
#: What full training has in place of those, chosen in the same way.
FULL: dict[str, dict[str, object]] = {"client": {"lr": 0.1}, "record": {}}
CLUSTERED = {"client": "ifca", "record": "rc-dpfl"}


def settings(unit: str, epsilon: float, clusters: int, adapters: str, base: Path) -> dict[str, object]:
    """Return the settings of a run."""
    strategy = CLUSTERED[unit] if clusters > 1 else "fedavg"
    chosen = {"strategy": strategy, "clusters": clusters, "privacy-unit": unit, "epsilon": epsilon}
    own = FULL[unit] if adapters == "none" else {}
    return {**COMMON, **UNITS[unit], **own, **chosen, "adapters": adapters, "pretrained": str(base)}


def accuracy(values: dict[str, object]) -> float:
    """Train; return the mean accuracy of the sites on their own test characters."""
    config = RunConfig(values)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RunFolder.create(Path(folder) / "run", config)) as opened,
        closing(LocalGrid(config.data.clients)) as grid,
    ):
        return float(run(opened, grid)["diagnostics"]["accuracy"])


def initial_accuracy(base: Path) -> float:
    """Return the accuracy of the public parameters without training on the sites."""
    source = plays.private()
    network = build(NetworkSpec("plays:network", pretrained=str(base)), (plays.LENGTH,), source.num_classes)
    with torch.no_grad():
        guesses = network(torch.as_tensor(source.test_x)).argmax(1)
    return float((guesses.numpy() == source.test_y).mean())


def cost(adapters: str, width: int, records: int, pipe: multiprocessing.connection.Connection) -> None:
    """Send seconds of a step of DP-SGD, and its peak memory in MB beyond that of the network and its inputs."""
    torch.set_num_threads(1)
    network = plays.Transformer(plays.LENGTH, len(plays.CHARACTERS), width)
    network = NetworkSpec("wide", adapters).build(lambda: network)
    x = torch.randint(len(plays.CHARACTERS), (records, plays.LENGTH))
    step = DPSGD(num_examples=records, batch_size=records, epochs=1, lr=0.1, clip_norm=1.0, noise_multiplier=1.0)
    clipped_gradients(network, x[:2], lambda out, _: out.logsumexp(1), step)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    clipped_gradients(network, x, lambda out, _: out.logsumexp(1), step)
    seconds = time.perf_counter() - start
    pipe.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def measured(adapters: str, width: int, records: int) -> tuple[float, float]:
    """Return :func:`cost` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=cost, args=(adapters, width, records, theirs))
    process.start()
    found: tuple[float, float] = ours.recv()
    process.join()
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few sites, rounds and steps: a smoke test")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and training")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    epsilons, start = ([8.0] if options.quick else [2.0, 4.0, 8.0]), time.perf_counter()
    results: list[dict[str, object]] = []
    width, records = (32, 16) if options.quick else (256, 256)  # first: a process has at least the peak of its parent
    costs = {what: measured(what, width, records) for what in (ADAPTERS, "lora:rank=1", "none")}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.safetensors"
        plays.pretrain(base, 20 if options.quick else 1000)
        print(f"public parameters alone: {initial_accuracy(base):.1%} after {time.perf_counter() - start:.0f} s")
        for unit in UNITS:
            for adapters in (ADAPTERS, "none"):
                spec = NetworkSpec("plays:network", adapters)
                size = num_parameters(build(spec, (plays.LENGTH,), len(plays.CHARACTERS)))
                for clusters in (2, 1):
                    for epsilon in epsilons:
                        values = settings(unit, epsilon, clusters, adapters, base) | {"seed": options.seed}
                        if options.quick:
                            values |= {"clients": min(int(UNITS[unit]["clients"]), 20), "rounds": 1}
                        reached = accuracy(values)
                        row = {"unit": unit, "adapters": adapters, "clusters": clusters, "epsilon": epsilon}
                        results.append({**row, "accuracy": reached, "parameters": size, "bytes": 4 * size})
                        what = "adapters" if adapters != "none" else "full"
                        models = "clusters" if clusters > 1 else "one model"
                        print(
                            f"{unit:6} {what:8} {models:9} epsilon {epsilon:g}: {reached:.1%}, "
                            f"{4 * size:,} bytes an update, {time.perf_counter() - start:.0f} s",
                            flush=True,
                        )
    for what, (seconds, megabytes) in costs.items():
        print(f"DP-SGD of {records} records, width {width}, adapters {what}: {seconds:.3f} s, {megabytes:.0f} MB")
    if options.out:
        options.out.write_text(json.dumps({"rows": results, "costs": costs}, indent=2))


if __name__ == "__main__":
    main()
