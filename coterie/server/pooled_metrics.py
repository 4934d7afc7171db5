"""Metrics of a simulation's models on the held-out records of its clients: diagnostics, outside the guarantee."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie import models as networks
from coterie.client.cohort import OWN, federation, initial_own, torch_device
from coterie.client.layers import Additive, Layers
from coterie.client.scores import outputs
from coterie.client.state import StateFile
from coterie.datasets import TestSet
from coterie.results import Diagnostics
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout

# Records from which no further client is added.
_MANY = 100_000


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
    counts = _tested(config, scores, personal=bool(layers.own.names))
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


def _tested(config: RunConfig, scores: Diagnostics, personal: bool) -> Counter[tuple[TestSet, int, int]]:
    """Return the number of clients by test set, cluster, and client if it has layers of its own, otherwise -1.

    If all clients have too many records, it is that of some.
    """
    data = federation(config.for_clients())
    clients, clusters = scores.client_id or (), scores.client_cluster or ()
    counts: Counter[tuple[TestSet, int, int]] = Counter()
    records = 0
    for i in np.random.default_rng(config.partition_seed).permutation(len(clusters)).tolist():
        test = data.shard(clients[i]).test
        if not len(test.y) or records >= _MANY:
            continue
        records += len(test.y)
        counts[test, clusters[i], clients[i] if personal else -1] += 1
    return counts
