"""Stochastic gradient descent of one client after the other: the reference for all faster ways of local training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
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
        precision: of matrix products and convolutions on a GPU, see :func:`products`.
    """

    local_epochs: int
    batch_size: int
    lr: float
    device: str = "cpu"
    penalty: Penalty = NO_PENALTY
    precision: str = "float32"


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
        x, y = on_device(shard, config.device)
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


#: Precisions of matrix products and convolutions on a GPU.
PRECISIONS = ("float32", "tf32", "bfloat16")


@contextmanager
def products(precision: str, device: str) -> Iterator[None]:
    """Compute matrix products and convolutions with a precision of :data:`PRECISIONS`; parameters stay float32.

    PyTorch's default is tf32 for convolutions. tf32 exists on GPUs only; elsewhere it is float32.
    """
    cudnn: Any = torch.backends.cudnn
    kinds: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    rough, kind_of_device = precision == "bfloat16", torch.device(device).type
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        with torch.autocast(kind_of_device, torch.bfloat16, enabled=rough, cache_enabled=False):  # parameters change
            yield
    finally:
        for kind, value in zip(kinds, before, strict=True):
            kind.fp32_precision = value


_ON_GPU: WeakKeyDictionary[Shard, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def on_device(shard: Shard, device: str) -> tuple[Tensor, Tensor]:
    """Return a client's examples and labels as tensors. Those on a GPU stay there as long as the shard exists."""
    if device == "cpu":
        return torch.as_tensor(shard.x), torch.as_tensor(shard.y)
    if shard not in _ON_GPU:
        _ON_GPU[shard] = torch.as_tensor(shard.x, device=device), torch.as_tensor(shard.y, device=device)
    return _ON_GPU[shard]


def free_device() -> None:
    """Forget the data on the GPU."""
    _ON_GPU.clear()


@lru_cache(maxsize=8)
def supports_vmap(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> bool:
    """Whether ``torch.func.vmap`` can compute several models of this network at once.

    Args:
        model: the network.
        shape: of one example.
        dtype: of examples.
        device: torch device.
    """
    model = copy.deepcopy(model).to(device)
    models = {name: torch.stack([value.detach()] * 2) for name, value in model.named_parameters()}
    x = torch.zeros(2, 2, *shape, dtype=dtype, device=device)
    try:
        vmap(lambda each, xb: functional_call(model, each, (xb,)))(models, x)
    except RuntimeError:
        return False
    return True


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
