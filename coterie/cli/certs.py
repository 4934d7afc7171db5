"""``coterie certs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json


def certs(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of certificates and keys.")],
    nodes: Annotated[int | None, typer.Option(min=1, help="How many SuperNodes; with --more: how many more.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or IP address by which clients reach the SuperLink; may be given again."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long server and nodes are vouched for.")] = 825,
    more: Annotated[bool, typer.Option("--more", help="Add nodes to OUT.")] = False,
    renew_server: Annotated[
        bool, typer.Option("--renew-server", help="A new certificate and key of OUT's server; names as before.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a certificate authority of one's own, the SuperLink's certificate, and the keys of SuperNodes."""
    from coterie import deploy

    if more and renew_server:
        raise deploy.DeployError("--more and --renew-server: give one at a time")
    if (nodes is None) != renew_server:
        raise deploy.DeployError("--nodes is " + ("of no use to --renew-server" if renew_server else "needed"))
    if more and host:
        raise deploy.DeployError("--host is of no use to --more: change the server's names with --renew-server")
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
    told = [f"{out}: {len(made.files)} files, valid until {made.expires:%Y-%m-%d}"]
    if made.nodes:
        told.append(f"nodes {made.nodes[0]} to {made.nodes[-1]}")
    if made.names:
        told.append(f"server {', '.join(made.names)}")
    told.append(f"authority valid until {made.authority_expires:%Y-%m-%d}; keep ca.key off the machines that serve")
    for line in told:
        console.print(line, markup=False, soft_wrap=True)
