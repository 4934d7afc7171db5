"""Figures of a run with captions and data: accuracy, privacy loss, cluster sizes, clustering evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coterie.fields import MAX_SAMPLED_TESTS
from coterie.report import formats
from coterie.report.comparison import Comparison
from coterie.report.evidence import Pairs, leaves, numbered_files, read_pairs, split_rounds
from coterie.report.evidence_plots import distance_figure, similarity_figures, tree_figure
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
_MAX_MATRICES = 12
# Largest matrix whose pairs are all in the file of the figure.
_PAIRS = 60


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
    caption = "Held-out accuracy: " + (
        "the private noisy mean over all clients." if run.noisy else "the mean over clients, each with its own model"
    )
    if drawn:
        lowest = f" the {len(drawn)} with the lowest accuracy of" if len(drawn) < len(last) else ""
        caption += f", and in colour{lowest} the hidden groups; the grey line is the mean over all clients"
    if len(rounds) > 1 and not run.noisy:
        caption += f". Only the last evaluation reads more than {MAX_SAMPLED_TESTS:,} held-out records of a client"
    by_round = [dict(zip(*group, strict=True)) for group in groups]
    rows = [
        [number, value, *(values.get(number) for values in by_round)]
        for number, value in zip(rounds, accuracy, strict=True)
    ]
    heads = ("round", "all clients", *(f"group {number}" for number in range(len(groups))))
    return Graphic("Accuracy by round", panels, caption.rstrip(".") + ".", Data("accuracy", heads, rows))


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
    panels = [(f"{comparison.rows.index(rows[n]) + 1}: {rows[n].label}", comparison_panel(every, n)) for n in drawn]
    caption = "Held-out accuracy, mean over clients: one line per run; grey lines are the runs of other rows."
    if len(drawn) < len(rows):
        caption += f" {len(drawn)} of {len(rows)} rows are drawn."
    values: list[Sequence[Any]] = [
        (comparison.rows.index(row) + 1, str(run.path), number, value)
        for row in rows
        for run in row.runs
        for number, value in zip(*evaluated_rounds(run), strict=True)
    ]
    data = Data("comparison", ("row", "run", "round", "accuracy"), values)
    return Graphic("Accuracy by round", panels, caption, data)


def evidence(run: Run) -> tuple[list[Graphic], list[str]]:
    """Return figures of the clustering evidence, and the files that could not be read."""
    drawn: list[Graphic] = []
    unreadable = []
    path = run.path / "evidence" / "distances.npz"
    if (distances := read_pairs(path)) is not None:
        drawn.append(_distances(distances))
    elif path.exists():
        unreadable.append(path.name)
    tree = run.tree
    if tree:
        last = max([run.last_round, *(node.ended or node.born for node in tree)])
        caption = (
            "The tree of splits, with one line per cluster, whose width is proportional to its number of clients. A "
            "ring marks a split, with the maximum similarity between the two halves; a square marks a stationary "
            "cluster, whose model no longer changes."
        )
        heads = ("node", "parent", "born", "ended", "reason", "cluster", "similarity", "clients")
        rows = [
            (n.number, n.parent, n.born, n.ended, n.end_reason, n.cluster, n.similarity, len(n.clients)) for n in tree
        ]
        drawn.append(Graphic("Splits by round", [("", tree_figure(tree, last))], caption, Data("tree", heads, rows)))
    files = numbered_files(run.path, "similarities")
    at = [number for number in files if number in split_rounds(tree) or number == max(files)]
    at = at if len(at) <= _MAX_MATRICES else [*at[: _MAX_MATRICES - 1], at[-1]]
    read = {number: read_pairs(files[number]) for number in at}
    unreadable += [files[number].name for number, pairs in read.items() if pairs is None]
    matrices = {number: pairs for number, pairs in read.items() if pairs is not None}
    if matrices:
        clients = [client for leaf in leaves(tree) for client in sorted(leaf.clients)]
        drawn.append(_similarities(matrices, clients or matrices[max(matrices)].ordered().clients.tolist()))
    return drawn, unreadable


def _distances(pairs: Pairs) -> Graphic:
    caption = (
        "Pairwise distances between clients; close pairs stand out from the page. Lines separate clusters, within "
        "which distances should be small. The diagonal is omitted."
    )
    data, rest = _pair_data("distances", {"": pairs})
    return Graphic("Distances between clients", [("", distance_figure(pairs))], caption + rest, data)


def _similarities(matrices: dict[int, Pairs], order: Sequence[int]) -> Graphic:
    caption = (
        "Pairwise cosine similarity of client updates, in the rounds with splits and in the last one. Clients are "
        "ordered by their final cluster. Grey pairs were not compared: the clients were already in different "
        "clusters, or one of them did not reply."
    )
    figures = similarity_figures(matrices, order)
    panels: list[tuple[str, Figure]] = [(f"round {number}", figure) for number, figure in figures.items()]
    data, rest = _pair_data("similarities", {str(number): pairs for number, pairs in matrices.items()})
    return Graphic("Similarities between clients", panels, caption + rest, data)


def _pair_data(name: str, matrices: dict[str, Pairs]) -> tuple[Data, str]:
    """Return all pairs of small matrices, or means over pairs of clusters, and a sentence about the latter."""
    rounds = () if "" in matrices else ("round",)
    small = all(len(pairs.clients) <= _PAIRS for pairs in matrices.values())
    rows = []
    for round_number, pairs in matrices.items():
        ordered = pairs.ordered()  # without the diagonal
        pair_rows = _pairs(ordered) if small else _cluster_means(ordered)
        rows += [([round_number] if rounds else []) + row for row in pair_rows]
    unit = "client" if small else "cluster"
    sentence = "" if small else f" The table has means over pairs of clusters; evidence/{name}*.npz has all pairs."
    return Data(name, (*rounds, f"{unit} a", f"{unit} b", "value"), rows), sentence


def _pairs(pairs: Pairs) -> list[list[Any]]:
    upper = zip(*np.triu_indices(len(pairs.clients), 1), strict=True)
    return [[int(pairs.clients[a]), int(pairs.clients[b]), _known(pairs.matrix[a, b])] for a, b in upper]


def _cluster_means(pairs: Pairs) -> list[list[Any]]:
    labels = np.unique(pairs.labels).tolist()
    blocks = {
        (a, b): pairs.matrix[np.ix_(pairs.labels == a, pairs.labels == b)] for a in labels for b in labels if a <= b
    }
    finite = {clusters: block[np.isfinite(block)] for clusters, block in blocks.items()}
    return [[a, b, _known(values.mean()) if values.size else None] for (a, b), values in finite.items()]


def _known(value: Any) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
