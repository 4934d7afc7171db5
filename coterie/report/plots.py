"""Plot a run: accuracy, privacy spent, cluster sizes, and comparisons of several runs.

Figures are created without pyplot, so there is no global state and no display is needed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.optimize import isotonic_regression

from coterie.report import formats
from coterie.report.runs import ReportError, Run

# Colour-blind safe palettes, distinct for groups and clusters.
GROUP_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
CLUSTER_COLOURS = (
    *("#332288", "#CC6677", "#44AA99", "#B8A032", "#882255", "#117733", "#88CCEE", "#AA4499"),  # Tol
    *("#6B7480", "#E07B39"),  # ten digits have ten colours
)
INK, MUTED, GRID = "#1b2330", "#5c6675", "#e6e9ee"
LINE_STYLES = ("-", "--", "-.", ":")
MAX_LABELS = 10
EN_SPACE = "\u2002"  # an en space, which SVG does not collapse
SMOOTHING = 10

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": "#aab2bf",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#aab2bf",
    "ytick.color": "#aab2bf",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.solid_capstyle": "round",
}


def accuracy_figure(run: Run) -> Figure:
    """Plot mean accuracy and one thin line per group over rounds, and below it the ε spent on the same x axis.

    A run without privacy has no second panel. The first panel states if the run was never evaluated.
    """
    with drawing_style():
        figure = Figure(figsize=(9.0, 4.3 if run.accounted else 3.3), facecolor="white")
        _draw_accuracy(figure, run, left=0.075, right=0.84, bottom=0.115, top=0.97)
    return figure


def cluster_figure(run: Run) -> Figure:
    """Plot the released noisy size of every cluster over rounds (faint) and its running mean (bold).

    An arrow points from the copied model to the starving model that it replaced.
    """
    with drawing_style():
        figure = Figure(figsize=(9.0, 3.3), facecolor="white")
        _draw_clusters(figure.add_axes((0.075, 0.15, 0.765, 0.81)), run)
    return figure


def comparison_figure(runs: Sequence[Run]) -> Figure:
    """Plot the mean accuracy of several runs; line n is labelled n, counting from 1 in the given order."""
    with drawing_style():
        figure = Figure(figsize=(9.0, 3.6), facecolor="white")
        axes = figure.add_axes((0.075, 0.135, 0.87, 0.83))
        ends: list[LineEnd] = []
        shown: list[float] = []
        for index, run in enumerate(runs):
            rounds, accuracy = _accuracy(run)
            shown += accuracy
            if rounds:
                colour, style = run_style(index)
                axes.plot(rounds, accuracy, style, color=colour, linewidth=1.9, marker=_marker(rounds), markersize=3)
                ends.append(LineEnd(rounds[-1], accuracy[-1], str(index + 1), colour, bold=True))
        _finish_accuracy(axes, shown, max((r.number for run in runs for r in run.rounds), default=1))
        axes.set_xlabel("round")
        label_ends(axes, ends)
    return figure


def save_png(run: Run, path: Path | str) -> Path:
    """Save accuracy (with ε below) and cluster sizes side by side as a PNG; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawing_style():
        figure = Figure(figsize=(14.0, 4.6), facecolor="white")
        accuracy = _draw_accuracy(figure, run, left=0.05, right=0.42, bottom=0.115, top=0.9)
        accuracy.set_title("Noisy mean accuracy" if run.noisy else "Accuracy")
        clusters = figure.add_axes((0.55, 0.115, 0.365, 0.785))
        _draw_clusters(clusters, run)
        clusters.set_title("Released cluster sizes")
        figure.savefig(path, dpi=150, format="png", metadata={"Software": None})
    return path


