"""The local engine: a Flower ``Grid`` in one process, without daemons.

One call of a handler processes messages with the same content. Worker processes, one per core with one thread each,
train small units of clients; short runs train in this process. Models are evaluated in this process, each once per test
set.

A client's reply must not depend on the data of another client. If a call with several clients fails, or if a worker
process dies, each client is therefore repeated alone, from its earlier state; only clients that fail alone return an
error. A record-level client charges its ledger before it draws noise, so a repeated client may be charged twice: its
ledger then overstates the privacy loss.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.logger import log

from coterie.client.cohort import torch_device
from coterie.client.handlers import ReplyOrError, handle, train_and_sum
from coterie.client.identity import Client
from coterie.client.masking_keys import MaskingKeys, simulated_keys
from coterie.client.state import ClientError, StateFile
from coterie.engine.nodes import SingleProcessGrid
from coterie.engine.workers import Workers
from coterie.logs import printable
from coterie.privacy import Summed
from coterie.progress import ProgressCallback, ignore_progress, set_progress_sink
from coterie.rounds.exchange import PartialSums
from coterie.wire.messages import CONFIG, EVALUATE, GAN, REFUSALS, payload

# Clients per call of a handler: bounds the memory of a batched call, and the time to the first reply.
_CHUNK = 256
# Calls per worker and round: more balance clients of different sizes, fewer cost less.
_UNITS = 4
# Calls per worker that wait or whose replies are not consumed yet, and bytes of models from which it is 1.
_AHEAD = 2
_LARGE = 1 << 25
# Bytes of the models in the messages to the clients of one call.
_MODELS = 1 << 26
_CLIENT_FAILED = 1

# State of a client, as StateFile.read returns it; None if it cannot be read.
_State: TypeAlias = dict[str, np.ndarray[Any, Any]] | None
# A call: its messages, the states of their clients before it, and its future result.
_Pending: TypeAlias = tuple[Sequence[Message], list[_State], "Future[_Replies] | None"]
#: Creates a container for the updates of a call.
NewSums: TypeAlias = Callable[[], Summed]
#: Replies of a call; None for those that are in its sums.
_Replies: TypeAlias = tuple[Sequence[ReplyOrError | None], Summed | None]


class LocalGrid(SingleProcessGrid):
    """All of Coterie's own clients in this process or in its workers; node ids are client ids plus one.

    Args:
        clients: M.
        workers: worker processes; 0 runs the clients in this process.
        progress: called with progress reports of clients.
    """

    def __init__(self, clients: int, workers: int = 0, progress: ProgressCallback = ignore_progress) -> None:
        super().__init__(clients)
        self._workers = Workers(workers, progress) if workers else None
        self._count = workers
        if not workers:
            set_progress_sink(progress)

    def _answers(self, requests: Sequence[Message]) -> Iterator[Message]:
        """Yield replies as they arrive."""
        return (reply for reply in self._run(requests) if isinstance(reply, Message))

    def _run(self, requests: Sequence[Message], new_sums: NewSums | None = None) -> Iterator[Message | PartialSums]:
        chunks, pending = self._chunks(requests), deque[_Pending]()
        ahead = self._ahead(requests)
        repeated: list[tuple[Message, _State]] = []
        while True:
            for chunk in itertools.islice(chunks, ahead - len(pending)):
                pending.append((chunk, self._states(chunk), self._submit(chunk, new_sums)))
            if not pending:
                break
            chunk, states, future = pending.popleft()
            try:
                contents, sums = self._finish(chunk, future, new_sums)
            except Exception as error:
                if len(chunk) > 1 or isinstance(error, BrokenProcessPool):  # it is unknown which client failed
                    repeated += zip(chunk, states, strict=True)
                else:
                    yield _reply(chunk[0], error)
                continue
            answers = list(zip(chunk, contents, strict=True))
            if sums is not None:
                yield PartialSums(sums, [message for message, content in answers if content is None])
            yield from (_reply(message, content) for message, content in answers if content is not None)
        for message, before in repeated:
            yield _reply(message, self._alone(message, before))
        if self._workers:
            self._workers.forget()

    def _alone(self, message: Message, states: _State) -> ReplyOrError | Exception:
        """Return the reply of one client, computed alone from its state before the first attempt."""
        try:
            (file,), (now,) = self._state_files([message]), self._states([message])
            if states is not None and (states or now):
                file.write(states)
            (reply,), _ = self._finish([message], self._submit([message], None), None)
        except Exception as error:
            return error
        assert reply is not None
        return reply

    def _chunks(self, requests: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Split messages into chunks of bounded length with the same content and message type."""
        alike = itertools.groupby(requests, key=lambda m: (m.metadata.message_type, id(m.content)))
        for _, run in alike:
            group = list(run)
            size = 1 if _runs_one_by_one(group[0]) else _CHUNK
            size = min(size, max(1, _MODELS // max(payload(group[0].content), 1)))
            if self._in_worker(group[0]):
                size = min(size, -(-len(group) // (self._count * _UNITS)))
            yield from (group[begin : begin + size] for begin in range(0, len(group), size))

    def _ahead(self, requests: Sequence[Message]) -> int:
        """Return how many calls wait or have replies that are not consumed yet."""
        large = bool(requests) and payload(requests[0].content) > _LARGE
        return max(1, self._count * (1 if large else _AHEAD))

    def _in_worker(self, message: Message) -> bool:
        return self._workers is not None and message.metadata.message_type != EVALUATE

    def _submit(self, chunk: Sequence[Message], new_sums: NewSums | None) -> Future[_Replies] | None:
        """Return the future replies of a worker; None if this process computes them."""
        if self._workers is None or not self._in_worker(chunk[0]):
            return None
        message_type, clients = chunk[0].metadata.message_type, self._clients(chunk)
        return self._workers.submit(_handle, chunk[0].content, message_type, clients, new_sums)

    def _finish(self, chunk: Sequence[Message], future: Future[_Replies] | None, new_sums: NewSums | None) -> _Replies:
        if self._workers is None or future is None:
            return _handle(chunk[0].content, chunk[0].metadata.message_type, self._clients(chunk), new_sums)
        return self._workers.result(future)

    def _client(self, client_id: int) -> Client:
        return Client(client_id)

    def _clients(self, chunk: Sequence[Message]) -> list[Client]:
        return [self._client(message.metadata.dst_node_id - 1) for message in chunk]

    def _state_files(self, chunk: Sequence[Message]) -> list[StateFile]:
        """Return the state file of each client."""
        return [StateFile(_folder(chunk[0]), client.client_id) for client in self._clients(chunk)]

    def _states(self, chunk: Sequence[Message]) -> list[_State]:
        folder = _folder(chunk[0])
        if folder is not None and not folder.exists():  # no client has state
            return [{} for _ in chunk]
        return [_read(file) for file in self._state_files(chunk)]

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
        workers: int = 0,
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
        """See :class:`coterie.rounds.exchange.SupportsSums`."""
        return self._run(self._numbered(messages), new_sums)


def _folder(message: Message) -> Path | None:
    """Return the folder of the clients' state files."""
    folder = message.content.config_records.get(CONFIG, ConfigRecord()).get("clients-dir")
    return Path(str(folder)) if folder else None


def _reply(message: Message, content: ReplyOrError | Exception) -> Message:
    if not isinstance(content, Exception):
        return Message(content, reply_to=message)
    log(WARNING, "client %s failed: %s", message.metadata.dst_node_id - 1, printable(content))
    code = REFUSALS.get(content.kind, _CLIENT_FAILED) if isinstance(content, ClientError) else _CLIENT_FAILED
    return Message(Error(code, printable(f"{type(content).__name__}: {content}")), reply_to=message)


def _read(file: StateFile) -> _State:
    try:
        return file.read()
    except ClientError:
        return None


def _handle(content: RecordDict, message_type: str, clients: list[Client], new_sums: NewSums | None) -> _Replies:
    if new_sums is None:
        return handle(message_type, content, clients), None
    sums = new_sums()
    return train_and_sum(content, clients, sums), sums


def _runs_one_by_one(message: Message) -> bool:
    """Whether each client is a chunk of its own, since batching does not speed up its training."""
    return (
        message.metadata.message_type == GAN
        and torch_device(str(message.content.config_records[CONFIG]["device"])) == "cpu"
    )
