"""Plot clustering evidence: distances, similarities, and the tree of splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.report import formats
from coterie.report.evidence import Node, Pairs, leaves
from coterie.report.plots import (
    CLUSTER_COLOURS,
    EN_SPACE,
    GROUP_COLOURS,
    INK,
    MAX_LABELS,
    MUTED,
    LineEnd,
    cycle,
    drawing_style,
    label_ends,
    panel,
    round_axis,
    without_axes,
)

MAX_CELLS = 300

# Grey marks clients that were not compared. Few shades keep the embedded images small.
_NEAR_TO_FAR = LinearSegmentedColormap.from_list("distance", ["#082a4a", GROUP_COLOURS[0], "#9fcbe6", "#f7fafc"], N=64)
_UNLIKE_TO_LIKE = LinearSegmentedColormap.from_list(
    "similarity", ["#7a3500", GROUP_COLOURS[1], "#fdfdfd", GROUP_COLOURS[0], "#003a5c"], N=65
)
_UNKNOWN = "#c3c9d2"


def distance_figure(pairs: Pairs) -> Figure:
    """Plot pairwise client distances ordered by cluster; the largest clusters are labelled."""
    pairs = pairs.ordered()
    n, values = len(pairs.clients), block_means(pairs.matrix)
    finite = values[np.isfinite(values)]
    scale = Normalize(finite.min(), finite.max()) if finite.size else Normalize(0, 1)
    with drawing_style():
        figure, axes = panel(3.4, (0.01, 0.17, 0.66, 0.8))
        _draw_matrix(axes, pairs, _NEAR_TO_FAR, scale)
        edges = [0, *pairs.borders.tolist(), n]
        ends = []
        for start, end in sorted(pairwise(edges), key=lambda edge: edge[0] - edge[1]):
            label, size = int(pairs.labels[start]), end - start
            colour = CLUSTER_COLOURS[label % len(CLUSTER_COLOURS)]
            beside = 1.012 * n
            axes.plot(
                [beside, beside], [n - start, n - end], color=colour, linewidth=5, clip_on=False, solid_capstyle="butt"
            )
            ends.append(LineEnd(n, n - (start + end) / 2, f"cluster {label}{EN_SPACE}{formats.clients(size)}", colour))
        axes.set_xlim(0, n)
        label_ends(axes, ends[:MAX_LABELS])
        _colour_bar(figure, (0.05, 0.105, 0.58, 0.035), _NEAR_TO_FAR, scale, "distance", "horizontal")
    return figure


def similarity_figures(matrices: Mapping[int, Pairs], order: Sequence[int]) -> dict[int, Figure]:
    """Plot pairwise cosine similarities of clients on one colour scale, one figure per selected round.

    Args:
        matrices: matrices by round, at least one.
        order: clients in the order of the final clusters.
    """
    with drawing_style():
        figures, panels = zip(*(panel(3.4, (0.02, 0.17, 0.96, 0.81), 3.0) for _ in matrices), strict=True)
        scale = draw_similarities(panels, [pairs.ordered(order) for pairs in matrices.values()])
        for figure in figures:
            _colour_bar(figure, (0.06, 0.105, 0.88, 0.035), _UNLIKE_TO_LIKE, scale, "cosine similarity", "horizontal")
    return dict(zip(matrices, figures, strict=True))


def draw_similarities(panels: Sequence[Axes], matrices: Sequence[Pairs]) -> Normalize:
    """Draw ordered matrices on one colour scale and return it: zero is white, missing values are grey."""
    cells = np.concatenate([np.abs(block_means(pairs.matrix)).ravel() for pairs in matrices])
    limit = float(np.max(cells[np.isfinite(cells)], initial=0)) or 1.0
    scale = Normalize(-limit, limit)
    for axes, pairs in zip(panels, matrices, strict=True):
        _draw_matrix(axes, pairs, _UNLIKE_TO_LIKE, scale)
    return scale


def similarity_bar(figure: Figure, place: tuple[float, float, float, float], scale: Normalize) -> None:
    """Draw the colour bar of :func:`draw_similarities`."""
    _colour_bar(figure, place, _UNLIKE_TO_LIKE, scale, "cosine similarity")


def tree_figure(tree: Sequence[Node], last: int) -> Figure:
    """Plot the splits over rounds: one line per cluster, with a width proportional to its clients.

    A ring marks a split, with the maximum similarity between the halves; a square marks a stationary cluster, whose
    model no longer changes.

    Args:
        tree: at least one node, in order of birth.
        last: the last round.
    """
    ends = leaves(tree)
    height = {leaf.number: float(len(ends) - 1 - index) for index, leaf in enumerate(ends)}
    for node in reversed(tree):  # children come after their parents
        if node.number not in height:
            height[node.number] = float(
                np.mean([height[child.number] for child in tree if child.parent == node.number])
            )
    total = max(len(node.clients) for node in tree)
    by_number = {node.number: node for node in tree}
    tall = min(1.1 + 0.34 * max(len(ends), 3), 12.0)
    with drawing_style():
        figure, axes = panel(tall, (0.02, 0.5 / tall, 0.62, 1 - 0.6 / tall))
        labels = []
        for node in tree:
            parent = None if node.parent is None else by_number[node.parent]
            above = None if parent is None else height[parent.number]
            begin = node.born if parent is None or parent.ended is None else parent.ended
            colour = _draw_node(axes, node, last, begin, height[node.number], above, len(node.clients) / total)
            if node.cluster is not None:
                label = f"cluster {node.cluster}{EN_SPACE}{formats.clients(len(node.clients))}"
                labels.append(LineEnd(last, height[node.number], label, colour))
        axes.set_ylim(-0.6, max(len(ends) - 1, 1) + 0.6 if len(ends) > 1 else 0.6)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        round_axis(axes, last)
        label_ends(axes, labels)
    return figure


def _draw_node(axes: Axes, node: Node, last: int, begin: float, y: float, above: float | None, share: float) -> str:
    """Draw the line of a cluster from round ``begin`` at height ``y``, below its parent; return its colour."""
    colour, style = cycle(CLUSTER_COLOURS, node.cluster) if node.cluster is not None else (MUTED, "-")
    thick = 1.5 + 6 * share
    stop = last if node.ended is None else node.ended
    if above is not None:
        axes.plot([begin, begin], [above, y], color=MUTED, linewidth=1.2, solid_capstyle="butt")
    axes.plot([begin, stop], [y, y], style, color=colour, linewidth=thick, solid_capstyle="butt")
    if node.end_reason == "split":
        axes.plot(stop, y, "o", color=INK, markerfacecolor="white", markersize=6, markeredgewidth=1.4, zorder=4)
        if node.similarity is not None:
            axes.annotate(
                f"{node.similarity:.2f}".replace("-", "−"),
                (stop, y),
                (-6, 4 + thick / 2),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=INK,
            )
    elif node.ended is not None:
        axes.plot([stop, last], [y, y], ":", color=colour, linewidth=1.4)
        axes.plot(stop, y, "s", color=INK, markersize=6, zorder=4)
    return colour


def block_means(matrix: np.ndarray, most: int = MAX_CELLS) -> np.ndarray:
    """Downsample the matrix to at most `most` cells per side: the mean of known values, NaN if there are none."""
    cells = min(len(matrix), most)
    edges = np.linspace(0, len(matrix), cells + 1).astype(int)[:-1]
    finite = np.isfinite(matrix)

    def sums(values: np.ndarray) -> np.ndarray:
        rows: np.ndarray = np.add.reduceat(values, edges, axis=0)
        return np.asarray(np.add.reduceat(rows, edges, axis=1), dtype=np.float64)

    counts = sums(finite.astype(np.float64))
    means: np.ndarray = np.full_like(counts, np.nan)
    np.divide(sums(np.where(finite, matrix, 0.0)), counts, out=means, where=counts > 0)
    return means


def _draw_matrix(axes: Axes, pairs: Pairs, colours: Colormap, scale: Normalize) -> None:
    n = len(pairs.clients)
    axes.set_facecolor(_UNKNOWN)
    axes.imshow(
        block_means(pairs.matrix), cmap=colours, norm=scale, extent=(0, n, 0, n), interpolation="none", zorder=1
    )
    for border in pairs.borders:
        axes.axvline(border, color=INK, linewidth=0.7)
        axes.axhline(n - border, color=INK, linewidth=0.7)
    without_axes(axes)


def _colour_bar(
    figure: Figure,
    rect: tuple[float, float, float, float],
    colours: Colormap,
    scale: Normalize,
    name: str,
    orientation: Literal["vertical", "horizontal"] = "vertical",
) -> None:
    axes = figure.add_axes(rect)
    bar = figure.colorbar(ScalarMappable(scale, colours), cax=axes, ticks=MaxNLocator(5), orientation=orientation)
    bar.outline.set_visible(False)
    axes.grid(False)
    axes.tick_params(length=0)
    if orientation == "horizontal":
        axes.set_xlabel(name)
    else:
        axes.set_title(name, fontsize=9, fontweight="normal", color=MUTED, loc="center", pad=8)
