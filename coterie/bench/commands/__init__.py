"""Commands for many runs, and for attacks on them."""

from __future__ import annotations

import typer

from coterie.bench.commands.audit import audit
from coterie.bench.commands.bench import bench
from coterie.bench.commands.sweep import sweep

app = typer.Typer()
for command in (sweep, audit, bench):
    app.command()(command)
