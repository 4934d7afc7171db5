"""A workload as files, so that competitors in other interpreters train on the same data in the same order.

``data.npz`` holds the examples of all clients, the test sets and the initial models; ``task.json`` the rest.
This module imports NumPy alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
        model: ``module:function`` of the network.
        shape: of an example.
        classes: number of classes.
        epochs: local epochs.
        batch_size: of local SGD.
        lr: local step size.
        clip: L2 norm to which updates are clipped.
        noise: standard deviation of the noise on the sum of updates.
        scale: step size of the server over the divisor of the sum.
        seed: of the run.
        device: of PyTorch.
        cohorts: clients of each round.
        settings: Coterie's, for its own engines.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    epochs: int
    batch_size: int
    lr: float
    clip: float
    noise: float
    scale: float
    seed: int
    device: str
    cohorts: list[list[int]]
    settings: dict[str, Any]

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write both files."""
        (folder / "task.json").write_text(json.dumps(asdict(self)))
        np.savez(folder / "data.npz", **dict[str, Any](arrays))

    @classmethod
    def read(cls, folder: Path) -> tuple[Task, dict[str, np.ndarray]]:
        """Return the task and its arrays."""
        values = json.loads((folder / "task.json").read_text())
        with np.load(folder / "data.npz") as file:
            arrays = dict(file)
        return cls(**values | {"shape": tuple(values["shape"])}), arrays

    def build(self) -> Any:
        """Return the network, with parameters of its own."""
        module, _, function = self.model.partition(":")
        return getattr(importlib.import_module(module), function)(self.shape, self.classes)

    def batches(self, number: int, client: int, size: int) -> list[np.ndarray]:
        """Return the indices of each batch of a client in a round, as Coterie's clients draw them."""
        rng, found = np.random.default_rng([self.seed, number, client]), []
        for _ in range(self.epochs):
            order = rng.permutation(size)
            found += [order[start : start + self.batch_size] for start in range(0, size, self.batch_size)]
        return found


def initial(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the initial parameters by name."""
    return {name.removeprefix("initial/"): values for name, values in arrays.items() if name.startswith("initial/")}


def report(number: int) -> None:
    """Tell the parent that a round has ended."""
    print(json.dumps({"round": number}), flush=True)
