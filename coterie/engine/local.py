"""The local engine: a Flower ``Grid`` in one process, without daemons.

One call of a handler processes all messages with the same content. Models with batched training run in this process
with all its threads; others run in worker processes, one per core with one thread each, client by client.

A client's reply must not depend on the data of another client. If a call with several clients fails, or if a worker
process dies, each client is therefore repeated alone, from its earlier state; only clients that fail alone return an
error. A record-level client charges its ledger before it draws noise, so a repeated client may be charged twice: its
ledger then overstates the privacy loss.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from logging import WARNING
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from coterie.client import HANDLERS, Client, ClientError, ReplyOrError, StateFile, torch_device
from coterie.logs import printable
from coterie.messages import CONFIG, GAN
from coterie.progress import ProgressCallback, drain_progress, ignore_progress, set_progress_sink

# Clients per call of a handler: bounds the memory of a batched call, and the time to the first reply.
_CHUNK = 256
_CLIENT_FAILED = 1
# Seconds between polls for progress reports of workers.
_POLL = 0.2

# State of a client, as StateFile.read returns it; None if it cannot be read.
_State: TypeAlias = dict[str, np.ndarray[Any, Any]] | None


class LocalGrid(Grid):
    """All clients in this process or in its workers; node ids are client ids plus one.

    Args:
        clients: M.
        workers: worker processes; 0 runs the clients in this process.
        progress: called with progress reports of clients.
    """

    def __init__(self, clients: int, workers: int = 0, progress: ProgressCallback = ignore_progress) -> None:
        _identify()
        self._clients = [Client(client_id) for client_id in range(clients)]
        self._progress = progress
        self._workers = workers
        self._reports: Any = None
        self._pool: Any = None
        self._broken = False
        if workers:
            self._start_workers()
        else:
            set_progress_sink(progress)
        self._ids = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        """Node ids, 1 to M."""
        return range(1, len(self._clients) + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield replies as they arrive; ``timeout`` has no effect, since the clients run in this process."""
        requests = list(messages)
        for message in requests:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
        return self._answers(requests)

    def _answers(self, requests: Sequence[Message]) -> Iterator[Message]:
        pending = [(chunk, self._states(chunk), self._submit(chunk)) for chunk in self._chunks(requests)]
        repeated: list[tuple[Message, _State]] = []
        for chunk, states, future in pending:
            try:
                contents = self._finish(chunk, future)
            except Exception as error:
                if len(chunk) > 1 or isinstance(error, BrokenProcessPool):  # it is unknown which client failed
                    repeated += zip(chunk, states, strict=True)
                else:
                    yield self._reply(chunk[0], error)
            else:
                yield from map(self._reply, chunk, contents)
        for message, before in repeated:
            yield self._reply(message, self._alone(message, before))

    def _alone(self, message: Message, states: _State) -> ReplyOrError | Exception:
        """Return the reply of one client, computed alone from its state before the first attempt."""
        try:
            (file,), (now,) = self._state_files([message]), self._states([message])
            if states is not None and (states or now):
                file.write(states)
            if self._broken:
                self._start_workers()
            (reply,) = self._finish([message], self._submit([message]))
        except Exception as error:
            return error
        return reply

    def _reply(self, message: Message, content: ReplyOrError | Exception) -> Message:
        if not isinstance(content, Exception):
            return Message(content, reply_to=message)
        client = self._clients[message.metadata.dst_node_id - 1].client_id
        log(WARNING, "client %s failed: %s", client, printable(content))
        return Message(Error(_CLIENT_FAILED, printable(f"{type(content).__name__}: {content}")), reply_to=message)

    def _chunks(self, requests: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Split messages into chunks of bounded length with the same content and message type."""
        alike = itertools.groupby(requests, key=lambda m: (m.metadata.message_type, id(m.content)))
        for _, run in alike:
            group = list(run)
            size = 1 if _runs_one_by_one(group[0]) else _CHUNK
            if self._workers:
                size = min(size, -(-len(group) // self._workers))
            yield from (group[begin : begin + size] for begin in range(0, len(group), size))

    def _submit(self, chunk: Sequence[Message]) -> Future[Any] | None:
        """Return the future replies of a worker; None if this process computes them."""
        if not self._workers:
            return None
        try:
            future: Future[Any] = self._pool.submit(_handle, *self._arguments(chunk))
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        return future

    def _finish(self, chunk: Sequence[Message], future: Future[Any] | None) -> Sequence[ReplyOrError]:
        if future is None:
            return _handle(*self._arguments(chunk))
        while not wait([future], _POLL).done:
            for report in drain_progress(self._reports):
                self._progress(report)
        try:
            replies: Sequence[ReplyOrError] = future.result()
        except BrokenProcessPool:
            self._broken = True
            raise
        return replies

    def _state_files(self, chunk: Sequence[Message]) -> list[StateFile]:
        """Return the state file of each client."""
        folder = chunk[0].content.config_records.get(CONFIG, ConfigRecord()).get("clients-dir")
        return [
            StateFile(Path(str(folder)) if folder else None, client.client_id) for client in self._arguments(chunk)[2]
        ]

    def _states(self, chunk: Sequence[Message]) -> list[_State]:
        return [_read(file) for file in self._state_files(chunk)]

    def _arguments(self, chunk: Sequence[Message]) -> tuple[str, RecordDict, list[Client]]:
        clients = [self._clients[message.metadata.dst_node_id - 1] for message in chunk]
        return chunk[0].metadata.message_type, chunk[0].content, clients

    def close(self) -> None:
        """Stop the workers and the progress reports."""
        set_progress_sink(None)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start_workers(self) -> None:
        self._reports, self._pool = _pool(self._workers)
        self._broken = False

    # The rest of Flower's interface.

    def set_run(self, run: Any) -> None:
        """Accept the id of the only run."""

    @property
    def run(self) -> Any:
        """Not known to Flower."""
        raise NotImplementedError("the local engine has no Flower run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message, as ``Message(...)`` makes it."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not supported: use :meth:`send_and_receive`."""
        raise NotImplementedError("not supported by the local engine; use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not supported: use :meth:`send_and_receive`."""
        raise NotImplementedError("not supported by the local engine; use send_and_receive")


def _identify() -> None:
    """Set the node id of messages that this process creates; Flower has no public interface for it outside a run."""
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.supercore.task_identity import TaskIdentity

    if TaskIdentity._run_id is None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID


def _pool(workers: int) -> tuple[Any, ProcessPoolExecutor]:
    """Start the workers; return their queue of progress reports and their pool."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["coterie.client.handlers"])  # torch is imported once for all workers
    reports = context.Queue()
    return reports, ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(reports,))


def _prepare(reports: Any) -> None:
    import torch

    torch.set_num_threads(1)
    reports.cancel_join_thread()  # the reader may be gone
    set_progress_sink(reports.put)


def _read(file: StateFile) -> _State:
    try:
        return file.read()
    except ClientError:
        return None


def _handle(message_type: str, content: RecordDict, clients: list[Client]) -> Sequence[ReplyOrError]:
    return HANDLERS[message_type](content, clients)


def _runs_one_by_one(message: Message) -> bool:
    """Whether each client is a chunk of its own, since batching does not speed up its training."""
    return (
        message.metadata.message_type == GAN
        and torch_device(str(message.content.config_records[CONFIG]["device"])) == "cpu"
    )


def workers_for(model_is_batched: bool, device: str, cores: int) -> int:
    """Return the number of worker processes: 0 for batched training, a GPU or one core, otherwise one per core."""
    return 0 if model_is_batched or torch_device(device) != "cpu" or cores < 2 else cores
