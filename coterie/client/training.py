"""Local training of one or many clients, each on its own shard.

The ClientApp trains one client per call, the local engine a whole cohort. The sequential implementation is the
reference; the batched one trains all clients at once (``torch.func.vmap``), with equal results up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, mse_loss

from coterie.client.penalties import NO_PENALTY, Penalty
from coterie.datasets import Shard
from coterie.messages import Layout

# Examples per forward pass without gradients; bounds memory.
_CHUNK = 4096
# The same for convolutional networks on a CPU, whose activations then fit its cache.
_IMAGE_CHUNK = 128
# Bytes of models in one batch on a CPU: larger batches do not fit its cache (measured with 784-200-10: batches of
# 4 clients are 2.7 times as fast as batches of 128).
_CACHE = 2_600_000


@dataclass(frozen=True)
class LocalTrainingConfig:
    """Hyper-parameters of local training.

    Attributes:
        local_epochs: passes over the client's data in a round.
        batch_size: examples in a mini-batch; the last one of an epoch may be smaller.
        lr: step size of plain SGD.
        device: torch device.
        penalty: on the distance to the start, added to the loss.
    """

    local_epochs: int
    batch_size: int
    lr: float
    device: str = "cpu"
    penalty: Penalty = NO_PENALTY


def _call(model: nn.Module, layout: Layout, vector: Tensor, x: Tensor) -> Tensor:
    output: Tensor = functional_call(model, layout.split(vector), (x,))
    return output


def _schedule(rng: np.random.Generator, size: int, config: LocalTrainingConfig) -> list[npt.NDArray[np.int64]]:
    """Return the indices of every mini-batch of a round: a new permutation per epoch, split into batches."""
    batches = []
    for _ in range(config.local_epochs):
        order = rng.permutation(size)
        batches += [order[start : start + config.batch_size] for start in range(0, size, config.batch_size)]
    return batches


def train(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
    *,
    batched: bool,
) -> npt.NDArray[np.float32]:
    """Train all clients, and return their updates (trained minus start).

    Args:
        model: the network; its own parameters are not used.
        layout: of its parameters.
        start: (n, d) initial parameters of each client.
        shards: the n clients' data.
        rngs: n generators, for the order of examples.
        config: hyper-parameters.
        batched: whether all clients train at once instead of one after the other.

    Returns:
        (n, d) float32 updates.
    """
    if not batched:
        return _train_sequential(model, layout, start, shards, rngs, config)
    many = max(1, _CACHE // max(4 * layout.size, 1)) if config.device == "cpu" else len(shards)
    parts = [slice(begin, begin + many) for begin in range(0, len(shards), many)]
    return np.concatenate([_train_batched(model, layout, start[p], shards[p], rngs[p], config) for p in parts])


def _train_sequential(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
) -> npt.NDArray[np.float32]:
    updates = np.empty_like(start)
    model = model.to(config.device)
    form = _memory_format(model, shards[0].x.shape[1:], config.device)
    parameters = dict(model.named_parameters())
    for i, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
        x, y = torch.as_tensor(shard.x, device=config.device), torch.as_tensor(shard.y, device=config.device)
        x = x.contiguous(memory_format=form)
        with torch.no_grad():
            anchors = [torch.as_tensor(value, device=config.device) for value in layout.split(start[i]).values()]
            for value, anchor in zip(parameters.values(), anchors, strict=True):
                value.copy_(anchor)
        for batch in _schedule(rng, len(shard.y), config):
            index = torch.as_tensor(batch, device=config.device)
            loss = _example_loss(model(x[index]), y[index]).mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            _descend(parameters.values(), gradients, anchors, config)
        trained = layout.flatten({name: value.detach().cpu() for name, value in parameters.items()})
        updates[i] = trained - start[i]
    return updates


def _is_convolutional(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


@lru_cache(maxsize=8)
def _memory_format(model: nn.Module, shape: tuple[int, ...], device: str) -> torch.memory_format:
    """Return the memory format of examples, and convert the network's parameters to it.

    Convolutions and pooling on a CPU are up to 1.7 times as fast with channels last. Networks that reshape images by
    ``view`` do not support it.
    """
    if device == "cpu" and len(shape) == 3 and _is_convolutional(model):
        probe = copy.deepcopy(model).eval().to(memory_format=torch.channels_last)
        try:
            with torch.no_grad():
                probe(torch.zeros(2, *shape).contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return torch.contiguous_format
        model.to(memory_format=torch.channels_last)
        return torch.channels_last
    return torch.contiguous_format


def _train_batched(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
) -> npt.NDArray[np.float32]:
    device = config.device
    model = model.to(device)
    x, y, _ = _padded(shards, device)
    index, weight = _padded_schedules([_schedule(r, len(s.y), config) for s, r in zip(shards, rngs, strict=True)])
    rows = torch.arange(len(shards), device=device)[:, None]
    forward = vmap(lambda params, xb: functional_call(model, params, (xb,)))
    vectors = layout.split(torch.as_tensor(start, device=device))
    params = {name: value.clone().requires_grad_() for name, value in vectors.items()}
    for batch, part in zip(torch.as_tensor(index, device=device), torch.as_tensor(weight, device=device), strict=True):
        output, labels = forward(params, x[rows, batch]), y[rows, batch]
        each = _example_loss(output.flatten(0, 1), labels.flatten())
        # A client's loss depends on its own parameters only, so the gradient of the sum holds every client's gradient.
        gradients = torch.autograd.grad((each * part.flatten()).sum(), list(params.values()))
        _descend(params.values(), gradients, vectors.values(), config, running=part.any(dim=1))
    flat = torch.cat([params[name].reshape(len(shards), -1) for name in layout.names], dim=1)
    return flat.detach().cpu().numpy() - start


@torch.no_grad()
def _descend(
    values: Iterable[Tensor],
    gradients: Iterable[Tensor],
    anchors: Iterable[Tensor],
    config: LocalTrainingConfig,
    running: Tensor | None = None,
) -> None:
    """Take one step of SGD; of clients in one batch only those that are ``running``, (n,), have steps left."""
    for value, gradient, anchor in zip(values, gradients, anchors, strict=True):
        if config.penalty.weight:
            pull = config.penalty.gradient(value, anchor)
            gradient = gradient + (pull if running is None else pull * running.view(-1, *[1] * (value.dim() - 1)))
        value -= config.lr * gradient


def _padded(shards: Sequence[Shard], device: str) -> tuple[Tensor, Tensor, list[int]]:
    """Return (n, m, *shape) examples and (n, m) labels, padded with zeros, and the true sizes."""
    sizes = [len(shard.y) for shard in shards]
    most = max(sizes)
    x = np.zeros((len(shards), most, *shards[0].x.shape[1:]), shards[0].x.dtype)
    y = np.zeros((len(shards), most), shards[0].y.dtype)
    for i, shard in enumerate(shards):
        x[i, : sizes[i]], y[i, : sizes[i]] = shard.x, shard.y
    return torch.as_tensor(x, device=device), torch.as_tensor(y, device=device), sizes


def _padded_schedules(
    schedules: Sequence[list[npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return (steps, n, b) indices, and weights that average over each true batch and are 0 on padding."""
    steps = max(len(schedule) for schedule in schedules)
    width = max(len(batch) for schedule in schedules for batch in schedule)
    index = np.zeros((steps, len(schedules), width), np.int64)
    weight = np.zeros((steps, len(schedules), width), np.float32)
    for i, schedule in enumerate(schedules):
        for step, batch in enumerate(schedule):
            index[step, i, : len(batch)] = batch
            weight[step, i, : len(batch)] = 1 / len(batch)
    return index, weight


