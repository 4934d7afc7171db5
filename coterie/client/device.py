"""Where and how networks are computed: memory formats, data and precision on a GPU, several models at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from coterie.datasets import Shard

#: Precisions of matrix products and convolutions on a GPU.
PRECISIONS = ("float32", "tf32", "bfloat16")

_ON_GPU: WeakKeyDictionary[Shard, tuple[Tensor, Tensor]] = WeakKeyDictionary()


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
