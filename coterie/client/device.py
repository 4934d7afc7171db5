"""Data and precision on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
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


def joined(shards: Sequence[Shard], device: str) -> tuple[Any, Any]:
    """Return the examples and labels of all clients together: arrays, or tensors on a GPU."""
    if device == "cpu":
        return np.concatenate([shard.x for shard in shards]), np.concatenate([shard.y for shard in shards])
    pairs = [on_device(shard, device) for shard in shards]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def to_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array."""
    return np.asarray(values.cpu().numpy())


def free_memory(device: str) -> int:
    """Return the bytes of a GPU that are free, those of PyTorch's cache included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def free_device() -> None:
    """Forget the data on the GPU."""
    _ON_GPU.clear()
