"""Findings of attacks: certified lower bounds, and p-values of exact tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import beta, binomtest
from scipy.stats import f as f_distribution

from coterie.privacy import Event, composed
from coterie.privacy.discrete_gaussians import gaussian_delta

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
# Values in both worlds.
Pair = tuple[FloatArray, FloatArray]

#: Privacy losses e at which delta(e) is certified.
LOSSES = (0.5, 1.0, 2.0)
#: An exact test contradicts a claim when its p-value is below this.
SIGNIFICANCE = 1e-7
#: Each Clopper-Pearson bound holds with this probability.
CONFIDENCE = 0.999
_THRESHOLDS = 100


@dataclass(frozen=True)
class Finding:
    """The result of one attack.

    Attributes:
        mechanism: the mechanism under attack.
        attack: description of the attack.
        quantity: the quantity of ``claim`` and ``bound``; "mu" is the shift of a Gaussian pair.
        claim: claimed value.
        bound: certified lower bound, or the measured value in an exact test.
        deltas: certified and claimed δ for each of :data:`LOSSES`; empty for an exact test.
        violated: whether the bound contradicts the claim.
        control: whether the claim is known to be wrong, so that the attack must succeed.
    """

    mechanism: str
    attack: str
    quantity: str
    claim: float
    bound: float
    deltas: tuple[tuple[float, float], ...]
    violated: bool
    control: bool = False

    @property
    def failed(self) -> bool:
        """Whether a guarantee is broken, or a control was not detected."""
        return self.violated != self.control

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        deltas = [
            {"epsilon": loss, "delta_lower_bound": low, "delta_claimed": claimed}
            for loss, (low, claimed) in zip(LOSSES, self.deltas, strict=False)
        ]
        return {
            "mechanism": self.mechanism,
            "attack": self.attack,
            "quantity": self.quantity,
            "claim": self.claim,
            "lower_bound": self.bound,
            "deltas": deltas,
            "violated": self.violated,
            "certifying": not self.control,
        }


def binomial_test(
    mechanism: str, attack: str, claim: float, hits: int, trials: int, tail: str = "two-sided"
) -> Finding:
    """Exact binomial test: ``hits`` of ``trials`` independent events occurred, which have probability ``claim``."""
    p_value = binomtest(hits, trials, claim, tail).pvalue
    return Finding(mechanism, attack, "rate", claim, hits / trials, (), bool(p_value < SIGNIFICANCE))


def zero_count_test(mechanism: str, attack: str, occurrences: int, control: bool = False) -> Finding:
    """Test that an event never occurs."""
    return Finding(mechanism, attack, "count", 0.0, float(occurrences), (), occurrences > 0, control)


def variance_test(mechanism: str, attack: str, noises: Pair, control: bool = False) -> Finding:
    """F-test of equal noise variance in both worlds."""
    ratio = float(np.var(noises[0]) / np.var(noises[1]))
    degrees = noises[0].size - 1
    p_value = 2 * min(f_distribution.sf(ratio, degrees, degrees), f_distribution.cdf(ratio, degrees, degrees))
    return Finding(mechanism, attack, "ratio", 1.0, ratio, (), bool(p_value < SIGNIFICANCE), control)


def dominance_test(
    mechanism: str,
    attack: str,
    events: Mapping[Event, int],
    worlds: Pair,
    control: bool = False,
    confidence: float = CONFIDENCE,
) -> Finding:
    """Test whether the composition of ``events`` dominates the observations.

    Args:
        mechanism, attack, control: see :class:`Finding`.
        events: the claim. Without sampling it is a Gaussian pair, and its shift is compared too.
        worlds: (draws, features) observations of the adversary in each world.
        confidence: confidence of each Clopper-Pearson bound.
    """
    learn, check = _scores(worlds)
    claimed = claimed_deltas(events)
    deltas = tuple(zip(_certified_deltas(learn, check, confidence), claimed, strict=True))
    violated = any(low > high for low, high in deltas)
    if any(event.sampling_rate < 1 for event in events):
        low, high = deltas[LOSSES.index(1.0)]
        return Finding(mechanism, attack, "delta(1)", high, low, deltas, violated, control)
    mu = _shift_of(events)
    # Estimates of a shift are most precise near the middle; scores in the tails are noisy and may win by chance.
    middle = _thresholds(learn)[_THRESHOLDS // 4 : -_THRESHOLDS // 4]
    bound = _certified(learn, check, middle, _shift, confidence)
    return Finding(mechanism, attack, "mu", mu, bound, deltas, violated or bound > mu, control)


def pure_test(mechanism: str, attack: str, epsilon: float, worlds: Pair, confidence: float = CONFIDENCE) -> Finding:
    """Test whether a release is epsilon-private at delta 0.

    Args:
        mechanism, attack: see :class:`Finding`.
        epsilon: the claim.
        worlds: (draws, features) observations of the adversary in each world.
        confidence: confidence of each Clopper-Pearson bound.
    """
    learn, check = _scores(worlds)
    claimed = [max(0.0, (math.exp(epsilon) - math.exp(loss)) / (1 + math.exp(epsilon))) for loss in LOSSES]
    deltas = tuple(zip(_certified_deltas(learn, check, confidence), claimed, strict=True))
    bound = max(
        _certified(learn, check, _thresholds(learn), _log_ratio, confidence),
        _certified(_flip(learn), _flip(check), -_thresholds(learn), _log_ratio, confidence),
    )
    violated = any(low > high for low, high in deltas) or bound > epsilon
    return Finding(mechanism, attack, "epsilon", epsilon, bound, deltas, violated)


def _log_ratio(tpr: FloatArray, fpr: FloatArray) -> FloatArray:
    return np.asarray(np.log(np.maximum(tpr, 1e-300) / fpr))


def _shift_of(events: Mapping[Event, int]) -> float:
    return math.sqrt(sum(count / event.noise_multiplier**2 for event, count in events.items()))


def claimed_deltas(events: Mapping[Event, int]) -> list[float]:
    """Return δ at each of :data:`LOSSES`: in closed form without sampling, else from the PLD accountant, rounded up."""
    if all(event.sampling_rate == 1 for event in events):
        return [float(gaussian_delta(_shift_of(events), loss)) for loss in LOSSES]
    total = composed(events, "pld")

    def delta(loss: float) -> float:
        least = -12 * math.log(10)
        if total.epsilon(math.exp(least)) <= loss:
            return math.exp(least)
        # epsilon(delta) falls; where it reaches 0 above the root, it stays there.
        root = brentq(lambda log: total.epsilon(math.exp(log)) - loss, least, -1e-9, xtol=1e-6)
        return min(1.0, math.exp(root + 1e-6))

    return [delta(loss) for loss in LOSSES]


def _scores(worlds: Pair) -> tuple[Pair, Pair]:
    """Project both halves of the draws to one score per draw, by Fisher's discriminant of the first half."""
    half = len(worlds[0]) // 2
    first, second = (world[:half] for world in worlds)
    within = np.atleast_2d(np.cov(first.T) + np.cov(second.T))
    # A noiseless feature must have a large weight; a pseudo-inverse would give it zero weight.
    ridge = (1e-9 * np.trace(within) + 1e-300) * np.eye(len(within))
    direction = np.asarray(np.linalg.solve(within + ridge, second.mean(axis=0) - first.mean(axis=0)))
    return (first @ direction, second @ direction), (worlds[0][half:] @ direction, worlds[1][half:] @ direction)


