"""The names under which runs were charged in a site's ledger, kept so that not every message reads the whole ledger.

A file in the state folder holds the names of the latest runs, and how far the ledger was read. A message reads what was
charged since; the first message of a run reads the whole ledger, as does one that finds another ledger.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie.files import FileError, read_bytes, read_object, write_atomic
from coterie.privacy import read_ledger

#: Runs whose names are kept, the latest ones.
RUNS = 100
_TAIL = 28  # bytes at the end of a line that hold its chain, which covers all lines before it


def names_of_run(run: str, ledger: Path, file: Path) -> list[str]:
    """Return the different names under which a run was charged; charges that state none are left out.

    Args:
        run: id of the run.
        ledger: the site's ledger; the caller holds its lock.
        file: names of the latest runs, which are read and written.

    Raises:
        LedgerError, FileError: the ledger is damaged.
        OSError: the file cannot be written.
    """
    if not ledger.exists() or not ledger.stat().st_size:
        return []
    kept = _kept(file)
    content = None
    if kept is not None and run in kept["names"]:
        content = _after(ledger, kept["end"], kept["tail"])
    if kept is None or content is None:
        read_ledger(ledger)  # or it is damaged
        kept, content = {"names": {run: []}, "end": 0, "tail": ""}, read_bytes(ledger)
    whole = content[: content.rfind(b"\n") + 1]
    names: dict[str, list[str]] = kept["names"]
    for entry in (json.loads(line).get("guard", {}) for line in whole.splitlines()):
        if "run" in entry:
            named = names[entry["run"]] = names.pop(entry["run"], [])  # the latest comes last
            if "site" in entry and entry["site"] not in named:
                named.append(entry["site"])
    if whole:
        latest = {name: names[name] for name in [*names][-RUNS:]} | {run: names[run]}
        state = {"names": latest, "end": kept["end"] + len(whole), "tail": whole[-_TAIL:].decode()}
        write_atomic(file, json.dumps(state).encode(), sync=False)
    return names[run]


def _kept(file: Path) -> dict[str, Any] | None:
    """The contents of the file; None if it is missing or damaged."""
    try:
        kept = read_object(file)
    except FileError:
        return None
    good = (
        isinstance(kept.get("names"), dict) and isinstance(kept.get("end"), int) and isinstance(kept.get("tail"), str)
    )
    return kept if good else None


def _after(ledger: Path, end: int, tail: str) -> bytes | None:
    """What the ledger holds after its first ``end`` bytes; None if these do not end with the tail."""
    before = tail.encode()
    if not before or end < len(before):
        return None
    with ledger.open("rb") as stream:
        stream.seek(end - len(before))
        content = stream.read()
    return content[len(before) :] if content.startswith(before) else None
