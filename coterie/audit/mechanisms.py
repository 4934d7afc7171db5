"""Attacks on a single release of a mechanism.

An attack is a pair of neighbouring worlds and the adversary's view. The shipped mechanism
(:meth:`Plan.perturb <coterie.privacy.plan.Plan.perturb>`, clipping and partition included) runs many times in each
world. On one half of the draws the adversary learns a direction (Fisher's discriminant) and thresholds; on the other
half Clopper-Pearson bounds of 99.9 % certify

    mu_lb       = Phi^-1(TPR_lo) - Phi^-1(FPR_hi)      against the claim mu, and
    delta_lb(e) = TPR_lo - exp(e) FPR_hi               against the claimed delta(e), at e = 1/2, 1, 2.

All clients participate (q = 1); amplification is tested separately. ``paper`` and an ``rr-slot`` whose identifiers are
charged at sensitivity 1 are controls: an audit that does not detect them has no power.

Two measurements need no such statistics. The difference of two releases with the *same* noise is the shift itself
(:func:`_measure_shift`), measured for updates of many norms. The noise must have the same variance in both worlds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.audit.findings import Finding, FloatArray, dominance_test, variance_test
from coterie.audit.printed import Paper
from coterie.audit.server_view import audit_server
from coterie.audit.streams import audit_streams
from coterie.privacy import Banded, Event, Joint, Ledger, Plan, RRSlot, Secure, Streams
from coterie.privacy.contributions import Contributions
from coterie.privacy.releases import MechanismOutput
from coterie.privacy.score_histograms import CELLS, ScoreHistogram, number_of_histograms

_CHUNK = 10_000
_DIVISOR_SIZE = 10_000
_DIVISOR_DRAWS = 20
_DIRECTIONS = 8
# Tolerance for the shift between two releases with the same noise.
_ROUNDING = 1e-9

# One client: label and update; None if its slot is empty.
Member = tuple[int, npt.ArrayLike] | None


@dataclass(frozen=True)
class Attack:
    """A pair of neighbouring worlds.

    Attributes:
        name: description of the attack.
        plan: the mechanism under attack, with full participation.
        worlds: for each world, the member of every slot.
        mu: the claimed shift of the dominating Gaussian pair.
        view: returns the adversary's view (draws, features).
        control: whether the claim is known to be wrong, so that the attack must succeed.
    """

    name: str
    plan: Plan
    worlds: tuple[Sequence[Member], Sequence[Member]]
    mu: float
    view: Callable[[MechanismOutput], FloatArray]
    control: bool = False


def audit_mechanisms(mechanisms: Sequence[str], draws: int, streams: Streams) -> list[Finding]:
    """Run every attack on ``mechanisms``."""
    of = mechanisms.__contains__
    return [
        *(_run_attack(a, draws, streams, i) for i, a in enumerate(attacks()) if of(a.plan.mechanism)),
        *(_measure_shift(a, streams) for a in coupled_attacks() if of(a.plan.mechanism)),
        *(
            measure(plan_class(clients=20, num_clusters=1, noise_multiplier=1.0, histograms=1, **_NUMBERS), streams)
            for plan_class in (Joint, Banded, RRSlot)
            if of(plan_class.mechanism)
            for measure in (_measure_evaluation, _measure_histogram, _measure_histograms)
        ),
        *(_compare_variance(a, streams, i) for i, a in enumerate(divisor_attacks()) if of(a.plan.mechanism)),
        *(audit_streams(draws, streams) if of(Banded.mechanism) else ()),
        *(audit_server(draws, streams) if of(Secure.mechanism) else ()),
    ]


# ---- the attacks ------------------------------------------------------------------------------------------


class _Understated(RRSlot):
    """rr-slot with the paper's charge for identifiers: one-hots at sensitivity 1."""

    identifier_sensitivity = 1.0

    def check_noise(self) -> None:
        """Allow it."""


_SIZE = 4
_AXIS = np.eye(_SIZE)[0]
_HUGE = 1e3 * _AXIS  # the mechanism clips it to norm 1
_NUMBERS: dict[str, Any] = {"sampling_rate": 1.0, "rounds": 1, "clip_norm": 1.0, "epsilon": math.inf, "delta": 1e-5}


