"""Plot the points that clients sent for clustering of records: samples of each client, and a 2-D embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coterie.report.plots import CLUSTER_COLOURS, GROUP_COLOURS, INK, PHOTO, drawing_style, panel, without_axes

#: Maximum number of plotted points per client, and of plotted clients.
MAX_PER_CLIENT, MAX_CLIENTS = 10, 20

_TILE, _SPACE, _MARGIN = "#f2f4f7", 0.12, 0.1
_PAPER_TO_INK = LinearSegmentedColormap.from_list("ink", [_TILE, INK])


def samples_figure(points: Mapping[int, np.ndarray], *, strokes: bool = False) -> Figure:
    """Plot one row per client with up to ten of its points.

    Args:
        points: (n, *shape) by client, at least one: images (channels, height, width) are drawn as images, all other
            points as lines over the features.
        strokes: whether features are pen positions, with x and y alternating.
    """
    clients = list(points)
    if len(clients) > MAX_CLIENTS:
        clients = [clients[index] for index in _spread(len(clients), MAX_CLIENTS)]
    shape = points[clients[0]].shape[1:]
    high = shape[1] / shape[2] if len(shape) == 3 else 1.0
    step = high + _SPACE
    tall = 0.3 * step * len(clients) + 0.05
    largest = 1.0 if len(shape) == 3 else max(1.0, *(float(np.abs(points[client]).max()) for client in clients))
    with drawing_style():
        figure, axes = panel(tall, (0.175, 0.02 / tall, 0.82, 1 - 0.04 / tall))
        axes.set_xlim(0, MAX_PER_CLIENT * (1 + _SPACE) - _SPACE)
        axes.set_ylim(len(clients) * step - _SPACE, 0)
        axes.set_aspect("equal", anchor="W")
        axes.set_axis_off()
        tiles, lines = [], []
        for down, client in enumerate(clients):
            samples = points[client]
            top = down * step
            axes.text(-0.2, top + high / 2, f"client {client}", ha="right", va="center")
            for across, index in enumerate(_spread(len(samples), MAX_PER_CLIENT)):
                left = across * (1 + _SPACE)
                if len(shape) == 3:
                    _draw_image(axes, samples[index], (left, left + 1, top + high, top))
                else:
                    tiles.append(Rectangle((left, top), 1, high))
                    lines.append(_line(samples[index].ravel() / largest, strokes) * (1, high) + (left, top))
        axes.add_collection(PatchCollection(tiles, facecolor=_TILE, linewidth=0))
        axes.add_collection(LineCollection(lines, colors=INK, linewidths=0.9, capstyle="round", joinstyle="round"))
        if strokes:
            starts = np.array([line[0] for line in lines])
            axes.plot(*starts.T, "o", color=GROUP_COLOURS[1], markersize=2.2, markeredgewidth=0)
    return figure


def embedding_figure(places: np.ndarray, labels: np.ndarray) -> Figure:
    """Plot two-dimensional points, coloured by cluster, with the cluster number at its centre.

    Args:
        places: (n, 2) points.
        labels: (n,) cluster of each point.
    """
    small = len(labels) > 500
    with drawing_style():
        figure, axes = panel(3.6, (0.01, 0.01, 0.98, 0.98))
        without_axes(axes)
        for label in np.unique(labels).tolist():
            cluster_points, colour = places[labels == label], CLUSTER_COLOURS[label % len(CLUSTER_COLOURS)]
            axes.plot(
                *cluster_points.T, "o", color=colour, markersize=2.6 if small else 4.0, alpha=0.7, markeredgewidth=0
            )
        for label in np.unique(labels).tolist():
            _label_cluster(axes, places[labels == label], label)
    return figure


def _spread(many: int, most: int) -> Sequence[int]:
    """Return up to `most` evenly spaced indices."""
    return [int(index) for index in np.linspace(0, many - 1, min(many, most))]


def _draw_image(axes: Axes, image: np.ndarray, extent: tuple[float, float, float, float]) -> None:
    if len(image) == 3:
        axes.imshow(np.clip((image.transpose(1, 2, 0) + 1) / 2, 0, 1), extent=extent, interpolation="none", gid=PHOTO)
    else:
        axes.imshow(image.mean(axis=0), _PAPER_TO_INK, vmin=-1, vmax=1, extent=extent, interpolation="none")


def _line(values: np.ndarray, strokes: bool) -> np.ndarray:
    """(points, 2) from left and top in a tile of side 1, of values in [-1, 1]."""
    if strokes:
        x, y = values[::2], values[1::2]
    else:
        x, y = np.linspace(-1, 1, max(len(values), 2)), np.resize(values, max(len(values), 2))
    inside = (1 + np.stack([x, -np.clip(y, -1, 1)], axis=1)) / 2
    return np.asarray(_MARGIN + (1 - 2 * _MARGIN) * inside)


def _label_cluster(axes: Axes, cluster_points: np.ndarray, label: int) -> None:
    """Label a cluster with its number at the point nearest to its centre."""
    x, y = cluster_points[np.linalg.norm(cluster_points - np.median(cluster_points, axis=0), axis=1).argmin()]
    colour = CLUSTER_COLOURS[label % len(CLUSTER_COLOURS)]
    badge = {"boxstyle": "circle,pad=.25", "facecolor": "white", "edgecolor": colour, "linewidth": 1.2}
    axes.text(x, y, str(label), ha="center", va="center", fontsize=8, fontweight="bold", bbox=badge, zorder=4)
