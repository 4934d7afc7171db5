"""Report content of a run that clusters records instead of clients: sentences, and figures with captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from coterie.report import formats
from coterie.report.points import FEWEST, MOST, plane, point_files, read_codes, read_points
from coterie.report.points_plots import MOST_CLIENTS, plane_figure, samples_figure
from coterie.report.runs import Run

_SYNTHETIC = "ppfc-gan"


class Picture(NamedTuple):
    """A figure with its title and caption."""

    figure: Figure
    name: str
    caption: str


def found(run: Run) -> list[str]:
    """Describe the agreement of clusters with classes, one sentence per item; empty without scores."""
    outcome = run.outcome
    if outcome["accuracy"] is None or not outcome["confusion"]:
        return []
    counts = np.array(outcome["confusion"])
    words = [
        f"{formats.percent(outcome['accuracy'])} of {counts.sum():,} records are in the cluster that is matched to "
        "their class, one to one. Kappa is what of this is beyond chance; NMI and the adjusted Rand index need no "
        "matching."
    ]
    homes: dict[int, list[int]] = {}
    for each in np.flatnonzero(2 * counts.max(axis=0) > counts.sum(axis=0)).tolist():
        homes.setdefault(int(counts[:, each].argmax()), []).append(each)
    words += [
        f"Classes {formats.listed(classes)} share cluster {cluster}, which holds most of each."
        for cluster, classes in sorted(homes.items())
        if len(classes) > 1
    ]
    empty = np.flatnonzero(counts.sum(axis=1) == 0).tolist()
    return words + ([f"No record is in cluster{'s' * (len(empty) > 1)} {formats.listed(empty)}."] if empty else [])


def told(run: Run) -> list[str]:
    """Describe received points and missing clients, one sentence per item; empty if there are no points."""
    points, missing = run.notes.get("points") or {}, run.notes.get("missing") or []
    if not points:
        return []
    sizes = sorted(points.values())
    each = f"{sizes[0]:,} each" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,} each"
    words = [
        f"{formats.clients(len(points))} sent {sum(sizes):,} {_what(run)}, {each}, in one round; the server clustered "
        "them together, and clients labelled their own records by what it found."
    ]
    if collapsed := run.notes.get("collapsed"):
        words.append(f"Samples of {_who(collapsed)} hardly differ from each other: clusters may miss what is there.")
    if missing:
        return [*words, f"{_who(missing).capitalize()} sent nothing: the clusters were found without them."]
    return [*words, "Nobody was missing."]


def by_class(run: Run) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return (cluster, [(records, percent of the class) per class]) per cluster, in matched order."""
    if not run.outcome["confusion"]:
        return []
    counts = np.array(run.outcome["confusion"])
    rows, columns = linear_sum_assignment(-counts)
    place = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    shares = np.round(100 * counts / np.maximum(counts.sum(axis=0), 1)).astype(int)
    order = sorted(range(len(counts)), key=lambda cluster: place.get(cluster, len(counts) + cluster))
    return [(cluster, list(zip(counts[cluster].tolist(), shares[cluster].tolist(), strict=True))) for cluster in order]


def pictures(run: Run) -> tuple[list[Picture], list[str]]:
    """Return figures of the received points, and the files that could not be read."""
    files = point_files(run.path)
    read = {client: read_points(path) for client, path in files.items()}
    unreadable = [files[client].name for client, points in read.items() if points is None]
    points = {client: own for client, own in read.items() if own is not None}
    shapes = {own.shape[1:] for own in points.values()}
    drawn = []
    if len(shapes) == 1:
        drawn.append(_samples(run, points, shapes.pop()))
    path = run.path / "evidence" / "codes.npz"
    codes = read_codes(path)
    if codes is None:
        return drawn, unreadable + [path.name] * path.exists()
    if len(codes.labels) >= FEWEST:
        labels = codes.labels[:MOST]
        many = f"{len(labels):,} of the points" if len(labels) < _all(points) else "All points"
        caption = (
            f"{many} in the plane (t-SNE keeps neighbours together; distances between heaps mean little), coloured by "
            "the cluster that the server gave them; its number stands in its middle."
        )
        views = {"in the space of the data": plane(codes.points[:MOST])}
        if codes.encoded:
            views["as codes of the autoencoder, where they were clustered"] = plane(codes.codes[:MOST])
        drawn.append(Picture(plane_figure(views, labels), "Points in the plane", caption))
    return drawn, unreadable


def _samples(run: Run, points: dict[int, np.ndarray], shape: Sequence[int]) -> Picture:
    pen = run.dataset == "pendigits" and shape == (16,)
    lines = "the features in order, from -1 to 1" if len(shape) != 3 else ""
    look = "the way of the pen, from the dot on" if pen else lines
    some = "" if len(points) <= MOST_CLIENTS else f", of {MOST_CLIENTS} of {len(points)} clients"
    caption = f"Up to ten {_what(run)} of every client{some}: what left it, in place of its records."
    return Picture(
        samples_figure(points, strokes=pen), "Points of every client", caption + (f" A line is {look}." if look else "")
    )


def _what(run: Run) -> str:
    return "synthetic samples" if run.strategy == _SYNTHETIC else "local centroids"


def _all(points: dict[int, np.ndarray]) -> int:
    return sum(map(len, points.values()))


def _who(clients: list[int]) -> str:
    return f"client{'s' * (len(clients) > 1)} {formats.listed(clients)}"
