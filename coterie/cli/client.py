"""``coterie client`` and ``coterie fab-hash``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json

if TYPE_CHECKING:
    from coterie.deploy import Edge


def client(  # long: one line per option
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink's Fleet API.")],
    data: Annotated[Path, typer.Option(help="This client's own data: a folder or a file.")],
    key: Annotated[Path, typer.Option(help="This client's private key, node-I.key of coterie certs.")],
    ca: Annotated[Path, typer.Option(help="ca.crt, by which the SuperLink is known.")],
    client_id: Annotated[
        int | None,
        typer.Option(min=0, help="This client's number, 0 to the run's clients - 1; default: I of node-I.key."),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="What outlives restarts; default: ~/.local/state/coterie/client-ID.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="All that this client will ever spend; with --delta.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the same budget.")] = None,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Tell the server exact accuracies, outside of any guarantee.")
    ] = False,
    input_shape: Annotated[
        str | None, typer.Option(metavar="1x28x28|16", help="Shape of an example of this client's data.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="Number of classes of this client's data; 0: real targets.")
    ] = None,
    value_range: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Range to which the features of vectors are clamped.")
    ] = None,
    budget_file: Annotated[
        Path | None, typer.Option(help="Where this client counts what it spends; default: beside the data.")
    ] = None,
    fab_hash: Annotated[
        str | None, typer.Option(metavar="HASH", help="The only app that may run here, as coterie fab-hash prints it.")
    ] = None,
    trusted_entities: Annotated[
        Path | None, typer.Option(help="Of flower-supernode: a YAML file of keys; one must have signed the app.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Look whether all is well, and stop.")] = False,
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set another key of the node configuration.")
    ] = [],  # noqa: B006
    isolation: Annotated[str, typer.Option(help="subprocess, or process: run flower-superexec aside.")] = "subprocess",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the SuperNode's Runtime API on this machine.")] = 9094,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Passed to flower-supernode as they are.")
    ] = None,
) -> None:
    """Take part in runs with data of one's own: look whether all is well, then become Flower's SuperNode."""
    from coterie import deploy

    if client_id is None:
        client_id = _id_of(key)
    edge = deploy.Edge(
        superlink=superlink,
        data=data,
        key=key,
        ca=ca,
        client_id=client_id,
        state_dir=state_dir or deploy.default_state_dir(client_id),
        epsilon=epsilon,
        delta=delta,
        diagnostics=diagnostics,
        input_shape=input_shape,
        num_classes=num_classes,
        value_range=value_range,
        budget_file=budget_file,
        fab_hash=fab_hash,
        trusted_entities=trusted_entities,
        settings=_settings(assignments),
        isolation=isolation,
        port=port,
        flags=flags or (),
    )
    console, well = console_for(False), True
    for each in deploy.checks(edge, lambda path: _describe(path, edge)):
        well &= each.passed
        if each.passed:
            console.print(f"{each.subject:<10} {each.detail}", markup=False, soft_wrap=True)
        else:
            print(f"error: {each.detail}", file=sys.stderr)
    if not well:
        raise typer.Exit(1)
    if check:
        console.print("all is well")
        return
    sys.stdout.flush()
    deploy.start(edge)


def _id_of(key: Path) -> int:
    """Return I of node-I.key."""
    from coterie import deploy

    named = re.fullmatch(r"node-(\d+)\.key", key.name)
    if not named:
        raise deploy.DeployError(f"--key {key}: its name is not node-I.key, so say who this is: add --client-id")
    return int(named[1])


def _settings(assignments: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE."""
    from coterie import deploy

    settings = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise deploy.DeployError(f"--set {assignment}: write it as key=value")
        settings[name.strip()] = value.strip()
    return settings


def fab_hash(
    app: Annotated[Path, typer.Argument(metavar="APP", help="A checkout, or a .fab file.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Print the hash of the app that flwr run APP sends, for coterie client --fab-hash."""
    from coterie import deploy

    found = deploy.bundle(app)
    if as_json:
        print_json({"hash": found.hash, "id": found.id, "version": found.version, "files": dict(found.files)})
    else:
        print(found.hash)


def _describe(path: str, edge: Edge) -> str:
    from coterie.datasets.own import describe

    if edge.input_shape is None:
        return describe(path)
    from coterie.datasets.own import Declared

    return describe(path, Declared.parse(edge.input_shape, edge.num_classes, edge.value_range or ""))
