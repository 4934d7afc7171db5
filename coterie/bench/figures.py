"""A table as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.bench.table import score_name
from coterie.report import GROUP_COLOURS, INK, MUTED, drawing_style, save_figure

Document = Mapping[str, Any]


def draw(document: Document, path: Path) -> Path:
    """Draw ``document`` the way it asks for, into ``path``."""
    with drawing_style():
        figure = _DRAWINGS[document["plot"]](document)
    return save_figure(figure, path)


def _unit(column: Mapping[str, Any]) -> str:
    return score_name(column["score"]) + (", %" if column["percent"] else "")


def _dots(document: Document) -> Figure:
    """A panel for every column: the paper's figure hollow, ours full with its standard deviation."""
    columns, rows = document["columns"], document["rows"]
    wide = min(len(columns), 3)
    deep = -(-len(columns) // wide)
    figure = Figure(figsize=(3.0 * wide + 2.2, (0.24 * len(rows) + 0.75) * deep + 0.5), layout="constrained")
    panels = figure.subplots(deep, wide, sharey=True, squeeze=False)
    places = np.arange(len(rows))[::-1]
    for panel in panels.flat[len(columns) :]:
        panel.set_axis_off()
    for index, (axes, column) in enumerate(zip(panels.flat, columns, strict=False)):
        axes.set_title(column["name"], fontsize=9)
        for place, row in zip(places, rows, strict=True):
            cell = row["cells"][index]
            if cell is None:
                continue
            if cell["paper"] is not None:
                axes.plot(cell["paper"], place, "o", markerfacecolor="none", markeredgecolor=MUTED)
            if cell["mean"] is not None:
                axes.errorbar(cell["mean"], place, xerr=cell["std"] or 0.0, fmt="o", color=GROUP_COLOURS[0], capsize=2)
        axes.set_yticks(places, [row["name"] for row in rows])
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.set_ylim(-0.7, len(rows) - 0.3)
    figure.supxlabel(f"{_unit(columns[0])}: the paper's hollow, ours full", color=MUTED, fontsize=9)
    return figure


def _lines(document: Document) -> Figure:
    """A panel for every score: a line for every row over the columns' x, with a band of one standard deviation."""
    columns = document["columns"]
    scores = list(dict.fromkeys(column["score"] for column in columns))
    wide = min(len(scores), 3)
    deep = -(-len(scores) // wide)
    size = (7.5, 4.2) if len(scores) == 1 else (3.9 * wide, 3.2 * deep)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(deep, wide, squeeze=False).flat
    for axes, score in zip(panels, scores, strict=False):
        places = [place for place, column in enumerate(columns) if column["score"] == score]
        for number, row in enumerate(document["rows"]):
            cells = [(columns[place]["x"], row["cells"][place]) for place in places]
            known = [(x, c["mean"], c["std"] or 0.0) for x, c in cells if c and None not in (c["mean"], x)]
            if known:
                x, mean, std = map(np.array, zip(*known, strict=True))
                colour = GROUP_COLOURS[number % len(GROUP_COLOURS)]
                axes.plot(x, mean, "o-", color=colour, label=row["name"], markersize=4)
                axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        _finish(axes, document["title"] if len(scores) == 1 else "", _unit(columns[places[0]]), document["axis"])
        if len(scores) > 1 and score != scores[0]:
            axes.get_legend().remove()
    for axes in panels:
        axes.set_axis_off()
    return figure


def _curves(document: Document) -> Figure:
    """A panel for every column, a line for every row: the score over rounds, mean over seeds."""
    columns = document["columns"]
    figure = Figure(figsize=(4.6 * len(columns), 4.0), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for index, (axes, column) in enumerate(zip(panels, columns, strict=True)):
        for number, row in enumerate(document["rows"]):
            curve = (row["cells"][index] or {}).get("curve")
            if curve:
                rounds, values = zip(*curve, strict=True)
                axes.plot(rounds, values, color=GROUP_COLOURS[number % len(GROUP_COLOURS)], label=row["name"])
        _finish(axes, column["name"], _unit(column) if index == 0 else "", "round")
    return figure


def _pictures(document: Document) -> Figure:
    """The data of every column, and the lines that every row fitted."""
    columns, rows = document["columns"], document["rows"]
    figure = Figure(figsize=(2.6 * len(rows), 2.2 * len(columns)), layout="constrained")
    panels = figure.subplots(len(columns), len(rows), sharex=True, sharey=True, squeeze=False)
    for down, column in enumerate(columns):
        groups, x, y = map(np.array, column["points"])
        for across, row in enumerate(rows):
            axes, cell = panels[down, across], row["cells"][down]
            for group in np.unique(groups):
                own, colour = groups == group, GROUP_COLOURS[int(group) % len(GROUP_COLOURS)]
                axes.plot(x[own], y[own], ".", color=colour, markersize=3, alpha=0.5)
            ends = np.array([-1.0, 1.0])
            for slope, intercept in (cell or {}).get("lines", ()):
                axes.plot(ends, slope * ends + intercept, "--", color="black", linewidth=1.6)
            if down == 0:
                axes.set_title(row["name"], fontsize=9)
            if across == 0:
                axes.set_ylabel(column["name"], fontsize=8, color=INK)
    return figure


def _groups(document: Document) -> Figure:
    """For every setting: accuracy of every group, F_acc, and the share of clients in the right cluster over rounds."""
    columns, rows = document["columns"], document["rows"]
    settings = list(dict.fromkeys(column["setting"] for column in columns))
    figure = Figure(figsize=(11.0, 3.2 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), 3, squeeze=False, width_ratios=[2, 1, 1.6])
    for (bars, unfair, curves), setting in zip(panels, settings, strict=True):
        at = {column["score"]: place for place, column in enumerate(columns) if column["setting"] == setting}
        for number, row in enumerate(rows):
            colour = GROUP_COLOURS[number % len(GROUP_COLOURS)]
            cells = {score: row["cells"][place] or {} for score, place in at.items()}
            if "groups" in cells["accuracy"]:
                mean, spread = map(np.array, cells["accuracy"]["groups"])
                x = np.arange(len(mean)) + (number - (len(rows) - 1) / 2) * 0.8 / len(rows)
                bars.bar(x, mean, 0.75 / len(rows), yerr=spread, color=colour, label=row["name"], capsize=1.5)
                bars.set_xticks(np.arange(len(mean)), [f"C{group + 1}" for group in range(len(mean))])
            if cells["f_acc"].get("mean") is not None:
                unfair.bar(number, cells["f_acc"]["mean"], 0.7, yerr=cells["f_acc"]["std"] or 0.0, color=colour)
            if cells["clustering_accuracy"].get("curve"):
                rounds, values = zip(*cells["clustering_accuracy"]["curve"], strict=True)
                curves.plot(rounds, values, color=colour)
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
    """For every setting and row: the first seed's first updates in the plane, coloured by group, marked by cluster."""
    columns, rows = document["columns"], document["rows"]
    places = [place for place, column in enumerate(columns) if column["score"] == columns[0]["score"]]
    figure = Figure(figsize=(3.8 * len(rows), 3.4 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), len(rows), squeeze=False)
    marks = "os^DvPX*<>"
    for down, place in enumerate(places):
        scores = {
            column["score"]: i for i, column in enumerate(columns) if column["setting"] == columns[place]["setting"]
        }
        for across, row in enumerate(rows):
            axes, cell = panels[down, across], row["cells"][place] or {}
            points = np.array(cell.get("projection", np.zeros((0, 2))))
            for (x, y), label, group in zip(points, cell.get("labels", ()), cell.get("groups", ()), strict=True):
                colour = GROUP_COLOURS[group % len(GROUP_COLOURS)]
                axes.plot(x, y, marks[label % len(marks)], color=colour, markersize=6, alpha=0.8)
            figures = [f"{score_name(s)} {row['cells'][i]['mean']:.1f}" for s, i in scores.items() if row["cells"][i]]
            axes.set_title(f"{row['name']}, {columns[place]['setting']}\n{', '.join(figures)}", fontsize=8)
            axes.set_xticklabels([])
            axes.set_yticklabels([])
    figure.supxlabel("colours are true groups, marks are clusters found", color=MUTED, fontsize=8)
    return figure


def _surfaces(document: Document) -> Figure:
    """The noise of round 1 and of a later round over both batch sizes, and z."""
    figure = Figure(figsize=(12.0, 3.6), layout="constrained")
    panels = figure.subplots(1, len(document["surfaces"]))
    for axes, surface in zip(panels, document["surfaces"], strict=True):
        values = np.array(surface["values"])
        picture = axes.imshow(values, origin="lower", cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(surface["x"])), surface["x"], rotation=60, fontsize=7)
        axes.set_yticks(range(len(surface["y"])), surface["y"], fontsize=7)
        axes.set_title(surface["title"], fontsize=9)
        axes.set_xlabel("batch size of later rounds")
        axes.grid(False)
        figure.colorbar(picture, ax=axes)
    panels[0].set_ylabel("batch size of round 1")
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
    "surfaces": _surfaces,
}
