"""Watches one private training of an app that uses Opacus, and takes over what its guarantee depends on.

While :func:`watched` lasts, ``PrivacyEngine.make_private`` returns a data loader and an optimizer of the guard. The
app's model, loss, base optimizer and loop remain its own.

==========  =======================================================================================================
batches     Poisson samples at rate b / N, floor(N / b) an epoch, with coins from the operating system; N is public
charge      the epoch's steps, on disk before its first batch is drawn
gradients   clipped record by record in float64; one that is not finite counts as zero
noise       float64, from the operating system, in units of the clipping norm; at least the charged multiplier
steps       one for each batch; between two of them, and before the first, no parameter may change
==========  =======================================================================================================
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader

from coterie.client.ghost import clip_factors
from coterie.guard.terms import GuardError, checked_event
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
        self._last: dict[str, torch.Tensor] = {}
        self._batches: deque[tuple[int, float]] = deque()
        self.optimizer: DPOptimizer | None = None
        self.events: Counter[Event] = Counter()

    def released(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays after the last private step, by the names of the message."""
        if self._module is None:
            return dict(self._received)
        return {name: self._last[own].cpu().numpy() for name, own in self._names.items()}

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
        """Match the model with the received arrays, by name or else by order."""
        state = module.state_dict()
        own = list(state) if set(state) != set(self._received) else list(self._received)
        if len(own) != len(self._received):
            raise GuardError("the model of make_private has other parameters than the message")
        self._names = dict(zip(self._received, own, strict=True))
        for name, key in self._names.items():
            values = self._received[name]
            held = state[key].cpu().numpy()
            if held.dtype != values.dtype or not np.array_equal(held, values):
                raise GuardError(
                    f"'{key}' differs from the message when make_private is called: load the received arrays"
                )
        self._module = module
        self.remember()

    def remember(self) -> None:
        """Take the parameters as they are after a private step."""
        assert self._module is not None
        self._last = {name: values.detach().clone() for name, values in self._module.state_dict().items()}

    def check_unchanged(self) -> None:
        """Raise :class:`GuardError` if a parameter or buffer changed since the last private step."""
        assert self._module is not None
        for name, values in self._module.state_dict().items():
            if not torch.equal(self._last[name].to(values.device), values):
                raise GuardError(f"'{name}' changed other than by a private step")

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
    """Opacus' optimizer with the guard's clipping, noise and permissions."""

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
        self._records = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step with parameters that only this optimizer has changed."""
        self._watch.check_unchanged()
        result: float | None = super().step(closure)
        self._watch.remember()
        return result

    def clip_and_accumulate(self) -> None:
        """Add the gradients of the records, each clipped; those that are not finite count as zero."""
        clip_norm = float(self.max_grad_norm)
        check_clip_norm(clip_norm)
        samples = self.grad_samples
        norms = torch.stack([each.flatten(1).double().norm(dim=1) for each in samples]).norm(dim=0)
        factors, kept = clip_factors(norms, clip_norm)
        for parameter, each in zip(self.params, samples, strict=True):
            _check_processed_flag(parameter.grad_sample)
            flat = each.flatten(1).double()
            total = factors @ (flat if kept.all() else flat.where(kept[:, None], 0))
            parameter.summed_grad = total if parameter.summed_grad is None else parameter.summed_grad + total
            _mark_as_processed(parameter.grad_sample)
        self._records += len(samples[0])

    def add_noise(self) -> None:
        """Use the permission of the batch, then add noise at unit scale and multiply by the clipping norm."""
        noise, records, self._records = float(self.noise_multiplier), self._records, 0
        self._watch.use_batch(records, noise)
        for parameter in self.params:
            _check_processed_flag(parameter.summed_grad)
            drawn = torch.from_numpy(gaussian(self._noise, noise, tuple(parameter.summed_grad.shape)))
            total = (parameter.summed_grad + drawn.to(parameter.device)) * float(self.max_grad_norm)
            parameter.grad = total.to(parameter.dtype).view_as(parameter)
            _mark_as_processed(parameter.summed_grad)


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
