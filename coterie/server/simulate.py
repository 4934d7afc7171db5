"""Simulate a run with its clients on this machine or on a Ray cluster.

No engine knows of runs, and a deployed server needs no engine: both are imported where a simulation starts.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from coterie.fields.settings import ConfigError
from coterie.server.config import RunConfig
from coterie.server.data_origin import DataOrigin, require_data
from coterie.server.folder import RunFolder
from coterie.server.run import execute

if TYPE_CHECKING:
    from coterie.engine.workers import Pool
    from coterie.results import Outcome


def prepare(config: RunConfig, engine: str = "local", cores: int | None = None) -> DataOrigin:
    """Check engine, data and device before the run starts; clients then use the loaded data.

    Args:
        config: of the run.
        engine: "local" or "ray".
        cores: as for :func:`simulate`.

    Returns:
        the checked data.

    Raises:
        ConfigError: a setting does not suit the engine or this machine.
        DataError: the data cannot be loaded.
    """
    from coterie.datasets import OWN_DATA, DataError
    from coterie.engine.workers import start_server, workers_for

    if engine != "ray" and workers_for(config.trainings, config.training.device, cores or _cores()):
        start_server()  # it imports PyTorch while this process does
    from coterie.client.cohort import federation

    data = federation(config.for_clients())
    if config.data.dataset == OWN_DATA:
        sizes = [len(data.shard(client).y) for client in range(data.clients)]
        if not any(sizes):
            raise DataError(f"none of the {data.clients} clients has training records; the log gives the reasons")
    if config.training.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': PyTorch finds no GPU on this machine; use auto or cpu")
    return DataOrigin.of(config)


def simulate(folder: RunFolder, engine: str = "local", cores: int | None = None, client_cpus: int = 1) -> Outcome:
    """Run with simulated clients.

    Args:
        folder: the open folder of the run, which stays open.
        engine: "local" or "ray".
        cores: cores of this machine for clients of the local engine; None: all.
        client_cpus: CPU cores that Ray reserves for a client.

    Raises:
        RunError: see :func:`coterie.server.run`.
        EngineError: the Ray engine cannot be used.
    """
    from coterie.client.cohort import torch_device
    from coterie.engine.in_process import LocalGrid, MaskedGrid, SummingGrid
    from coterie.engine.ray import ray_workers
    from coterie.engine.workers import workers_for
    from coterie.server.simulated_scores import with_client_scores

    config = folder.config
    opened: AbstractContextManager[int | Pool]
    if engine == "ray":
        opened = ray_workers(client_cpus, folder.path)
    else:
        opened = nullcontext(workers_for(config.trainings, torch_device(config.training.device), cores or _cores()))
    gc.freeze()  # collecting the garbage of all imported libraries would take as long as some rounds
    check = partial(require_data, config)
    with opened as workers:
        grid: LocalGrid
        if config.privacy.masks:
            grid = MaskedGrid(config.data.clients, workers, folder.report_progress)
        elif isinstance(workers, int):
            grid = SummingGrid(config.data.clients, workers, folder.report_progress, check)
        else:
            from coterie.engine.ray_workers import RayGrid

            grid = RayGrid(config.data.clients, workers, check=check)
        try:
            return execute(folder, grid, partial(with_client_scores, config, folder.path / "clients"))
        finally:
            grid.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0))