@torch.no_grad()
def losses(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], shards: Sequence[Shard], device: str = "cpu"
) -> npt.NDArray[np.float64]:
    """Return the (n, k) mean loss of every model on every client's training data; inf where it is not finite."""
    sizes = np.array([len(shard.y) for shard in shards])
    owner = np.repeat(np.arange(len(shards)), sizes)
    x, y = np.concatenate([s.x for s in shards]), np.concatenate([s.y for s in shards])
    result = np.zeros((len(shards), len(models)))
    for j, each in enumerate(_per_example(model, layout, models, x, y, device, _example_loss)):
        result[:, j] = np.bincount(owner, weights=each, minlength=len(shards)) / sizes
    return np.where(np.isfinite(result), result, np.inf)


@torch.no_grad()
def example_losses(
    model: nn.Module, layout: Layout, models: npt.NDArray[np.float32], shard: Shard, device: str = "cpu"
) -> npt.NDArray[np.float64]:
    """Return the (N, k) loss of every model on every example of one client; N may be 0."""
    if not len(shard.y):
        return np.zeros((0, len(models)))
    return np.stack(_per_example(model, layout, models, shard.x, shard.y, device, _example_loss), axis=1)


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
        errors = [each.sum() for each in _per_example(model, layout, models, x, y, device, _example_loss)]
        return np.maximum(0.0, 1 - np.array(errors) / max(float(np.sum((y - y.mean()) ** 2)), 1e-12))
    return np.array([each.mean() for each in _per_example(model, layout, models, x, y, device, _example_hit)])


def _example_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the (n,) cross-entropy of (n, classes) logits, or the squared error for real targets."""
    if y.is_floating_point():
        return mse_loss(output, y, reduction="none")
    return cross_entropy(output, y, reduction="none")


def _example_hit(logits: Tensor, y: Tensor) -> Tensor:
    return logits.argmax(dim=1) == y


def _per_example(
    model: nn.Module, layout: Layout, models: Any, x: Any, y: Any, device: str, score: Any
) -> list[npt.NDArray[np.float64]]:
    """Return the (n,) scores of all examples, for every model."""
    model = model.to(device)
    vectors = torch.as_tensor(models, device=device)
    scores: list[list[Tensor]] = [[] for _ in vectors]
    chunk = _IMAGE_CHUNK if device == "cpu" and _is_convolutional(model) else _CHUNK
    for begin in range(0, len(y), chunk):
        xb = torch.as_tensor(x[begin : begin + chunk], device=device)
        yb = torch.as_tensor(y[begin : begin + chunk], device=device)
        for j, vector in enumerate(vectors):
            scores[j].append(score(_call(model, layout, vector, xb), yb))
    return [torch.cat(parts).double().cpu().numpy() for parts in scores]
