"""Local training of one or many clients, each on its own shard.

The ClientApp trains one client per call, the local engine a whole cohort. The sequential implementation
(:mod:`coterie.client.sgd`) is the reference. The batched ones train all clients at once, with equal results up to
rounding: chains of linear layers by batched matrix products, other networks by ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from coterie.client.sgd import LocalTrainingConfig, descend, example_loss, pull, schedule, train_sequentially
from coterie.datasets import Shard
from coterie.messages import Layout

# Bytes of models in one batch on a CPU: larger batches do not fit its cache.
_CACHE = 2_600_000


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
        return train_sequentially(model, layout, start, shards, rngs, config)
    many = max(1, _CACHE // max(4 * layout.size, 1)) if config.device == "cpu" else len(shards)
    parts = [slice(begin, begin + many) for begin in range(0, len(shards), many)]
    return np.concatenate([_train_batched(model, layout, start[p], shards[p], rngs[p], config) for p in parts])


def is_chain(model: nn.Module, dimensions: int) -> bool:
    """Whether a network consists of linear layers on vectors with ReLU between them, each layer used once.

    Args:
        model: the network.
        dimensions: of one example.
    """
    return (
        type(model) is nn.Sequential
        and len(set(model)) == len(model)
        and all(
            type(layer) in (nn.Flatten, nn.Linear, nn.ReLU) and not getattr(layer, "inplace", False) for layer in model
        )
        and (dimensions == 1 or type(model[0]) is nn.Flatten)
    )


#: Examples and labels of one step of every client, (n, b, *shape) and (n, b), and the weight of each in the mean loss.
_Batch = tuple[Tensor, Tensor, Tensor]


def _train_batched(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
) -> npt.NDArray[np.float32]:
    vectors = torch.tensor(start, device=config.device)
    anchors = layout.split(vectors.clone() if config.penalty.weight else vectors)
    classes = not np.issubdtype(shards[0].y.dtype, np.floating)
    step = _step_of_chain if classes and is_chain(model, shards[0].x.ndim - 1) else _step
    model = model.to(config.device)
    for batch in _batches(shards, rngs, config):
        step(model, layout.split(vectors), anchors, batch, config)
    return vectors.cpu().numpy() - start


def _batches(
    shards: Sequence[Shard], rngs: Sequence[np.random.Generator], config: LocalTrainingConfig
) -> Iterator[_Batch]:
    """Yield the batches of every step; clients with fewer steps or smaller batches have examples of weight 0."""
    x, y, _ = padded(shards, config.device)
    index, weight = _padded_schedules([schedule(r, len(s.y), config) for s, r in zip(shards, rngs, strict=True)])
    rows = torch.arange(len(shards), device=config.device)[:, None]
    for batch, part in zip(
        torch.as_tensor(index, device=config.device), torch.as_tensor(weight, device=config.device), strict=True
    ):
        yield x[rows, batch], y[rows, batch], part


def _step(
    model: nn.Module,
    parameters: dict[str, Tensor],
    anchors: dict[str, Tensor],
    batch: _Batch,
    config: LocalTrainingConfig,
) -> None:
    """Take one step of SGD of every client: of (n, *shape) parameters of any network, in place."""
    x, y, weight = batch
    for value in parameters.values():
        value.requires_grad_()
    output = vmap(lambda each, xb: functional_call(model, each, (xb,)))(parameters, x)
    losses = example_loss(output.flatten(0, 1), y.flatten())
    # A client's loss depends on its own parameters only, so the gradient of the sum holds every client's gradient.
    gradients = torch.autograd.grad((losses * weight.flatten()).sum(), list(parameters.values()))
    descend(parameters.values(), gradients, anchors.values(), config, running=weight.any(dim=1))


@torch.no_grad()
def _step_of_chain(
    model: nn.Module,
    parameters: dict[str, Tensor],
    anchors: dict[str, Tensor],
    batch: _Batch,
    config: LocalTrainingConfig,
) -> None:
    """:func:`_step` of a chain (:func:`is_chain`) with cross-entropy: batched matrix products, gradients by hand."""
    x, y, weight = batch
    hidden, inputs = x.flatten(2), []
    for name, layer in model.named_children():
        inputs.append(hidden)
        if isinstance(layer, nn.Linear):
            hidden = torch.bmm(hidden, parameters[f"{name}.weight"].mT)
            if layer.bias is not None:
                hidden += parameters[f"{name}.bias"][:, None]
        elif isinstance(layer, nn.ReLU):
            hidden = hidden.relu()
    slope = hidden.softmax(2)  # the gradient of the weighted loss with respect to each layer's output
    slope.scatter_add_(2, y[..., None], slope.new_full((*y.shape, 1), -1))
    slope *= weight[..., None]
    if config.penalty.weight:
        pulls = {name: pull(value, anchors[name], config, weight.any(dim=1)) for name, value in parameters.items()}
    for (name, layer), before in zip(reversed(list(model.named_children())), reversed(inputs), strict=True):
        if isinstance(layer, nn.ReLU):
            slope = slope.where(before > 0, 0)
        elif isinstance(layer, nn.Linear):
            matrix, gradient = parameters[f"{name}.weight"], slope
            slope = torch.bmm(slope, matrix) if before is not inputs[0] else slope
            matrix.baddbmm_(gradient.mT, before, alpha=-config.lr)
            if layer.bias is not None:
                parameters[f"{name}.bias"].sub_(gradient.sum(1), alpha=config.lr)
    if config.penalty.weight:
        for name, value in parameters.items():
            value.sub_(pulls[name], alpha=config.lr)


def padded(shards: Sequence[Shard], device: str) -> tuple[Tensor, Tensor, list[int]]:
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
    steps = max(map(len, schedules))
    width = max(len(batch) for batches in schedules for batch in batches)
    index = np.zeros((steps, len(schedules), width), np.int64)
    weight = np.zeros((steps, len(schedules), width), np.float32)
    for i, batches in enumerate(schedules):
        for step, batch in enumerate(batches):
            index[step, i, : len(batch)] = batch
            weight[step, i, : len(batch)] = 1 / len(batch)
    return index, weight
