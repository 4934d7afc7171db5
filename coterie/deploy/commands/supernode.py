"""``coterie superlink``, ``coterie supernode`` and ``coterie superexec``."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer


def superlink(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Flags of flower-superlink.")] = None,
) -> None:
    """Run Flower's SuperLink for many nodes: it waits up to 60 s instead of 5 s for its database."""
    from coterie.deploy.superlink import serve

    serve(flags or ())


def supernode(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAG...]", help="--fab-hash HASH, and flags of flower-supernode.")
    ] = None,
) -> None:
    """Run Flower's SuperNode with short polling intervals during a run; coterie client does so after its checks."""
    _replace("coterie.deploy.supernode", flags)


def superexec(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Flags of flower-superexec.")] = None,
) -> None:
    """Run Flower's SuperExec for a client: PyTorch is imported once, not for every message."""
    _replace("coterie.deploy.superexec", flags)


def _replace(module: str, flags: list[str] | None) -> NoReturn:
    """Replace this process by a module's program; the working directory is not on its path."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *(flags or ())])