def attacks() -> list[Attack]:
    """Return the attacks on releases."""
    # sigma_theta = 1, sigma_h = 5.
    noise: dict[str, Any] = {"noise_multiplier": 1 / math.sqrt(1.04), "identifier_share": 0.04 / 1.04}
    joint = Joint(clients=3, num_clusters=2, **noise, **_NUMBERS)
    late = replace(joint, rounds=2, sizes_until=1).of_round(2)
    divided = Joint(clients=9, num_clusters=2, divisor="released", **noise, **_NUMBERS)
    adaptive = Joint(clients=3, num_clusters=2, noise_multiplier=0.8, clip_share=0.3, clip_factor=0.5, **_NUMBERS)
    others: list[Member] = [(0, _AXIS), (1, -_AXIS)]
    more = ([None, *others], [(0, _HUGE), *others])
    many = ([None, *others * 4], [(0, _HUGE), *others * 4])
    cases = [
        Attack("additional client with an oversized update", joint, more, _mu(joint), _all),
        Attack("additional client, after the last round with sizes", late, more, _mu(late), _all),
        Attack("additional client, seen in the models only", divided, many, _mu(divided), _models),
        Attack("additional client, with the share of short updates", adaptive, more, _mu(adaptive), _all),
    ]
    # sigma_theta = 1; sigma_s = 2 where identifiers are Gaussian: mu^2 = 2 / 4 + 1.
    slot = {"clients": 8, "num_clusters": 4, "rebalance_min": 2, **_NUMBERS}
    rest: list[Member] = [(j % 4, 0 * _AXIS) for j in range(7)]
    swap = ([(0, _HUGE), *rest], [(1, -_HUGE), *rest])
    gone = ([(0, _HUGE), *rest], [None, *rest])
    strength = math.sqrt(1.5)
    for identifiers in ("gaussian", "exponential"):
        plan = RRSlot(noise_multiplier=1 / strength, identifier_share=1 / 3, identifiers=identifiers, **slot)
        cases.append(Attack(f"replaced client ({identifiers} identifiers)", plan, swap, _mu(plan), _slot))
        cases.append(Attack(f"removed client ({identifiers} identifiers)", plan, gone, _mu(plan), _slot))
    understated = _Understated(noise_multiplier=1 / math.sqrt(1.25), identifier_share=0.2, **slot)
    cases.append(Attack("identifiers charged at sensitivity 1", understated, swap, _mu(understated), _slot, True))
    # Labels without noise (Algorithm 1): the claim is 1 / sigma_theta.
    pair = Paper(clients=12, num_clusters=2, rebalance_min=4, noise_multiplier=1.0, **_NUMBERS)
    small, donor = [(0, 0 * _AXIS)] * 3, [(1, _AXIS)] * 8
    cases.append(
        Attack("shift of sqrt(5) C", pair, ([None, *small, *donor], [(0, -_HUGE), *small, *donor]), 1.0, _sums, True)
    )
    flip = Paper(clients=100, num_clusters=4, rebalance_min=12, noise_multiplier=1.0, **_NUMBERS)
    eleven, crowd = [(0, _AXIS)] * 11, [(2, -_AXIS)] * 88
    cases.append(Attack("donor flip", flip, ([None, *eleven, *crowd], [(0, _AXIS), *eleven, *crowd]), 1.0, _sums, True))
    return cases


def divisor_attacks() -> list[Attack]:
    """Return the attacks on divisors: updates are zero, and the noise variance of one model is compared."""
    zero = np.zeros(1)
    twelve: list[Member] = [(0, zero)] * 11
    worlds = ([None, *twelve], [(0, zero), *twelve])
    numbers = {"clients": 12, "num_clusters": 1, "noise_multiplier": 1.0, **_NUMBERS}
    return [
        Attack("noise variance (fixed divisors)", Joint(**numbers), worlds, 1.0, _models),
        Attack("noise variance", RRSlot(**numbers), worlds, 1.0, _models),
        Attack("noise variance (true counts)", Paper(**numbers), worlds, 1.0, _models, True),
    ]


@dataclass(frozen=True)
class CoupledAttack:
    """Neighbouring worlds with the same noise, so that their releases differ only by the shift.

    Attributes:
        name: description of the attack.
        plan: the mechanism under attack; with slots, one cluster has all members.
        shared: number of leading coordinates shared by all clusters.
        replaced: whether the other world has the opposite update in the slot instead of none.
        others: number of other, identical clients.
        number: of the round.
    """

    name: str
    plan: Plan
    shared: int = 0
    replaced: bool = False
    others: int = 1
    number: int = 1


