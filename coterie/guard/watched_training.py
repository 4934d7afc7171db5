"""Watches one private training of an app that uses Opacus, and takes over what its guarantee depends on.

While :func:`watched` lasts, ``PrivacyEngine.make_private`` returns a data loader and an optimizer of the guard. The
app's model, loss, base optimizer and loop remain its own.

==========  =======================================================================================================
batches     Poisson samples at rate b / N, floor(N / b) an epoch, with coins from the operating system; N is public
charge      the epoch's steps, on disk before its first batch is drawn
gradients   clipped record by record in float64; one that is not finite counts as zero
noise       float64, from the operating system, in units of the clipping norm; at least the charged multiplier
steps       one for each batch: in one call, the guard checks that nothing changed since the step before, uses the
            permission of the batch, writes the gradients, calls the base optimizer, and keeps what it changed
==========  =======================================================================================================

What may train is fixed by ``make_private``: the parameters of the model and of the base optimizer, and which of them
require gradients. Nothing else of the model may change, nor may the base optimizer's state other than in steps.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from logging import INFO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.common.logger import log
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from coterie.client.clipper import clip_factors
from coterie.guard.terms import GuardError, checked_event
from coterie.models import fingerprint, trainable
from coterie.models.errors import few
from coterie.privacy import Event, Streams, check_clip_norm, gaussian

Arrays = Mapping[str, npt.NDArray[Any]]

_ONE_AT_A_TIME = threading.Lock()


class Watch:
    """What the guard knows of one training message.

    Args:
        received: the arrays of the message, by name.
        num_examples: N, the public number of records.
        charge: called with events before they happen; raises if the budget does not allow them.
    """

    def __init__(self, received: Arrays, num_examples: int, charge: Callable[[Counter[Event]], None]) -> None:
        self._received, self._num_examples, self._charge = received, num_examples, charge
        self._module: nn.Module | None = None
        self._names: dict[str, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._requires_grad: dict[str, bool] = {}
        self._last: dict[str, torch.Tensor] = {}
        self._batches: deque[tuple[int, float]] = deque()
        self.optimizer: DPOptimizer | None = None
        self.events: Counter[Event] = Counter()

    def released(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays after the last private step, by the names of the message."""
        if self._module is None:
            return dict(self._received)
        return {name: self._last[key].cpu().numpy() for name, key in self._names.items()}

    def make_private(
        self, make: Callable[..., Any], engine: PrivacyEngine, given: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Return what ``PrivacyEngine.make_private`` does with these arguments, with the guard's loader and optimizer.

        Raises:
            GuardError: it is called twice, the model is not the received one, or a mode is not supported.
        """
        if self._module is not None:
            raise GuardError("the app calls make_private twice for one message")
        batch = given["data_loader"].batch_size
        if type(batch) is not int or not 1 <= batch <= self._num_examples:
            raise GuardError(f"the app's batch size must lie between 1 and num-examples, not {batch}")
        self._begin(given["module"])
        made = make(engine, **{**given, "poisson_sampling": True, "rand_on_empty": False})
        if len(made) != 3 or type(made[1]) is not DPOptimizer:
            raise GuardError("the guard supports flat clipping with materialised gradients on one device only")
        module, theirs, loader = made
        rate = batch / self._num_examples
        sampler = PoissonBatches(self, len(loader.dataset), rate, self._num_examples // batch)
        self.optimizer = GuardedOptimizer(self, theirs, batch)
        self.optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=rate))
        return module, self.optimizer, _with_batches(loader, sampler)

    def _begin(self, module: nn.Module) -> None:
        """Match the model with the received arrays, which may lack frozen parameters and buffers."""
        held, keys = _parameters(module) | _buffers(module), _keys_in(module, list(self._received))
        trains = trainable(module)
        if not held.keys() >= set(keys) or trains.keys() - set(keys):
            raise GuardError("the model of make_private has other parameters than the message")
        if half := [name for name, parameter in trains.items() if parameter.dtype in (torch.float16, torch.bfloat16)]:
            raise GuardError(
                f"'{half[0]}' has half precision, in which a record's gradient changes with others of its batch: train "
                "it in float32"
            )
        lacking = {name: values for name, values in held.items() if name not in keys and not values.requires_grad}
        if lacking:
            text = "the message lacks %s, which must be public: they are constants here, of SHA-256 %s"
            log(INFO, f"guard: {text}", few(lacking), fingerprint(lacking))
        self._names = dict(zip(self._received, keys, strict=True))
        for name, key in self._names.items():
            values, mine = self._received[name], held[key].detach().cpu().numpy()
            if mine.dtype != values.dtype or not np.array_equal(mine, values):
                raise GuardError(
                    f"'{key}' differs from the message when make_private is called: load the received arrays"
                )
        self._module, self._parameters = module, _parameters(module)
        self._requires_grad = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        self._last = {name: values.detach().clone() for name, values in held.items()}

    def check_unchanged(self) -> None:
        """Check the model before a step.

        Raises:
            GuardError: a parameter or buffer was added, removed, exchanged, frozen or unfrozen since make_private, or
                changed since the last private step.
        """
        assert self._module is not None
        now, buffers = _parameters(self._module), _buffers(self._module)
        if now.keys() != self._parameters.keys() or (now | buffers).keys() != self._last.keys():
            raise GuardError("the model has other parameters or buffers than at make_private")
        for name, parameter in now.items():
            if parameter is not self._parameters[name]:
                raise GuardError(f"'{name}' is another parameter than at make_private")
            if parameter.requires_grad != self._requires_grad[name]:
                raise GuardError(f"'{name}' was frozen or unfrozen after make_private, which fixes what trains")
        for name, values in (now | buffers).items():
            if not torch.equal(self._last[name].to(values.device), values):
                raise GuardError(f"'{name}' changed other than by a private step")

    def write_gradients(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make these the only gradients of the model."""
        for parameter in self._parameters.values():
            parameter.grad = gradients.get(parameter)

    def remember(self, trained: Set[nn.Parameter]) -> None:
        """Take these parameters as they are after a private step; all else must be as before."""
        for name, parameter in self._parameters.items():
            if parameter in trained:
                self._last[name] = parameter.detach().clone()

    def open_epoch(self, rate: float, steps: int) -> float:
        """Charge an epoch, and return its noise multiplier."""
        assert self.optimizer is not None
        noise = float(self.optimizer.noise_multiplier)
        events = Counter({checked_event(rate, noise): steps})
        self._charge(events)
        self.events += events
        return noise

    def batch_drawn(self, size: int, noise: float) -> None:
        """Allow one step on a new batch, at this noise multiplier or more."""
        self._batches.append((size, noise))

    def use_batch(self, size: int, noise: float) -> None:
        """Use the permission of a step.

        Raises:
            GuardError: there is none, or it is for another batch or more noise.
        """
        if not self._batches:
            raise GuardError("a step without a batch of the loader that make_private returned")
        drawn, least = self._batches.popleft()
        if size != drawn:
            raise GuardError("a step with other records than those of its batch")
        if not least <= noise < math.inf:
            raise GuardError("the noise multiplier was reduced within an epoch")


class PoissonBatches(UniformWithReplacementSampler):  # type: ignore[misc]
    """Poisson samples; each iteration is an epoch, charged before its first batch."""

    def __init__(self, watch: Watch, size: int, rate: float, steps: int) -> None:
        super().__init__(num_samples=size, sample_rate=rate, steps=steps)
        self._watch = watch

    def __iter__(self) -> Iterator[list[int]]:
        noise = self._watch.open_epoch(self.sample_rate, self.steps)
        coins = Streams().stream("batches")
        for _ in range(self.steps):
            batch = np.flatnonzero(coins.random(self.num_samples) < self.sample_rate).tolist()
            self._watch.batch_drawn(len(batch), noise)
            yield batch


class GuardedOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimizer with the guard's clipping, noise and permissions.

    Raises:
        GuardError: no parameter requires a gradient, or the base optimizer has made steps.
    """

    def __init__(self, watch: Watch, theirs: DPOptimizer, batch: int) -> None:
        super().__init__(
            theirs.original_optimizer,
            noise_multiplier=theirs.noise_multiplier,
            max_grad_norm=theirs.max_grad_norm,
            expected_batch_size=batch,
            loss_reduction=theirs.loss_reduction,
        )
        self._watch = watch
        self._noise = Streams().stream("noise")
        self._sums: list[torch.Tensor] = []
        self._records = 0
        self._base: Optimizer = theirs.original_optimizer
        self._groups = _groups(self._base)
        self._trained: list[Any] = self.params
        if not self._trained:
            raise GuardError("no parameter of the optimizer requires a gradient when make_private is called")
        if not _is_new(self._base):
            raise GuardError("the base optimizer has a state when make_private is called: use a new optimizer")
        self._state = _copy(_state(self._base))

    @property
    def accumulated_iterations(self) -> int:
        """1: a step is one batch. In how many passes is a function of the records, which no divisor may be."""
        return 1

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step on one batch, or add a part of it.

        Raises:
            GuardError: the model or the base optimizer changed other than by a private step, or there is no permission.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._watch.check_unchanged()
        self._check_base()
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            return None
        self.add_noise()
        self.scale_grad()
        # Not self._base.step, which an app may have replaced, but schedulers of step sizes look whether it was called.
        result: float | None = type(self._base).step(self._base)
        self._base._opt_called = True  # type: ignore[attr-defined]
        self._state = _copy(_state(self._base))
        self._watch.remember(set(self._trained))
        if self.step_hook:
            self.step_hook(self)
        return result

    def _check_base(self) -> None:
        """Check that nothing but private steps changed the base optimizer, other than its step sizes."""
        base = self._base
        if self.original_optimizer is not base or _groups(base) != self._groups:
            raise GuardError("the base optimizer has other parameters than at make_private, which fixes what trains")
        hooks = (base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks)
        if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            raise GuardError("the base optimizer has a hook that runs in its steps: remove it")
        if not _same(self._state, _state(base)):
            raise GuardError("the state of the base optimizer changed other than by a private step")

    def clip_and_accumulate(self) -> None:
        """Take the gradients of the records and add them, each clipped; those that are not finite count as zero."""
        clip_norm = float(self.max_grad_norm)
        check_clip_norm(clip_norm)
        samples = [self._get_flat_grad_sample(parameter) for parameter in self._trained]
        norms = torch.stack([_rows(sample).double().norm(dim=1) for sample in samples]).norm(dim=0)
        factors, kept = clip_factors(norms, clip_norm)
        flat = (_rows(sample).double() for sample in samples)
        sums = [factors @ (gradients if kept.all() else gradients.where(kept[:, None], 0)) for gradients in flat]
        self._sums = [one + other for one, other in zip(self._sums, sums, strict=True)] if self._sums else sums
        self._records += len(samples[0])
        for parameter in self._trained:
            parameter.grad_sample = None  # none is used twice, nor seen by the base optimizer

    def add_noise(self) -> None:
        """Use the permission of the batch, then add noise at unit scale and multiply by the clipping norm."""
        noise, clip_norm = float(self.noise_multiplier), float(self.max_grad_norm)
        sums, records, self._sums, self._records = self._sums, self._records, [], 0
        self._watch.use_batch(records, noise)
        gradients = {}
        for parameter, total in zip(self._trained, sums, strict=True):
            drawn = torch.from_numpy(gaussian(self._noise, noise, tuple(total.shape)))
            noisy = (total + drawn.to(parameter.device)) * clip_norm
            gradients[parameter] = noisy.to(parameter.dtype).view_as(parameter)
        self._watch.write_gradients(gradients)


def _rows(gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients of records, of which there may be none, as one row each."""
    return gradients.flatten(1) if gradients.dim() > 1 else gradients[:, None]


def _keys_in(module: nn.Module, received: list[str]) -> list[str]:
    """Return the names in the model of received arrays, in their order; empty if the numbers differ.

    These are the names of the message, or else of the arrays at the same places among all of the model's, or among
    those that train, as adapters of PEFT.
    """
    every = list(module.state_dict())
    if set(received) <= set(every):
        return received
    return next((names for names in (every, list(trainable(module))) if len(names) == len(received)), [])


def _parameters(module: nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters(remove_duplicate=False))


def _buffers(module: nn.Module) -> dict[str, Any]:
    """Also those that ``state_dict`` leaves out."""
    return dict(module.named_buffers(remove_duplicate=False))


def _groups(base: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in base.param_groups]


def _state(base: Optimizer) -> dict[int, Any]:
    """The state by parameter; reading it leaves empty entries, which do not count."""
    return {id(parameter): state for parameter, state in base.state.items() if state}


def _is_new(base: Optimizer) -> bool:
    """Whether the state is that of an optimizer before its first step, which is not always empty."""
    state = _state(base)
    if not state:
        return True
    new = type(base)([dict(group) for group in base.param_groups], **base.defaults)
    return _same(_state(new), state)


def _copy(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(value) for value in state] if isinstance(state, list | tuple) else state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _with_batches(loader: DataLoader[Any], sampler: PoissonBatches) -> DataLoader[Any]:
    """Return the loader with other batches; its ``collate_fn`` handles empty ones."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Take over ``PrivacyEngine.make_private`` in this process, for one message at a time."""
    with _ONE_AT_A_TIME:
        make = PrivacyEngine.make_private
        PrivacyEngine.make_private = lambda engine, **given: watch.make_private(make, engine, given)
        try:
            yield
        finally:
            PrivacyEngine.make_private = make
