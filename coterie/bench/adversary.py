"""Malicious clients that follow the protocol, to evaluate robust aggregation.

They exist only in single-process simulations. No run configuration creates a malicious client.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from coterie.datasets import Federation
from coterie.engine import LocalGrid
from coterie.wire.messages import EVALUATE, TRAIN, UPDATE


def choose_attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """Draw the ids of ``round(share * clients)`` clients at random, independently of their groups."""
    rng = np.random.default_rng([seed, clients])
    return frozenset(rng.permutation(clients)[: round(share * clients)].tolist())


@contextmanager
def flipped_labels(federation: Federation, attackers: Collection[int]) -> Iterator[None]:
    """Within the context, replace training label y of the attackers by C - 1 - y; test data are unchanged."""

    def flip() -> None:
        for client in attackers:
            labels = federation.shard(client).y
            labels[:] = federation.num_classes - 1 - labels

    flip()
    try:
        yield
    finally:
        flip()


class HostileGrid(LocalGrid):
    """A local engine in which attackers send their update times ``-scale``; only honest clients are evaluated.

    Args:
        clients: number of clients, M.
        attackers: ids of the attackers.
        scale: c; 0 leaves updates unchanged.
    """

    def __init__(self, clients: int, attackers: Collection[int], scale: float = 0.0) -> None:
        super().__init__(clients)
        self._attackers = frozenset(client + 1 for client in attackers)  # node ids
        self._scale = np.float32(scale)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Return the replies; evaluation requests are not sent to attackers."""
        questions = [message for message in messages if not self._spared(message)]
        yield from map(self._flipped, super().send_and_receive(questions, timeout=timeout))

    def _spared(self, question: Message) -> bool:
        return question.metadata.message_type == EVALUATE and question.metadata.dst_node_id in self._attackers

    def _flipped(self, reply: Message) -> Message:
        hostile = self._scale and reply.metadata.src_node_id in self._attackers and reply.has_content()
        if hostile and reply.metadata.message_type == TRAIN:
            update = reply.content.array_records[UPDATE]
            reply.content[UPDATE] = ArrayRecord(
                {name: Array(-self._scale * array.numpy()) for name, array in update.items()}
            )
        return reply
