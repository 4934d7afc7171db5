"""The messages of one request to a cohort, their replies, and a grid that sums these itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, Protocol, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.logs import printable
from coterie.privacy import Summed
from coterie.rounds.run_state import Models, Run, StrategyError
from coterie.wire import Request
from coterie.wire.messages import CHARGED_REQUESTS, CONFIG, HEAD, MODELS, REFUSALS, pack_models

#: Reason of every dropped reply of a certified client-level run, whose participants are secret.
WITHHELD = "withheld under client-level privacy: see the clients' logs"
#: Flower's transport errors: the node or its process is gone, or the time is over.
TRANSPORT_ERRORS = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)
_KINDS = {code: kind for kind, code in REFUSALS.items()}


class MessageBatch:
    """One message for each recipient.

    Args:
        run: the run.
        request: completed, or a step of a masked round.
        contents: contents of messages, with their recipients.
    """

    def __init__(self, run: Run, request: Any, contents: Iterable[tuple[RecordDict, Collection[int]]]) -> None:
        self._run, self.request = run, request
        self._clients: dict[str, int] = {}  # by id of the message
        self._answered: set[int] = set()
        #: Clients that replied with an error or an invalid reply: they are not missing, since data may decide this.
        self.unusable: set[int] = set()
        self.messages: dict[int, Message] = {}
        for content, clients in contents:
            run.statistics.sent(content, len(clients))
            self.messages |= {client: self._message(client, content) for client in clients}

    @classmethod
    def of_models(
        cls, run: Run, request: Request, models: Models, assignments: Mapping[int, int] | None, clients: Collection[int]
    ) -> MessageBatch:
        """One message for each registered client: all models, or the one assigned to it.

        Args:
            run: the run.
            request: completed.
            models: (k, d).
            assignments: index of the one model that each client receives; other clients get no message. None: each
                receives all.
            clients: the recipients; those without a node are left out.

        Raises:
            StrategyError: the configuration sets a field of the request, which no plan would price.
        """
        present = [client for client in clients if client in run.registry.nodes]
        if assignments is None:
            return cls(run, request, [(message_content(run, pack_models(models, run.state.layout), request), present)])
        contents = []
        for cluster, model in enumerate(models):
            members = [client for client in present if assignments.get(client) == cluster]
            arrays = pack_models(model[None], run.state.layout)
            contents.append((message_content(run, arrays, replace(request, cluster=cluster)), members))
        return cls(run, request, contents)

    def _message(self, client: int, content: RecordDict) -> Message:
        head = self._run.heads.get(client)
        if head is not None and self.request.message_type in CHARGED_REQUESTS:
            content = RecordDict({**content, CONFIG: ConfigRecord({**content.config_records[CONFIG], HEAD: head})})
        return Message(
            content,
            dst_node_id=self._run.registry.nodes[client],
            message_type=self.request.message_type,
            group_id=str(self.request.round),
        )

    def repeat(self, clients: Collection[int]) -> list[Message]:
        """The same messages for those of ``clients`` that are registered, at their current nodes."""
        present = sorted(self._run.registry.nodes.keys() & clients)
        for client in present:
            self.messages[client] = self._message(client, self.messages[client].content)
            self._run.statistics.sent(self.messages[client].content)
        return [self.messages[client] for client in present]

    def replies(self, replies: Iterable[Message]) -> Iterator[tuple[int, RecordDict]]:
        """(client, content) of the first reply to each message; other replies are dropped."""
        for reply in replies:
            content = reply.content if reply.has_content() else None
            self._run.statistics.received(content)
            client = self.recipient(reply.metadata.reply_to_message_id)
            if client is None or client in self._answered:
                self.drop(None, "it matches no open request, or is a duplicate")
                continue
            self._answered.add(client)
            if reply.has_error():
                refuse = self.drop if reply.error.code in TRANSPORT_ERRORS else self.reject
                refuse(client, self._refusal(client, reply.error))
            elif isinstance(content, RecordDict):
                yield client, content
            else:
                self.reject(client, f"its content is a {type(content).__name__}, expected a RecordDict")

    def _refusal(self, client: int, error: Error) -> str:
        """Return why a client sent an error, and note a client that refuses to be trained."""
        kind = _KINDS.get(error.code)
        if kind in (None, "failed"):
            return f"the client failed: {error.reason}"
        if self.request.message_type in CHARGED_REQUESTS and not self._withheld:
            self._run.statistics.refusing[client] = str(kind)
        return f"the client refuses ({kind}): {error.reason}"

    @property
    def _withheld(self) -> bool:
        """Whether participants are secret: in certified client-level runs."""
        return self._run.plan.hides_clients and self._run.streams.secret

    def recipient(self, message_id: str) -> int | None:
        """The client that received a message; None if there is none of this id."""
        if message_id not in self._clients:  # Flower assigns ids when it sends messages
            self._clients = {message.metadata.message_id: client for client, message in self.messages.items()}
        return self._clients.get(message_id)

    def reject(self, client: int, reason: str) -> None:
        """Drop a reply that cannot be used; its client is not missing."""
        self.unusable.add(client)
        self.drop(client, reason)

    def drop(self, client: int | None, reason: str) -> None:
        """Count a reply as dropped. Certified client-level runs keep a total only."""
        reason, withheld = printable(reason), self._withheld
        self._run.statistics.drop(WITHHELD if withheld else reason)
        if not withheld:  # participation is public at record level
            fields = {"round": self.request.round, "client": client, "reason": reason}
            log(WARNING, "reply of client %s dropped: %s", "?" if client is None else client, reason, extra=fields)


def message_content(run: Run, arrays: ArrayRecord, request: Request) -> RecordDict:
    """Content of a message to clients: models, and the run's configuration with the request.

    Raises:
        StrategyError: the configuration sets a field of the request, which no plan would price.
    """
    if taken := run.state.config.keys() & request.keys():
        names = ", ".join(sorted(taken))
        raise StrategyError(f"the client configuration must not set {names}: the strategy sets these fields")
    return RecordDict({MODELS: arrays, CONFIG: ConfigRecord({**run.state.config, **request.to_record()})})


@dataclass(frozen=True)
class PartialSums:
    """Sums of the updates of some clients, computed where they are simulated; never received over a network.

    Attributes:
        sums: of the clipped updates.
        messages: the requests that they reply to.
    """

    sums: Summed
    messages: Sequence[Message]


@runtime_checkable
class SupportsSums(Protocol):
    """A grid that simulates clients and sums their updates itself, so that k x d numbers come back, not n x d."""

    def send_and_sum(
        self, messages: Iterable[Message], new_sums: Callable[[], Summed]
    ) -> Iterator[Message | PartialSums]:
        """Yield partial sums, and the replies of clients that failed or whose updates are to be dropped.

        Args:
            messages: requests to train.
            new_sums: creates an empty container, in this or in another process.
        """


def send(
    grid: Grid, messages: Iterable[Message], timeout: float, new_sums: Callable[[], Summed] | None = None
) -> Iterable[Any]:
    """Send messages, which expire after ``timeout`` seconds; return replies, or partial sums, in order of arrival.

    Args:
        grid: to the clients.
        messages: to be sent.
        timeout: in seconds.
        new_sums: creates an empty container for the sums of a grid that supports them; None: every reply is needed.
    """
    messages = list(messages)
    for message in messages:
        message.metadata.ttl = timeout
    if new_sums is not None and isinstance(grid, SupportsSums):
        return grid.send_and_sum(messages, new_sums)
    return grid.send_and_receive(messages, timeout=timeout)
