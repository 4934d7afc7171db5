"""``coterie privacy``: privacy costs, calibrated noise, and verification of a run's certificate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coterie.cli.console import JsonFlag, answer, console_for, print_json

app = typer.Typer(help="Compute privacy costs, calibrate noise, and check ledgers and budgets.", no_args_is_help=True)

_CLIENT = "Client level"
_RECORD = "Record level (DP-SGD at one client, without a trusted party)"
_POINTS = 40
_SELECTION_EPSILON = 0.02

Epsilon = Annotated[float, typer.Option(help="Target epsilon.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds.")]
Unit = Annotated[str, typer.Option(help="Privacy unit: client or record.")]
Noise = Annotated[float | None, typer.Option(help="Noise multiplier of a round: standard deviation / sensitivity.")]
Rate = Annotated[float | None, typer.Option(help="q, sampling rate of clients in a round.", rich_help_panel=_CLIENT)]
Sampler = Annotated[
    str | None,
    typer.Option(help="poisson (default), or fixed (m of M clients, replace-one adjacency).", rich_help_panel=_CLIENT),
]
Mechanism = Annotated[
    str | None, typer.Option(help="Mechanism: joint (default), banded, rr-slot or paper.", rich_help_panel=_CLIENT)
]
Participation = Annotated[
    str | None, typer.Option(help="banded: visible (default) or secret participation.", rich_help_panel=_CLIENT)
]
MinSeparation = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="banded: b, least number of rounds between two participations; default: 1/q, or that of the least error "
        "with secret participation.",
        rich_help_panel=_CLIENT,
    ),
]
Clients = Annotated[
    int | None,
    typer.Option(
        help="M, number of clients; a fixed cohort has m = qM of them; default: 1000.", rich_help_panel=_CLIENT
    ),
]
Clusters = Annotated[int | None, typer.Option(help="k, number of clusters; default: 4.", rich_help_panel=_CLIENT)]
Accountant = Annotated[
    str | None, typer.Option(help="Accountant: pld, rdp, opacus-rdp, opacus-prv, theorem-4.2 or theorem-4.2-canonne.")
]
Examples = Annotated[int | None, typer.Option(help="N, number of records of the client.", rich_help_panel=_RECORD)]
Batch = Annotated[int | None, typer.Option(help="b, expected batch size.", rich_help_panel=_RECORD)]
FirstBatch = Annotated[int | None, typer.Option(help="Batch size of round 1; default: b.", rich_help_panel=_RECORD)]
FirstNoise = Annotated[
    float | None,
    typer.Option(help="Noise multiplier of round 1; default: that of the others.", rich_help_panel=_RECORD),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="K, local epochs per round; default: 1.", rich_help_panel=_RECORD)
]
Selections = Annotated[
    int | None,
    typer.Option(min=0, help="Number of private cluster selections by loss; default: 0.", rich_help_panel=_RECORD),
]
SelectionEpsilon = Annotated[
    float | None,
    typer.Option(help=f"Epsilon of each selection; default: {_SELECTION_EPSILON}.", rich_help_panel=_RECORD),
]


@app.command("epsilon")
def privacy_epsilon(
    delta: Delta,
    rounds: Rounds,
    noise_multiplier: Noise = None,
    unit: Unit = "client",
    sampling_rate: Rate = None,
    sampler: Sampler = None,
    examples: Examples = None,
    batch_size: Batch = None,
    first_batch_size: FirstBatch = None,
    first_noise_multiplier: FirstNoise = None,
    local_epochs: Epochs = None,
    selections: Selections = None,
    selection_epsilon: SelectionEpsilon = None,
    opacus: Annotated[bool, typer.Option("--opacus", help="Include the accountants of Opacus (slow).")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compute the privacy cost by every accountant that supports the sampler."""
    from coterie.privacy import Event, RecordPlan
    from coterie.privacy import epsilon as cost

    client_args = {"sampling_rate": sampling_rate, "sampler": sampler}
    record_args = {
        "examples": examples,
        "batch_size": batch_size,
        "first_batch_size": first_batch_size,
        "first_noise_multiplier": first_noise_multiplier,
        "local_epochs": local_epochs,
        "selections": selections,
        "selection_epsilon": selection_epsilon,
    }
    _check_unit(unit, client_args, record_args)
    noise = _positive("noise_multiplier", noise_multiplier)
    if unit == "record":
        plan = RecordPlan(
            rounds=rounds, epsilon=math.inf, delta=delta, noise_multiplier=noise, **_record_numbers(record_args)
        )
        events, sampler, adjacency = plan.planned(), plan.sampler, plan.adjacency
    else:
        sampler = sampler or "poisson"
        events = Counter({Event(sampling_rate or 0.0, noise, sampler): rounds})
        adjacency = _adjacency(sampler)
    costs = {f"epsilon_{name}": cost(events, delta, name) for name in _accountants(sampler, opacus)}
    answer({"epsilon": costs["epsilon_pld"], **costs, "delta": delta, "unit": unit, "adjacency": adjacency}, as_json)


