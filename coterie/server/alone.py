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

from coterie.client.personal import EPOCHS_ALONE, trained_alone
from coterie.client.scores import accuracies
from coterie.results import Diagnostics
from coterie.server.config import RunConfig
from coterie.server.some_clients import SomeClients

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