def privacy_figure(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Plot ε against rounds, one line per accountant, labelled at its end with the final ε.

    Args:
        curves: (rounds, ε) in the order of rounds, by accountant; every ε is finite.
        title: one-line title.
    """
    with drawing_style():
        figure = Figure(figsize=(9.0, 4.6), facecolor="white")
        axes = figure.add_axes((0.07, 0.115, 0.685, 0.77))
        ends: list[LineEnd] = []
        for index, (name, points) in enumerate(curves.items()):
            rounds, values = zip(*points, strict=True)
            colour, style = run_style(index)
            axes.plot(rounds, values, style, color=colour, linewidth=1.9, marker=_marker(rounds), markersize=3)
            ends.append(LineEnd(rounds[-1], values[-1], f"{name}{EN_SPACE}{formats.epsilon(values[-1])}", colour))
        axes.set_xlim(0, max(end.round for end in ends))
        axes.set_ylim(0, 1.06 * max(end.value for end in ends))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.set_xlabel("rounds")
        axes.set_ylabel("privacy loss ε")
        axes.set_title("Privacy loss by accountant", pad=24)
        axes.annotate(title, (0, 1), (0, 9), "axes fraction", "offset points", color=MUTED)
        label_ends(axes, ends)
    return figure


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Save a figure in the format given by the suffix; return its path.

    Raises:
        ReportError: the format is not supported, or the file cannot be written.
    """
    path = Path(path)
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    if path.suffix.lower() not in dates:
        raise ReportError(f"{path}: unsupported image format; use {', '.join(dates)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with drawing_style(), matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata=dates[path.suffix.lower()])
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from None
    return path


class LineEnd(NamedTuple):
    """End point and label of a line."""

    round: int
    value: float
    label: str
    colour: str
    bold: bool = False


def run_style(index: int) -> tuple[str, str]:
    """Colour and line style of the run at `index`, counted from 0, in a comparison."""
    return cycle(GROUP_COLOURS, index)


@contextmanager
def drawing_style() -> Iterator[None]:
    """Apply the style of all figures."""
    with matplotlib.rc_context(_STYLE):
        yield


def cycle(colours: Sequence[str], index: int) -> tuple[str, str]:
    """Return colour and line style of line ``index``; line styles change when all colours are used."""
    return colours[index % len(colours)], LINE_STYLES[index // len(colours) % len(LINE_STYLES)]


def _accuracy(run: Run) -> tuple[list[int], list[float]]:
    evaluated = [(r.number, r.accuracy) for r in run.rounds if r.accuracy is not None]
    return [number for number, _ in evaluated], [accuracy for _, accuracy in evaluated]


def _marker(rounds: Sequence[int]) -> str:
    """Return the marker: points if there are few, so that a run evaluated once is visible."""
    return "o" if len(rounds) <= 12 else ""


def _draw_accuracy(figure: Figure, run: Run, left: float, right: float, bottom: float, top: float) -> Axes:
    private = run.accounted
    grid = figure.add_gridspec(
        2 if private else 1,
        1,
        height_ratios=[3.2, 1] if private else None,
        hspace=0.13,
        left=left,
        right=right,
        bottom=bottom,
        top=top,
    )
    axes: Axes = figure.add_subplot(grid[0])
    rounds, accuracy = _accuracy(run)
    evaluated = [r for r in run.rounds if r.group_accuracy is not None]
    groups = np.array(_rectangle([r.group_accuracy or () for r in evaluated]))  # rounds × groups
    ends: list[LineEnd] = []
    for group in range(groups.shape[1]):
        colour, style = cycle(GROUP_COLOURS, group)
        numbers = [r.number for r in evaluated]
        axes.plot(numbers, groups[:, group], style, color=colour, linewidth=1.1, alpha=0.9)
        if math.isfinite(groups[-1, group]):
            label = f"group {group}{EN_SPACE}{formats.percent(groups[-1, group])}"
            ends.append(LineEnd(numbers[-1], float(groups[-1, group]), label, colour))
    if len(ends) > MAX_LABELS:
        ends = []
    if rounds:
        axes.plot(rounds, accuracy, color=INK, linewidth=2.4, marker=_marker(rounds), markersize=4)
        ends.append(LineEnd(rounds[-1], accuracy[-1], f"mean{EN_SPACE}{formats.percent(accuracy[-1])}", INK, bold=True))
    _finish_accuracy(axes, [*accuracy, *groups.ravel().tolist()], max((r.number for r in run.rounds), default=1))
    if run.noisy and rounds:
        axes.set_ylabel("noisy mean accuracy")
    label_ends(axes, ends)
    lowest = axes
    if private:
        lowest = figure.add_subplot(grid[1], sharex=axes)
        axes.tick_params(labelbottom=False)
        _draw_epsilon(lowest, run)
    lowest.set_xlabel("round")
    return axes


def _draw_epsilon(axes: Axes, run: Run) -> None:
    spent = [(r.number, r.epsilon) for r in run.rounds if math.isfinite(r.epsilon)]
    numbers, values = zip(*spent, strict=True)
    axes.plot(numbers, values, color=INK, linewidth=1.6)
    axes.fill_between(numbers, values, color=INK, alpha=0.07, linewidth=0)
    budget = run.certificate.get("epsilon_budget", run.config.get("epsilon"))
    if isinstance(budget, int | float) and math.isfinite(budget):
        axes.axhline(budget, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"budget ε = {formats.number(budget)}",
            (0, budget),
            (2, -3),
            color=MUTED,
            fontsize=8,
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="top",
        )
        values = (*values, budget)
    axes.set_ylim(0, 1.15 * max(values) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.set_ylabel("ε spent")
    last, total = spent[-1]
    label_ends(axes, [LineEnd(last, total, f"ε = {formats.epsilon(total)}", INK, bold=True)])


def _draw_clusters(axes: Axes, run: Run) -> None:
    released = [r for r in run.rounds if r.histogram is not None]
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not released:
        _show_message(axes, "This run released no cluster sizes.")
        return
    numbers = np.array([r.number for r in released])
    sizes = np.array(_rectangle([r.histogram or () for r in released]))  # rounds × clusters
    means = np.full_like(sizes, math.nan)
    ends: list[LineEnd] = []
    for cluster, seen in enumerate(sizes.T):
        colour, style = cycle(CLUSTER_COLOURS, cluster)
        axes.plot(numbers, seen, ".", color=colour, markersize=5, alpha=0.4, markeredgewidth=0)
        changed = [r.number for r in run.rounds if any(cluster in pair for pair in r.reseeded)]
        # Break a line where its model was replaced: the following sizes belong to another model.
        for part in np.split(np.arange(len(numbers)), np.searchsorted(numbers, changed, side="right")):
            means[part, cluster] = _running_mean(seen[part])
            axes.plot(numbers[part], means[part, cluster], style, color=colour, linewidth=2.0)
        if math.isfinite(means[-1, cluster]):
            ends.append(LineEnd(int(numbers[-1]), float(means[-1, cluster]), f"cluster {cluster}", colour))
    for r in released:
        row = means[np.searchsorted(numbers, r.number)]
        for source, target in r.reseeded:
            if max(source, target) < len(row):
                arrow = {"arrowstyle": "-|>,head_width=.2,head_length=.4", "color": INK, "linewidth": 1.0}
                axes.annotate(
                    "",
                    (r.number, row[target]),
                    (r.number, row[source]),
                    arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0},
                    zorder=4,
                )
    axes.axhline(0, color="#aab2bf", linewidth=0.8)
    axes.set_ylabel("clients in a round")
    axes.set_xlim(0, 1.01 * numbers[-1])
    label_ends(axes, ends if len(ends) <= MAX_LABELS else [])


def _running_mean(sizes: np.ndarray) -> np.ndarray:
    """Return the mean of each size and up to SMOOTHING - 1 previous ones, ignoring NaN."""
    windows = [sizes[max(0, end - SMOOTHING) : end] for end in range(1, len(sizes) + 1)]
    return np.array([w[np.isfinite(w)].mean() if np.isfinite(w).any() else math.nan for w in windows])


def _rectangle(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Pad rows with NaN to the longest: the number of clusters may grow over rounds."""
    width = max(map(len, rows), default=0)
    return [[*row, *[math.nan] * (width - len(row))] for row in rows] or [[]]


def _finish_accuracy(axes: Axes, values: Sequence[float], last: int) -> None:
    finite = [value for value in values if math.isfinite(value)]
    axes.set_ylabel("accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not finite:
        _show_message(axes, "No round was evaluated.")
        return
    margin = 0.06 * max(max(finite) - min(finite), 0.1)
    axes.set_ylim(max(0.0, min(finite) - margin), min(1.005, max(finite) + margin))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlim(0, 1.01 * last)


def label_ends(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Draw the label of each line to the right of the axes, moved as little as possible to avoid overlap.

    The label of a line that ends inside the axes is at its end point.
    """
    last = max((end.round for end in ends), default=0)
    for end in ends:
        if end.round < last:
            axes.annotate(
                end.label,
                (end.round, end.value),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold" if end.bold else "normal",
                bbox={"boxstyle": "square,pad=.15", "facecolor": "white", "edgecolor": end.colour},
                zorder=5,
            )
    ends = sorted((end for end in ends if end.round == last), key=lambda end: end.value)
    if not ends:
        return
    low, high = axes.get_ylim()
    height = 72 * axes.bbox.height / axes.figure.dpi
    slots = np.arange(len(ends)) * 1.4 * matplotlib.rcParams["font.size"] / height
    wanted = np.array([(end.value - low) / (high - low) for end in ends])
    places = np.clip(isotonic_regression(wanted - slots).x, 0, max(0.0, 1 - slots[-1])) + slots
    leader = {"arrowstyle": "-", "linewidth": 1.0, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
    for end, place in zip(ends, places, strict=True):
        axes.annotate(
            end.label,
            (end.round, end.value),
            (1.035, place),
            textcoords="axes fraction",
            va="center",
            fontweight="bold" if end.bold else "normal",
            annotation_clip=False,
            arrowprops={**leader, "color": end.colour},
        )


def _show_message(axes: Axes, sentence: str) -> None:
    axes.set_yticks([])
    axes.grid(False)
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=10)
