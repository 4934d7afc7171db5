"""CFL's Figure 3: accuracy over rounds, and the similarity of every two clients at the splits.

`coterie bench cfl-figure3 --quick`, then `python benchmarks/cfl_splits.py bench/cfl-figure3-quick`, which draws
docs/cfl-figure3.png from the table and the run of CFL with the first seed.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from coterie.bench.table_figures import _draw_curve
from coterie.datasets import assign_groups, parse_groups
from coterie.report.plots import GROUP_COLOURS, INK, MUTED, drawing_style, save_figure
from coterie.report.runs import Run, read_run

_ACROSS = 5
_UNLIKE_TO_LIKE = LinearSegmentedColormap.from_list(
    "similarity", ["#7a3500", GROUP_COLOURS[1], "#fdfdfd", GROUP_COLOURS[0], "#003a5c"], N=65
)


def split_run(folder: Path, seed: int) -> Run:
    """The run of a table's folder with this seed whose clients were split."""
    runs = [read_run(path.parent) for path in sorted(folder.glob("runs/*/result.json"))]
    return next(run for run in runs if run.config["seed"] == seed and run.notes.get("tree"))


def similarities(run: Run, order: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.float64]]:
    """Matrices by round, of clients in this order; NaN for pairs that were not compared."""
    matrices = {}
    for path in sorted(run.path.glob("evidence/similarities-*.npz")):
        with np.load(path) as file:
            places = np.argsort(file["clients"])[order]
            matrix = file["matrix"][np.ix_(places, places)].astype(float)
        np.fill_diagonal(matrix, np.nan)
        matrices[int(path.stem.rpartition("-")[2])] = matrix
    return matrices


def draw(document: Mapping[str, Any], run: Run) -> Figure:
    """Curves of all rows, one dot for every pair in one cluster, and matrices at the splits and at the end."""
    groups = assign_groups(run.config["clients"], parse_groups(run.config["groups"]))
    order = np.argsort(groups, kind="stable")
    groups, matrices = groups[order], similarities(run, order)
    splits = sorted({node["ended"] for node in run.notes["tree"] if node["why"] == "split"})
    shown = [number for number in matrices if number in (*splits, max(matrices))][:_ACROSS]
    figure = Figure(figsize=(11.0, 6.05), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[3.3, 2.0])
    above, below = halves
    left, right = above.subplots(1, 2)
    for colour, row in zip(GROUP_COLOURS, document["rows"], strict=False):
        _draw_curve(left, row["cells"][0], colour, row["name"])
    first, second = np.tril_indices(len(groups), -1)
    for of_one, colour, name in ((False, GROUP_COLOURS[1], "different groups"), (True, GROUP_COLOURS[0], "one group")):
        pairs = (groups[first] == groups[second]) == of_one
        for number, matrix in matrices.items():
            values, label = matrix[first, second][pairs], f"of {name}" if number == min(matrices) else None
            right.plot(np.full(len(values), number), values, "o", color=colour, markersize=3.5, alpha=0.5, label=label)
    for axes, title, unit in ((left, document["title"], "accuracy, %"), (right, "CFL: every pair", "similarity")):
        for number in splits:
            axes.axvline(number, color=MUTED, linestyle="--", linewidth=0.9)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="round", ylabel=unit)
        axes.legend(frameon=False, fontsize=8)
    scale = Normalize(*(sign * np.nanmax(np.abs([matrices[number] for number in shown])) for sign in (-1, 1)))
    panels = below.subplots(1, len(shown))
    for axes, number in zip(panels, shown, strict=True):
        axes.set_facecolor("#c3c9d2")  # of pairs that were not compared
        axes.imshow(matrices[number], cmap=_UNLIKE_TO_LIKE, norm=scale, interpolation="none", zorder=1)
        for border in np.flatnonzero(np.diff(groups)) + 0.5:
            axes.axvline(border, color=INK, linewidth=0.7)
            axes.axhline(border, color=INK, linewidth=0.7)
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        axes.set_title(f"round {number}", fontsize=9, fontweight="normal")
    below.colorbar(ScalarMappable(scale, _UNLIKE_TO_LIKE), ax=panels, label="cosine similarity")
    return figure


def main() -> None:
    """Draw a folder of `coterie bench`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "cfl-figure3.png")
    options = parser.parse_args()
    document = json.loads((options.folder / "table.json").read_text())
    with drawing_style():
        print(save_figure(draw(document, split_run(options.folder, document["seeds"][0])), options.out))


if __name__ == "__main__":
    main()
