"""Training and evaluation of one network on one device: the fastest way is chosen once, then cached.

The ClientApp trains one client per call, the local engine a whole cohort. One client after the other is the reference.
Several clients at once have equal results up to rounding: chains of common layers by hand
(:mod:`coterie.client.chains`), other networks by ``torch.func.vmap``. :mod:`coterie.client.dpsgd` trains with
record-level privacy.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from coterie.client.chains import chain_kind, step_of_chain
from coterie.client.device import free_device, on_device, products, to_numpy
from coterie.client.sgd import LocalTrainingConfig, Schedule, Step, descend, schedule, stepper
from coterie.client.trainers import train_by
from coterie.datasets import Shard
from coterie.models import call, trainable
from coterie.wire.messages import Layout

# Bytes of models in one batch on a CPU, and images in one step of image chains: larger batches do not fit its cache.
_CACHE = 2_600_000
_IMAGES = 256
# Clients from which ``vmap`` on a CPU is faster than one after the other: twice as fast for 8, a third as fast for 1.
_FEW = 4
# Examples per forward pass; bounds memory.
CHUNK = 4096
# The same for convolutional networks on a CPU, whose activations then fit its cache.
_IMAGE_CHUNK = 256

Vectors: TypeAlias = npt.NDArray[np.float32]
#: Parameters of several clients: an array, or a tensor on their device.
V = TypeVar("V", Vectors, Tensor)


class Examples(NamedTuple):
    """Shape of an example, types of examples and targets, and their device: what a backend depends on."""

    shape: tuple[int, ...]
    x: torch.dtype
    y: torch.dtype
    device: str

    @classmethod
    def of(cls, x: npt.NDArray[Any], y: npt.NDArray[Any], device: str) -> Examples:
        """Describe these examples and targets."""
        return cls(tuple(x.shape[1:]), torch.as_tensor(x[:0]).dtype, torch.as_tensor(y[:0]).dtype, device)


def train(
    model: nn.Module,
    layout: Layout,
    start: V,
    shards: Sequence[Shard],
    rngs: Sequence[np.random.Generator],
    config: LocalTrainingConfig,
    *,
    batched: bool | None = None,
) -> V:
    """Train all clients, and return their updates (trained minus start).

    Args:
        model: the network; its own parameters are not used.
        layout: of its parameters.
        start: (n, d) initial parameters of each client; if they are a tensor on the device, the updates stay there.
        shards: the n clients' data.
        rngs: n generators, for the order of examples.
        config: hyper-parameters.
        batched: whether clients train at once instead of one after the other; None: what is known to be faster.

    Returns:
        (n, d) float32 updates.
    """
    backend = backend_of(model, Examples.of(shards[0].x, shards[0].y, config.device))
    with products(config.precision, config.device):
        return backend.updates(layout, start, shards, rngs, config, batched)


@lru_cache(maxsize=8)
def backend_of(model: nn.Module, examples: Examples) -> Backend:
    """Return the backend of a network; its parameters are not used."""
    return Backend(model, examples)


class Backend:
    """A network on a device.

    Attributes:
        model: the network as it was built.
        network: a copy that computes the same outputs faster.
        form: memory format of its examples.
        chain: "linear" or "image" (:func:`~coterie.client.chains.chain_kind`); None for other networks.
    """

    def __init__(self, model: nn.Module, examples: Examples) -> None:
        self.model, self._examples = model, examples
        self.chain = chain_kind(model, len(examples.shape))
        self.network, self.form = fast_network(model, examples.shape, examples.device)
        self._on_cpu = examples.device == "cpu"
        self._convolutional = is_convolutional(model)

    @cached_property
    def _training(self) -> _Training:
        return _Training(self.network)

    @cached_property
    def _supports_vmap(self) -> bool:
        return supports_vmap(self.network, self._examples)

    def _by_hand(self, config: LocalTrainingConfig) -> bool:
        """Whether the network is a chain, and the loss one whose gradient it has."""
        task = config.task.resolved(real=self._examples.y.is_floating_point)
        return self.chain is not None and task.has_softmax_gradient

    def _step(self, config: LocalTrainingConfig) -> Step | None:
        """Return the step of several clients at once: by hand if it has no mixed precision; None: not supported."""
        if self._by_hand(config) and config.precision != "bfloat16":
            return step_of_chain
        return _step_by_vmap if self._supports_vmap else None

    def updates(
        self,
        layout: Layout,
        start: V,
        shards: Sequence[Shard],
        rngs: Sequence[np.random.Generator],
        config: LocalTrainingConfig,
        batched: bool | None,
    ) -> V:
        """Return (n, d) updates; see :func:`train`."""
        if (trainer := config.plugins.trainer_class) is not None:
            name = f"trainer '{config.plugins.trainer}'"
            assert isinstance(start, np.ndarray)
            return train_by(trainer, name, self.model, layout, start, shards, rngs, config)
        count = self._clients_at_once(layout, shards, config)
        if batched is None:
            batched = self._pays(count, config)
        step = self._step(config) if batched and config.plugins.plain else None
        if step is None:
            return self._one_after_the_other(layout, start, shards, rngs, config)
        schedules = [schedule(rng, len(shard.y), config) for shard, rng in zip(shards, rngs, strict=True)]
        # Similar numbers of steps train together, more steps first.
        order = np.argsort([-len(batches) for batches in schedules], kind="stable")
        groups = deque(np.array_split(order, -(-len(order) // count)))
        updates = _empty_like(start)
        while groups:
            group = groups.popleft()
            data = [shards[i] for i in group], [schedules[i] for i in group]
            try:
                with self._threads():
                    updates[group] = self._together(step, layout, start[group], *data, config)
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
                free_device()
                groups.extendleft(reversed(np.array_split(group, 2)))
        moved: V = updates
        return moved

    def _clients_at_once(self, layout: Layout, shards: Sequence[Shard], config: LocalTrainingConfig) -> int:
        if not self._on_cpu:
            return len(shards)
        count = _CACHE // max(4 * layout.size, 1)
        if self.chain == "image":
            most = max(len(shard.y) for shard in shards)
            count = min(count, _IMAGES // max(1, min(config.batch_size, most)))
        return max(1, min(count, len(shards)))

    def _pays(self, count: int, config: LocalTrainingConfig) -> bool:
        """Whether this number of clients at once is known to train faster than one after the other."""
        if self._by_hand(config) or not self._on_cpu:
            return count > 1 or self.chain != "image"  # a chain of images has only one group then
        return count >= _FEW and not self._convolutional

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Limit PyTorch to one thread for a group of linear chains on a CPU.

        Their products are so small that several threads mostly wait for each other.
        """
        before = torch.get_num_threads()
        if self._on_cpu and self.chain == "linear":
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _one_after_the_other(
        self,
        layout: Layout,
        start: V,
        shards: Sequence[Shard],
        rngs: Sequence[np.random.Generator],
        config: LocalTrainingConfig,
    ) -> V:
        updates = _empty_like(start)
        model = self._training
        parameters = model.parameters
        for i, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
            x, y = on_device(shard, config.device)
            x = x.contiguous(memory_format=self.form)
            with torch.no_grad():
                anchors = [torch.as_tensor(value, device=config.device) for value in layout.split(start[i]).values()]
                for value, anchor in zip(parameters.values(), anchors, strict=True):
                    value.copy_(anchor)
            step = stepper(parameters.values(), anchors, config)
            for batch in schedule(rng, len(shard.y), config):
                index = torch.as_tensor(batch, device=config.device)
                loss = config.loss(model(x[index]), y[index]).mean()
                step(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True))
            trained = torch.cat([parameters[name].detach().reshape(-1) for name in layout.names])
            updates[i] = (trained if isinstance(start, Tensor) else to_numpy(trained)) - start[i]
        moved: V = updates
        return moved

    def _together(
        self,
        step: Step,
        layout: Layout,
        start: Vectors | Tensor,
        shards: Sequence[Shard],
        schedules: Sequence[Schedule],
        config: LocalTrainingConfig,
    ) -> Vectors | Tensor:
        vectors = start.clone() if isinstance(start, Tensor) else torch.tensor(start, device=config.device)
        origins = vectors.clone() if config.penalty.weight else vectors
        x, y, _ = padded(shards, config.device)
        rows = torch.arange(len(shards), device=config.device)[:, None]
        running = 0
        for index, weight in _padded_schedules(schedules, config.device):
            if running != len(index):
                running = len(index)
                parameters, anchors = (layout.split(values[:running]) for values in (vectors, origins))
            batch = x[rows[:running], index], y[rows[:running], index], weight
            step(self.network, parameters, anchors, batch, config)
        return vectors - start if isinstance(start, Tensor) else to_numpy(vectors) - start

    def outputs(
        self, layout: Layout, models: Vectors, x: npt.NDArray[np.float32] | Tensor, most: int = CHUNK
    ) -> Iterator[tuple[slice, Iterable[Tensor]]]:
        """Yield chunks of examples, and the outputs of each model for them.

        Args:
            layout: of the parameters.
            models: (k, d) parameters.
            x: (n, *shape) examples.
            most: examples of a chunk.
        """
        device, k = self._examples.device, len(models)
        parameters = layout.split(torch.as_tensor(models, device=device))
        together = k > 1 and not self._on_cpu and self._supports_vmap  # small networks do not fill a GPU
        if not together:
            parameters_by_model = [
                {name: in_form(value[i], self.form) for name, value in parameters.items()} for i in range(k)
            ]
        chunk = min(_IMAGE_CHUNK, most) if self._on_cpu and self._convolutional else most
        output = partial(call, self.network)
        for begin in range(0, len(x), chunk):
            rows = slice(begin, begin + chunk)
            xb = torch.as_tensor(x[rows], device=device).contiguous(memory_format=self.form)
            if together:
                yield rows, vmap(output, in_dims=(0, None))(parameters, xb)
            else:
                yield rows, (output(values, xb) for values in parameters_by_model)


