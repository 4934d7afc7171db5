"""Compares simulators on the same data, in the same order, with the same steps: seconds, CPU, memory, accuracy.

    python benchmarks/speed.py [--workload cnn|mlp|ifca|demo|evaluation|cohort] [--repeat 3] [--rounds 6]
        [--workers 1 2] [--engine local|ray] [--python-pfl PATH] [--against CHECKOUT] [--device cpu|cuda]

Each repeat runs every competitor once, in turn, each in processes of its own; a round's seconds are the time between
two of its reports, without the first round. Prints one JSON document; benchmarks/README.md explains it.
``cohort`` compares batched and sequential training of one cohort; see benchmarks/simulators/cohort.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "simulators"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import cohort
import numpy as np
import workloads
from measure import Measured, measure

HERE = Path(__file__).resolve().parent
SIMULATORS = HERE / "simulators"
# Seconds after which a competitor is ended.
_LIMIT = 1800.0


def competitors(chosen: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return command and environment of each competitor, without the folder and the result."""
    paths = [str(HERE.parent), str(SIMULATORS)]
    ours = {"PYTHONPATH": os.pathsep.join(paths)}
    coterie = [sys.executable, str(SIMULATORS / "run_coterie.py")]
    found = {"coterie": (coterie, ours)}
    for workers in chosen.workers:
        found[f"coterie, {workers} workers" if workers else "coterie, in process"] = (
            [*coterie, "--workers", str(workers)],
            ours,
        )
    if chosen.engine == "ray":
        found["coterie, Ray"] = ([*coterie, "--engine", "ray"], ours)
    for checkout in chosen.against:
        before = {"PYTHONPATH": os.pathsep.join([str(Path(checkout).resolve()), str(SIMULATORS)])}
        found[f"coterie at {_commit(checkout)}"] = (coterie, before)
    if chosen.workload not in workloads.SHARED:
        return found
    plain = [sys.executable, str(SIMULATORS / "run_plain.py")]
    found["plain loop"] = (plain, ours)
    two = ["--processes", "2"]
    found["plain loop, 2 processes"] = ([*plain, *two], ours)
    pfl = [chosen.python_pfl, str(SIMULATORS / "run_pfl.py")]
    found["pfl"], found["pfl, 2 processes"] = (pfl, ours), ([*pfl, *two], ours)
    if chosen.workload == "cnn":
        found["plain loop, 2 processes, channels last"] = ([*plain, *two, "--channels-last"], ours)
        found["pfl, 2 processes, channels last"] = ([*pfl, *two, "--channels-last"], ours)
    found["fluke"] = ([chosen.python_fluke, str(SIMULATORS / "run_fluke.py")], ours)
    return found


def compare(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run everything, and return the document."""
    variants = workloads.WORKLOADS[chosen.workload]
    runs: dict[str, list[Measured]] = {}
    accuracies: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(chosen.repeat):
            seed = chosen.seed + repeat
            for variant in variants:
                folder = Path(scratch) / f"{repeat}-{variant}"
                folder.mkdir()
                settings = workloads.settings(
                    chosen.workload, variant, chosen.rounds, seed, chosen.device, chosen.data_dir, chosen.clients
                )
                accuracy = workloads.write(folder, settings)
                for name, (command, variables) in competitors(chosen).items():
                    label = f"{name}: {variant}" if variant else name
                    if chosen.only and not any(word in label for word in chosen.only):
                        continue
                    if runs.get(label) and runs[label][-1].skipped:
                        continue
                    result = folder / "result.npz"
                    done = measure([*command, str(folder), str(result)], variables, _LIMIT)
                    runs.setdefault(label, []).append(done)
                    if done.skipped:
                        print(f"{label}: skipped: {done.skipped}", file=sys.stderr)
                        continue
                    with np.load(result) as models:
                        accuracies.setdefault(label, []).append(accuracy(dict(models)))
                    result.unlink()
                    seconds = statistics.median(done.seconds)
                    print(f"repeat {repeat + 1}, {label}: {seconds:.3f} s a round", file=sys.stderr)
    return _document(chosen, runs, accuracies)


def _document(
    chosen: argparse.Namespace, runs: dict[str, list[Measured]], accuracies: dict[str, list[float]]
) -> dict[str, Any]:
    rows = {label: _row(done, accuracies.get(label, [])) for label, done in runs.items()}
    seconds = {label: row["seconds_per_round"] for label, row in rows.items() if "seconds_per_round" in row}
    return {
        "workload": chosen.workload,
        "settings": workloads.WORKLOADS[chosen.workload],
        "data": "Fashion-MNIST" if chosen.data_dir else "made-up images of the same shape",
        "rounds": chosen.rounds,
        "seeds": list(range(chosen.seed, chosen.seed + chosen.repeat)),
        "competitors": rows,
        "ratios": {a: {b: round(seconds[a] / seconds[b], 3) for b in seconds if b != a} for a in seconds},
        "machine": {
            "device": _device(chosen.device),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
            "commit": _commit(HERE.parent),
        },
        "versions": _versions(chosen),
    }


def _row(done: Sequence[Measured], accuracies: Sequence[float]) -> dict[str, Any]:
    if done[-1].skipped:
        return {"skipped": done[-1].skipped}
    each = [statistics.median(run.seconds) for run in done]
    return {
        "seconds_per_round": statistics.median(each),
        "seconds_per_round_mean": statistics.mean(second for run in done for second in run.seconds),
        "seconds_per_round_of_each_repeat": each,
        "seconds_of_rounds": [[round(second, 4) for second in run.seconds] for run in done],
        "seconds_to_first_round": statistics.median(run.first for run in done),
        "cpu_seconds_per_round": statistics.median(run.cpu_seconds for run in done),
        "peak_pss_mb": max(run.peak_pss_mb for run in done),
        "accuracies": accuracies,
    }


def _device(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def _commit(folder: str | Path) -> str:
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def _versions(chosen: argparse.Namespace) -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "flwr", "numpy")}
    for name, python in (("pfl", chosen.python_pfl), ("fluke-fl", chosen.python_fluke)):
        query = f"import importlib.metadata as m; print(m.version({name!r}))"
        answer = subprocess.run([python, "-c", query], capture_output=True, text=True)
        found[name] = answer.stdout.strip() if answer.returncode == 0 else "not installed"
    return found


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*workloads.WORKLOADS, "cohort"], default="cnn")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of each run; the first is not measured")
    parser.add_argument("--clients", type=int, help="other number of clients, of which a tenth trains in a round")
    parser.add_argument("--workers", type=int, nargs="*", default=[0], help="numbers of workers to compare as well")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: that engine as well")
    parser.add_argument("--against", nargs="*", default=[], help="checkouts of other versions of Coterie")
    parser.add_argument("--only", nargs="*", default=[], help="competitors whose name contains one of these words")
    parser.add_argument("--python-pfl", default=sys.executable, help="interpreter that has pfl")
    parser.add_argument("--python-fluke", default=sys.executable, help="interpreter that has fluke")
    parser.add_argument("--data-dir", default=os.environ.get("COTERIE_DATA"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    cohort.add_arguments(parser)
    chosen = parser.parse_args()
    document = cohort.compare(chosen) if chosen.workload == "cohort" else compare(chosen)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
