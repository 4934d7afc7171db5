"""``coterie audit-log``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, answer, console_for, print_json


def audit_log(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="client-ID.audit.jsonl of a client, or audit.jsonl of a server.")
    ],
    entries: Annotated[bool, typer.Option("--entries", help="Print the entries, not their numbers.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Verify an audit log, and show what it holds."""
    from coterie.privacy.audit_log import read_audit_log

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
