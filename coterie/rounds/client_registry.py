"""The node of every client, as nodes declare it; it may change from round to round."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from logging import WARNING
from typing import Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.logs import printable
from coterie.wire.messages import IDENTITY, REPLY

_POLL_SECONDS = 0.5
# Longest wait for identities before the request is repeated.
_REPLY_SECONDS = 30.0


@dataclass(frozen=True)
class _Claim:
    """The introduction of a node: the client that it claims to be; None if that is no client of the run."""

    client: int | None
    idempotent: bool = False
    evaluates: bool = True


@runtime_checkable
class SimulatesClients(Protocol):
    """A grid whose clients are all there and need not introduce themselves."""

    @property
    def nodes_of_clients(self) -> dict[int, int]:
        """The node of every client, which never changes."""


class ClientRegistry:
    """The registered clients and their nodes.

    Flower's SuperLink marks silent nodes as offline. Offline nodes receive no messages, and nodes that return are
    identified anew. If several nodes claim one client, all of them are excluded until one is left: the server cannot
    know which of them is the client.

    Args:
        clients: M; clients are 0 to M-1.
        wait: seconds to wait for clients.

    Attributes:
        nodes: node id of every registered client that exactly one node claims.
        idempotent: clients that replay their reply to a repeated request.
        unevaluated: clients that refuse requests for evaluation.
    """

    def __init__(self, clients: int, wait: float) -> None:
        self.clients, self.wait = clients, wait
        self.nodes: dict[int, int] = {}
        self.idempotent: set[int] = set()
        self.unevaluated: set[int] = set()
        self._claims: dict[int, _Claim | None] = {}  # by node; None: no introduction yet
        self._contested: dict[int, list[int]] = {}  # client to the nodes that claim it

    def wait_for(self, grid: Grid, least: int, among: Collection[int] | None = None) -> bool:
        """Wait until ``least`` clients, of some or of all, are registered; whether they are."""
        if isinstance(grid, SimulatesClients):
            self.nodes = grid.nodes_of_clients
            return (len(self.nodes) if among is None else len(self.nodes.keys() & among)) >= least
        candidates = range(self.clients) if among is None else among
        deadline, enough = time.monotonic() + self.wait, False
        while True:
            enough = sum(client in self.nodes for client in candidates) >= least
            self.discover(grid, deadline - time.monotonic(), wait_for_known=not enough)
            enough = sum(client in self.nodes for client in candidates) >= least
            if enough or time.monotonic() > deadline:
                return enough
            time.sleep(_POLL_SECONDS)

    def wait_for_all(self, grid: Grid) -> None:
        """Wait until all clients are registered, or until the deadline."""
        if not self.wait_for(grid, self.clients):
            log(
                WARNING,
                "%s of %s clients are registered; the others do not participate until they register",
                len(self.nodes),
                self.clients,
            )

    def discover(self, grid: Grid, timeout: float, wait_for_known: bool = True) -> None:
        """Request the client ids of nodes that are online and unidentified, and forget nodes that left.

        Messages can be lost: silent nodes are asked again in every round, and late replies count.

        Args:
            grid: to the nodes.
            timeout: seconds to wait for replies, at most 30.
            wait_for_known: wait for nodes that were asked before, too.
        """
        online = sorted(set(grid.get_node_ids()))
        new = any(node not in self._claims for node in online)
        self._claims = {node: self._claims.get(node) for node in online}
        silent = [node for node, claim in self._claims.items() if claim is None]
        messages = [Message(RecordDict(), dst_node_id=node, message_type=IDENTITY) for node in silent]
        seconds = max(0.0, min(timeout, _REPLY_SECONDS)) if new or wait_for_known else 0.0
        replies = list(grid.send_and_receive(messages, timeout=seconds)) if messages else []
        # The SuperLink verifies which message a reply answers; src_node_id is under the control of the sender.
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in replies:
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                log(WARNING, "ignoring a reply with a client-id that matches no open request")
            elif reply.has_error():
                log(WARNING, "node %s did not send its client-id: %s", node, printable(reply.error.reason))
            else:
                self._claims[node] = self._claim(node, reply)
        self._assign()

    def _claim(self, node: int, reply: Message) -> _Claim:
        content = reply.content if reply.has_content() else None
        record = content.get(REPLY) if isinstance(content, RecordDict) else None
        record = record if isinstance(record, ConfigRecord) else ConfigRecord()
        client = record.get("client-id")
        if type(client) is int and 0 <= client < self.clients:
            return _Claim(client, record.get("repeats") is True, record.get("evaluates") is not False)
        log(WARNING, "ignoring node %s: invalid client-id %s", node, printable(repr(client)))
        return _Claim(None)

    def _assign(self) -> None:
        """Map every client to the only node that claims it, and warn of clients that several nodes claim."""
        claimed: dict[int, list[int]] = {}
        for node, claim in self._claims.items():
            if claim is not None and claim.client is not None:
                claimed.setdefault(claim.client, []).append(node)
        contested = {client: nodes for client, nodes in claimed.items() if len(nodes) > 1}
        for client, nodes in contested.items():
            if self._contested.get(client) != nodes:
                log(
                    WARNING,
                    "nodes %s all claim client-id %s: all are ignored until only one remains. Stop the others or "
                    "correct their client-id. A restarted node is listed under its old id for up to a minute.",
                    " and ".join(map(str, nodes)),
                    client,
                )
        self._contested = contested
        self.nodes = {client: node for client, (node, *others) in claimed.items() if not others}
        claims = {client: self._claims[node] for client, node in self.nodes.items()}
        self.idempotent = {client for client, claim in claims.items() if claim is not None and claim.idempotent}
        self.unevaluated = {client for client, claim in claims.items() if claim is not None and not claim.evaluates}
