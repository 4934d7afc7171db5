"""Attacks on the mechanisms as they are shipped, and what they prove.

An attack is a pair of neighbouring worlds and what the adversary looks at. The mechanism's own code
(:meth:`Plan.perturb <coterie.privacy.plan.Plan.perturb>`, clipping and partition included) runs many times in each
world. On one half of the draws the adversary learns a direction (Fisher's discriminant) and thresholds; on the other
half Clopper-Pearson bounds of 99.9 % certify

    mu_lb       = Phi^-1(TPR_lo) - Phi^-1(FPR_hi)      against the claim mu, and
    delta_lb(e) = TPR_lo - exp(e) FPR_hi               against the claimed delta(e), at e = 1/2, 1, 2.

All clients take part (q = 1): amplification is arithmetic, and tested as such. ``paper`` and an ``rr-slot`` whose
identifiers are charged at sensitivity 1 are controls: an audit that does not break them has no power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri
from scipy.stats import beta
from scipy.stats import f as f_distribution

from coterie.privacy.accountants import gaussian_delta
from coterie.privacy.mechanisms import Joint, Paper, RRSlot
from coterie.privacy.plan import Drawn, Plan
from coterie.privacy.randomness import Streams

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Draws of each world.
DRAWS = 100_000
LOSSES = (0.5, 1.0, 2.0)

_CHUNK = 10_000
_CONFIDENCE = 0.999
_THRESHOLDS = 100
# A variance that differs by chance alone has a smaller p-value than this once in a million audits.
_LEAK = 1e-6
_DIVISOR_SIZE = 10_000
_DIVISOR_DRAWS = 20

# One client: label and update; None where its slot is empty.
Member = tuple[int, npt.ArrayLike] | None


@dataclass(frozen=True)
class Attack:
    """A pair of neighbouring worlds.

    Attributes:
        name: what the adversary does.
        plan: the mechanism under attack, all clients taking part.
        worlds: for each world, the member of every slot.
        mu: the claimed shift of the dominating Gaussian pair.
        look: (draws, features) what the adversary looks at.
        control: whether the claim is known to be wrong, so that the attack must succeed.
    """

    name: str
    plan: Plan
    worlds: tuple[Sequence[Member], Sequence[Member]]
    mu: float
    look: Callable[[Drawn], FloatArray]
    control: bool = False


@dataclass(frozen=True)
class Finding:
    """What one attack proved.

    Attributes:
        mechanism: attacked.
        attack: by what.
        claim: mu claimed, or 1 for a ratio of variances.
        bound: mu certified by the attack, or the ratio of variances.
        deltas: for each of :data:`LOSSES`, certified and claimed delta; empty for a ratio.
        violated: the bound contradicts the claim.
        control: it should.
    """

    mechanism: str
    attack: str
    claim: float
    bound: float
    deltas: tuple[tuple[float, float], ...]
    violated: bool
    control: bool

    @property
    def wrong(self) -> bool:
        """A guarantee broken, or an audit without power."""
        return self.violated != self.control

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        deltas = [
            {"epsilon": loss, "delta_lower_bound": low, "delta_claimed": claimed}
            for loss, (low, claimed) in zip(LOSSES, self.deltas, strict=False)
        ]
        return {
            "mechanism": self.mechanism,
            "attack": self.attack,
            "claim": self.claim,
            "lower_bound": self.bound,
            "deltas": deltas,
            "violated": self.violated,
            "certifying": not self.control,
        }


def audit(
    mechanisms: Sequence[str] = ("joint", "rr-slot", "paper"), draws: int = DRAWS, seed: int = 0
) -> list[Finding]:
    """Run every attack on ``mechanisms``; about half a minute on two cores at the default number of draws."""
    streams = Streams(seed)
    findings = [_run(attack, draws, streams, i) for i, attack in enumerate(attacks()) if _of(attack, mechanisms)]
    return findings + [_leak(attack, streams, i) for i, attack in enumerate(leaks()) if _of(attack, mechanisms)]


def _of(attack: Attack, mechanisms: Sequence[str]) -> bool:
    return attack.plan.mechanism in mechanisms


# ---- the attacks ------------------------------------------------------------------------------------------


class _Understated(RRSlot):
    """rr-slot with the paper's charge for identifiers: one-hots at sensitivity 1."""

    identifier_sensitivity = 1.0


_SIZE = 4
_AXIS = np.eye(_SIZE)[0]
_HUGE = 1e3 * _AXIS  # the mechanism clips it to norm 1
_NUMBERS: dict[str, Any] = {"sampling_rate": 1.0, "rounds": 1, "clip_norm": 1.0, "epsilon": math.inf, "delta": 1e-5}


