"""Between two rounds: re-seeding, the search for the number of clusters, and adaptive clipping, from releases only."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
from flwr.app import MetricRecord

from coterie.privacy import Released, ReleasedSums
from coterie.strategies.adaptive_clipping import adapted
from coterie.strategies.method import FloatArray, Method, Models
from coterie.strategies.model_search import IntArray, action, observe, search
from coterie.strategies.server_optimizer import Arrays, ServerOptimizer

#: Pairs (copied model, replaced or added model).
Moves: TypeAlias = list[tuple[int, int]]

# Weight of the latest histogram in the running mean for rebalancing and re-seeding.
_LATEST_WEIGHT = 0.25


def finish_round(method: Method, number: int, models: Models, released: Released) -> tuple[Models, MetricRecord]:
    """Post-process the last release of a round.

    Args:
        method: its run receives the histogram, clipping norm and plan of the next round.
        number: of the round.
        models: (k, d) that the method returned.
        released: by the last phase of the round.

    Returns:
        (k', d) models and the metrics of the round.
    """
    run = method.run
    moves: Moves = []
    metrics = MetricRecord({"epsilon": released.epsilon, "epsilon_rdp": run.ledger.spent("rdp")})
    if isinstance(released, ReleasedSums) and released.histogram is not None:
        metrics["histogram"] = released.histogram.tolist()
        rearrange = _searched if method.searching else _reseeded
        models, moves = rearrange(method, number, models, released.histogram)
    metrics["reseeded"] = [cluster for move in moves for cluster in move]
    if released.below is not None:
        metrics["clip_norm"] = run.plan.clip_norm
        run.state = adapted(run.state, released.below)
    return models, metrics


def _reseeded(method: Method, number: int, models: Models, histogram: FloatArray) -> tuple[Models, Moves]:
    """Update the running mean of histograms; re-seed if it is due."""
    run, reseeding = method.run, method.options.reseeding
    moves: Moves = []
    if run.state.histogram is not None:
        histogram = (1 - _LATEST_WEIGHT) * run.state.histogram + _LATEST_WEIGHT * histogram
    if reseeding is not None and reseeding.due(number, run.plan.rounds):
        rng = run.streams.stream("reseeding", number, run.attempt)
        models, histogram, moves = reseeding(models, histogram, rng, method.shared)
        origins = np.arange(len(models))
        origins[[replaced for _, replaced in moves]] = -1
        arrays = _rearranged(method, run.state.arrays, origins, np.ones(len(models)))
        run.state = replace(run.state, arrays=arrays)
    run.state = replace(run.state, histogram=histogram)
    return models, moves


def _searched(method: Method, number: int, models: Models, histogram: FloatArray) -> tuple[Models, Moves]:
    """Search for the number of clusters; the run's histogram is the mean of the last window of rounds."""
    run = method.run
    arrays = observe(run.state.arrays, histogram)
    due = action(number, run.plan.rounds)
    if due is None:
        run.state = replace(run.state, arrays=arrays)
        return models, []
    rng = run.streams.stream("reseeding", number, run.attempt)
    searched, arrays = search(due, models, arrays, run.plan, method.max_clusters, rng)
    arrays = _rearranged(method, arrays, searched.origins, searched.factors)
    notes = {"search": due, "clusters": len(searched.models), "origins": searched.origins.tolist()}
    run.state = replace(run.state, histogram=searched.sizes, arrays=arrays, notes={**run.state.notes, **notes})
    return searched.models, searched.moves


def _rearranged(method: Method, arrays: Arrays, origins: IntArray, factors: FloatArray) -> Arrays:
    """Move the state of the mechanism and of the server's optimizer along with the models; return the arrays."""
    method.run.plan.rearrange(method.run.mechanism_state, origins, factors, method.shared)
    return ServerOptimizer.rearranged(arrays, origins, factors, method.shared)
