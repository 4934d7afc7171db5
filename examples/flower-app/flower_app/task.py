"""The network and the data: handwritten digits, upside down at every second client."""

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 10) of images (n, 8, 8)."""
        logits: Tensor = self.layers(x)
        return logits


@lru_cache
def load_partition(partition: int, num_partitions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels of one client for training, then for testing."""
    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    order = np.random.RandomState(0).permutation(len(x))
    rows = np.array_split(order, num_partitions)[partition]
    if partition % 2:
        x = x[:, ::-1, ::-1]
    held_out = max(1, len(rows) // 5)
    train, test = rows[held_out:], rows[:held_out]
    return (
        torch.from_numpy(x[train].copy()),
        torch.from_numpy(labels[train]),
        torch.from_numpy(x[test].copy()),
        torch.from_numpy(labels[test]),
    )
