"""Plot a run: accuracy, privacy spent, cluster sizes; small panels, which the page arranges.

Figures are created without pyplot, so there is no global state and no display is needed.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from coterie.report import formats
from coterie.report.runs import ReportError, Run

# Colour-blind safe palettes, distinct for groups and clusters.
GROUP_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
CLUSTER_COLOURS = (
    *("#332288", "#CC6677", "#44AA99", "#B8A032", "#882255", "#117733", "#88CCEE", "#AA4499"),  # Tol
    *("#6B7480", "#E07B39"),  # ten digits have ten colours
)
INK, MUTED, GRID, AXIS, FAINT = "#1b2330", "#5c6675", "#e6e9ee", "#aab2bf", "#bcc4d0"
LINE_STYLES = ("-", "--", "-.", ":")
DASHED = (0, (4, 3))
SMOOTHING = 10

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.solid_capstyle": "round",
}


def accuracy_panel(run: Run, group: int | None = None, limits: tuple[float, float] | None = None) -> Figure:
    """Plot the accuracy of all clients over rounds, or of one hidden group with that of all clients in grey.

    Args:
        run: a run with an evaluated round.
        group: the hidden group; None for all clients.
        limits: of the accuracy axis; by default those of the plotted values.
    """
    with drawing_style():
        figure, axes = panel()
        rounds, accuracy = evaluated_rounds(run)
        colour, style = (INK, "-") if group is None else cycle(GROUP_COLOURS, group)
        values = accuracy
        if group is not None:
            axes.plot(rounds, accuracy, color=FAINT, linewidth=1.4)
            rounds, values = group_rounds(run, group)
        axes.plot(rounds, values, style, color=colour, linewidth=2.0, marker=_marker(rounds), markersize=4)
        _finish_accuracy(axes, limits or accuracy_limits([*accuracy, *values]), run.last_round)
        axes.set_ylabel("noisy mean accuracy" if run.noisy else run.score_name)
    return figure


def epsilon_panel(run: Run) -> Figure:
    """Plot the ε spent over rounds, with the budget if it is known; some round must have a finite ε."""
    with drawing_style():
        figure, axes = panel()
        spent = [(r.round, r.epsilon) for r in run.rounds if math.isfinite(r.epsilon)]
        numbers, values = zip(*spent, strict=True)
        axes.plot(numbers, values, color=INK, linewidth=1.6)
        axes.fill_between(numbers, values, color=INK, alpha=0.07, linewidth=0)
        budget = run.certificate.get("epsilon_budget", run.config.get("epsilon"))
        if isinstance(budget, int | float) and math.isfinite(budget):
            axes.axhline(budget, color=MUTED, linewidth=0.9, linestyle=DASHED)
            label, beside = f"budget ε = {formats.number(budget)}", axes.get_yaxis_transform()
            axes.annotate(label, (0, budget), (2, 2), beside, "offset points", color=MUTED, va="bottom")
            values = (*values, budget)
        axes.set_ylim(0, 1.15 * max(values) or 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_ylabel("ε spent")
        round_axis(axes, numbers[-1])
    return figure


def cluster_panel(run: Run, cluster: int, limits: tuple[float, float]) -> Figure:
    """Plot the released size of a cluster over rounds (points) and its running mean (line).

    A dashed line marks a re-seeding: the model became a perturbed copy of the model of another cluster.

    Args:
        run: a run that released cluster sizes.
        cluster: the cluster.
        limits: of the axis of sizes.
    """
    numbers, sizes = released_sizes(run)
    seen = sizes[:, cluster]
    colour, style = cycle(CLUSTER_COLOURS, cluster)
    with drawing_style():
        figure, axes = panel()
        axes.axhline(0, color=AXIS, linewidth=0.8)
        axes.plot(numbers, seen, ".", color=colour, markersize=5, alpha=0.5, markeredgewidth=0)
        places = {number: after for number, (_, after) in model_indices(run).items()}
        changed = [r.round for r in run.rounds if any(places[r.round][cluster] in pair for pair in r.reseeded)]
        # Break a line where its model was replaced: the following sizes belong to another model.
        for segment in np.split(np.arange(len(numbers)), np.searchsorted(numbers, changed, side="right")):
            axes.plot(numbers[segment], running_mean(seen[segment]), style, color=colour, linewidth=2.0)
        copies = [(r.round, a) for r in run.rounds for a, b in r.reseeded if b == places[r.round][cluster]]
        for index, (number, source) in enumerate(copies):
            axes.axvline(number, color=INK, linewidth=1.0, linestyle=(0, (3, 2)))
            kept = places[number]
            label = f"copy of {kept.index(source)}" if source in kept else "copy of a removed model"
            below = (3, -3 - 10 * (index % 3))  # neighbouring labels in different lines
            axes.annotate(label, (number, 1), below, axes.get_xaxis_transform(), "offset points", va="top")
        axes.set_ylim(*limits)
        axes.set_ylabel("clients in a round")
        round_axis(axes, numbers[-1])
    return figure


def comparison_panel(rows: Sequence[Sequence[Run]], shown: int, score: str = "accuracy") -> Figure:
    """Plot the accuracy of all repetitions of one row of a comparison, with those of the other rows in grey.

    Args:
        rows: the runs of each row; some run is evaluated.
        shown: index of the row.
        score: name of the plotted score.
    """
    with drawing_style():
        figure, axes = panel()
        curves = [[evaluated_rounds(run) for run in runs] for runs in rows]
        colour, style = cycle(GROUP_COLOURS, shown)
        for index in sorted(range(len(rows)), key=lambda index: index == shown):
            for rounds, accuracy in curves[index]:
                look: dict[str, Any] = {"color": FAINT, "linewidth": 1.0}
                if index == shown:
                    look = {"color": colour, "linewidth": 1.6, "linestyle": style}
                axes.plot(rounds, accuracy, **look, marker=_marker(rounds), markersize=3)
        values = [value for row in curves for _, accuracy in row for value in accuracy]
        _finish_accuracy(axes, accuracy_limits(values), max(run.last_round for runs in rows for run in runs))
        axes.set_ylabel(score)
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


def drawing_style() -> AbstractContextManager[None]:
    """Apply the style of all figures."""
    return matplotlib.rc_context(_STYLE)


def cycle(colours: Sequence[str], index: int) -> tuple[str, str]:
    """Return colour and line style of line ``index``; line styles change when all colours are used."""
    return colours[index % len(colours)], LINE_STYLES[index // len(colours) % len(LINE_STYLES)]


def round_axis(axes: Axes, last: float) -> None:
    """Draw the horizontal axis of rounds up to ``last``."""
    axes.set_xlabel("round")
    axes.set_xlim(0, 1.01 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def panel(
    height: float = 2.4, place: tuple[float, float, float, float] = (0.18, 0.2, 0.8, 0.76), width: float = 4.1
) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, which the page shows on phones and desktops, and its axes."""
    figure = Figure(figsize=(width, height), facecolor="none")
    return figure, figure.add_axes(place)


