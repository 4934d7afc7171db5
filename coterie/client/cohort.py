"""The clients of a message and its content: their data and state, the network, and the received models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import RecordDict
from torch import nn

from coterie import models as networks
from coterie.client.identity import Client
from coterie.client.layers import Additive, Layers, Vectors
from coterie.client.penalties import Penalty
from coterie.client.scores import losses
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.state import ClientError, KeptState, StateFile
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import OWN_DATA, Federation, OwnFederation, Partition, Shard, federate, own_federation
from coterie.datasets.settings import DataSettings
from coterie.models.settings import NOT_AT_RECORD_LEVEL
from coterie.privacy import RecordPlan
from coterie.tasks import Task, TaskError
from coterie.wire import ClientConfig, EvaluateRequest, Request, RequestError, TrainRequest, read_request
from coterie.wire.messages import CHARGED_REQUESTS, CONFIG, EVALUATE, Layout
from coterie.wire.requests import parse_plans

LAST_LABEL, LABELS, OWN = "label", "labels", "own"
# Batch size of a full batch, which exceeds any number of records.
_FULL_BATCH = 2**31

Labels = npt.NDArray[np.int64]
#: Round, client id, and number of the charge.
StreamKey: TypeAlias = tuple[int, int, int]
_Reply = TypeVar("_Reply")


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
    folder = folder and os.path.abspath(os.path.expanduser(folder))  # or a run reads its data twice
    paths = {client.client_id: client.data for client in clients if client.data}
    if paths or spec.dataset == OWN_DATA:
        data_facts = spec.facts(folder)
        if paths:
            deployed = {client.client_id: client.declared for client in clients if client.deployed}
            return OwnFederation(paths, data_facts, transform, deployed)
        return own_federation(folder or os.environ.get("COTERIE_DATA"), spec.clients, data_facts, transform)
    partition = _partition(spec)
    return federate(spec.dataset, partition, seed=config.partition_seed, data_dir=folder, transform=transform)


@lru_cache(maxsize=4)
def _partition(spec: DataSettings) -> Partition:
    return Partition(**{name: getattr(spec, name) for name in Partition.declared()})


_plans = lru_cache(maxsize=4)(parse_plans)


@lru_cache(maxsize=4)
def _network(
    name: networks.NetworkSpec, input_shape: tuple[int, ...], num_classes: int, additive: bool, constants: str | None
) -> nn.Module:
    if constants is not None:
        built = networks.constants_of(name, input_shape, num_classes)
        if networks.fingerprint(built) != constants:
            raise networks.ModelError(
                f"model '{name}' has other frozen parameters or buffers here than at the server ({', '.join(built)}): "
                "use the server's version of its code, of its files, and of PyTorch, or a run with a file of them "
                "(pretrained)"
            )
    if additive:
        return Additive(*(networks.build(name, input_shape, num_classes) for _ in range(2)))
    return networks.build(name, input_shape, num_classes)


@lru_cache(maxsize=4)
def initial_own(layers: Layers, name: networks.NetworkSpec, input_shape: tuple[int, ...], num_classes: int) -> Vectors:
    """Return the (D - d,) initial personal layers, equal for all clients and public."""
    return layers.own.flatten(networks.initialise(name, input_shape, num_classes, 0))


def torch_device(name: str) -> str:
    """Return the torch device of the setting `device`."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


#: The first records of shards: the same object for each message, so that a GPU keeps them.
_FIRST: WeakKeyDictionary[Shard, Shard] = WeakKeyDictionary()


def _first(shard: Shard, count: int) -> Shard:
    if shard not in _FIRST or len(_FIRST[shard].y) != count:
        _FIRST[shard] = replace(shard, x=shard.x[:count], y=shard.y[:count])
    return _FIRST[shard]


