"""Handlers of one-shot clustering: points that represent a client's records, and labels of the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import nn

from coterie import models as networks
from coterie.client.cohort import LABELS, Cohort
from coterie.client.dpsgd import DPSGD
from coterie.client.gan_training import GANTraining, Samples, train_gan_privately, train_gans
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.clustering import fuzzy_c_means, k_means
from coterie.models.autoencoder import Labeller
from coterie.privacy import Streams
from coterie.wire import CentroidsRequest, GanRequest, LabelRequest, RequestError
from coterie.wire.messages import DIAGNOSTICS, REPLY, UPDATE, pack_points

ReplyOrError = RecordDict | ClientError

_gan = lru_cache(maxsize=2)(networks.build_gan)
_labeller = lru_cache(maxsize=2)(Labeller)


def received_gan(cohort: Cohort) -> tuple[nn.ModuleDict, GANTraining]:
    """Return the GAN of a request, and how it is trained.

    Raises:
        RequestError: it is unknown.
    """
    request, training = cohort.request, cohort.local_training
    assert isinstance(request, GanRequest)
    if request.gan not in networks.GANS:
        raise RequestError(f"gan is {request.gan[:60]!r}; expected one of {', '.join(networks.GANS)}")
    network = _gan(request.gan, cohort.federation.input_shape, request.labels)
    return network, GANTraining(
        networks.GANS[request.gan],
        request.labels,
        training.local_epochs,
        training.batch_size,
        request.samples,
        training.device,
        request.average,
        "bfloat16" if cohort.config.training.precision == "bfloat16" else "float32",
        request.feature_range,
    )


def gan(cohort: Cohort) -> Sequence[ReplyOrError]:
    """Train the received GAN, and return samples from it (PPFC-GAN)."""
    clients, (network, config) = cohort.clients, received_gan(cohort)
    if cohort.plans:
        return _privately(cohort, network, config)
    records = [_clamped(cohort, client, config.feature_range) for client in clients]
    refusals = [config.check(x) for x in records]
    fit = [i for i, refusal in enumerate(refusals) if refusal is None]
    rngs = cohort.rngs()
    trained = train_gans(
        network,
        cohort.layout,
        cohort.models[0],
        [records[i] for i in fit],
        [rngs[i] for i in fit],
        config,
        clients=[clients[i].client_id for i in fit],
        batched=config.device != "cpu",
    )
    made = dict(zip(fit, trained, strict=True))
    return [refusal or _reply(cohort, i, made[i]) for i, refusal in enumerate(refusals)]


def _privately(cohort: Cohort, network: nn.ModuleDict, config: GANTraining) -> list[ReplyOrError]:
    streams, replies = Streams(cohort.config.seed), []
    for i, client in enumerate(cohort.clients):
        private = DPSGD.of(cohort.plan(client.client_id), cohort.local_training)  # the step size is the GAN's
        x = _clamped(cohort, client, config.feature_range)
        coins, noises, latents = (
            streams.stream(name, *cohort.keys[client.client_id]) for name in ("batches", "gradients", "latents")
        )
        samples = train_gan_privately(
            network, cohort.layout, cohort.models[0], x, coins, noises, latents, config, private
        )
        replies.append(_reply(cohort, i, samples))
    return replies


def centroids(cohort: Cohort) -> list[ReplyOrError]:
    """Return centroids of each client's records by k-means (k-FED) or fuzzy c-means (FFCM)."""
    request = cohort.request
    assert isinstance(request, CentroidsRequest)
    replies: list[ReplyOrError] = []
    for i, (client, rng) in enumerate(zip(cohort.clients, cohort.rngs(), strict=True)):
        records = _clamped(cohort, client, request.feature_range)
        x = records.reshape(len(records), -1)
        k = min(request.local_centroids, len(x))
        if request.local == "fuzzy-c-means":
            if request.fuzzifier is None:
                raise RequestError("fuzzifier is missing")
            client_centroids = fuzzy_c_means(x, k, rng, fuzzifier=request.fuzzifier)
        else:
            client_centroids = k_means(x, k, rng)
        low, high = float(x.min()), float(x.max())  # rounding can move a mean out of the range
        replies.append(_reply(cohort, i, np.clip(client_centroids, low, high).reshape(-1, *records.shape[1:])))
    return replies


def label(cohort: Cohort) -> list[ReplyOrError]:
    """Label every record by the nearest centroid, store the labels, and return counts if diagnostics allow it."""
    request = cohort.request
    assert isinstance(request, LabelRequest)
    labeller = _labeller(cohort.federation.input_shape, request.labels, request.encoder)
    labeller = labeller.to(cohort.local_training.device)
    with torch.no_grad():
        for parameter, value in zip(labeller.parameters(), cohort.layout.split(cohort.models[0]).values(), strict=True):
            parameter.copy_(torch.as_tensor(value))
    replies: list[ReplyOrError] = []
    classes = cohort.federation.num_classes
    for client, shard, kept in zip(cohort.clients, cohort.shards, cohort.kept, strict=True):
        labels = labeller.label(shard.x)
        try:
            kept.write({LABELS: labels})
        except ClientError as error:
            replies.append(error)
            continue
        reply = RecordDict({REPLY: ConfigRecord({"client-id": client.client_id, "round": request.round})})
        if request.release_counts and client.exact:
            table = np.zeros((request.labels, classes), np.int64)
            np.add.at(table, (labels, shard.y), 1)
            reply[DIAGNOSTICS] = MetricRecord(
                {"client-id": client.client_id, "classes": classes, "confusion": table.ravel().tolist()}
            )
        replies.append(reply)
    return replies


def _clamped(cohort: Cohort, client: Client, feature_range: float) -> Samples:
    """Return the records of a client, clamped to [-r, r]; its log states how many values lie outside."""
    x = cohort.shard(client).x
    outside = np.count_nonzero(np.abs(x) > feature_range)
    if outside:
        log(
            WARNING,
            "client %s: %.3g %% of the features lie outside [-%g, %g] and are clamped: scale them, or set "
            "feature-range",
            *(client.client_id, 100 * outside / x.size, feature_range, feature_range),
        )
    return np.clip(x, -feature_range, feature_range)


def _reply(cohort: Cohort, i: int, points: npt.NDArray[np.floating[Any]] | ClientError) -> ReplyOrError:
    if isinstance(points, ClientError):
        return points
    fields = ConfigRecord({"client-id": cohort.clients[i].client_id, "round": cohort.request.round})
    return RecordDict({UPDATE: pack_points(np.asarray(points, np.float32)), REPLY: fields})
