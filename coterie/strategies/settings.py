"""Settings of training and aggregation, common to all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.bounds import COUNT, DEVICES, GPU_PRECISIONS, LEARNING_RATE, LOCAL_EPOCHS, REBALANCE_TRAIN, SIZE
from coterie.models import FEATURES, MODELS
from coterie.rounds import AGGREGATORS
from coterie.settings import Settings, setting


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Network and local training."""

    table: ClassVar[str] = "training"

    model: str = setting("mlp-32", "network", choices=sorted(MODELS), custom="model", client=True, tuned=True)
    features: str = setting(
        "none",
        "fixed layer in front of the network",
        choices=sorted(FEATURES),
        custom="features",
        client=True,
        tuned=True,
    )
    local_epochs: int = setting(
        4, "passes over a client's data in a round", within=LOCAL_EPOCHS, client=True, tuned=True
    )
    batch_size: int = setting(7, "examples in a client's mini-batch", within=COUNT, client=True, tuned=True)
    lr: float = setting(0.2, "step size of a client's SGD", within=LEARNING_RATE, client=True, tuned=True)
    lr_decay: float = setting(1.0, "factor of lr from round to round", above=0, at_most=1, client=True, tuned=True)
    device: str = setting("auto", "device on which clients train", choices=DEVICES, client=True, place=True)
    gpu_precision: str = setting(
        "float32",
        "precision of matrix products and convolutions of local training on a GPU, except for DP-SGD",
        choices=GPU_PRECISIONS,
        client=True,
    )


@dataclass(frozen=True)
class AggregationSettings(Settings):
    """Client sampling and aggregation."""

    table: ClassVar[str] = "aggregation"

    sampling_rate: float = setting(
        0.2, "probability that a client participates in a round, q", above=0, at_most=1, tuned=True
    )
    server_lr: float | None = setting(
        None,
        "step size of the server, eta; auto: 1.5 under client-level privacy, where clipping shortens updates, else 1",
        within=LEARNING_RATE,
        tuned=True,
    )
    aggregator: str = setting(
        "mean",
        "aggregation of a cluster's updates; all but mean tolerate dishonest clients; at client level: mean",
        choices=AGGREGATORS,
        tuned=True,
    )
    byzantine_share: float = setting(
        0.2,
        "share of dishonest clients in a cluster that the aggregator tolerates",
        at_least=0,
        below=0.5,
        tuned=True,
        only=("aggregation.aggregator", ("trimmed-mean", "krum", "multi-krum")),
    )
    average_last: float = setting(
        0.0,
        "share of the rounds, at the end, whose released models are averaged; 0: no averaging",
        at_least=0,
        at_most=1,
        tuned=True,
    )
    rebalance_min: float | None = setting(
        None,
        "B, minimum expected members of a cluster in a round (RR-Cluster); 0: off; auto: 0, or with strategy "
        "= rr-cluster a third of the expected members",
        within=SIZE,
        tuned=True,
    )
    rebalance_train: str = setting(
        "own",
        "model that a client with a redrawn label trains: of its own cluster or of the assigned one",
        choices=REBALANCE_TRAIN,
        tuned=True,
    )
    reseed_every: int = setting(
        5, "rounds between two chances to re-seed models without clients; 0: never", at_least=0, tuned=True
    )