@dataclass(frozen=True)
class Cohort:  # large: what handlers read of a message, each computed once
    """The clients of one message, and its content. Data and network are loaded on first use.

    Attributes:
        config: the run's configuration.
        request: of the server.
        plans: record-level plans, assigned to clients 0, 1, ... cyclically; empty: no record-level privacy.
        models: (k, d) parameters of the received models.
        layout: of these parameters.
        clients: the n clients that received the message.
        hyper_parameters: of local training, whatever the task.
        keys: keys of the random streams of clients that were charged for the reply, by client id.
    """

    config: ClientConfig
    request: Request
    plans: tuple[RecordPlan, ...]
    models: Vectors
    layout: Layout
    clients: Sequence[Client]
    hyper_parameters: LocalTrainingConfig
    keys: dict[int, StreamKey] = field(default_factory=dict)

    @classmethod
    def of(cls, message_type: str, content: RecordDict, clients: Sequence[Client], *, finite: bool = False) -> Cohort:
        """Parse a message. Only simulated clients read files where it says.

        Args:
            message_type: a key of :data:`~coterie.wire.requests.REQUESTS`.
            content: the message.
            clients: the clients that received it.
            finite: whether models with NaN or Inf are rejected.

        Raises:
            RequestError: a field is missing, has another type, or is out of bounds; the penalty is unknown; or the
                models are not 0 to k - 1.
        """
        request, models, layout = read_request(message_type, content, finite=finite)
        own_files = {"data-dir": "", "pretrained": clients[0].pretrained or ""} if clients[0].deployed else {}
        record = {**content[CONFIG], **own_files}
        config, plans = ClientConfig.from_record(record), _plans(request.record_plans)
        local, options = config.training, request if isinstance(request, TrainRequest) else TrainRequest()
        device = torch_device(local.device)
        batch_size = _FULL_BATCH if options.first_batch and not plans else local.batch_size
        precision = local.precision if device == "cuda" else "float32"
        for kind in local.plugins if plans else ():
            raise RequestError(f"{kind}: {NOT_AT_RECORD_LEVEL}")
        if "trainer" in local.plugins and options.penalty is not None:
            raise RequestError("trainer: another training loop than Coterie's knows nothing of a penalty")
        training = LocalTrainingConfig(
            local.local_epochs, batch_size, local.lr, device, Penalty.of(options), precision, TrainingPlugins.of(local)
        )
        return cls(config, request, plans, models, layout, clients, training)

    @property
    def train_request(self) -> TrainRequest:
        """The request, if it is one to train; otherwise one without options."""
        return self.request if isinstance(self.request, TrainRequest) else TrainRequest()

    @property
    def is_charged(self) -> bool:
        """Whether clients charge the reply at record level."""
        return bool(self.plans) and self.request.message_type in (*CHARGED_REQUESTS, EVALUATE)

    @cached_property
    def federation(self) -> Federation | OwnFederation:
        """The data of all clients; of clients with their own data, only theirs."""
        return _federation(self.config, self.clients)

    @cached_property
    def model_spec(self) -> tuple[networks.NetworkSpec, tuple[int, ...], int]:
        """The network, shape of an example, number of outputs."""
        return self.config.training.network, self.federation.input_shape, self.task.num_outputs

    @cached_property
    def task(self) -> Task:
        """What the run predicts, with the weights of its loss.

        Raises:
            RequestError: the weights do not fit the data.
        """
        try:
            return self.federation.task.weighted(self.config.training.class_weights)
        except TaskError as error:
            raise RequestError(str(error)) from None

    @cached_property
    def local_training(self) -> LocalTrainingConfig:
        """Hyper-parameters of local training."""
        return replace(self.hyper_parameters, task=self.task)

    @cached_property
    def network(self) -> nn.Module:
        """The configured network; its parameters are not used."""
        return _network(*self.model_spec, self.request.additive, self.config.constants)

    @cached_property
    def layers(self) -> Layers:
        """How the received models fit the configured network."""
        return Layers.of(self.network, self.layout)

    def plan(self, client_id: int) -> RecordPlan:
        """Return the client's record-level plan."""
        return self.plans[client_id % len(self.plans)]

    @cached_property
    def shards(self) -> Sequence[Shard]:
        """The data of every client."""
        return [self.shard(client) for client in self.clients]

    def shard(self, client: Client) -> Shard:
        """The client's data. At record level a simulated client has no more records than its plan states.

        A deployed client, and one with its own data, uses all records: truncation would replace a removed record by
        another one.

        Raises:
            DataError: they cannot be read.
        """
        shard = self.federation.shard(client.client_id)
        cut = self.plans and client.folder is None and isinstance(self.federation, Federation)
        most = self.plan(client.client_id).num_examples if cut else len(shard.y)
        return shard if len(shard.y) <= most else _first(shard, most)

    def rngs(self) -> list[np.random.Generator]:
        """Return a generator for each client in this round, independent of all other clients."""
        seed, number = self.config.seed, self.request.round
        keys = [None if seed is None else [seed, number, client.client_id] for client in self.clients]
        return [np.random.default_rng(key) for key in keys]

    @property
    def refusals(self) -> dict[int, ClientError]:
        """Errors of clients whose guarantee excludes the request, by client id."""
        message_type, priced = self.request.message_type, bool(self.plans)
        return {
            client.client_id: error
            for client in self.clients
            if (error := client.refusal(message_type, priced=priced)) is not None
        }

    @property
    def errors(self) -> dict[int, ClientError]:
        """Errors of clients that cannot reply, by client id.

        Their guarantee excludes the request; or they are simulated, and their own data have no training records. A
        deployed client, and every client at record level, replies as if it had some: the server must not learn that.
        """
        errors = self.refusals
        simulated = [client for client in self.clients if client.folder is None]
        if self.plans or not simulated or not isinstance(self.federation, OwnFederation):
            return errors
        empty = [client.client_id for client in simulated if not len(self.shard(client).y)]
        return errors | {number: ClientError(f"client {number} has no training records", "no-data") for number in empty}

    def replies(
        self, handler: Callable[[Cohort], Sequence[_Reply]], errors: Mapping[int, ClientError] | None = None
    ) -> list[_Reply | ClientError]:
        """Return the replies of clients without an error, by a handler, and the errors of the others.

        Args:
            handler: returns the replies of a cohort's clients.
            errors: by client id; None: those of :attr:`errors`.
        """
        errors = self.errors if errors is None else errors
        if not errors:
            return list(handler(self))
        others = [client for client in self.clients if client.client_id not in errors]
        made = iter(handler(replace(self, clients=others)) if others else ())
        return [errors.get(client.client_id) or next(made) for client in self.clients]

    @property
    def is_stateful(self) -> bool:
        """Whether clients keep state between rounds."""
        return bool(self.layers.own.names) or self.request.assign == "nearest"

    @cached_property
    def folders(self) -> list[Path | None]:
        """The state folder of each client."""
        named = [self.config.clients_dir if client.folder is None else client.folder for client in self.clients]
        return [Path(folder) if folder else None for folder in named]

    @cached_property
    def kept(self) -> list[KeptState | StateFile]:
        """Where the state of each client is kept."""
        clients = zip(self.folders, self.clients, strict=True)
        return [client.state or StateFile(folder, client.client_id) for folder, client in clients]

    @cached_property
    def states(self) -> list[dict[str, np.ndarray]]:
        """The state of each client; empty if the method needs none."""
        return [kept.read() for kept in self.kept] if self.is_stateful else [{} for _ in self.clients]

    @property
    def own(self) -> Vectors:
        """(n, D - d) personal layers of each client."""
        if not self.layers.own.names:
            return np.zeros((len(self.clients), 0), np.float32)
        initial = initial_own(self.layers, *self.model_spec)
        return np.stack([state.get(OWN, initial) for state in self.states])

    def initial(self) -> Vectors:
        """Return the (D,) public parameters from which a client trains alone."""
        return self.layers.whole.flatten(networks.initialise(*self.model_spec, 0))

    def choose(self) -> Labels:
        """Return the (n,) index of the model with the lowest loss on each client's training data."""
        if len(self.models) == 1:
            return np.zeros(len(self.clients), np.int64)
        return np.asarray(self.losses.argmin(axis=1))

    @cached_property
    def losses(self) -> npt.NDArray[np.float64]:
        """(n, k) mean loss of every model on each client's training data."""
        local = self.local_training
        return losses(self.network, self.layers.whole, self.models, self.shards, local.device, local.loss)

    @property
    def samples_tests(self) -> bool:
        """Whether the server requests accuracies on a sample of large test sets."""
        return isinstance(self.request, EvaluateRequest) and self.request.sampled

    @property
    def reports_losses(self) -> bool:
        """Whether to report training losses: always, except on a sample if no client chooses its model by them."""
        return not self.samples_tests or (len(self.models) > 1 and self.request.assign != "nearest")

    def labels(self, chosen: Labels) -> Labels:
        """Return the clusters of the received models with these indices."""
        return chosen if self.request.cluster is None else np.full(len(chosen), self.request.cluster, np.int64)

    def last_labels(self, otherwise: Labels) -> Labels:
        """Return the (n,) last label of each client, or ``otherwise`` if it has none."""
        last = np.array([int(state[LAST_LABEL][0]) if LAST_LABEL in state else -1 for state in self.states])
        return np.asarray(np.where((0 <= last) & (last < len(self.models)), last, otherwise))
