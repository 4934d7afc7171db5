"""Handlers of one-shot clustering: points that represent a client's records, and labels of the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import nn

from coterie import models as networks
from coterie.client.budget import charge
from coterie.client.dpsgd import DPSGD
from coterie.client.gan_training import GANTraining, Samples, train_gan_privately, train_gans
from coterie.client.identity import Client
from coterie.client.record_level import check_covered
from coterie.client.state import ClientError
from coterie.client.task import LABELS, Cohort, Labels
from coterie.clustering import fuzzy_c_means, k_means
from coterie.models.autoencoder import Labeller
from coterie.privacy import Streams
from coterie.wire import CentroidsRequest, GanRequest, LabelRequest, RequestError
from coterie.wire.messages import CENTROIDS, DIAGNOSTICS, GAN, LABEL, REPLY, UPDATE, pack_points

ReplyOrError = RecordDict | ClientError

_BUDGET_MISMATCH = "this client has its own budget, which does not cover centroids of its records: request rejected"


def gan(content: RecordDict, clients: Sequence[Client]) -> list[ReplyOrError]:
    """Train the received GAN, and return samples from it (PPFC-GAN)."""
    cohort = Cohort.of(GAN, content, clients)
    request = cohort.request
    assert isinstance(request, GanRequest)
    if cohort.budget_errors:
        return list(cohort.budget_errors)
    if request.gan not in networks.GANS:
        raise RequestError(f"gan is {request.gan[:60]!r}; expected one of {', '.join(networks.GANS)}")
    network = _gan(request.gan, cohort.task.federation.input_shape, request.labels)
    config = GANTraining(
        networks.GANS[request.gan],
        request.labels,
        cohort.task.training.local_epochs,
        cohort.task.training.batch_size,
        request.samples,
        cohort.task.training.device,
        request.average,
        request.precision,
    )
    if cohort.task.plans:
        return [_reply(cohort, i, _privately(cohort, i, network, config)) for i in range(len(clients))]
    refusals = [config.check(shard.x) for shard in cohort.shards]
    fit = [i for i, refusal in enumerate(refusals) if refusal is None]
    records, rngs = [cohort.shards[i].x for i in fit], [cohort.task.rng(clients[i].client_id) for i in fit]
    trained = train_gans(
        network,
        cohort.layout,
        cohort.models[0],
        records,
        rngs,
        config,
        clients=[clients[i].client_id for i in fit],
        batched=config.device != "cpu",
    )
    made = dict(zip(fit, trained, strict=True))
    return [refusal or _reply(cohort, i, made[i]) for i, refusal in enumerate(refusals)]


def _privately(cohort: Cohort, i: int, network: nn.ModuleDict, config: GANTraining) -> Samples | ClientError:
    """Return samples of one client; the charge precedes the noise."""
    task, client = cohort.task, cohort.clients[i]
    plan = task.plan(client.client_id)
    try:
        check_covered(client, task, plan)
        number = charge(client, cohort.folders[i], plan, task.round, cohort.request)
    except ClientError as refusal:
        return refusal
    streams, key = Streams(task.seed), (task.round, client.client_id, number)
    private = DPSGD(
        num_examples=plan.num_examples,
        batch_size=plan.batch_size,
        epochs=plan.local_epochs,
        lr=0.0,  # Adam's are the GAN's
        clip_norm=plan.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        device=config.device,
    )
    coins, noises, latents = (streams.stream(name, *key) for name in ("batches", "gradients", "latents"))
    return train_gan_privately(
        network, cohort.layout, cohort.models[0], cohort.shard(i).x, coins, noises, latents, config, private
    )


def centroids(content: RecordDict, clients: Sequence[Client]) -> list[ReplyOrError]:
    """Return centroids of each client's records by k-means (k-FED) or fuzzy c-means (FFCM)."""
    if any(client.budget for client in clients):  # regardless of the plan in the request
        return [ClientError(_BUDGET_MISMATCH)] * len(clients)
    cohort = Cohort.of(CENTROIDS, content, clients)
    request = cohort.request
    assert isinstance(request, CentroidsRequest)
    replies: list[ReplyOrError] = []
    for i, (client, shard) in enumerate(zip(clients, cohort.shards, strict=True)):
        x, rng = shard.x.reshape(len(shard.y), -1), cohort.task.rng(client.client_id)
        k = min(request.local_centroids, len(x))
        if request.local == "fuzzy-c-means":
            if request.fuzzifier is None:
                raise RequestError("fuzzifier is missing")
            found = fuzzy_c_means(x, k, rng, fuzzifier=request.fuzzifier)
        else:
            found = k_means(x, k, rng)
        low, high = float(x.min()), float(x.max())  # rounding can move a mean out of the range
        replies.append(_reply(cohort, i, np.clip(found, low, high).reshape(-1, *shard.x.shape[1:])))
    return replies


def label(content: RecordDict, clients: Sequence[Client]) -> list[ReplyOrError]:
    """Label every record by the nearest centroid, store the labels, and return counts if diagnostics allow it."""
    cohort = Cohort.of(LABEL, content, clients)
    request, task = cohort.request, cohort.task
    assert isinstance(request, LabelRequest)
    labeller = _labeller(request.encoder, task.federation.input_shape, request.labels).to(task.training.device)
    with torch.no_grad():
        for parameter, value in zip(labeller.parameters(), cohort.layout.split(cohort.models[0]).values(), strict=True):
            parameter.copy_(torch.as_tensor(value))
    replies: list[ReplyOrError] = []
    for client, shard, file in zip(clients, cohort.shards, cohort.state_files, strict=True):
        labels = labeller.label(shard.x)
        try:
            file.write({LABELS: labels})
        except ClientError as error:
            replies.append(error)
            continue
        reply = RecordDict({REPLY: ConfigRecord({"client-id": client.client_id, "round": task.round})})
        if request.release_counts and (client.diagnostics or not client.budget):
            reply[DIAGNOSTICS] = _counts(client, labels, shard.y, request.labels, task.federation.num_classes)
        replies.append(reply)
    return replies


def _counts(client: Client, labels: Labels, classes: Labels, k: int, num_classes: int) -> MetricRecord:
    """Count records by label and class."""
    table = np.zeros((k, num_classes), np.int64)
    np.add.at(table, (labels, classes), 1)
    return MetricRecord({"client-id": client.client_id, "classes": num_classes, "confusion": table.ravel().tolist()})


def _reply(cohort: Cohort, i: int, points: npt.NDArray[np.floating[Any]] | ClientError) -> ReplyOrError:
    if isinstance(points, ClientError):
        return points
    fields = ConfigRecord({"client-id": cohort.clients[i].client_id, "round": cohort.task.round})
    return RecordDict({UPDATE: pack_points(np.asarray(points, np.float32)), REPLY: fields})


@lru_cache(maxsize=2)
def _gan(name: str, shape: tuple[int, ...], categories: int) -> nn.ModuleDict:
    return networks.build_gan(name, shape, categories)


@lru_cache(maxsize=2)
def _labeller(encoder: str, shape: tuple[int, ...], k: int) -> Labeller:
    return Labeller(shape, k, encoder)
