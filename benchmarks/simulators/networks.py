"""The network of the workloads, for every competitor; imports PyTorch alone."""

import os
from collections import OrderedDict

import torch
from torch import nn


def cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5×5 convolutions with max-pooling and two linear layers: 80,202 parameters for 28×28 images."""
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def mlp(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Coterie's mlp-32."""
    features = 1
    for size in shape:
        features *= size
    hidden, output = nn.Linear(features, 32), nn.Linear(32, num_classes)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), hidden=hidden, relu=nn.ReLU(), output=output))


class Large(nn.Module):
    """A linear model of 10 parameters among many others, whose gradient is zero: large updates in little time."""

    def __init__(self, num_classes: int, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self._classes = num_classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).sum(dim=1, keepdim=True) * self.weight[: self._classes]


def large(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the model with as many parameters as the environment variable COTERIE_BENCHMARK_PARAMETERS says."""
    return Large(num_classes, int(os.environ["COTERIE_BENCHMARK_PARAMETERS"]))
