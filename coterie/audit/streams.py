"""Attacks on the releases of all rounds together, for mechanisms whose noise is correlated over rounds.

:func:`_run_stream` runs the shipped mechanism over a whole schedule, many times in each of two neighbouring worlds, and
certifies lower bounds as for a single release. :func:`_measure_stream` needs no statistics: noise is linear in what the
generator draws, so that impulses in place of its draws measure the matrix of the noise. Its inverse maps the
contributions of a client to the shift of a unit Gaussian, whatever the mechanism believes of its matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.audit.findings import Finding, FloatArray, dominance_test
from coterie.privacy import Banded, Event, Streams
from coterie.privacy.mechanisms.factorization import banded_matrix

_CHUNK = 10_000
_ROUNDING = 1e-9
_COINS = np.random.default_rng(0)
_NUMBERS: dict[str, Any] = {"num_clusters": 2, "clip_norm": 0.3, "epsilon": math.inf, "delta": 1e-5}


class _TooWide(Banded):
    """One band more than the separation: two contributions of a client meet in a row."""

    @property
    def matrix(self) -> FloatArray:
        return banded_matrix(self.rounds, self.slots + 1)

    def check_matrix(self) -> None:
        """Allow it."""


@dataclass(frozen=True)
class StreamAttack:
    """A client that sends an oversized update whenever it takes part, or nothing at all.

    Attributes:
        name: description of the attack.
        plan: the mechanism under attack.
        control: whether the claim is known to be wrong, so that the attack must succeed.
    """

    name: str
    plan: Banded
    control: bool = False


def stream_attacks() -> list[StreamAttack]:
    """Return the attacks on whole schedules."""
    visible: dict[str, Any] = {"clients": 6, "sampling_rate": 0.5, "rounds": 6, "noise_multiplier": 1.5, **_NUMBERS}
    secret = {**visible, "sampling_rate": 0.2, "noise_multiplier": 0.5, "participation": "secret", "min_separation": 2}
    sizes: dict[str, Any] = {"identifier_share": 0.04}
    return [
        StreamAttack("client in every round of its slot", Banded(**visible, **sizes)),
        StreamAttack("client of a slot, sizes up to round 3", Banded(**visible, **sizes, sizes_until=3)),
        StreamAttack("client of a slot by secret coins", Banded(**secret)),
        StreamAttack("matrix one band wider than the separation", _TooWide(**visible, **sizes), control=True),
    ]


def measured_plans() -> list[Banded]:
    """Return plans whose noise is measured: rounds that are no multiple of b, one slot, sizes in the first rounds."""
    numbers = {"clients": 20, "noise_multiplier": 1.5, **_NUMBERS}
    return [
        Banded(sampling_rate=1 / slots, rounds=rounds, identifier_share=share, sizes_until=last, **numbers)
        for slots, rounds, share, last in (
            (1, 3, 0.0, math.inf),
            (2, 7, 0.04, math.inf),
            (3, 12, 0.04, 7),
            (5, 23, 0.2, 12),
            (10, 40, 0.04, math.inf),
        )
    ]


def audit_streams(draws: int, streams: Streams) -> list[Finding]:
    """Run the attacks on whole schedules, and measure the noise of others."""
    return [
        *(_run_stream(attack, draws, streams, number) for number, attack in enumerate(stream_attacks())),
        *(_measure_stream(plan) for plan in measured_plans()),
    ]


def _run_stream(attack: StreamAttack, draws: int, streams: Streams, number: int) -> Finding:
    plan = attack.plan
    worlds = [
        np.concatenate(
            [
                _releases(plan, min(_CHUNK, draws - done), streams, replies, (number, int(replies), done))
                for done in range(0, draws, _CHUNK)
            ]
        )
        for replies in (False, True)
    ]
    contributions = math.ceil(plan.rounds / plan.slots)
    claim = {Event(plan.event().sampling_rate, plan.noise_multiplier): contributions}
    return dominance_test(plan.mechanism, attack.name, claim, (worlds[0], worlds[1]), attack.control)


def _releases(plan: Banded, draws: int, streams: Streams, replies: bool, key: tuple[int, ...]) -> FloatArray:
    """(draws, features) sums and sizes of all rounds; one coordinate per cluster, and one client of slot 0."""
    noise, coins = streams.stream("noise", *key), streams.stream("coins", *key)
    state, rate, seen = plan.new_state(), plan.event().sampling_rate, []
    for number in range(1, plan.rounds + 1):
        contributions = plan.contributions(1, draws)
        if replies and plan.round_event(number).slot == 0:
            sampled = coins.random((draws, 1)) < rate
            contributions.add(0, 0, 0, 1e3 * sampled)
        output = plan.of_round(number).perturb(contributions, noise, noise, np.eye(plan.num_clusters), state)
        seen.append(output.sums.reshape(draws, -1) / plan.clip_norm)
        if output.histogram is not None and rate == 1:
            seen.append(output.histogram)
    return np.concatenate(seen, axis=1)


class _Impulse(np.random.Generator):
    """Draws one number instead of noise."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self._value = value

    def standard_normal(self, size: Any = None, *rest: Any, **options: Any) -> Any:
        return np.full(() if size is None else size, self._value)


def _measure_stream(plan: Banded) -> Finding:
    """Measure the largest shift of a unit Gaussian by one client's contributions to all of its rounds."""
    name = f"noise of {plan.rounds} rounds in {plan.slots} slots, measured"
    noise = np.stack([_response(plan, row) for row in range(plan.rounds)], axis=1) / plan.clip_norm
    if not (np.isfinite(noise).all() and np.linalg.matrix_rank(noise) == plan.rounds):
        return Finding(plan.mechanism, name, "mu", 0.0, math.inf, (), True)
    gram = np.linalg.inv(noise).T @ np.linalg.inv(noise)
    sizes = [plan.of_round(row + 1).noise_multiplier_counts for row in range(plan.rounds)]
    of_client: dict[int, list[int]] = {}  # rounds, from 0, in which each client takes part
    for number in range(1, plan.rounds + 1):
        for client in plan.sample(_COINS, number):
            of_client.setdefault(int(client), []).append(number - 1)
    largest = 0.0
    for rounds in of_client.values():
        inside = np.abs(gram[np.ix_(rounds, rounds)]).sum()  # the worst signs, of updates in one direction
        largest = max(largest, float(inside) + sum(deviation**-2 for row in rounds if (deviation := sizes[row])))
    mu = math.sqrt(math.ceil(plan.rounds / plan.slots)) / plan.noise_multiplier
    shift = math.sqrt(largest)
    return Finding(plan.mechanism, name, "mu", mu, shift, (), not shift <= mu * (1 + _ROUNDING))


def _response(plan: Banded, row: int) -> FloatArray:
    """(T,) releases without contributions if the generator draws a one for ``row`` and zeros otherwise."""
    state, released = plan.new_state(), []
    for number in range(plan.rounds):
        # Noise is half the sum of four draws, so that draws of one half add up to one.
        drawn = _Impulse(0.5 if number == row else 0.0)
        late = plan.of_round(number + 1)
        output = late.perturb(plan.contributions(1), drawn, drawn, np.eye(plan.num_clusters), state)
        released.append(output.sums[0, 0, 0])
    return np.array(released)
