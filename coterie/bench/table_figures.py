"""Plot the results of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.bench.table import score_name
from coterie.report.plots import GROUP_COLOURS, INK, MUTED, cycle, drawing_style, save_figure

Document = Mapping[str, Any]

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
    scores = [column["score"] for column in document["columns"]]
    first = next(score for score in scores if "@" not in score)  # of the end, not of a single round
    places = [index for index, score in enumerate(scores) if score == first]
    figure, panels = _grid(1, len(places), (4.6 * len(places), 4.0), sharey=True)
    for axes, index in zip(panels[0], places, strict=True):
        column = document["columns"][index]
        for number, row in enumerate(document["rows"]):
            _draw_curve(axes, row["cells"][index], _colour(number), row["name"])
        _finish(axes, column["setting"], _unit(column) if index == places[0] else "", "round")
    return figure


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
}
