"""``coterie privacy``: privacy costs, calibrated noise, and verification of a run's certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coterie.cli.console import JsonFlag, answer, console_for, group, print_json, print_table
from coterie.cli.run import Assignments, Clients, Clusters, Config, Epsilon, Rounds, settings_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from coterie.server import RunConfig

app = group("Compute privacy costs, calibrate noise, and check ledgers and budgets.")

_Text = str | None

# Settings of a run that have options of their own, as in `coterie run`.
Delta = Annotated[_Text, typer.Option(metavar="DELTA", help="Delta of the guarantee.")]
Rate = Annotated[_Text, typer.Option(metavar="Q", help="q, sampling rate of clients in a round.")]
Mechanism = Annotated[_Text, typer.Option(metavar="NAME", help="Mechanism of client-level privacy.")]


def _config(config: Path | None, assignments: list[str], options: Mapping[str, _Text]) -> RunConfig:
    """Return the configuration of a run with these settings."""
    from coterie.server import RunConfig

    given = {name: value for name, value in options.items() if value is not None}
    return RunConfig(settings_of(config, assignments, given))


@app.command("epsilon")
def privacy_epsilon(
    noise_multiplier: Annotated[
        _Text, typer.Option(metavar="Z", help="Noise of a round over its sensitivity; default: as calibrated.")
    ] = None,
    delta: Delta = None,
    rounds: Rounds = None,
    sampling_rate: Rate = None,
    mechanism: Mechanism = None,
    clients: Clients = None,
    clusters: Clusters = None,
    config: Config = None,
    assignments: Assignments = [],  # noqa: B006
    as_json: JsonFlag = False,
) -> None:
    """Compute the privacy cost of a run by every accountant that supports its sampler."""
    from coterie.privacy import ACCOUNTANTS
    from coterie.privacy.accounting import certifies

    options = {"noise-multiplier": noise_multiplier, "delta": delta, "rounds": rounds, "sampling-rate": sampling_rate}
    given = {**options, "mechanism": mechanism, "clients": clients, "clusters": clusters}
    plan = _config(config, assignments, given).plan
    certifying = {name: accountant for name, accountant in ACCOUNTANTS.items() if certifies(name)}
    costs = {f"epsilon_{name}": plan.cost(name) for name, by in certifying.items() if plan.sampler in by.samplers}
    stated = {"delta": plan.delta, "unit": plan.unit, "adjacency": plan.adjacency}
    answer({"epsilon": costs["epsilon_pld"], **costs, **stated}, as_json)


@app.command("noise")
def privacy_noise(
    epsilon: Epsilon = None,
    delta: Delta = None,
    rounds: Rounds = None,
    sampling_rate: Rate = None,
    mechanism: Mechanism = None,
    clients: Clients = None,
    clusters: Clusters = None,
    config: Config = None,
    assignments: Assignments = [],  # noqa: B006
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare sampling rates and mechanisms at this budget instead.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Calibrate the noise of a run to its budget."""
    from coterie.privacy import certificate

    options = {"epsilon": epsilon, "delta": delta, "rounds": rounds, "sampling-rate": sampling_rate}
    given = {**options, "mechanism": mechanism, "clients": clients, "clusters": clusters}
    run = _config(config, assignments, given)
    if compare:
        _compare(run, as_json)
        return
    plan = run.plan
    slots = plan.round_event(1).slots
    answer(
        {
            "noise_multiplier": plan.noise_multiplier,
            **plan.noises(),
            **({"model_noise": plan.model_noise} if plan.unit == "client" else {}),
            **({"min_separation": slots} if slots else {}),
            "epsilon": plan.cost(),
            "delta": plan.delta,
            "accountant": plan.accountant,
            "certifies": certificate(plan.ledger().header, [])["certified"],
            "unit": plan.unit,
            "adjacency": plan.adjacency,
        },
        as_json,
    )


def _compare(config: RunConfig, as_json: bool) -> None:
    """Print the ways to let clients take part, those that protect against observers first."""
    from coterie.datasets import DataError
    from coterie.server.participation import participations, seconds_of_client

    seconds, unmeasured = None, ""
    try:
        seconds = seconds_of_client(config)
    except DataError as error:
        unmeasured = f"\nseconds are not known without data: {error}"
    ways = participations(config, seconds)
    if as_json:
        print_json([asdict(way) for way in ways])
        return
    heads = ("mechanism", "q", "slots", "noise", "messages a round", "seconds a round", "ε, observers", "ε, outsiders")
    rows = [
        (
            way.mechanism,
            f"{way.sampling_rate:g}",
            str(way.slots or "–"),
            f"{way.noise:.3f}",
            f"{way.messages:.0f}",
            "–" if way.seconds is None else f"{way.seconds:.2g}",
            "∞" if way.epsilon_observers is None else f"{way.epsilon_observers:.2f}",
            f"{way.epsilon:.2f}",
        )
        for way in ways
    ]
    console = console_for(False)
    print_table(console, heads, rows, right=7)
    console.print(
        "\nnoise: of a model, root mean square over rounds, in units of clip-norm x server-lr\n"
        "seconds: of the clients' training, by one process of this machine, without messages\n"
        "observers see which clients take part, as in every deployment; outsiders do not;\n"
        "under secure, the server itself learns no more than observers" + unmeasured,
        markup=False,
    )


