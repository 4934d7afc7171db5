"""``coterie privacy``: what a setting costs, what noise a target needs, and whether a run's papers are right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coterie.cli.console import JsonFlag, answer, console_for, print_json

app = typer.Typer(help="What a setting costs, and what noise a target needs.", no_args_is_help=True)

_CLIENT = "Client level"
_RECORD = "Record level"

Epsilon = Annotated[float, typer.Option(help="Target epsilon.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds.")]
Unit = Annotated[str, typer.Option(help="client, or record (DP-SGD of one client).")]
Noise = Annotated[float | None, typer.Option(help="Noise standard deviation / sensitivity of a round.")]
Rate = Annotated[
    float | None, typer.Option(help="Part of the clients that takes part in a round.", rich_help_panel=_CLIENT)
]
Sampler = Annotated[str, typer.Option(help="poisson, or fixed (m of M, replace-one).", rich_help_panel=_CLIENT)]
Opacus = Annotated[bool, typer.Option("--opacus", help="Ask Opacus' accountants too (slow).")]
Accountant = Annotated[str | None, typer.Option(help="pld, rdp, opacus-rdp, opacus-prv, theorem-4.2[-canonne].")]
Examples = Annotated[int | None, typer.Option(help="N, records of the client.", rich_help_panel=_RECORD)]
Batch = Annotated[int | None, typer.Option(help="b, expected batch size.", rich_help_panel=_RECORD)]
FirstBatch = Annotated[int | None, typer.Option(help="Batch size of round 1.", rich_help_panel=_RECORD)]
FirstNoise = Annotated[float | None, typer.Option(help="Noise of round 1.", rich_help_panel=_RECORD)]
Epochs = Annotated[int, typer.Option(help="K, local epochs in a round.", rich_help_panel=_RECORD)]
Selections = Annotated[int, typer.Option(help="Choices of a cluster by loss.", rich_help_panel=_RECORD)]
SelectionEpsilon = Annotated[float, typer.Option(help="Epsilon of each choice.", rich_help_panel=_RECORD)]


def _needed(unit: str, **options: Any) -> None:
    """Refuse a unit that does not exist, and name what it needs."""
    from coterie.privacy import PrivacyError

    if unit not in ("client", "record"):
        raise PrivacyError(f"--unit {unit}: must be client or record")
    for name, value in options.items():
        if value is None:
            raise PrivacyError(f"--unit {unit} needs --{name.replace('_', '-')}")


def _unwanted(unit: str, **options: Any) -> None:
    from coterie.privacy import PrivacyError

    for name, value in options.items():
        if value is not None:
            other = "client" if unit == "record" else "record"
            raise PrivacyError(f"--{name.replace('_', '-')} belongs to --unit {other}, not {unit}")


def _selection(selections: int, selection_epsilon: float) -> dict[str, Any]:
    if not selections:
        return {}
    return {"selection": "gumbel", "selections": selections, "selection_epsilon": selection_epsilon}


def _adjacency(sampler: str) -> dict[str, str]:
    from coterie.privacy import Joint, RRSlot

    return {"unit": "client", "adjacency": (Joint if sampler == "poisson" else RRSlot).adjacency}


@app.command("epsilon")
def privacy_epsilon(
    delta: Delta,
    rounds: Rounds,
    noise_multiplier: Noise = None,
    unit: Unit = "client",
    sampling_rate: Rate = None,
    sampler: Sampler = "poisson",
    examples: Examples = None,
    batch_size: Batch = None,
    first_batch_size: FirstBatch = None,
    first_noise_multiplier: FirstNoise = None,
    local_epochs: Epochs = 1,
    selections: Selections = 0,
    selection_epsilon: SelectionEpsilon = 0.02,
    opacus: Opacus = False,
    as_json: JsonFlag = False,
) -> None:
    """What a setting costs, by every accountant that covers it."""
    from coterie.privacy import ACCOUNTANTS, Event, PrivacyError, RecordPlan
    from coterie.privacy import epsilon as cost

    if noise_multiplier is None or not noise_multiplier > 0:
        raise PrivacyError(f"--noise-multiplier must be positive, not {noise_multiplier}")
    if unit == "record":
        _needed(unit, examples=examples, batch_size=batch_size)
        _unwanted(unit, sampling_rate=sampling_rate)
        plan = RecordPlan(
            num_examples=examples or 0,
            batch_size=batch_size or 0,
            rounds=rounds,
            epsilon=float("inf"),
            delta=delta,
            noise_multiplier=noise_multiplier,
            first_batch_size=first_batch_size,
            first_noise_multiplier=first_noise_multiplier,
            local_epochs=local_epochs,
            **_selection(selections, selection_epsilon),
        )
        events, about = plan.planned(), {"unit": unit, "adjacency": plan.adjacency}
        sampler = plan.sampler
    else:
        _needed(unit, sampling_rate=sampling_rate)
        _unwanted(unit, examples=examples, batch_size=batch_size, first_batch_size=first_batch_size)
        events = {Event(sampling_rate or 0.0, noise_multiplier, sampler): rounds}
        about = _adjacency(sampler)
    names = [n for n, a in ACCOUNTANTS.items() if sampler in a.samplers and (opacus or not n.startswith("opacus"))]
    costs = {f"epsilon_{name}": cost(events, delta, name) for name in names}
    answer({"epsilon": costs["epsilon_pld"], **costs, "delta": delta, **about}, as_json)


@app.command("noise")
def privacy_noise(
    epsilon: Epsilon,
    delta: Delta,
    rounds: Rounds,
    unit: Unit = "client",
    accountant: Accountant = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Of all rounds but the first, to find the first's.", rich_help_panel=_RECORD)
    ] = None,
    sampling_rate: Rate = None,
    mechanism: Annotated[str, typer.Option(help="joint, rr-slot or paper.", rich_help_panel=_CLIENT)] = "joint",
    identifier_share: Annotated[
        float | None, typer.Option(help="Part spent on labels or cluster sizes.", rich_help_panel=_CLIENT)
    ] = None,
    clients: Annotated[int, typer.Option(help="M; a fixed cohort has m = qM.", rich_help_panel=_CLIENT)] = 1000,
    clusters: Annotated[int, typer.Option(help="k.", rich_help_panel=_CLIENT)] = 4,
    examples: Examples = None,
    batch_size: Batch = None,
    first_batch_size: FirstBatch = None,
    first_noise_multiplier: FirstNoise = None,
    local_epochs: Epochs = 1,
    selections: Selections = 0,
    selection_epsilon: SelectionEpsilon = 0.02,
    as_json: JsonFlag = False,
) -> None:
    """The noise that a target needs."""
    if unit == "record":
        _needed(unit, examples=examples, batch_size=batch_size)
        _unwanted(unit, sampling_rate=sampling_rate, identifier_share=identifier_share)
        fixed = {"noise_multiplier": noise_multiplier, "accountant": accountant}
        numbers = {
            "num_examples": examples,
            "batch_size": batch_size,
            "rounds": rounds,
            "epsilon": epsilon,
            "delta": delta,
            "first_batch_size": first_batch_size,
            "first_noise_multiplier": first_noise_multiplier,
            "local_epochs": local_epochs,
        }
        given = {name: value for name, value in fixed.items() if value is not None}
        answer(_record_noise({**numbers, **given, **_selection(selections, selection_epsilon)}), as_json)
        return
    _needed(unit, sampling_rate=sampling_rate)
    _unwanted(unit, noise_multiplier=noise_multiplier, examples=examples, batch_size=batch_size)
    numbers = {"clients": clients, "num_clusters": clusters, "sampling_rate": sampling_rate, "rounds": rounds}
    options = {"accountant": accountant, "identifier_share": identifier_share}
    given = {name: value for name, value in options.items() if value is not None}
    answer(_client_noise(mechanism, {**numbers, "epsilon": epsilon, "delta": delta, **given}), as_json)


def _client_noise(mechanism: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    from coterie.privacy import MECHANISMS, PLANS, PrivacyError
    from coterie.privacy import epsilon as cost
    from coterie.privacy.plan import certifies

    if mechanism not in MECHANISMS:
        raise PrivacyError(f"--mechanism {mechanism}: must be {', '.join(MECHANISMS)}")
    plan = PLANS[mechanism].calibrated(clip_norm=1.0, **numbers)
    return {
        "noise_multiplier": plan.noise_multiplier,
        "noise_multiplier_updates": plan.noise_multiplier_updates,
        "noise_multiplier_counts": plan.noise_multiplier_counts,
        "epsilon": cost(plan.planned(), plan.delta, plan.accountant),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "certifies": not plan.flaws and certifies(plan.accountant),
        "unit": plan.unit,
        "adjacency": plan.adjacency,
    }


def _record_noise(numbers: Mapping[str, Any]) -> dict[str, Any]:
    from coterie.privacy import RecordPlan

    plan = RecordPlan.calibrated(**numbers)
    return {
        "noise_multiplier": plan.noise_multiplier,
        "first_noise_multiplier": plan.first_noise_multiplier or plan.noise_multiplier,
        "epsilon": plan.cost(),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "unit": plan.unit,
        "adjacency": plan.adjacency,
    }


@app.command("curve")
def privacy_curve(
    delta: Delta,
    sampling_rate: Annotated[float, typer.Option(help="Part of the clients that takes part in a round.")],
    rounds: Rounds,
    noise_multiplier: Noise = None,
    epsilon: Annotated[float | None, typer.Option(help="Or the target that sets the noise, by PLD.")] = None,
    sampler: Sampler = "poisson",
    out: Annotated[Path | None, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Epsilon against rounds, by each accountant."""
    from coterie.privacy import ACCOUNTANTS, Event, PrivacyError, calibrate, composed

    if (noise_multiplier is None) == (epsilon is None):
        raise PrivacyError("give one of --noise-multiplier and --epsilon")
    if epsilon is not None:
        noise_multiplier = calibrate(epsilon, delta, sampling_rate, rounds, sampler=sampler)
    event = Event(sampling_rate, noise_multiplier or 0.0, sampler)
    names = [n for n, a in ACCOUNTANTS.items() if sampler in a.samplers and not n.startswith("opacus")]
    steps = sorted({max(1, round(rounds * i / 40)) for i in range(41)})
    curves = {}
    for name in names:
        start = composed([], name)
        curves[name] = [(n, start.with_rounds(event, n).epsilon(delta)) for n in steps]
    if out is None and not as_json:
        out = Path("privacy-curve.png")
    if out is not None:
        from coterie.report import privacy_figure, save_figure

        title = f"noise {event.noise_multiplier:.3g}, rate {sampling_rate:g}, δ {delta:g}, {sampler} sampling"
        save_figure(privacy_figure(curves, title), out)
    if as_json:
        print_json({"noise_multiplier": event.noise_multiplier, "delta": delta, "curves": curves})
    else:
        console_for(as_json).print(str(out), soft_wrap=True)


