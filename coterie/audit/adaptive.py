"""Servers that choose each request by the privacy loss of earlier replies, against the ledger of a client.

A server knows all records but one, and so the loss of every reply. Its advantage is computed exactly, up to a grid of
losses that is rounded against the ledger: the value of a strategy at each loss is the expectation of its value after
the next reply, and after the last reply it is the part of the loss above epsilon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from scipy.special import ndtr

from coterie.audit.findings import Finding, FloatArray
from coterie.privacy import BudgetError, ClientLedger, Event, Streams, epsilon

_MECHANISM = "client ledger"
# Grid of losses: its step, a power of two, and its largest value.
_STEP, _LARGEST = 2.0**-7, 32.0
_LOSSES = np.arange(-_LARGEST, _LARGEST + _STEP / 2, _STEP)
# Points of half a finer grid, on which the losses of a request are added up, and a mass outside that may be ignored.
_FINE, _NEGLIGIBLE = 2**17, 1e-12
_MAX_COUNT = 4096

Direction: TypeAlias = Literal["add", "remove"]
_DIRECTIONS: tuple[Direction, Direction] = ("add", "remove")
#: Events of one request.
Request: TypeAlias = Mapping[Event, int]


def audit_adaptive_servers(streams: Streams, strategies: int) -> list[Finding]:
    """Play random and optimised servers against the shipped ledger, and one against a plain sum of losses.

    Args:
        streams: randomness of the strategies.
        strategies: number of random strategies.
    """
    rng = streams.stream("adaptive servers")
    budget = Budget(2.0, 1e-5)
    random = max(random_strategy(budget, rng) for _ in range(strategies))
    worst = max(worst_strategy(budget, [first]) for first in FIRST_REQUESTS)
    return [
        _finding(budget, f"{strategies} servers that choose random requests by the loss", random),
        _finding(budget, "servers that choose the worst request at every loss", worst),
        _finding(budget, "two continuations that each fit the sum of losses", two_continuations(budget), control=True),
    ]


def _finding(budget: Budget, attack: str, delta: float, control: bool = False) -> Finding:
    return Finding(
        _MECHANISM, attack, f"delta({budget.epsilon:g})", budget.delta, delta, (), delta > budget.delta, control
    )


@dataclass(frozen=True)
class Budget:
    """Budget of a client's ledger."""

    epsilon: float
    delta: float

    def accepts(self, history: Sequence[Request], request: Request) -> bool:
        """Whether the ledger of a client accepts a request after those of ``history``.

        Raises:
            BudgetError: it does not accept those of ``history``.
        """
        ledger = ClientLedger(self.delta, self.epsilon)
        try:
            for number, past_request in enumerate(history, 1):
                ledger.spend(number, past_request)
            try:
                ledger.spend(len(history) + 1, request)
            except BudgetError:
                return False
        finally:
            ledger.close()
        return True

    def most(self, history: Sequence[Request], kind: Event) -> int:
        """The largest number of steps of this kind that the ledger accepts after ``history``; at most 4096."""
        least, most = 0, 1
        while most <= _MAX_COUNT and self.accepts(history, {kind: most}):
            least, most = most, 2 * most
        return least + bisect_left(
            range(least + 1, min(most, _MAX_COUNT + 1)),
            True,
            key=lambda count: not self.accepts(history, {kind: count}),
        )


#: First requests of servers, which are a small to a large share of the budget (2, 1e-5).
FIRST_REQUESTS: tuple[Request, ...] = ({Event(1.0, 20.0): 20}, {Event(0.1, 1.5): 8}, {Event(0.01, 0.8): 150})
#: Kinds of events from which servers choose later requests.
KINDS = (Event(1.0, 20.0), Event(0.3, 4.0), Event(0.1, 1.5), Event(0.03, 1.0), Event(0.01, 0.8), Event(0.002, 0.6))


