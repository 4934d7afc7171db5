"""The workloads: settings of Coterie, and the same as a task for every competitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from task import Task

from coterie.client.cohort import federation
from coterie.privacy import Streams
from coterie.server import RunConfig
from coterie.server.run import initial_models

FASHION = "fashion-mnist"
MADE_UP = "made_up:images"
_SHARED = {
    "strategy": "fedavg",
    "clusters": 1,
    "clients": 1000,
    "groups": "1",
    "shift": "none",
    "samples-per-client": 60,
    "local-epochs": 1,
    "batch-size": 20,
    "lr": 0.1,
    "sampling-rate": 0.1,
    "server-lr": 1.0,
    "reseed-every": 0,
    "privacy-unit": "client",
    "noise-multiplier": 0.5,
    "epsilon": 1000.0,
    "clip-norm": 1.0,
    "divisor": "fixed",
    "evaluate": "off",
}
_CNN = {**_SHARED, "model": "networks:cnn"}
_MLP = {**_SHARED, "model": "mlp-32", "features": "pool2"}
_GROUPS = {**_CNN, "groups": "4", "shift": "rotation", "local-epochs": 5}
_IFCA = {**_GROUPS, "strategy": "ifca", "clusters": 4}
_EVALUATION = {"evaluate": "diagnostic", "evaluate-every": 5}

#: Settings by workload and variant; variants are compared with each other in Coterie's own engines.
WORKLOADS: dict[str, dict[str, dict[str, Any]]] = {
    "cnn": {"": _CNN},
    "mlp": {"": _MLP},
    "ifca": {"fedavg": _GROUPS, "ifca": _IFCA},
    "demo": {"": {"evaluate": "off"}},
    "evaluation": {
        "off": _CNN,
        "every 5 rounds": {**_CNN, **_EVALUATION},
        "ifca, off": _IFCA,
        "ifca, every 5 rounds": {**_IFCA, **_EVALUATION},
    },
}

#: Workloads that other simulators run as well: one model, no clusters.
SHARED = ("cnn", "mlp")


def settings(
    workload: str, variant: str, rounds: int, seed: int, device: str, data_dir: str | None, clients: int | None
) -> dict[str, Any]:
    """Return the settings of a run; made-up images replace Fashion-MNIST without ``data_dir``."""
    values = {**WORKLOADS[workload][variant], "rounds": rounds, "seed": seed, "device": device}
    if workload == "demo":  # all its rounds belong to its privacy plan
        return {**values, "rounds": 80, "stop-after": rounds}
    if clients:
        values["clients"] = clients
    return {**values, "dataset": FASHION, "data-dir": data_dir} if data_dir else {**values, "dataset": MADE_UP}


def write(folder: Path, values: dict[str, Any]) -> Callable[[dict[str, np.ndarray]], float]:
    """Write the task of a configuration; return a function from models (k, ...) to their accuracy.

    The accuracy is the mean over the groups of clients, each with the model that is best for it.
    """
    config = RunConfig(values)
    data, streams = federation(config.for_clients()), Streams(config.seed)
    shards = [data.shard(client) for client in range(config.data.clients)]
    tests = {shard.group: shard.test for shard in shards}
    models, layout = initial_models(config, streams)
    first = {f"initial/{name}": value for name, value in layout.split(models[0]).items()}
    rounds = min(config.run.stop_after or config.run.rounds, config.run.rounds)
    shape, classes = config.examples
    plan, training = config.plan, config.training
    task = Task(
        model="networks:mlp" if training.model == "mlp-32" else training.model,
        shape=shape,
        classes=classes,
        epochs=training.local_epochs,
        batch_size=training.batch_size,
        lr=training.lr,
        clip=plan.clip_norm,
        noise=plan.noise_multiplier_updates * plan.clip_norm,
        scale=config.server_lr / (plan.sampling_rate * plan.clients),
        seed=int(config.seed or 0),
        device=training.device,
        cohorts=[plan.sample(streams.stream("cohort", t, 0), t).tolist() for t in range(1, rounds + 1)],
        settings=values,
    )
    sizes = {len(shard.y) for shard in shards}
    arrays = {}
    if len(sizes) == 1:  # the demo's clients differ in size, and run in Coterie alone
        arrays = {"x": np.stack([shard.x for shard in shards]), "y": np.stack([shard.y for shard in shards])}
    task.write(folder, {**first, **arrays})
    network = _renamed(task.build(), list(layout.names))
    return lambda found: _accuracy(network, found, tests)


def _renamed(network: torch.nn.Module, names: list[str]) -> torch.nn.Module:
    """Check that the task's network has the parameters of Coterie's, by name."""
    own = [name for name, _ in network.named_parameters()]
    if own != names:
        raise SystemExit(f"the task's network has the parameters {own}, Coterie's {names}")
    return network


@torch.no_grad()
def _accuracy(network: torch.nn.Module, models: dict[str, np.ndarray], tests: dict[int, Any]) -> float:
    best = []
    for test in tests.values():
        scores = []
        for j in range(len(next(iter(models.values())))):
            for name, parameter in network.named_parameters():
                parameter.copy_(torch.as_tensor(models[name][j]))
            hits = [
                network(torch.as_tensor(test.x[i : i + 500])).argmax(1).numpy() == test.y[i : i + 500]
                for i in range(0, len(test.y), 500)
            ]
            scores.append(np.concatenate(hits).mean())
        best.append(max(scores))
    return float(np.mean(best))
