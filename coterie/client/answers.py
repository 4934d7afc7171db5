"""Cached replies of a round: a repeated request returns the cached reply at no additional privacy cost.

A reply can be lost on its way, and a server can die before it counts one; then it asks again, for the same round, with
the same models. A new answer would be new noise on the same records, and a second charge. The old one reveals nothing
that was not paid for, so it is on the client's disk before it leaves.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError

from coterie.client.memory import ClientError
from coterie.files import open_private, private_folder
from coterie.messages import CONFIG
from coterie.wire import digest


class Answers:
    """The folder of one client: a file for every question of the latest round, named by round and question.

    Args:
        folder: what the client keeps.
        client_id: our own id for it.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self._folder = folder / f"client-{client_id}.answers"
        private_folder(self._folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While another app of this client answers, wait: an app can outlive the SuperNode that asked it."""
        with open_private(self._folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def to(self, verb: str, question: RecordDict) -> RecordDict | None:
        """What was answered to the same verb and content, to the bit, if it was.

        Raises:
            ClientError: it cannot be read; to answer anew would be a second release, which the server knows nothing of.
        """
        path = self._folder / _name(verb, question)
        if not path.exists():
            return None
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
        except (DecodeError, OSError) as error:
            raise ClientError(
                f"the answer {self._folder.name}/{path.name} cannot be read, and may have been sent: move it away to "
                "answer, and pay, anew"
            ) from error

    def keep(self, verb: str, question: RecordDict, answer: RecordDict) -> None:
        """Add an answer, and forget those of other rounds; atomically, on disk when this returns."""
        name, temporary = _name(verb, question), self._folder / "new"
        with open_private(temporary, "wb") as file:
            file.write(recorddict_to_proto(answer).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._folder / name)
        opened = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
        of_round = name.split("-")[0]
        for old in self._folder.glob("*-*"):
            if old.name.split("-")[0] != of_round:
                old.unlink()


def _name(verb: str, question: RecordDict) -> str:
    """The round, and what only the same question has."""
    return f"{int(question[CONFIG]['round'])}-{digest(verb, question)}"
