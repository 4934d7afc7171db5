"""The node of every client, as a roster or the nodes themselves declare it; it may change from round to round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.logs import printable
from coterie.wire.masked import SignedKey
from coterie.wire.messages import IDENTITY, REPLY
from coterie.wire.versions import stated_versions

_POLL_SECONDS = 0.5
# Longest wait for identities before the request is repeated.
_REPLY_SECONDS = 30.0
# What Flower's ClientApp says of a message for which it has no function.
_NO_FUNCTION = "No query function registered with name"


@dataclass(frozen=True)
class _Claim:
    """The introduction of a node: the client that it claims to be; None if that is no client of the run.

    ``plain`` is whether its app cannot introduce itself, as a ClientApp of Flower.
    """

    client: int | None
    plain: bool = False
    idempotent: bool = False
    evaluates: bool = True
    key: SignedKey | None = None


def record_nothing(event: str, **fields: object) -> None:
    """Record no event of a run."""


@runtime_checkable
class SimulatesClients(Protocol):
    """A grid whose clients are all there and need not introduce themselves."""

    @property
    def nodes_of_clients(self) -> dict[int, int]:
        """The node of every client, which never changes."""


class Roster(Protocol):
    """States which client a key is (:class:`coterie.site.roster.RosterFile`)."""

    #: Why the roster on disk is not used; empty if it is.
    problem: str

    def client_of(self, public_key: bytes) -> tuple[int, str]:
        """Return the client of a node's public key, and its name; raise ValueError if it is no client."""


