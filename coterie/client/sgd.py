"""Stochastic gradient descent: hyper-parameters, batches, one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from coterie.client.penalties import NO_PENALTY, Penalty
from coterie.client.training_plugins import NO_PLUGINS, TrainingPlugins
from coterie.tasks import AUTO, Task


@dataclass(frozen=True)
class LocalTrainingConfig:
    """Hyper-parameters of local training.

    Attributes:
        local_epochs: passes over the client's data in a round.
        batch_size: examples in a mini-batch; the last one of an epoch may be smaller.
        lr: step size.
        device: torch device.
        penalty: on the distance to the start, added to the loss.
        precision: of matrix products and convolutions on a GPU, see :func:`coterie.client.device.products`.
        plugins: objects of users.
        task: what is predicted, whose losses :attr:`loss` returns.
    """

    local_epochs: int
    batch_size: int
    lr: float
    device: str = "cpu"
    penalty: Penalty = NO_PENALTY
    precision: str = "float32"
    plugins: TrainingPlugins = NO_PLUGINS
    task: Task = AUTO

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of every example."""
        return self.plugins.loss_of_examples(self.task)


#: Indices of every mini-batch of a round.
Schedule: TypeAlias = list[npt.NDArray[np.int64]]


def schedule(rng: np.random.Generator, size: int, config: LocalTrainingConfig) -> Schedule:
    """Return the indices of every mini-batch of a round: a new permutation per epoch, split into batches."""
    batches = []
    for _ in range(config.local_epochs):
        order = rng.permutation(size)
        batches += [order[start : start + config.batch_size] for start in range(0, size, config.batch_size)]
    return batches


#: Takes one step of SGD of n clients in place, see :func:`coterie.client.chains.step_of_chain`.
Step: TypeAlias = Callable[
    [nn.Module, dict[str, Tensor], dict[str, Tensor], tuple[Tensor, Tensor, Tensor], LocalTrainingConfig], None
]


@torch.no_grad()
def descend(
    values: Iterable[Tensor], gradients: Iterable[Tensor], anchors: Iterable[Tensor], config: LocalTrainingConfig
) -> None:
    """Take one step of SGD."""
    for value, gradient, anchor in zip(values, gradients, anchors, strict=True):
        if config.penalty.weight:
            gradient = gradient + config.penalty.gradient(value, anchor)
        value.sub_(gradient, alpha=config.lr)


def stepper(
    values: Iterable[Tensor], anchors: Sequence[Tensor], config: LocalTrainingConfig
) -> Callable[[Sequence[Tensor]], None]:
    """Return a function that takes the next step of one client, given the gradients of the loss.

    Args:
        values: parameters, changed in place.
        anchors: parameters before the first step.
        config: hyper-parameters.
    """
    values, plugins = list(values), config.plugins
    if plugins.optimizer == NO_PLUGINS.optimizer:
        return lambda gradients: descend(values, gradients, anchors, config)
    take = plugins.stepper(values, config.lr)

    def step(gradients: Sequence[Tensor]) -> None:
        if config.penalty.weight:
            pairs = zip(values, anchors, strict=True)
            pulls = [config.penalty.gradient(value.detach(), anchor) for value, anchor in pairs]
            gradients = [gradient + pull for gradient, pull in zip(gradients, pulls, strict=True)]
        take(gradients)

    return step