@app.command("noise")
def privacy_noise(
    epsilon: Epsilon,
    delta: Delta,
    rounds: Rounds,
    unit: Unit = "client",
    accountant: Accountant = None,
    sampling_rate: Rate = None,
    mechanism: Mechanism = None,
    participation: Participation = None,
    min_separation: MinSeparation = None,
    identifier_share: Annotated[
        float | None,
        typer.Option(help="Share for labels or cluster sizes; default: the mechanism's.", rich_help_panel=_CLIENT),
    ] = None,
    clients: Clients = None,
    clusters: Clusters = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise multiplier of all rounds but the first, whose noise is then calibrated.",
            rich_help_panel=_RECORD,
        ),
    ] = None,
    examples: Examples = None,
    batch_size: Batch = None,
    first_batch_size: FirstBatch = None,
    first_noise_multiplier: FirstNoise = None,
    local_epochs: Epochs = None,
    selections: Selections = None,
    selection_epsilon: SelectionEpsilon = None,
    as_json: JsonFlag = False,
) -> None:
    """Calibrate the noise to a target epsilon."""
    client_args = {
        "sampling_rate": sampling_rate,
        "mechanism": mechanism,
        "participation": participation,
        "min_separation": min_separation,
        "identifier_share": identifier_share,
        "clients": clients,
        "clusters": clusters,
    }
    record_args = {
        "examples": examples,
        "batch_size": batch_size,
        "noise_multiplier": noise_multiplier,
        "first_batch_size": first_batch_size,
        "first_noise_multiplier": first_noise_multiplier,
        "local_epochs": local_epochs,
        "selections": selections,
        "selection_epsilon": selection_epsilon,
    }
    _check_unit(unit, client_args, record_args)
    target = {"rounds": rounds, "epsilon": epsilon, "delta": delta, **_given({"accountant": accountant})}
    answer(_record_noise(record_args, target) if unit == "record" else _client_noise(client_args, target), as_json)