class ClientRegistry:
    """The registered clients and their nodes.

    Flower's SuperLink marks silent nodes as offline. Offline nodes receive no messages, and nodes that return are
    identified anew. With a roster, a node is the client of its key, whatever other nodes claim; a node that claims to
    be another client is left out. Without one, the server cannot know which of several nodes that claim one client is
    that client: the one that was registered with the SuperLink first is, for as long as it is online, so that a node
    that is registered later expels no other.

    Args:
        clients: M; clients are 0 to M-1.
        wait: seconds to wait for clients.
        roster: which client each key is; None: as nodes claim.
        audit: records introductions, and nodes that are ignored (see StrategyOptions).

    Attributes:
        nodes: node id of every registered client.
        idempotent: clients that replay their reply to a repeated request.
        unevaluated: clients that refuse requests for evaluation.
        keys: of the registered clients that have them, for masked rounds; other clients verify them.
    """

    def __init__(
        self, clients: int, wait: float, roster: Roster | None = None, audit: Callable[..., None] = record_nothing
    ) -> None:
        self.clients, self.wait, self._roster, self._audit = clients, wait, roster, audit
        self.nodes: dict[int, int] = {}
        self.idempotent: set[int] = set()
        self.unevaluated: set[int] = set()
        self.keys: dict[int, SignedKey] = {}
        self._claims: dict[int, _Claim | None] = {}  # by node; None: no introduction yet
        self._joined: dict[int, tuple[str, int]] = {}  # by node: when it was registered, and its place in discoveries
        self._members: dict[int, int | None] = {}  # by node: its client in the roster
        self._warnings: dict[int, str] = {}  # by node: why it is ignored
        self._problem = ""  # of the roster

    @property
    def silent(self) -> list[int]:
        """Nodes that are online and have not sent their client id yet, without those that are not in the roster."""
        return [n for n, claim in self._claims.items() if claim is None and self._members.get(n, 0) is not None]

    @property
    def plain_apps(self) -> int:
        """Number of nodes online whose app is a ClientApp of Flower, which does not answer a clustered strategy."""
        return sum(claim.plain for claim in self._claims.values() if claim is not None)

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
            if enough or time.monotonic() > deadline or self.plain_apps >= self.clients:
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
        online = {node.node_id: node for node in grid.get_nodes()}
        new = any(node not in self._claims for node in online)
        self._claims = {node: self._claims.get(node) for node in sorted(online)}
        self._look_up({node: info.public_key for node, info in online.items()})
        for node_id in self._claims:
            self._joined.setdefault(node_id, (online[node_id].registered_at, len(self._joined)))
        messages = [Message(RecordDict(), dst_node_id=node, message_type=IDENTITY) for node in self.silent]
        seconds = max(0.0, min(timeout, _REPLY_SECONDS)) if new or wait_for_known else 0.0
        replies = list(grid.send_and_receive(messages, timeout=seconds)) if messages else []
        # The SuperLink verifies which message a reply answers; src_node_id is under the control of the sender.
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in replies:
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                log(WARNING, "ignoring a reply with a client-id that matches no open request")
            elif reply.has_error() and _NO_FUNCTION in (reply.error.reason or ""):
                self._claims[node] = _Claim(None, plain=True)
                self._ignore(node, "its app is a ClientApp, not a coterie.client.ClusteredClientApp")
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
            text = stated_versions(record.get("versions"))
            self._audit("introduction", client=client, node=str(node), versions=text or None)
            if text:
                log(INFO, "client %s is node %s: %s", client, node, text)
            key = SignedKey.from_record(record)
            key = key if key is not None and key.has_signed_box(client) else None
            return _Claim(client, False, record.get("repeats") is True, record.get("evaluates") is not False, key)
        self._ignore(node, f"invalid client-id {printable(repr(client))}")
        return _Claim(None)

    def renew_keys(self, keys: Mapping[int, SignedKey]) -> None:
        """Replace the keys of some clients, whose box keys are for one round each."""
        for client, key in keys.items():
            node = self.nodes.get(client)
            claim = None if node is None else self._claims.get(node)
            if node is not None and claim is not None:
                self._claims[node] = replace(claim, key=key)
                self.keys[client] = key

    def _look_up(self, keys: Mapping[int, bytes]) -> None:
        """Look up the client of every node that is online in the roster, which may have changed."""
        if self._roster is None:
            return
        self._members = {}
        for node, key in keys.items():
            try:
                client, name = self._roster.client_of(key)
                self._members[node] = client if client < self.clients else None
                if client >= self.clients:
                    self._ignore(node, f"{printable(name)} is client {client}, and the run has {self.clients} clients")
            except ValueError as error:
                self._members[node] = None
                self._ignore(node, printable(error))
        if self._roster.problem not in ("", self._problem):
            log(WARNING, "the roster cannot be updated: %s", printable(self._roster.problem))
        self._problem = self._roster.problem

    def _ignore(self, node: int, reason: str) -> None:
        """Warn once of a node that is ignored for this reason."""
        if self._warnings.get(node) != reason:
            log(WARNING, "ignoring node %s: %s", node, reason)
            self._audit("ignored", node=str(node), reason=reason)
        self._warnings[node] = reason

    def _assign(self) -> None:
        """Map every client to its node, and warn of nodes that claim the client of another."""
        self.nodes = {}
        for node in sorted(self._claims, key=lambda node: self._joined[node]):
            claim = self._claims[node]
            if claim is None or claim.client is None:
                continue
            if self._roster is not None and self._members[node] != claim.client:
                if self._members[node] is not None:
                    self._ignore(
                        node,
                        f"it claims client-id {claim.client}, and is client {self._members[node]} in the roster: "
                        "correct its client-id",
                    )
            elif (holder := self.nodes.setdefault(claim.client, node)) != node:
                self._ignore(
                    node,
                    f"it claims client-id {claim.client}, which node {holder} was registered with before, and stays "
                    "ignored while that node is online. Correct its client-id, unregister the other node, or use a "
                    "roster (coterie certs). A restarted node is listed under its old id for up to a minute",
                )
        claims = {client: self._claims[node] for client, node in self.nodes.items()}
        self.idempotent = {client for client, claim in claims.items() if claim is not None and claim.idempotent}
        self.unevaluated = {client for client, claim in claims.items() if claim is not None and not claim.evaluates}
        self.keys = {client: claim.key for client, claim in claims.items() if claim is not None and claim.key}
