"""The verbs of a client, each over many clients at once; the ClientApp and the local engine call the same ones.

A verb takes the content of a message and the clients that received it, and returns their replies in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import nn

from coterie import models as networks
from coterie.client.training import Hyper, accuracies, losses, train
from coterie.datasets import Federation, federate
from coterie.messages import (
    CONFIG,
    DIAGNOSTICS,
    EVALUATE,
    IDENTITY,
    MODELS,
    REPLY,
    TRAIN,
    UPDATE,
    Layout,
    pack_update,
    unpack_models,
)


@dataclass(frozen=True)
class Client:
    """One client: our own id for it, and what it keeps between rounds."""

    client_id: int
    state: RecordDict = field(default_factory=RecordDict)


@dataclass(frozen=True)
class Task:
    """What a message's configuration asks a client to work on."""

    federation: Federation
    network: nn.Module
    batched: bool
    hyper: Hyper
    round: int
    seed: int | None
    redraw: tuple[float, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Task:
        """Read a ConfigRecord; data and network are built once per process."""
        data = federation(config)
        device = _device(config["device"])
        return cls(
            federation=data,
            network=_network(config["model"], data.input_shape, data.num_classes),
            batched=device != "cpu" or _is_batched(config["model"]),
            hyper=Hyper(config["local-epochs"], config["batch-size"], config["lr"], device),
            round=config["round"],
            seed=config.get("seed"),
            redraw=tuple(config.get("redraw", ())),
        )

    def rng(self, client_id: int) -> np.random.Generator:
        """The client's own randomness in this round, independent of everyone else's."""
        return np.random.default_rng(None if self.seed is None else [self.seed, self.round, client_id])


def federation(config: Mapping[str, Any]) -> Federation:
    """The clients' data that a configuration describes, kept between calls.

    Raises:
        DataError: the data cannot be had.
    """
    return federate(
        config["dataset"],
        clients=config["clients"],
        groups=str(config["groups"]),
        shift=config["shift"],
        samples_per_client=config["samples-per-client"],
        seed=config["partition-seed"],
        data_dir=config["data-dir"] or None,
        transform=networks.features(config["features"]),
    )


def _is_batched(model: str) -> bool:
    return model in networks.MODELS and networks.MODELS[model].batched


@lru_cache(maxsize=4)
def _network(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return networks.build(name, input_shape, num_classes)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def identity(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Who is there."""
    return [RecordDict({REPLY: ConfigRecord({"client-id": client.client_id})}) for client in clients]


def _train(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Choose the model with the least training loss, redraw the label if asked to, train, reply (IFCA, lines 5-8).

    The redraw row comes with the models and depends on released values alone (privacy/mechanisms/rebalancing.py).
    """
    task = Task.of(content[CONFIG])
    models, layout = unpack_models(content[MODELS])
    shards = [task.federation.shard(client.client_id) for client in clients]
    rngs = [task.rng(client.client_id) for client in clients]
    labels = _choose(task, models, layout, shards)
    redrawn = labels
    if task.redraw:
        matrix = np.reshape(task.redraw, (len(models), len(models)))
        redrawn = np.array([rng.choice(len(models), p=matrix[c]) for rng, c in zip(rngs, labels, strict=True)])
    updates = train(task.network, layout, models[labels], shards, rngs, task.hyper, batched=task.batched)
    return [
        RecordDict(
            {
                UPDATE: pack_update(update, layout),
                REPLY: ConfigRecord(
                    {"client-id": client.client_id, "round": task.round, "label": int(label), "redrawn-label": int(new)}
                ),
            }
        )
        for client, label, new, update in zip(clients, labels, redrawn, updates, strict=True)
    ]


def evaluate(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Accuracy on held-out data of the model that each client chooses on its training data."""
    task = Task.of(content[CONFIG])
    models, layout = unpack_models(content[MODELS])
    shards = [task.federation.shard(client.client_id) for client in clients]
    labels = _choose(task, models, layout, shards)
    tests = {id(shard.test): shard.test for shard in shards}  # shared by the clients of a group
    hits = {
        key: accuracies(task.network, layout, models, test.x, test.y, task.hyper.device) for key, test in tests.items()
    }
    return [
        RecordDict(
            {
                DIAGNOSTICS: MetricRecord(
                    {
                        "accuracy": float(hits[id(shard.test)][label]),
                        "cluster": int(label),
                        "group": shard.group,
                        "num-examples": len(shard.test.y),
                    }
                )
            }
        )
        for shard, label in zip(shards, labels, strict=True)
    ]


def _choose(task: Task, models: Any, layout: Layout, shards: Sequence[Any]) -> Any:
    """(n,) label of the model with the least loss on each client's training data."""
    if len(models) == 1:
        return np.zeros(len(shards), np.int64)
    return losses(task.network, layout, models, shards, task.hyper.device).argmin(axis=1)


Verb = Callable[[RecordDict, Sequence[Client]], list[RecordDict]]

#: Every verb by its Flower message type.
VERBS: dict[str, Verb] = {TRAIN: _train, EVALUATE: evaluate, IDENTITY: identity}
