"""``coterie certs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json

if TYPE_CHECKING:
    from coterie.deploy.certificates import CreatedCertificates


def certs(  # long: one line per option
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
    renew_node: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Replace keys and certificate of node I; it stays client I.")
    ] = None,
    remove_node: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Remove node I from the roster, and its files.")
    ] = None,
    submitter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make or replace the key by which NAME signs requests for runs.")
    ] = None,
    remove_submitter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove NAME's key from the roster, and its files.")
    ] = None,
    sign_roster: Annotated[
        bool,
        typer.Option("--sign-roster", help="Sign a roster with every nodes/node-I.pub and submitters/NAME.pub in OUT."),
    ] = False,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="APP", help="State in the roster which app runs: its folder, a .fab file, or its hash; empty: any."
        ),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="I|all",
            help="Write node-I.coterie in OUT/sites, the one file by which site I joins; prints its passphrase.",
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address in bundles; default: first --host of the server, port 9092."),
    ] = None,
    operator_key: Annotated[
        bool, typer.Option("--operator-key", help="Make the operator's signing key in an existing OUT that has none.")
    ] = False,
    renew_authority: Annotated[
        bool, typer.Option("--renew-authority", help="Replace the authority's key, and sign everything in OUT anew.")
    ] = False,
    retire_authorities: Annotated[
        bool, typer.Option("--retire-authorities", help="Remove earlier authorities from ca.crt.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a private certificate authority, the SuperLink's certificate, keys of SuperNodes, and their roster.

    Also creates the operator's signing key.
    """
    from coterie.deploy import certificates
    from coterie.site.errors import DeployError

    changes: dict[str, tuple[bool, Callable[[], CreatedCertificates]]] = {
        "--more": (more, lambda: certificates.add_nodes(out, nodes or 0, days)),
        "--renew-server": (renew_server, lambda: certificates.renew_server(out, host or (), days)),
        "--renew-node": (renew_node is not None, lambda: certificates.renew_node(out, renew_node or 0, days)),
        "--remove-node": (remove_node is not None, lambda: certificates.remove_node(out, remove_node or 0)),
        "--submitter": (submitter is not None, lambda: certificates.add_submitter(out, submitter or "", days)),
        "--remove-submitter": (
            remove_submitter is not None,
            lambda: certificates.remove_submitter(out, remove_submitter or ""),
        ),
        "--sign-roster": (sign_roster, lambda: certificates.sign_roster(out, days)),
        "--app": (app is not None, lambda: certificates.state_app(out, _hash_of(app or ""))),
        "--operator-key": (operator_key, lambda: certificates.add_operator_key(out)),
        "--renew-authority": (renew_authority, lambda: certificates.renew_authority(out, days)),
        "--retire-authorities": (retire_authorities, lambda: certificates.retire_authorities(out)),
    }
    given = [name for name, (is_given, _) in changes.items() if is_given]
    change = given[0] if given else None
    if len(given) > 1:
        raise DeployError(f"{' and '.join(given)} cannot be combined")
    if bundle is not None and given:
        raise DeployError(f"{given[0]} and --bundle cannot be combined: give one after the other")
    if bundle is not None:
        written = write_bundles(out, bundle, superlink)
        if as_json:
            print_json({"bundles": [{"file": str(path), "passphrase": word} for path, word in written.items()]})
        else:
            print_bundles(written)
        return
    if (nodes is None) != (change not in (None, "--more")):
        raise DeployError("--nodes is required" if nodes is None else f"--nodes cannot be used with {change}")
    if host and change not in (None, "--renew-server"):
        raise DeployError(f"--host cannot be used with {change}: change the server's names with --renew-server")
    made = changes[change][1]() if change else certificates.create(out, nodes or 0, host or (), days)
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
    private = " and ".join(["ca.key", *(name for name in made.files if name == "operator.key")])
    lines.append(f"authority valid until {made.authority_expires:%Y-%m-%d}; do not store {private} on server machines")
    lines += _next_steps(out, change, made)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _next_steps(out: Path, change: str | None, made: CreatedCertificates) -> list[str]:
    """Return what the operator does after a change."""
    nodes = "all" if len(made.nodes) > 1 else str(made.nodes[0]) if made.nodes else "all"
    steps = {
        None: [f"next: coterie certs {out} --bundle all, and send each site its file"],
        "--more": [f"next: coterie certs {out} --bundle {nodes}, and send each new site its file"],
        "--renew-node": [f"next: coterie certs {out} --bundle {nodes}, and send the site its file"],
        "--renew-server": ["next: start the SuperLink again; sites need nothing new"],
        "--renew-authority": [
            f"next: coterie certs {out} --bundle all, send each site its file, and then start the SuperLink again"
        ],
    }
    return steps.get(change, [])


def write_bundles(pki: Path, which: str, superlink: str | None) -> dict[Path, str]:
    """Write the bundles of a node, or of all; return their passphrases.

    Raises:
        DeployError: there is no such node.
    """
    from coterie.deploy.bundles import seal
    from coterie.deploy.certificates import names_of, nodes_of
    from coterie.files import private_folder, write_atomic
    from coterie.site.errors import DeployError

    nodes = {str(node): node for node in nodes_of(pki)}
    if which not in ("all", *nodes):
        raise DeployError(f"--bundle {which}: {pki} has no such node; give all, or one of {', '.join(nodes)}")
    address = superlink or f"{names_of(pki / 'server.crt')[0]}:9092"
    private_folder(pki / "sites")
    written = {}
    for node in nodes.values() if which == "all" else [nodes[which]]:
        path = pki / "sites" / f"node-{node}.coterie"
        sealed, written[path] = seal(pki, node, address)
        write_atomic(path, sealed)
    return written


def print_bundles(written: Mapping[Path, str]) -> None:
    """Print files and passphrases, and what to do with them."""
    for path, passphrase in written.items():
        print(f"{path}  passphrase {passphrase}")
    print("send each site its file, and its passphrase another way; there: coterie client node-I.coterie --data DATA")


def _hash_of(app: str) -> str:
    """Return the hash of an app: itself, or that of its folder or file."""
    from coterie.deploy.app_bundle import bundle

    return app if not app or (len(app) == 64 and not Path(app).exists()) else bundle(Path(app)).hash
