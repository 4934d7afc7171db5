"""Which client is at which node: the nodes themselves say it, and it may change from round to round."""

from __future__ import annotations

import time
from collections.abc import Collection
from logging import WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.messages import IDENTITY, REPLY

_POLL_SECONDS = 0.5
# What a node says that is none of the clients.
_NOBODY = -1


class Roster:
    """The clients that are here, and their nodes.

    Flower's SuperLink takes a node for gone when it has been silent for a while; who is gone is not asked, and one
    that comes back is asked who it is now. Of several nodes of a client the first counts, as long as it is here.

    Args:
        clients: M; clients are 0 to M-1.
        wait: seconds to wait for them, and for a node to say who it is.

    Attributes:
        nodes: node id of every client that is here.
        repeating: clients that say the same again when they are asked the same again.
    """

    def __init__(self, clients: int, wait: float) -> None:
        self.clients, self.wait = clients, wait
        self.nodes: dict[int, int] = {}
        self.repeating: set[int] = set()
        self._says: dict[int, int | None] = {}  # the client that a node says it is

    def wait_for(self, grid: Grid, least: int, among: Collection[int] | None = None) -> bool:
        """Whether so many clients are here, of some or of all, before the time to wait is over."""
        wanted = range(self.clients) if among is None else among
        deadline = time.monotonic() + self.wait
        self.greet(grid)
        while not (enough := sum(client in self.nodes for client in wanted) >= least) and time.monotonic() <= deadline:
            time.sleep(_POLL_SECONDS)
            self.greet(grid, again=True)
        return enough

    def greet(self, grid: Grid, again: bool = False) -> None:
        """Ask the nodes that came since the last time who they are, and forget those that went.

        Args:
            grid: to the nodes.
            again: ask those too that gave no answer.
        """
        here = sorted(set(grid.get_node_ids()))
        new = [node for node in here if node not in self._says or (again and self._says[node] is None)]
        self._says = {node: self._says.get(node) for node in here}
        messages = [Message(RecordDict(), dst_node_id=node, message_type=IDENTITY) for node in new]
        for reply in grid.send_and_receive(messages, timeout=self.wait) if messages else ():
            record = reply.content.get(REPLY) if reply.has_content() else None
            client = record.get("client-id") if isinstance(record, ConfigRecord) else None
            if reply.has_error():  # its src_node_id is the SuperLink's
                log(WARNING, "a node does not say who it is: %s", reply.error.reason)
                continue
            if type(client) is not int or not 0 <= client < self.clients:
                log(WARNING, "node %s is left out: client-id %r", reply.metadata.src_node_id, client)
                client = _NOBODY
            self._says[reply.metadata.src_node_id] = client
            if isinstance(record, ConfigRecord) and record.get("repeats") is True:
                self.repeating.add(client)
            else:
                self.repeating.discard(client)
        nodes = {client: node for client, node in self.nodes.items() if self._says.get(node) == client}
        for node, said in self._says.items():
            if said not in (None, _NOBODY) and nodes.setdefault(said, node) != node and node in new:
                log(WARNING, "node %s is left out: client %s is at another", node, said)
        self.nodes = nodes
