"""The ``coterie`` command."""

from __future__ import annotations

import os
import sys

import typer

# Before torch is loaded: idle threads that spin cost a factor of ten as soon as another program wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from coterie.cli import listings, privacy
from coterie.cli.audit import audit
from coterie.cli.bench import bench
from coterie.cli.certs import certs
from coterie.cli.client import client, fab_hash
from coterie.cli.purge import purge
from coterie.cli.run import run
from coterie.cli.status import status
from coterie.cli.superlink import superlink

cli = typer.Typer(
    help="One model per hidden group of clients, under a differential-privacy guarantee that is proved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    run,
    listings.strategies,
    listings.datasets,
    listings.models,
    listings.report,
    audit,
    bench,
    certs,
    client,
    fab_hash,
    purge,
    status,
):
    cli.command()(command)
cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)(superlink)
cli.add_typer(privacy.app, name="privacy")

#: Errors whose message alone states what to do, by the package that raises them.
_EXPECTED = {
    "coterie.bench": ("BenchError",),
    "coterie.files": ("FileError",),
    "coterie.privacy": ("PrivacyError", "LedgerError"),
    "coterie.datasets": ("DataError",),
    "coterie.engine": ("EngineError",),
    "coterie.deploy": ("DeployError",),
    "coterie.models": ("ModelError",),
    "coterie.report": ("ReportError",),
    "coterie.server": ("ConfigError", "FolderError", "RunError"),
    "coterie.strategies": ("StrategyError",),
}


def main() -> None:
    """Run the command; every failure is one clear message and a non-zero exit status."""
    sys.path.insert(0, os.getcwd())  # so that module:function finds a user's own module
    try:
        cli(prog_name="coterie")
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            print(f"error: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        elif _expected(error):
            print(f"error: {error}", file=sys.stderr)
        else:
            raise
        sys.exit(1)


def _expected(error: Exception) -> bool:
    """Only rooms that are loaded can have raised it; the others need not be loaded for its sake."""
    rooms = ((sys.modules[room], names) for room, names in _EXPECTED.items() if room in sys.modules)
    return any(isinstance(error, getattr(room, name)) for room, names in rooms for name in names)
