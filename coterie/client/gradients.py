"""Gradients of records for DP-SGD: what they are, three ways to clip and sum them, and the choice among these.

A record's gradient is *defined* by a batch of this record alone, whatever the network does with a batch. If records
belong to units, such as patients, a unit takes the place of a record, and its records that of a batch.

:func:`clipper_of` chooses the fastest way that is known to follow the definition:

1. *Chain* (:class:`~coterie.client.ghost.ChainClipping`): several clients at once, for chains of linear layers.
2. *Ghost* (:class:`~coterie.client.ghost.GhostClipping`): one client after the other, without materialised gradients,
   for networks whose layers ghost norms support.
3. *Per record* (:class:`PerRecord`): one client after the other, with materialised gradients: :class:`Opacus`, the
   reference for ghost norms, where its gradients are those of the definition; otherwise :class:`BatchesOfOne`, the
   definition itself, for any network. On a GPU, :class:`MappedClients` takes the definition for several clients at once
   in the place of 2 and 3.

A batch of many records takes the place of many batches only for networks that are traced to layers which treat records
apart (client/records_apart.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.client.backend import Examples, fast_network, supports_vmap
from coterie.client.chains import chain_kind
from coterie.client.clipper import Clipper, Loss, OneClient, Sums, Values, clip_factors
from coterie.client.ghost import ChainClipping, GhostClipping, supports
from coterie.client.records_apart import fresh, quiet_vmap, traced
from coterie.datasets import Shard
from coterie.models import CONSTANT, ModelError, call, constants, differing, num_parameters, set_training, trainable
from coterie.tasks import Task

# Numbers in a float64 copy: 4 MB, which the allocator reuses. Copies of 32 MB take up to 5 times as long.
_MAX_NUMBERS = 2**19


# ---- the choice -----------------------------------------------------------------------------------------------------


def check_supported(model: nn.Module, input_shape: Sequence[int], task: Task, kind: str, units: bool = False) -> None:
    """Check that gradients of records can be taken, and prepare it.

    Args:
        model: the network.
        input_shape: shape of an example, after the features.
        task: what the network predicts.
        kind: "images", "vectors" or "tokens".
        units: whether records belong to units.

    Raises:
        ModelError: gradients per record, or per unit, of the network are not supported.
    """
    x = torch.int64 if kind == "tokens" else torch.float32
    y = torch.float32 if task.real else torch.int64
    clipper_of(model, Examples(tuple(input_shape), x, y, "cpu"), task, batched=True, ghost=True, units=units)


@lru_cache(maxsize=4)
def clipper_of(model: nn.Module, examples: Examples, loss: Loss, *, batched: bool, ghost: bool, units: bool) -> Clipper:
    """Return the fastest way to clip gradients that is known to follow the definition.

    Args:
        model: the network, which is left unchanged.
        examples: shape, types and device of its examples.
        loss: maps outputs and targets to the loss of every record.
        batched: whether several clients may train at once.
        ghost: whether gradients may be clipped without being materialised, one client after the other.
        units: whether records belong to units.

    Raises:
        ModelError: a batch of one record, or of one unit, has no gradient.
    """
    batched = batched and not units
    shape, x_dtype, y_dtype, device = examples
    is_chain = batched and chain_kind(model, len(shape)) == "linear"
    if is_chain and traced(_in_training(model, device), examples) is not None:
        return ChainClipping(model, loss)
    x = torch.arange(2).reshape(2, *[1] * len(shape)).repeat(1, *shape)  # tokens 0 and 1
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) if x_dtype.is_floating_point else x
    x, y = x.to(device, x_dtype), torch.zeros(2, dtype=y_dtype, device=device)
    _check_network(model, x, y, loss)
    if units:
        return BatchesOfOne(model, loss, units, device).prepare(torch.stack([x, x.flip(0)]), torch.stack([y, y]))
    clipper = _of_traced(model, examples, loss, ghost, x, y) or BatchesOfOne(model, loss, device=device).prepare(x, y)
    if batched and device != "cpu":
        mapped, ones = MappedClients(BatchesOfOne(model, loss, device=device)), torch.ones(2, 2, device=device).double()
        if supports_vmap(model, examples, lambda values, x, y: mapped.sums(values, x, y, ones.bool(), ones[:, :1])):
            return mapped
    return clipper


def _of_traced(model: nn.Module, examples: Examples, loss: Loss, ghost: bool, x: Tensor, y: Tensor) -> OneClient | None:
    """Return ghost clipping or Opacus; None if the network is not traced, or Opacus does not follow the definition.

    The trace shows that records are treated apart. Opacus may not know an option of a layer.
    """
    network, form = _in_training(model, examples.device), torch.contiguous_format
    if ghost and chain_kind(model, len(examples.shape)) == "image":  # GroupNorm is slower with channels last
        network, form = fast_network(network, examples.shape, examples.device)
    if traced(network, examples) is None:
        return None
    if ghost and supports(network):
        clipper = GhostClipping(network, loss, form)
        clipper.gradients(x, y)  # learns how many numbers a record needs
        return clipper
    definition, drawn = BatchesOfOne(model, loss, device=examples.device), torch.Generator().manual_seed(0)
    values = {name: 0.1 * torch.randn(value.shape, generator=drawn) for name, value in definition.named.items()}
    values = {name: value.to(x.device) for name, value in values.items()}
    definition.set_values(values)
    try:
        opacus = Opacus(network, loss)
        opacus.set_values(values)
        gradients = opacus.gradients(x, y)
    except Exception:  # of Opacus, about a layer that it does not support
        return None
    return None if _differing(opacus.named, gradients, definition.gradients(x, y)) else opacus


def _in_training(model: nn.Module, device: str) -> nn.Module:
    """Return a copy of a network on a device, in training mode."""
    network = copy.deepcopy(model).to(device)
    set_training(network)
    return network


def _check_network(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> None:
    """Check that a network computes in full precision, and that no layer changes constants or needs several records."""
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
    network = _in_training(model, str(x.device))
    before = {name: value.clone() for name, value in constants(network).items()}
    try:
        loss(network(x[:1]), y[:1])
    except Exception:  # a user's code; the gradient is tried next, and says why
        return
    if changed := differing(before, constants(network)):
        raise ModelError(f"DP-SGD: '{changed[0]}' of {type(network).__name__} changes in training: {CONSTANT}")


# ---- gradients of every record --------------------------------------------------------------------------------------


class PerRecord(OneClient):
    """Clips materialised gradients of every record.

    Args:
        network: the network, which holds the parameters.
        loss: maps outputs and targets to (m,) losses.
    """

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        self._network, self._loss, self.named = network, loss, trainable(network)
        self.numbers = 3 * num_parameters(network)  # float32, and a copy in float64 or of Opacus

    def gradients(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the (m, *shape) gradients of every parameter."""
        raise NotImplementedError

    def clipped_sum(self, x: Tensor, y: Tensor, clip_norm: float | Tensor) -> Sums:
        """Clip float64 copies of the gradients, in parts; see :class:`~coterie.client.clipper.OneClient`."""
        flat = [gradient.reshape(len(gradient), -1) for gradient in self.gradients(x, y)]
        records = max(1, _MAX_NUMBERS // sum(gradient.shape[1] for gradient in flat))
        total: Tensor = flat[0].new_zeros((), dtype=torch.float64)
        norms = []
        for parts in zip(*(torch.split(gradient, records) for gradient in flat), strict=True):
            rows = torch.cat(parts, dim=1).double()
            norms.append(torch.linalg.vector_norm(rows, dim=1))
            weights, finite = clip_factors(norms[-1], clip_norm)
            total = total + weights @ (rows if finite.all() else rows.where(finite[:, None], 0))
        return total, torch.cat(norms)


class Opacus(PerRecord):
    """The reference: the hooks of Opacus, on a traced network (:func:`~coterie.client.records_apart.traced`)."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        from opacus import GradSampleModule  # seconds

        super().__init__(network, loss)
        self._network = GradSampleModule(network, loss_reduction="sum", strict=False)

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """See :class:`PerRecord`."""
        parameters: Sequence[Any] = list(self.named.values())  # with grad_sample
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing when")  # the first layer's input is data
            try:
                torch.autograd.backward(self._loss(self._network(x), y).sum())
            except BaseException:
                clipper_of.cache_clear()  # Opacus would add the remains of this pass to the next one
                raise
        gradients = []
        for parameter in parameters:
            sample = getattr(parameter, "grad_sample", None)
            parameter.grad = parameter.grad_sample = None
            gradients.append(torch.zeros(len(x), *parameter.shape, device=x.device) if sample is None else sample)
        return gradients


class BatchesOfOne(PerRecord):
    """The definition: the gradient of each record, or unit, in a batch of its own, by ``torch.func`` or autograd.

    A copy of the network, made for each call, computes it. Buffers and attributes carry nothing to the next batch.

    Args:
        network: any network, which is copied.
        loss: maps outputs and targets to (m,) losses.
        units: whether records belong to units. Examples are then (m, r, *shape), and targets (m, r).
        device: device of the examples.
    """

    def __init__(self, network: nn.Module, loss: Loss, units: bool = False, device: str = "cpu") -> None:
        super().__init__(_in_training(network, device), loss)
        self._units, self._mapped = units, True

    def mapped(self) -> Callable[[Values, Tensor, Tensor], dict[str, Tensor]]:
        """Return what maps parameters, m batches and their targets to (m, *shape) gradients, by ``torch.func``."""
        return vmap(grad(self._loss_of_batch()), in_dims=(None, 0, 0))

    def _loss_of_batch(self) -> Callable[[Values, Tensor, Tensor], Tensor]:
        """Return the loss of a batch as a function of parameters, examples and targets."""
        network = fresh(self._network)

        def loss(values: Values, x: Tensor, y: Tensor) -> Tensor:
            outputs = call(network, values, x)
            if not self._units:
                return self._loss(outputs, y).sum()
            present = y.isfinite() if y.is_floating_point() else y >= 0  # see by_unit
            losses = self._loss(outputs, y.where(present, 0))
            return losses.where(present, 0).sum() / present.sum().clamp(min=1)

        return loss

    def gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """See :class:`PerRecord`."""
        values = {name: value.detach() for name, value in self.named.items()}
        if not self._units:
            x, y = x.unsqueeze(1), y.unsqueeze(1)
        if self._mapped:
            with quiet_vmap():
                gradients = self.mapped()(values, x, y)
            return [gradients[name] for name in self.named]
        rows = [self._gradient(values, *batch) for batch in zip(x, y, strict=True)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _gradient(self, values: Values, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the gradient of one batch by autograd, which also follows conditions on values."""
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss = self._loss_of_batch()(leaves, x, y)
        if not loss.requires_grad:
            return [torch.zeros_like(value) for value in leaves.values()]
        return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)

    def prepare(self, x: Tensor, y: Tensor) -> BatchesOfOne:
        """Choose between ``torch.func`` and a loop, by two records, or units, and return this object.

        Raises:
            ModelError: neither supports the network, or two passes over the records differ.
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


class MappedClients(Clipper):
    """The gradients of :class:`BatchesOfOne` for several clients at once, by ``torch.func``."""

    def __init__(self, definition: BatchesOfOne) -> None:
        self._definition, self.numbers = definition, definition.numbers

    def sums(self, parameters: Values, x: Tensor, y: Tensor, counted: Tensor, clip_norms: Tensor) -> Sums:
        """Clip float64 copies of materialised gradients; see :class:`~coterie.client.clipper.Clipper`."""
        with quiet_vmap():
            gradients = vmap(self._definition.mapped())(parameters, x.unsqueeze(2), y.unsqueeze(2))
        flat = torch.cat([gradients[name].reshape(*counted.shape, -1) for name in parameters], dim=2).double()
        norms = torch.linalg.vector_norm(flat, dim=2)
        weights, finite = clip_factors(norms, clip_norms)
        counted = counted & finite
        return torch.bmm((weights * counted)[:, None], flat.where(counted[..., None], 0))[:, 0], norms


def _differing(names: Iterable[str], gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return the name of the first parameter whose gradients differ by more than rounding."""
    rounding = 1e-5 * max(float(gradient.abs().max()) for gradient in expected)
    for name, gradient, reference in zip(names, gradients, expected, strict=True):
        same_shape = gradient.shape == reference.shape
        if not (same_shape and (gradient - reference).abs().max() <= 0.01 * reference.abs().max() + rounding):
            return name
    return None


@lru_cache(maxsize=64)
def by_unit(shard: Shard) -> Shard:
    """Return (U, r, *shape) examples and (U, r) targets of the units.

    A missing record is zero, with target -1 or NaN: another unit's record in its place could make a gradient NaN.
    """
    assert shard.units is not None
    rows = shard.units.rows
    present = rows >= 0
    x = np.zeros((*rows.shape, *shard.x.shape[1:]), shard.x.dtype)
    y = np.full(rows.shape, np.nan if np.issubdtype(shard.y.dtype, np.floating) else -1, shard.y.dtype)
    x[present], y[present] = shard.x[rows[present]], shard.y[rows[present]]
    return replace(shard, x=x, y=y, units=None)
