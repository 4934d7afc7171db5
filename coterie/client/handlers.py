"""Handlers of requests, one per message type, called by the ClientApp and by the local engine.

A handler takes the cohort of a message, and returns one reply or error per client, in order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from logging import WARNING
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log

from coterie.client import points
from coterie.client.backend import train
from coterie.client.cohort import LAST_LABEL, OWN, Cohort, Labels
from coterie.client.device import to_numpy
from coterie.client.device_sums import clipped_total, stays_on_device
from coterie.client.dpsgd import check_supported
from coterie.client.identity import Client
from coterie.client.layers import Vectors
from coterie.client.personal import OwnModels, personalised
from coterie.client.record_level import noisy_histograms, noisy_model_losses, train_privately
from coterie.client.scores import accuracies, losses, outputs
from coterie.client.state import ClientError
from coterie.datasets import TestSet
from coterie.fields import MAX_SAMPLED_TESTS, TRUSTED_SERVER
from coterie.privacy import Plan, Summed, clip_rows
from coterie.privacy.score_histograms import MAX_CLASSES, count_outputs
from coterie.wire import EvaluateRequest, GanRequest, RequestError, TrainRequest
from coterie.wire.messages import (
    CENTROIDS,
    DIAGNOSTICS,
    DIVERGED,
    EVALUATE,
    GAN,
    LABEL,
    LOSSES,
    REPLY,
    SCORE_COUNTS,
    TRAIN,
    Layout,
    losses_layout,
    pack_reply,
)
from coterie.wire.requests import MaskedEvaluateRequest

# Test examples of a client with personal layers, whose network is evaluated for this client only.
_MAX_OWN_TESTS = 500
# Reported loss of a diverged model: messages hold finite numbers only.
_MAX_LOSS = 1e6

ReplyOrError: TypeAlias = RecordDict | ClientError
#: Accuracy, training loss (None if not requested) and number of test examples of a client.
Score: TypeAlias = tuple[float, float | None, int]


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


def evaluate(cohort: Cohort) -> list[ReplyOrError]:
    """Return the accuracy of each client's model, chosen on its training data or assigned, on held-out data."""
    if cohort.plans:
        return _histograms(cohort)
    return [RecordDict({DIAGNOSTICS: report}) for report in reports(cohort)]


def reports(cohort: Cohort) -> list[MetricRecord]:
    """Return what each client finds about its model: accuracy, loss, cluster, and counts of scores if requested."""
    if cohort.request.assign != "nearest":
        labels = cohort.choose()
    else:
        labels = cohort.last_labels(otherwise=np.full(len(cohort.clients), -1))
        if (labels < 0).any():
            labels = np.where(labels >= 0, labels, cohort.choose())
    score = _scores_of_personal_models if cohort.layers.own.names else _scores_of_shared_models
    rows = zip(cohort.clients, cohort.shards, cohort.labels(labels), score(cohort, labels), strict=True)
    own = _own_models(cohort, labels)
    replaced = zip(_accuracies_of_own_models(cohort, own), _score_counts(cohort, labels, own), strict=True)
    return [
        MetricRecord(
            {
                "client-id": client.client_id,
                "accuracy": accuracy,
                **({} if loss is None or math.isinf(loss) else {"loss": loss}),  # messages hold finite numbers only
                "cluster": int(label),
                "group": shard.group,
                "num-examples": size,
                **own_accuracy,
                **counts,
            }
        )
        for (client, shard, label, (accuracy, loss, size)), (own_accuracy, counts) in zip(rows, replaced, strict=True)
    ]


def _histograms(cohort: Cohort) -> list[ReplyOrError]:
    """Return noisy histograms of scores at record level; nothing else of held-out records is released."""
    return [
        RecordDict(
            {
                REPLY: ConfigRecord({"client-id": client.client_id, "round": cohort.request.round}),
                DIAGNOSTICS: MetricRecord({SCORE_COUNTS: counts}),
            }
        )
        for client, counts in zip(cohort.clients, noisy_histograms(cohort), strict=True)
    ]


@dataclass
class _LatestModels:
    """Accuracies of the models that this process evaluated last, by test set; messages to many clients repeat them."""

    key: tuple[object, ...] = ()
    scores: dict[TestSet, dict[int, float]] = field(default_factory=dict)


_LATEST = _LatestModels()


def _test_accuracies(cohort: Cohort, test: TestSet, used: set[int]) -> dict[int, float]:
    """Return the accuracies of these received models on a test set, by index; others may be there."""
    device, sampled = cohort.local_training.device, cohort.samples_tests
    digest = hashlib.sha256(np.ascontiguousarray(cohort.models).data).digest()
    key = (digest, cohort.model_spec, cohort.request.additive, cohort.layers.whole, device, sampled)
    if key != _LATEST.key:
        _LATEST.key, _LATEST.scores = key, {}
    scores = _LATEST.scores.setdefault(test, {})
    if new := sorted(used - scores.keys()):
        examples = _test_examples(cohort, test)
        found = accuracies(cohort.network, cohort.layers.whole, cohort.models[new], *examples, device, cohort.task)
        scores.update(zip(new, found.tolist(), strict=True))
    return scores


