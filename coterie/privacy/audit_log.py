"""An audit log: what was asked and what was decided, append-only, one chained JSON line per entry.

A client's log is ``client-ID.audit.jsonl`` in its state folder: requests of servers, decisions, and charges. That of a
server is ``audit.jsonl`` beside its run folders: submissions, introductions, refusals, and how runs ended. Lines are
chained as in a ledger, so that a changed, lost or inserted line is found. Lines that are lost at the end are not: keep
the chain of the last line, as ``coterie audit-log`` prints it, elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path

from coterie.files import FileError, open_regular, parse_object, private_folder, sync_folder
from coterie.privacy.anchors import tail
from coterie.privacy.ledger_lines import LedgerError, chain_digest

_CHAINED = re.compile(r'(.*), "chain": "([0-9a-f]{16})"\}', re.DOTALL)


class AuditLog:
    """An audit log, to which several processes may append.

    Args:
        path: the file; it and its folder are made for their user alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **fields: object) -> None:
        """Append an entry and sync it to disk; an incomplete last line, which a crash left, is replaced.

        Args:
            event: what happened.
            fields: further entries; JSON-ready. Those that are None are left out.

        Raises:
            LedgerError: the file cannot be written, or its last line is not one of an audit log.
        """
        new = not self.path.exists()
        try:
            private_folder(self.path.parent)
            descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                start, end = tail(file)
                whole = end[: end.rfind(b"\n") + 1]
                number, chain = _last(whole, self.path)
                known = {name: value for name, value in fields.items() if value is not None}
                moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                content = json.dumps({"entry": number + 1, "time": moment, "event": event, **known})
                line = f'{content[:-1]}, "chain": "{chain_digest(chain.encode(), content.encode())}"}}\n'.encode()
                file.truncate(start + len(whole))
                if file.write(line) != len(line):
                    file.truncate(start + len(whole))
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
        except (OSError, FileError) as error:
            raise LedgerError(f"{self.path}: the audit log cannot be written: {error}") from None
        if new:
            sync_folder(self.path.parent)


def _last(content: bytes, path: Path) -> tuple[int, str]:
    """Return number and chain of the last of some whole lines."""
    if not content:
        return 0, ""
    return read_entry(content.decode(errors="replace").splitlines()[-1], f"{path}, the last line")[:2]


def read_entry(line: str, name: str) -> tuple[int, str, str]:
    """Return number and chain of an entry, and its content without the chain.

    Raises:
        LedgerError: it is not an entry.
    """
    chained = _CHAINED.fullmatch(line)
    try:
        content = f"{chained[1]}}}" if chained else ""
        number = parse_object(content, name)["entry"]
    except (FileError, KeyError):
        number = None
    if chained is None or type(number) is not int:
        raise LedgerError(f"{name} is not an entry of an audit log: {line[:80]!r}")
    return number, chained[2], content
