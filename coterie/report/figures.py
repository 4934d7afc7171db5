"""Figures of a run with captions and data: accuracy, privacy loss, cluster sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.fields import MAX_SAMPLED_TESTS
from coterie.report import formats
from coterie.report.comparison import Comparison
from coterie.report.graphics import Data, Graphic
from coterie.report.plots import (
    accuracy_limits,
    accuracy_panel,
    cluster_panel,
    comparison_panel,
    epsilon_panel,
    evaluated_rounds,
    group_rounds,
    released_sizes,
)
from coterie.report.runs import Run

# Most panels of small multiples; the data of all are in the file.
_PANELS = 12


def accuracy_graphic(run: Run) -> Graphic | None:
    """Return the accuracy of all clients and of each hidden group over rounds; None if no round was evaluated."""
    rounds, accuracy = evaluated_rounds(run)
    if not rounds:
        return None
    groups = [
        group_rounds(run, number) for number in range(max(len(r.scores.group_accuracy or ()) for r in run.rounds))
    ]
    last = {number: values[-1] for number, (_, values) in enumerate(groups) if values and math.isfinite(values[-1])}
    drawn = sorted(sorted(last, key=lambda number: last[number])[:_PANELS]) if len(last) > 1 else []
    limits = accuracy_limits([*accuracy, *(value for number in drawn for value in groups[number][1])])
    who = "noisy mean" if run.noisy else "all clients"
    panels = [
        (f"{who}, {formats.percent(accuracy[-1])} at the end", accuracy_panel(run, limits=limits)),
        *(
            (f"group {number}, {formats.percent(last[number])} at the end", accuracy_panel(run, number, limits))
            for number in drawn
        ),
    ]
    caption = f"Held-out {run.score_name}: " + (
        "the private noisy mean over all clients." if run.noisy else "the mean over clients, each with its own model"
    )
    if drawn:
        lowest = f" the {len(drawn)} with the lowest {run.score_name} of" if len(drawn) < len(last) else ""
        caption += f", and in colour{lowest} the hidden groups; the grey line is the mean over all clients"
    if len(rounds) > 1 and not run.noisy:
        caption += f". Only the last evaluation reads more than {MAX_SAMPLED_TESTS:,} held-out records of a client"
    by_round = [dict(zip(*group, strict=True)) for group in groups]
    rows = [
        [number, value, *(values.get(number) for values in by_round)]
        for number, value in zip(rounds, accuracy, strict=True)
    ]
    heads = ("round", "all clients", *(f"group {number}" for number in range(len(groups))))
    title = f"{formats.capitalised(run.score_name)} by round"
    return Graphic(title, panels, caption.rstrip(".") + ".", Data("accuracy", heads, rows))


def epsilon_graphic(run: Run) -> Graphic | None:
    """Return ε over rounds; None without privacy."""
    if not run.accounted:
        return None
    rows = [(r.round, r.epsilon) for r in run.rounds if math.isfinite(r.epsilon)]
    caption = "Cumulative privacy loss ε, charged before every release."
    return Graphic("Privacy loss by round", [("", epsilon_panel(run))], caption, Data("epsilon", ("round", "ε"), rows))


def cluster_graphic(run: Run) -> Graphic | None:
    """Return the released size of each cluster over rounds; None if none were released."""
    numbers, sizes = released_sizes(run)
    if not len(numbers):
        return None
    finite = sizes[np.isfinite(sizes)]
    low, high = float(finite.min(initial=0)), float(finite.max(initial=1))
    margin = 0.05 * (high - low)
    limits = (low - margin if low < 0 else 0.0, high + margin)
    count = min(sizes.shape[1], _PANELS)
    panels = [(f"cluster {cluster}", cluster_panel(run, cluster, limits)) for cluster in range(count)]
    noisy = "Released noisy size" if run.unit != "none" else "Size"
    below = "; can be negative because of noise" if run.unit != "none" else ""
    caption = (
        f"{noisy} of each cluster in each round's cohort (points{below}) and its mean over the last ten rounds (lines)."
    )
    if any(r.reseeded for r in run.rounds):
        caption += " A dashed line marks a re-seeding: a perturbed copy of another model replaced the cluster's model."
    if any(r.origins for r in run.rounds):
        caption += " Shown are the models that the search for their number kept."
    if run.unit == "client" and numbers[-1] < run.rounds[-1].round:
        caption += f" Sizes were released up to round {numbers[-1]}: later rounds do not need them."
    if count < sizes.shape[1]:
        caption += f" {count} of {sizes.shape[1]} clusters are drawn."
    rows = [[int(number), *map(_known, row)] for number, row in zip(numbers, sizes, strict=True)]
    heads = ("round", *(f"cluster {cluster}" for cluster in range(sizes.shape[1])))
    return Graphic("Cluster sizes by round", panels, caption, Data("cluster-sizes", heads, rows))


def comparison_graphic(comparison: Comparison) -> Graphic | None:
    """Return the accuracy of each row of a comparison over rounds; None if no run has a curve."""
    rows = [row for row in comparison.rows if any(evaluated_rounds(run)[0] for run in row.runs)]
    if not rows or all(run.clusters_records for row in rows for run in row.runs):
        return None
    every = [row.runs for row in rows]
    drawn = range(min(len(rows), _PANELS))
    score = comparison.scores["accuracy"]
    panels = [
        (f"{comparison.rows.index(rows[n]) + 1}: {rows[n].label}", comparison_panel(every, n, score)) for n in drawn
    ]
    caption = f"Held-out {score}, mean over clients: one line per run; grey lines are the runs of other rows."
    if len(drawn) < len(rows):
        caption += f" {len(drawn)} of {len(rows)} rows are drawn."
    values: list[Sequence[Any]] = [
        (comparison.rows.index(row) + 1, str(run.path), number, value)
        for row in rows
        for run in row.runs
        for number, value in zip(*evaluated_rounds(run), strict=True)
    ]
    data = Data("comparison", ("row", "run", "round", "accuracy"), values)
    return Graphic(f"{formats.capitalised(score)} by round", panels, caption, data)


def _known(value: Any) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
