"""A ClientApp whose functions know nothing of clusters, under Coterie's strategies.

The functions take the arrays of one model and return arrays, as those of any Flower app for FedAvg. Around them:

=================  =================================================================================================
``train``          choose a model by the loss that the app's ``evaluate`` reports, unless the server has assigned one;
                   call the app's ``train`` with this model alone; reply its change, and the cluster
``evaluate``       choose in the same way; reply the accuracy alone
``query.losses``   reply the losses alone (LCFL)
``query.identity`` reply the client's number
=================  =================================================================================================

Nothing else leaves: no number of examples, no other metric, no text of an exception.
"""

from __future__ import annotations

from bdb import BdbQuit
from copy import copy, deepcopy
from dataclasses import dataclass
from logging import ERROR

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.logger import log

from coterie.client.state import ClientError
from coterie.fields import RECORD_LEVEL, TRUSTED_SERVER
from coterie.flower.sizes import fix_size
from coterie.wire import Request, RequestError, TrainRequest, read_request
from coterie.wire.messages import (
    CONFIG,
    DIAGNOSTICS,
    DIVERGED,
    EVALUATE,
    IDENTITY,
    LOSSES,
    REPLY,
    TRAIN,
    Layout,
    losses_layout,
    pack_reply,
    pack_update,
)

# Loss of a model whose loss is not finite: messages hold finite numbers only.
_MAX_LOSS = 1e6
# Fields that ask for another training or another choice than the app's, and the methods that set them.
_UNSUPPORTED = {
    "additive": "fedcam",
    "assign": "fesem",
    "clip": "fesem",
    "penalty": "fedprox",
    "first_batch": "rc-dpfl",
    "personalize": "personalize",
    "counts_records": "weights = records",
}
# Attribute of a mod that reports to its part at the server, such as coterie.guard.Guard: the name of its record.
_REPORT = "report_name"
_RECORD_LEVEL = (
    "the run has record-level plans, which an app's own training does not follow: train by Opacus under "
    "coterie.guard, and use privacy-unit none at the server (docs/guard.md)"
)


