"""Small federations, one or more for each strategy, in which one client's reply can be changed on its way.

Honest replies come from the real ClientApp handlers on toy data. A reply is a function of the request and the client,
so it is computed once and delivered again in every later run: thousands of runs differ in the changed reply alone.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict
from kit.hostile import Delivery

from coterie.engine.in_process import LocalGrid
from coterie.models import autoencoder
from coterie.privacy import Streams
from coterie.rounds import exchange as rounds_exchange
from coterie.rounds.evaluation import mean_of_clients
from coterie.rounds.recorder import Checkpoint, Recorder
from coterie.server import RunConfig
from coterie.server.metrics import summarise, summarise_records
from coterie.server.run import initial_models
from coterie.strategies import ClusteredStrategy, OneShot, loop
from coterie.wire import Summary
from coterie.wire.messages import pack_models, unpack_models

CLIENTS = 8
INTRODUCTION, TRAINING, EVALUATION = "identity_reply", "training", "evaluation"

_BASE = {
    "dataset": "kit.toys:pixels",
    "model": "linear",
    "shift": "label-shift",
    "clients": CLIENTS,
    "groups": "2",
    "samples-per-client": 5,
    "batch-size": 5,
    "local-epochs": 1,
    "lr": 0.2,
    "device": "cpu",
    "seed": 0,
    "rounds": 2,
    "sampling-rate": 1.0,
    "server-lr": 1.0,
    "reseed-every": 0,
    "evaluate": "diagnostic",
    "evaluate-every": 1,
    "registration-timeout": 0.0,
    "clusters": 2,
}
_NONE = {"privacy-unit": "none"}
_NOISE = {"noise-multiplier": 0.5, "epsilon": 1e9, "delta": 0.01, "accountant": "rdp"}
_CLIENT = {**_NOISE, "privacy-unit": "client", "clip-norm": 0.3, "divisor": "fixed"}
_RR_SLOT = {**_CLIENT, "mechanism": "rr-slot"}
_RECORD = {**_NOISE, "privacy-unit": "record", "clip-norm": 1.0, "first-batch-size": 5}
_ONE, _CHAIN = {"clusters": 1}, {"model": "kit.toys:chain", "clusters": 1}
_BLOBS = {
    "dataset": "kit.toys:blobs",
    "shift": "none",
    "groups": "1",
    "label-skew": "non-iid:0",
    "samples-per-client": 0,
    "rounds": 1,
    "clusters": 3,
    "batch-size": 4,
}
_GAN = {**_BLOBS, "pretrain-epochs": 1, "joint-epochs": 1, "dcn-restarts": 1}
_GAN_RECORD = {**_GAN, **_RECORD, "samples-per-client": 6, "first-batch-size": "auto", "synthetic-samples": 6}

#: Settings by name: the strategy, then what tells apart two federations of one strategy.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {**_NONE, **_ONE},
    "fedavg library metrics": {**_NONE, **_ONE},
    "fedavg joint": {**_CLIENT, **_ONE},
    "fedavg private evaluation": {**_CLIENT, **_ONE, "evaluate": "private", "evaluate-noise": 0.5},
    "fedavg rr-slot": {**_RR_SLOT, **_ONE},
    "fedavg record": {**_RECORD, **_ONE},
    "fedprox": {**_NONE, **_ONE},
    "fedprox joint": {**_CLIENT, **_ONE},
    "fedper": {**_NONE, **_CHAIN},
    "fedper joint": {**_CLIENT, **_CHAIN},
    "local": {**_NONE, **_CHAIN},
    "ifca": _NONE,
    "ifca rebalancing": {**_NONE, "rebalance-min": 2, "divisor": "released"},
    "ifca joint": {**_CLIENT, "rebalance-min": 2},
    "ifca rr-slot": _RR_SLOT,
    "rr-cluster": {**_NONE, "base": "fesem"},
    "fesem": _NONE,
    "fesem joint": _CLIENT,
    "fedcam": _NONE,
    "fedcam joint": {**_CLIENT, "rebalance-min": 2},
    "rc-dpfl": {**_NONE, "rounds": 3},
    "rc-dpfl record": {**_RECORD, "rounds": 3},
    "f-cdpfl": _NONE,
    "f-cdpfl record": _RECORD,
    "km-cdpfl": _NONE,
    "km-cdpfl record": _RECORD,
    "oracle": _NONE,
    "oracle record": _RECORD,
    "lcfl": {**_NONE, "models-per-message": 5},
    "lcfl warm-up": {**_NONE, "warm-up-rounds": 1, "landmarks": 3},
    "lcfl params": {**_NONE, "metric": "params"},
    "lcfl record": {**_RECORD, "loss-noise": 0.1},
    "cfl": {**_NONE, "clusters": 0, "first-split": 0},
    "cfl record": {**_RECORD, "clusters": 0, "first-split": 0},
    "ppfc-gan": {**_NONE, **_GAN},
    "ppfc-gan record": _GAN_RECORD,
    "kfed": {**_NONE, **_BLOBS},
    "ffcm": {**_NONE, **_BLOBS},
}
#: Widths of an autoencoder that trains in no time, in place of the paper's.
SMALL = (8, 6, 4)


@dataclass(frozen=True)
class Target:
    """The reply of one run that is changed.

    Attributes:
        round: number of the communication round.
        kind: of the request: an identity_reply, one of the training phases of the round, or its evaluation.
        place: which one of them.
        client: whose reply.
    """

    round: int
    kind: str
    place: int
    client: int


@dataclass
class Exchange:
    """What came of one run of one round.

    Attributes:
        question: the request whose reply was changed; None if there was none.
        honest: the honest reply to it.
        models: (k, d) that the round leaves.
        lines: of metrics.
        added: (client, update or points) of everything that entered a sum, phase by phase.
        asked: clients that were asked, phase by phase.
        reported: clients whose evaluations were aggregated, and what was read; None without exact scores.
        accuracy: released by a private evaluation.
        labelled: number of clients that are counted as having labelled their records.
        nodes: clients that may take part, and their nodes.
        dropped: reasons and their counts.
    """

    question: Message | None = None
    honest: Any = None
    models: Any = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    added: list[list[tuple[int, Any]]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    reported: dict[int, Any] | None = None
    accuracy: float | None = None
    labelled: int | None = None
    nodes: dict[int, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)


Change = Callable[[Message, Any], Sequence[Delivery]]


class Wire(LocalGrid):
    """Delivers honest replies, each computed once, but for the one that ``change`` replaces.

    A node whose identity_reply fails is asked again: it then gives what it gave first.
    """

    def __init__(self, computed: dict[Any, Any], target: Target | None, change: Change, exchange: Exchange) -> None:
        super().__init__(CLIENTS)
        self._computed, self._target, self._change, self._exchange = computed, target, change, exchange
        self._places = {INTRODUCTION: -1, TRAINING: -1, EVALUATION: -1}
        self.requests: list[tuple[str, Message]] = []
        self._delivered: Sequence[Delivery] | None = None

    def _answers(self, questions: Sequence[Message]) -> Any:
        digests: dict[int, str] = {}
        keys = []
        for message in questions:
            content, verb = message.content, message.metadata.message_type
            if id(content) not in digests:
                digests[id(content)] = _digest(content)
            keys.append((verb, digests[id(content)], message.metadata.dst_node_id))
        missing = [message for message, key in zip(questions, keys, strict=True) if key not in self._computed]
        for reply in super()._answers(missing):
            (key,) = [
                key
                for message, key in zip(questions, keys, strict=True)
                if message.metadata.message_id == reply.metadata.reply_to_message_id
            ]
            self._computed[key] = reply.content if reply.has_content() else reply.error
        kind = kind_of(questions[0].metadata.message_type) if questions else TRAINING
        self._places[kind] += 1
        for message, key in zip(questions, keys, strict=True):
            honest = self._computed[key]
            self.requests.append((kind, message))
            hit = self._target is not None and self._hits(kind, message)
            for delivery in self._changed(message, honest) if hit else [Delivery(honest)]:
                yield _reply(message, delivery)

    def _hits(self, kind: str, message: Message) -> bool:
        target = self._target
        assert target is not None
        if (kind, message.metadata.dst_node_id - 1) != (target.kind, target.client):
            return False
        again = kind == INTRODUCTION and self._delivered is not None
        return again or self._places[kind] == target.place

    def _changed(self, message: Message, honest: Any) -> Sequence[Delivery]:
        if self._delivered is None:
            self._exchange.question, self._exchange.honest = message, honest
            self._delivered = self._change(message, honest)
        return self._delivered


def kind_of(verb: str) -> str:
    """Of the request: what it is for."""
    return {"query.identity": INTRODUCTION, "evaluate": EVALUATION, "query.label": EVALUATION}.get(verb, TRAINING)


def _reply(message: Message, delivery: Delivery) -> Message:
    content = delivery.content
    reply = Message(content if isinstance(content, Error) else RecordDict(), reply_to=message)
    if not isinstance(content, Error):
        reply.__dict__["_content"] = content  # an object that was inflated passes none of Flower's checks
    if delivery.reply_to is not None:
        reply.metadata.__dict__["_reply_to_message_id"] = delivery.reply_to
    if delivery.source is not None:
        reply.metadata.__dict__["_src_node_id"] = delivery.source
    return reply


def _digest(content: RecordDict) -> str:
    digest = hashlib.sha256()
    for name, record in content.items():
        for key, value in record.items():
            text = value.data if isinstance(value, Array) else repr(value).encode()
            digest.update(f"{name}/{key}/{len(text)}/".encode() + text)
    return digest.hexdigest()


class _Kept(Recorder):
    """Keeps checkpoints and metrics of a run."""

    def __init__(self) -> None:
        self.checkpoints: dict[int, Checkpoint] = {}
        self.lines: list[dict[str, Any]] = []

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        self.checkpoints[state.round] = state

    def round_finished(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))


class Federation:
    """One setting, and an honest run of it from which every other run starts.

    Attributes:
        targets: every reply of the honest run that can be changed, without the client.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.strategy = name, name.split()[0]
        self.config = RunConfig({**_BASE, **SETTINGS[name], "strategy": self.strategy})
        self.plan = self.config.plan
        streams = Streams(0)
        self._start = pack_models(*initial_models(self.config, streams))
        self._sent = ConfigRecord({**self.config.for_clients(), "clients-dir": tempfile.mkdtemp(dir=folder)})
        self._computed: dict[Any, Any] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self.targets: list[tuple[int, str, int]] = [(1, INTRODUCTION, 0)]
        #: Honest replies, which may be delivered as the reply to another request.
        self.replies: list[RecordDict] = []
        for number in range(1, self.config["rounds"] + 1):
            exchange, kept, wire = self._run(number, None, lambda message, honest: [Delivery(honest)])
            if exchange.dropped:
                raise RuntimeError(f"{name}: honest replies were dropped: {dict(exchange.dropped)}")
            self._checkpoints |= kept.checkpoints
            for kind in (TRAINING, EVALUATION):
                places = 1 + wire._places[kind]
                self.targets += [(number, kind, place) for place in range(places)]
        self.replies = [content for content in self._computed.values() if isinstance(content, RecordDict)]
        self._honest = dict(self._computed)

    def run(self, target: Target, change: Change) -> Exchange:
        """One round in which one reply is changed, from the models of the honest run before it."""
        if len(self._computed) > 20_000:
            self._computed = dict(self._honest)
        return self._run(target.round, target, change)[0]

    def _run(self, number: int, target: Target | None, change: Change) -> tuple[Exchange, _Kept, Wire]:
        exchange, kept = Exchange(), _Kept()
        wire = Wire(self._computed, target, change, exchange)
        strategy = self._strategy(number, kept, exchange)
        models, widths, opened = self._start, autoencoder.WIDTHS, loop.Exchange
        autoencoder.WIDTHS, loop.Exchange = SMALL, _watched(exchange)  # type: ignore[misc]
        try:
            result = strategy.start(wire, models, number, timeout=60.0, train_config=self._sent)
        finally:
            autoencoder.WIDTHS, loop.Exchange = widths, opened  # type: ignore[misc]
            wire.close()
            exchange.dropped = dict(strategy.statistics.dropped)
            exchange.nodes = dict(strategy.registry.nodes)
        exchange.models, _ = unpack_models(result.arrays)
        exchange.lines = kept.lines
        evaluated = result.evaluate_metrics_clientapp.get(number, MetricRecord())
        if self.config["evaluate"] == "private":
            exchange.accuracy = float(evaluated["accuracy"])
        if strategy.produces == "labels":
            exchange.labelled = int(evaluated["clients_labelled"])
        return exchange, kept, wire

    def _strategy(self, number: int, kept: _Kept, exchange: Exchange) -> ClusteredStrategy:
        config = self.config
        summary = summarise_records if config.method.produces == "labels" else summarise

        def aggregate(replies: Sequence[Any]) -> MetricRecord:
            exchange.reported = {reply.client_id: reply for reply in replies}
            assert len(exchange.reported) == len(replies)
            return summary(replies)

        library = self.name.endswith("library metrics")
        options = {
            "server_lr": config.server_lr,
            "streams": Streams(0),
            "evaluate": "private" if config["evaluate"] == "private" else "diagnostic",
            "evaluate_every": config["evaluate-every"],
            "evaluate_metrics_aggr_fn": mean_of_clients if library else Summary(summary.reply, aggregate),
            "recorder": kept,
            "resume_from": self._checkpoints.get(number - 1) if number > 1 else None,
            "registration_timeout": 0.0,
        }
        strategy = config.strategy(self.plan, options)
        if isinstance(strategy, OneShot):
            cluster = strategy.cluster

            def once(points: Mapping[int, Any]) -> Any:
                key = "clusters", *((client, own.tobytes()) for client, own in points.items())
                if key not in self._computed:
                    self._computed[key] = cluster(points)
                return self._computed[key]

            strategy.cluster = once  # type: ignore[method-assign]
        return strategy


def _watched(seen: Exchange) -> type[rounds_exchange.Exchange[Any, Any]]:
    """Exchanges of training that note who was asked, and what was added to their sums."""

    class Watched(rounds_exchange.Exchange[Any, Any]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if not self._phase.trains:
                return
            added: list[tuple[int, Any]] = []
            seen.added.append(added)
            seen.asked.append(sorted(self.batch.messages))
            clients, add = self.cohort.tolist(), self._contributions.add

            def record(slot: int, label: Any, redrawn_label: Any, update: Any) -> None:
                add(slot, label, redrawn_label, update)
                added.append((clients[slot], np.array(update)))

            self._contributions.add = record

    return Watched
