"""Context of a request: clients, their data and state, the network, and the received models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import RecordDict
from torch import nn

from coterie import models as networks
from coterie.client.chains import is_image_chain, is_linear_chain
from coterie.client.identity import Client
from coterie.client.layers import Additive, Layers, Vectors
from coterie.client.penalties import Penalty
from coterie.client.scores import losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.state import ClientError, StateFile
from coterie.datasets import OWN_DATA, Federation, OwnFederation, Partition, Shard, facts, federate, own_federation
from coterie.privacy import RecordPlan
from coterie.wire import ClientConfig, Request, TrainRequest, read_request
from coterie.wire.messages import CONFIG, Layout
from coterie.wire.requests import parse_plans

LAST_LABEL, LABELS, OWN = "label", "labels", "own"
# Batch size of a full batch, which exceeds any number of records.
_FULL_BATCH = 2**31

Labels = npt.NDArray[np.int64]

_BUDGET_MISMATCH = (
    "this client has its own budget, which requires record-level privacy: request rejected (set privacy-unit = "
    "record, or remove epsilon from its node configuration)"
)


@dataclass(frozen=True)
class Task:
    """A client's task, derived from the configuration and the request of a message.

    Attributes:
        federation: the data of all clients; of clients with their own data, only theirs.
        model_spec: name of the network, shape of an example, number of classes.
        additive: whether the outputs of a global and a cluster's network are added.
        training: hyper-parameters of local training.
        round: number of the round.
        seed: of a reproducible run.
        redraw: (k * k,) matrix by which labels are redrawn; empty: none.
        trained_cluster: the model that a client trains: of the redrawn cluster ("assigned") or the chosen one ("own").
        assignment_rule: "loss" chooses the cluster with the smallest loss; "nearest" is FeSEM's nearest centre.
        clip: FeSEM's bound on the distance that a client's model may move; inf without privacy.
        folder: state folder of simulated clients.
        cluster: the cluster of the received model if the server assigned it; None: the client chooses.
        first: whether this is round 1 with a batch size for that round.
        plans: record-level plans, assigned to clients 0, 1, ... cyclically; empty: no record-level privacy.
        choose: whether a client at record level chooses by loss, as its plan specifies.
        loss_bound: L, bound of a record's loss if losses are released; None: they are not.
        initial_own: (D - d,) initial personal layers.
    """

    federation: Federation | OwnFederation
    model_spec: tuple[str, tuple[int, ...], int]
    additive: bool
    training: LocalTrainingConfig
    round: int
    seed: int | None
    redraw: tuple[float, ...]
    trained_cluster: str
    assignment_rule: str
    clip: float
    folder: str | None
    cluster: int | None
    first: bool
    plans: tuple[RecordPlan, ...]
    choose: bool
    loss_bound: float | None
    initial_own: Callable[[Layers], Vectors]

    @classmethod
    def of(cls, config: ClientConfig, request: Request, clients: Sequence[Client] = ()) -> Task:
        """Build the task of a request for these clients; data and network are cached per process."""
        data = _federation(config, clients)
        local = config.training
        device = torch_device(local.device)
        model_spec = (local.model, data.input_shape, data.num_classes)
        plans = _plans(request.record_plans)
        terms = request if isinstance(request, TrainRequest) else TrainRequest()
        batch = _FULL_BATCH if terms.first_batch and not plans else local.batch_size
        return cls(
            federation=data,
            model_spec=model_spec,
            additive=request.additive,
            training=LocalTrainingConfig(
                local.local_epochs,
                batch,
                local.lr,
                device,
                Penalty.of(terms),
                local.gpu_precision if device == "cuda" else "float32",
            ),
            round=request.round,
            seed=config.seed,
            redraw=terms.redraw or (),
            trained_cluster=terms.rebalance_train or "own",
            assignment_rule=request.assign or "loss",
            clip=np.inf if terms.clip is None else terms.clip,
            folder=config.clients_dir,
            cluster=request.cluster,
            first=terms.first_batch,
            plans=plans,
            choose=terms.choose,
            loss_bound=config.loss_bound,
            initial_own=lambda layers: _initial_own(layers, *model_spec),
        )

    @property
    def network(self) -> nn.Module:
        """The configured network; its parameters are not used."""
        return _network(*self.model_spec, self.additive)

    @property
    def batched(self) -> bool:
        """Whether training all clients in one batch is faster than one after the other."""
        name, shape, _ = self.model_spec
        known = name in networks.MODELS and networks.MODELS[name].batched
        chain = is_linear_chain(self.network, len(shape)) or is_image_chain(self.network, len(shape))
        return known or chain or self.training.device != "cpu"

    def plan(self, client_id: int) -> RecordPlan:
        """Return the client's record-level plan."""
        return self.plans[client_id % len(self.plans)]

    def shard(self, client: Client) -> Shard:
        """The client's data. At record level a simulated client has no more records than its plan states.

        A deployed client, and one with its own data, uses all records: truncation would replace a removed record by
        another one.
        """
        shard = self.federation.shard(client.client_id)
        cut = self.plans and client.folder is None and isinstance(self.federation, Federation)
        most = self.plan(client.client_id).num_examples if cut else len(shard.y)
        return shard if len(shard.y) <= most else replace(shard, x=shard.x[:most], y=shard.y[:most])

    def rng(self, client_id: int) -> np.random.Generator:
        """Return the generator of the client in this round, independent of all other clients."""
        return np.random.default_rng(None if self.seed is None else [self.seed, self.round, client_id])


