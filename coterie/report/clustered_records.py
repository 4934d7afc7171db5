"""Report content of a run that clusters records instead of clients."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.report import formats
from coterie.report.runs import Run


def describe_scores(run: Run) -> list[str]:
    """Describe the agreement of clusters with classes, one sentence per item; empty without scores."""
    scores = run.scores
    if scores.accuracy is None or not scores.confusion:
        return []
    counts = np.array(scores.confusion)
    sentences = [
        f"After one-to-one matching of clusters to classes, {formats.percent(scores.accuracy)} of "
        f"{counts.sum():,} records are in the cluster of their class. Kappa corrects this share for agreement by "
        "chance; NMI and the adjusted Rand index do not depend on the matching."
    ]
    majorities: dict[int, list[int]] = {}
    for label in np.flatnonzero(2 * counts.max(axis=0) > counts.sum(axis=0)).tolist():
        majorities.setdefault(int(counts[:, label].argmax()), []).append(label)
    sentences += [
        f"Cluster {cluster} contains the majority of classes {formats.listed(classes)}."
        for cluster, classes in sorted(majorities.items())
        if len(classes) > 1
    ]
    empty = np.flatnonzero(counts.sum(axis=1) == 0).tolist()
    if empty:
        sentences.append(
            f"Clusters {formats.listed(empty)} are empty." if len(empty) > 1 else f"Cluster {empty[0]} is empty."
        )
    return sentences


def describe_points(run: Run) -> list[str]:
    """Describe received points and missing clients, one sentence per item; empty if there are no points."""
    from coterie.strategies.registry import STRATEGIES

    points, missing = run.notes.get("points") or {}, run.notes.get("missing") or []
    if not points:
        return []
    sizes = sorted(points.values())
    size_range = f"{sizes[0]:,} each" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,} each"
    kind = STRATEGIES[run.strategy].point_name
    sentences = [
        f"In one round, {formats.clients(len(points))} sent {sum(sizes):,} {kind} ({size_range}). The server "
        "clustered all of them, and clients labelled their records with the result."
    ]
    if collapsed := run.notes.get("collapsed"):
        sentences.append(
            f"Samples of {_client_list(collapsed)} hardly differ from each other, so the clusters may not represent "
            "their records."
        )
    if missing:
        return [*sentences, f"{_client_list(missing).capitalize()} sent no points; their data did not contribute."]
    return [*sentences, "All clients replied."]


def confusion_rows(run: Run) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return (cluster, [(number, percent of the class) per class]) per cluster; of records in matched order."""
    if not run.scores.confusion:
        return []
    counts = np.array(run.scores.confusion)
    rows, columns = linear_sum_assignment(-counts) if run.clusters_records else (np.arange(len(counts)),) * 2
    class_of = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    shares = np.round(100 * counts / np.maximum(counts.sum(axis=0), 1)).astype(int)
    order = sorted(range(len(counts)), key=lambda cluster: class_of.get(cluster, len(counts) + cluster))
    return [(cluster, list(zip(counts[cluster].tolist(), shares[cluster].tolist(), strict=True))) for cluster in order]


def _client_list(clients: list[int]) -> str:
    return f"client{'s' * (len(clients) > 1)} {formats.listed(clients)}"
