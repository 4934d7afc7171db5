"""Stochastic gradient descent of one client after the other: the reference for all faster ways of local training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from coterie.client.penalties import NO_PENALTY, Penalty
from coterie.datasets import Shard
from coterie.messages import Layout


@dataclass(frozen=True)
class LocalTrainingConfig:
    """Hyper-parameters of local training.

    Attributes:
        local_epochs: passes over the client's data in a round.
        batch_size: examples in a mini-batch; the last one of an epoch may be smaller.
        lr: step size of plain SGD.
        device: torch device.
        penalty: on the distance to the start, added to the loss.
    """

    local_epochs: int
    batch_size: int
    lr: float
    device: str = "cpu"
    penalty: Penalty = NO_PENALTY


#: Indices of every mini-batch of a round.
Schedule: TypeAlias = list[npt.NDArray[np.int64]]


def schedule(rng: np.random.Generator, size: int, config: LocalTrainingConfig) -> Schedule:
    """Return the indices of every mini-batch of a round: a new permutation per epoch, split into batches."""
    batches = []
    for _ in range(config.local_epochs):
        order = rng.permutation(size)
        batches += [order[start : start + config.batch_size] for start in range(0, size, config.batch_size)]
    return batches


def train_sequentially(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
) -> npt.NDArray[np.float32]:
    """Train one client after the other; see :func:`coterie.client.training.train`."""
    updates = np.empty_like(start)
    model, form = fast_network(model, shards[0].x.shape[1:], config.device)
    parameters = dict(model.named_parameters())
    for i, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
        x, y = torch.as_tensor(shard.x, device=config.device), torch.as_tensor(shard.y, device=config.device)
        x = x.contiguous(memory_format=form)
        with torch.no_grad():
            anchors = [torch.as_tensor(value, device=config.device) for value in layout.split(start[i]).values()]
            for value, anchor in zip(parameters.values(), anchors, strict=True):
                value.copy_(anchor)
        for batch in schedule(rng, len(shard.y), config):
            index = torch.as_tensor(batch, device=config.device)
            loss = example_loss(model(x[index]), y[index]).mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            descend(parameters.values(), gradients, anchors, config)
        trained = layout.flatten({name: value.detach().cpu() for name, value in parameters.items()})
        updates[i] = trained - start[i]
    return updates


@torch.no_grad()
def descend(
    values: Iterable[Tensor],
    gradients: Iterable[Tensor],
    anchors: Iterable[Tensor],
    config: LocalTrainingConfig,
    running: Tensor | None = None,
) -> None:
    """Take one step of SGD; of clients in one batch only those that are ``running``, (n,), have steps left."""
    for value, gradient, anchor in zip(values, gradients, anchors, strict=True):
        if config.penalty.weight:
            gradient = gradient + pull(value, anchor, config, running)
        value.sub_(gradient, alpha=config.lr)


def pull(value: Tensor, anchor: Tensor, config: LocalTrainingConfig, running: Tensor | None = None) -> Tensor:
    """Return the gradient of the penalty; zero for clients that have no steps left."""
    gradient = config.penalty.gradient(value, anchor)
    return gradient if running is None else gradient * running.view(-1, *[1] * (value.dim() - 1))


def example_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the (n,) cross-entropy of (n, classes) logits, or the squared error for real targets."""
    if y.is_floating_point():
        return mse_loss(output, y, reduction="none")
    return cross_entropy(output, y, reduction="none")


@lru_cache(maxsize=8)
def fast_network(model: nn.Module, shape: tuple[int, ...], device: str) -> tuple[nn.Module, torch.memory_format]:
    """Return a copy of the network that computes the same outputs faster, and the memory format of its examples.

    Convolutions and pooling on a CPU are up to 1.7 times as fast with channels last, and ReLU is cheaper after
    max-pooling than before it. Networks that reshape images by ``view`` do not support channels last.
    """
    model = copy.deepcopy(model).to(device)
    if device != "cpu" or len(shape) != 3 or not is_convolutional(model):
        return model, torch.contiguous_format
    _pool_first(model)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            last.eval()(torch.zeros(2, *shape).contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return model, torch.contiguous_format
    return last.train(model.training), torch.channels_last


def is_convolutional(model: nn.Module) -> bool:
    """Whether a network has two-dimensional convolutions."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def _pool_first(model: nn.Module) -> None:
    """Swap each ReLU and the max-pooling after it: outputs and gradients are the same."""
    for part in model.modules():
        if type(part) is nn.Sequential:
            for i in range(len(part) - 1):
                if type(part[i]) is nn.ReLU and type(part[i + 1]) is nn.MaxPool2d and not part[i + 1].return_indices:
                    part[i], part[i + 1] = part[i + 1], part[i]