def coupled_attacks() -> list[CoupledAttack]:
    """Return the attacks with common noise."""
    noise: dict[str, Any] = {"noise_multiplier": 1 / math.sqrt(1.04), "identifier_share": 0.04 / 1.04}
    joint = Joint(clients=3, num_clusters=2, **noise, **{**_NUMBERS, "clip_norm": 0.3})
    early = replace(joint, rounds=2, sizes_until=1)
    slot = RRSlot(clients=3, num_clusters=1, noise_multiplier=1.0, **{**_NUMBERS, "clip_norm": 0.3})
    return [
        CoupledAttack("update of any norm, common noise", joint),
        CoupledAttack("update of any norm, shared block", joint, shared=_SIZE // 2),
        CoupledAttack("update of any norm among 4,000 other clients", joint, others=4000),
        *(CoupledAttack(f"update of any norm, sizes up to round 1: round {n}", early, number=n) for n in (1, 2)),
        CoupledAttack("replaced update of any norm, common noise", slot, replaced=True),
    ]


def _mu(plan: Plan) -> float:
    return 1 / plan.noise_multiplier


def _sums(drawn: MechanismOutput) -> FloatArray:
    return drawn.sums.reshape(len(drawn.sums), -1)


def _all(drawn: MechanismOutput) -> FloatArray:
    counts = [drawn.histogram, None if drawn.below is None else drawn.below[:, None]]
    return np.concatenate([_sums(drawn), *(count for count in counts if count is not None)], axis=1)


def _models(drawn: MechanismOutput) -> FloatArray:
    return (drawn.sums / drawn.divisors[..., None]).reshape(len(drawn.sums), -1)


def _slot(drawn: MechanismOutput) -> FloatArray:
    assert drawn.scores is not None
    assert drawn.assigned is not None
    block = drawn.sums[np.arange(len(drawn.sums)), drawn.assigned[:, 0]]
    return np.concatenate([drawn.scores[:, 0], block], axis=1)


# ---- the measurements -------------------------------------------------------------------------------------


def _draw(plan: Plan, members: Sequence[Member], size: int, draws: int, streams: Streams, *key: int) -> MechanismOutput:
    contributions = plan.contributions(size, draws)
    for slot, member in enumerate(members):
        if member is not None:
            contributions.add(slot, member[0], member[0], member[1])
    noise, coins = streams.stream("noise", *key), streams.stream("rebalancing", *key)
    return plan.perturb(contributions, noise, coins, np.eye(plan.num_clusters))


def _run_attack(attack: Attack, draws: int, streams: Streams, number: int) -> Finding:
    worlds = []
    for world, members in enumerate(attack.worlds):
        parts = [
            attack.view(_draw(attack.plan, members, _SIZE, min(_CHUNK, draws - done), streams, number, world, done))
            for done in range(0, draws, _CHUNK)
        ]
        worlds.append(np.concatenate(parts))
    claim = {Event(1.0, 1 / attack.mu): 1}
    return dominance_test(attack.plan.mechanism, attack.name, claim, (worlds[0], worlds[1]), attack.control)


def _measure_shift(attack: CoupledAttack, streams: Streams) -> Finding:
    """Measure the maximum shift over updates of many norms; it may exceed the claim only by rounding."""
    mu = _mu(attack.plan)
    with np.errstate(all="ignore"):  # for mechanisms without clipping or noise
        updates = list(_updates(attack.plan.clip_norm))
        if attack.others > 1:  # rounding depends on the direction, not on the norm
            updates = updates[:_DIRECTIONS]
        others = attack.plan.contributions(_SIZE, shared=attack.shared)  # of all but the client that is different
        for slot in range(1, 1 + attack.others):
            others.add(slot, 0, 0, np.ones(_SIZE))
        shift = float(np.max([_shift(attack, others, update, streams) for update in updates]))
    violated = not shift <= mu * (1 + _ROUNDING)
    return Finding(attack.plan.mechanism, attack.name, "mu", mu, shift, (), violated)


def _updates(clip_norm: float) -> Iterator[FloatArray]:
    """Yield updates in several directions, just below, just above and far above the clipping norm; some non-finite."""
    for row in np.random.default_rng(0).standard_normal((_DIRECTIONS, _SIZE)):
        yield 2 * clip_norm * row / np.linalg.norm(row)
    direction = np.array([0.5, -0.5, 0.5, 0.5])
    for length in (*np.linspace(0.9, 1.3, 81), 2.0, 1e3, 1e30, 1e300):
        yield clip_norm * length * direction
    yield np.full(_SIZE, np.nan)
    yield np.array([np.inf, 0.0, -np.inf, 0.0])


def _shift(attack: CoupledAttack, others: Contributions, update: FloatArray, streams: Streams) -> float:
    """Return the distance of two releases, charged and drawn as in a run, in standard deviations of the noise."""
    plan, first, second = attack.plan, -update if attack.replaced else None, update
    released = []
    for update_of_slot in (first, second):
        contributions = copy.deepcopy(others, {id(plan): plan})
        if update_of_slot is not None:
            contributions.add(0, 0, 0, update_of_slot)
        permit = Ledger(plan.delta).charge_round(attack.number, plan.event())
        released.append(plan.release(permit, contributions, streams, 1))
    one, other = released
    apart = (other.sums - one.sums) / plan.scale
    apart[1:, : attack.shared] = 0.0  # every row repeats the shared block
    stated = plan.of_round(attack.number)
    deviation = stated.noise_multiplier_updates * (2 if attack.replaced else 1)
    shifts = [np.linalg.norm(apart) / deviation]
    if one.histogram is not None and other.histogram is not None and (one.histogram != other.histogram).any():
        shifts.append(np.linalg.norm(other.histogram - one.histogram) / (stated.noise_multiplier_counts or 0.0))
    return float(np.linalg.norm(shifts))


def _measure_evaluation(plan: Plan, streams: Streams) -> Finding:
    """Measure how far one reported accuracy can move a private evaluation; all evaluations use the same noise."""
    others, event = [0.5] * (plan.clients - 1), plan.evaluation_event()
    absent = [0.0] if plan.sampler == "fixed" else []  # another client may replace it
    least = _evaluation(plan, others + absent, streams)
    moved = max(
        abs(_evaluation(plan, [*others, accuracy], streams) - least) for accuracy in (0.0, 1.0, 1e9, -1e9, math.nan)
    )
    mu, shift = 1 / event.noise_multiplier, moved / plan.evaluation_noise
    return Finding(
        plan.mechanism, "private evaluation with any accuracy", "mu", mu, shift, (), not shift <= mu * (1 + _ROUNDING)
    )


def _evaluation(plan: Plan, accuracies: Sequence[float], streams: Streams) -> float:
    permit = Ledger(plan.delta).charge_round(1, plan.evaluation_event())
    return plan.release_evaluation(permit, accuracies, streams, 1)


def _measure_histogram(plan: Plan, streams: Streams) -> Finding:
    """Measure how far the counts of one client can move a histogram of scores; all histograms use the same noise."""
    total = CELLS * number_of_histograms(plan.histogram_classes)
    event, others = plan.histogram_event(), [np.ones(total)] * (plan.clients - 1)
    cells = np.eye(total)
    first = [cells[0] * 1e6] if plan.sampler == "fixed" else []  # another client may replace it
    base = _histogram(plan, others + first, streams)
    counts = [*(10.0**power * cells[j] for power in (0, 2, 300) for j in (1, -1)), np.full(total, 1e300)]
    counts += [np.full(total, math.nan), -1e9 * cells[1], *(2.0**power * np.arange(total) for power in range(8))]
    scale = np.tile(np.repeat(base.deviations, CELLS // 2), total // CELLS)
    moved = [
        float(np.linalg.norm((_histogram(plan, [*others, sent], streams).counts - base.counts).ravel() / scale))
        for sent in counts
    ]
    mu, shift = 1 / event.noise_multiplier, max(moved)
    violated = not shift <= mu * (1 + _ROUNDING)
    of_classes = "" if plan.histogram_classes == 2 else f" of {plan.histogram_classes} classes"
    return Finding(plan.mechanism, f"histogram of scores{of_classes} with any counts", "mu", mu, shift, (), violated)


def _measure_histograms(plan: Plan, streams: Streams) -> Finding:
    """Measure the same of one histogram for each of three classes, which one client moves together."""
    return _measure_histogram(replace(plan, histogram_classes=3), streams)


def _histogram(plan: Plan, counts: Sequence[FloatArray], streams: Streams) -> ScoreHistogram:
    permit = plan.charge_histogram(Ledger(plan.delta), 1)
    return plan.release_histogram(permit, dict(enumerate(counts)), streams, 1)


def _compare_variance(attack: Attack, streams: Streams, number: int) -> Finding:
    """F-test on the noise of a large model: it detects a divisor that depends on a true count."""
    noises = [
        attack.view(_draw(attack.plan, members, _DIVISOR_SIZE, _DIVISOR_DRAWS, streams, number, 2 + world)).ravel()
        for world, members in enumerate(attack.worlds)
    ]
    return variance_test(attack.plan.mechanism, attack.name, (noises[0], noises[1]), attack.control)