def federation(config: Mapping[str, Any], clients: Sequence[Client] = ()) -> Federation | OwnFederation:
    """Load the clients' data of a configuration; cached between calls.

    Args:
        config: configuration of the run; its data set is partitioned unless clients have their own data.
        clients: clients whose own data, if any, are read with the shape and classes of the run.

    Raises:
        DataError: the data are not available.
    """
    return _federation(ClientConfig.from_record(config), clients)


def _federation(config: ClientConfig, clients: Sequence[Client]) -> Federation | OwnFederation:
    spec = config.data
    transform, folder = networks.features(config.training.features), spec.data_dir or None
    own = {client.client_id: client.data for client in clients if client.data}
    if own or spec.dataset == OWN_DATA:
        known = facts(spec.dataset, spec.input_shape, spec.num_classes, folder, spec.table_schema)
        if own:
            deployed = {client.client_id: client.declared for client in clients if client.deployed}
            return OwnFederation(own, known, transform, deployed)
        return own_federation(folder or os.environ.get("COTERIE_DATA"), spec.clients, known, transform)
    partition = Partition(**{name: getattr(spec, name) for name in Partition.declared()})
    return federate(spec.dataset, partition, seed=config.partition_seed, data_dir=folder, transform=transform)


_plans = lru_cache(maxsize=4)(parse_plans)


@lru_cache(maxsize=4)
def _network(name: str, input_shape: tuple[int, ...], num_classes: int, additive: bool) -> nn.Module:
    if additive:
        return Additive(*(networks.build(name, input_shape, num_classes) for _ in range(2)))
    return networks.build(name, input_shape, num_classes)


@lru_cache(maxsize=4)
def _initial_own(layers: Layers, name: str, input_shape: tuple[int, ...], num_classes: int) -> Vectors:
    """Return the (D - d,) initial personal layers, equal for all clients and public."""
    return layers.own.flatten(networks.initialise(name, input_shape, num_classes, 0))


