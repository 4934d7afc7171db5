"""A Flower ``Grid`` whose nodes are calls in this process, for any ClientApp: to test it, and to debug it."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from bdb import BdbQuit
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from logging import ERROR
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from coterie.flower.metadata import set_message_id

_RUN_ID = 1


class SingleProcessGrid(Grid):
    """What grids of this process have in common; a subclass answers messages.

    Args:
        nodes: number of nodes; their ids are 1, 2, ...
    """

    def __init__(self, nodes: int) -> None:
        # Messages that this process creates; Flower has no public interface for their node id outside a run.
        if TaskIdentity._run_id is None:
            TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = _RUN_ID, _RUN_ID, SUPERLINK_NODE_ID
        self._number = nodes
        self._ids = itertools.count(1)
        self._replies: dict[str, Message] = {}  # of pushed messages, by the id of the message

    @abstractmethod
    def _answers(self, requests: Sequence[Message]) -> Iterable[Message]:
        """Return the replies to messages, which have ids."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids."""
        return range(1, self._number + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies; ``timeout`` has no effect, since the nodes run in this process."""
        return self._answers(self._numbered(messages))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer messages, and return their ids, by which :meth:`pull_messages` returns the replies."""
        requests = self._numbered(messages)
        self._replies |= {reply.metadata.reply_to_message_id: reply for reply in self._answers(requests)}
        return [message.metadata.message_id for message in requests]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to pushed messages, each once."""
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def _numbered(self, messages: Iterable[Message]) -> list[Message]:
        requests = list(messages)
        for message in requests:
            set_message_id(message, str(next(self._ids)))
        return requests

    def set_run(self, run: Any) -> None:
        """Accept the id of the only run."""

    @property
    def run(self) -> Any:
        """What there is of a run of Flower: its ``run_id``, and no app."""
        return SimpleNamespace(run_id=_RUN_ID, fab_hash=None)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message, as ``Message(...)`` makes it."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)


class InProcessGrid(SingleProcessGrid):
    """Runs any ClientApp on any strategy in this process, without Ray, daemons, threads or other processes.

    Nodes answer one after the other, in the order of the messages. As in Flower, each node has its own ``Context``,
    whose ``state`` lasts from message to message; a node shares no object with the server or with another node; and an
    exception of the app becomes an error reply, and leaves the state as it was. Its traceback is logged. A breakpoint
    (``breakpoint()``, ``pdb``) in the app stops this process, and leaving the debugger ends the run.

    Unlike in Flower's simulation, nodes share this process: variables of modules, and global random generators. Seed
    generators of your own, from the ``partition-id``, for results that do not depend on the engine.

    Args:
        client_app: the ClientApp, with its mods.
        nodes: number of nodes, whose node configurations hold ``partition-id`` and ``num-partitions`` as in Flower's
            simulation; or the node configuration of each.
        run_config: run configuration of the app.
        raise_errors: whether an exception of the app is raised here instead of becoming an error reply.

    Attributes:
        contexts: the context of each node, by node id: 1, 2, ...

    Raises:
        TypeError: ``client_app`` is not a ClientApp.
        ValueError: there is no node.

    Examples:
        >>> import numpy as np
        >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        >>> from flwr.clientapp import ClientApp
        >>> from flwr.serverapp.strategy import FedAvg
        >>> app = ClientApp()
        >>> @app.train()
        ... def train(message, context):
        ...     (weights,) = message.content["arrays"].to_numpy_ndarrays()
        ...     weights = weights + context.node_config["partition-id"]
        ...     reply = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": 10})}
        ...     return Message(RecordDict(reply), reply_to=message)
        >>> grid = InProcessGrid(app, 3)
        >>> strategy = FedAvg(fraction_evaluate=0.0)
        >>> result = strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
        >>> result.arrays.to_numpy_ndarrays()[0]  # the clients add 0, 1 and 2 in each round
        array([2., 2.])
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int | Sequence[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        raise_errors: bool = False,
    ) -> None:
        if not isinstance(client_app, ClientApp):
            raise TypeError(f"client_app must be a flwr.clientapp.ClientApp, not {type(client_app).__name__}")
        if isinstance(nodes, int):
            nodes = [{"partition-id": node, "num-partitions": nodes} for node in range(nodes)]
        if not nodes:
            raise ValueError("nodes must be a positive number, or a list of node configurations that is not empty")
        super().__init__(len(nodes))
        self._app, self._raises = client_app, raise_errors
        self._turn = threading.RLock()  # strategies of Flower's old interface send from several threads
        self.contexts = {
            node: Context(_RUN_ID, node, dict(config), RecordDict(), dict(run_config or {}))
            for node, config in enumerate(nodes, 1)
        }

    def _answers(self, requests: Sequence[Message]) -> list[Message]:
        with self._turn:
            return [self._answer(message) for message in requests]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self.contexts:
            reason = f"no node {node}: the nodes are 1 to {self._number}"
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)
        try:
            return self._reply(message, node)
        except BdbQuit:  # the debugger was left
            raise
        except (Exception, SystemExit) as error:
            if self._raises:
                raise
            log(ERROR, "node %s: %s: %s", node, type(error).__name__, error, exc_info=error)
            exited = isinstance(error, SystemExit)
            code = ErrorCode.CLIENT_APP_CRASHED if exited else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code, f"{type(error)}:<'{error}'>"), reply_to=message)

    def _reply(self, message: Message, node: int) -> Message:
        """Return the reply of the app to copies of the message and of the context of its node, and keep the latter."""
        context = deepcopy(self.contexts[node])
        copy = make_message(metadata=deepcopy(message.metadata), content=deepcopy(message.content))
        reply = self._app(copy, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected a Message")
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            raise ValueError("the ClientApp returned a message that is no reply to this one: pass reply_to=message")
        self.contexts[node] = context
        return Message(reply.error if reply.has_error() else deepcopy(reply.content), reply_to=message)
