"""The local engine: a Flower ``Grid`` in one process, without daemons.

One call of a handler processes messages with the same content. Worker processes, one per core with one thread each,
train small units of clients; short runs train in this process. A process evaluates each model once per test set.

A client's reply must not depend on the data of another client. If a call with several clients fails, or if a worker
process dies, each client is therefore repeated alone, from its former state, since a call that fails leaves none; only
clients that fail alone return an error. A record-level client charges its ledger before it draws noise, so a repeated
client may be charged twice: its ledger then overstates the privacy loss.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.logger import log

from coterie.client.answer import handle
from coterie.client.cohort import torch_device
from coterie.client.handlers import ReplyOrError, train_and_sum
from coterie.client.identity import Client
from coterie.client.masking_keys import MaskingKeys, simulated_keys
from coterie.client.state import ClientError, KeptStates, write_states
from coterie.engine.nodes import SingleProcessGrid
from coterie.engine.workers import Pool, Workers
from coterie.logs import ProgressCallback, ignore_progress, printable, set_progress_sink
from coterie.privacy import Summed
from coterie.rounds.batches import PartialSums
from coterie.wire.messages import CONFIG, EVALUATE, GAN, REFUSALS, payload

# Clients per call of a handler: bounds the memory of a batched call, and the time to the first reply.
_CHUNK = 256
# Calls per worker and round of training: several balance clients of different sizes, fewer cost less.
# One call of this many clients is balanced too: with sums, each of n calls gets every n-th client.
_UNITS, _MANY = 4, 32
# Calls per worker that wait or whose replies are not consumed yet, and bytes of models from which it is 1.
_AHEAD = 2
_LARGE = 1 << 25
# Bytes of the models in the messages to the clients of one call.
_MODELS = 1 << 26
_CLIENT_FAILED = 1

#: Creates a container for the updates of a call.
NewSums: TypeAlias = Callable[[], Summed]


class Replies(NamedTuple):
    """What a call returns.

    Attributes:
        contents: of the replies; None for those that are in ``sums``.
        sums: of the updates.
        states: file of the states that the clients leave; None if they leave none.
    """

    contents: Sequence[ReplyOrError | None]
    sums: Summed | None
    states: Path | None


class _Call(NamedTuple):
    """A call of a handler.

    Attributes:
        messages: with the same content.
        arguments: of :func:`answer` after the content.
        future: the replies of a worker; None if this process computes them.
    """

    messages: Sequence[Message]
    arguments: tuple[str, list[Client], NewSums | None, Path | None]
    future: Future[Replies] | None


def answer(
    content: RecordDict, message_type: str, clients: list[Client], new_sums: NewSums | None, file: str | Path | None
) -> Replies:
    """Call a handler; ``file`` is for the states that the clients leave."""
    sums = new_sums() if new_sums else None
    contents = handle(message_type, content, clients) if sums is None else train_and_sum(content, clients, sums)
    states = {client.client_id: client.state.written for client in clients if client.state is not None}
    left = {client: state for client, state in states.items() if state is not None}
    return Replies(contents, sums, None if file is None else write_states(Path(file), left))


class LocalGrid(SingleProcessGrid):
    """All of Coterie's own clients in this process or in its workers; node ids are client ids plus one.

    Args:
        clients: M.
        workers: number of worker processes, or what takes their place; 0 runs the clients in this process.
        progress: called with progress reports of clients.

    Attributes:
        answer: computes the replies of a call.
    """

    answer: ClassVar[Callable[..., Replies]] = staticmethod(answer)

    def __init__(self, clients: int, workers: int | Pool = 0, progress: ProgressCallback = ignore_progress) -> None:
        super().__init__(clients)
        self._workers: Pool | None = None
        if workers:
            self._workers = Workers(workers, progress) if isinstance(workers, int) else workers
        self._count = self._workers.count if self._workers else 0
        self._states: KeptStates | None = None
        if not self._workers:
            set_progress_sink(progress)

    def _answers(self, requests: Sequence[Message]) -> Iterator[Message]:
        """Yield replies as they arrive."""
        return (reply for reply in self._run(requests) if isinstance(reply, Message))

    def _run(self, requests: Sequence[Message], new_sums: NewSums | None = None) -> Iterator[Message | PartialSums]:
        chunks, pending = self._chunks(requests, new_sums is not None), deque[_Call]()
        large = bool(requests) and payload(requests[0].content) > _LARGE
        ahead = max(1, self._count * (1 if large else _AHEAD))
        repeated: list[Message] = []
        while True:
            pending += (self._begin(chunk, new_sums) for chunk in itertools.islice(chunks, ahead - len(pending)))
            if not pending:
                break
            call = pending.popleft()
            try:
                contents, sums = self._finish(call)
            except Exception as error:
                if len(call.messages) > 1 or isinstance(error, BrokenProcessPool):  # it is unknown which client failed
                    repeated += call.messages
                else:
                    yield _reply(call.messages[0], error)
                continue
            answers = list(zip(call.messages, contents, strict=True))
            if sums is not None:
                yield PartialSums(sums, [message for message, content in answers if content is None])
            yield from (_reply(message, content) for message, content in answers if content is not None)
        for message in repeated:
            yield self.alone(message)
        if self._workers:
            self._workers.forget()

    def alone(self, message: Message) -> Message:
        """Return the reply of one client, computed alone."""
        try:
            (content,), _ = self._finish(self._begin([message], None))
        except Exception as error:
            return _reply(message, error)
        assert content is not None
        return _reply(message, content)

    def _chunks(self, requests: Sequence[Message], summed: bool) -> Iterator[Sequence[Message]]:
        """Split messages into chunks of bounded length with the same content and message type."""
        alike = itertools.groupby(requests, key=lambda m: (m.metadata.message_type, id(m.content)))
        for _, run in alike:
            group = list(run)
            content, message_type = group[0].content, group[0].metadata.message_type
            device = str(content.config_records[CONFIG]["device"]) if message_type == GAN else ""
            size = 1 if device and torch_device(device) == "cpu" else _CHUNK  # batching speeds up no GAN on a CPU
            size = min(size, max(1, _MODELS // max(payload(content), 1)))
            if self._count:
                share = -(-len(group) // self._count)
                once = message_type == EVALUATE or (summed and share >= _MANY)
                size = min(size, share if once else -(-share // _UNITS))
            calls = -(-len(group) // size)
            for number in range(calls):
                yield group[number::calls] if summed else group[number * size : (number + 1) * size]

    def _begin(self, messages: Sequence[Message], new_sums: NewSums | None) -> _Call:
        """Begin a call in a worker, or prepare one in this process."""
        content, message_type = messages[0].content, messages[0].metadata.message_type
        states = self._states_for(messages[0])
        clients = [self._client(message.metadata.dst_node_id - 1) for message in messages]
        if states is not None:
            clients = [replace(client, state=states.of(client.client_id)) for client in clients]
        arguments = message_type, clients, new_sums, states.new_file() if states is not None else None
        future = None
        if self._workers is not None:
            future = self._workers.submit(self.answer, content, *arguments)
        return _Call(messages, arguments, future)

    def _finish(self, call: _Call) -> tuple[Sequence[ReplyOrError | None], Summed | None]:
        """Wait for the replies of a call or compute them, and keep the states that its clients leave."""
        if self._workers is not None and call.future is not None:
            contents, sums, states = self._workers.result(call.future)
        else:
            contents, sums, states = self.answer(call.messages[0].content, *call.arguments)
        if self._states is not None:
            self._states.keep(states)
        return contents, sums

    def _states_for(self, message: Message) -> KeptStates | None:
        """Return the states of all clients before a call in the message's round; None if they have no folder."""
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        folder, number = config.get("clients-dir"), config.get("round", 0)
        if not folder or not isinstance(number, int):
            return None
        if self._states is None or self._states.folder != Path(str(folder)):
            self._states = KeptStates(Path(str(folder)))
        self._states.begin(number)
        return self._states

    def _client(self, client_id: int) -> Client:
        return Client(client_id)

    def close(self) -> None:
        """Stop the workers and the progress reports."""
        set_progress_sink(None)
        if self._workers is not None:
            self._workers.close()


