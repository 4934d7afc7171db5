"""``coterie server``."""

from __future__ import annotations

import os
import threading
import time
from logging import ERROR
from pathlib import Path
from typing import Annotated

import typer

#: Connection of ``flwr`` to the SuperLink.
CONNECTION = "coterie"
#: Line that says that sites can connect.
READY = "nodes are registered"
_POLL = 2.0  # seconds between two looks at the roster


def server(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, or that of an earlier coterie server.")],
    nodes: Annotated[int | None, typer.Option(min=1, help="New folder: number of sites.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="New folder: name or IP address by which sites reach this machine; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port at which sites connect.")] = 9092,
    control_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of 127.0.0.1 at which flwr submits runs, without a password.")
    ] = 8000,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Passed to coterie superlink unchanged.")
    ] = None,
) -> None:
    """Run the server of a deployment: certificates and files for sites, the SuperLink, the nodes and their runs.

    A new folder gets certificates and a file for each site, with which `coterie client` joins.
    """
    from coterie.deploy import certificates
    from coterie.deploy.commands.certs import print_bundles, write_bundles
    from coterie.deploy.edge import check_port, environment
    from coterie.deploy.superlink import serve
    from coterie.site.errors import DeployError

    os.umask(0o077)
    folder = folder.expanduser().absolute()
    pki = folder / "pki"
    if not pki.exists():
        if nodes is None or not host:
            raise DeployError(f"{folder} is new: give --nodes and --host, by which sites reach this machine")
        certificates.create(pki, nodes, host)
        print_bundles(write_bundles(pki, "all", f"{host[0]}:{port}"))
        print(f"move {pki}/ca.key and operator.key to a safe place: coterie certs alone needs them")
    elif nodes is not None or host:
        raise DeployError(
            f"{pki} exists: leave out --nodes and --host; coterie certs {pki} --more adds nodes, --renew-server names"
        )
    check_port("--control-port", control_port)
    if not flags:  # which may name another address
        check_port("--port", port, "0.0.0.0")
    connect(folder, control_port)
    os.environ.update(environment(folder / "flwr"))
    os.environ.setdefault("COTERIE_RUNS", str(folder / "runs"))
    os.environ.setdefault("COTERIE_ROSTER", str(pki / "roster.json"))
    threading.Thread(target=_register, args=(pki, folder, control_port), name="nodes", daemon=True).start()
    tls = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    serve(
        [
            *(word for flag, name in tls.items() for word in (flag, str(pki / name))),
            *("--enable-supernode-auth", "--isolation", "subprocess", "--host", "127.0.0.1"),
            *("--port", str(control_port), "--fleet-api-address", f"0.0.0.0:{port}"),
            *("--database", str(folder / "superlink.db"), *(flags or ())),
        ]
    )


def connect(folder: Path, control_port: int) -> None:
    """Write the connection to the SuperLink of a folder to Flower's configuration there."""
    import tomli_w

    from coterie.files import private_folder, write_atomic

    for name in ("flwr", "runs"):
        private_folder(folder / name)
    link = {"address": f"localhost:{control_port}", "root-certificates": str(folder / "pki" / "ca.crt")}
    content = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}})
    write_atomic(folder / "flwr" / "config.toml", content.encode(), sync=False)


def _register(pki: Path, folder: Path, control_port: int) -> None:
    """Register the nodes of the folder, now and whenever its roster has changed."""
    from flwr.supercore import log

    from coterie.deploy.certificates import nodes_of
    from coterie.deploy.status import register_nodes
    from coterie.deploy.trial import listens
    from coterie.site.errors import DeployError

    known = -1
    while True:
        time.sleep(_POLL if known >= 0 else 0.1)
        changed = (pki / "roster.json").stat().st_mtime_ns
        if changed == known or not listens(control_port):
            continue
        names = {f"node-{node}": pki / "nodes" / f"node-{node}.pub" for node in nodes_of(pki)}
        try:
            register_nodes(CONNECTION, names)
        except (DeployError, OSError) as error:
            log(ERROR, "the nodes of %s are not registered: %s", pki, error)
            time.sleep(_POLL)
            continue
        known = changed
        print(
            f"{len(names)} {READY}; in the folder of the app: "
            f"FLWR_HOME={folder / 'flwr'} flwr run . {CONNECTION} --stream --run-config run.toml",
            flush=True,
        )
