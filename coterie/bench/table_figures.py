"""Plot the results of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.bench.table import score_name
from coterie.report.plots import DASHED, GROUP_COLOURS, INK, MUTED, cycle, drawing_style, save_figure

Document = Mapping[str, Any]

_ACROSS = 5
# Grey marks clients that were not compared.
_UNKNOWN = "#c3c9d2"
_UNLIKE_TO_LIKE = LinearSegmentedColormap.from_list(
    "similarity", ["#7a3500", GROUP_COLOURS[1], "#fdfdfd", GROUP_COLOURS[0], "#003a5c"], N=65
)
# Rows whose names have room inside a panel.
_IN_PANEL = 6
# Of rows: no table has more that share a panel.
_COLOURS = (*GROUP_COLOURS, INK, "#999999", "#882255", "#B8A032")


def draw(document: Document, path: Path) -> Path:
    """Plot ``document`` in its configured style and save it to ``path``."""
    with drawing_style():
        figure = _DRAWINGS[document["plot"]](document)
    return save_figure(figure, path)


def _unit(column: Mapping[str, Any]) -> str:
    return score_name(column["score"]) + (", %" if column["percent"] else "")


def _dots(document: Document) -> Figure:
    """Plot one panel per column: published values hollow, ours filled with the standard deviation."""
    columns, rows = document["columns"], document["rows"]
    wide = next((wide for wide in (3, 5) if len(columns) % wide == 0), min(len(columns), 3))
    deep = -(-len(columns) // wide)
    size = (3.0 * wide + 2.2, (0.24 * len(rows) + 0.75) * deep + 0.5)
    figure, panels = _grid(deep, wide, size, sharey=True)
    places = np.arange(len(rows))[::-1]
    for panel in panels.flat[len(columns) :]:
        panel.set_axis_off()
    for index, (axes, column) in enumerate(zip(panels.flat, columns, strict=False)):
        axes.set_title(column["name"], fontsize=9)
        for y, row in zip(places, rows, strict=True):
            cell = row["cells"][index]
            if cell is None:
                continue
            if cell["paper"] is not None:
                axes.plot(cell["paper"], y, "o", markerfacecolor="none", markeredgecolor=MUTED)
            if cell["mean"] is not None:
                axes.errorbar(cell["mean"], y, xerr=cell["std"] or 0.0, fmt="o", color=GROUP_COLOURS[0], capsize=2)
        axes.set_yticks(places, [row["name"] for row in rows])
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.set_ylim(-0.7, len(rows) - 0.3)
    published = any(cell and cell["paper"] is not None for row in rows for cell in row["cells"])
    label = _unit(columns[0]) + (": the paper's hollow, ours full" if published else "")
    figure.supxlabel(label, color=MUTED, fontsize=9)
    return figure


def _lines(document: Document) -> Figure:
    """Plot one panel per score and column panel: one line per row over x, with a band of one standard deviation."""
    columns = document["columns"]
    keys = [(column["score"], column.get("panel", "")) for column in columns]
    scores, across = (list(dict.fromkeys(values)) for values in zip(*keys, strict=True))
    drawn = [(score, panel) for score in scores for panel in across if (score, panel) in keys]
    many, wide = len(drawn), min(len(across) if len(across) > 1 else len(scores), 3)
    deep = -(-many // wide)
    size = (7.5, 4.2) if many == 1 else (3.9 * wide, 3.2 * deep)
    figure, grid = _grid(deep, wide, size)
    panels = grid.flat
    for axes, key in zip(panels, drawn, strict=False):
        places = [index for index, column_key in enumerate(keys) if column_key == key]
        for number, row in enumerate(document["rows"]):
            cells = [(columns[index]["x"], row["cells"][index]) for index in places]
            points = [(x, c["mean"], c["std"] or 0.0) for x, c in cells if c and None not in (c["mean"], x)]
            if points:
                _draw_band(axes, points, _colour(number), label=row["name"], marker="o", markersize=4)
        _finish(axes, document["title"] if many == 1 else key[1], _unit(columns[places[0]]), document["axis"])
        if axes.get_legend() and (key != drawn[0] or len(document["rows"]) > _IN_PANEL):
            axes.get_legend().remove()
    for axes in panels:
        axes.set_axis_off()
    if len(document["rows"]) > _IN_PANEL:
        names = grid[0, 0].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower center", ncols=_IN_PANEL, frameon=False, fontsize=8)
    return figure


def _curves(document: Document) -> Figure:
    """Plot one panel per setting and one line per row: the score over rounds, mean and deviation over seeds."""
    places = _over_rounds(document)
    figure, panels = _grid(1, len(places), (4.6 * len(places), 4.0), sharey=True)
    for axes, index in zip(panels[0], places, strict=True):
        column = document["columns"][index]
        for number, row in enumerate(document["rows"]):
            _draw_curve(axes, row["cells"][index], _colour(number), row["name"])
        _finish(axes, column["setting"], _unit(column) if index == places[0] else "", "round")
    return figure


def _over_rounds(document: Document) -> list[int]:
    """Return the columns of the first score that does not refer to a single round."""
    scores = [column["score"] for column in document["columns"]]
    first = next(score for score in scores if "@" not in score)
    return [index for index, score in enumerate(scores) if score == first]


def _draw_curve(axes: Axes, cell: Mapping[str, Any] | None, colour: str, name: str | None = None) -> None:
    """Draw the mean over seeds as a line, and one standard deviation, if known, as a band."""
    if cell and cell.get("curve"):
        _draw_band(axes, cell["curve"], colour, label=name)


def _draw_band(axes: Axes, points: Sequence[Sequence[float]], colour: str, **look: Any) -> None:
    """Draw a line of (x, mean), with a band where there is a third value, the standard deviation."""
    x, mean, *spread = map(np.array, zip(*points, strict=True))
    axes.plot(x, mean, color=colour, **look)
    for std in spread:
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def _draw_splits(axes: Axes, rounds: Sequence[int]) -> None:
    for number in rounds:
        axes.axvline(number, color=MUTED, linestyle=DASHED, linewidth=0.9, zorder=1.5)


def _grid(deep: int, wide: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(deep, wide, squeeze=False, **options)


def _colour(index: int) -> str:
    return cycle(_COLOURS, index)[0]


def _pictures(document: Document) -> Figure:
    """Plot the data of every column and the fitted lines of every row."""
    columns, rows = document["columns"], document["rows"]
    size = (2.6 * len(rows), 2.2 * len(columns))
    figure, panels = _grid(len(columns), len(rows), size, sharex=True, sharey=True)
    for down, column in enumerate(columns):
        groups, x, y = map(np.array, column["points"])
        for across, row in enumerate(rows):
            axes, cell = panels[down, across], row["cells"][down]
            for group in np.unique(groups):
                members, colour = groups == group, _colour(int(group))
                axes.plot(x[members], y[members], ".", color=colour, markersize=3, alpha=0.5)
            ends = np.array([-1.0, 1.0])
            for slope, intercept in (cell or {}).get("lines", ()):
                axes.plot(ends, slope * ends + intercept, "--", color="black", linewidth=1.6)
            if down == 0:
                axes.set_title(row["name"], fontsize=9)
            if across == 0:
                axes.set_ylabel(column["name"], fontsize=8, color=INK)
    return figure


def _groups(document: Document) -> Figure:
    """Plot, per setting: accuracy of every group, F_acc, and the share of correctly clustered clients over rounds."""
    columns, rows = document["columns"], document["rows"]
    settings = list(dict.fromkeys(column["setting"] for column in columns))
    figure, panels = _grid(len(settings), 3, (11.0, 3.2 * len(settings)), width_ratios=[2, 1, 1.6])
    for (bars, unfair, curves), setting in zip(panels, settings, strict=True):
        at = {column["score"]: index for index, column in enumerate(columns) if column["setting"] == setting}
        for number, row in enumerate(rows):
            colour = _colour(number)
            cells = {score: row["cells"][index] or {} for score, index in at.items()}
            if "groups" in cells["accuracy"]:
                mean, spread = map(np.array, cells["accuracy"]["groups"])
                x = np.arange(len(mean)) + (number - (len(rows) - 1) / 2) * 0.8 / len(rows)
                bars.bar(x, mean, 0.75 / len(rows), yerr=spread, color=colour, label=row["name"], capsize=1.5)
                bars.set_xticks(np.arange(len(mean)), [f"C{group + 1}" for group in range(len(mean))])
            if cells["f_acc"].get("mean") is not None:
                unfair.bar(number, cells["f_acc"]["mean"], 0.7, yerr=cells["f_acc"]["std"] or 0.0, color=colour)
            _draw_curve(curves, cells["clustering_accuracy"], colour)
        bars.set_title(setting, fontsize=9)
        bars.set_ylabel("accuracy, %")
        unfair.set_xticks([])
        unfair.set_ylabel("F_acc, points")
        curves.set_ylabel("clients in the right cluster, %")
        curves.set_xlabel("round")
        curves.set_ylim(0, 105)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(rows), frameon=False, fontsize=8)
    return figure


def _projections(document: Document) -> Figure:
    """Plot, per setting and row: projected first updates of the first seed, coloured by group, marked by cluster."""
    columns, rows = document["columns"], document["rows"]
    places = [index for index, column in enumerate(columns) if column["score"] == columns[0]["score"]]
    figure, panels = _grid(len(places), len(rows), (3.8 * len(rows), 3.4 * len(places)))
    marks = "os^DvPX*<>"
    for down, index in enumerate(places):
        scores = {
            column["score"]: i for i, column in enumerate(columns) if column["setting"] == columns[index]["setting"]
        }
        for across, row in enumerate(rows):
            axes, cell = panels[down, across], row["cells"][index] or {}
            points = np.array(cell.get("projection", np.zeros((0, 2))))
            for (x, y), label, group in zip(points, cell.get("labels", ()), cell.get("groups", ()), strict=True):
                colour = _colour(group)
                axes.plot(x, y, marks[label % len(marks)], color=colour, markersize=6, alpha=0.8)
            figures = [f"{score_name(s)} {row['cells'][i]['mean']:.1f}" for s, i in scores.items() if row["cells"][i]]
            axes.set_title(f"{row['name']}, {columns[index]['setting']}\n{', '.join(figures)}", fontsize=8)
            axes.set_xticklabels([])
            axes.set_yticklabels([])
    figure.supxlabel("colours are true groups, marks are clusters found", color=MUTED, fontsize=8)
    return figure


def _splits(document: Document) -> Figure:
    """Plot accuracy over rounds with splits marked, similarities over rounds, and similarity matrices at splits."""
    index = _over_rounds(document)[0]
    cells = {row["name"]: row["cells"][index] or {} for row in document["rows"]}
    split = next((name for name, cell in cells.items() if cell.get("similarities")), None)
    shown = _at_splits(cells[split]) if split else {}
    deep = -(-len(shown) // _ACROSS)
    tall = 4.2 + 1.85 * deep
    figure = Figure(figsize=(11.0, tall))
    rows = figure.add_gridspec(2, 1, height_ratios=[3.3, 1.85 * deep or 0.01], top=1 - 0.4 / tall, bottom=0.1 / tall)
    rows.update(left=0.06, right=0.985, hspace=0.9 / (tall - 0.5) * 2)
    halves = rows[0].subgridspec(1, 2, wspace=0.14)
    left, right = figure.add_subplot(halves[0]), figure.add_subplot(halves[1])
    for number, (name, cell) in enumerate(cells.items()):
        colour = _colour(number)
        _draw_curve(left, cell, colour, name)
        if cell.get("by group"):
            rounds, *groups = zip(*cell["by group"], strict=True)
            for group, shares in enumerate(groups):
                label = f"{name}: every true group, seed {cell['seed']}" if group == 0 else None
                left.plot(rounds, np.array(shares, float), color=colour, linewidth=0.8, alpha=0.6, label=label)
        _draw_splits(left, cell.get("splits", ()))
    _finish(left, document["title"], _unit(document["columns"][index]), "round")
    if split is None:
        right.set_axis_off()
        return figure
    _draw_similarities_over_rounds(right, cells[split])
    _finish(
        right, f"{split}, seed {cells[split]['seed']}: similarity of every two clients", "cosine similarity", "round"
    )
    grid = rows[1].subgridspec(deep, _ACROSS + 1, wspace=0.08, hspace=0.25)
    panels = [figure.add_subplot(grid[i // _ACROSS, i % _ACROSS]) for i in range(len(shown))]
    limit = float(np.nanmax(np.abs(list(shown.values())), initial=0)) or 1.0
    scale = Normalize(-limit, limit)  # zero is white
    of_clients = np.array(cells[split]["groups"])
    many = len(of_clients)
    for axes, (number, matrix) in zip(panels, shown.items(), strict=True):
        axes.set_facecolor(_UNKNOWN)
        axes.imshow(matrix, cmap=_UNLIKE_TO_LIKE, norm=scale, extent=(0, many, 0, many), interpolation="none", zorder=1)
        for border in (np.flatnonzero(np.diff(of_clients)) + 1).tolist():
            axes.axvline(border, color=INK, linewidth=0.7)
            axes.axhline(many - border, color=INK, linewidth=0.7)
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title(f"round {number}", fontsize=9, fontweight="normal", pad=4)
    beside = panels[0].get_position()
    bar_axes = figure.add_axes((0.88, beside.y0, 0.011, 0.85 * beside.height))
    bar = figure.colorbar(ScalarMappable(scale, _UNLIKE_TO_LIKE), cax=bar_axes, ticks=MaxNLocator(5))
    bar.outline.set_visible(False)
    bar_axes.grid(False)
    bar_axes.tick_params(length=0)
    bar_axes.set_title("cosine similarity", fontsize=9, fontweight="normal", color=MUTED, loc="center", pad=8)
    return figure


def _at_splits(cell: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """Return a selection of the matrices at splits and the last one, with clients ordered by true group."""
    last = cell["similarities"][-1]["round"]
    wanted = [matrix for matrix in cell["similarities"] if matrix["round"] in cell["splits"] or matrix["round"] == last]
    wanted = wanted if len(wanted) <= 2 * _ACROSS else [*wanted[: 2 * _ACROSS - 1], wanted[-1]]
    return {matrix["round"]: _square(matrix["values"]) for matrix in wanted}


def _square(triangle: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Return the symmetric matrix of a lower triangle; NaN on the diagonal and for missing values."""
    matrix = np.full((len(triangle) + 1,) * 2, np.nan)
    for row, values in enumerate(triangle, 1):
        matrix[row, :row] = matrix[:row, row] = np.array(values, float)
    return matrix


def _draw_similarities_over_rounds(axes: Axes, cell: Mapping[str, Any]) -> None:
    """Draw one dot per pair of clients in the same cluster."""
    groups = np.array(cell["groups"])
    first, second = np.tril_indices(len(groups), -1)
    same = groups[first] == groups[second]
    rounds = [matrix["round"] for matrix in cell["similarities"]]
    values = np.array([_square(matrix["values"])[first, second] for matrix in cell["similarities"]])
    for of, colour, name in (
        (~same, GROUP_COLOURS[1], "of different groups"),
        (same, GROUP_COLOURS[0], "of one group"),
    ):
        x = np.repeat(rounds, of.sum())
        axes.plot(x, values[:, of].ravel(), "o", color=colour, markersize=3.5, alpha=0.5, markeredgewidth=0, label=name)
    _draw_splits(axes, cell["splits"])


def _finish(axes: Axes, title: str, unit: str, below: str = "") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


_DRAWINGS = {
    "dots": _dots,
    "lines": _lines,
    "curves": _curves,
    "pictures": _pictures,
    "groups": _groups,
    "projections": _projections,
    "splits": _splits,
}
