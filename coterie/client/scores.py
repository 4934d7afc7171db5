"""Losses and accuracies of models, in one pass over the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from coterie.client.chains import chain_outputs, is_image_chain
from coterie.client.device import fast_network, is_convolutional, products, supports_vmap
from coterie.client.sgd import example_loss
from coterie.datasets import Shard
from coterie.wire.messages import Layout

# Examples per forward pass; bounds memory.
_CHUNK = 4096
# The same, for all models together, of convolutional networks on a CPU, whose activations then fit its cache.
_IMAGE_CHUNK = 128

FloatArray: TypeAlias = npt.NDArray[np.float64]
#: Maps (n, classes) outputs and (n,) targets to (n,) scores.
Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def losses(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], shards: Sequence[Shard], device: str = "cpu"
) -> npt.NDArray[np.float64]:
    """Return the (n, k) mean loss of every model on every client's training data; inf where it is not finite."""
    sizes = np.array([len(shard.y) for shard in shards])
    owner = np.repeat(np.arange(len(shards)), sizes)
    x, y = np.concatenate([s.x for s in shards]), np.concatenate([s.y for s in shards])
    result = np.zeros((len(shards), len(models)))
    for j, each in enumerate(_per_example(model, layout, models, x, y, device, example_loss)):
        result[:, j] = np.bincount(owner, weights=each, minlength=len(shards)) / sizes
    return np.where(np.isfinite(result), result, np.inf)


@torch.no_grad()
def example_losses(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], shard: Shard, device: str = "cpu"
) -> npt.NDArray[np.float64]:
    """Return the (N, k) loss of every model on every example of one client; N may be 0."""
    if not len(shard.y):
        return np.zeros((0, len(models)))
    return np.stack(_per_example(model, layout, models, shard.x, shard.y, device, example_loss), axis=1)


@torch.no_grad()
def accuracies(
    model: nn.Module,
    layout: Layout,
    models: npt.NDArray[np.float32],
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.int64],
    device: str = "cpu",
) -> npt.NDArray[np.float64]:
    """Return each model's accuracy (k,) on these examples; for real targets R², at least 0."""
    if np.issubdtype(y.dtype, np.floating):
        errors = [each.sum() for each in _per_example(model, layout, models, x, y, device, example_loss)]
        return np.maximum(0.0, 1 - np.array(errors) / max(float(np.sum((y - y.mean()) ** 2)), 1e-12))
    return np.array([each.mean() for each in _per_example(model, layout, models, x, y, device, _example_hit)])


def _example_hit(logits: Tensor, y: Tensor) -> Tensor:
    return logits.argmax(dim=1) == y


def _per_example(
    model: nn.Module,
    layout: Layout,
    models: npt.NDArray[np.float32],
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.int64],
    device: str,
    score: Score,
) -> list[FloatArray]:
    """Return the (n,) scores of all examples, for every model."""
    model, form = fast_network(model, x.shape[1:], device)
    outputs = _outputs(model, layout.split(torch.as_tensor(models, device=device)), x, form)
    chunk = max(1, _IMAGE_CHUNK // len(models)) if device == "cpu" and is_convolutional(model) else _CHUNK
    scores = []
    with products("float32", device):
        for begin in range(0, len(y), chunk):
            xb = torch.as_tensor(x[begin : begin + chunk], device=device).contiguous(memory_format=form)
            yb = torch.as_tensor(y[begin : begin + chunk], device=device)
            scores.append([score(output, yb) for output in outputs(xb)])
    return [torch.cat(parts).double().cpu().numpy() for parts in zip(*scores, strict=True)]


def _outputs(
    model: nn.Module, parameters: dict[str, Tensor], x: npt.NDArray[Any], form: torch.memory_format
) -> Callable[[Tensor], Iterable[Tensor]]:
    """Return a function from examples to the outputs of k models, whose parameters are (k, *shape)."""
    some = next(iter(parameters.values()))
    if len(some) > 1 and is_image_chain(model, x.ndim - 1):
        return partial(chain_outputs, model, parameters)
    if len(some) > 1 and some.device.type != "cpu" and _supports_vmap(model, x, str(some.device)):
        # Small networks do not fill a GPU.
        return lambda xb: vmap(lambda each: functional_call(model, each, (xb,)))(parameters)
    each = [{name: _in_form(value[i], form) for name, value in parameters.items()} for i in range(len(some))]
    return lambda xb: (functional_call(model, one, (xb,)) for one in each)


def _supports_vmap(model: nn.Module, x: npt.NDArray[Any], device: str) -> bool:
    return supports_vmap(model, x.shape[1:], torch.as_tensor(x[:0]).dtype, device)


def _in_form(value: Tensor, form: torch.memory_format) -> Tensor:
    """Return weights of convolutions with strides of this format, also those of one channel."""
    return torch.empty_like(value, memory_format=form).copy_(value) if value.dim() == 4 else value