class MaskedGrid(LocalGrid):
    """A :class:`LocalGrid` whose clients have keys for masked rounds, and introduce themselves with them."""

    @cached_property
    def _keys(self) -> dict[int, MaskingKeys]:
        return simulated_keys(range(self._number))

    def _client(self, client_id: int) -> Client:
        return Client(client_id, keys=self._keys[client_id])


class SummingGrid(LocalGrid):
    """A :class:`LocalGrid` that sums clipped updates where they are computed, wherever the mechanism sums them.

    The replies then never become messages, and clients do not introduce themselves. The models are those of
    :class:`LocalGrid` up to the order of sums.

    Args:
        clients: see :class:`LocalGrid`.
        workers: see :class:`LocalGrid`.
        progress: see :class:`LocalGrid`.
        check: called before every round; raises if the clients cannot take part, before the round is charged.
    """

    def __init__(
        self,
        clients: int,
        workers: int | Pool = 0,
        progress: ProgressCallback = ignore_progress,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(clients, workers, progress)
        self._check = check

    @property
    def nodes_of_clients(self) -> dict[int, int]:
        """See :class:`coterie.rounds.client_registry.SimulatesClients`."""
        self._check()
        return self._nodes

    @cached_property
    def _nodes(self) -> dict[int, int]:
        return dict(zip(range(self._number), self.get_node_ids(), strict=True))

    def send_and_sum(self, messages: Iterable[Message], new_sums: NewSums) -> Iterator[Message | PartialSums]:
        """See :class:`coterie.rounds.batches.SupportsSums`."""
        return self._run(self._numbered(messages), new_sums)


def _reply(message: Message, content: ReplyOrError | Exception) -> Message:
    if not isinstance(content, Exception):
        return Message(content, reply_to=message)
    log(WARNING, "client %s failed: %s", message.metadata.dst_node_id - 1, printable(content))
    code = REFUSALS.get(content.kind, _CLIENT_FAILED) if isinstance(content, ClientError) else _CLIENT_FAILED
    return Message(Error(code, printable(f"{type(content).__name__}: {content}")), reply_to=message)
