"""``coterie superlink``."""

from __future__ import annotations

from typing import Annotated

import typer


def superlink(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Flags of flower-superlink.")] = None,
) -> None:
    """Run Flower's SuperLink for many nodes: it waits up to 60 s instead of 5 s for its database."""
    from coterie.deploy.superlink import serve

    serve(flags or ())
