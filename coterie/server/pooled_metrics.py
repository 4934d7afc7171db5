"""Metrics of a simulation's models on the held-out records of its clients: diagnostics, outside the guarantee."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from coterie import models as networks
from coterie import performance
from coterie.client.cohort import federation, torch_device
from coterie.client.layers import Additive
from coterie.client.scores import outputs
from coterie.datasets import TestSet
from coterie.results import Diagnostics
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout

# Records from which no further client is added.
_MANY = 100_000


def with_metrics(
    config: RunConfig, scores: Diagnostics, models: npt.NDArray[np.float32], layout: Layout, *, additive: bool
) -> Diagnostics:
    """Return the scores of the last evaluation with the metrics of all its clients' records together.

    Args:
        config: of the run.
        scores: of its last evaluation, with the cluster of each client.
        models: (k, d) trained models.
        layout: of their parameters.
        additive: whether a model is a sum of two networks.
    """
    shape, classes = config.examples
    network = networks.build(config.training.model, shape, classes)
    if additive:
        network = Additive(network, networks.build(config.training.model, shape, classes))
    if Layout.of(networks.trainable(network)) != layout:
        return scores  # clients have layers of their own
    counts = _tested(config, scores)
    if not counts:
        return scores
    device = torch_device(config.training.device)
    predicted = [
        outputs(network, layout, models[cluster][None], test, device)[0].reshape(len(test.y), -1)
        for test, cluster in counts
    ]
    labels = np.concatenate([test.y for test, _ in counts])
    weights = np.repeat(np.array(list(counts.values()), np.float64), [len(test.y) for test, _ in counts])
    found, schema = np.concatenate(predicted), config.facts.schema
    if not np.isfinite(found).all():
        return scores
    if classes:
        metrics = performance.of_classes(labels, performance.probabilities(found), weights)
    else:
        scale, mean = (schema.label.scale, schema.label.mean) if schema else (1.0, 0.0)
        metrics = performance.of_numbers(labels * scale + mean, found[:, 0] * scale + mean, weights)
    names = (schema.class_names or None) if schema else None
    return replace(scores, evaluated_records=int(weights.sum()), class_names=names, **metrics.metrics)


def _tested(config: RunConfig, scores: Diagnostics) -> Counter[tuple[TestSet, int]]:
    """Return the number of clients by test set and cluster; some clients, if all have too many records."""
    data = federation(config.for_clients())
    clients, clusters = scores.client_id or (), scores.client_cluster or ()
    counts: Counter[tuple[TestSet, int]] = Counter()
    records = 0
    for i in np.random.default_rng(config.partition_seed).permutation(len(clusters)).tolist():
        test = data.shard(clients[i]).test
        if not len(test.y) or records >= _MANY:
            continue
        records += len(test.y)
        counts[test, clusters[i]] += 1
    return counts
