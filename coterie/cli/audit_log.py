"""``coterie audit-log``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import JsonFlag, answer, console_for, print_json


@dataclass(frozen=True)
class AuditSummary:
    """What a verified audit log holds.

    Attributes:
        file: path of the file.
        entries: number of entries.
        first, last: times of the first and the last one; None without entries.
        events: number of entries by event, such as "request: 3, refusal: 1".
        chain: chain of the last entry, to keep elsewhere; empty without entries.
    """

    file: str
    entries: int
    first: str | None
    last: str | None
    events: str
    chain: str


def read_audit_log(path: Path) -> tuple[list[dict[str, Any]], AuditSummary]:
    """Read and verify a whole audit log; an incomplete last line is left out.

    Raises:
        LedgerError: the file cannot be read, or a line was changed, lost or inserted.
    """
    from coterie.files import FileError, parse_object, read_text
    from coterie.privacy.audit_log import read_entry
    from coterie.privacy.ledger_lines import LedgerError, chain_digest

    try:
        text = read_text(path)
    except FileError as error:
        raise LedgerError(str(error)) from None
    entries: list[dict[str, Any]] = []
    chain = ""
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], 1):
        name = f"{path}, line {number}"
        stated, stated_chain, content = read_entry(line, name)
        chain = chain_digest(chain.encode(), content.encode())
        if (stated, stated_chain) != (number, chain):
            raise LedgerError(f"{name}: it does not follow from the lines before it: one was changed, lost or inserted")
        entries.append(parse_object(content, name))
    events = Counter(str(entry.get("event")) for entry in entries)
    summary = AuditSummary(
        file=str(path),
        entries=len(entries),
        first=str(entries[0].get("time")) if entries else None,
        last=str(entries[-1].get("time")) if entries else None,
        events=", ".join(f"{event}: {count}" for event, count in events.items()),
        chain=chain,
    )
    return entries, summary


def audit_log(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="client-ID.audit.jsonl of a client, or audit.jsonl of a server.")
    ],
    entries: Annotated[bool, typer.Option("--entries", help="Print the entries, not their numbers.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Verify an audit log, and show what it holds."""
    read, summary = read_audit_log(file)
    if not entries:
        answer(vars(summary), as_json)
    elif as_json:
        print_json({**vars(summary), "entries": read})
    else:
        for entry in read:
            more = (f"{name}={value}" for name, value in entry.items() if name not in ("entry", "time", "event"))
            words = [f"{entry['entry']}", f"{entry['time']}", f"{entry['event']}", *more]
            console_for(False).print(" ".join(words), markup=False, soft_wrap=True)
