"""Centralised baselines: cluster the pooled data of all clients without federated learning."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from coterie.bench.table import BenchError
from coterie.client.cohort import federation
from coterie.clustering import fuzzy_c_means, k_means_labels
from coterie.clustering.dcn import DCN
from coterie.results import Diagnostics, Outcome
from coterie.server import RunConfig
from coterie.server.metrics import partition_scores
from coterie.strategies.ffcm import FUZZIFIER
from coterie.strategies.ppfc_gan import PPFCGANSettings

Points = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

# Records per chunk of distances or codes.
_CHUNK = 8192


def cluster(method: str, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Cluster the records of all clients, and write result.json and diagnostics.json in the format of a run.

    Args:
        method: one of :data:`~coterie.bench.table.CENTRAL`.
        config: configuration of the federated run; defines data, clients, clusters, seed and device.
        folder: output folder.

    Returns:
        The contents of both files.

    Raises:
        BenchError: the data have no classes or too few records.
    """
    data = federation(config.for_clients())
    if not data.num_classes:
        raise BenchError(f"{config.data.dataset} has {data.task}, but clusters are scored against classes")
    if not config.run.clusters:
        raise BenchError("clusters = 0: central clustering requires the number of clusters; set it")
    shards = [data.shard(client) for client in range(data.clients)]
    x, y = (np.concatenate([getattr(shard, field) for shard in shards]) for field in "xy")
    started = time.perf_counter()
    try:
        labels = _METHODS[method](x.reshape(len(x), -1), config)
    except ValueError as error:
        raise BenchError(f"central {method}: {error}") from error
    seconds = time.perf_counter() - started
    table = np.zeros((config.run.clusters, data.num_classes), np.int64)
    np.add.at(table, (labels, y), 1)
    scores = Diagnostics.of({**partition_scores(table), "classes": data.num_classes, "confusion": table.tolist()})
    outcome = Outcome(
        strategy=f"central {method}",
        dataset=config.data.dataset,
        seed=config.seed,
        seconds_total=seconds,
        seconds_training=seconds,
        diagnostics=scores.last(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    outcome.write(folder)
    return outcome.values


def _km(x: Points, config: RunConfig) -> Labels:
    return k_means_labels(x, config.run.clusters, np.random.default_rng(config.seed))


def _fcm(x: Points, config: RunConfig) -> Labels:
    rng = np.random.default_rng(config.seed)
    return _nearest(x, fuzzy_c_means(x, config.run.clusters, rng, fuzzifier=FUZZIFIER))


def _dcn(x: Points, config: RunConfig) -> Labels:
    options = config.options
    if not isinstance(options, PPFCGANSettings):
        raise BenchError("central dcn requires the settings of ppfc-gan: set strategy to ppfc-gan")
    network = DCN(
        config.run.clusters,
        options.pretrain_epochs,
        options.joint_epochs,
        noise=options.dcn_noise,
        restarts=options.dcn_restarts,
        precision=config.training.precision,
        seed=config.seed or 0,
        device=config.training.device,
    )
    return network.fit(x).label(x)


def _nearest(x: Points, centroids: npt.NDArray[np.float64]) -> Labels:
    parts = np.array_split(x, -(-len(x) // _CHUNK))
    return np.concatenate([cdist(chunk, centroids).argmin(axis=1) for chunk in parts])


_METHODS: dict[str, Callable[[Points, RunConfig], Labels]] = {"km": _km, "fcm": _fcm, "dcn": _dcn}
