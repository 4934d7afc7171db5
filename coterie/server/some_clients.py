"""Some clients of a simulation, ready to train outside the run: for baselines and for estimates of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from coterie import models as networks
from coterie.client.cohort import federation, torch_device
from coterie.client.layers import Vectors
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import Shard
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout


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
