"""Scores of a simulation's last models that need its clients' data: diagnostics, outside the guarantee.

Some clients also train the run's network alone, from its initial parameters on their own records, with the step size
and the batch size of the run, as :func:`~coterie.client.personal.trained_alone` does at its own device: this tells
whether federation pays. They share nothing, so that they need no noise. All of them together train at most a tenth of
what the run does (at record level, as much: DP-SGD takes several times as long), but at least three clients.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from coterie import models as networks
from coterie.client.cohort import OWN, federation, initial_own, torch_device
from coterie.client.layers import Additive, Layers, Vectors
from coterie.client.personal import EPOCHS_ALONE, trained_alone
from coterie.client.scores import accuracies, outputs
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.state import StateFile
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import Shard, TestSet
from coterie.results import Diagnostics
from coterie.server.config import RunConfig
from coterie.wire import EvaluateRequest
from coterie.wire.messages import Layout
from coterie.wire.requests import Request

# Records from which no further client is added.
_MANY = 100_000
# Clients that train alone even where they take more than a tenth of the time of the run.
_LEAST = 3
# Held-out records of a client.
_MAX_TESTS = 1000


@dataclass(frozen=True)
class SomeClients:
    """Clients, and what they train.

    Attributes:
        shards: data of the clients, none of which is without records.
        rngs: generators for the order of their examples.
        network: that of the run; its parameters are not used.
        layout: of its parameters.
        initial: (d,) public parameters.
        training: hyper-parameters of the run.
    """

    shards: list[Shard]
    rngs: list[np.random.Generator]
    network: nn.Module
    layout: Layout
    initial: Vectors
    training: LocalTrainingConfig

    @classmethod
    def drawn(cls, config: RunConfig, many: int) -> SomeClients:
        """Draw at most ``many`` clients with records to train on and to be tested on, the same ones in every call.

        Raises:
            DataError: the data are not available.
        """
        data, local = federation(config.for_clients()), config.training
        chosen = np.random.default_rng(config.partition_seed).permutation(config.data.clients)[:many].tolist()
        shards = [shard for shard in map(data.shard, chosen) if len(shard.y) and len(shard.test.y)]
        shape, classes = config.examples
        drawn = networks.initialise(local.network, shape, classes, 0)
        layout = Layout.of(drawn)
        return cls(
            shards,
            [np.random.default_rng([config.partition_seed, shard.client_id]) for shard in shards],
            networks.build(local.network, shape, classes),
            layout,
            layout.flatten(drawn),
            LocalTrainingConfig(
                local.local_epochs,
                local.batch_size,
                local.lr,
                torch_device(local.device),
                plugins=TrainingPlugins.of(local),
                task=config.task,
            ),
        )


def with_client_scores(
    config: RunConfig,
    clients: Path,
    scores: Diagnostics,
    models: npt.NDArray[np.float32],
    layout: Layout,
    request: Request,
) -> Diagnostics:
    """Return the scores of the last evaluation with metrics of the models, and those of models trained alone.

    Args:
        config: Configuration of the run.
        clients: Folder of the clients' state.
        scores: Scores of the last evaluation.
        models: (k, d) trained models.
        layout: Names and shapes of their parameters.
        request: Request with which clients evaluate the models.
    """
    if isinstance(request, EvaluateRequest):
        scores = with_metrics(config, scores, models, layout, clients, additive=request.additive)
    return compared_alone(config, scores)


def compared_alone(config: RunConfig, scores: Diagnostics) -> Diagnostics:
    """Return the scores with those of models that clients train alone.

    Args:
        config: of the run.
        scores: of its last evaluation.
    """
    if not config.trains_alone or scores.accuracy is None:
        return scores
    began = time.perf_counter()
    share = 1.0 if config.privacy.privacy_unit == "record" else 0.1  # DP-SGD takes several times as long
    most = max(_LEAST, int(share * config.trainings * config.training.local_epochs / EPOCHS_ALONE))
    some = SomeClients.drawn(config, min(config.trains_alone, most))
    network, layout, training = some.network, some.layout, some.training
    if not some.shards:
        return scores
    trained = trained_alone(network, layout, some.initial, some.shards, some.rngs, training)
    tests = [(shard.test.x[:_MAX_TESTS], shard.test.y[:_MAX_TESTS]) for shard in some.shards]
    found = [
        accuracies(network, layout, model[None], x, y, training.device, training.task)[0]
        for model, (x, y) in zip(trained, tests, strict=True)
    ]
    return replace(
        scores,
        alone_accuracy=float(np.mean(found)),
        alone_worst_client_accuracy=float(np.min(found)),
        alone_clients=len(found),
        alone_seconds=time.perf_counter() - began,
    )


def with_metrics(
    config: RunConfig,
    scores: Diagnostics,
    models: npt.NDArray[np.float32],
    layout: Layout,
    clients: Path,
    *,
    additive: bool,
) -> Diagnostics:
    """Return the scores of the last evaluation with the metrics of all its clients' records together.

    Args:
        config: of the run.
        scores: of its last evaluation, with the cluster of each client.
        models: (k, d) trained models.
        layout: of their parameters.
        clients: folder of the clients' state, which holds their personal layers.
        additive: whether a model is a sum of two networks.
    """
    shape, classes = config.examples
    network = networks.build(config.training.network, shape, classes)
    if additive:
        network = Additive(network, networks.build(config.training.network, shape, classes))
    layers = Layers.of(network, layout)
    data = federation(config.for_clients())
    tested, clusters = scores.client_id or (), scores.client_cluster or ()
    # Number of clients by test set, cluster, and client if it has layers of its own; of some if they have many records.
    counts: Counter[tuple[TestSet, int, int]] = Counter()
    records = 0
    for i in np.random.default_rng(config.partition_seed).permutation(len(clusters)).tolist():
        test = data.shard(tested[i]).test
        if len(test.y) and records < _MANY:
            records += len(test.y)
            counts[test, clusters[i], tested[i] if layers.own.names else -1] += 1
    if not counts:
        return scores
    device = torch_device(config.training.device)
    initial = initial_own(layers, config.training.network, shape, classes)

    def predicted(test: TestSet, cluster: int, client: int) -> npt.NDArray[np.float64]:
        own = np.zeros((1, 0), np.float32)
        if layers.own.names:
            own = StateFile(clients, client).read().get(OWN, initial)[None]
        vector = layers.join(models[cluster][None], own)
        return outputs(network, layers.whole, vector, test, device)[0].reshape(len(test.y), -1)

    found, schema = np.concatenate([predicted(*key) for key in counts]), config.facts.schema
    if not np.isfinite(found).all():
        return scores
    labels = np.concatenate([test.y for test, *_ in counts])
    weights = np.repeat(np.array(list(counts.values()), np.float64), [len(test.y) for test, *_ in counts])
    metrics = config.facts.task.measure(labels, found)(weights)
    names = (schema.class_names or None) if schema else None
    return replace(scores, evaluated_records=int(weights.sum()), class_names=names, **metrics.metrics)
