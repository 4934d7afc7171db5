"""How the cost of a run grows: `python benchmarks/growth.py [--only rounds] [--scale 0.001]`.

Each curve runs three sizes of one quantity, with all others small, and prints CPU seconds (with child processes) and
the exponent of the growth between sizes: 1 is in proportion to the work, and fixed costs make it less. Then methods
whose clients keep state between rounds are compared with FedAvg, in turn.
"""

import argparse
import logging
import math
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from coterie.datasets import Source
from coterie.server.app import open_folder
from coterie.server.simulate import simulate

_SMALL = {"strategy": "fedavg", "clusters": 1, "shift": "none", "groups": "1", "model": "linear", "rounds": 3}
_SMALL |= {"dataset": "growth:records", "samples-per-client": 1, "evaluate": "off", "epsilon": 8.0, "clip-norm": 0.1}
_CLUSTERED = {"strategy": "ifca", "clients": 400, "rounds": 20, "sampling-rate": 1.0, "model": "mlp-200"}
_FEW = {"clients": 12, "sampling-rate": 1.0}
#: Each curve: three sizes, and the settings of a size.
CURVES: dict[str, tuple[tuple[int, ...], Callable[[int], dict[str, Any]]]] = {
    "rounds": ((100, 1_000, 10_000), lambda size: {**_FEW, "rounds": size, "epsilon": 100.0}),
    "clients": ((10_000, 100_000, 1_000_000), lambda size: {"clients": size, "sampling-rate": min(1.0, 100 / size)}),
    "clusters": ((2, 10, 50), lambda size: {**_CLUSTERED, "clusters": size}),
    "parameters": ((10**5, 10**6, 10**7), lambda size: {**_FEW, "model": f"growth:wide_{size}"}),
    "cohort": ((100, 1_000, 10_000), lambda size: {"clients": size, "sampling-rate": 1.0}),
}
METHODS = ("fedavg", "fedper", "local", "fesem")


def records() -> Source:
    """A million records of 8 numbers, in two classes."""
    x = np.random.default_rng(0).standard_normal((1_000_000, 8), np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return Source("records", x, y, x[:100], y[:100], 2)


def __getattr__(name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    """Return a function that builds a network of about N parameters, as ``wide_N``."""
    begin, _, size = name.partition("_")
    if begin != "wide" or not size.isdecimal():
        raise AttributeError(name)

    def wide(shape: tuple[int, ...], num_classes: int) -> nn.Module:
        inputs = math.prod(shape)
        hidden = int(size) // (inputs + num_classes + 1)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    return wide


def seconds(settings: dict[str, Any]) -> float:
    """CPU seconds of a run, from its settings to its result."""
    with tempfile.TemporaryDirectory() as place:
        before = _used()
        folder = open_folder({"seed": 0, **settings}, Path(place))
        try:
            simulate(folder, cores=1)
        finally:
            folder.close()
        return _used() - before


def _used() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def curves(names: list[str], scale: float) -> None:
    """Print the cost of three sizes of each quantity."""
    print(f"{'curve':12}{'size':>12}{'CPU s':>10}{'exponent':>10}")
    for name in names:
        sizes, settings = CURVES[name]
        before: tuple[int, float] | None = None
        for size in sizes:
            scaled = max(2, round(size * scale))
            taken = seconds({**_SMALL, **settings(scaled)})
            exponent = ""
            if before is not None and scaled > before[0]:
                exponent = f"{math.log(taken / before[1]) / math.log(scaled / before[0]):.2f}"
            print(f"{name:12}{scaled:12,}{taken:10.2f}{exponent:>10}", flush=True)
            before = scaled, taken


def methods(scale: float, repeats: int) -> None:
    """Print the cost of methods whose clients keep state, as multiples of FedAvg's."""
    common = {"clients": max(8, round(240 * scale)), "rounds": 8, "sampling-rate": 1.0, "privacy-unit": "none"}
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(repeats):
        for name in METHODS:
            settings = {"strategy": name, "clusters": 4 if name == "fesem" else 1, "evaluate": "off"}
            taken[name].append(seconds({**common, **settings}))
    base = statistics.median(taken["fedavg"])
    print(f"{'method':12}{'CPU s':>22}{'ratio':>10}")
    for name, values in taken.items():
        print(f"{name:12}{statistics.median(values):22.2f}{statistics.median(values) / base:10.2f}")


def main() -> None:
    """Run the curves, and compare the methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*CURVES, "methods"], help="repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply all sizes by it")
    parser.add_argument("--repeat", type=int, default=3, help="of the methods")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    chosen = options.only or [*CURVES, "methods"]
    if names := [name for name in CURVES if name in chosen]:
        curves(names, options.scale)
    if "methods" in chosen:
        methods(options.scale, options.repeat)


if __name__ == "__main__":
    main()