def attacks() -> list[Attack]:
    """Every attack on what is released."""
    # sigma_theta = 1, sigma_h = 5.
    noise: dict[str, Any] = {"noise_multiplier": 1 / math.sqrt(1.04), "identifier_share": 0.04 / 1.04}
    joint = Joint(clients=3, num_clusters=2, **noise, **_NUMBERS)
    divided = Joint(clients=9, num_clusters=2, divisor="released", **noise, **_NUMBERS)
    others: list[Member] = [(0, _AXIS), (1, -_AXIS)]
    more = ([None, *others], [(0, _HUGE), *others])
    many = ([None, *others * 4], [(0, _HUGE), *others * 4])
    found = [
        Attack("one client more, its update oversized", joint, more, _mu(joint), _all),
        Attack("one client more, seen in the models", divided, many, _mu(divided), _models),
    ]
    # sigma_theta = 1; sigma_s = 2 where identifiers are Gaussian: mu^2 = 2 / 4 + 1.
    slot = {"clients": 8, "num_clusters": 4, "rebalance_min": 2, **_NUMBERS}
    rest: list[Member] = [(j % 4, 0 * _AXIS) for j in range(7)]
    swap = ([(0, _HUGE), *rest], [(1, -_HUGE), *rest])
    gone = ([(0, _HUGE), *rest], [None, *rest])
    strength = math.sqrt(1.5)
    for kind in ("gaussian", "exponential"):
        plan = RRSlot(noise_multiplier=1 / strength, identifier_share=1 / 3, identifiers=kind, **slot)
        found.append(Attack(f"another client in the slot ({kind} identifiers)", plan, swap, _mu(plan), _slot))
        found.append(Attack(f"nobody in the slot ({kind} identifiers)", plan, gone, _mu(plan), _slot))
    understated = _Understated(noise_multiplier=1 / math.sqrt(1.25), identifier_share=0.2, **slot)
    found.append(Attack("identifiers charged at sensitivity 1", understated, swap, _mu(understated), _slot, True))
    # Labels that need no noise (Algorithm 1): the claim is 1 / sigma_theta.
    pair = Paper(clients=12, num_clusters=2, rebalance_min=4, noise_multiplier=1.0, **_NUMBERS)
    small, donor = [(0, 0 * _AXIS)] * 3, [(1, _AXIS)] * 8
    found.append(
        Attack("the sqrt(5) pair", pair, ([None, *small, *donor], [(0, -_HUGE), *small, *donor]), 1.0, _sums, True)
    )
    flip = Paper(clients=100, num_clusters=4, rebalance_min=12, noise_multiplier=1.0, **_NUMBERS)
    eleven, crowd = [(0, _AXIS)] * 11, [(2, -_AXIS)] * 88
    found.append(
        Attack("the donor flip", flip, ([None, *eleven, *crowd], [(0, _AXIS), *eleven, *crowd]), 1.0, _sums, True)
    )
    return found


def leaks() -> list[Attack]:
    """Every attack on divisors: updates are zero, and the noise's variance in one model is compared."""
    zero = np.zeros(1)
    twelve: list[Member] = [(0, zero)] * 11
    worlds = ([None, *twelve], [(0, zero), *twelve])
    numbers = {"clients": 12, "num_clusters": 1, "noise_multiplier": 1.0, **_NUMBERS}
    return [
        Attack("variance of the noise (fixed divisors)", Joint(**numbers), worlds, 1.0, _models),
        Attack("variance of the noise", RRSlot(**numbers), worlds, 1.0, _models),
        Attack("variance of the noise (true counts)", Paper(**numbers), worlds, 1.0, _models, True),
    ]


def _mu(plan: Plan) -> float:
    return 1 / plan.noise_multiplier


def _sums(drawn: Drawn) -> FloatArray:
    return drawn.sums.reshape(len(drawn.sums), -1)


def _all(drawn: Drawn) -> FloatArray:
    assert drawn.histogram is not None
    return np.concatenate([_sums(drawn), drawn.histogram], axis=1)


def _models(drawn: Drawn) -> FloatArray:
    return (drawn.sums / drawn.divisors[..., None]).reshape(len(drawn.sums), -1)


def _slot(drawn: Drawn) -> FloatArray:
    """The noisy identifier of slot 0 and the sum of the cluster that it went to: all that the theorem releases."""
    assert drawn.scores is not None
    assert drawn.assigned is not None
    block = drawn.sums[np.arange(len(drawn.sums)), drawn.assigned[:, 0]]
    return np.concatenate([drawn.scores[:, 0], block], axis=1)


# ---- the measurements -------------------------------------------------------------------------------------


