"""The conformance test of a ClientApp."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
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

#: Items of the contract of a ClientApp, with what each tests.
CLIENT_ITEMS = {
    "identity": "query.identity is answered by an integer client-id, the same every time",
    "identity-unique": "another client has another client-id",
    "answers": "train, and every other message type that is supported, is answered",
    "parts": "the reply to train has an ArrayRecord 'update' and a ConfigRecord 'reply'",
    "nothing-else": "a reply holds nothing else",
    "client-id": "the reply names the client",
    "round": "the reply repeats the round of the request",
    "label": "label and redrawn-label are integers below the number of models",
    "assigned": "both labels equal the cluster that the server assigned",
    "redraw": "redrawn-label is drawn from the row of the label in the redraw matrix",
    "names": "the update has the parameters of the model, in their order",
    "arrays": "every array of the update is float32 with the shape of the parameter",
    "finite": "the update holds no NaN and no Inf",
    "update": "the update is the trained model minus the received one",
    "row-wise": "the label does not depend on other clients in the same process",
    "evaluate": "diagnostics are finite scalars; accuracy is in [0, 1], and cluster below the number of models",
    "losses": "query.losses is answered by one finite float32 loss for every model",
    "malformed": "malformed requests are refused",
    "recovers": "a valid request is answered after malformed ones",
    "idempotent": "a client that declares repeats answers a repeated request by the same reply",
    "charges": "every new reply at record level is charged once; repeated and malformed requests are not",
}
_SHIFT = 0.05
_FIELDS = {"client-id", "round", "label", "redrawn-label", PADDING}


@dataclass(frozen=True)
class _Setting:
    """What is needed to send messages to clients."""

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
    """One client."""

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
    """Test a ClientApp against the contract of messages (docs/extending.md), without a network.

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
    _check_training(report, setting, node, client)
    _check_choice(report, setting, node, other)
    if EVALUATE in message_types:
        _check_evaluation(report, setting, node)
    if LOSSES in message_types:
        _check_losses(report, setting, node, client)
    _check_malformed(report, setting, node, charges)
    if record_plan is not None:
        _check_repeats(report, setting, node, charges)
    report.finish()


def _check_identity(report: Report, node: _Node, other: _Node) -> int | None:
    client_ids: list[Any] = []
    for recipient in (node, node, other):
        solution = f"Answer {IDENTITY} with a ConfigRecord {REPLY!r} that holds the integer client-id, 0 to M - 1."
        with report.guarded("identity", IDENTITY, solution):
            content = recipient.ask(IDENTITY, RecordDict())
            record: Any = content.get(REPLY)
            value = record.get("client-id") if isinstance(record, ConfigRecord) else None
            report.require(type(value) is int and value >= 0, "identity", f"client-id is {value!r}", solution)
            for key in ("repeats", "evaluates"):
                flag = record.get(key, False) if isinstance(record, ConfigRecord) else False
                report.require(type(flag) is bool, "identity", f"{key} is {flag!r}", "Make it True or False.")
            only = set(content) <= {REPLY} and set(record or ()) <= {"client-id", "repeats", "evaluates", "versions"}
            report.require(only, "nothing-else", f"the identity holds {sorted(content)}", "Send nothing else.")
            client_ids.append(value)
    if len(client_ids) < 3:
        return None
    report.require(
        client_ids[0] == client_ids[1], "identity", f"client-id is {client_ids[0]}, then {client_ids[1]}", "Keep it."
    )
    report.require(
        client_ids[0] != client_ids[2],
        "identity-unique",
        f"two clients have client-id {client_ids[0]}",
        "Derive it from the node configuration at every message, not once per process.",
    )
    return client_ids[0] if type(client_ids[0]) is int else None


def _trained(report: Report, setting: _Setting, node: _Node, request: TrainRequest, **more: Any) -> RecordDict | None:
    what = f"train in round {request.round}"
    solution = "A request within the contract must be answered; read it by coterie.wire.read_request."
    with report.guarded("answers", what, solution):
        return node.ask(TRAIN, setting.content(request, **more), request.round)
    return None