def _client_noise(options: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    from coterie.privacy import MECHANISMS, PLANS, Banded, PrivacyError
    from coterie.privacy import epsilon as cost
    from coterie.privacy.certificate import delta_reasons
    from coterie.privacy.plan import certifies

    numbers = {"mechanism": "joint", "clients": 1000, "clusters": 4, **_given(options)}
    mechanism = numbers.pop("mechanism")
    if mechanism not in MECHANISMS:
        raise PrivacyError(f"--mechanism {mechanism}: must be {', '.join(MECHANISMS)}")
    for option in ("participation", "min_separation"):
        if option in numbers and option not in PLANS[mechanism].options:
            raise PrivacyError(f"--{option.replace('_', '-')} is for --mechanism banded, not {mechanism}: leave it out")
    plan = PLANS[mechanism].calibrated(clip_norm=1.0, num_clusters=numbers.pop("clusters"), **numbers, **target)
    return {
        "noise_multiplier": plan.noise_multiplier,
        "noise_multiplier_updates": plan.noise_multiplier_updates,
        "noise_multiplier_counts": plan.noise_multiplier_counts,
        "model_noise": plan.model_noise,
        **({"min_separation": plan.slots} if isinstance(plan, Banded) else {}),
        "epsilon": cost(plan.planned(), plan.delta, plan.accountant),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "certifies": not plan.reasons() and not delta_reasons(plan) and certifies(plan.accountant),
        "unit": plan.unit,
        "adjacency": plan.adjacency,
    }


def _record_noise(options: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    from coterie.privacy import PrivacyError, RecordPlan
    from coterie.privacy.certificate import delta_reasons
    from coterie.privacy.plan import certifies

    noises = {name: options[name] for name in ("noise_multiplier", "first_noise_multiplier")}
    if None not in noises.values():
        raise PrivacyError(
            "--noise-multiplier and --first-noise-multiplier leave nothing to calibrate: give at most one"
        )
    for name, value in _given(noises).items():
        _positive(name, value)
    plan = RecordPlan.calibrated(**_record_numbers(options), **target)
    return {
        "noise_multiplier": plan.noise_multiplier,
        "first_noise_multiplier": plan.first_noise_multiplier or plan.noise_multiplier,
        "epsilon": plan.cost(),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "certifies": not plan.reasons() and not delta_reasons(plan) and certifies(plan.accountant),
        "unit": plan.unit,
        "adjacency": plan.adjacency,
    }


@app.command("curve")
def privacy_curve(
    delta: Delta,
    sampling_rate: Annotated[float, typer.Option(help="q, sampling rate of clients in a round.")],
    rounds: Rounds,
    noise_multiplier: Noise = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Target epsilon to which the noise is calibrated by PLD, instead of --noise-multiplier."),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="poisson, or fixed (m of M clients, replace-one adjacency).")
    ] = "poisson",
    out: Annotated[
        Path | None, typer.Option(help="Figure to write: .png, .svg or .pdf; default: privacy-curve.png.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Plot epsilon over rounds for each accountant."""
    from coterie.privacy import Event, PrivacyError, calibrate, composed
    from coterie.privacy.accountants import MIN_NOISE
    from coterie.privacy.accounting import check_delta

    if (noise_multiplier is None) == (epsilon is None):
        raise PrivacyError("give either --noise-multiplier or --epsilon")
    check_delta(delta)
    if epsilon is not None:
        noise_multiplier = calibrate(epsilon, delta, sampling_rate, rounds, sampler=sampler)
    event = Event(sampling_rate, _positive("noise_multiplier", noise_multiplier), sampler)
    if event.noise_multiplier < MIN_NOISE:
        raise PrivacyError(
            f"--noise-multiplier {noise_multiplier}: must be at least {MIN_NOISE:g}; below it epsilon is infinite"
        )
    # Denser at the start, where the curves bend.
    steps = sorted({max(1, round(rounds * (i / _POINTS) ** 1.5)) for i in range(_POINTS + 1)})
    curves = {
        name: [(n, composed({event: n}, name).epsilon(delta)) for n in steps] for name in _accountants(sampler, False)
    }
    if out is None and not as_json:
        out = Path("privacy-curve.png")
    if out is not None:
        from coterie.report import formats, privacy_figure, save_figure

        way = "Poisson sampling" if sampler == "poisson" else "cohorts of fixed size"
        title = f"noise {event.noise_multiplier:.4g}, {way} at rate {sampling_rate:g}, δ = {formats.number(delta)}"
        save_figure(privacy_figure(curves, title), out)
    if as_json:
        about = {"noise_multiplier": event.noise_multiplier, "delta": delta, "sampling_rate": sampling_rate}
        print_json({**about, "sampler": sampler, "adjacency": _adjacency(sampler), "curves": curves})
        return
    answer({f"epsilon_{name}": points[-1][1] for name, points in curves.items()}, as_json)
    console_for(as_json).print(str(out), soft_wrap=True)


@app.command("check")
def privacy_check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")], as_json: JsonFlag = False
) -> None:
    """Check that a run's certificate matches its ledger."""
    from coterie.privacy import PrivacyError, certificate
    from coterie.privacy.check import check, verified

    header, charges = verified(run)
    stated = _stated(run / "privacy.json")
    problems, derived = check(header, charges, stated), {}
    try:
        derived = certificate(header, charges)
    except PrivacyError as error:
        problems.append(f"no certificate can be derived: {error}")
    if as_json:
        print_json({"problems": problems, "certificate": derived or None})
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
    if problems:
        raise typer.Exit(1)


@app.command("spent")
def privacy_spent(
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="Ledger of a client: client-ID.ledger.jsonl.")],
    as_json: JsonFlag = False,
) -> None:
    """Show the privacy spending of a record-level client over all runs, and its budget."""
    from coterie.privacy import epsilon as cost
    from coterie.privacy import read_ledger
    from coterie.privacy.ledger import count_events

    header, charges = read_ledger(ledger)
    events = count_events(charges)
    answer(
        {
            "epsilon": cost(events, header["delta"], header["accountant"]),
            "epsilon_rdp": cost(events, header["delta"], "rdp"),
            "epsilon_budget": header["epsilon"],
            "delta": header["delta"],
            "rounds": len({charge["round"] for charge in charges}),
            "steps": events.total(),
        },
        as_json,
    )


@app.command("guard")
def privacy_guard(
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="Ledger of a guarded site, or of a guarded run.")],
    as_json: JsonFlag = False,
) -> None:
    """Show the certificate of a guarded site over all apps and runs, or of a guarded run over all sites."""
    from coterie.guard import certificate

    document = certificate(ledger)
    if not as_json:
        lists = {key: "\n".join(map(str, value)) for key, value in document.items() if isinstance(value, list)}
        costs = "\n".join(f"{name}: {cost}" for name, cost in document["accountants"].items())
        document |= lists | {"accountants": costs, "sites": str(len(document["sites"]))}
    answer(document, as_json)


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
    found = total({str(run): verified(run) for run in runs}, delta)
    if as_json:
        print_json(found)
        return
    hidden = ("reasons", "runs")
    facts = {key: value for key, value in found.items() if key not in hidden}
    answer({key: math.inf if value is None else value for key, value in facts.items()}, as_json)
    screen = Console(highlight=False, soft_wrap=True, markup=False)
    for reason in found["reasons"]:
        screen.print(f"not certified: {reason}")