def torch_device(name: str) -> str:
    """Return the torch device of the setting `device`."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def read_message(message_type: str, content: RecordDict) -> tuple[ClientConfig, Request, Vectors, Layout]:
    """Parse a message: configuration of the run, request, (k, d) models, and their layout.

    Raises:
        RequestError: a field is missing, has another type, or is out of bounds; the penalty is unknown; or the models
            are not 0 to k - 1.
    """
    config = ClientConfig.from_record(content[CONFIG])
    request, models, layout = read_request(message_type, content, finite=False)
    if isinstance(request, TrainRequest):
        Penalty.of(request)
    return config, request, models, layout


@dataclass(frozen=True)
class Cohort:
    """The clients of one message and its content. Data are loaded on first use."""

    request: Request
    task: Task
    models: Vectors
    layout: Layout
    clients: Sequence[Client]

    @classmethod
    def of(cls, message_type: str, content: RecordDict, clients: Sequence[Client]) -> Cohort:
        """Read a message.

        Raises:
            RequestError: a field is missing or out of bounds.
        """
        config, request, models, layout = read_message(message_type, content)
        return cls(request, Task.of(config, request, clients), models, layout, clients)

    @cached_property
    def shards(self) -> Sequence[Shard]:
        """The data of every client."""
        return [self.shard(i) for i in range(len(self.clients))]

    def shard(self, i: int) -> Shard:
        """One client's data.

        Raises:
            DataError: they cannot be read.
        """
        return self.task.shard(self.clients[i])

    @cached_property
    def layers(self) -> Layers:
        """How the received models fit the configured network."""
        return Layers.of(self.task.network, self.layout)

    @property
    def budget_errors(self) -> list[ClientError]:
        """One error per client if a client has a budget and the request has no record-level plan; otherwise empty."""
        paid = self.task.plans or not any(client.budget for client in self.clients)
        return [] if paid else [ClientError(_BUDGET_MISMATCH)] * len(self.clients)

    @property
    def is_stateful(self) -> bool:
        """Whether clients keep state between rounds."""
        return bool(self.layers.own.names) or self.task.assignment_rule == "nearest"

    @cached_property
    def folders(self) -> list[Path | None]:
        """The state folder of each client."""
        named = [self.task.folder if client.folder is None else client.folder for client in self.clients]
        return [Path(folder) if folder else None for folder in named]

    @cached_property
    def state_files(self) -> list[StateFile]:
        """The state file of each client."""
        return [StateFile(folder, c.client_id) for folder, c in zip(self.folders, self.clients, strict=True)]

    @cached_property
    def states(self) -> list[dict[str, np.ndarray]]:
        """The state of each client; empty if the method needs none."""
        return [file.read() for file in self.state_files] if self.is_stateful else [{} for _ in self.clients]

    @property
    def own(self) -> Vectors:
        """(n, D - d) personal layers of each client."""
        if not self.layers.own.names:
            return np.zeros((len(self.clients), 0), np.float32)
        initial = self.task.initial_own(self.layers)
        return np.stack([state.get(OWN, initial) for state in self.states])

    def choose(self) -> Labels:
        """Return the (n,) index of the model with the smallest loss on each client's training data."""
        if len(self.models) == 1:
            return np.zeros(len(self.clients), np.int64)
        return np.asarray(self.losses.argmin(axis=1))

    @cached_property
    def losses(self) -> npt.NDArray[np.float64]:
        """(n, k) mean loss of every model on each client's training data."""
        return losses(self.task.network, self.layers.whole, self.models, self.shards, self.task.training.device)

    def labels(self, chosen: Labels) -> Labels:
        """Return the clusters of the received models with these indices."""
        return chosen if self.task.cluster is None else np.full(len(chosen), self.task.cluster, np.int64)

    def last_labels(self, otherwise: Labels) -> Labels:
        """Return the (n,) last label of each client, or ``otherwise`` if it has none."""
        known = [int(state[LAST_LABEL][0]) if LAST_LABEL in state else -1 for state in self.states]
        return np.asarray(np.where((0 <= np.array(known)) & (np.array(known) < len(self.models)), known, otherwise))