def _empty_like(vectors: Vectors | Tensor) -> Any:
    return torch.empty_like(vectors) if isinstance(vectors, Tensor) else np.empty_like(vectors)


class _Training:
    """A network with float32 parameters of its trainable part, to change in place.

    They are the network's own where these are float32; others get float32 copies, so that small steps are not rounded
    away, and the network computes in its own types.
    """

    def __init__(self, network: nn.Module) -> None:
        own = trainable(network)
        self._network, self._typed = network, any(value.dtype != torch.float32 for value in own.values())
        self.parameters: dict[str, Tensor] = dict(own)
        if self._typed:
            self.parameters = {name: value.detach().float().clone().requires_grad_() for name, value in own.items()}

    def __call__(self, x: Tensor) -> Any:
        return call(self._network, self.parameters, x) if self._typed else self._network(x)


def _step_by_vmap(
    model: nn.Module,
    parameters: dict[str, Tensor],
    anchors: dict[str, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    config: LocalTrainingConfig,
) -> None:
    """Take one step of SGD of every client: of (n, *shape) parameters of any network, in place."""
    x, y, weight = batch
    for value in parameters.values():
        value.requires_grad_()
    output = vmap(partial(call, model))(parameters, x)
    losses = config.loss(output.flatten(0, 1), y.flatten())
    # A client's loss depends on its own parameters only, so the gradient of the sum holds every client's gradient.
    total, named = (losses * weight.flatten()).sum(), list(parameters.values())
    gradients = torch.autograd.grad(total, named, allow_unused=True, materialize_grads=True)
    descend(parameters.values(), gradients, anchors.values(), config)


def padded(shards: Sequence[Shard], device: str) -> tuple[Tensor, Tensor, list[int]]:
    """Return (n, m, *shape) examples and (n, m) labels, padded with zeros, and the true sizes."""
    pairs = [on_device(shard, device) for shard in shards]
    x, y = ([pair[i] for pair in pairs] for i in range(2))
    sizes = [len(shard.y) for shard in shards]
    if len(pairs) == 1:  # without a copy
        return x[0][None], y[0][None], sizes
    if len(set(sizes)) == 1:
        return torch.stack(x), torch.stack(y), sizes
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True), sizes


