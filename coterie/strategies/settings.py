"""Settings of aggregation, common to all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.fields import LEARNING_RATE, REBALANCE_TRAIN, SIZE
from coterie.fields.settings import Settings, accepted_by, setting
from coterie.rounds.aggregation import Aggregator
from coterie.strategies.server_optimizer import SERVER_OPTIMIZERS


@dataclass(frozen=True)
class AggregationSettings(Settings):
    """Client sampling and aggregation."""

    table: ClassVar[str] = "aggregation"

    sampling_rate: float | None = setting(
        None,
        "probability that a client participates in a round, q; auto: 1 where that is affordable under client-level "
        "privacy, which then needs no secret participation: with mechanism = joint, all clients or 5000; else 0.2",
        above=0,
        at_most=1,
        tuned=True,
    )
    server_lr: float | None = setting(
        None,
        "step size of the server, eta; auto: from noise, members of a cluster and clip-norm, or 1 without privacy",
        within=LEARNING_RATE,
        tuned=True,
    )
    server_optimizer: str = setting(
        "sgd",
        "how the server moves a model by the mean of updates: by itself, by its moving average, or by Adam's steps",
        choices=SERVER_OPTIMIZERS,
        tuned=True,
    )
    aggregator: str = setting(
        "mean",
        "aggregation of a cluster's updates; all but mean tolerate dishonest clients, 0.2 of a cluster, or SHARE; at "
        "client level: mean",
        allowed="mean, median, trimmed-mean, krum, multi-krum, or one of the last three with :SHARE below 0.5",
        check=accepted_by(Aggregator.parse),
        tuned=True,
    )
    average_last: float | None = setting(
        None,
        "share of the rounds, at the end, whose released models are averaged; 0: no averaging; auto: 0.2 under "
        "client-level privacy, else 0",
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
