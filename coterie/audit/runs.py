"""Attacks on whole runs with the actual server loop, local engine and clients.

In one world client 0 never replies; in the other it sends an update of norm 10^6 whenever it is sampled. The adversary
knows everything else and observes the models of every round. It sums the log-likelihood ratios of a Poisson-subsampled
Gaussian over rounds, which is the optimal attack on the claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from logging import WARNING, getLogger
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.audit.findings import BoolArray, Finding, FloatArray, binomial_test, dominance_test, variance_test
from coterie.datasets import Source
from coterie.datasets.settings import DataSettings
from coterie.engine.in_process import LocalGrid
from coterie.models.settings import TrainingSettings
from coterie.privacy import Joint, Ledger, Streams, composed
from coterie.privacy.accountants import Accountant
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.strategies import IFCA, ClusteredStrategy, FedCAM
from coterie.strategies.method import Models
from coterie.wire import ClientConfig
from coterie.wire.messages import IDENTITY, REPLY, UPDATE, Layout, pack_models, pack_update

_CLIENTS, _CLUSTERS, _RATE, _ROUNDS, _NOISE, _CLIP = 2, 2, 0.4, 3, 0.25, 0.3
_PARAMETERS = ("output.weight", "output.bias"), ((2, 2), (2,))
_DATASET = "coterie.audit.runs:vectors"
_CONFIG = ClientConfig(
    data=DataSettings(dataset=_DATASET, clients=_CLIENTS, groups="1", shift="none", samples_per_client=5),
    training=TrainingSettings(model="linear", local_epochs=1, batch_size=5, lr=0.2, device="cpu"),
    seed=0,
).to_record()


def vectors() -> Source:
    """Return examples whose second feature is zero, so that no honest client changes its weights."""
    x, y = np.tile(np.array([[1.0, 0.0]], np.float32), (20, 1)), np.arange(20) % 2
    return Source("vectors", x, y, x[:2], y[:2], 2, reuse=True)


def audit_runs(seed: int, runs: int) -> list[Finding]:
    """Audit runs of IFCA and of FedCAM, whose clusters share a block."""
    with quiet():
        return [*_whole_runs(seed, runs), *divisors(seed)]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log messages of hundreds of runs and clients."""
    logger = getLogger("flwr")
    level = logger.level
    logger.setLevel(WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _whole_runs(seed: int, runs: int) -> list[Finding]:
    single = Layout(*_PARAMETERS)
    both = Layout(tuple(f"{block}.{n}" for block in ("global", "cluster") for n in single.names), single.shapes * 2)
    findings = []
    for index, (method, layout, divisor) in enumerate(
        ((IFCA, single, _RATE * _CLIENTS / _CLUSTERS), (FedCAM, both, _RATE * _CLIENTS))
    ):
        worlds, empty = [], 0
        for world in (False, True):
            scores = np.zeros((runs, 1))
            for number in range(runs):
                grid = _Grid(_CLIENTS, layout, replies=world)
                released = _released(method, layout, grid, Streams(4 * (runs * seed + number) + 2 * index + world))
                scores[number] = _likelihood_ratio(released, divisor)
                empty += grid.empty
            worlds.append(scores)
        plan = _plan(_CLIENTS, _CLUSTERS, _RATE, _NOISE)
        name = f"additional client in a complete run ({method.name})"
        findings.append(dominance_test("joint", name, {plan.event(): _ROUNDS}, (worlds[0], worlds[1])))
        empty_name = f"empty cohort in a complete run ({method.name})"
        findings.append(binomial_test("joint", empty_name, (1 - _RATE) ** _CLIENTS, empty, 2 * runs * _ROUNDS))
    return findings


def _released(method: type[ClusteredStrategy], layout: Layout, grid: LocalGrid, streams: Streams) -> list[Models]:
    """Return the models of one run after every round, including the initial ones."""
    plan = _plan(_CLIENTS, _CLUSTERS, _RATE, _NOISE, rounds=_ROUNDS)
    start = np.zeros((_CLUSTERS, layout.size), np.float32)
    recorder = _Recorder([start])
    strategy = method(
        plan,
        ledger=_RenyiLedger(plan.delta),
        streams=streams,
        evaluate_every=0,
        registration_timeout=0.0,
        recorder=recorder,
    )
    strategy.start(grid, pack_models(start, layout), _ROUNDS, train_config=ConfigRecord(_CONFIG))
    return recorder.models


def _likelihood_ratio(models: Sequence[Models], divisor: float) -> float:
    """Return the log-likelihood ratio over all rounds for client 0's update in its own coordinate."""
    deviation = _plan(_CLIENTS, _CLUSTERS, _RATE, _NOISE).noise_multiplier_updates
    moved = np.diff(np.array([round_models[0, 1] for round_models in models], np.float64)) * divisor / _CLIP
    ratios = np.log1p(_RATE * np.expm1((moved - 0.5) / deviation**2))
    return float(ratios.sum())


def divisors(seed: int, size: int = 5000, rounds: int = 16) -> list[Finding]:
    """F-tests on the noise in FedCAM's shared block and in a cluster block, with zero updates.

    A divisor that depends on the cohort or the replies reveals whether client 0 was sampled or replied.
    """
    (silent, _), (replying, sampled) = (_noises(seed, size, rounds, replies) for replies in (False, True))
    return [
        variance_test("joint", "noise variance, client sampled or not", (replying[~sampled], replying[sampled])),
        variance_test("joint", "noise variance, client replies or not", (silent, replying)),
    ]


def _noises(seed: int, size: int, rounds: int, replies: bool) -> tuple[FloatArray, BoolArray]:
    """Return the noise (rounds, 2 size) of a run in units of public divisors, and whether client 0 was sampled."""
    clients = num_clusters = 2
    layout = Layout(("global.w", "cluster.w"), ((size,), (size,)))
    plan = _plan(clients, num_clusters, rate=0.5, noise=1.0, rounds=rounds)
    start = np.zeros((num_clusters, layout.size), np.float32)
    grid, recorder = _Idle(clients, layout, replies), _Recorder([start])
    strategy = FedCAM(
        plan,
        ledger=_RenyiLedger(plan.delta),
        streams=Streams(2 * seed + replies),
        evaluate_every=0,
        registration_timeout=0.0,
        recorder=recorder,
    )
    strategy.start(grid, pack_models(start, layout), rounds)
    moved = np.diff(np.array([round_models[0] for round_models in recorder.models], np.float64), axis=0)
    moved[:, :size] *= num_clusters  # the shared block is divided by qM, a cluster's by qM / k
    return moved, np.isin(np.arange(1, rounds + 1), grid.rounds)


def _plan(clients: int, num_clusters: int, rate: float, noise: float, rounds: int = _ROUNDS) -> Joint:
    return Joint(
        clients=clients,
        num_clusters=num_clusters,
        sampling_rate=rate,
        rounds=rounds,
        clip_norm=_CLIP,
        epsilon=math.inf,
        delta=1e-5,
        noise_multiplier=noise,
        identifier_share=0.04,
        rebalance_min=rate * clients / num_clusters,
    )


class _RenyiLedger(Ledger):
    """A ledger with only the Rényi accountant: accounting is not under attack, and PLD would dominate the run time."""

    def __init__(self, delta: float) -> None:
        super().__init__(delta, accountant="rdp")

    @cached_property
    def _live(self) -> dict[str, Accountant]:
        return {"rdp": composed(self.events, "rdp")}


class _Recorder(Recorder):
    def __init__(self, models: list[Models]) -> None:
        self.models = models

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        self.models.append(state.models)


class _Grid(LocalGrid):
    """A local engine in which client 0 is adversarial: it never replies, or sends an update of norm 10^6.

    Args:
        clients: number of clients, M.
        layout: layout of an update.
        replies: whether client 0 replies.
    """

    def __init__(self, clients: int, layout: Layout, replies: bool) -> None:
        super().__init__(clients)
        self._layout, self._responds = layout, replies
        self.empty = 0

    def _answers(self, questions: Sequence[Message]) -> Iterator[Message]:
        if any(message.metadata.message_type == IDENTITY for message in questions):
            yield from super()._answers(questions)
            return
        self.empty += not questions
        yield from super()._answers([message for message in questions if message.metadata.dst_node_id != 1])
        mine = [message for message in questions if message.metadata.dst_node_id == 1]
        update = np.zeros(self._layout.size, np.float32)
        update[1] = 1e6  # of the weight of the second feature, which is zero in all examples
        yield from (self._sent(message, update) for message in mine if self._responds)

    def _sent(self, message: Message, update: Models) -> Message:
        client, number = message.metadata.dst_node_id - 1, int(message.metadata.group_id)
        reply = ConfigRecord({"client-id": client, "round": number, "label": 0, "redrawn-label": 0})
        return Message(RecordDict({UPDATE: pack_update(update, self._layout), REPLY: reply}), reply_to=message)


class _Idle(_Grid):
    """Clients that send zero updates; client 0 replies or not.

    Attributes:
        rounds: rounds in which client 0 was sampled.
    """

    def __init__(self, clients: int, layout: Layout, replies: bool) -> None:
        super().__init__(clients, layout, replies)
        self.rounds: list[int] = []

    def _answers(self, questions: Sequence[Message]) -> Iterator[Message]:
        for message in questions:
            mine = message.metadata.dst_node_id == 1
            if message.metadata.message_type == IDENTITY:
                yield from super()._answers([message])
                continue
            if mine:
                self.rounds.append(int(message.metadata.group_id))
            if self._responds or not mine:
                yield self._sent(message, np.zeros(self._layout.size, np.float32))