class ClusteredClientApp(ClientApp):
    """Makes an app clustered: use it instead of ``ClientApp``, and a strategy of Coterie at the server.

    The app is as for Flower's FedAvg: its ``train`` and ``evaluate`` take a message with an ArrayRecord ``arrays`` and
    a ConfigRecord ``config``; ``train`` replies one ArrayRecord with the same names and shapes, ``evaluate`` a
    MetricRecord. The config is what the strategy sends, with ``server-round``. To choose among k models, ``evaluate``
    is called for each, with the config of training and with a copy of the context, whose changes are dropped.

    With :class:`coterie.guard.Guard` among the mods, the app's training is private at record level, and the guard's
    ledger is the only one: assign clusters at the server (``KMCDPFL``, ``CFL``), since no budget covers a choice by
    loss, or allow ``evaluate`` and the loss at the site.

    Args:
        mods: Flower mods around the app's functions.
        loss: metric of ``evaluate`` by which a model is chosen, the smaller the better.
        accuracy: metric of ``evaluate``, in [0, 1], that leaves if the server asks for it; None: the client answers no
            evaluation.

    Raises:
        TypeError: the first argument is a ``client_fn``.
        ClientError: of a message, if the app breaks its contract or fails. Its text depends on the request and on the
            app's code alone, since Flower sends it to the server; the reason is in the client's own log.
        RequestError: of a message, if it is malformed.

    Examples:
        >>> app = ClusteredClientApp()  # instead of ClientApp()
        >>> @app.train()
        ... def train(message, context):
        ...     ...  # as before
    """

    def __init__(
        self, mods: list[Mod] | None = None, *, loss: str = "eval_loss", accuracy: str | None = "eval_acc"
    ) -> None:
        if callable(mods):
            raise TypeError("a client_fn is Flower's old interface: use @app.train() and @app.evaluate()")
        super().__init__(mods=mods)
        self._loss, self._accuracy = loss, accuracy
        self._reports = [str(getattr(mod, _REPORT)) for mod in mods or () if hasattr(mod, _REPORT)]
        self.query(IDENTITY.partition(".")[2])(self._identity)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message of a strategy of Coterie; refuse every other one."""
        try:
            message_type = message.metadata.message_type
            if message_type == IDENTITY:
                _client_id(context)  # has the clearer error
                reply = self._answer(IDENTITY, message, context)
                content = self._with_reports(RecordDict({REPLY: reply.config_records[REPLY]}), reply)
                return Message(content, reply_to=message)
            self._check_guarantee(context)
            answers = {TRAIN: self._trained, EVALUATE: self._evaluated, LOSSES: self._compared}
            if message_type not in answers:
                raise RequestError(f"this client answers {', '.join((*answers, IDENTITY))}, no other type of message")
            request, models, layout = read_request(message_type, message.content)
            asked = _Asked(message, context, request, models, layout)
            asked.check()
            content = answers[message_type](asked)
            fix_size(content)
        except (ClientError, RequestError, BdbQuit):
            raise
        except Exception as error:
            raise ClientError("the reply of the app cannot be used; see the client's own log") from error
        return Message(content, reply_to=message)

    def _check_guarantee(self, context: Context) -> None:
        """Check that the owner of a node has not declared a guarantee that the app's own training does not give.

        Raises:
            ClientError: the owner has: record level requires a guard around the app, and masked sums Coterie's own app.
        """
        guarantee = context.node_config.get("guarantee", TRUSTED_SERVER)
        if guarantee != TRUSTED_SERVER and not (guarantee == RECORD_LEVEL and self._reports):
            raise ClientError(
                f"the node configuration has guarantee = {guarantee}, which this app does not give: set guarantee = "
                "trusted-server, or, at record level, train under coterie.guard (docs/guard.md)",
                "policy",
            )

    def _identity(self, message: Message, context: Context) -> Message:
        identity = ConfigRecord({"client-id": _client_id(context), "evaluates": self._accuracy is not None})
        return Message(RecordDict({REPLY: identity}), reply_to=message)

    def _trained(self, asked: _Asked) -> RecordDict:
        request = asked.request
        assert isinstance(request, TrainRequest)
        label, model = request.cluster, 0
        if label is None:
            label = model = self._choice(asked)[0]
        redrawn = request.redraw_label(label, np.random.default_rng())
        if request.rebalance_train == "assigned" and request.cluster is None:
            model = redrawn
        content = self._answer(TRAIN, asked.with_model(TRAIN, model), asked.context)
        update = _trained_arrays(content, asked.layout) - asked.models[model]
        if not np.isfinite(update).all():
            raise ClientError(DIVERGED)
        return self._with_reports(asked.reply(update, asked.layout, label, redrawn), content)

    def _evaluated(self, asked: _Asked) -> RecordDict:
        if self._accuracy is None:
            raise ClientError("this client answers no evaluation")
        _, content = self._choice(asked) if asked.request.cluster is None else (0, self._evaluation(asked, 0))
        accuracy = _metric(content, self._accuracy, "accuracy")
        if not 0 <= accuracy <= 1:
            raise ClientError(f"evaluate replies a metric {self._accuracy!r} outside [0, 1]")
        return self._with_reports(RecordDict({DIAGNOSTICS: MetricRecord({"accuracy": accuracy})}), content)

    def _compared(self, asked: _Asked) -> RecordDict:
        contents = [self._evaluation(asked, model) for model in range(len(asked.models))]
        losses = np.array([self._loss_of(content) for content in contents], np.float32)
        return self._with_reports(asked.reply(losses, losses_layout(len(losses)), 0, 0), contents[0])

    def _choice(self, asked: _Asked) -> tuple[int, RecordDict]:
        """Return the index of the model with the smallest loss, and what the app replies to its evaluation.

        One model needs no evaluation for its training.
        """
        if len(asked.models) == 1 and isinstance(asked.request, TrainRequest):
            return 0, RecordDict()
        contents = [self._evaluation(asked, model) for model in range(len(asked.models))]
        if len(contents) == 1:
            return 0, contents[0]
        best = int(np.argmin([self._loss_of(content) for content in contents]))
        return best, contents[best]

    def _evaluation(self, asked: _Asked, model: int) -> RecordDict:
        return self._answer(EVALUATE, asked.with_model(EVALUATE, model), deepcopy(asked.context))

    def _loss_of(self, content: RecordDict) -> float:
        loss = _metric(content, self._loss, "loss")
        return min(loss, _MAX_LOSS) if np.isfinite(loss) else _MAX_LOSS

    def _answer(self, message_type: str, message: Message, context: Context) -> RecordDict:
        """Return what the app replies, through its mods."""
        failed = f"the app failed in {message_type}; see the client's own log"
        try:
            reply = super().__call__(message, context)
        except BdbQuit:
            raise
        except Exception as error:
            raise ClientError(failed) from error
        if not isinstance(reply, Message) or reply.has_error():
            log(ERROR, "%s replies %s", message_type, getattr(reply, "error", type(reply).__name__))
            raise ClientError(failed)
        return reply.content

    def _with_reports(self, reply: RecordDict, content: RecordDict) -> RecordDict:
        """Add the reports of mods, which the app's reply has."""
        return RecordDict({**reply, **{name: content[name] for name in self._reports if name in content}})


