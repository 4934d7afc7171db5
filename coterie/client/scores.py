"""Losses and accuracies of models, in one pass over the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coterie.client.backend import CHUNK, Examples, backend_of
from coterie.client.device import free_device, joined, products, to_numpy
from coterie.datasets import Shard, TestSet
from coterie.privacy import PerRecord
from coterie.tasks import AUTO, Task
from coterie.wire.messages import Layout

FloatArray: TypeAlias = npt.NDArray[np.float64]
#: Maps (n, classes) outputs and (n,) targets to (n,) scores.
Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def losses(
    model: nn.Module,
    layout: Layout,
    models: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    device: str = "cpu",
    loss: Score = AUTO,
) -> npt.NDArray[np.float64]:
    """Return the (n, k) mean loss of every model on every client's training data; inf where it is not finite."""
    sizes = np.array([len(shard.y) for shard in shards])
    owner = np.repeat(np.arange(len(shards)), sizes)
    x, y = joined(shards, device)
    result = np.zeros((len(shards), len(models)))
    for j, model_losses in enumerate(_per_example(model, layout, models, x, y, device, loss)):
        result[:, j] = np.bincount(owner, weights=model_losses, minlength=len(shards)) / sizes
    return np.where(np.isfinite(result), result, np.inf)


@torch.no_grad()
def example_losses(
    model: nn.Module,
    layout: Layout,
    models: npt.NDArray[np.float32],
    shard: Shard,
    device: str = "cpu",
    loss: Score = AUTO,
) -> PerRecord:
    """Return the (N, k) loss of every model on every example of one client; N may be 0."""
    if not len(shard.y):
        return PerRecord(np.zeros((0, len(models))))
    return PerRecord(np.stack(_per_example(model, layout, models, shard.x, shard.y, device, loss), axis=1))


@torch.no_grad()
def outputs(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], examples: Shard | TestSet, device: str = "cpu"
) -> list[npt.NDArray[np.float64]]:
    """Return every model's outputs for examples, of which there are some."""
    return _per_example(model, layout, models, examples.x, examples.y, device, lambda output, _: output)


@torch.no_grad()
def accuracies(
    model: nn.Module,
    layout: Layout,
    models: npt.NDArray[np.float32],
    x: npt.NDArray[np.float32],
    y: npt.NDArray[Any],
    device: str = "cpu",
    task: Task = AUTO,
) -> npt.NDArray[np.float64]:
    """Return each model's accuracy (k,) on these examples, or another score of the task, in [0, 1]."""
    return np.array([task.score(marks, y) for marks in _per_example(model, layout, models, x, y, device, task.marks)])


def _per_example(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], x: Any, y: Any, device: str, score: Score
) -> list[FloatArray]:
    """Return the (n,) scores of all examples, arrays or tensors on the device, for every model."""
    backend, most = backend_of(model, Examples.of(x[:0], y[:0], device)), CHUNK
    while True:
        scores = []
        try:
            with products("float32", device):
                for rows, outputs in backend.outputs(layout, models, x, most):
                    yb = torch.as_tensor(y[rows], device=device)
                    scores.append([score(output, yb) for output in outputs])
            found = [torch.cat(parts) for parts in zip(*scores, strict=True)]
            return list(to_numpy(torch.stack(found).double())) if found else []  # without examples
        except torch.OutOfMemoryError:
            if most == 1:
                raise
            free_device()
            most //= 2
