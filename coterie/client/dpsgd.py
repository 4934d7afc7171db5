"""Record-level DP-SGD at the clients; no trusted party is required. RC-DPFL's DPSGD(theta, b, N, K, z, c):

    for K floor(N / b) steps:
        B ← each record with probability b / N
        g ← Σ_{i in B} clip(∇ loss_i(theta), c)
        theta ← theta - lr (c (g / c + N(0, z² I)) / b + ∇ penalty(theta))

If c is adaptive, a step also counts the gradients of B that are shorter than a threshold, and the round releases the
sum of :func:`short` over records with noise; see :class:`~coterie.privacy.RecordPlan`.

By Adam, the last line is theta ← theta - lr (direction(g / c + N(0, z² I)) + ∇ penalty(theta)): see
:class:`coterie.client.noisy_adam.NoisyAdam`.

b = N is a full batch. The penalty reads theta and its start alone (client/penalties.py); by default there is none.
client/gradients.py has the definition of a record's gradient, and the ways to clip and sum gradients.

If records belong to units, such as patients, B draws units, and loss_i is the mean loss of unit i over at most
``units.most`` of its records: clip bounds what a patient changes. N and b count units.

ε assumes real numbers. Norms and sums are float64, so that one record changes a sum by at most c. Gradients of a record
are float32, and their last bits may depend on the other records of the physical batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from coterie.client.backend import Examples, padded
from coterie.client.clipper import Clipper, Loss, OneClient, Sums
from coterie.client.device import free_device, free_memory, products
from coterie.client.device_noise import DeviceNoise, is_secret
from coterie.client.gradients import by_unit, clipper_of
from coterie.client.noisy_adam import NoisyAdam
from coterie.client.penalties import NO_PENALTY, Penalty
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.fields import AT_LEAST_0, AT_LEAST_1, CLIP_NORM, Bounded, OneOf
from coterie.models import num_parameters, trainable
from coterie.models.settings import OPTIMIZERS
from coterie.privacy import RecordPlan, gaussian
from coterie.tasks import AUTO, Task
from coterie.wire.messages import Layout

Vectors = npt.NDArray[np.float32]
Generators = Sequence[np.random.Generator]
T = TypeVar("T")

# Records in a physical batch: bounds activations; larger batches are no faster.
_MAX_RECORDS = 256


@dataclass(frozen=True)
class DPSGD(Bounded):  # large: one field per setting
    """Settings of a client's DP-SGD in one round. All are public.

    Attributes:
        num_examples: N, the public number of records. The true number may differ by one: sampling rate, steps and
            divisor depend on N only.
        batch_size: b, expected size of a Poisson batch; N: a full batch.
        epochs: K; a round has K floor(N / b) steps.
        lr: step size.
        clip_norm: c, L2 bound of one record's gradient over all parameters together.
        noise_multiplier: z; noise z c is added to the sum of clipped gradients. 0: no privacy.
        norm_threshold: the norm with which those of gradients are compared.
        noise_of_norms: noise on a step's sum of :func:`short` over gradients; None: the sum is not released.
        device: torch device; it must support float64.
        penalty: on the distance to the start.
        optimizer: "sgd", "adam" or "adamw".
        task: what the model predicts, whose losses have the gradients.
        memory_mb: limit for per-record gradients, or for the inputs and outputs of layers from which ghost clipping
            computes their sum; it sets the physical batch size, which is at least 1.

    Raises:
        ValueError: a number is out of range.
    """

    error = ValueError

    num_examples: Annotated[int, AT_LEAST_1]
    batch_size: Annotated[int, AT_LEAST_1]
    epochs: Annotated[int, AT_LEAST_1]
    lr: Annotated[float, AT_LEAST_0]
    clip_norm: Annotated[float, CLIP_NORM]
    noise_multiplier: Annotated[float, AT_LEAST_0]
    device: str = "cpu"
    penalty: Penalty = NO_PENALTY
    norm_threshold: float = math.inf
    noise_of_norms: float | None = None
    memory_mb: Annotated[int, AT_LEAST_1] = 512
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    task: Task = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.num_examples:
            raise ValueError(f"batch-size must be at most num-examples = {self.num_examples}, not {self.batch_size}")

    @classmethod
    def of(cls, plan: RecordPlan, training: LocalTrainingConfig, first: bool = False) -> DPSGD:
        """The settings of a plan, in round 1 or in later rounds."""
        return cls(
            num_examples=plan.num_examples,
            batch_size=plan.batch(first),
            epochs=plan.local_epochs,
            lr=training.lr,
            clip_norm=plan.clip_norm,
            noise_multiplier=plan.noise_of_gradients(first),
            device=training.device,
            penalty=training.penalty,
            norm_threshold=plan.norm_threshold,
            noise_of_norms=plan.noise_of_norms(first),
            optimizer=training.plugins.optimizer,
            task=training.task,
        )

    @property
    def steps(self) -> int:
        """Number of noisy steps in a round."""
        return self.epochs * (self.num_examples // self.batch_size)

    def sample(self, coins: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Return the indices of a Poisson batch of ``size`` records."""
        return np.flatnonzero(coins.random(size) < self.batch_size / self.num_examples)

    def noise(self, noises: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        """Return (size,) noise for a sum of clipped gradients, in units of the clipping norm."""
        return gaussian(noises, self.noise_multiplier, (size,))

    def below(self, counted: float, noises: np.random.Generator) -> float:
        """Return the noisy share of short gradients in a round, near [0, 1], by their sum of :func:`short`."""
        if self.noise_of_norms is None:
            return math.nan
        deviation = self.noise_of_norms * math.sqrt(self.steps)
        noisy = counted + float(gaussian(noises, deviation, (1,))[0])
        return 0.5 + noisy / (self.steps * self.batch_size)

    @property
    def step_size(self) -> float:
        """lr c / b, the factor of a noisy sum in units of the clipping norm."""
        return self.lr * self.clip_norm / self.batch_size


def short(norms: Tensor, threshold: float | Tensor) -> Tensor:
    """Return 1/2 for norms up to 3/4 of a threshold, -1/2 from 5/4 of it or if not finite, linear in between.

    With a step at the threshold, one record could move the count by more than 1: the last bits of the other gradients
    may depend on it, and a server that knows these could choose the threshold at their norms.
    """
    return torch.clamp(2 * (1 - norms / threshold), -0.5, 0.5).where(norms.isfinite(), -0.5)


def train_privately(
    model: nn.Module,
    layout: Layout,
    start: Vectors,
    shards: Sequence[Shard],
    coins: Generators,
    noises: Generators,
    settings: Sequence[DPSGD],
    *,
    batched: bool,
    ghost: bool = True,
    below: npt.NDArray[np.float64] | None = None,
) -> Vectors:
    """Train all clients by DP-SGD, and return their updates (trained minus start).

    Args:
        model: the network; its parameters and hooks are left unchanged.
        layout: of its parameters.
        start: (n, d) initial parameters of each client.
        shards: the n clients' data.
        coins: n generators, for Poisson batches.
        noises: n other generators, for noise, drawn ahead of their use; cryptographic ones unless the run is seeded.
        settings: of the n clients, all on one device, with one penalty, one optimizer and one task.
        batched: whether all clients train at once if the network is a chain of linear layers.
        ghost: whether clients that train one after the other clip without materialised gradients if the network's
            layers support it; otherwise by Opacus, the reference.
        below: (n,) output for each client's noisy share of short gradients; NaN where it is not released.

    Returns:
        (n, d) float32 updates.

    Raises:
        ModelError: per-record gradients of the network are not supported.
    """
    examples, units = Examples.of(shards[0].x, shards[0].y, settings[0].device), shards[0].units is not None
    clipper = clipper_of(model, examples, settings[0].task, batched=batched, ghost=ghost, units=units)
    shards = [*map(by_unit, shards)] if units else shards
    at_once = 1 if isinstance(clipper, OneClient) else len(shards)
    updates, counts = np.empty_like(start), np.empty(len(shards))
    with products("float32", examples.device):  # PyTorch's default for convolutions on a GPU has 10 bits of mantissa
        for begin in range(0, len(shards), at_once):
            group = slice(begin, begin + at_once)
            clients = shards[group], coins[group], noises[group], settings[group]
            updates[group], counts[group] = _train(clipper, layout, start[group], *clients)
    if below is not None:
        below[:] = [dpsgd.below(count, noise) for dpsgd, count, noise in zip(settings, counts, noises, strict=True)]
    return updates


def _train(
    clipper: Clipper,
    layout: Layout,
    start: Vectors,
    shards: Sequence[Shard],
    coins: Generators,
    noises: Generators,
    settings: Sequence[DPSGD],
) -> tuple[Vectors, list[float]]:
    """Return the (n, d) updates and the n sums of :func:`short` over all steps."""
    device = settings[0].device
    x, y, sizes = padded(shards, device)
    owners = torch.arange(len(shards), device=device)[:, None]
    anchors = torch.tensor(start, device=device)
    theta = anchors.clone()
    parameters = layout.split(theta)
    clip_norms, rates, thresholds = (
        torch.tensor([[getattr(dpsgd, name)] for dpsgd in settings], dtype=torch.float64, device=device)
        for name in ("clip_norm", "step_size", "norm_threshold")
    )
    counts = torch.zeros(len(shards), dtype=torch.float64, device=device)
    counting = any(dpsgd.noise_of_norms is not None for dpsgd in settings)
    memory_mb = min(dpsgd.memory_mb for dpsgd in settings)
    if device != "cpu":
        memory_mb = max(memory_mb, free_memory(device) >> 21)  # half of it, in MB
    most = _physical_batch(len(shards) * clipper.numbers, memory_mb)
    clients, idle = list(zip(settings, coins, sizes, strict=True)), np.zeros(0, np.int64)
    adam = None if settings[0].optimizer == "sgd" else NoisyAdam(settings)

    def sums(records: Tensor, counted: Tensor) -> Sums:
        return clipper.sums(parameters, x[owners, records], y[owners, records], counted, clip_norms)

    noise = _ahead(_noise(settings, noises, layout.size, device), max(dpsgd.steps for dpsgd in settings))
    for step, total in enumerate(noise):
        batches = [dpsgd.sample(coin, size) if step < dpsgd.steps else idle for dpsgd, coin, size in clients]
        batch = pad_sequence([*map(torch.as_tensor, batches)], batch_first=True, padding_value=-1).to(device)
        for clipped, norms, counted in _within_memory(sums, batch, most):
            total += clipped
            if counting:
                counts += short(norms, thresholds).where(counted, 0).sum(1)
        moves = rates * total if adam is None else adam.moves(total, theta)
        if settings[0].penalty.weight:
            lrs = torch.tensor([[dpsgd.lr if step < dpsgd.steps else 0.0] for dpsgd in settings], device=device)
            moves += lrs * settings[0].penalty.gradient(theta, anchors)
        theta -= moves
    return (theta - anchors).cpu().numpy(), counts.tolist()


def _noise(settings: Sequence[DPSGD], noises: Generators, size: int, device: str) -> Callable[[int], Tensor]:
    """Return what draws the (n, size) noise of a step in units of the clipping norm, 0 for clients that are done."""
    if _makes_noise(device, noises):
        streams = DeviceNoise([rng.bytes(32) for rng in noises], device)
        stds = torch.tensor([dpsgd.noise_multiplier for dpsgd in settings], dtype=torch.float64, device=device)
        steps = torch.tensor([dpsgd.steps for dpsgd in settings], device=device)
        return lambda step: streams.gaussian(stds * (step < steps), size)
    clients = list(zip(settings, noises, strict=True))

    def noise(step: int) -> Tensor:
        drawn = [own.noise(rng, size) if step < own.steps else np.zeros(size) for own, rng in clients]
        return torch.as_tensor(np.stack(drawn), device=device)

    return noise


def _makes_noise(device: str, noises: Generators) -> bool:
    return device != "cpu" and all(map(is_secret, noises))


def _within_memory(
    sums: Callable[[Tensor, Tensor], Sums], batch: Tensor, most: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield clipped sums and norms of chunks of a batch, and which records count; halve chunks that exceed the memory.

    A batch has (n, m) indices of records, where -1 is padding, and a chunk at most ``most`` columns of it.
    """
    waiting = deque(torch.split(batch, most, dim=1) if batch.numel() else ())
    while waiting:
        chunk = waiting.popleft()
        try:
            yield *sums(chunk, chunk >= 0), chunk >= 0
        except torch.OutOfMemoryError:
            if chunk.shape[1] == 1:
                raise
            free_device()
            waiting.extendleft(reversed(torch.tensor_split(chunk, 2, dim=1)))


def _ahead(draw: Callable[[int], T], count: int) -> Iterator[T]:
    """Yield ``draw(0)`` to ``draw(count - 1)``, count > 0.

    If this process may use several cores, a thread makes each of these calls while the former result is used. A worker
    of the local engine uses one core.
    """
    if torch.get_num_threads() == 1:
        yield from map(draw, range(count))
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        drawn = draw(0)
        for number in range(1, count):
            following = thread.submit(draw, number)
            yield drawn
            drawn = following.result()
        yield drawn


def clipped_gradients(model: nn.Module, x: Tensor, loss: Loss, settings: DPSGD, *, ghost: bool = True) -> Tensor:
    """Return the (d,) float64 sum of clipped per-record gradients, in units of the clipping norm.

    The gradients are at the model's current parameters, which are left unchanged.

    Args:
        model: a network without layers that mix records.
        x: (m, *shape) the batch; m may be 0.
        loss: maps outputs and targets, which it may ignore, to (m,) losses.
        settings: clipping norm, memory limit and device.
        ghost: see :func:`train_privately`.

    Raises:
        ModelError: per-record gradients of the network are not supported.
    """
    examples = Examples(x.shape[1:], x.dtype, torch.float32, settings.device)
    clipper = clipper_of(model, examples, loss, batched=False, ghost=ghost, units=False)
    parameters = {name: parameter.data[None] for name, parameter in trainable(model).items()}
    clip_norms = torch.full((1, 1), settings.clip_norm, dtype=torch.float64, device=settings.device)
    total = torch.zeros(num_parameters(model), dtype=torch.float64, device=settings.device)

    def sums(rows: Tensor, counted: Tensor) -> Sums:
        return clipper.sums(parameters, x[rows], torch.zeros(rows.shape, device=x.device), counted, clip_norms)

    batch = torch.arange(len(x), device=x.device)[None]
    for clipped, _, _ in _within_memory(sums, batch, _physical_batch(clipper.numbers, settings.memory_mb)):
        total += clipped[0]
    return total


def _physical_batch(numbers: int, memory_mb: int) -> int:
    """Return the size of a physical batch, given the float32 numbers per record."""
    return max(1, min(_MAX_RECORDS, memory_mb * 2**20 // (4 * numbers)))
