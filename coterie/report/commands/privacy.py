"""``coterie privacy curve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, answer, console_for, print_json
from coterie.cli.privacy import accountants_of, app, positive

_POINTS = 40


@app.command("curve")
def privacy_curve(
    delta: Annotated[float, typer.Option(help="Delta of the guarantee.")],
    sampling_rate: Annotated[float, typer.Option(help="q, sampling rate of clients in a round.")],
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")],
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise multiplier of a round: standard deviation / sensitivity.")
    ] = None,
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
    event = Event(sampling_rate, positive("noise-multiplier", noise_multiplier), sampler)
    if event.noise_multiplier < MIN_NOISE:
        raise PrivacyError(
            f"--noise-multiplier {noise_multiplier}: must be at least {MIN_NOISE:g}; below it epsilon is infinite"
        )
    # Denser at the start, where the curves bend.
    steps = sorted({max(1, round(rounds * (i / _POINTS) ** 1.5)) for i in range(_POINTS + 1)})
    curves = {name: [(n, composed({event: n}, name).epsilon(delta)) for n in steps] for name in accountants_of(sampler)}
    if out is None and not as_json:
        out = Path("privacy-curve.png")
    if out is not None:
        from coterie.report import formats
        from coterie.report.plots import privacy_figure, save_figure

        way = "Poisson sampling" if sampler == "poisson" else "cohorts of fixed size"
        title = f"noise {event.noise_multiplier:.4g}, {way} at rate {sampling_rate:g}, δ = {formats.number(delta)}"
        save_figure(privacy_figure(curves, title), out)
    if as_json:
        parameters = {"noise_multiplier": event.noise_multiplier, "delta": delta, "sampling_rate": sampling_rate}
        print_json({**parameters, "sampler": sampler, "adjacency": _adjacency(sampler), "curves": curves})
        return
    answer({f"epsilon_{name}": points[-1][1] for name, points in curves.items()}, as_json)
    console_for(as_json).print(str(out), soft_wrap=True)


def _adjacency(sampler: str) -> str:
    from coterie.privacy import Joint, RRSlot

    return (Joint if sampler == "poisson" else RRSlot).adjacency