def _scores_of_shared_models(cohort: Cohort, labels: Labels) -> list[Score]:
    """Evaluate every model once per test set whose clients use it: the clients of a group share one."""
    used: dict[TestSet, set[int]] = {}
    for shard, label in zip(cohort.shards, labels.tolist(), strict=True):
        used.setdefault(shard.test, set()).add(label)
    hits = {test: _test_accuracies(cohort, test, models) for test, models in used.items()}
    sizes = {test: len(_test_examples(cohort, test)[1]) for test in used}
    training_losses: list[float | None] = [None] * len(labels)
    if cohort.reports_losses:
        training_losses = cohort.losses[np.arange(len(labels)), labels].tolist()
    return [
        (hits[shard.test][label], loss, sizes[shard.test])
        for shard, label, loss in zip(cohort.shards, labels.tolist(), training_losses, strict=True)
    ]


def _scores_of_personal_models(cohort: Cohort, labels: Labels) -> list[Score]:
    network, layout, device = cohort.network, cohort.layers.whole, cohort.local_training.device
    whole = cohort.layers.join(cohort.models[labels], cohort.own)
    scores: list[Score] = []
    for client, shard, vector in zip(cohort.clients, cohort.shards, whole, strict=True):
        x, y = _part(shard.test, client.client_id)
        accuracy = accuracies(network, layout, vector[None], x, y, device, cohort.task)[0]
        loss = None
        if cohort.reports_losses:
            loss = float(losses(network, layout, vector[None], [shard], device, cohort.local_training.loss)[0, 0])
        scores.append((float(accuracy), loss, len(y)))
    return scores


def _own_models(cohort: Cohort, labels: Labels) -> OwnModels | None:
    """Return the models that the clients fit to their own records, if they report of these; otherwise None.

    In diagnostics only simulated clients report it: no noise would cover it. Neither does a client with its own budget,
    except in a masked evaluation, which it charges.
    """
    request, network, layout = cohort.request, cohort.network, cohort.layers.whole
    assert isinstance(request, EvaluateRequest)
    silent = any(
        client.deployed and (client.guarantee != TRUSTED_SERVER or not request.private) for client in cohort.clients
    )
    if request.personalize is None or (silent and not isinstance(request, MaskedEvaluateRequest)):
        return None
    released = cohort.layers.join(cohort.models[labels], cohort.own)
    training = cohort.local_training
    return personalised(
        network, layout, released, cohort.shards, request.personalize, training, cohort.rngs(), cohort.initial
    )


def _accuracies_of_own_models(cohort: Cohort, own: OwnModels | None) -> list[dict[str, float]]:
    """Return the accuracy of the model that each client fits to its own records.

    It replaces that of the released model where the server releases a noisy mean of it.
    """
    request, device = cohort.request, cohort.local_training.device
    assert isinstance(request, EvaluateRequest)
    if own is None:
        return [{} for _ in cohort.clients]
    key = "accuracy" if request.private else "personal-accuracy"
    tests = [_part(shard.test, client.client_id) for client, shard in zip(cohort.clients, cohort.shards, strict=True)]
    models = zip(own.models, tests, strict=True)
    found = [accuracies(own.network, own.layout, model[None], *test, device, cohort.task)[0] for model, test in models]
    return [{key: float(accuracy)} for accuracy in found]


def _score_counts(cohort: Cohort, labels: Labels, own: OwnModels | None) -> list[dict[str, list[float]]]:
    """Return the counts of scores by label of each client's held-out records, if the server asks for a histogram.

    They are of the model whose accuracy it reports. A client whose owner does not allow histograms sends none; masked
    ones are allowed by then.
    """
    request = cohort.request
    if not (isinstance(request, EvaluateRequest) and request.private and request.histogram):
        return [{} for _ in cohort.clients]
    if own is None:
        network, layout = cohort.network, cohort.layers.whole
        models = cohort.layers.join(cohort.models[labels], cohort.own)
    else:
        network, layout, models = own.network, own.layout, own.models
    reports: list[dict[str, list[float]]] = []
    for client, shard, model in zip(cohort.clients, cohort.shards, models, strict=True):
        allowed = isinstance(request, MaskedEvaluateRequest) or client.allows("histograms")
        if allowed and 2 <= cohort.federation.num_classes <= MAX_CLASSES:
            found = outputs(network, layout, model[None], shard.test, cohort.local_training.device)[0]
            reports.append({SCORE_COUNTS: count_outputs(found, shard.test.y).tolist()})
        else:
            reports.append({})
    return reports


def _test_examples(cohort: Cohort, test: TestSet) -> tuple[Any, Any]:
    """Return the examples and targets of a shared test set, or of a sample of it if the server requests one."""
    return _every_nth(test, MAX_SAMPLED_TESTS) if cohort.samples_tests else (test.x, test.y)


def _part(test: TestSet, client_id: int) -> tuple[Any, Any]:
    """Return every n-th example of a large test set, starting at a place that depends on the client."""
    return _every_nth(test, _MAX_OWN_TESTS, client_id)


def _every_nth(test: TestSet, most: int, begin: int = 0) -> tuple[Any, Any]:
    """Return every n-th example of a test set, at most ``most``; ``begin`` modulo n is the first."""
    stride = max(1, -(-len(test.y) // most))
    return test.x[begin % stride :: stride], test.y[begin % stride :: stride]


Handler = Callable[[Cohort], Sequence[ReplyOrError]]

#: Handlers by Flower message type; a registration (IDENTITY) needs none.
HANDLERS: dict[str, Handler] = {
    TRAIN: _train,
    LOSSES: _losses,
    EVALUATE: evaluate,
    GAN: points.gan,
    CENTROIDS: points.centroids,
    LABEL: points.label,
}
