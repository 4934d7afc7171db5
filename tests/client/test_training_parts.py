"""Only the trainable part of a network trains, and its constants stay bit for bit, in every way of training."""

import copy

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import cross_entropy

from coterie.client.backend import train
from coterie.client.dpsgd import DPSGD, train_privately
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard, TestSet
from coterie.models import ModelError, constants, fingerprint, float32_arrays, trainable
from coterie.wire.messages import Layout

LR, CLIP = 0.1, 0.7


class Body(nn.Module):
    """A network of two layers, to which others add a part."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.dtype, self.body, self.head = dtype, nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.to(self.dtype)))).float()


class Unused(Body):
    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(6, 2)


class Scaled(Body):
    """A 0-d parameter, such as CLIP's logit scale."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return super().forward(x) * self.scale.exp()


class Fourier(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        drawn = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        self.register_buffer("matrix", drawn, persistent=persistent)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head((x @ self.matrix).sin())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Bare(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        return nn.functional.linear(self.decode(self.encode(x)), self.encode.weight)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.output = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.hidden(x)
        hidden += x
        return self.output(hidden)


def chain(*, frozen=(), transposed=False):
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for name in frozen:
        network.get_parameter(name).requires_grad_(False)
    if transposed:
        network[2].weight = nn.Parameter(torch.randn(6, 3).T)
    return network


def normalised():
    """Frozen batch normalisation in evaluation mode: a constant affine function."""
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    network[:2].requires_grad_(False).eval()
    with torch.no_grad():
        network[1].running_var.fill_(2.0)
    return network


def images(padding_mode):
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 3, padding=1, padding_mode=padding_mode),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


NETWORKS = {
    "frozen first layer": lambda: chain(frozen=["0.weight", "0.bias"]),
    "frozen last layer": lambda: chain(frozen=["2.weight", "2.bias"]),
    "frozen weight, trainable bias": lambda: chain(frozen=["0.weight"]),
    "transposed weight": lambda: chain(transposed=True),
    "unused parameters": Unused,
    "scalar": Scaled,
    "persistent buffer": lambda: Fourier(True),
    "hidden buffer": lambda: Fourier(False),
    "frozen batch normalisation": normalised,
    "circular padding": lambda: images("circular"),
    "reflected padding": lambda: images("reflect"),
    "float64": lambda: Body(torch.float64),
    "tied": Tied,
    "parameters outside of their layer": Bare,
    "in place": InPlace,
}


def built(name):
    torch.manual_seed(0)
    return NETWORKS[name]()


def start_of(network, clients=1):
    arrays = float32_arrays(network)
    layout = Layout.of(arrays)
    return layout, np.stack([layout.flatten(arrays)] * clients)


def private_step(network, data, ghost):
    """A start and its update, of clipped gradients without noise."""
    layout, start = start_of(network)
    coins, noises = ([np.random.default_rng(0)] for _ in range(2))
    settings = DPSGD(5, 5, 1, LR, CLIP, 0.0)
    update = train_privately(network, layout, start, [data], coins, noises, [settings], batched=True, ghost=ghost)
    return start[0], update[0]


def shard(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((5, 4), np.float32), rng.integers(3, size=5)
    return Shard(seed, 0, x, y, TestSet(x, y))


def stepped(network, data, *, clip=None):
    """The trainable part after a step on all records, by plain PyTorch; with per-record clipping."""
    network = copy.deepcopy(network)
    parameters = list(trainable(network).values())
    total = [torch.zeros_like(value) for value in parameters]
    for x, y in zip(torch.tensor(data.x), torch.tensor(data.y), strict=True):
        loss = cross_entropy(network(x[None]), y[None])
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        factor = 1 if clip is None else min(1.0, clip / norm)
        total = [sum_ + factor * gradient for sum_, gradient in zip(total, gradients, strict=True)]
    with torch.no_grad():
        for value, gradient in zip(parameters, total, strict=True):
            value -= LR * gradient / len(data.y)
    arrays = float32_arrays(network)
    return Layout.of(arrays).flatten(arrays)


@for_rows("batched", [False, True])
@for_rows("name", NETWORKS)
def test_a_step_is_that_of_pytorch(name, batched):
    network, shards = built(name), [shard(1), shard(2)]
    before = fingerprint(constants(network))
    layout, start = start_of(network, 2)
    rngs = [np.random.default_rng(i) for i in range(2)]
    updates = train(network, layout, start, shards, rngs, LocalTrainingConfig(1, 5, LR), batched=batched)
    for i, data in enumerate(shards):
        np.testing.assert_allclose(start[i] + updates[i], stepped(network, data), atol=1e-6)
    assert fingerprint(constants(network)) == before


@for_rows("ghost", [True, False])
@for_rows("name", NETWORKS)
def test_a_private_step_is_that_of_pytorch(name, ghost):
    network, data = built(name), shard(1)
    before = fingerprint(constants(network))
    start, update = private_step(network, data, ghost)
    np.testing.assert_allclose(start + update, stepped(network, data, clip=CLIP), atol=1e-6)
    assert fingerprint(constants(network)) == before


def test_half_precision_trains_in_float32_copies():
    """Steps below the spacing of bfloat16 add up."""
    network, data = Body(torch.bfloat16), shard(1)
    layout, start = start_of(network)
    for batched in (False, True):
        config = LocalTrainingConfig(400, 5, 1e-4)
        update = train(network, layout, start, [data], [np.random.default_rng(0)], config, batched=batched)
        one = train(network, layout, start, [data], [np.random.default_rng(0)], LocalTrainingConfig(1, 5, 1e-4))
        assert np.linalg.norm(update) > 300 * np.linalg.norm(one) > 0


class Counting(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@for_rows(
    ("network", "words"),
    [
        (lambda: Body(torch.bfloat16), "'body.weight' of Body is bfloat16"),
        (lambda: Body(torch.float16), "'body.weight' of Body is float16"),
        (Counting, "'calls' of Counting changes in training"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).requires_grad_(False), nn.Linear(6, 3)),
            r"layer '1' \(BatchNorm1d\)",
        ),
    ],
)
@for_rows("ghost", [True, False])
def test_what_cannot_be_clipped_by_records_is_refused(network, words, ghost):
    with pytest.raises(ModelError, match=words):
        private_step(network(), shard(1), ghost)
