"""RC-DPFL's Figure 3: noise of a client's update against the batch sizes of round 1 and of later rounds.

`python benchmarks/noise_surface.py` plans every pair of batch sizes, without training, in some minutes, and writes
benchmarks/results/rc-figure3.json and docs/rc-figure3.png. Equation (2) gives the variance of an update,
Var(b_e) = K N lr^2 p c^2 z^2(epsilon, delta, b_1, b_>1, N, K, E) / b_e^3, and the accountant gives z.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from coterie.privacy import Streams
from coterie.privacy.mechanisms.dp_sgd import RecordLevel
from coterie.report.plots import drawing_style, save_figure
from coterie.server import RunConfig
from coterie.server.folder import machine, versions
from coterie.server.run import initial_models

ROOT = Path(__file__).parents[1]
SIZES = (32, 64, 128, 256, 512, 1024, 2048, 6600)
SETTINGS = {
    "strategy": "rc-dpfl",
    "dataset": "cifar10",
    "model": "resnet18-gn",
    "clients": 21,
    "groups": "3:6:6:6",
    "clusters": 4,
    "samples-per-client": 6600,
    "rounds": 200,
    "local-epochs": 1,
    "lr": 0.0005,
    "clip-norm": 3.0,
    "epsilon": 5.0,
    "delta": 0.0001,
    "accountant": "rdp",
    "selection": "exact",
}
TITLES = ("log10 Var of round 1", "log10 Var of a later round", "noise scale z")


def config(first: int, later: int) -> RunConfig:
    """The configuration of a pair of batch sizes."""
    return RunConfig({**SETTINGS, "first-batch-size": first, "batch-size": later})


def noise(first: int, later: int, parameters: int) -> tuple[float, float, float]:
    """log10 of the variances of round 1 and of a later round, and z."""
    run = config(first, later)
    assert isinstance(run.plan, RecordLevel)
    assert isinstance(run.plan, RecordLevel)
    plan = run.plan.worst

    def variance(is_first: bool) -> float:
        scale = plan.local_epochs * plan.num_examples * run.training.lr**2 * parameters
        return math.log10(scale * (plan.clip_norm * plan.noise_of_gradients(is_first)) ** 2 / plan.batch(is_first) ** 3)

    return variance(True), variance(False), plan.noise_multiplier


def measure(sizes: Sequence[int] = SIZES) -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
    """The document of the table, and (3, first, later) values."""
    parameters = initial_models(config(sizes[0], sizes[0]), Streams(0))[1].size
    values = np.array([[noise(first, later, parameters) for later in sizes] for first in sizes]).transpose(2, 0, 1)
    document = {
        "title": "Noise of a client's update, N = 6600, ε = 5",
        "source": "RC-DPFL, Figures 3 and 8",
        "command": "python benchmarks/noise_surface.py",
        "machine": machine("cpu"),
        "versions": versions(),
        "seeds": [],
        "set": {**SETTINGS, "parameters": parameters},
        "columns": [{"name": f"later b = {later}", "score": TITLES[2]} for later in sizes],
        "rows": [
            {
                "name": f"first b = {first}",
                "cells": [{"paper": None, "mean": z, "std": None, "why": None} for z in line],
            }
            for first, line in zip(sizes, values[2].tolist(), strict=True)
        ],
    }
    return document, values


def draw(sizes: Sequence[int], values: npt.NDArray[np.float64]) -> Figure:
    """One panel for each of TITLES."""
    figure = Figure(figsize=(12.0, 3.6), layout="constrained")
    for axes, title, surface in zip(figure.subplots(1, len(TITLES)), TITLES, values, strict=True):
        figure.colorbar(axes.imshow(surface, origin="lower", cmap="viridis", aspect="auto"), ax=axes)
        axes.set_xticks(range(len(sizes)), sizes, rotation=60, fontsize=7)
        axes.set_yticks(range(len(sizes)), sizes, fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="batch size of later rounds", ylabel="batch size of round 1")
        axes.grid(False)
    return figure


def main() -> None:
    """Write the results, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder instead of benchmarks/results and docs")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    document, values = measure(options.sizes)
    (options.out or ROOT / "benchmarks" / "results").joinpath("rc-figure3.json").write_text(
        json.dumps(document, indent=1) + "\n"
    )
    with drawing_style():
        picture = save_figure(draw(options.sizes, values), (options.out or ROOT / "docs") / "rc-figure3.png")
    print(picture)


if __name__ == "__main__":
    main()
