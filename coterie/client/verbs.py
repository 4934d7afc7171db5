"""The verbs of a client, each over many clients at once; the ClientApp and the local engine call the same ones.

A verb takes the content of a message and the clients that received it, and returns their replies in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import nn

from coterie import models as networks
from coterie.client.layers import Additive, Layers, Vectors
from coterie.client.memory import Memory
from coterie.client.training import Hyper, accuracies, losses, train
from coterie.datasets import Federation, Shard, TestSet, federate
from coterie.messages import (
    CONFIG,
    DIAGNOSTICS,
    EVALUATE,
    IDENTITY,
    MODELS,
    REPLY,
    TRAIN,
    UPDATE,
    pack_update,
    unpack_models,
)
from coterie.privacy import clip_rows

_LABEL, _OWN = "label", "own"
# Test examples on which a client with layers of its own is evaluated: nobody shares its network.
_MOST_OWN_TESTS = 500

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        client_id: our own id for it.
        folder: of what it keeps; empty: it has none; None: it is simulated, and takes the one that a message names.
    """

    client_id: int
    folder: str | None = None


@dataclass(frozen=True)
class Task:
    """What a message's configuration asks a client to work on.

    Attributes:
        federation: everybody's data; a deployed client's holds its own alone.
        network: with parameters that nobody uses.
        batched: train all clients at once.
        hyper: of local training.
        round: number of the round.
        seed: of a reproducible run.
        redraw: (k * k,) matrix by which labels are redrawn; empty: they are not.
        follow: train the redrawn cluster's model ("assigned") in place of the chosen one's ("own").
        assign: who chooses the label: the least "loss", or FeSEM's "nearest" centre.
        clip: FeSEM's bound on the distance that a client's model may move; inf without privacy.
        folder: where a simulated client keeps what it keeps.
        initial_own: (D - d,) what a client's own layers are at first.
    """

    federation: Federation
    network: nn.Module
    batched: bool
    hyper: Hyper
    round: int
    seed: int | None
    redraw: tuple[float, ...]
    follow: str
    assign: str
    clip: float
    folder: str | None
    initial_own: Callable[[Layers], Vectors]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Task:
        """Read a ConfigRecord; data and network are built once per process."""
        data = federation(config)
        device = _device(config["device"])
        described = (config["model"], data.input_shape, data.num_classes)
        return cls(
            federation=data,
            network=_network(*described, bool(config.get("additive", False))),
            batched=device != "cpu" or _is_batched(config["model"]),
            hyper=Hyper(
                config["local-epochs"], config["batch-size"], config["lr"], device, config.get("proximal-mu", 0.0)
            ),
            round=config["round"],
            seed=config.get("seed"),
            redraw=tuple(config.get("redraw", ())),
            follow=config.get("rebalance-train", "own"),
            assign=config.get("assign", "loss"),
            clip=config.get("clip", np.inf),
            folder=config.get("clients-dir"),
            initial_own=lambda layers: _initial_own(layers, *described),
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
        dirichlet_alpha=config["dirichlet-alpha"],
        validation=config["validation-clients"],
    )


def _is_batched(model: str) -> bool:
    return model in networks.MODELS and networks.MODELS[model].batched


@lru_cache(maxsize=4)
def _network(name: str, input_shape: tuple[int, ...], num_classes: int, additive: bool) -> nn.Module:
    if additive:
        return Additive(*(networks.build(name, input_shape, num_classes) for _ in range(2)))
    return networks.build(name, input_shape, num_classes)


@lru_cache(maxsize=4)
def _initial_own(layers: Layers, name: str, input_shape: tuple[int, ...], num_classes: int) -> Vectors:
    """(D - d,) what a client's own layers are at first: the same for all, and known to all."""
    return layers.own.flatten(networks.initialise(name, input_shape, num_classes, 0))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


@dataclass(frozen=True)
class _Cohort:
    """The clients that one message reached, and what it brought them."""

    task: Task
    models: Vectors
    layers: Layers
    clients: Sequence[Client]
    shards: Sequence[Shard]

    @classmethod
    def of(cls, content: RecordDict, clients: Sequence[Client]) -> _Cohort:
        task = Task.of(content[CONFIG])
        models, layout = unpack_models(content[MODELS])
        shards = [task.federation.shard(client.client_id) for client in clients]
        return cls(task, models, Layers.of(task.network, layout), clients, shards)

    @property
    def remembers(self) -> bool:
        return bool(self.layers.own.names) or self.task.assign == "nearest"

    @cached_property
    def memories(self) -> list[Memory]:
        folders = [self.task.folder if client.folder is None else client.folder for client in self.clients]
        return [
            Memory(Path(folder) if folder else None, client.client_id)
            for client, folder in zip(self.clients, folders, strict=True)
        ]

    @cached_property
    def kept(self) -> list[dict[str, np.ndarray]]:
        """What each client remembers; nothing where the method asks for none."""
        return [memory.read() for memory in self.memories] if self.remembers else [{} for _ in self.clients]

    @property
    def own(self) -> Vectors:
        """(n, D - d) every client's own layers."""
        if not self.layers.own.names:
            return np.zeros((len(self.clients), 0), np.float32)
        initial = self.task.initial_own(self.layers)
        return np.stack([kept.get(_OWN, initial) for kept in self.kept])

    def choose(self) -> Labels:
        """(n,) label of the model with the least loss on each client's training data."""
        if len(self.models) == 1:
            return np.zeros(len(self.clients), np.int64)
        device = self.task.hyper.device
        return losses(self.task.network, self.layers.whole, self.models, self.shards, device).argmin(axis=1)

    def last_labels(self, otherwise: Labels) -> Labels:
        """(n,) label that each client was assigned to last; at first that of ``otherwise``."""
        known = [int(kept[_LABEL][0]) if _LABEL in kept else -1 for kept in self.kept]
        return np.where((0 <= np.array(known)) & (np.array(known) < len(self.models)), known, otherwise)


