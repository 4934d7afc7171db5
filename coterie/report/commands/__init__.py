"""Commands for pages, figures and hand-over packs of runs."""

from __future__ import annotations

import typer

from coterie.report.commands.handover import handover
from coterie.report.commands.report import report

app = typer.Typer()
app.command()(report)
app.command()(handover)
