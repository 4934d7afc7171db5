"""Clients for the conformance test of a strategy: each has a target vector, and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from coterie.engine.nodes import SingleProcessGrid
from coterie.wire import LossesRequest, Request, TrainRequest, read_request
from coterie.wire.messages import DIAGNOSTICS, EVALUATE, IDENTITY, REPLY, Layout, losses_layout, pack_reply

#: Number of clients; two groups alternate.
CLIENTS = 6
#: Parameters of the model before the strategy changes them.
LAYOUT = Layout(("body.weight", "head.weight"), ((2, 2), (2,)))
_STEP = np.float32(0.2)

#: Replaces the content of a client's reply; None: the client does not reply.
Spoil = Callable[[int, RecordDict], RecordDict | None]


def honest(client: int, content: RecordDict) -> RecordDict | None:
    """Leave a reply unchanged."""
    return content


class ToyGrid(SingleProcessGrid):
    """A grid with :data:`CLIENTS` clients, which move a model towards their targets.

    Args:
        spoil: changes replies to training requests.

    Attributes:
        requests: (message type, request, (k, d) models, recipients) of every exchange, except for introductions.
        malformed: what is wrong with messages that no client can read.
        trainings: number of exchanges that ask clients for contributions.
    """

    def __init__(self, spoil: Spoil = honest) -> None:
        super().__init__(CLIENTS)
        self._spoil = spoil
        self.requests: list[tuple[str, dict[str, Any], npt.NDArray[np.float32], int]] = []
        self.malformed: list[str] = []
        self.trainings = 0

    def _answers(self, requests: Sequence[Message]) -> Iterator[Message]:
        if any(message.metadata.message_type not in (IDENTITY, EVALUATE) for message in requests):
            self.trainings += 1
        for message in requests:
            content = self._answer(message)
            if content is not None:
                yield Message(content, reply_to=message)

    def _answer(self, message: Message) -> RecordDict | None:
        client, message_type = message.metadata.dst_node_id - 1, message.metadata.message_type
        if message_type == IDENTITY:
            return RecordDict({REPLY: ConfigRecord({"client-id": client})})
        try:
            request, models, layout = read_request(message_type, message.content)
        except (ValueError, KeyError) as error:
            self.malformed.append(f"{message_type}: {error}")
            return None
        self.requests.append((message_type, {"client": client, **request.to_record()}, models, client))
        if message_type == EVALUATE:
            return RecordDict(
                {DIAGNOSTICS: MetricRecord({"accuracy": 0.5, "cluster": request.cluster or 0, "group": 0})}
            )
        return self._spoil(client, _trained(client, request, models, layout))


def _trained(client: int, request: Request, models: npt.NDArray[np.float32], layout: Layout) -> RecordDict:
    signs = 1 if client % 2 == 0 else -1
    target = signs * (1 + 0.1 * client) * np.resize(np.array([1, -1], np.float32), layout.size)
    losses = ((models - target) ** 2).sum(axis=1) if layout.size else np.zeros(len(models), np.float32)
    fields: dict[str, Any] = {"client_id": client, "round": request.round}
    if isinstance(request, LossesRequest):
        return pack_reply(losses.astype(np.float32), losses_layout(len(models)), label=0, **fields)
    best = int(losses.argmin())
    label = best if request.cluster is None else request.cluster
    redrawn = label
    if isinstance(request, TrainRequest) and request.redraw is not None and request.cluster is None:
        k = len(models)
        rng = np.random.default_rng([client, request.round])
        redrawn = int(rng.choice(k, p=np.reshape(request.redraw, (k, k))[label]))
    update = (_STEP * (target - models[best])).astype(np.float32)
    return pack_reply(update, layout, label=label, redrawn_label=redrawn, **fields)


def malformed(kind: str) -> Spoil:
    """Return what makes the replies of client 0 malformed in one way."""

    def spoil(client: int, content: RecordDict) -> RecordDict | None:
        if client != 0:
            return content
        reply, update = dict(content.config_records[REPLY]), content.array_records["update"]
        if kind == "silent":
            return None
        if kind == "label":
            reply["label"] = reply["redrawn-label"] = 10_000
        if kind == "round":
            reply["round"] = -1
        if kind == "nan":
            arrays = {name: np.full(array.shape, np.nan, np.float32) for name, array in update.items()}
            update = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        if kind == "names":
            update = ArrayRecord({f"x.{name}": array for name, array in update.items()})
        return RecordDict({"update": update, REPLY: ConfigRecord(reply)})

    return spoil


#: Ways of :func:`malformed`, which a server must treat like "silent".
MALFORMED = ("label", "round", "nan", "names")
