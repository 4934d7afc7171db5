"""What a ledger held at each charge of a client, kept in another folder than the ledger.

The chain of a ledger shows a lost or changed line, but not lost lines at its end: a ledger that is restored from an
old copy, shortened or deleted would let its budget be spent again. A client therefore appends an anchor to a file of
its own after every charge, and refuses a ledger that does not contain the last one. An anchor also states the sum of
all charges up to it, so that a ledger is read from there on, in time that does not grow with its length.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coterie.files import FileError, open_regular, parse_object, read_lines, sync_folder
from coterie.privacy.accountants import Event
from coterie.privacy.filter import events_entry, parse_events

# Bytes at the end of a file that contain its last line.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Anchor:
    """The last charge of a ledger, and the sum of all charges.

    Attributes:
        ledger: path of the ledger.
        header: its first line.
        start: offset in bytes of its last line.
        end: offset in bytes after its last line.
        charges: number of charges.
        chain: chain of the last one.
        events: all charged events.
        held_out: epsilon of held-out records.
        pinned: entry of the filter of its first charge; None for an infinite budget.
    """

    ledger: str
    header: Mapping[str, Any]
    start: int
    end: int
    charges: int
    chain: str
    events: Mapping[Event, int]
    pinned: Mapping[str, Any] | None
    held_out: float = 0.0

    def line(self) -> bytes:
        """Return the line of a file of anchors."""
        return json.dumps({**vars(self), "events": events_entry(self.events)}).encode() + b"\n"

    @classmethod
    def parse(cls, values: dict[str, Any], where: Path) -> Anchor:
        """Return the anchor of a line's object.

        Raises:
            FileError: it is not an anchor.
        """
        try:
            anchor = cls(**{**values, "events": Counter(parse_events(values["events"]))})
            good = 0 <= anchor.start < anchor.end and anchor.charges >= 1 and isinstance(anchor.chain, str)
            good = good and 0 <= anchor.held_out < float("inf")
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise FileError(f"{where} cannot be read: a line is not an anchor of a ledger")
        return anchor


class Anchors:
    """The anchors of one client: one JSON line per charge, appended and synced.

    Args:
        path: the file, in the client's state folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def last(self) -> Anchor | None:
        """Return the last anchor; None before the first charge. An incomplete last line is ignored.

        Raises:
            FileError: the file cannot be read.
        """
        if not self.path.exists():
            return None
        with os.fdopen(open_regular(self.path), "rb") as file:
            _, content = tail(file)
        lines = content.split(b"\n")[:-1]
        return Anchor.parse(parse_object(lines[-1].decode(), str(self.path)), self.path) if lines else None

    def all(self) -> list[Anchor]:
        """Return all anchors, in order.

        Raises:
            FileError: the file cannot be read.
        """
        return [Anchor.parse(line, self.path) for line in read_lines(self.path)] if self.path.exists() else []

    def append(self, anchor: Anchor) -> None:
        """Append an anchor, and sync it to disk; drop an incomplete last line.

        Raises:
            FileError: the file cannot be written.
        """
        new = not self.path.exists()
        try:
            with os.fdopen(open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0) as file:
                start, end = tail(file)
                whole = start + end.rfind(b"\n") + 1
                file.truncate(whole)
                content = anchor.line()
                try:
                    if file.write(content) != len(content):
                        raise OSError("the disk is full")
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(whole)
                    raise
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror or error}") from None
        if new:
            sync_folder(self.path.parent)


def tail(file: IO[bytes]) -> tuple[int, bytes]:
    """Return where the end of a file begins that contains its last line, and this end."""
    start = max(0, os.fstat(file.fileno()).st_size - _LONGEST)
    file.seek(start)
    return start, file.read()