def _thresholds(learn: Pair) -> FloatArray:
    """Return quantiles of the scores of both worlds; the median separates two worlds that do not overlap."""
    ranks = np.sort(np.append(np.linspace(0.02, 0.98, _THRESHOLDS), 0.5))
    return np.asarray(np.quantile(np.concatenate(learn), ranks))


def _certified_deltas(learn: Pair, check: Pair, confidence: float) -> list[float]:
    """Return lower bounds of δ at :data:`LOSSES`, the larger of both directions."""
    candidates, deltas = _thresholds(learn), []
    for loss in LOSSES:
        score = partial(_hockey_stick, loss=loss)
        forth = _certified(learn, check, candidates, score, confidence)
        back = _certified(_flip(learn), _flip(check), -candidates, score, confidence)  # betting on the other world
        deltas.append(max(0.0, forth, back))
    return deltas


def _flip(worlds: Pair) -> Pair:
    return -worlds[1], -worlds[0]


def _certified(
    learn: Pair,
    check: Pair,
    candidates: FloatArray,
    score: Callable[[FloatArray, FloatArray], FloatArray],
    confidence: float,
) -> float:
    """Return the score on the check half at the threshold that is best on the learning half."""
    threshold = candidates[[int(np.argmax(score(*_bounds(learn, candidates, confidence))))]]
    return float(score(*_bounds(check, threshold, confidence))[0])


def _bounds(worlds: Pair, thresholds: FloatArray, confidence: float) -> Pair:
    """Return lower bounds of the true positive rate and upper bounds of the false positive rate per threshold."""
    n0, n1 = len(worlds[0]), len(worlds[1])
    false = n0 - np.searchsorted(np.sort(worlds[0]), thresholds, side="right")
    true = n1 - np.searchsorted(np.sort(worlds[1]), thresholds, side="right")
    low = np.where(true > 0, beta.ppf(1 - confidence, np.maximum(true, 1), n1 - true + 1), 0.0)
    high = np.where(false < n0, beta.ppf(confidence, false + 1, np.maximum(n0 - false, 1)), 1.0)
    return low, high


def _shift(tpr: FloatArray, fpr: FloatArray) -> FloatArray:
    return np.asarray(ndtri(tpr) - ndtri(fpr))


def _hockey_stick(tpr: FloatArray, fpr: FloatArray, loss: float) -> FloatArray:
    return np.asarray(tpr - math.exp(loss) * fpr)
