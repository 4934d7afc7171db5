"""Computes the tables of docs/choosing-privacy.md: what an attacker gains at an (ε, δ), and how large the noise is."""

import itertools
import math
import re
from pathlib import Path

from coterie.privacy import Banded, Event, Joint, calibrate, composed
from coterie.privacy.accountants import VisibleAccountant
from coterie.privacy.accounting import min_noise

PAGE = Path(__file__).resolve().parents[1] / "docs" / "choosing-privacy.md"
#: Of the demo.
RATE, ROUNDS, DELTA = 0.2, 80, 2e-5
EPSILONS = (0.5, 1, 2, 4, 8)
FALSE_POSITIVES = (0.01, 0.001)


def most_found(curve, false_positives):
    """The largest rate of true positives of any attack, given all pairs (ε, δ) that hold in both directions."""
    return min(
        min(1.0, math.exp(epsilon) * false_positives + delta, 1 - math.exp(-epsilon) * (1 - delta - false_positives))
        for epsilon, delta in curve
    )


def curve(noise):
    """Pairs (ε, δ) of the demo's plan with another noise multiplier."""
    accountant = composed({Event(RATE, noise): ROUNDS})
    deltas = [*(10 ** (-i / 8) for i in range(1, 80)), *(i / 20 for i in range(3, 20))]
    return [(accountant.epsilon(delta), delta) for delta in deltas]


def percent(share):
    """With two digits, or as many nines as there are."""
    digits = 0 if 0.1 <= share <= 0.95 else 1 if 0.01 <= share < 0.99 else 2
    return f"{100 * share:.{digits}f} %"


def table(*rows):
    """Markdown of rows, the first of which has the heads."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| ---: |" + " ---: |" * (len(rows[0]) - 1), *lines[1:]]) + "\n"


def odds():
    """By definition."""
    heads = ["ε", "odds change by at most", "50 % become at most"]
    rows = [[*heads, *(f"found, if {100 * rate:g} % of others are accused" for rate in FALSE_POSITIVES)]]
    for epsilon in EPSILONS:
        factor = math.exp(epsilon)
        found = [percent(most_found([(epsilon, 1e-5)], rate)) for rate in FALSE_POSITIVES]
        rows.append(
            [f"{epsilon:g}", f"{factor:,.{1 if factor < 100 else 0}f} times", percent(factor / (1 + factor)), *found]
        )
    return table(*rows)


def attacks():
    """By the whole curve of the demo's plan."""
    rows = [
        ["ε", "noise multiplier", *(f"found, if {100 * rate:g} % of others are accused" for rate in FALSE_POSITIVES)]
    ]
    for epsilon in EPSILONS[1:]:
        noise = calibrate(epsilon, DELTA, RATE, ROUNDS)
        found = [percent(most_found(curve(noise), rate)) for rate in FALSE_POSITIVES]
        rows.append([f"{epsilon:g}", f"{noise:.2f}", *found])
    return table(*rows)


def deltas():
    """Noise by δ at ε = 8."""
    every = [10.0**-power for power in (3, 4, 5, 6, 7)]
    noises = [f"{calibrate(8, delta, RATE, ROUNDS):.2f}" for delta in every]
    return table(["δ", *(f"10⁻{'⁰¹²³⁴⁵⁶⁷'[power]}" for power in (3, 4, 5, 6, 7))], ["noise multiplier", *noises])


def noise():
    """Length of the noise on the mean update of a round over the clipping norm: z √d / (q M)."""
    multiplier, clients = calibrate(8, 1e-5, RATE, ROUNDS), (5, 50, 500, 5000, 50_000)
    rows = [["parameters", *(f"{number:,} clients" for number in clients)]]
    for parameters in (650, 10_000, 100_000):
        shares = [multiplier * math.sqrt(parameters) / (RATE * number) for number in clients]
        rows.append([f"{parameters:,}", *(f"{share:.0f}" if share >= 10 else f"{share:.2g}" for share in shares)])
    return table(*rows)


def visible_noise(rate, epsilon, delta):
    """Noise multiplier of a round of joint at which epsilon holds if participation is visible."""

    def cost(noise):
        accountant = VisibleAccountant()
        accountant.compose(Event(rate, noise), ROUNDS)
        return accountant.epsilon(delta)

    return min_noise(cost, epsilon)


def mechanisms():
    """Noise of a model by mechanism, relative to joint with visible participation."""
    heads = ["q", "ε", "joint, visible", "banded, visible", "joint, secret", "banded, secret"]
    rows = [heads]
    for rate, epsilon in itertools.product((0.1, 0.2), EPSILONS[1:]):
        numbers = {"clients": 1000, "num_clusters": 1, "sampling_rate": rate, "rounds": ROUNDS, "clip_norm": 1.0}
        target = {"epsilon": epsilon, "delta": 1e-5}
        least = Joint(**numbers, **target, noise_multiplier=visible_noise(rate, epsilon, 1e-5)).model_noise
        options = [(Banded, "visible"), (Joint, None), (Banded, "secret")]
        noises = [
            kind.calibrated(**numbers, **target, identifier_share=0.0, **({"participation": who} if who else {}))
            for kind, who in options
        ]
        shares = [f"{plan.model_noise / least:.2f}" for plan in noises]
        rows.append([f"{rate:g}", f"{epsilon:g}", "1", *shares])
    return table(*rows)


def page():
    """docs/choosing-privacy.md with all tables."""

    def filled(match):
        return f"<!-- {match[1]} -->\n{globals()[match[1]]()}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", filled, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