def _draw(plan: Plan, members: Sequence[Member], size: int, draws: int, streams: Streams, *key: int) -> Drawn:
    contributions = plan.contributions(size, draws)
    for slot, member in enumerate(members):
        if member is not None:
            contributions.add(slot, member[0], member[0], member[1])
    noise, coins = streams.stream("noise", *key), streams.stream("rebalancing", *key)
    return plan.perturb(contributions, noise, coins, np.eye(plan.num_clusters))


def _run(attack: Attack, draws: int, streams: Streams, number: int) -> Finding:
    seen = []
    for world, members in enumerate(attack.worlds):
        parts = [
            attack.look(_draw(attack.plan, members, _SIZE, min(_CHUNK, draws - done), streams, number, world, done))
            for done in range(0, draws, _CHUNK)
        ]
        seen.append(np.concatenate(parts))
    half = draws // 2
    direction = _discriminant(seen[0][:half], seen[1][:half])
    learn = (seen[0][:half] @ direction, seen[1][:half] @ direction)
    check = (seen[0][half:] @ direction, seen[1][half:] @ direction)
    candidates = np.quantile(np.concatenate(learn), np.linspace(0.02, 0.98, _THRESHOLDS))
    # A shift is measured best near the middle; the tails' scores are the noisiest, and win by luck.
    middle = candidates[_THRESHOLDS // 4 : -_THRESHOLDS // 4]
    bound, deltas = _certified(learn, check, middle, _shift), []
    for loss in LOSSES:
        score = partial(_hockey_stick, loss=loss)
        forth = _certified(learn, check, candidates, score)
        back = _certified(_flip(learn), _flip(check), -candidates, score)  # betting on the other world
        deltas.append((max(0.0, forth, back), float(gaussian_delta(attack.mu, loss))))
    violated = bound > attack.mu or any(low > claimed for low, claimed in deltas)
    return Finding(attack.plan.mechanism, attack.name, attack.mu, bound, tuple(deltas), violated, attack.control)


def _discriminant(first: FloatArray, second: FloatArray) -> FloatArray:
    """Fisher's direction from the first world to the second."""
    within = np.cov(first.T) + np.cov(second.T)
    return np.asarray(np.linalg.pinv(np.atleast_2d(within)) @ (second.mean(axis=0) - first.mean(axis=0)))


def _flip(worlds: tuple[FloatArray, FloatArray]) -> tuple[FloatArray, FloatArray]:
    return -worlds[1], -worlds[0]


def _certified(
    learn: tuple[FloatArray, FloatArray],
    check: tuple[FloatArray, FloatArray],
    candidates: FloatArray,
    score: Callable[[FloatArray, FloatArray], FloatArray],
) -> float:
    """The score at the threshold that was best on the learning half, from bounds on the other."""
    threshold = candidates[[int(np.argmax(score(*_bounds(learn, candidates))))]]
    return float(score(*_bounds(check, threshold))[0])


def _bounds(worlds: tuple[FloatArray, FloatArray], thresholds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Lower bounds of the true positive and upper bounds of the false positive rate at each threshold."""
    miss, alarm = 1 - _CONFIDENCE, _CONFIDENCE
    n0, n1 = len(worlds[0]), len(worlds[1])
    false = n0 - np.searchsorted(np.sort(worlds[0]), thresholds, side="right")
    true = n1 - np.searchsorted(np.sort(worlds[1]), thresholds, side="right")
    low = np.where(true > 0, beta.ppf(miss, np.maximum(true, 1), n1 - true + 1), 0.0)
    high = np.where(false < n0, beta.ppf(alarm, false + 1, np.maximum(n0 - false, 1)), 1.0)
    return low, high


def _shift(tpr: FloatArray, fpr: FloatArray) -> FloatArray:
    return np.asarray(ndtri(tpr) - ndtri(fpr))


def _hockey_stick(tpr: FloatArray, fpr: FloatArray, loss: float) -> FloatArray:
    return np.asarray(tpr - math.exp(loss) * fpr)


def _leak(attack: Attack, streams: Streams, number: int) -> Finding:
    """F-test on the noise of a large model: a divisor that follows a true count gives itself away."""
    noises = [
        attack.look(_draw(attack.plan, members, _DIVISOR_SIZE, _DIVISOR_DRAWS, streams, number, 2 + world)).ravel()
        for world, members in enumerate(attack.worlds)
    ]
    ratio = float(np.var(noises[0]) / np.var(noises[1]))
    degrees = noises[0].size - 1
    p_value = 2 * min(f_distribution.sf(ratio, degrees, degrees), f_distribution.cdf(ratio, degrees, degrees))
    violated = bool(p_value < _LEAK)
    return Finding(attack.plan.mechanism, attack.name, 1.0, ratio, (), violated, attack.control)