def evaluated_rounds(run: Run) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and the mean accuracy of each."""
    evaluated = [(r.round, r.mean_accuracy) for r in run.rounds if r.mean_accuracy is not None]
    return [number for number, _ in evaluated], [accuracy for _, accuracy in evaluated]


def group_rounds(run: Run, group: int) -> tuple[list[int], list[float]]:
    """Return the rounds in which a hidden group was evaluated, and its accuracy in each."""
    groups = [(r.round, r.scores.group_accuracy or ()) for r in run.rounds]
    points = [(number, accuracy[group]) for number, accuracy in groups if len(accuracy) > group]
    return [number for number, _ in points], [accuracy for _, accuracy in points]


def accuracy_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits of an axis of accuracies."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    margin = 0.06 * max(max(finite) - min(finite), 0.1)
    return max(0.0, min(finite) - margin), min(1.005, max(finite) + margin)


def released_sizes(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) rounds with released cluster sizes, and (n, clusters) sizes; NaN for clusters not yet there.

    If a search changed the number of models, the columns are the models after the last round.
    """
    numbers, rows, places = [], [], model_indices(run)
    for r in run.rounds:
        if (sizes := r.histogram) is not None:
            numbers.append(r.round)
            rows.append([sizes[j] if 0 <= j < len(sizes) else math.nan for j in places[r.round][0]])
    return np.array(numbers), np.array(rows or [[]])


def model_indices(run: Run) -> dict[int, tuple[list[int], list[int]]]:
    """Return, by round, the index of each of the last models in this round and in the next; -1: not yet there."""
    if changes := [r.origins for r in run.rounds if r.origins]:
        count = len(changes[-1])
    else:
        count = max((len(r.histogram or ()) for r in run.rounds), default=0)
    after, indices = list(range(count)), {}
    for r in reversed(run.rounds):
        during = [r.origins[j] if 0 <= j < len(r.origins) else -1 for j in after] if r.origins else after
        indices[r.round] = during, after
        after = during
    return indices


def _marker(rounds: Sequence[int]) -> str:
    """Return the marker: points if there are few, so that a run evaluated once is visible."""
    return "o" if len(rounds) <= 12 else ""


def running_mean(sizes: np.ndarray) -> np.ndarray:
    """Return the mean of each size and up to SMOOTHING - 1 previous ones, ignoring NaN."""
    windows = [sizes[max(0, end - SMOOTHING) : end] for end in range(1, len(sizes) + 1)]
    return np.array([w[np.isfinite(w)].mean() if np.isfinite(w).any() else math.nan for w in windows])


def _finish_accuracy(axes: Axes, limits: tuple[float, float], last: int) -> None:
    axes.set_ylim(*limits)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    round_axis(axes, last)
