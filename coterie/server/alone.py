"""Models that clients of a simulation train alone, to tell whether federation pays: diagnostics, outside the guarantee.

Each of some clients trains the run's network from its initial parameters on its own records, with the step size and the
batch size of the run, as :func:`~coterie.client.personal.trained_alone` does at its own device. It shares nothing, so
that it needs no noise. All of them together train at most a tenth of what the run does (at record level, as much:
DP-SGD takes several times as long), but at least three clients.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from coterie import models as networks
from coterie.client.cohort import federation, torch_device
from coterie.client.personal import EPOCHS_ALONE, trained_alone
from coterie.client.scores import accuracies
from coterie.client.sgd import LocalTrainingConfig
from coterie.results import Diagnostics
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout

# Clients that train alone even where they take more than a tenth of the time of the run.
_LEAST = 3
# Held-out records of a client.
_MAX_TESTS = 1000


def compared_alone(config: RunConfig, scores: Diagnostics) -> Diagnostics:
    """Return the scores with those of models that clients train alone.

    Args:
        config: of the run.
        scores: of its last evaluation.
    """
    if not config.trains_alone or scores.accuracy is None:
        return scores
    began = time.perf_counter()
    data, local = federation(config.for_clients()), config.training
    share = 1.0 if config.privacy.privacy_unit == "record" else 0.1  # DP-SGD takes several times as long
    most = max(_LEAST, int(share * config.trainings * local.local_epochs / EPOCHS_ALONE))
    rng = np.random.default_rng(config.partition_seed)
    chosen = rng.permutation(config.data.clients)[: min(config.trains_alone, most)].tolist()
    shards = [shard for shard in map(data.shard, chosen) if len(shard.y) and len(shard.test.y)]
    if not shards:
        return scores
    shape, classes = config.examples
    network = networks.build(local.model, shape, classes)
    drawn = networks.initialise(local.model, shape, classes, 0)
    layout = Layout.of(drawn)
    device = torch_device(local.device)
    training = LocalTrainingConfig(local.local_epochs, local.batch_size, local.lr, device)
    rngs = [np.random.default_rng([config.partition_seed, shard.client_id]) for shard in shards]
    trained = trained_alone(network, layout, layout.flatten(drawn), shards, rngs, training)
    found = [
        accuracies(network, layout, model[None], shard.test.x[:_MAX_TESTS], shard.test.y[:_MAX_TESTS], device)[0]
        for model, shard in zip(trained, shards, strict=True)
    ]
    return replace(
        scores,
        alone_accuracy=float(np.mean(found)),
        alone_worst_client_accuracy=float(np.min(found)),
        alone_clients=len(found),
        alone_seconds=time.perf_counter() - began,
    )
