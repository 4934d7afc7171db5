"""The verbs of a client, each over many clients at once; the ClientApp and the local engine call the same ones.

A verb takes the content of a message and the clients that received it, and returns their replies in order, or the error
of a client that gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from coterie.client import points
from coterie.client.identity import Client, introduction
from coterie.client.layers import Vectors
from coterie.client.memory import ClientError
from coterie.client.records import tell_losses, train_privately
from coterie.client.task import LAST_LABEL, OWN, Cohort, Labels, Task
from coterie.client.training import accuracies, losses, train
from coterie.datasets import TestSet
from coterie.messages import (
    CENTROIDS,
    DIAGNOSTICS,
    EVALUATE,
    GAN,
    IDENTITY,
    LABEL,
    LOSSES,
    REPLY,
    TRAIN,
    UPDATE,
    Layout,
    losses_layout,
    pack_update,
)
from coterie.privacy import clip_rows

# Test examples on which a client with personal layers is evaluated: its network is not shared.
_MOST_OWN_TESTS = 500
# Loss that is reported for a model that diverged: messages hold finite numbers only.
_MOST_LOSS = 1e6

_UNPAID_SCORES = (
    "this client has a budget of its own, and evaluation is outside it: it refuses (set evaluate = off, or "
    "diagnostics = true in its node configuration)"
)

Answer: TypeAlias = RecordDict | ClientError


def identity(content: RecordDict, clients: Sequence[Client]) -> list[RecordDict]:
    """Client ids, and whether clients replay their replies."""
    return [introduction(client) for client in clients]


def _train(content: RecordDict, clients: Sequence[Client]) -> list[Answer]:
    """Choose a model, redraw the label if requested, train, store state, reply.

    The redraw matrix comes with the models and depends on released values alone (privacy/mechanisms/rr_cluster.py).
    """
    cohort = Cohort.of(TRAIN, content, clients)
    refusals: Sequence[ClientError | None] = [None] * len(clients)
    if cohort.unpaid:
        return list(cohort.unpaid)
    if cohort.task.plans:
        chosen, updates, refusals = train_privately(cohort)
        labels = redrawn = cohort.labels(chosen)
    else:
        labels, redrawn, updates = _train_exactly(cohort)
    answers = zip(clients, labels, redrawn, updates, refusals, strict=True)
    return [refusal or _reply(cohort, *answer, cohort.layers.sent) for *answer, refusal in answers]


def _reply(cohort: Cohort, client: Client, label: int, redrawn: int, values: Vectors, layout: Layout) -> RecordDict:
    said = {"client-id": client.client_id, "round": cohort.task.round, "label": int(label)}
    return RecordDict(
        {UPDATE: pack_update(values, layout), REPLY: ConfigRecord({**said, "redrawn-label": int(redrawn)})}
    )


def _losses(content: RecordDict, clients: Sequence[Client]) -> list[Answer]:
    """Mean loss of every received model on the client's training data (LCFL)."""
    cohort = Cohort.of(LOSSES, content, clients)
    refusals: Sequence[ClientError | None] = [None] * len(clients)
    if cohort.unpaid:
        return list(cohort.unpaid)
    if cohort.task.plans:
        told, refusals = tell_losses(cohort)
    else:
        told = np.minimum(cohort.losses, _MOST_LOSS)
    layout = losses_layout(len(cohort.models))
    return [
        refusal or _reply(cohort, client, 0, 0, row, layout)
        for client, row, refusal in zip(clients, told.astype(np.float32), refusals, strict=True)
    ]


def _train_exactly(cohort: Cohort) -> tuple[Labels, Labels, Vectors]:
    """Labels, redrawn labels and updates, without noise at the client."""
    task, models, layers = cohort.task, cohort.models, cohort.layers
    rngs = [task.rng(client.client_id) for client in cohort.clients]
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
            memory.write({LAST_LABEL: np.array([label]), OWN: values})
    return cohort.labels(labels), cohort.labels(redrawn), updates


def _redraw(task: Task, labels: Labels, num_clusters: int, rngs: Sequence[np.random.Generator]) -> Labels:
    if not task.redraw:
        return labels
    matrix = np.reshape(task.redraw, (num_clusters, num_clusters))
    return np.array([rng.choice(num_clusters, p=matrix[c]) for rng, c in zip(rngs, labels, strict=True)])


def _assign(models: Vectors, labels: Labels, updates: Vectors, clip: float) -> tuple[Labels, Vectors]:
    """FeSEM's E-step: the centre nearest to each client's model, and the difference from that centre to the model.

    The difference is no longer than the clipped update: the start of the model is a centre, too.
    """
    updates = clip_rows(updates, clip).astype(np.float32)
    start = models[labels]  # distances relative to the start are small, so that float32 suffices
    apart = np.stack([((start + updates - model) ** 2).sum(axis=1) for model in models], axis=1)  # (n, k)
    stays = apart[np.arange(len(labels)), labels] <= apart.min(axis=1)
    new = np.where(stays, labels, apart.argmin(axis=1))
    return new, updates + (start - models[new])


def evaluate(content: RecordDict, clients: Sequence[Client]) -> list[Answer]:
    """Accuracy on held-out data of each client's model: chosen on its training data, or assigned."""
    if any(client.budget and not client.diagnostics for client in clients):
        return [ClientError(_UNPAID_SCORES)] * len(clients)
    cohort = Cohort.of(EVALUATE, content, clients)
    task, network, device = cohort.task, cohort.task.network, cohort.task.hyper.device
    labels = cohort.choose()
    if task.assign == "nearest":
        labels = cohort.last_labels(otherwise=labels)
    if cohort.layers.own.names:
        whole = cohort.layers.join(cohort.models[labels], cohort.own)
        training_losses = np.array(
            [
                losses(network, cohort.layers.whole, vector[None], [shard], device)[0, 0]
                for vector, shard in zip(whole, cohort.shards, strict=True)
            ]
        )
        tests = [_part(shard.test, client.client_id) for shard, client in zip(cohort.shards, clients, strict=True)]
        scores = [
            float(accuracies(network, cohort.layers.whole, vector[None], x, y, device)[0])
            for vector, (x, y) in zip(whole, tests, strict=True)
        ]
        sizes = [len(y) for _, y in tests]
    else:
        shared = {id(shard.test): shard.test for shard in cohort.shards}  # a group's clients have one test set
        training_losses = cohort.losses[np.arange(len(labels)), labels]
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
                    {
                        "client-id": client.client_id,
                        "accuracy": score,
                        "loss": float(loss),
                        "cluster": int(label),
                        "group": shard.group,
                        "num-examples": size,
                    }
                )
            }
        )
        for client, shard, label, score, loss, size in zip(
            clients, cohort.shards, cohort.labels(labels), scores, training_losses, sizes, strict=True
        )
    ]


def _part(test: TestSet, client_id: int) -> tuple[Any, Any]:
    """Test examples of a client with personal layers: a part of its own, where its group has many."""
    stride = -(-len(test.y) // _MOST_OWN_TESTS)
    return test.x[client_id % stride :: stride], test.y[client_id % stride :: stride]


Verb = Callable[[RecordDict, Sequence[Client]], Sequence[Answer]]

#: Every verb by its Flower message type.
VERBS: dict[str, Verb] = {
    TRAIN: _train,
    LOSSES: _losses,
    EVALUATE: evaluate,
    IDENTITY: identity,
    GAN: points.gan,
    CENTROIDS: points.centroids,
    LABEL: points.label,
}