@dataclass(frozen=True)
class _Asked:
    """A message of a strategy, read, with (k, d) models."""

    message: Message
    context: Context
    request: Request
    models: npt.NDArray[np.float32]
    layout: Layout

    def check(self) -> None:
        """Check that the app can do what the request asks for.

        Raises:
            RequestError: it cannot, or the numbers of models do not match.
        """
        if self.request.record_plans is not None:
            raise RequestError(_RECORD_LEVEL)
        for name, method in _UNSUPPORTED.items():
            if getattr(self.request, name, None) not in (None, False, "loss"):
                raise RequestError(f"the request sets {name} ({method}), which an app's own training does not support")
        if self.request.cluster is not None and len(self.models) != 1:
            raise RequestError(f"a request with a cluster has one model, not {len(self.models)}")
        redraw = getattr(self.request, "redraw", None)
        if redraw is not None and self.request.cluster is None and len(redraw) != len(self.models) ** 2:
            raise RequestError(f"redraw has {len(redraw)} entries for {len(self.models)} models")

    def with_model(self, message_type: str, model: int) -> Message:
        """Return a message to the app, with one model and what else the strategy configures."""
        metadata = copy(self.message.metadata)
        metadata.message_type = message_type
        record, fields = self.message.content.config_records[CONFIG], self.request.keys()
        config = {key: value for key, value in record.items() if key not in fields}
        arrays = pack_update(self.models[model], self.layout)
        configuration = ConfigRecord({**config, "server-round": self.request.round})
        return make_message(metadata=metadata, content=RecordDict({"arrays": arrays, "config": configuration}))

    def reply(self, update: npt.NDArray[np.float32], layout: Layout, label: int, redrawn: int) -> RecordDict:
        """Return the reply with an update."""
        number, client = self.request.round, _client_id(self.context)
        return pack_reply(update, layout, client_id=client, round=number, label=label, redrawn_label=redrawn)


def _client_id(context: Context) -> int:
    client = context.node_config.get("client-id", context.node_config.get("partition-id"))
    try:
        return int(client)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ClientError("set client-id in the node configuration, the number of the client from 0") from None


def _trained_arrays(content: RecordDict, layout: Layout) -> npt.NDArray[np.float32]:
    """Return the (d,) model in the reply of the app.

    Raises:
        ClientError: it holds other arrays than the app has received.
    """
    if len(content.array_records) != 1:
        raise ClientError(f"train replies {len(content.array_records)} ArrayRecords, expected the trained one")
    (record,) = content.array_records.values()
    if missing := [name for name in layout.names if name not in record]:
        raise ClientError(f"train replies no array {missing[0]!r}, which it has received")
    if len(record) != len(layout.names):
        log(ERROR, "train replies the arrays %s, and has received %s", sorted(record), sorted(layout.names))
        raise ClientError("train replies arrays that it has not received; see the client's own log")
    arrays = {name: record[name].numpy() for name in layout.names}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if arrays[name].shape != shape:
            raise ClientError(f"train replies the array {name!r} in another shape than it has received")
        if arrays[name].dtype.kind != "f":
            raise ClientError(
                f"train replies the array {name!r} as {arrays[name].dtype}: only floating-point parameters can be "
                "trained; leave counters and other buffers out of the message"
            )
    return layout.flatten(arrays)


def _metric(content: RecordDict, name: str, argument: str) -> float:
    """Return a metric of the app's evaluation.

    Raises:
        ClientError: it is missing, or no number.
    """
    values = [record[name] for record in content.metric_records.values() if name in record]
    if len(values) != 1 or not isinstance(values[0], int | float):
        names = sorted({key for record in content.metric_records.values() for key in record})
        log(ERROR, "evaluate replies the metrics %s; expected one number %r", names, name)
        raise ClientError(
            f"evaluate replies no number {name!r}: name its metric, ClusteredClientApp({argument}=...); the client's "
            "own log lists its metrics"
        )
    return float(values[0])
