"""The conformance test of a ClientApp."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from coterie.engine import InProcessGrid
from coterie.flower.sizes import PADDING
from coterie.privacy import RecordPlan
from coterie.testing.failures import Report
from coterie.wire import EvaluateRequest, LossesRequest, Request, TrainRequest
from coterie.wire.messages import (
    CONFIG,
    DIAGNOSTICS,
    EVALUATE,
    HEAD,
    IDENTITY,
    LOSSES,
    MODELS,
    REPLY,
    TRAIN,
    UPDATE,
    Layout,
    ReplyError,
    losses_layout,
    pack_models,
    read_reply,
    unpack_models,
)

Values: TypeAlias = Mapping[str, Any]

#: Items of the contract of a ClientApp, with what to do where one is not met.
CLIENT_ITEMS = {
    "identity": f"Answer {IDENTITY} with a ConfigRecord {REPLY!r} that holds the integer client-id, 0 to M - 1, always "
    "the same; repeats and evaluates, if it has them, are True or False.",
    "identity-unique": "Derive client-id from the node configuration at every message, not once per process.",
    "answers": "Answer every request within the contract; read it by coterie.wire.read_request.",
    "parts": f"Return a RecordDict with an ArrayRecord {UPDATE!r} and a ConfigRecord {REPLY!r}: messages.pack_reply.",
    "nothing-else": "Send nothing else: no guarantee covers it, for example an exact number of examples.",
    "client-id": "Send the client-id of the identity.",
    "round": "Copy the round from the request.",
    "label": "Send label and redrawn-label as int, both indices of the models of this message.",
    "assigned": "If the request has a cluster, the message holds its model only: send this number as both labels.",
    "redraw": "Draw redrawn-label with the probabilities in row label of the request's redraw matrix; without one, "
    "send the label.",
    "names": "Send every parameter once, in the order of the request, without the prefix of the cluster.",
    "arrays": "Send float32 arrays with the shapes of the request: messages.pack_update.",
    "finite": "Train with a smaller step, or refuse.",
    "update": "Send the trained model minus the received one, not the model itself.",
    "row-wise": "Choose the label from the client's own data and the received models only; keep no data of others.",
    "evaluate": f"Answer with a MetricRecord {DIAGNOSTICS!r} of finite numbers; accuracy is in [0, 1], and cluster an "
    "index of the models, or the assigned one.",
    "losses": "Answer with the one array 'losses': the mean loss of every model, float32 (k,).",
    "malformed": "Raise an exception: coterie.wire.read_request refuses what does not depend on the network, "
    "load_state_dict(strict=True) other parameters.",
    "recovers": "Change no state before a request is validated.",
    "idempotent": "Store every reply before it is sent, and send the stored one; or declare no repeats.",
    "charges": "Read all of a request, charge every new reply before it is computed, and a stored one never again.",
}
_SHIFT = 0.05
_FIELDS = {"client-id", "round", "label", "redrawn-label", PADDING}


@dataclass(frozen=True)
class _Setting:
    models: npt.NDArray[np.float32]
    layout: Layout
    config: Values
    plans: str | None

    def content(self, request: Request, models: npt.NDArray[np.float32] | None = None) -> RecordDict:
        """A message with the request."""
        record = {**request.to_record(), **({} if self.plans is None else {"record-plans": self.plans})}
        arrays = pack_models(self.models if models is None else models, self.layout)
        return RecordDict({MODELS: arrays, CONFIG: ConfigRecord({**self.config, **record})})


@dataclass(frozen=True)
class _Node:
    grid: InProcessGrid
    node_id: int

    def ask(self, message_type: str, content: RecordDict, number: int = 1) -> RecordDict:
        """The content of the reply.

        Raises:
            Exception: what the app raises; a ReplyError if its reply is an error.
        """
        message = Message(content, dst_node_id=self.node_id, message_type=message_type, group_id=str(number))
        (reply,) = self.grid.send_and_receive([message])
        if reply.has_error():
            raise ReplyError(reply.error.reason)
        assert isinstance(reply.content, RecordDict)
        return reply.content


def check_client(
    client_app: ClientApp,
    initial_arrays: ArrayRecord,
    *,
    num_clusters: int = 2,
    train_config: Values | None = None,
    node_config: Values | None = None,
    other_node_config: Values | None = None,
    run_config: Values | None = None,
    message_types: Collection[str] = (TRAIN, EVALUATE),
    record_plan: RecordPlan | None = None,
    charges: Callable[[], int] | None = None,
    skip: Collection[str] = (),
) -> None:
    """Test a ClientApp against the contract of messages (docs/existing-app.md), without a network.

    Args:
        client_app: the app.
        initial_arrays: the model, as ``strategy.start`` receives it.
        num_clusters: k, number of models in a message, at least 2.
        train_config: what ``strategy.start`` sends with every message.
        node_config: of a client; default: ``partition-id`` 0 of ``num-partitions`` 2.
        other_node_config: of another client; default: the next ``partition-id`` or ``client-id``.
        run_config: of the app.
        message_types: the types that the app supports beside ``query.identity``: ``train``, ``evaluate``,
            ``query.losses``.
        record_plan: plan of the client at record level; None: clients add no noise.
        charges: returns the number of charges in the client's own ledger; needs ``record_plan``.
        skip: items of :data:`CLIENT_ITEMS` that are not tested.

    Raises:
        ConformanceError: items that are not met, all of them, each with the solution.
        ValueError: an argument is invalid.
    """
    models, layout = unpack_models(initial_arrays)
    if num_clusters < 2 or not np.isfinite(models).all() or not layout.size:
        raise ValueError("num_clusters must be at least 2, and initial_arrays must hold finite parameters")
    report = Report("the ClientApp", CLIENT_ITEMS, skip)
    noise = np.random.default_rng(0).standard_normal((num_clusters, layout.size)).astype(np.float32)
    plans = None if record_plan is None else json.dumps([asdict(record_plan)])
    setting = _Setting(models[:1] + _SHIFT * noise, layout, train_config or {}, plans)
    config = dict(node_config or {"partition-id": 0, "num-partitions": 2})
    following = {key: value + 1 for key, value in config.items() if key in ("partition-id", "client-id")}
    configs = [config, other_node_config or {**config, **following}]
    grid = InProcessGrid(client_app, configs, run_config=run_config, raise_errors=True)
    node, other = _Node(grid, 1), _Node(grid, 2)
    client = _check_identity(report, node, other)
    _check_training(report, setting, node, client, redraws="redraw" not in skip)
    asked = ((node, 20), (other, 20), (other, 21), (other, 22), (node, 20))
    before, *_, after = (_label(report, setting, recipient, number) for recipient, number in asked)
    problem = f"the same request had label {before}, and {after} after another client had trained in this process"
    report.require(before == after, "row-wise", problem)
    if EVALUATE in message_types:
        _check_evaluation(report, setting, node)
    if LOSSES in message_types:
        _check_losses(report, setting, node, client or 0)
    _check_malformed(report, setting, node, charges or (lambda: 0))
    if record_plan is not None:
        _check_repeats(report, setting, node, charges)
    report.finish()


def _check_losses(report: Report, setting: _Setting, node: _Node, client: int) -> None:
    k = len(setting.models)
    with report.guarded("losses", LOSSES):
        content = node.ask(LOSSES, setting.content(LossesRequest(round=4, compared=k)), 4)
        read_reply(content, client_id=client, round=4, num_clusters=k, layout=losses_layout(k))


def _check_identity(report: Report, node: _Node, other: _Node) -> int | None:
    client_ids: list[Any] = []
    for recipient in (node, node, other):
        with report.guarded("identity", IDENTITY):
            content = recipient.ask(IDENTITY, RecordDict())
            record: Any = content.get(REPLY)
            record = record if isinstance(record, ConfigRecord) else {}
            value = record.get("client-id")
            report.require(type(value) is int and value >= 0, "identity", f"client-id is {value!r}")
            for key in ("repeats", "evaluates"):
                report.require(type(record.get(key, False)) is bool, "identity", f"{key} is {record.get(key)!r}")
            only = set(content) <= {REPLY} and set(record) <= {"client-id", "repeats", "evaluates", "versions"}
            report.require(only, "nothing-else", f"the identity holds {sorted(content)}")
            client_ids.append(value)
    if len(client_ids) < 3:
        return None
    first, again, of_other = client_ids
    report.require(first == again, "identity", f"client-id is {first}, then {again}")
    report.require(first != of_other, "identity-unique", f"two clients have client-id {first}")
    return first if type(first) is int else None


def _trained(report: Report, setting: _Setting, node: _Node, request: TrainRequest, **more: Any) -> RecordDict | None:
    with report.guarded("answers", f"train in round {request.round}"):
        return node.ask(TRAIN, setting.content(request, **more), request.round)
    return None


def _check_training(report: Report, setting: _Setting, node: _Node, client: int | None, redraws: bool) -> None:
    k = len(setting.models)
    twice = np.repeat(setting.models, 2, axis=0)
    following = np.roll(np.eye(k + 1), 1, axis=1)  # for k + 1 >= 3 clusters, not symmetric
    requests = [
        (TrainRequest(round=1), setting.models),
        (TrainRequest(round=7), twice),
        (TrainRequest(round=8, cluster=k + 2), setting.models[:1]),
        (TrainRequest(round=9, redraw=tuple(following.ravel().tolist())), twice[: k + 1]),
    ]
    for request, models in requests if redraws else requests[:3]:
        content = _trained(report, setting, node, request, models=models)
        if content is None:
            continue
        reply, update = content.get(REPLY), content.get(UPDATE)
        if not isinstance(reply, ConfigRecord) or not isinstance(update, ArrayRecord):
            report.require(False, "parts", f"the reply holds {', '.join(sorted(content))}")
            continue
        allowed = _FIELDS if setting.plans is None else {*_FIELDS, HEAD}
        extra = sorted({*content} - {REPLY, UPDATE} | {*reply} - allowed)
        report.require(not extra, "nothing-else", f"the reply to train also holds {', '.join(extra)}")
        _check_reply(report, reply, request, len(models), client)
        _check_update(report, setting, update, models)
        if client is not None and not report.failures:  # other items name what is usually wrong
            count = len(models)
            with report.guarded("parts", "the server drops the reply: its reader"):
                read_reply(
                    content,
                    client_id=client,
                    round=request.round,
                    num_clusters=count if request.cluster is None else request.cluster + 1,
                    layout=setting.layout,
                    assigned=request.cluster,
                    redraw=None if request.redraw is None else np.reshape(request.redraw, (count, count)),
                )


def _check_reply(report: Report, reply: Mapping[str, Any], request: TrainRequest, k: int, client: int | None) -> None:
    sender, number = reply.get("client-id"), reply.get("round")
    same = type(sender) is int and client in (None, sender)
    report.require(same, "client-id", f"client-id is {sender!r}, the identity {client}")
    same = type(number) is int and number == request.round
    report.require(same, "round", f"round is {number!r} in round {request.round}")
    label, redrawn = labels = reply.get("label"), reply.get("redrawn-label")
    if request.cluster is not None:
        problem = f"the labels are {labels}, the assigned cluster {request.cluster}"
        report.require(labels == (request.cluster,) * 2, "assigned", problem)
        return
    problem = f"label is {label!r} and redrawn-label {redrawn!r} for {k} models"
    if type(label) is int and type(redrawn) is int and 0 <= label < k and 0 <= redrawn < k:
        expected = (label + 1) % k if request.redraw is not None else label
        report.require(redrawn == expected, "redraw", f"{problem}, expected {expected}")
    else:
        report.require(False, "label", problem)


def _check_update(report: Report, setting: _Setting, update: ArrayRecord, models: npt.NDArray[np.float32]) -> None:
    layout = setting.layout
    problem = f"the update has {list(update)}, the model {list(layout.names)}"
    if not report.require(tuple(update) == layout.names, "names", problem):
        return
    wrong = [
        f"{name} is {update[name].dtype} {tuple(update[name].shape)}"
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if update[name].dtype != "float32" or tuple(update[name].shape) != shape
    ]
    if not report.require(not wrong, "arrays", ", ".join(wrong)):
        return
    vector = layout.flatten({name: array.numpy() for name, array in update.items()})
    if report.require(bool(np.isfinite(vector).all()), "finite", "the update holds NaN or Inf"):
        near = np.linalg.norm(vector - models, axis=1).min() < 0.5 * np.linalg.norm(vector)
        report.require(not near, "update", "the update is close to a received model")


def _label(report: Report, setting: _Setting, node: _Node, number: int) -> Any:
    content = _trained(report, setting, node, TrainRequest(round=number))
    reply = None if content is None else content.get(REPLY)
    return reply.get("label") if isinstance(reply, ConfigRecord) else None


def _check_evaluation(report: Report, setting: _Setting, node: _Node) -> None:
    k = len(setting.models)
    for request, models in (
        (EvaluateRequest(round=3), setting.models),
        (EvaluateRequest(round=3, cluster=k + 2), setting.models[:1]),
    ):
        with report.guarded("evaluate", EVALUATE):
            content = node.ask(EVALUATE, setting.content(request, models), request.round)
            extra = sorted(set(content) - {DIAGNOSTICS, REPLY})
            report.require(not extra, "nothing-else", f"evaluation returns {', '.join(extra)}")
            diagnostics: Any = content.get(DIAGNOSTICS)
            if not isinstance(diagnostics, MetricRecord) or not diagnostics:
                report.require(False, "evaluate", f"it holds {sorted(content)}")
                continue
            finite = all(np.all(np.isfinite(np.asarray(value, np.float64))) for value in diagnostics.values())
            report.require(finite, "evaluate", "a diagnostic is NaN or Inf")
            values: dict[str, Any] = dict(diagnostics)
            accuracy, cluster = values.get("accuracy", 0.0), values.get("cluster")
            report.require(0 <= accuracy <= 1, "evaluate", f"accuracy is {accuracy}")
            clusters = range(k) if request.cluster is None else (request.cluster,)
            report.require(cluster in (None, *clusters), "evaluate", f"cluster is {cluster}")


def _check_malformed(report: Report, setting: _Setting, node: _Node, charges: Callable[[], int]) -> None:
    def changed(**values: Any) -> RecordDict:
        content = setting.content(TrainRequest(round=30))
        return RecordDict({**content, CONFIG: ConfigRecord({**content.config_records[CONFIG], **values})})

    good = setting.content(TrainRequest(round=30))
    broken = setting.models.copy()
    broken[0, 0] = np.nan
    layout = setting.layout
    longer = Layout(layout.names, tuple((*shape, 2) for shape in layout.shapes))
    fewer = Layout(layout.names[1:], layout.shapes[1:])
    no_round = {key: value for key, value in good.config_records[CONFIG].items() if key != "round"}
    requests = {
        "no config": RecordDict({MODELS: good[MODELS]}),
        "no models": RecordDict({CONFIG: good[CONFIG]}),
        "no round": RecordDict({MODELS: good[MODELS], CONFIG: ConfigRecord(no_round)}),
        "a round that is text": changed(round="1"),
        "a negative round": changed(round=-1),
        "a negative cluster": changed(cluster=-1),
        "a redraw matrix whose rows do not sum to 1": changed(redraw=[0.1] * len(setting.models) ** 2),
        "a model with NaN": setting.content(TrainRequest(round=30), broken),
        "parameters of another shape": RecordDict(
            {**good, MODELS: pack_models(np.repeat(setting.models, 2, 1), longer)}
        ),
        "a missing parameter": RecordDict({**good, MODELS: pack_models(setting.models[:, layout.sizes[0] :], fewer)}),
    }
    before, answered = charges(), []
    for what, content in requests.items():
        with suppress(Exception):
            node.ask(TRAIN, content, 30)
            answered.append(what)
    report.require(not answered, "malformed", f"it answers a request with {', '.join(answered)}")
    report.require(charges() == before, "charges", "a malformed request is charged")
    with report.guarded("recovers", "a valid request after malformed ones"):
        node.ask(TRAIN, setting.content(TrainRequest(round=31)), 31)


def _check_repeats(report: Report, setting: _Setting, node: _Node, charges: Callable[[], int] | None) -> None:
    identity = node.ask(IDENTITY, RecordDict()).get(REPLY)
    repeats = isinstance(identity, ConfigRecord) and identity.get("repeats") is True
    counts, replies = [charges() if charges else 0], []
    for number in (40, 40, 41):
        content = _trained(report, setting, node, TrainRequest(round=number))
        replies.append(None if content is None else content.object_id)
        counts.append(charges() if charges else 0)
    problem = "the identity declares repeats, but a repeated request has another reply"
    report.require(not repeats or replies[0] == replies[1], "idempotent", problem)
    if charges:
        problem = f"the ledger has {counts} charges before and after three replies, two of them to the same request"
        report.require(np.sign(np.diff(counts)).tolist() == [1, int(not repeats), 1], "charges", problem)
