"""Non-private reference: one centrally trained model per group, and the fairness gap of private training.

RC-DPFL (section 5.1) compares the accuracy and the training loss of every client's model with those of theta*, which is
trained by SGD on the data of all clients of its true group; F_acc and F_loss are the largest differences between two
clients. The models depend only on data and hyper-parameters, so they are trained once and cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie import models as networks
from coterie.client.backend import train
from coterie.client.cohort import federation
from coterie.client.scores import accuracies, losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.files import write_atomic
from coterie.server import RunConfig
from coterie.server.metrics import unfairness
from coterie.wire.messages import Layout

# Settings that determine the reference models, besides the seed.
_DATA = (
    "dataset",
    "features",
    "model",
    "shift",
    "clients",
    "groups",
    "label-skew",
    "validation-clients",
    "samples-per-client",
)


def compare(
    result: Mapping[str, Any], config: RunConfig, settings: Mapping[str, Any], folder: Path
) -> dict[str, float | None]:
    """Return ``f_acc`` and ``f_loss`` of a run; None if its clients were not evaluated.

    Args:
        result: contents of its diagnostics.json.
        config: configuration of the run.
        settings: ``epochs``, ``lr`` and ``batch-size`` of the reference models.
        folder: cache folder of the models.
    """
    accuracy, loss = result.get("client_accuracy"), result.get("client_loss")
    if accuracy is None or loss is None or len(accuracy) != config.data.clients:
        return {"f_acc": None, "f_loss": None}
    best = _reference(config, settings, folder)
    return {"f_acc": unfairness(accuracy, best["accuracy"]), "f_loss": unfairness(loss, best["loss"])}


def _reference(config: RunConfig, settings: Mapping[str, Any], folder: Path) -> dict[str, list[float]]:
    """Return accuracy and training loss of the group's reference model on the data of every client."""
    described = {**{key: config[key] for key in _DATA}, "seed": config.partition_seed, **settings}
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{key}.json"
    if path.exists():
        reference: dict[str, list[float]] = json.loads(path.read_text())
        return reference
    data = federation(config.for_clients())
    network = networks.build(config.training.network, data.input_shape, data.task.num_outputs)
    first = networks.initialise(config.training.network, data.input_shape, data.task.num_outputs, 0)
    layout = Layout.of(first)
    device = "cpu" if config.training.device == "auto" else config.training.device
    hyper = LocalTrainingConfig(settings["epochs"], settings["batch-size"], settings["lr"], device, task=data.task)
    accuracy, loss = np.zeros(config.data.clients), np.zeros(config.data.clients)
    for group in range(data.num_groups):
        members = np.flatnonzero(data.group_of == group)
        shards = [data.shard(int(client)) for client in members]
        x, y = (np.concatenate([getattr(shard, field) for shard in shards]) for field in "xy")
        start = layout.flatten(first)[None]
        rng = np.random.default_rng([config.partition_seed, group])
        everybody = Shard(-1, group, x, y, shards[0].test)
        model = start + train(network, layout, start, [everybody], [rng], hyper, batched=False)
        accuracy[members] = [
            accuracies(network, layout, model, shard.test.x, shard.test.y, device, data.task)[0] for shard in shards
        ]
        loss[members] = losses(network, layout, model, shards, device, data.task)[:, 0]
    reference = {"accuracy": accuracy.tolist(), "loss": loss.tolist()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(reference).encode())
    return reference
