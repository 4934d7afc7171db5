"""Local training of one or many clients, each on its own shard.

The ClientApp trains one client per call, the local engine a whole cohort. The sequential implementation
(:mod:`coterie.client.sgd`) is the reference. The batched ones train several clients at once, with equal results up to
rounding: chains of common layers by hand (:mod:`coterie.client.chains`), other networks by ``torch.func.vmap``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from coterie.client.chains import is_image_chain, is_linear_chain, step_of_chain
from coterie.client.device import fast_network, free_device, on_device, products, supports_vmap
from coterie.client.sgd import LocalTrainingConfig, Schedule, descend, example_loss, schedule, train_sequentially
from coterie.datasets import Shard
from coterie.wire.messages import Layout

# Bytes of models in one batch on a CPU, and images in one step of image chains: larger batches do not fit its cache.
_CACHE = 2_600_000
_IMAGES = 256


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
    many = _many(model, layout, shards, config)
    alone = many == 1 and is_image_chain(model, shards[0].x.ndim - 1)  # has only one group
    if not batched or alone or not _trains_together(model, shards[0], config):
        with products(config.precision, config.device):
            return train_sequentially(model, layout, start, shards, rngs, config)
    batches = [schedule(rng, len(shard.y), config) for shard, rng in zip(shards, rngs, strict=True)]
    order = np.argsort([len(shard.y) for shard in shards], kind="stable")  # clients of similar sizes train together
    parts = deque(np.array_split(order, -(-len(order) // many)))
    updates = np.empty_like(start)
    while parts:
        part = parts.popleft()
        several = [shards[i] for i in part], [batches[i] for i in part]
        try:
            with products(config.precision, config.device):
                updates[part] = _train_batched(model, layout, start[part], *several, config)
        except torch.OutOfMemoryError:
            if len(part) == 1:
                raise
            free_device()
            parts.extendleft(reversed(np.array_split(part, 2)))
    return updates


def _many(model: nn.Module, layout: Layout, shards: Sequence[Shard], config: LocalTrainingConfig) -> int:
    """Return how many clients train in one batch."""
    if config.device != "cpu":
        return len(shards)
    many = _CACHE // max(4 * layout.size, 1)
    if is_image_chain(model, shards[0].x.ndim - 1):
        most = max(len(shard.y) for shard in shards)
        many = min(many, _IMAGES // max(1, min(config.batch_size, most)))
    return max(1, min(many, len(shards)))


def _is_chain(model: nn.Module, shard: Shard, config: LocalTrainingConfig) -> bool:
    """Whether gradients by hand apply: to chains with cross-entropy, without mixed precision."""
    dimensions = shard.x.ndim - 1
    classes = not np.issubdtype(shard.y.dtype, np.floating)
    chain = is_linear_chain(model, dimensions) or is_image_chain(model, dimensions)
    return classes and chain and config.precision != "bfloat16"


def _trains_together(model: nn.Module, shard: Shard, config: LocalTrainingConfig) -> bool:
    x = torch.as_tensor(shard.x[:0])
    return _is_chain(model, shard, config) or supports_vmap(model, x.shape[1:], x.dtype, config.device)


#: Examples and labels of one step of every client, (n, b, *shape) and (n, b), and the weight of each in the mean loss.
_Batch = tuple[Tensor, Tensor, Tensor]


def _train_batched(
    model: nn.Module,
    layout: Layout,
    start: npt.NDArray[np.float32],
    shards: Sequence[Shard],
    schedules: Sequence[Schedule],
    config: LocalTrainingConfig,
) -> npt.NDArray[np.float32]:
    vectors = torch.tensor(start, device=config.device)
    anchors = layout.split(vectors.clone() if config.penalty.weight else vectors)
    step = step_of_chain if _is_chain(model, shards[0], config) else _step
    model, _ = fast_network(model, shards[0].x.shape[1:], config.device)
    for batch in _batches(shards, schedules, config.device):
        step(model, layout.split(vectors), anchors, batch, config)
    return vectors.cpu().numpy() - start


def _batches(shards: Sequence[Shard], schedules: Sequence[Schedule], device: str) -> Iterator[_Batch]:
    """Yield the batches of every step; clients with fewer steps or smaller batches have examples of weight 0."""
    x, y, _ = padded(shards, device)
    index, weight = (torch.as_tensor(part, device=device) for part in _padded_schedules(schedules))
    rows = torch.arange(len(shards), device=device)[:, None]
    for batch, part in zip(index, weight, strict=True):
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


def padded(shards: Sequence[Shard], device: str) -> tuple[Tensor, Tensor, list[int]]:
    """Return (n, m, *shape) examples and (n, m) labels, padded with zeros, and the true sizes."""
    pairs = [on_device(shard, device) for shard in shards]
    x, y = ([pair[i] for pair in pairs] for i in range(2))
    sizes = [len(shard.y) for shard in shards]
    if len(set(sizes)) == 1:
        return torch.stack(x), torch.stack(y), sizes
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True), sizes


def _padded_schedules(schedules: Sequence[Schedule]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return (steps, n, b) indices, and weights that average over each true batch and are 0 on padding."""
    steps = max(map(len, schedules))
    width = max((len(batch) for batches in schedules for batch in batches), default=0)
    index = np.zeros((steps, len(schedules), width), np.int64)
    weight = np.zeros((steps, len(schedules), width), np.float32)
    for i, batches in enumerate(schedules):
        for step, batch in enumerate(batches):
            index[step, i, : len(batch)] = batch
            weight[step, i, : len(batch)] = 1 / len(batch)
    return index, weight
