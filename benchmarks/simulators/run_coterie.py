"""Coterie: ``python run_coterie.py FOLDER RESULT [--engine local|ray] [--workers N]``.

Uses the public interface only, so that an earlier version of Coterie runs it as well (PYTHONPATH), but for Ray.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from safetensors.numpy import load_file
from task import Task, report

from coterie.client.cohort import federation
from coterie.engine.in_process import SummingGrid
from coterie.engine.workers import workers_for
from coterie.server import RunConfig, RunFolder, run


def source() -> Any:
    """The training data of a task as a data set of Coterie, in the order of its clients."""
    from coterie.datasets import Source

    task, arrays = Task.read(Path(os.environ["COTERIE_BENCHMARK_TASK"]))
    test = arrays["test_x"], arrays["test_y"]
    return Source("benchmark", arrays["train_x"], arrays["train_y"], *test, task.classes)


def main() -> None:
    """Train all rounds, and write the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, help="worker processes; default: as `coterie run` chooses")
    chosen = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    task, _ = Task.read(chosen.folder)
    config = RunConfig(task.settings)
    federation(config.for_clients())  # as `coterie run` does
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        with closing(RunFolder.create(Path(folder) / "run", config)) as made:
            made.on_metrics = lambda record: report(record.round)
            if chosen.engine == "ray":
                from coterie.engine.ray import ray_workers
                from coterie.engine.ray_workers import RayGrid

                with ray_workers() as actors:
                    run(made, RayGrid(config.data.clients, actors))
            else:
                cores = len(os.sched_getaffinity(0))
                workers = workers_for(config.trainings, config.training.device, cores)
                grid = SummingGrid(config.data.clients, workers if chosen.workers is None else chosen.workers)
                try:
                    run(made, grid)
                finally:
                    grid.close()
        models = [load_file(file) for file in sorted(Path(folder).glob("run/models/*.safetensors"))]
    found: dict[str, Any] = {name: np.stack([model[name] for model in models]) for name in models[0]}
    np.savez(chosen.result, **found)


if __name__ == "__main__":
    main()
