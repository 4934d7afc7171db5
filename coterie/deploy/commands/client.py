"""``coterie client``, ``coterie fab-hash`` and ``coterie masking-keys``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, print_json
from coterie.fields import GUARANTEES

if TYPE_CHECKING:
    from coterie.datasets import DataReport
    from coterie.deploy.edge import Check
    from coterie.site.node import NodeConfig

# Width of the subjects of checks, a line break included.
_INDENT = 12


def client(  # long: one line per option
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink's Fleet API.")],
    data: Annotated[Path, typer.Option(help="This client's data: a folder or a file.")],
    key: Annotated[Path, typer.Option(help="This client's private key, node-I.key of coterie certs.")],
    ca: Annotated[Path, typer.Option(help="ca.crt, the certificate that verifies the SuperLink.")],
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="This client's certificate, if the SuperLink requires one; default: node-I.crt beside --key."
        ),
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(help="Key of the certificate; default: node-I.tls.key beside --key.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="roster.json of coterie certs, which must name this client's key.")
    ] = None,
    client_id: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="ID", help="This client's id, 0 to the number of clients - 1; default: I of node-I.key."
        ),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder of persistent state; default: client-ID in ~/.local/state/coterie.")
    ] = None,
    guarantee: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(GUARANTEES),
            help="What this client gives to a server; default: masked-sums with --roster, record-level with --epsilon.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget of this client over all runs; requires --delta.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the privacy budget.")] = None,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Report exact accuracies to the server; no guarantee covers them.")
    ] = False,
    input_shape: Annotated[
        str | None, typer.Option(metavar="1x28x28|16", help="Shape of an example of this client's data.")
    ] = None,
    num_classes: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Number of classes or labels of this client's data; 0: real targets."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="multi-label", help="What models of this client's data predict.")
    ] = None,
    value_range: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Range to which vector features are clamped.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Features of this client's table, or by-position.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="TOML schema of this client's table, instead of shape and classes.")
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="File of public initial parameters, for runs that start from it.")
    ] = None,
    budget_file: Annotated[
        Path | None, typer.Option(help="File that records this client's privacy spending; default: beside the data.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file of what this client's owner consents to; default: everything.")
    ] = None,
    fab_hash: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Hash of the only app that may run, as printed by coterie fab-hash."),
    ] = None,
    trusted_entities: Annotated[
        Path | None, typer.Option(help="YAML file of keys, passed to flower-supernode; one must have signed the app.")
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Go on without records that cannot be used, as the report counts.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration, and exit.")] = False,
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set another key of the node configuration.")
    ] = [],  # noqa: B006
    isolation: Annotated[
        str, typer.Option(help="subprocess, or process for a separate flower-superexec.")
    ] = "subprocess",
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="Local port of the SuperNode's Runtime API.")
    ] = 9094,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="Passed to flower-supernode unchanged.")
    ] = None,
) -> None:
    """Participate in runs with local data: check the configuration, then start Flower's SuperNode."""
    from coterie.client.masking_keys import keys_or_none
    from coterie.deploy.edge import Edge, checks, default_state_dir, start
    from coterie.site.errors import DeployError
    from coterie.site.node import NodeConfig

    if client_id is None:
        named = re.fullmatch(r"node-(\d+)\.key", key.name)
        if not named:
            raise DeployError(f"--key {key}: --client-id is required because the file name is not node-I.key")
        client_id = int(named[1])
    node = NodeConfig(
        client_id=client_id,
        state_dir=_absolute(state_dir or default_state_dir(client_id)),
        guarantee=guarantee,
        data=_absolute(data),
        epsilon=epsilon,
        delta=delta,
        diagnostics=diagnostics,
        input_shape=input_shape,
        num_classes=num_classes,
        task=task,
        value_range=value_range,
        columns=columns,
        pretrained=_absolute(pretrained),
        schema=_absolute(schema),
        budget_file=_absolute(budget_file),
        policy=_absolute(policy),
        roster=_absolute(roster),
        authority=_absolute(ca if roster else None),
        key=_absolute(key if roster else None),
    )
    edge = Edge(
        superlink=superlink,
        key=key,
        ca=ca,
        certificate=certificate,
        certificate_key=certificate_key,
        roster=roster,
        node=node,
        settings=_settings(assignments),
        fab_hash=fab_hash,
        trusted_entities=trusted_entities,
        isolation=isolation,
        port=port,
        flags=flags or (),
    )
    console, well = console_for(False), True
    reports: list[DataReport] = []

    def describe(path: str) -> str:
        reports.append(_report(path, node, skip_invalid))
        return "\n".ljust(_INDENT).join(reports[-1].lines())

    def describe_budget() -> str:
        from coterie.client.app import client_of
        from coterie.client.budget import describe_budget

        return describe_budget(client_of(node), required=check)

    def clock_error(*arguments: Any) -> str | None:
        from coterie.deploy.fleet import clock_error  # imports Flower

        return clock_error(*arguments)

    for result in chain(checks(edge, describe, describe_budget, clock_error), [_versions()]):
        well &= result.passed
        detail = result.detail if result.passed else f"failed: see the error of {result.detail.split()[0]}"
        console.print(f"{result.subject:<{_INDENT - 2}} {detail}", markup=False, soft_wrap=True)
        if not result.passed:
            print(f"error: {result.detail}", file=sys.stderr)
    if not well:
        raise typer.Exit(1)
    if check:
        console.print("all checks passed")
        return
    sys.stdout.flush()
    try:
        for data_report in reports:
            data_report.save(edge.state_dir)
    except OSError as error:
        raise DeployError(f"--state-dir {edge.state_dir}: cannot be written: {error.strerror}") from None
    keys_or_none(node)  # signed by the key of the node, which the processes that train may not have
    start(edge)


