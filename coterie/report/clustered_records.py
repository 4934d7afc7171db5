"""Report content of a run that clusters records instead of clients: sentences, and figures with captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.report import formats
from coterie.report.evidence import numbered_files
from coterie.report.graphics import Data, Graphic
from coterie.report.points_plots import MAX_CLIENTS, embedding_figure, samples_figure
from coterie.report.runs import Run
from coterie.report.uploaded_points import MAX_POINTS, MIN_POINTS, embed, read_codes, read_points


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
    points, missing = run.notes.get("points") or {}, run.notes.get("missing") or []
    if not points:
        return []
    sizes = sorted(points.values())
    size_range = f"{sizes[0]:,} each" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,} each"
    sentences = [
        f"In one round, {formats.clients(len(points))} sent {sum(sizes):,} {_point_name(run)} ({size_range}). The "
        "server clustered all of them, and clients labelled their records with the result."
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


def point_figures(run: Run) -> tuple[list[Graphic], list[str]]:
    """Return figures of the received points, and the files that could not be read."""
    files = numbered_files(run.path, "points")
    read = {client: read_points(path) for client, path in files.items()}
    unreadable = [files[client].name for client, points in read.items() if points is None]
    points = {client: client_points for client, client_points in read.items() if client_points is not None}
    shapes = {client_points.shape[1:] for client_points in points.values()}
    drawn = []
    if len(shapes) == 1:
        drawn.append(_samples(run, points, shapes.pop()))
    path = run.path / "evidence" / "codes.npz"
    codes = read_codes(path)
    if codes is None:
        return drawn, unreadable + [path.name] * path.exists()
    if len(codes.labels) >= MIN_POINTS:
        labels = codes.labels[:MAX_POINTS]
        selected = f"A sample of {len(labels):,} points" if len(labels) < _total(points) else "All points"
        caption = (
            f"{selected} in a two-dimensional t-SNE embedding, coloured by cluster; numbers mark the clusters. t-SNE "
            "preserves neighbourhoods; distances between groups of points carry little meaning."
        )
        views = {"input space": embed(codes.points[:MAX_POINTS])}
        if codes.encoded:
            views["code space of the autoencoder, in which the points were clustered"] = embed(codes.codes[:MAX_POINTS])
        panels = [(view, embedding_figure(places, labels)) for view, places in views.items()]
        heads = ("client", "cluster", *(f"{axis} in the {view.split()[0]} space" for view in views for axis in "xy"))
        rows = np.column_stack([codes.clients[:MAX_POINTS], labels, *(np.round(v, 3) for v in views.values())])
        data = Data("embedding", heads, [[int(a), int(b), *rest] for a, b, *rest in rows.tolist()])
        drawn.append(Graphic("Embedding of the points", panels, caption, data))
    return drawn, unreadable


def _samples(run: Run, points: dict[int, np.ndarray], shape: Sequence[int]) -> Graphic:
    pen = run.dataset == "pendigits" and shape == (16,)
    caption = f"Up to ten {_point_name(run)} of every client"
    if len(points) > MAX_CLIENTS:
        caption = f"Up to ten {_point_name(run)} of each of {MAX_CLIENTS} clients (of {len(points)})"
    caption += ": the data that clients upload instead of their records."
    if pen:
        caption += " A line is the path of the pen, starting at the dot."
    elif len(shape) != 3:
        caption += " A line shows the features in order, from -1 to 1."
    data = Data(
        "points", ("client", "points sent"), [[client, len(client_points)] for client, client_points in points.items()]
    )
    caption += " The points are in evidence/points-*.npz of the run folder."
    return Graphic("Points of every client", [("", samples_figure(points, strokes=pen))], caption, data)


def _point_name(run: Run) -> str:
    from coterie.strategies.registry import STRATEGIES

    return STRATEGIES[run.strategy].point_name


def _total(points: dict[int, np.ndarray]) -> int:
    return sum(map(len, points.values()))


def _client_list(clients: list[int]) -> str:
    return f"client{'s' * (len(clients) > 1)} {formats.listed(clients)}"
