"""``coterie status``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, print_json, print_table
from coterie.logs import printable

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.deploy.status import Status

_LONGEST_DETAIL = 2000  # characters; the detail may contain text from clients


def status(
    connection: Annotated[
        str | None,
        typer.Argument(
            metavar="CONNECTION", help="Connection in Flower's config.toml; default: its default connection."
        ),
    ] = None,
    run: Annotated[int | None, typer.Option(min=0, help="Id of the run to show; default: the latest runs.")] = None,
    watch: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Refresh every SECONDS until Ctrl-C.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the nodes and runs of a SuperLink, and the progress of the latest or the selected run."""
    from coterie.deploy.status import query_status
    from coterie.site.errors import DeployError

    if as_json and watch:
        raise DeployError("--json and --watch cannot be combined")
    console = console_for(False)
    try:
        while True:
            snapshot = query_status(connection, run)
            if as_json:
                print_json(_document(snapshot))
            else:
                if watch:
                    console.clear()
                _show(snapshot, console)
            if not watch:
                return
            time.sleep(watch)
    except KeyboardInterrupt:
        return


def _document(snapshot: Status) -> dict[str, Any]:
    """Ids are strings, because they exceed the integer range of some JSON parsers. Without privacy, epsilon is null."""
    progress = snapshot.progress
    if progress is not None:
        progress = progress | {"epsilon": progress["epsilon"] if math.isfinite(progress["epsilon"]) else None}
    return {
        "connection": snapshot.connection,
        "address": snapshot.address,
        "nodes": [
            {
                "id": str(node.id),
                "name": node.name or None,
                "status": node.status,
                "last-seen-seconds": node.last_seen,
                "online-since": node.online_since and node.online_since.isoformat(),
            }
            for node in snapshot.nodes
        ],
        "runs": [
            {
                "id": str(run.id),
                "app": run.app,
                "status": run.status,
                "detail": run.detail or None,
                "started": run.started and run.started.isoformat(),
                "seconds": run.seconds,
            }
            for run in snapshot.runs
        ],
        "progress": progress and {"run": str(snapshot.runs[0].id), **progress},
    }


def _show(snapshot: Status, console: Console) -> None:
    def show(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    here = sum(node.status == "online" for node in snapshot.nodes)
    show(f"{snapshot.connection} ({snapshot.address}): {here} of {len(snapshot.nodes)} nodes online")
    if snapshot.nodes:
        nodes = [
            [
                str(node.id),
                printable(node.name or "–"),
                node.status,
                "–" if node.last_seen is None else f"{_span(node.last_seen)} ago",
                _written(node.online_since),
            ]
            for node in snapshot.nodes
        ]
        print_table(console, ("node", "name", "status", "last seen", "online since (UTC)"), nodes)
    if not snapshot.runs:
        show("no runs")
        return
    runs = [
        [str(run.id), run.status, _written(run.started), _span(run.seconds) if run.started else "–"]
        for run in snapshot.runs
    ]
    print_table(console, ("run", "status", "started (UTC)", "took"), runs)
    shown = snapshot.runs[0]
    if shown.detail:
        show(f"run {shown.id}: {printable(shown.detail, most=_LONGEST_DETAIL)}")
    show(f"run {shown.id}: " + ("no completed round" if snapshot.progress is None else _progress(snapshot.progress)))


def _progress(progress: Mapping[str, Any]) -> str:
    spent = progress["epsilon"]
    parts = [f"started by {printable(progress['submitter'])}"] if progress.get("submitter") else []
    parts += [f"round {progress['round']}/{progress['rounds']}", f"ε {'∞' if math.isinf(spent) else f'{spent:.3f}'}"]
    if progress["accuracy"] is not None:
        parts.append(f"accuracy {100 * progress['accuracy']:.1f} %")
    if progress["dropped"] is not None:
        parts.append(f"{progress['dropped']} replies dropped")
    return ", ".join(parts)


def _written(moment: datetime | None) -> str:
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def _span(seconds: float) -> str:
    """Format in the two largest units: 41 s, 3 min 20 s, 2 h 5 min, 4 d 3 h."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left, parts = round(seconds), []
    for unit, size in units:
        if left >= size:
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2]) or "0 s"
