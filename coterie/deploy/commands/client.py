"""``coterie client`` and ``coterie fab-hash``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from getpass import getpass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import JsonFlag, console_for, print_json
from coterie.fields import GUARANTEES

if TYPE_CHECKING:
    from coterie.datasets import DataReport
    from coterie.deploy.edge import Check, Edge
    from coterie.site.node import NodeConfig

# Width of the subjects of checks, a line break included.
_INDENT = 12


def client(  # long: one line per option
    data: Annotated[Path, typer.Option(help="This client's data: a folder or a file.")],
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="The file node-I.coterie from the operator.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink's Fleet API; default: of BUNDLE.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Without BUNDLE: this client's private key, node-I.key of coterie certs.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Without BUNDLE: ca.crt, the certificate that verifies the SuperLink.")
    ] = None,
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
    """Participate in runs with local data: check the configuration, then start Flower's SuperNode.

    BUNDLE is opened once, by the passphrase that the operator gives apart from it.
    """
    from coterie.client.masking_keys import keys_or_none
    from coterie.deploy.edge import Edge, default_state_dir, start
    from coterie.site.errors import DeployError
    from coterie.site.node import NodeConfig

    if bundle is not None and str(bundle).startswith("-"):  # after --
        bundle, flags = None, [str(bundle), *(flags or ())]
    way: dict[str, Any] = {"superlink": superlink, "key": key, "ca": ca, "roster": roster, "fab_hash": fab_hash}
    if bundle is not None:
        way = _of_bundle(bundle, state_dir, way)
    if None in (way["superlink"], way["key"], way["ca"]):
        raise DeployError("give BUNDLE, the file node-I.coterie from the operator; or --superlink, --key and --ca")
    key, ca, roster = way["key"], way["ca"], way["roster"]
    if client_id is None:
        client_id = _client_of(key)
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
        **way,
        certificate=certificate,
        certificate_key=certificate_key,
        node=node,
        settings=_settings(assignments),
        trusted_entities=trusted_entities,
        isolation=isolation,
        port=port,
        flags=flags or (),
    )
    reports = _checked(edge, skip_invalid, budget_left=check)
    if check:
        print("all checks passed")
        return
    sys.stdout.flush()
    try:
        for data_report in reports:
            data_report.save(edge.state_dir)
    except OSError as error:
        raise DeployError(f"--state-dir {edge.state_dir}: cannot be written: {error.strerror}") from None
    keys_or_none(node)  # signed by the key of the node, which the processes that train may not have
    start(edge)


def _checked(edge: Edge, skip_invalid: bool, *, budget_left: bool) -> list[DataReport]:
    """Print what each check found, and return the reports on the data.

    Args:
        edge: options of the client.
        skip_invalid: whether records that cannot be used are left out.
        budget_left: whether something must be left of its budget.

    Raises:
        typer.Exit: a check failed.
    """
    from coterie.deploy.edge import checks

    console, well = console_for(False), True
    reports: list[DataReport] = []

    def describe(path: str) -> str:
        reports.append(_report(path, edge.node, skip_invalid))
        return "\n".ljust(_INDENT).join(reports[-1].lines())

    def describe_budget() -> str:
        from coterie.client.app import client_of
        from coterie.client.budget import describe_budget

        return describe_budget(client_of(edge.node), required=budget_left)

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
    return reports


def _of_bundle(bundle: Path, state_dir: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a client that its bundle has, unless they are given; open the bundle if it is new.

    Raises:
        DeployError: it does not open, or the key or the authority is given as well.
    """
    from coterie.deploy.bundles import PASSPHRASE, opened, read_header, unseal
    from coterie.deploy.edge import absolute, default_state_dir
    from coterie.site.errors import DeployError
    from coterie.site.roster import Roster, read_authorities

    if given["key"] or given["ca"]:
        raise DeployError(f"{bundle} holds --key and --ca: leave these options out")
    state = absolute(state_dir or default_state_dir(read_header(bundle).node))
    passphrase = os.environ.pop(PASSPHRASE, "")  # not for the processes that start from here
    site = opened(bundle, state) or unseal(bundle, passphrase or _asked(bundle), state)
    own = {"superlink": site.superlink, "key": site.key, "ca": site.authority, "roster": site.roster}
    own["fab_hash"] = Roster.read(site.roster, read_authorities(site.authority)).app or None
    return {name: own[name] if value is None else value for name, value in given.items()}


def _client_of(key: Path) -> int:
    from coterie.site.errors import DeployError

    named = re.fullmatch(r"node-(\d+)\.key", key.name)
    if not named:
        raise DeployError(f"--key {key}: --client-id is required because the file name is not node-I.key")
    return int(named[1])


def _asked(bundle: Path) -> str:
    from coterie.deploy.bundles import PASSPHRASE
    from coterie.site.errors import DeployError

    if not sys.stdin.isatty():
        raise DeployError(f"{bundle}: is opened by a passphrase: start in a terminal once, or set {PASSPHRASE}")
    return getpass(f"passphrase of {bundle}: ")


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
