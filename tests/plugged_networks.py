"""Own networks for runs of tests."""

from threading import Lock

import torch
from torch import nn


def values(*shape, scale=0.1):
    """The same numbers at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * scale


class Careful(nn.Module):
    """Frozen and tied layers, buffers and a 0-d parameter; fails where a constant is not as it was built."""

    def __init__(self, features, classes, *, frozen_head=False, tied_head=False):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(features, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.body.requires_grad_(False)
        self.wanted = values(12, features)
        with torch.no_grad():
            self.body.weight.copy_(self.wanted)
            self.body.bias.zero_()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("turn", torch.ones(1, dtype=torch.complex64), persistent=False)
        self.head, self.classes = nn.Linear(12, 12 if tied_head else classes), classes
        if tied_head:
            self.head.weight = self.first.weight
        if frozen_head:
            self.head.requires_grad_(False)
            with torch.no_grad():
                self.head.weight.copy_(values(classes, 12))
                self.head.bias.zero_()

    def forward(self, x):
        changed = (self.body.weight.cpu() - self.wanted).abs().max() > 1e-4  # the check of a network shakes it by less
        if changed or self.ids.tolist() != [0, 1, 2]:
            raise RuntimeError("a constant has changed")
        hidden = self.body(x.flatten(1)).relu()
        hidden = self.second(self.first(hidden).relu()) * self.scale
        return self.head(hidden)[:, : self.classes]


def careful(shape, classes):
    return Careful(torch.Size(shape).numel(), classes)


def frozen_head(shape, classes):
    return Careful(torch.Size(shape).numel(), classes, frozen_head=True)


def tied_head(shape, classes):
    return Careful(torch.Size(shape).numel(), classes, tied_head=True)


def auxiliary(shape, classes):
    network = Careful(torch.Size(shape).numel(), classes)
    network.spare = nn.Linear(2, 2)
    return network


def locked(shape, classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))
    network.lock = Lock()
    return network


def of_peft(shape, classes):
    """A network with adapters of the package peft."""
    from peft import LoraConfig, get_peft_model

    features = torch.Size(shape).numel()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
        )
    return get_peft_model(network, LoraConfig(r=2, target_modules=["0", "2"]))
