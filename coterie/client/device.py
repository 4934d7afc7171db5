"""Data and precision on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coterie.datasets import Shard

#: Precisions of matrix products and convolutions on a GPU.
PRECISIONS = ("float32", "tf32", "bfloat16")

_ON_GPU: WeakKeyDictionary[Shard, tuple[Tensor, Tensor]] = WeakKeyDictionary()


@contextmanager
def products(precision: str, device: str) -> Iterator[None]:
    """Compute matrix products and convolutions with a precision of :data:`PRECISIONS`; parameters stay float32.

    PyTorch's default is tf32 for convolutions. tf32 exists on GPUs only; elsewhere it is float32.
    """
    cudnn: Any = torch.backends.cudnn
    kinds: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    rough, kind_of_device = precision == "bfloat16", torch.device(device).type
    before = [backend.fp32_precision for backend in kinds]
    try:
        for backend in kinds:
            backend.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        with torch.autocast(kind_of_device, torch.bfloat16, enabled=rough, cache_enabled=False):  # parameters change
            yield
    finally:
        for backend, value in zip(kinds, before, strict=True):
            backend.fp32_precision = value


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
