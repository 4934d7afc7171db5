"""``coterie privacy guard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, answer
from coterie.cli.privacy import app


@app.command("guard")
def privacy_guard(
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="Ledger of a guarded site, or of a guarded run.")],
    as_json: JsonFlag = False,
) -> None:
    """Show the certificate of a guarded site over all apps and runs, or of a guarded run over all sites."""
    from coterie.guard import certificate

    document = certificate(ledger)
    if not as_json:
        lists = {key: "\n".join(map(str, value)) for key, value in document.items() if isinstance(value, list)}
        costs = "\n".join(f"{name}: {cost}" for name, cost in document["accountants"].items())
        document |= lists | {"accountants": costs, "sites": str(len(document["sites"]))}
    answer(document, as_json)