@app.command("check")
def privacy_check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    public_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="operator.pub, whose key must have signed the run.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that a run's certificate matches its ledger, and its models and signature."""
    from coterie.privacy import PrivacyError, certificate
    from coterie.privacy.check import check, verified
    from coterie.privacy.manifest import manifest_problems
    from coterie.site.operator_keys import read_operator_public

    key = None if public_key is None else read_operator_public(public_key)
    header, charges = verified(run)
    stated = _stated(run / "privacy.json")
    problems, derived = check(header, charges, stated), {}
    try:
        derived = certificate(header, charges)
    except PrivacyError as error:
        problems.append(f"no certificate can be derived: {error}")
    problems += manifest_problems(run)
    signature, wrong = _signature(run, key)
    problems += wrong
    if problems:
        verdict = "bad"
    elif stated is None:
        verdict = "unfinished"
    else:
        verdict = "good" if derived.get("certified") else "not certified"
    if as_json:
        print_json({"verdict": verdict, "problems": problems, "signature": signature, "certificate": derived or None})
    else:
        shown = ("certified", "epsilon", "delta", "unit", "adjacency", "mechanism", "accountant", "charges")
        facts = {key: derived[key] for key in shown if key in derived}
        if facts and facts["epsilon"] is None:
            facts["epsilon"] = math.inf
        answer(facts, as_json)
        screen = Console(highlight=False, soft_wrap=True, markup=False)
        for reason in derived.get("reasons", ()):
            screen.print(f"not certified: {reason}")
        for problem in problems:
            screen.print(f"problem: {problem}", style="red")
        if not problems and stated is None:
            screen.print("the charges so far are valid; privacy.json does not exist yet")
        elif not problems:
            screen.print("the certificate matches the ledger")
        for line in (f"signature: {signature}", f"verdict: {verdict}"):
            screen.print(line)
    if problems:
        raise typer.Exit(1)


def _signature(run: Path, key: Ed25519PublicKey | None) -> tuple[str, list[str]]:
    """Return what is known of the signature of a run, and its problems, which need a key."""
    from coterie.files import FileError, read_bytes
    from coterie.privacy.manifest import MANIFEST, SIGNATURE
    from coterie.site.operator_keys import operator_fingerprint, verifies

    try:
        content, signature = (read_bytes(run / name) for name in (MANIFEST, SIGNATURE))
    except FileError:
        missing = next((name for name in (MANIFEST, SIGNATURE) if not (run / name).is_file()), SIGNATURE)
        signed = f"none ({missing} is missing): nothing shows who made this run; coterie handover RUN --key signs it"
        return signed, [] if key is None else [f"{missing} is missing or cannot be read: the run is not signed"]
    if key is None:
        return f"not verified: give --public-key to verify {SIGNATURE}", []
    if not verifies(key, content, signature):
        return "wrong", [f"{SIGNATURE} is no signature of {MANIFEST} by this key"]
    return f"valid, by the key with SHA-256 {operator_fingerprint(key)}", []


@app.command("total")
def privacy_total(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, at client level.")],
    delta: Annotated[
        float | None, typer.Option(help="Delta of the total; default: the smallest delta of the runs.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compose the privacy cost of several runs on the same clients from their ledgers."""
    from coterie.privacy import PrivacyError
    from coterie.privacy.certificate import total
    from coterie.privacy.check import verified

    if len({run.resolve() for run in runs}) < len(runs):
        raise PrivacyError("run folders must be distinct: give each one once")
    composition = total({str(run): verified(run) for run in runs}, delta)
    if as_json:
        print_json(composition)
        return
    hidden = ("reasons", "runs")
    facts = {key: value for key, value in composition.items() if key not in hidden}
    answer({key: math.inf if value is None else value for key, value in facts.items()}, as_json)
    screen = Console(highlight=False, soft_wrap=True, markup=False)
    for reason in composition["reasons"]:
        screen.print(f"not certified: {reason}")


def _stated(path: Path) -> dict[str, Any] | None:
    """Contents of privacy.json; None if it does not exist."""
    from coterie.files import FileError, read_object
    from coterie.privacy import LedgerError

    if not path.exists():
        return None
    try:
        return read_object(path, strict=True)
    except FileError as error:
        raise LedgerError(f"{error}; restore it from a copy, or delete it to check the ledger alone") from None
