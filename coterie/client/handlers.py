"""Handlers of requests, one per message type, called by the ClientApp and by the local engine.

A handler takes the cohort of a message, and returns one reply or error per client, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from logging import WARNING
from typing import TypeAlias

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.common.logger import log

from coterie.client import local_evaluation, points
from coterie.client.backend import train
from coterie.client.cohort import LAST_LABEL, OWN, Cohort, Labels
from coterie.client.device import to_numpy
from coterie.client.device_sums import clipped_total, stays_on_device
from coterie.client.gradients import check_supported
from coterie.client.identity import Client
from coterie.client.layers import Vectors
from coterie.client.record_level import noisy_model_losses, train_privately
from coterie.client.state import ClientError
from coterie.privacy import Plan, Summed, clip_rows
from coterie.wire import GanRequest, RequestError, TrainRequest
from coterie.wire.messages import (
    CENTROIDS,
    DIVERGED,
    EVALUATE,
    GAN,
    LABEL,
    LOSSES,
    TRAIN,
    Layout,
    losses_layout,
    pack_reply,
)

# Reported loss of a diverged model: messages hold finite numbers only.
_MAX_LOSS = 1e6

ReplyOrError: TypeAlias = RecordDict | ClientError


def prepare(cohort: Cohort) -> None:
    """Fail where a handler would fail after the charge: the GAN, the models or the network cannot be used.

    Raises:
        RequestError: they cannot.
    """
    if isinstance(cohort.request, GanRequest):
        points.received_gan(cohort)
        return
    if missing := cohort.layers.own.names:  # without record-level privacy, these are personal
        raise RequestError(f"the models lack {', '.join(missing)}, which record-level privacy does not support")
    if isinstance(cohort.request, TrainRequest):
        data = cohort.federation
        check_supported(cohort.network, data.input_shape, cohort.task, data.kind, data.has_units)


def _train(cohort: Cohort) -> Sequence[ReplyOrError]:
    """Choose a model, redraw the label if requested, train, store state, and return the update.

    The redraw matrix is part of the request and depends on released values only (privacy/mechanisms/rebalancing.py).
    """
    if cohort.plans:
        chosen, updates, below = train_privately(cohort)
        labels = cohort.labels(chosen)
        return [_reply(cohort, *row) for row in zip(cohort.clients, labels, labels, updates, below, strict=True)]
    return [_reply(cohort, *row) for row in zip(cohort.clients, *train_without_dp(cohort), strict=True)]


def train_and_sum(content: RecordDict, clients: Sequence[Client], sums: Summed) -> list[ReplyOrError | None]:
    """Train, and add the updates to ``sums`` instead of returning them: simulated clients only.

    Returns:
        None for a client whose update is added. Updates that a server drops, since they are not finite or too long,
        are returned as replies.
    """
    cohort = Cohort.of(TRAIN, content, clients)
    assert not cohort.plans  # noisy updates are not summed before the server has validated them

    def add(cohort: Cohort) -> list[RecordDict | None]:
        if stays_on_device(cohort, sums):
            return _sum_on_device(cohort, sums)
        labels, redrawn, updates = train_without_dp(cohort)
        limits = _limits(cohort, sums.plan, updates.shape[1])
        kept = np.asarray(np.isfinite(updates).all(axis=1))
        if np.isfinite(limits).any():
            kept &= np.array([np.linalg.norm(row.astype(np.float64)) for row in updates]) <= limits
        sums.add_rows(labels[kept], redrawn[kept], updates[kept])
        rows = zip(cohort.clients, labels, redrawn, updates, strict=True)
        return [None if summed else _reply(cohort, *row) for summed, row in zip(kept, rows, strict=True)]

    return cohort.replies(add)


def _sum_on_device(cohort: Cohort, sums: Summed) -> list[RecordDict | None]:
    """Same as for :func:`train_and_sum` on a GPU, which keeps the updates."""
    rngs = cohort.rngs()
    labels, redrawn, used = _choose(cohort, rngs)
    device = cohort.local_training.device
    start = torch.tensor(cohort.models, device=device)[torch.as_tensor(used, device=device)]
    updates = train(cohort.network, cohort.layers.whole, start, cohort.shards, rngs, cohort.local_training)
    labels, redrawn = cohort.labels(labels), cohort.labels(redrawn)
    limits = _limits(cohort, sums.plan, updates.shape[1])
    total, norms, kept = clipped_total(
        updates, redrawn, sums.plan.num_clusters, sums.clip_norm, limits, shared=sums.shared
    )
    sums.add_total(labels[kept], total, norms[kept])
    if not np.isfinite(norms).all():
        _log_divergence()
    rows = zip(cohort.clients, labels, redrawn, kept, strict=True)
    return [
        None if summed else _reply(cohort, client, label, other, to_numpy(updates[i]))
        for i, (client, label, other, summed) in enumerate(rows)
    ]


def _limits(cohort: Cohort, plan: Plan, size: int) -> list[float]:
    """Return the longest norm of each client's update that the plan allows."""
    lr, first = cohort.config.training.lr, cohort.train_request.first_batch
    return [plan.max_update_norm(client.client_id, size, lr, first) for client in cohort.clients]