def worst_strategy(budget: Budget, history: Sequence[Request], stages: int = 1) -> float:
    """Return the largest delta of a server that, after ``history``, chooses the worst of :data:`KINDS` at every loss.

    It requests as many steps as the ledger accepts or, before its last request, half of them.
    """

    def value(history: Sequence[Request], stages: int, direction: Direction) -> FloatArray:
        best = _excess(budget.epsilon)
        for event in KINDS:
            most = budget.most(history, event)
            if most:
                best = np.maximum(best, expected(_excess(budget.epsilon), {event: most}, direction))
            if stages > 1 and most > 1:
                request = {event: most // 2}
                best = np.maximum(best, expected(value([*history, request], stages - 1, direction), request, direction))
        return best

    return max(_at_start(value(history, stages, direction), history, direction) for direction in _DIRECTIONS)


def random_strategy(budget: Budget, rng: np.random.Generator, stages: int = 3) -> float:
    """Return delta of a server whose requests are random, and others in each of three random ranges of the loss."""

    def request(history: Sequence[Request]) -> Request | None:
        rate = float(rng.choice([1.0, 10 ** rng.uniform(-3, 0)]))
        event = Event(rate, float(10 ** rng.uniform(-0.4, 1.0)))
        most = budget.most(history, event)
        share = rng.choice([1.0, rng.uniform()])
        return {event: max(1, int(share * most))} if most else None

    def value(history: Sequence[Request], stages: int, direction: Direction) -> FloatArray:
        values = _excess(budget.epsilon)
        edges = np.searchsorted(_LOSSES, [-np.inf, *np.sort(rng.normal(0.5, 1.0, 2)), np.inf])
        for start, stop in pairwise(edges):
            if stages and (chosen := request(history)) is not None:
                after = value([*history, chosen], stages - 1, direction)
                values[start:stop] = expected(after, chosen, direction)[start:stop]
        return values

    first, direction = request([]), _DIRECTIONS[rng.integers(2)]
    return 0.0 if first is None else _at_start(value([first], stages - 1, direction), [first], direction)


def two_continuations(budget: Budget) -> float:
    """Return delta of a server that chooses between continuations that a sum of losses allows: it exceeds the budget.

    Raises:
        ValueError: one of them is not allowed.
    """
    first, continuations = {Event(1.0, 20.0): 60}, [{Event(1.0, 20.0): 40}, {Event(0.002, 0.6): 199}]
    for second in continuations:
        if epsilon(first | {event: count + first.get(event, 0) for event, count in second.items()}, budget.delta) > 2.0:
            raise ValueError(f"{second} does not fit the budget after {first}")
    values = [expected(_excess(budget.epsilon), second, "remove") for second in continuations]
    return _at_start(np.maximum(*values), [first], "remove")


# ---- losses -----------------------------------------------------------------------------------------------


def _excess(epsilon: float) -> FloatArray:
    """Value at each loss when nothing more is requested: the probability of the first world that epsilon leaves."""
    return np.asarray(-np.expm1(np.minimum(epsilon - _LOSSES, 0.0)))


def _at_start(value: FloatArray, history: Sequence[Request], direction: Direction) -> float:
    """Return the value before ``history``, at loss 0."""
    for request in reversed(history):
        value = expected(value, request, direction)
    return float(value[len(_LOSSES) // 2])


def expected(value: FloatArray, request: Request, direction: Direction) -> FloatArray:
    """Return at each loss the expectation of ``value`` after the replies to a request."""
    for event, count in request.items():
        pmf, infinite = _losses(event, count, direction)
        # sum_x pmf(x) value(l + x); beyond the grid, the value is that of its ends, which is an upper bound
        half = len(_LOSSES) // 2
        padded = np.concatenate([np.full(half, value[0]), value, np.full(half, 1.0)])
        size = 1 << (len(padded) + len(pmf)).bit_length()
        product = np.fft.irfft(np.fft.rfft(padded, size) * np.fft.rfft(pmf[::-1], size), size)
        value = np.clip(product[2 * half : 2 * half + len(value)], 0.0, 1.0) + infinite
    return value


@lru_cache(maxsize=512)
def _losses(event: Event, count: int, direction: Direction) -> tuple[FloatArray, float]:
    """Return the pmf of the loss of ``count`` events on the grid, and the probability of larger losses.

    The events are added up on the finest grid that holds their sum, because rounding each of hundreds of events to the
    grid of the strategies would exceed what an exact ledger leaves.
    """
    largest = 2.0
    while True:
        losses = np.linspace(-largest, largest, 2 * _FINE + 1)
        pmf, infinite = _sum(event, count, direction, losses)
        if infinite <= _NEGLIGIBLE or largest == _LARGEST:
            break
        largest *= 2
    cell = np.searchsorted(_LOSSES, losses, "right") - 1
    masses = (pmf, pmf * np.exp(-losses))
    below, above = (np.asarray(np.bincount(cell, mass, len(_LOSSES)), np.float64) for mass in masses)
    rounded = _rounded(below[:-1], above[:-1], _LOSSES)
    rounded[-1] += below[-1]
    return rounded, infinite


def _sum(event: Event, count: int, direction: Direction, losses: FloatArray) -> tuple[FloatArray, float]:
    """Return the pmf of the sum of ``count`` losses on a grid, and the probability of sums outside."""
    # the mass of each cell of a grid with and without the record, and below and above the grid
    q, z = event.sampling_rate, event.noise_multiplier
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.expm1(losses) + q
        edges = np.where(inner > 0, z**2 * np.log(np.maximum(inner, 1e-300) / q) + 0.5, -np.inf)
    edges = np.concatenate([[-np.inf], edges, [np.inf]])
    without = _masses(edges / z)
    below, above = (1 - q) * without + q * _masses((edges - 1) / z), without
    if direction == "add":  # the worlds are exchanged, and the loss changes its sign
        below, above = above[::-1], below[::-1]
    pmf = _rounded(below[1:-1], above[1:-1], losses)
    pmf[0] += below[0]
    if count > 1:
        # Sums of losses beyond the ends of the grid wrap around in a transform of this size, with negligible mass.
        size = 2 * (len(pmf) - 1)
        shift = len(losses) // 2
        rolled = np.roll(np.pad(pmf, (0, size - len(pmf))), -shift)
        several = np.roll(np.fft.irfft(np.fft.rfft(rolled) ** count, size), shift)
        pmf = np.clip(several[: len(pmf)], 0.0, 1.0)
    return pmf, max(0.0, 1.0 - float(pmf.sum()))


def _rounded(below: FloatArray, above: FloatArray, losses: FloatArray) -> FloatArray:
    """Return the mass of each cell of a grid, moved to its two ends.

    It is split such that the probabilities of both worlds stay the same, which can only help the server ("connect the
    dots", Doroshenko et al., arXiv:2207.04380).
    """
    ends = np.exp(-losses)
    upper = np.clip((below * ends[:-1] - above) / (ends[:-1] - ends[1:]), 0.0, below)
    pmf = np.zeros(len(losses))
    pmf[1:] += upper
    pmf[:-1] += below - upper
    return pmf


def _masses(edges: FloatArray) -> FloatArray:
    """Return the mass of a standard normal between the edges, precise in both tails."""
    below, above = np.diff(ndtr(edges)), -np.diff(ndtr(-edges))
    return np.asarray(np.where(edges[:-1] > 0, above, below))
