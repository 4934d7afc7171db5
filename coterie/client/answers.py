"""The last answer that a client paid for: to the same question it says the same again, and pays nothing.

A reply can be lost on its way, and a server can die before it counts one; then it asks again, for the same round, with
the same models. A new answer would be new noise on the same records, and a second charge. The old one reveals nothing
that was not paid for, so it is on the client's disk before it leaves.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict


class LastAnswer:
    """The file of one client.

    Args:
        folder: where it is.
        client_id: our own id for it.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self._path = folder / f"client-{client_id}.answer"

    def to(self, question: Message) -> RecordDict | None:
        """What was answered, if this was the last question: same verb, same content, to the bit."""
        if not self._path.exists():
            return None
        kept, digest = self._path.read_bytes(), _digest(question)
        if not kept.startswith(digest):
            return None
        return recorddict_from_proto(ProtoRecordDict.FromString(kept[len(digest) :]))

    def keep(self, question: Message, answer: RecordDict) -> None:
        """Replace the last answer, atomically, on disk when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(_digest(question) + recorddict_to_proto(answer).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def _digest(question: Message) -> bytes:
    """(32,) bytes that only the same question has."""
    named = f"{question.metadata.message_type} {question.content.object_id}"
    return hashlib.sha256(named.encode()).digest()
