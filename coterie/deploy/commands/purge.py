"""``coterie purge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json


def purge(
    database: Annotated[Path, typer.Argument(metavar="DATABASE", help="superlink.db of a stopped SuperLink.")],
    logs: Annotated[bool, typer.Option("--logs", help="Also delete the logs of these runs.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete the messages of finished runs from a SuperLink's database: requests and replies of clients."""
    from coterie.deploy.purge import purge as purge_messages

    done = purge_messages(database, logs)
    if as_json:
        print_json(
            {
                "database": str(database),
                "runs-over": done.over,
                "runs-unfinished": done.unfinished,
                "messages": done.messages,
                "objects": done.objects,
                "log-lines": done.log_lines,
                "bytes-before": done.before,
                "bytes-after": done.after,
            }
        )
        return
    console = console_for(as_json)
    removed = f"{done.messages} messages, {done.objects} objects and {done.log_lines} log lines deleted"
    lines = [f"{database}: {done.over} finished runs: {removed}; {done.before:,} bytes before, {done.after:,} now"]
    if done.unfinished:
        lines.append(
            f"{done.unfinished} unfinished runs are kept: start the SuperLink, flwr stop them, then purge again"
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
