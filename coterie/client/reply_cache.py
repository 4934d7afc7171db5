"""Cached replies of a round: a repeated request returns the cached reply at no additional privacy cost.

A reply can be lost, and a server can fail before it processes one; it then repeats the request for the same round with
the same models. A new reply would draw new noise on the same records and need a second charge. The cached one reveals
nothing that was not charged, so it is written to the client's disk before it is sent.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError

from coterie.client.state import ClientError
from coterie.files import open_private, private_folder, write_atomic
from coterie.wire import digest
from coterie.wire.messages import CONFIG


class ReplyCache:
    """The reply cache of one client: a file for every request of the latest round, named by round and digest.

    Args:
        folder: state folder of the client.
        client_id: id in Coterie.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self._folder = folder / f"client-{client_id}.answers"
        private_folder(self._folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold an exclusive lock: a ClientApp process can outlive the SuperNode that started it."""
        with open_private(self._folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def get(self, message_type: str, request: RecordDict) -> RecordDict | None:
        """Return the cached reply to the same message type and content, or None.

        Raises:
            ClientError: it cannot be read; a new reply would be a second release that the server does not account for.
        """
        path = self._folder / _name(message_type, request)
        if not path.exists():
            return None
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
        except (DecodeError, OSError) as error:
            raise ClientError(
                f"the cached reply {self._folder.name}/{path.name} cannot be read, and may have been sent: move the "
                "file away to compute, and charge, a new reply"
            ) from error

    def put(self, message_type: str, request: RecordDict, reply: RecordDict) -> None:
        """Add a reply, atomically and synced to disk, and delete those of other rounds."""
        name = _name(message_type, request)
        write_atomic(self._folder / name, recorddict_to_proto(reply).SerializeToString())
        of_round = name.split("-")[0]
        for old in self._folder.glob("*-*"):
            if old.name.split("-")[0] != of_round:
                old.unlink()


def _name(message_type: str, request: RecordDict) -> str:
    """Return the file name of a reply: round and digest of its request."""
    return f"{request.config_records[CONFIG]['round']!r}-{digest(message_type, request)}"