def _padded_schedules(schedules: Sequence[Schedule], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (m, b) indices of every step, and weights that average over each true batch and are 0 on padding.

    Only the m clients that take the step have a row: schedules with more steps come first.
    """
    steps = max(map(len, schedules))
    running = [sum(len(batches) > step for batches in schedules) for step in range(steps)]
    width = max((len(batch) for batches in schedules for batch in batches), default=0)
    index = np.zeros((steps, len(schedules), width), np.int64)
    weight = np.zeros((steps, len(schedules), width), np.float32)
    for i, batches in enumerate(schedules):
        for step, batch in enumerate(batches):
            index[step, i, : len(batch)] = batch
            weight[step, i, : len(batch)] = 1 / len(batch)
    both = torch.as_tensor(index, device=device), torch.as_tensor(weight, device=device)
    return ((indices[:m], weights[:m]) for indices, weights, m in zip(*both, running, strict=True))


def fast_network(model: nn.Module, shape: tuple[int, ...], device: str) -> tuple[nn.Module, torch.memory_format]:
    """Return a copy of the network that computes the same outputs faster, and the memory format of its examples.

    Convolutions and pooling on a CPU are up to 1.7 times as fast with channels last, and ReLU is cheaper after
    max-pooling than before it. Networks that reshape images by ``view`` do not support channels last.
    """
    model = copy.deepcopy(model).to(device)
    if device != "cpu" or len(shape) != 3 or not is_convolutional(model):
        return model, torch.contiguous_format
    for module in model.modules():
        if type(module) is nn.Sequential:
            for i in range(len(module) - 1):
                first, second = module[i], module[i + 1]
                if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
                    module[i], module[i + 1] = second, first
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            copy.deepcopy(last).eval()(torch.zeros(2, *shape).contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return model, torch.contiguous_format
    return last, torch.channels_last


def is_convolutional(model: nn.Module) -> bool:
    """Whether a network has two-dimensional convolutions."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def supports_vmap(model: nn.Module, examples: Examples, compute: Callable[..., Any] | None = None) -> bool:
    """Whether ``torch.func.vmap`` can compute several models of this network at once.

    That is outputs, or what ``compute`` returns for (2, *shape) parameters, (2, 2, *shape) examples and (2, 2) targets.
    """
    model = copy.deepcopy(model).to(examples.device)
    models = {name: torch.stack([value.detach().float()] * 2) for name, value in trainable(model).items()}
    x = torch.zeros(2, 2, *examples.shape, dtype=examples.x, device=examples.device)
    y = torch.zeros(2, 2, dtype=examples.y, device=examples.device)
    try:
        compute(models, x, y) if compute else vmap(partial(call, model))(models, x)
    except RuntimeError:
        return False
    return True


def in_form(value: Tensor, form: torch.memory_format) -> Tensor:
    """Return weights of convolutions with strides of this format, also those of one channel."""
    if value.dim() != 4 or form == torch.contiguous_format:
        return value
    return torch.empty_like(value, memory_format=form).copy_(value)
