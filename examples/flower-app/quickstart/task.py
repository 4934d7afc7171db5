"""Model, data, training and test: handwritten digits, upside down at every second client."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    """A network for images of 8x8."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        """Return the scores of 10 classes."""
        return self.layers(x)


@cache
def load_data(partition_id, num_partitions, batch_size):
    """Return loaders of a client's training and test records."""
    digits = load_digits()
    x = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[partition_id::num_partitions]
    y = torch.tensor(digits.target)[partition_id::num_partitions]
    own = TensorDataset(x.flip(1, 2) if partition_id % 2 else x, y)
    train, test = random_split(own, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=64)


def train(net, trainloader, epochs, lr, device):
    """Train the model; return the mean loss of a batch."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return the mean loss of a record, and the accuracy."""
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += nn.functional.cross_entropy(outputs, labels.to(device), reduction="sum").item()
            correct += (outputs.argmax(1) == labels.to(device)).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
