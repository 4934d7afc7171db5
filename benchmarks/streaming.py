"""Does memory grow with the number of replies? One round with many large updates, on one engine.

    python benchmarks/streaming.py [--replies 1000] [--parameters 11000000] [--engine local|ray] [--workers N]

Runs three times: with one parameter block of ten numbers, with as few replies as there are workers, and in full. Prints
one JSON document with the peak of the proportional set size (PSS) of all processes, and what the full run takes above
the first one and the model: "above_model_mb". A run that exceeds ``--limit-mb`` is ended, and reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "simulators"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import measure
from task import Task

HERE = Path(__file__).resolve().parent
SIMULATORS = HERE / "simulators"


def settings(replies: int, unit: str) -> dict[str, object]:
    """One round of FedAvg in which every client replies."""
    private = {"noise-multiplier": 0.1, "epsilon": 1e6, "clip-norm": 1.0, "divisor": "fixed"}
    return {
        "strategy": "fedavg",
        "clusters": 1,
        "dataset": "made_up:pixels",
        "clients": replies,
        "groups": "1",
        "shift": "none",
        "samples-per-client": 1,
        "model": "networks:large",
        "local-epochs": 1,
        "batch-size": 1,
        "lr": 0.1,
        "sampling-rate": 1.0,
        "rounds": 1,
        "reseed-every": 0,
        "privacy-unit": unit,
        "evaluate": "off",
        "seed": 0,
        "registration-timeout": 600.0,
        **(private if unit == "client" else {}),
    }


def peak(chosen: argparse.Namespace, replies: int, parameters: int) -> dict[str, object]:
    """Return the peak memory and the time of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        values = settings(replies, chosen.unit)
        Task("", (1,), 10, 1, 1, 0.1, 1.0, 0.0, 1.0, 0, "cpu", [], values).write(folder, {})
        words = [sys.executable, str(SIMULATORS / "run_coterie.py"), str(folder), str(folder / "result.npz")]
        words += ["--engine", chosen.engine]
        words += [] if chosen.workers is None else ["--workers", str(chosen.workers)]
        variables = {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(SIMULATORS)]),
            "COTERIE_BENCHMARK_PARAMETERS": str(parameters),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        done = measure(words, variables, chosen.limit_s, least=1, limit_mb=chosen.limit_mb)
    result: dict[str, object] = {"replies": replies, "parameters": parameters, "peak_pss_mb": round(done.peak_pss_mb)}
    return result | ({"failed": done.skipped} if done.skipped else {"seconds": round(done.first, 1)})


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=11_000_000)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, help="worker processes; default: as `coterie run` chooses")
    parser.add_argument("--unit", choices=("none", "client"), default="client", help="of privacy")
    parser.add_argument("--limit-mb", type=float, default=6000.0)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    chosen = parser.parse_args()
    few = len(os.sched_getaffinity(0))
    small = peak(chosen, chosen.replies, 10)
    runs = {"small_model": small, "few_replies": peak(chosen, few, chosen.parameters)}
    runs["full"] = peak(chosen, chosen.replies, chosen.parameters)
    model = 4 * chosen.parameters / 2**20
    document: dict[str, object] = {"engine": chosen.engine, "unit": chosen.unit, "model_mb": round(model), **runs}
    base, most = float(str(small["peak_pss_mb"])), float(str(runs["full"]["peak_pss_mb"]))
    document["above_model_mb"] = round(most - base - model)
    document["growth_with_replies_mb"] = round(most - float(str(runs["few_replies"]["peak_pss_mb"])))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