def _reply(
    cohort: Cohort,
    client: Client,
    label: int,
    redrawn: int,
    values: Vectors,
    below: float | None = None,
    layout: Layout | None = None,
) -> RecordDict:
    """Return the reply of one client; its values have the layout of the received models unless another is given."""
    counts = cohort.train_request.counts_records and not cohort.plans
    return pack_reply(
        values,
        layout or cohort.layers.sent,
        client_id=client.client_id,
        round=cohort.request.round,
        label=label,
        redrawn_label=redrawn,
        below=below,
        records=len(cohort.shard(client).y) if counts else None,
    )


def _losses(cohort: Cohort) -> Sequence[ReplyOrError]:
    """Return the mean loss of every received model on the client's training data (LCFL)."""
    values = noisy_model_losses(cohort) if cohort.plans else np.minimum(cohort.losses, _MAX_LOSS).astype(np.float32)
    layout = losses_layout(len(cohort.models))
    rows = zip(cohort.clients, values, strict=True)
    return [_reply(cohort, client, 0, 0, row, layout=layout) for client, row in rows]


def train_without_dp(cohort: Cohort) -> tuple[Labels, Labels, Vectors]:
    """Train without noise; return labels, redrawn labels and updates."""
    request, models, layers, rngs = cohort.train_request, cohort.models, cohort.layers, cohort.rngs()
    nearest = request.assign == "nearest"
    if nearest:
        used = labels = cohort.last_labels(otherwise=np.array([rng.integers(len(models)) for rng in rngs]))
    else:
        labels, redrawn, used = _choose(cohort, rngs)
    start = layers.join(models[used], cohort.own)
    moved = train(cohort.network, layers.whole, start, cohort.shards, rngs, cohort.local_training)
    if not np.isfinite(moved).all():
        _log_divergence()
    updates, personal = layers.part(start + moved) if layers.own.names else (moved, cohort.own)
    if layers.own.names:
        updates = updates - models[used]
    if nearest:
        labels, updates = _assign(models, labels, updates, np.inf if request.clip is None else request.clip)
        redrawn = _redraw(request, labels, len(models), rngs)
    if cohort.is_stateful:
        for kept, label, values in zip(cohort.kept, labels, personal, strict=True):
            kept.write({LAST_LABEL: np.array([label]), OWN: values})
    return cohort.labels(labels), cohort.labels(redrawn), updates


def _choose(cohort: Cohort, rngs: Sequence[np.random.Generator]) -> tuple[Labels, Labels, Labels]:
    """Return the chosen labels, the redrawn labels, and the model that each client trains."""
    labels = cohort.choose()
    redrawn = _redraw(cohort.train_request, labels, len(cohort.models), rngs)
    return labels, redrawn, redrawn if cohort.train_request.rebalance_train == "assigned" else labels


@lru_cache(maxsize=1)
def _log_divergence() -> None:
    """Log once per process that training diverged, since the server may not say so."""
    log(WARNING, "the update of a client contains NaN or Inf: %s", DIVERGED)


def _redraw(request: TrainRequest, labels: Labels, num_clusters: int, rngs: Sequence[np.random.Generator]) -> Labels:
    if not request.redraw:
        return labels
    matrix = np.reshape(request.redraw, (num_clusters, num_clusters))
    return np.array([rng.choice(num_clusters, p=matrix[c]) for rng, c in zip(rngs, labels, strict=True)])


def _assign(models: Vectors, labels: Labels, updates: Vectors, clip: float) -> tuple[Labels, Vectors]:
    """Run FeSEM's E-step: return the centre nearest to each client's model, and the model minus that centre.

    The difference has at most the norm of the clipped update, since the initial parameters are a centre, too.
    """
    updates = clip_rows(updates, clip).astype(np.float32)
    start = models[labels]  # relative to the start, distances are small enough for float32
    apart = np.stack([((start + updates - model) ** 2).sum(axis=1) for model in models], axis=1)  # (n, k)
    stays = apart[np.arange(len(labels)), labels] <= apart.min(axis=1)
    new = np.where(stays, labels, apart.argmin(axis=1))
    return new, updates + (start - models[new])


Handler = Callable[[Cohort], Sequence[ReplyOrError]]

#: Handlers by Flower message type; a registration (IDENTITY) needs none.
HANDLERS: dict[str, Handler] = {
    TRAIN: _train,
    LOSSES: _losses,
    EVALUATE: local_evaluation.evaluate,
    GAN: points.gan,
    CENTROIDS: points.centroids,
    LABEL: points.label,
}