@app.command("check")
def privacy_check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")], as_json: JsonFlag = False
) -> None:
    """Derive a run's certificate again from its ledger alone, and compare."""
    from coterie.privacy import LedgerError, certificate, read_ledger
    from coterie.privacy.check import check

    header, charges = read_ledger(run / "ledger.jsonl")
    stated = None
    if (run / "privacy.json").exists():
        try:
            stated = json.loads((run / "privacy.json").read_text())
        except ValueError as error:
            raise LedgerError(f"{run / 'privacy.json'} is not JSON: {error}") from None
    try:
        problems, derived = check(header, charges, stated), certificate(header, charges)
    except (KeyError, TypeError) as error:
        raise LedgerError(f"{run / 'ledger.jsonl'}: its first line describes no plan ({error})") from None
    if as_json:
        print_json({"problems": problems, "certificate": derived})
    else:
        shown = ("certified", "epsilon", "delta", "unit", "adjacency", "mechanism", "accountant", "charges")
        answer({key: derived[key] for key in shown}, as_json)
        screen = Console(highlight=False, soft_wrap=True)
        for line in [*derived["reasons"], *(f"[red]problem:[/red] {problem}" for problem in problems)]:
            screen.print(line)
        if not problems:
            found = "the run is not finished; so far its charges are in order"
            screen.print("the certificate follows from the ledger" if stated is not None else found)
    if problems:
        raise typer.Exit(1)
