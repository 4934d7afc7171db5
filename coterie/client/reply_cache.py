"""Cached replies of a round: a repeated request returns the cached reply at no additional privacy cost.

A reply can be lost, and a server can fail before it processes one; it then repeats the request for the same round with
the same models. A new reply would draw new noise on the same records and need a second charge. The cached one reveals
nothing that was not charged, so it is written to the client's disk before it is sent.

A process can be killed between the charge and the reply, such as for its memory. Nothing of this attempt has left, so
its charge pays for one more attempt at the same request (docs/privacy.md, Repeated requests).
"""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError

from coterie.client.state import ClientError
from coterie.files import FileError, open_private, private_folder, read_object, write_atomic, write_json
from coterie.wire import digest
from coterie.wire.messages import CONFIG

# Changes with every start of the machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Nanoseconds, at most, from the start of an attempt to the change time of its mark; a restored mark changed later.
_AT_ONCE = 60 * 10**9


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
        self._mark.unlink(missing_ok=True)
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
        except (DecodeError, OSError) as error:
            raise ClientError(
                f"the cached reply {self._folder.name}/{path.name} cannot be read, and may have been sent: move the "
                "file away to compute, and charge, a new reply"
            ) from error

    @contextmanager
    def attempt(self, message_type: str, request: RecordDict) -> Iterator[tuple[str, bool]]:
        """Mark an attempt at a reply while it lasts; the lock is held.

        Yields:
            the random number of its charge, and whether that is the number of an earlier attempt, which was killed.
        """
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else secrets.token_hex()
        mark = {"request": _name(message_type, request), "boot": boot, "again": False}
        again = (killed := self._killed()) is not None and mark.items() <= killed.items()
        head = killed["head"] if killed and again else secrets.token_hex(16)
        write_json(self._mark, mark | {"head": head, "again": again, "began": time.time_ns()})
        try:
            yield head, again
        finally:
            self._mark.unlink(missing_ok=True)

    @property
    def _mark(self) -> Path:
        return self._folder / "attempt"

    def _killed(self) -> dict[str, Any] | None:
        """Return the mark of an attempt that was killed; None: there is none, or it was restored."""
        try:
            mark = read_object(self._mark)
            return mark if 0 <= self._mark.stat().st_ctime_ns - mark["began"] < _AT_ONCE else None
        except (FileError, KeyError, OSError, TypeError):
            return None

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