def _check_training(report: Report, setting: _Setting, node: _Node, client: int | None) -> None:
    k = len(setting.models)
    following = np.roll(np.eye(k + 1), 1, axis=1)  # for k + 1 >= 3 clusters, not symmetric
    for request, models in (
        (TrainRequest(round=1), setting.models),
        (TrainRequest(round=7), np.repeat(setting.models, 2, axis=0)),
        (TrainRequest(round=8, cluster=k + 2), setting.models[:1]),
        (
            TrainRequest(round=9, redraw=tuple(following.ravel().tolist())),
            np.repeat(setting.models, 2, axis=0)[: k + 1],
        ),
    ):
        if request.redraw is not None and not report.tests("redraw"):
            continue
        content = _trained(report, setting, node, request, models=models)
        if content is None:
            continue
        reply, update = content.get(REPLY), content.get(UPDATE)
        if not report.require(
            isinstance(reply, ConfigRecord) and isinstance(update, ArrayRecord),
            "parts",
            f"the reply holds {', '.join(sorted(content))}",
            f"Return a RecordDict with an ArrayRecord {UPDATE!r} and a ConfigRecord {REPLY!r}: messages.pack_reply.",
        ):
            continue
        assert isinstance(reply, ConfigRecord)
        assert isinstance(update, ArrayRecord)
        allowed = _FIELDS if setting.plans is None else {*_FIELDS, HEAD}
        extra = sorted({*content} - {REPLY, UPDATE} | {*reply} - allowed)
        report.require(
            not extra,
            "nothing-else",
            f"the reply to train also holds {', '.join(extra)}",
            "Remove it: no guarantee covers it, for example an exact number of examples.",
        )
        _check_reply(report, reply, request, len(models), client)
        _check_update(report, setting, update, models)
        if client is not None and not report.failed:
            _check_by_reader(report, setting, content, request, len(models), client)


def _check_reply(report: Report, reply: Mapping[str, Any], request: TrainRequest, k: int, client: int | None) -> None:
    sender, number = reply.get("client-id"), reply.get("round")
    right = type(sender) is int and (client is None or sender == client)
    report.require(right, "client-id", f"client-id is {sender!r}, the identity {client}", "Send that of the identity.")
    right = type(number) is int and number == request.round
    report.require(right, "round", f"round is {number!r} in round {request.round}", "Copy it from the request.")
    labels: list[Any] = [reply.get("label"), reply.get("redrawn-label")]
    if request.cluster is not None:
        report.require(
            labels == [request.cluster] * 2,
            "assigned",
            f"the labels are {labels}, the assigned cluster {request.cluster}",
            "If the request has a cluster, the message holds its model only: send this number as both labels.",
        )
        return
    valid = all(type(label) is int and 0 <= label < k for label in labels)
    if not report.require(
        valid,
        "label",
        f"label is {labels[0]!r} and redrawn-label {labels[1]!r} for {k} models",
        "Both are indices of the models of this message, as int.",
    ):
        return
    expected = (labels[0] + 1) % k if request.redraw is not None else labels[0]
    report.require(
        labels[1] == expected,
        "redraw",
        f"redrawn-label is {labels[1]} for label {labels[0]}, expected {expected}",
        "Draw it with the probabilities in row label of the request's redraw matrix; without one, send the label.",
    )


def _check_update(report: Report, setting: _Setting, update: ArrayRecord, models: npt.NDArray[np.float32]) -> None:
    layout = setting.layout
    if not report.require(
        tuple(update) == layout.names,
        "names",
        f"the update has {list(update)}, the model {list(layout.names)}",
        "Send every parameter once, in the order of the request, without the prefix of the cluster.",
    ):
        return
    wrong = [
        f"{name} is {update[name].dtype} {tuple(update[name].shape)}"
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if update[name].dtype != "float32" or tuple(update[name].shape) != shape
    ]
    if not report.require(
        not wrong,
        "arrays",
        ", ".join(wrong),
        "Send float32 arrays with the shapes of the request: messages.pack_update.",
    ):
        return
    vector = layout.flatten({name: array.numpy() for name, array in update.items()})
    if not report.require(
        bool(np.isfinite(vector).all()),
        "finite",
        "the update holds NaN or Inf",
        "Train with a smaller step, or refuse.",
    ):
        return
    for model in models:
        near = float(np.linalg.norm(vector - model)) < 0.5 * float(np.linalg.norm(vector))
        report.require(
            not near,
            "update",
            "the update is close to a received model",
            "Send the trained model minus the received one, not the model itself.",
        )


def _check_by_reader(
    report: Report, setting: _Setting, content: RecordDict, request: TrainRequest, k: int, client: int
) -> None:
    """Read the reply as the server does; other items name what is usually wrong."""
    try:
        read_reply(
            content,
            client_id=client,
            round=request.round,
            num_clusters=k if request.cluster is None else request.cluster + 1,
            layout=setting.layout,
            assigned=request.cluster,
            redraw=None if request.redraw is None else np.reshape(request.redraw, (k, k)),
        )
    except ReplyError as error:
        report.fail("parts", f"the server drops the reply: {error}", "Build it by messages.pack_reply.")


def _label(report: Report, setting: _Setting, node: _Node, number: int) -> Any:
    content = _trained(report, setting, node, TrainRequest(round=number))
    reply = None if content is None else content.get(REPLY)
    return reply.get("label") if isinstance(reply, ConfigRecord) else None


