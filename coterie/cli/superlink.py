"""``coterie superlink``."""

from __future__ import annotations

from typing import Annotated

import typer


def superlink(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAG...]", help="Those of flower-superlink.")] = None,
) -> None:
    """Flower's SuperLink, for many nodes: it waits up to 60 s for its database, not 5."""
    from coterie.deploy.superlink import serve

    serve(flags or ())
