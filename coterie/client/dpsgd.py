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
A record's gradient is defined by a batch of this record alone (:class:`BatchesOfOne`), whatever the network does with
a batch. A batch of many records takes the place of many batches only for networks that are traced to layers which treat
records apart (client/records_apart.py). These are clipped without materialised gradients (client/ghost.py) if ghost
norms support their layers: all clients at once if the network is a chain of linear layers, otherwise one after the
other. Opacus materialises the gradients of other layers, and is the reference. On a GPU, all clients train at once,
with materialised gradients for networks that are no chain.

If records belong to units, such as patients, B draws units, and loss_i is the mean loss of unit i over at most
``units.most`` of its records: clip bounds what a patient changes. N and b count units.

ε assumes real numbers. Norms and sums are float64, so that one record changes a sum by at most c. Gradients of a record
are float32, and their last bits may depend on the other records of the physical batch.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.client.backend import Examples, fast_network, padded
from coterie.client.chains import chain_kind
from coterie.client.device import free_device, free_memory, products
from coterie.client.device_noise import DeviceNoise, is_secret
from coterie.client.ghost import Clipper, GhostClipping, clip_factors, clipped_sums, supports
from coterie.client.noisy_adam import NoisyAdam
from coterie.client.penalties import NO_PENALTY, Penalty
from coterie.client.records_apart import fresh, quiet_vmap, traced
from coterie.client.sgd import LocalTrainingConfig
from coterie.datasets import Shard
from coterie.fields import AT_LEAST_0, AT_LEAST_1, CLIP_NORM, Bounded, OneOf
from coterie.models import CONSTANT, ModelError, call, constants, differing, num_parameters, set_training, trainable
from coterie.models.settings import OPTIMIZERS
from coterie.privacy import RecordPlan, gaussian
from coterie.tasks import AUTO, Task
from coterie.wire.messages import Layout

Vectors = npt.NDArray[np.float32]
Generators = Sequence[np.random.Generator]
T = TypeVar("T")
#: Maps outputs and targets to the loss of every record.
Loss = Callable[[Tensor, Tensor], Tensor]

# Records in a physical batch: bounds activations; larger batches are no faster.
_MAX_RECORDS = 256
# Numbers in a float64 copy: 4 MB, which the allocator reuses. Copies of 32 MB take up to 5 times as long.
_MAX_NUMBERS = 2**19


def check_supported(model: nn.Module, input_shape: Sequence[int], task: Task, kind: str, units: bool = False) -> None:
    """Check that gradients of records can be taken, and prepare it.

    Args:
        model: the network.
        input_shape: shape of an example, after the features.
        task: what it predicts.
        kind: "images", "vectors" or "tokens".
        units: whether records belong to units.

    Raises:
        ModelError: its gradients per record, or per unit, are not supported.
    """
    x = torch.int64 if kind == "tokens" else torch.float32
    y = torch.float32 if task.real else torch.int64
    examples = Examples(tuple(input_shape), x, y, "cpu")
    if units or _together(model, examples, task) is None:
        _clipper(model, examples, task, True, units)


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
        task: what is predicted, whose losses have the gradients.
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
    examples = Examples.of(shards[0].x, shards[0].y, settings[0].device)
    units = shards[0].units is not None
    task = settings[0].task
    together = _together(model, examples, task) if batched and not units else None
    clipping = together or _clipper(model, examples, task, ghost, units)
    shards = [*map(_of_units, shards)] if units else shards
    at_once = len(shards) if together else 1
    updates, counts = np.empty_like(start), np.empty(len(shards))
    with products("float32", examples.device):  # PyTorch's default for convolutions on a GPU has 10 bits of mantissa
        for begin in range(0, len(shards), at_once):
            some = slice(begin, begin + at_once)
            clients = shards[some], coins[some], noises[some], settings[some]
            updates[some], counts[some] = _train(clipping, layout, start[some], *clients)
    if below is not None:
        below[:] = [dpsgd.below(count, noise) for dpsgd, count, noise in zip(settings, counts, noises, strict=True)]
    return updates


