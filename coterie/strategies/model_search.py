"""Search for the number of clusters: post-processing of released histograms.

A run with ``clusters = 0`` starts with ``max_clusters`` models, more than there are groups, and removes those that no
group needs. Every decision is a function of released values and public constants (docs/privacy.md).

     1  input: models theta_j, j in [k]; h_t, the released histogram of round t; w = T / 20
     2  every w rounds, after round t = c w:
     3      n_j <- mean of h_t[j] over the last w rounds
     4      idle models: n_j below a share of the expected cohort qM
     5      c in 1, ..., 3 and 7, ..., 10 (re-seed): for every idle model i
     6          s <- argmax of n_j / (1 + r_j) over the other models;  r_j: number of splits of model j
     7          theta_i, theta_s <- theta_s - p, theta_s + p,  p: random direction;  r_i, r_s <- r_s + 1
     8      c = 4, 5 and 11, ..., 13 (prune): remove idle models, shrink the others, the largest by nothing:
     9          theta_j <- (1 - g rank_j / (k - 1)) theta_j,  rank by decreasing n_j
    10      c = 6 (split): remove idle models, add copies of the largest as in line 7: 2k models, at most max_clusters
    11      c = 14: remove idle models

Lines 5 to 7 are re-seeding (strategies/reseeding.py), except that models that were split before wait: the largest model
may serve one large group, and a smaller one two small groups. If a model serves two groups, its copies separate. If it
serves one, the copies share the group or one becomes idle. Line 9 distinguishes the copies that share a group from
models of different groups: a shrunk model is less confident, and its loss a little higher. If another model serves the
same group, the clients of the group change to it, and the shrunk model becomes idle. Otherwise they stay, and training
restores their model. After line 11, the models do not change except by training.

A model with fewer than 4 % of the clients is removed, so smaller groups are not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.privacy import Plan
from coterie.rounds.run_state import FloatArray, Models, StrategyError

IntArray = npt.NDArray[np.int64]

RESEED, PRUNE, SPLIT, REMOVE = "reseed", "prune", "split", "remove"
#: What each check does.
SCHEDULE = (*[RESEED] * 3, *[PRUNE] * 2, SPLIT, *[RESEED] * 4, *[PRUNE] * 3, REMOVE)
# Number of windows of a run.
_WINDOWS = 20
# A model with less than this share of the expected cohort is idle.
_IDLE_BELOW = 0.04
# Norm of p relative to that of the copied model.
_PERTURBATION = 0.3
# g, by which the smallest model shrinks.
_SHRINK = 0.3
# Entries of the state: sums of histograms in the current window, and splits of every model.
_SUMS, _SPLITS = "search-sums", "search-splits"


@dataclass(frozen=True)
class Found:
    """Outcome of a check.

    Attributes:
        models: (k', d).
        sizes: (k',) n_j; copies have half the size of their model.
        splits: (k',) r_j.
        moves: pairs (copied model, replaced or added model), by index in ``models``.
        origins: (k',) index of the model before the check; -1: a copy.
        factors: (k',) by which line 9 shrank the model.
    """

    models: Models
    sizes: FloatArray
    splits: FloatArray
    moves: list[tuple[int, int]]
    origins: IntArray
    factors: FloatArray


def check(plan: Plan, average_last: float) -> None:
    """Check that a plan supports the search.

    Raises:
        StrategyError: it does not.
    """
    if not plan.resizes:
        raise StrategyError(
            f"clusters = 0 requires mechanism joint, banded or secure, or no privacy, not {plan.mechanism}: no "
            "proof covers a number of clusters that changes; set clusters"
        )
    if plan.rebalance_min:
        raise StrategyError("clusters = 0 requires rebalance-min = 0, so that models of no group become idle")
    if plan.private and not plan.identifier_share:
        raise StrategyError("clusters = 0 requires released cluster sizes: set identifier-share above 0")
    if plan.num_clusters < 2:
        raise StrategyError("clusters = 0 requires a plan of at least 2 clusters, the maximum number")
    if plan.rounds < _WINDOWS:
        raise StrategyError(f"clusters = 0 requires at least {_WINDOWS} rounds, not {plan.rounds}; set clusters")
    latest = 1 - len(SCHEDULE) / _WINDOWS
    if average_last > latest + 1e-9:
        raise StrategyError(
            f"average-last = {average_last:g} must be at most {latest:g} with clusters = 0, so that averaging "
            "begins after the search"
        )


def action(number: int, rounds: int) -> str | None:
    """What is due after round ``number`` of ``rounds``: an entry of :data:`SCHEDULE`; None: nothing."""
    window = rounds // _WINDOWS
    checks, rest = divmod(number, window)
    return None if rest or checks > len(SCHEDULE) else SCHEDULE[checks - 1]


def last(rounds: int) -> int:
    """Return the round after which the search ends: histograms of later ones are not read."""
    return len(SCHEDULE) * (rounds // _WINDOWS)


def observe(state: Mapping[str, npt.NDArray[Any]], histogram: FloatArray) -> dict[str, npt.NDArray[Any]]:
    """Return the state after a round: line 3."""
    none = np.zeros(len(histogram))
    return {**state, _SUMS: state.get(_SUMS, none) + histogram, _SPLITS: state.get(_SPLITS, none)}


def search(
    action: str,
    models: Models,
    state: Mapping[str, npt.NDArray[Any]],
    plan: Plan,
    max_clusters: int,
    rng: np.random.Generator,
) -> tuple[Found, dict[str, npt.NDArray[Any]]]:
    """Lines 3 to 11 of one check.

    Args:
        action: an entry of :data:`SCHEDULE`.
        models: (k, d).
        state: as :meth:`observe` returned it.
        plan: plan of the run, for its public numbers.
        max_clusters: maximum number of models.
        rng: for directions.

    Returns:
        the outcome and the new state.
    """
    sizes, cohort = state[_SUMS] / (plan.rounds // _WINDOWS), plan.rate * plan.clients  # line 3
    before = Found(models, sizes, state[_SPLITS], [], np.arange(len(models)), np.ones(len(models)))
    if action == RESEED:
        after = reseeded(before, cohort, rng)
    else:
        after = without_idle(before, cohort)
        if action == PRUNE:
            after = shrunk(after)
        elif action == SPLIT:
            after = split(after, max_clusters, rng)
    return after, {**state, _SUMS: np.zeros(len(after.models)), _SPLITS: after.splits}


def reseeded(found: Found, cohort: float, rng: np.random.Generator) -> Found:
    """Lines 5 to 7."""
    models, sizes, splits = found.models.copy(), found.sizes.copy(), found.splits.copy()
    idle, moves = sizes < _IDLE_BELOW * cohort, []
    if idle.all():
        return found
    for i in np.flatnonzero(idle).tolist():
        s = int(np.argmax(np.where(idle, -np.inf, sizes / (1 + splits))))
        models[i], models[s] = _copies(models[s], rng)
        splits[s] += 1
        splits[i] = splits[s]
        moves.append((s, i))
    for s, i in moves:
        sizes[s] = sizes[i] = sizes[s] / 2
    return replace(
        found, models=models, sizes=sizes, splits=splits, moves=moves, origins=np.where(idle, -1, found.origins)
    )


def without_idle(found: Found, cohort: float) -> Found:
    """Line 8, first part; the largest model remains."""
    kept = found.sizes >= _IDLE_BELOW * cohort
    kept[np.argmax(found.sizes)] = True
    return Found(
        found.models[kept], found.sizes[kept], found.splits[kept], [], found.origins[kept], found.factors[kept]
    )


def shrunk(found: Found) -> Found:
    """Line 9."""
    rank = np.argsort(np.argsort(-found.sizes, kind="stable"))
    factors = 1 - _SHRINK * rank / max(len(rank) - 1, 1)
    models = np.asarray(found.models * factors[:, None], np.float32)
    return replace(found, models=models, factors=factors)


def split(found: Found, max_clusters: int, rng: np.random.Generator) -> Found:
    """Line 10."""
    k = len(found.models)
    models, sizes, moves = list(found.models), found.sizes.tolist(), []
    for s in np.argsort(-found.sizes, kind="stable")[: max_clusters - k].tolist():
        moves.append((s, len(models)))
        copy, models[s] = _copies(models[s], rng)
        models.append(copy)
        sizes[s] /= 2
        sizes.append(sizes[s])
    return Found(
        np.stack(models),
        np.array(sizes),
        np.zeros(len(models)),
        moves,
        np.append(found.origins, [-1] * len(moves)),
        np.append(found.factors, [1.0] * len(moves)),
    )


def _copies(model: Models, rng: np.random.Generator) -> tuple[Models, Models]:
    """Line 7: theta_s - p and theta_s + p."""
    direction = rng.standard_normal(len(model))
    direction *= _PERTURBATION * float(np.linalg.norm(model) / np.linalg.norm(direction))
    return np.asarray(model - direction, np.float32), np.asarray(model + direction, np.float32)