def _check_choice(report: Report, setting: _Setting, node: _Node, other: _Node) -> None:
    before = _label(report, setting, node, 20)
    for number in (20, 21, 22):
        _label(report, setting, other, number)
    after = _label(report, setting, node, 20)
    report.require(
        before == after,
        "row-wise",
        f"the same request had label {before}, and {after} after another client had trained in this process",
        "Choose the label from the client's own data and the received models only; keep no data of other clients.",
    )


def _check_evaluation(report: Report, setting: _Setting, node: _Node) -> None:
    k, solution = len(setting.models), f"Answer with a MetricRecord {DIAGNOSTICS!r} of finite numbers."
    for request, models in (
        (EvaluateRequest(round=3), setting.models),
        (EvaluateRequest(round=3, cluster=k + 2), setting.models[:1]),
    ):
        with report.guarded("evaluate", EVALUATE, solution):
            content = node.ask(EVALUATE, setting.content(request, models), request.round)
            extra = sorted(set(content) - {DIAGNOSTICS, REPLY})
            report.require(
                not extra, "nothing-else", f"evaluation returns {', '.join(extra)}", "Send diagnostics only."
            )
            diagnostics: Any = content.get(DIAGNOSTICS)
            if not report.require(
                isinstance(diagnostics, MetricRecord) and bool(diagnostics),
                "evaluate",
                f"it holds {sorted(content)}",
                solution,
            ):
                continue
            finite = all(np.all(np.isfinite(np.asarray(value, np.float64))) for value in diagnostics.values())
            report.require(finite, "evaluate", "a diagnostic is NaN or Inf", solution)
            accuracy, cluster = diagnostics.get("accuracy", 0.0), diagnostics.get("cluster")
            report.require(0 <= accuracy <= 1, "evaluate", f"accuracy is {accuracy}", "It is a share, in [0, 1].")
            right = cluster in (None, request.cluster) if request.cluster is not None else cluster in (None, *range(k))
            report.require(
                right, "evaluate", f"cluster is {cluster}", "It is an index of the models, or the assigned one."
            )


def _check_losses(report: Report, setting: _Setting, node: _Node, client: int | None) -> None:
    k, solution = len(setting.models), "Answer with the one array 'losses': the mean loss of every model, float32 (k,)."
    with report.guarded("losses", LOSSES, solution):
        content = node.ask(LOSSES, setting.content(LossesRequest(round=4, compared=k)), 4)
        read_reply(content, client_id=client or 0, round=4, num_clusters=k, layout=losses_layout(k))


def _malformed(setting: _Setting) -> dict[str, RecordDict]:
    """Requests that must be refused, by what is wrong."""

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
    return {
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


def _check_malformed(report: Report, setting: _Setting, node: _Node, charges: Callable[[], int] | None) -> None:
    before = charges() if charges else 0
    answered = []
    for what, content in _malformed(setting).items():
        try:
            node.ask(TRAIN, content, 30)
        except Exception:
            continue
        answered.append(what)
    report.require(
        not answered,
        "malformed",
        f"it answers a request with {', '.join(answered)}",
        "Raise an exception: coterie.wire.read_request refuses what does not depend on the network, "
        "load_state_dict(strict=True) other parameters.",
    )
    if charges:
        report.require(
            charges() == before, "charges", "a malformed request is charged", "Read all of it before you charge."
        )
    with report.guarded("recovers", "a valid request after malformed ones", "Change no state before it is validated."):
        node.ask(TRAIN, setting.content(TrainRequest(round=31)), 31)


def _check_repeats(report: Report, setting: _Setting, node: _Node, charges: Callable[[], int] | None) -> None:
    identity = node.ask(IDENTITY, RecordDict()).get(REPLY)
    repeats = isinstance(identity, ConfigRecord) and identity.get("repeats") is True
    counts, replies = [charges() if charges else 0], []
    for number in (40, 40, 41):
        content = _trained(report, setting, node, TrainRequest(round=number))
        replies.append(None if content is None else content.object_id)
        counts.append(charges() if charges else 0)
    if repeats:
        report.require(
            replies[0] == replies[1],
            "idempotent",
            "the identity declares repeats, but a repeated request has another reply",
            "Store every reply before it is sent, and send the stored one; or declare no repeats.",
        )
    if charges:
        expected = (repeats and counts[1] == counts[2]) or (not repeats and counts[1] < counts[2])
        report.require(
            counts[0] < counts[1] and expected and counts[2] < counts[3],
            "charges",
            f"the ledger has {counts} charges before and after three replies, two of them to the same request",
            "Charge every new reply before it is computed, and a stored one never again.",
        )
