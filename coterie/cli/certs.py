"""``coterie certs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json


def certs(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of certificates and keys.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes; with --more: number of additional ones.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or IP address by which clients reach the SuperLink; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="Validity of the certificates, in days.")] = 825,
    more: Annotated[bool, typer.Option("--more", help="Add nodes to an existing OUT.")] = False,
    renew_server: Annotated[
        bool,
        typer.Option(
            "--renew-server",
            help="Renew certificate and key of the server in OUT; its names stay the same unless --host is given.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a private certificate authority, the SuperLink's certificate, and the keys of SuperNodes."""
    from coterie import deploy

    if more and renew_server:
        raise deploy.DeployError("--more and --renew-server cannot be combined")
    if (nodes is None) != renew_server:
        raise deploy.DeployError("--nodes " + ("cannot be used with --renew-server" if renew_server else "is required"))
    if more and host:
        raise deploy.DeployError("--host cannot be used with --more: change the server's names with --renew-server")
    if renew_server:
        made = deploy.renew_server(out, host or (), days)
    elif more:
        made = deploy.add_nodes(out, nodes or 0, days)
    else:
        made = deploy.create(out, nodes or 0, host or (), days)
    if as_json:
        print_json(
            {
                "folder": str(made.folder),
                "files": sorted(made.files),
                "nodes": list(made.nodes),
                "server-names": list(made.names),
                "expires": made.expires.isoformat(),
                "authority-expires": made.authority_expires.isoformat(),
            }
        )
        return
    console = console_for(as_json)
    lines = [f"{out}: {len(made.files)} files, valid until {made.expires:%Y-%m-%d}"]
    if made.nodes:
        lines.append(f"nodes {made.nodes[0]} to {made.nodes[-1]}")
    if made.names:
        lines.append(f"server {', '.join(made.names)}")
    lines.append(f"authority valid until {made.authority_expires:%Y-%m-%d}; do not store ca.key on server machines")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
