"""``coterie superlink`` and ``coterie superexec``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def superlink(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Flags of flower-superlink.")] = None,
) -> None:
    """Run Flower's SuperLink for many nodes: it waits up to 60 s instead of 5 s for its database."""
    from coterie.deploy.superlink import serve

    serve(flags or ())


def superexec(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Flags of flower-superexec.")] = None,
) -> None:
    """Run Flower's SuperExec for a client: PyTorch is imported once, not for every message."""
    # the working directory is not on the path of the program
    os.execv(sys.executable, [sys.executable, "-P", "-m", "coterie.deploy.superexec", *(flags or ())])
