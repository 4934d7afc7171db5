"""Model, data, training and test."""

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A network for images of 8x8."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        """Return the scores of 10 classes."""
        return self.layers(x)


def load_data(partition, partitions):
    """Return loaders of a client's training and test records."""
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    own = TensorDataset(x[partition::partitions], y[partition::partitions])
    train, test = torch.utils.data.random_split(own, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64)


def train(net, loader, epochs, noise_multiplier):
    """Train by DP-SGD; return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=noise_multiplier, max_grad_norm=1.0
    )
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(private(x), y)
            loss.backward()
            optimizer.step()
            total += float(loss)
    return total / len(loader)


def test(net, loader):
    """Return the accuracy."""
    with torch.no_grad():
        correct = sum(int((net(x).argmax(dim=1) == y).sum()) for x, y in loader)
    return correct / len(loader.dataset)
