"""A table as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.report import GROUP_COLOURS, INK, MUTED, drawing_style, save_figure

Document = Mapping[str, Any]


def draw(document: Document, path: Path) -> Path:
    """Draw ``document`` the way it asks for, into ``path``."""
    with drawing_style():
        figure = _DRAWINGS[document["plot"]](document)
    return save_figure(figure, path)


def _unit(document: Document) -> str:
    return document["score"].replace("_", " ") + (", %" if document["percent"] else "")


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
    figure.supxlabel(f"{_unit(document)}: the paper's hollow, ours full", color=MUTED, fontsize=9)
    return figure


def _lines(document: Document) -> Figure:
    """A line for every row over the columns' x, with a band of one standard deviation."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(document["rows"]):
        known = [
            (column["x"], cell["mean"], cell["std"] or 0.0)
            for column, cell in zip(document["columns"], row["cells"], strict=True)
            if cell and None not in (cell["mean"], column["x"])
        ]
        if known:
            x, mean, std = map(np.array, zip(*known, strict=True))
            colour = GROUP_COLOURS[number % len(GROUP_COLOURS)]
            axes.plot(x, mean, "o-", color=colour, label=row["name"])
            axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    _finish(axes, document["title"], _unit(document))
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
        _finish(axes, column["name"], _unit(document) if index == 0 else "", "round")
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


def _finish(axes: Axes, title: str, unit: str, below: str = "") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


_DRAWINGS = {"dots": _dots, "lines": _lines, "curves": _curves, "pictures": _pictures}