def _versions() -> Check:
    """Check that the libraries of this environment are new enough for this version of Coterie."""
    from coterie.client.identity import checked_versions
    from coterie.client.state import ClientError
    from coterie.deploy.edge import Check

    try:
        return Check("versions", True, checked_versions())
    except ClientError as error:
        return Check("versions", False, str(error))


def _settings(assignments: Sequence[str]) -> dict[str, str]:
    from coterie.site.errors import DeployError

    settings = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise DeployError(f"--set {assignment}: must be key=value")
        settings[name.strip()] = value.strip()
    return settings


def fab_hash(
    app: Annotated[Path, typer.Argument(metavar="APP", help="Folder of an app, or a .fab file.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """Print the hash of the app that flwr run APP submits, for coterie client --fab-hash."""
    from coterie.deploy.app_bundle import bundle

    fab = bundle(app)
    if as_json:
        print_json({"hash": fab.hash, "id": fab.id, "version": fab.version, "files": dict(fab.files)})
    else:
        print(fab.hash)


def masking_keys(
    client_id: Annotated[int, typer.Option(min=0, metavar="ID", help="This client's id.")],
    key: Annotated[Path, typer.Option(help="This client's private key, node-I.key of coterie certs.")],
    roster: Annotated[
        Path, typer.Option(help="roster.json of coterie certs, which must name this key; ca.crt lies beside it.")
    ],
    state_dir: Annotated[Path, typer.Option(help="Folder of this client's persistent state.")],
) -> None:
    """Sign a client's keys for masked rounds, so that the processes that train need no access to --key."""
    from coterie.client.masking_keys import MaskingKeys
    from coterie.deploy.edge import absolute
    from coterie.site.node import NodeConfig

    state, vouching, signing = (str(absolute(path)) for path in (state_dir, roster, key))
    MaskingKeys.of(NodeConfig(client_id=client_id, state_dir=state, roster=vouching, key=signing))
    print(f"client {client_id}: its keys for masked rounds are signed, in {state}")


def _absolute(path: Path | None) -> str | None:
    from coterie.deploy.edge import absolute

    return None if path is None else str(absolute(path))


def _report(path: str, node: NodeConfig, skip_invalid: bool) -> DataReport:
    """Report on the data of the client.

    Raises:
        DataError: no record can be used; or some cannot, which the user has not accepted.
    """
    from coterie.datasets import DataError, Declared, report

    declared = Declared.of(*node.declaration)
    data_report = report(path, declared)
    if not data_report.usable:
        raise DataError("; ".join(["no usable records", *data_report.lines()]))
    if data_report.problems and not skip_invalid:
        way = "correct these records, or accept with --skip-invalid that they are left out or clamped"
        raise DataError("; ".join([*data_report.lines(), way]))
    return data_report