def identity(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Who is there."""
    return [RecordDict({REPLY: ConfigRecord({"client-id": client.client_id})}) for client in clients]


def _train(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Choose a model, redraw the label if asked to, train, remember, reply.

    The redraw row comes with the models and depends on released values alone (privacy/mechanisms/rebalancing.py).
    """
    cohort = _Cohort.of(content, clients)
    task, models, layers = cohort.task, cohort.models, cohort.layers
    rngs = [task.rng(client.client_id) for client in clients]
    if task.assign == "nearest":
        labels = cohort.last_labels(otherwise=np.array([rng.integers(len(models)) for rng in rngs]))
    else:
        labels = cohort.choose()
        redrawn = _redraw(task, labels, len(models), rngs)
    trained = redrawn if task.follow == "assigned" else labels
    start = layers.join(models[trained], cohort.own)
    moved = train(task.network, layers.whole, start, cohort.shards, rngs, task.hyper, batched=task.batched)
    updates, own = layers.part(start + moved) if layers.own.names else (moved, cohort.own)
    if layers.own.names:
        updates = updates - models[trained]
    if task.assign == "nearest":
        labels, updates = _assign(models, labels, updates, task.clip)
        redrawn = _redraw(task, labels, len(models), rngs)
    if cohort.remembers:
        for memory, label, values in zip(cohort.memories, labels, own, strict=True):
            memory.write({_LABEL: np.array([label]), _OWN: values})
    return [
        RecordDict(
            {
                UPDATE: pack_update(update, layers.sent),
                REPLY: ConfigRecord(
                    {"client-id": client.client_id, "round": task.round, "label": int(label), "redrawn-label": int(new)}
                ),
            }
        )
        for client, label, new, update in zip(clients, labels, redrawn, updates, strict=True)
    ]


def _redraw(task: Task, labels: Labels, num_clusters: int, rngs: Sequence[np.random.Generator]) -> Labels:
    if not task.redraw:
        return labels
    matrix = np.reshape(task.redraw, (num_clusters, num_clusters))
    return np.array([rng.choice(num_clusters, p=matrix[c]) for rng, c in zip(rngs, labels, strict=True)])


def _assign(models: Vectors, labels: Labels, updates: Vectors, clip: float) -> tuple[Labels, Vectors]:
    """FeSEM's E-step: the centre nearest to each client's own model, and the way from that centre to the model.

    That way is no longer than the clipped update: the model is as near to its start, which is a centre too.
    """
    updates = clip_rows(updates, clip).astype(np.float32)
    start = models[labels]  # the client's model is start + update: all is taken from there, where it is small
    apart = np.stack([((start + updates - model) ** 2).sum(axis=1) for model in models], axis=1)  # (n, k)
    stays = apart[np.arange(len(labels)), labels] <= apart.min(axis=1)
    new = np.where(stays, labels, apart.argmin(axis=1))
    return new, updates + (start - models[new])


def evaluate(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Accuracy on held-out data of the model that each client chooses on its training data, or was assigned."""
    cohort = _Cohort.of(content, clients)
    task, network, device = cohort.task, cohort.task.network, cohort.task.hyper.device
    labels = cohort.choose()
    if task.assign == "nearest":
        labels = cohort.last_labels(otherwise=labels)
    if cohort.layers.own.names:
        whole = cohort.layers.join(cohort.models[labels], cohort.own)
        tests = [_part(shard.test, client.client_id) for shard, client in zip(cohort.shards, clients, strict=True)]
        scores = [
            float(accuracies(network, cohort.layers.whole, vector[None], x, y, device)[0])
            for vector, (x, y) in zip(whole, tests, strict=True)
        ]
        sizes = [len(y) for _, y in tests]
    else:
        shared = {id(shard.test): shard.test for shard in cohort.shards}  # a group's clients have one test set
        hits = {
            key: accuracies(network, cohort.layers.whole, cohort.models, test.x, test.y, device)
            for key, test in shared.items()
        }
        scores = [float(hits[id(shard.test)][label]) for shard, label in zip(cohort.shards, labels, strict=True)]
        sizes = [len(shard.test.y) for shard in cohort.shards]
    return [
        RecordDict(
            {
                DIAGNOSTICS: MetricRecord(
                    {"accuracy": score, "cluster": int(label), "group": shard.group, "num-examples": size}
                )
            }
        )
        for shard, label, score, size in zip(cohort.shards, labels, scores, sizes, strict=True)
    ]


def _part(test: TestSet, client_id: int) -> tuple[Any, Any]:
    """Test examples of a client whose network nobody shares: a part of its own, where its group has many."""
    stride = -(-len(test.y) // _MOST_OWN_TESTS)
    return test.x[client_id % stride :: stride], test.y[client_id % stride :: stride]


Verb = Callable[[RecordDict, Sequence[Client]], list[RecordDict]]

#: Every verb by its Flower message type.
VERBS: dict[str, Verb] = {TRAIN: _train, EVALUATE: evaluate, IDENTITY: identity}