@dataclass(frozen=True)
class _Together:
    """Clips the gradients of several clients at once: see :func:`coterie.client.ghost.clipped_sums`.

    Attributes:
        sums: clips gradients, given parameters, records, which of these count, and clipping norms.
        numbers: float32 numbers held for each record.
    """

    sums: Callable[[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    numbers: int


@lru_cache(maxsize=8)
def _together(model: nn.Module, examples: Examples, task: Task) -> _Together | None:
    """Return how several clients are clipped at once; None: they are clipped one after the other.

    Raises:
        ModelError: the network has no per-record gradients at all.
    """
    if chain_kind(model, len(examples.shape)) == "linear" and _traced(model, examples, fast=False)[0] is not None:
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        widths = sum(layer.in_features + layer.out_features for layer in linear)
        return _Together(partial(clipped_sums, model, loss=task), 3 * widths)  # float32 and float64
    if examples.device == "cpu":
        return None
    _clipper(model, examples, task, True)
    alone = _alone(model, examples, task)
    return _Together(alone.together, alone.numbers) if alone.supports_vmap(examples) else None


def _train(
    clipping: _Together | Clipper,
    layout: Layout,
    start: Vectors,
    shards: Sequence[Shard],
    coins: Generators,
    noises: Generators,
    settings: Sequence[DPSGD],
) -> tuple[Vectors, list[float]]:
    """Return the (n, d) updates and the n sums of :func:`short` over all steps."""
    device, d = settings[0].device, layout.size
    x, y, sizes = padded(shards, device)
    rows = torch.arange(len(shards), device=device)[:, None]
    anchors = torch.tensor(start, device=device)
    vectors = anchors.clone()
    parameters = layout.split(vectors)
    clips, rates, thresholds = (
        torch.tensor([[getattr(dpsgd, name)] for dpsgd in settings], dtype=torch.float64, device=device)
        for name in ("clip_norm", "step_size", "norm_threshold")
    )
    counts = torch.zeros(len(shards), dtype=torch.float64, device=device)
    counting = any(dpsgd.noise_of_norms is not None for dpsgd in settings)
    memory_mb = min(dpsgd.memory_mb for dpsgd in settings)
    if device != "cpu":
        memory_mb = max(memory_mb, free_memory(device) >> 21)  # half of it, in MB
    chunk = _chunk(len(shards) * clipping.numbers, memory_mb)
    clients = list(zip(settings, coins, sizes, strict=True))
    idle = np.zeros(0, np.int64)
    adam = None if settings[0].optimizer == "sgd" else NoisyAdam(settings)

    def sums(records: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        return clipping.sums(parameters, x[rows, records], y[rows, records], there, clips)

    for step, total in enumerate(_ahead(_noise(settings, noises, d, device), max(dpsgd.steps for dpsgd in settings))):
        batches = [dpsgd.sample(coin, size) if step < dpsgd.steps else idle for dpsgd, coin, size in clients]
        index = np.full((len(shards), max(map(len, batches))), -1)
        for line, batch in zip(index, batches, strict=True):
            line[: len(batch)] = batch
        for clipped, norms, there in _within_memory(sums, index, chunk, device):
            total += clipped
            if counting:
                counts += short(norms, thresholds).where(there, 0).sum(1)
        moves = rates * total if adam is None else adam.moves(total, vectors)
        if settings[0].penalty.weight:
            lrs = torch.tensor([[dpsgd.lr if step < dpsgd.steps else 0.0] for dpsgd in settings], device=device)
            moves += lrs * settings[0].penalty.gradient(vectors, anchors)
        vectors -= moves
    return (vectors - anchors).cpu().numpy(), counts.tolist()


def _noise(settings: Sequence[DPSGD], noises: Generators, size: int, device: str) -> Callable[[int], Tensor]:
    """Return what draws the (n, size) noise of a step in units of the clipping norm, 0 for clients that are done."""
    if _makes_noise(device, noises):
        streams = DeviceNoise([rng.bytes(32) for rng in noises], device)
        stds = torch.tensor([own.noise_multiplier for own in settings], dtype=torch.float64, device=device)
        steps = torch.tensor([own.steps for own in settings], device=device)
        return lambda step: streams.gaussian(stds * (step < steps), size)
    clients = list(zip(settings, noises, strict=True))

    def noise(step: int) -> Tensor:
        drawn = [own.noise(rng, size) if step < own.steps else np.zeros(size) for own, rng in clients]
        return torch.as_tensor(np.stack(drawn), device=device)

    return noise


def _makes_noise(device: str, noises: Generators) -> bool:
    return device != "cpu" and all(map(is_secret, noises))


def _within_memory(
    sums: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], index: npt.NDArray[np.int64], chunk: int, device: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield clipped sums and norms of chunks of records, and which count; halve chunks that exceed the memory."""
    waiting = deque(np.array_split(index, range(chunk, index.shape[1], chunk), axis=1) if index.size else ())
    while waiting:
        some = waiting.popleft()
        records = torch.as_tensor(some, device=device)
        try:
            yield *sums(records, records >= 0), records >= 0
        except torch.OutOfMemoryError:
            if some.shape[1] == 1:
                raise
            free_device()
            waiting.extendleft(reversed(np.array_split(some, 2, axis=1)))


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
    clipper = _clipper(model, Examples(x.shape[1:], x.dtype, torch.float32, settings.device), loss, ghost)
    clipper.set_values({name: parameter.data for name, parameter in trainable(model).items()})
    total = torch.zeros(num_parameters(model), dtype=torch.float64, device=settings.device)
    for records in torch.split(x, _chunk(clipper.numbers, settings.memory_mb)):
        if len(records):
            targets = torch.zeros(len(records), device=settings.device)
            total += clipper.clipped_sum(records, targets, settings.clip_norm)[0]
    return total


class _Opacus(Clipper):
    """The reference: materialises all gradients, by the hooks of Opacus.

    Args:
        network: A network that is traced to known layers (:func:`~coterie.client.records_apart.traced`). It is wrapped.
        loss: Maps outputs and targets to (m,) losses.
    """

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        from opacus import GradSampleModule  # seconds

        self.named, self._loss = trainable(network), loss
        self._network = GradSampleModule(network, loss_reduction="sum", strict=False)
        self.numbers = 3 * num_parameters(network)  # Opacus holds copies

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the (m, *shape) gradients of every parameter."""
        parameters: Sequence[Any] = list(self.named.values())  # with grad_sample
        with warnings.catch_warnings():
            # Expected: the first layer's input is data.
            warnings.filterwarnings(
                "ignore", "Full backward hook is firing when gradients are computed with respect to"
            )
            try:
                torch.autograd.backward(self._loss(self._network(x), y).sum())
            except BaseException:
                _clipper.cache_clear()  # Opacus would add the remains of this pass to the next one
                raise
        samples = [getattr(parameter, "grad_sample", None) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = parameter.grad_sample = None
        shapes = [(len(x), *parameter.shape) for parameter in parameters]
        return [
            torch.zeros(shape, device=x.device) if sample is None else sample
            for shape, sample in zip(shapes, samples, strict=True)
        ]

    def clipped_sum(self, x: Tensor, y: Tensor, clip_norm: float | Tensor) -> tuple[Tensor, Tensor]:
        return _clipped_sum(self.gradients(x, y), clip_norm)


class BatchesOfOne(Clipper):
    """The definition: the gradient of each record, or unit, in a batch of its own, by ``torch.func`` or autograd.

    A copy of the network, made for each call, computes it. Buffers and attributes carry nothing to the next batch.

    Args:
        network: Any network.
        loss: Maps outputs and targets to (m,) losses.
        units: Whether records belong to units. Examples are then (m, r, *shape), and targets (m, r).
    """

    def __init__(self, network: nn.Module, loss: Loss, units: bool = False) -> None:
        self._network, self.named = network, trainable(network)
        self._loss, self._units, self._mapped = loss, units, True
        self.numbers = 3 * num_parameters(network)

    def _of_batch(self) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
        """Return the loss of a batch as a function of parameters, examples and targets."""
        network = fresh(self._network)

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = call(network, values, x)
            if not self._units:
                return self._loss(outputs, y).sum()
            there = y.isfinite() if y.is_floating_point() else y >= 0  # see _of_units
            losses = self._loss(outputs, y.where(there, 0))
            return losses.where(there, 0).sum() / there.sum().clamp(min=1)

        return loss

    def _batches(self, values: Tensor, dim: int) -> Tensor:
        return values if self._units else values.unsqueeze(dim)

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the (m, *shape) gradients of every parameter."""
        values = {name: value.detach() for name, value in self.named.items()}
        x, y = self._batches(x, 1), self._batches(y, 1)
        if self._mapped:
            with quiet_vmap():
                gradients = vmap(grad(self._of_batch()), in_dims=(None, 0, 0))(values, x, y)
            return [gradients[name] for name in self.named]
        rows = [self._gradient(values, *batch) for batch in zip(x, y, strict=True)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _gradient(self, values: dict[str, Tensor], x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the gradient of one batch by autograd, which also follows conditions on values."""
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss = self._of_batch()(leaves, x, y)
        if not loss.requires_grad:
            return [torch.zeros_like(value) for value in leaves.values()]
        return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)

    def clipped_sum(self, x: Tensor, y: Tensor, clip_norm: float | Tensor) -> tuple[Tensor, Tensor]:
        """Clip the gradients of all batches; see :class:`~coterie.client.ghost.Clipper`."""
        return _clipped_sum(self.gradients(x, y), clip_norm)

    def together(
        self, parameters: dict[str, Tensor], x: Tensor, y: Tensor, there: Tensor, clips: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Same as :func:`~coterie.client.ghost.clipped_sums` for any network: materialises all gradients."""
        batches = self._batches(x, 2), self._batches(y, 2)
        with quiet_vmap():
            gradients = vmap(vmap(grad(self._of_batch()), in_dims=(None, 0, 0)))(parameters, *batches)
        flat = torch.cat([gradients[name].reshape(*there.shape, -1) for name in parameters], dim=2).double()
        norms = torch.linalg.vector_norm(flat, dim=2)
        weights, kept = clip_factors(norms, clips)
        kept &= there
        return torch.bmm((weights * kept)[:, None], flat.where(kept[..., None], 0))[:, 0], norms

    def supports_vmap(self, examples: Examples) -> bool:
        """Whether :meth:`together` supports the network."""
        shape, x_dtype, y_dtype, device = examples
        parameters = {name: torch.zeros(1, *value.shape, device=device) for name, value in self.named.items()}
        ones = torch.ones(1, 1, device=device)
        x = torch.zeros(1, 1, *shape, dtype=x_dtype, device=device)
        y = torch.zeros(1, 1, dtype=y_dtype, device=device)
        try:
            self.together(parameters, x, y, ones.bool(), ones.double())
        except RuntimeError:
            return False
        return True

    def prepare(self, x: Tensor, y: Tensor) -> BatchesOfOne:
        """Choose between ``torch.func`` and a loop, and return this object.

        Args:
            x: Two records, or units.
            y: Their targets.

        Raises:
            ModelError: Neither supports the network, or two passes over the records differ.
        """
        for self._mapped in (True, False):
            try:
                forth, back = self.gradients(x, y), self.gradients(x.flip(0), y.flip(0))
                break
            except Exception as error:  # a user's code
                reason = error
        else:
            raise ModelError(
                f"DP-SGD: {type(self._network).__name__} has no gradient for a batch of one record: "
                f"{' '.join(str(reason).split())[:300]}"
            ) from reason
        if name := _differing(self.named, [gradient.flip(0) for gradient in back], forth):
            raise ModelError(
                f"DP-SGD: two passes over the same records give '{name}' of {type(self._network).__name__} other "
                "gradients: build it without dropout and other randomness, and without state between calls"
            )
        return self


@lru_cache(maxsize=64)
def _of_units(shard: Shard) -> Shard:
    """Return (U, r, *shape) examples and (U, r) targets of the units.

    A missing record is zero, with target -1 or NaN: another unit's record in its place could make a gradient NaN.
    """
    assert shard.units is not None
    rows = shard.units.rows
    there = rows >= 0
    x = np.zeros((*rows.shape, *shard.x.shape[1:]), shard.x.dtype)
    y = np.full(rows.shape, np.nan if np.issubdtype(shard.y.dtype, np.floating) else -1, shard.y.dtype)
    x[there], y[there] = shard.x[rows[there]], shard.y[rows[there]]
    return replace(shard, x=x, y=y, units=None)


@lru_cache(maxsize=4)
def _clipper(model: nn.Module, examples: Examples, loss: Loss, ghost: bool, units: bool = False) -> Clipper:
    """Return how gradients are clipped: by the fastest way that is known to follow the definition.

    Raises:
        ModelError: A batch of one record, or of one unit, has no gradient.
    """
    _check_layers(model)
    shape, x_dtype, y_dtype, device = examples
    x = torch.arange(2).reshape(2, *[1] * len(shape)).repeat(1, *shape)  # tokens 0 and 1
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) if x_dtype.is_floating_point else x
    x, y = x.to(device, x_dtype), torch.zeros(2, dtype=y_dtype, device=device)
    _check_constants(model, x, y, loss)
    if not units:
        network, form = _traced(model, examples, fast=ghost)
        if network is not None and ghost and supports(network):
            ghost_clipping = GhostClipping(network, loss, form)
            ghost_clipping.gradients(x, y)  # learns how many numbers a record needs
            return ghost_clipping
        clipping = None if network is None else _by_opacus(network, _alone(model, examples, loss), loss, x, y)
        return clipping or _alone(model, examples, loss).prepare(x, y)
    return _alone(model, examples, loss, units).prepare(torch.stack([x, x.flip(0)]), torch.stack([y, y]))


def _alone(model: nn.Module, examples: Examples, loss: Loss, units: bool = False) -> BatchesOfOne:
    network = copy.deepcopy(model).to(examples.device)
    set_training(network)
    return BatchesOfOne(network, loss, units)


def _traced(model: nn.Module, examples: Examples, *, fast: bool) -> tuple[nn.Module | None, torch.memory_format]:
    """Return a traced copy of a network, None if it is not known to treat records apart, and its memory format."""
    if fast and chain_kind(model, len(examples.shape)) == "image":  # GroupNorm is slower with channels last
        network, form = fast_network(model, examples.shape, examples.device)
    else:
        network, form = copy.deepcopy(model).to(examples.device), torch.contiguous_format
    set_training(network)
    return traced(network, examples), form


def _check_layers(model: nn.Module) -> None:
    """Check that no number is in half precision, and no layer changes parameters or needs more than one record."""
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if value.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(
                f"DP-SGD: '{name}' of {type(model).__name__} is {str(value.dtype).removeprefix('torch.')}, in whose "
                "rounding a record may move the gradients of others: build the network in float32, or use "
                "privacy-unit = client"
            )
    for name, layer in model.named_modules():
        trains = layer.training or any(parameter.requires_grad for parameter in layer.parameters())
        if isinstance(layer, _BatchNorm) and (trains or not layer.track_running_stats):
            raise ModelError(
                f"DP-SGD: layer '{name}' ({type(layer).__name__}) mixes the records of a batch: replace batch "
                "normalisation by GroupNorm: coterie.models.without_batch_norm(network)"
            )
        if getattr(layer, "max_norm", None) is not None:
            raise ModelError(
                f"DP-SGD: layer '{name}' ({type(layer).__name__}) changes the rows of its weight that a batch reads: "
                "build it without max_norm"
            )


def _check_constants(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> None:
    """Check that a pass over a record in training leaves buffers and frozen parameters as they are."""
    network = copy.deepcopy(model).to(x.device)
    set_training(network)
    before = {name: value.clone() for name, value in constants(network).items()}
    try:
        loss(network(x[:1]), y[:1])
    except Exception:  # a user's code; the gradient is tried next, and says why
        return
    if changed := differing(before, constants(network)):
        raise ModelError(f"DP-SGD: '{changed[0]}' of {type(network).__name__} changes in training: {CONSTANT}")


def _by_opacus(network: nn.Module, alone: BatchesOfOne, loss: Loss, x: Tensor, y: Tensor) -> _Opacus | None:
    """Return the clipping of a traced network by Opacus; None if its gradients of two records are not the defined ones.

    The trace shows that records are treated apart. Opacus may not know an option of a layer.
    """
    drawn = torch.Generator().manual_seed(0)
    values = {name: 0.1 * torch.randn(value.shape, generator=drawn) for name, value in alone.named.items()}
    alone.set_values({name: value.to(x.device) for name, value in values.items()})
    try:
        clipping = _Opacus(network, loss)
        clipping.set_values({name: value.to(x.device) for name, value in values.items()})
        gradients = clipping.gradients(x, y)
    except Exception:  # of Opacus, about a layer that it does not support
        return None
    return None if _differing(clipping.named, gradients, alone.gradients(x, y)) else clipping


def _differing(names: Iterable[str], gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return the name of the first parameter whose gradients differ by more than rounding."""
    rounding = 1e-5 * max(float(gradient.abs().max()) for gradient in expected)
    for name, gradient, reference in zip(names, gradients, expected, strict=True):
        if (
            gradient.shape != reference.shape
            or not (gradient - reference).abs().max() <= 0.01 * reference.abs().max() + rounding
        ):
            return name
    return None


def _chunk(numbers: int, memory_mb: int) -> int:
    """Return the physical batch size, given the float32 numbers per record."""
    return max(1, min(_MAX_RECORDS, memory_mb * 2**20 // (4 * numbers)))


def _clipped_sum(gradients: Sequence[Tensor], clip_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the (d,) float64 sum of clipped gradients in units of the clipping norm, and (m,) norms, in parts."""
    flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    some = max(1, _MAX_NUMBERS // sum(gradient.shape[1] for gradient in flat))
    total: Tensor = flat[0].new_zeros((), dtype=torch.float64)
    norms = []
    for parts in zip(*(torch.split(gradient, some) for gradient in flat), strict=True):
        records = torch.cat(parts, dim=1).double()
        norms.append(torch.linalg.vector_norm(records, dim=1))
        weights, kept = clip_factors(norms[-1], clip_norm)
        total = total + weights @ (records if kept.all() else records.where(kept[:, None], 0))
    return total, torch.cat(norms)