@app.command("budget")
def privacy_budget(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Budget file, for coterie run --budget-file.")],
    epsilon: Annotated[float | None, typer.Option(help="Epsilon of a new budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of a new budget.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="M, number of clients of all runs.")] = None,
    sampler: Annotated[str, typer.Option(help="Sampler: poisson (joint) or fixed (rr-slot).")] = "poisson",
    as_json: JsonFlag = False,
) -> None:
    """Create a budget that several runs share, or show how much of it is spent."""
    from coterie.privacy import Event, PrivacyError, SharedBudget, read_ledger
    from coterie.privacy import epsilon as cost
    from coterie.privacy.accounting import check_delta
    from coterie.privacy.ledger import count_events

    if epsilon is not None or delta is not None or clients is not None:
        if file.exists():
            raise PrivacyError(f"{file} already exists, and budgets cannot be changed: choose another file")
        if epsilon is None or delta is None or clients is None:
            raise PrivacyError("a new budget requires --epsilon, --delta and --clients")
        check_delta(delta)
        Event(1.0, _positive("epsilon", epsilon), sampler)  # checks that epsilon is finite and the sampler known
        SharedBudget(file, clients=clients, sampler=sampler, epsilon=epsilon, delta=delta).close()
    header, charges = read_ledger(file)
    if "clients" not in header:
        raise PrivacyError(f"{file} is not a budget file")
    spent = {"epsilon": cost(count_events(charges), header["delta"]), "epsilon_budget": header["epsilon"]}
    answer({**spent, **{key: header[key] for key in ("delta", "clients", "sampler")}, "charges": len(charges)}, as_json)


def _stated(path: Path) -> dict[str, Any] | None:
    """Contents of privacy.json; None if it does not exist."""
    from coterie.files import FileError, read_object
    from coterie.privacy import LedgerError

    if not path.exists():
        return None
    try:
        return read_object(path)
    except FileError as error:
        raise LedgerError(f"{error}; restore it from a copy, or delete it to check the ledger alone") from None


# ---- options ------------------------------------------------------------------------------------------------


def _check_unit(unit: str, client_args: Mapping[str, Any], record_args: Mapping[str, Any]) -> None:
    """Reject an unknown unit, options of the other unit, and missing options.

    Raises:
        PrivacyError: the options do not fit the unit.
    """
    from coterie.privacy import PrivacyError

    needed = {"client": ("sampling_rate",), "record": ("examples", "batch_size")}
    if unit not in needed:
        raise PrivacyError(f"--unit {unit}: must be client or record")
    own, others, other = client_args, record_args, "record"
    if unit == "record":
        own, others, other = record_args, client_args, "client"
    for name in _given(others):
        raise PrivacyError(f"{_option(name)} requires --unit {other}: omit it with --unit {unit}")
    for name in needed[unit]:
        if own[name] is None:
            raise PrivacyError(f"--unit {unit} requires {_option(name)}")


def _record_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a RecordPlan."""
    numbers = _given(options)
    numbers["num_examples"] = numbers.pop("examples")
    if "first_noise_multiplier" in numbers:
        _positive("first_noise_multiplier", numbers["first_noise_multiplier"])
    if numbers.get("selections"):
        numbers["selection"] = "gumbel"
    elif "selection_epsilon" in numbers:
        from coterie.privacy import PrivacyError

        raise PrivacyError("--selection-epsilon requires --selections, the number of selections")
    return {"selection_epsilon": _SELECTION_EPSILON, **numbers}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _positive(name: str, value: float | None) -> float:
    from coterie.privacy import PrivacyError

    if value is None:
        raise PrivacyError(f"{_option(name)} is required")
    if not value > 0:
        raise PrivacyError(f"{_option(name)} must be positive, not {value}")
    return value


def _accountants(sampler: str, opacus: bool) -> list[str]:
    """Every accountant that supports the sampler. Those of Opacus import torch."""
    from coterie.privacy import ACCOUNTANTS

    return [n for n, a in ACCOUNTANTS.items() if sampler in a.samplers and (opacus or not n.startswith("opacus"))]


def _adjacency(sampler: str) -> str:
    from coterie.privacy import Joint, RRSlot

    return (Joint if sampler == "poisson" else RRSlot).adjacency
