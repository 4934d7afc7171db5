"""Ghost clipping: clipped gradients without materialised per-record gradients.

The gradient of a linear layer for one record is g aᵀ, of norm |g| |a|, where a is the layer's input and g the loss's
gradient at its output (Goodfellow, arXiv:1510.01799). :class:`ChainClipping` clips many clients at once that way, if
the network is a chain of such layers.

:class:`GhostClipping` supports other networks, one client at a time. A layer with weights shared by T positions
(convolutions, sequences) has the gradient Σ_t g_t a_tᵀ. Its squared norm is Σ_{t,s} (g_t·g_s) (a_t·a_s) (Li et al.,
arXiv:2110.05679; Bu et al., arXiv:2205.10683), which is cheaper than the gradient if T is small; otherwise the gradient
of that layer alone is materialised. The backward pass computes no gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm, pad

from coterie.client.backend import in_form
from coterie.client.clipper import Clipper, Loss, OneClient, Sums, Values, clip_factors
from coterie.models import trainable


class ChainClipping(Clipper):
    """Clipped sums of gradients of several clients at once, for a chain of linear layers.

    Args:
        model: a linear chain (:func:`coterie.client.chains.chain_kind`).
        loss: maps outputs and targets to the loss of every record.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.numbers = 3 * sum(layer.in_features + layer.out_features for layer in linear)  # float32 and float64

    def sums(self, parameters: Values, x: Tensor, y: Tensor, counted: Tensor, clip_norms: Tensor) -> Sums:
        """Clip by norms from the inputs and slopes of layers; see :class:`~coterie.client.clipper.Clipper`."""
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        hidden = x.flatten(0, 1)
        for name, layer in self._model.named_children():
            if isinstance(layer, nn.Linear):
                inputs[name] = hidden.reshape(*y.shape, hidden.shape[1])
                output = torch.bmm(inputs[name], parameters[f"{name}.weight"].mT)
                if layer.bias is not None:
                    output += parameters[f"{name}.bias"][:, None]
                outputs[name] = output if outputs else output.requires_grad_()
                hidden = output.flatten(0, 1)
            else:
                hidden = layer(hidden)
        slopes = torch.autograd.grad(self._loss(hidden, y.flatten()).sum(), list(outputs.values()))
        backward = {name: slope.double() for name, slope in zip(outputs, slopes, strict=True)}
        forward = {name: activations.detach().double() for name, activations in inputs.items()}
        squares = torch.zeros((), dtype=torch.float64, device=x.device)
        for name, g in backward.items():
            squares = squares + g.square().sum(2) * (forward[name].square().sum(2) + (f"{name}.bias" in parameters))
        norms = squares.sqrt()
        weights, finite = clip_factors(norms, clip_norms)
        counted = (counted & finite)[..., None]
        sums = {}
        for name, g in backward.items():
            clipped = torch.where(counted, weights[..., None] * g, 0)
            sums[f"{name}.weight"] = torch.bmm(clipped.mT, forward[name].where(counted, 0))
            sums[f"{name}.bias"] = clipped.sum(1)
        return torch.cat([sums[name].flatten(1) for name in parameters], dim=1), norms


# ---- networks of other layers -----------------------------------------------------------------------------

# Numbers in a block of inputs or gradients: 2 MB in float64, which a cache holds.
_BLOCK = 2**18
# Terms in a matrix product over records and positions, and limit of √spread / norm: see `_Products`.
_MAX_TERMS, _MAX_CANCELLATION = 2048, 100.0


class Gradients:
    """Gradients of one parameter for each of m records.

    Attributes:
        squares: (m,) float64 squared norms.
        spread: (m,) squared norms before cancellation between positions, or () 0: the sum reads the norm's numbers.
        numbers: float32 numbers held.
    """

    squares: Tensor
    spread: Tensor = torch.zeros((), dtype=torch.float64)
    numbers: int

    def sum(self, weights: Tensor, counted: Tensor) -> Tensor:
        """Return the float64 sum over records.

        Args:
            weights: (m,) float64 factors of records.
            counted: (m,) which records count; the others may hold numbers that are not finite.
        """
        raise NotImplementedError


def _keep(values: Tensor, counted: Tensor) -> Tensor:
    """Return values of records with zeros for those that do not count, without a look at them on a GPU."""
    if counted.device.type == "cpu" and counted.all():
        return values
    return values.where(counted.reshape(-1, *[1] * (values.dim() - 1)), 0)


class _Rows(Gradients):
    """Materialised float32 gradients (m, *shape). The sum reads the same numbers as the norm."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.numbers = rows, rows.numel()
        self.squares = torch.cat([block.double().square().sum(1) for block in self._blocks(rows.flatten(1))])

    def sum(self, weights: Tensor, counted: Tensor) -> Tensor:
        total = weights.new_zeros(self._rows[0].numel())
        blocks = map(self._blocks, (self._rows.flatten(1), weights, counted))
        for rows, block_weights, block_counted in zip(*blocks, strict=True):
            total += block_weights @ _keep(rows, block_counted).double()
        return total.reshape(self._rows.shape[1:])

    def _blocks(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values, max(1, _BLOCK * len(self._rows) // self.numbers))


class _Products(Gradients):
    """Gradients Σ_t g_t a_tᵀ of a weight, never materialised: inputs (m, k, p, T) and slopes (m, k, d, T) of k groups.

    Positions may cancel, in another order in the norm than in the sum over records: without a bound, a server that
    chooses the model could let a gradient of any length round to 0 in the norm alone. The *spread* R = Σ_t |a_t|² Σ_t
    |g_t|² bounds the squared norm without cancellation (Cauchy-Schwarz). Records are clipped as if their norm were at
    least √R / K, K = _MAX_CANCELLATION, so that their factors are at most c K / √R. With u = 2⁻⁵³:

    - The squared norm errs by at most (p + d + 2T + 4) u R, so that norms above √R / K err by (p + d + 2T + 4) u K² / 2
      of their length: 6e-9 if p + d = 10,000.
    - A sum over n records, in products of N ≤ _MAX_TERMS terms, errs by at most N u Σ_i √R_i times their factors, which
      is N n K u c: 2.3e-8 c for n = 1,000 records that all cancel as far as is possible, and 4.6e-7 c for 20,000.

    Networks of the package have √R / norm < 5; a record above K is clipped to less than c.
    """

    def __init__(self, inputs: Tensor, slopes: Tensor, shape: torch.Size) -> None:
        self._inputs, self._slopes, self._shape = inputs, slopes, shape
        self.numbers = inputs.numel() + slopes.numel()
        squares, spreads = [], []
        for a, g in self._blocks(inputs, slopes):
            a, g = a.double(), g.double()
            spreads.append((a.square().sum((2, 3)) * g.square().sum((2, 3))).sum(1))
            terms = (a.mT @ a) * (g.mT @ g)
            squares.append(terms.sum(3).sum(2).sum(1).clamp(min=0))
        self.squares, self.spread = torch.cat(squares), torch.cat(spreads)

    def sum(self, weights: Tensor, counted: Tensor) -> Tensor:
        total = weights.new_zeros(self._inputs.shape[1], self._slopes.shape[2], self._inputs.shape[2])
        for a, g, block_weights, block_counted in self._blocks(self._inputs, self._slopes, weights, counted):
            a, g = _keep(a, block_counted), _keep(g, block_counted)
            g = block_weights[:, None, None, None] * g
            # (k, d, rows T) times (k, rows T, p)
            total += g.permute(1, 2, 0, 3).flatten(2) @ a.double().permute(1, 0, 3, 2).flatten(1, 2)
        return total.reshape(self._shape)

    def _blocks(self, *values: Tensor) -> Iterable[tuple[Tensor, ...]]:
        rows = min(_MAX_TERMS // self._inputs.shape[3], _BLOCK * len(self._inputs) // self.numbers)
        return zip(*(torch.split(value, max(1, rows)) for value in values), strict=True)


class _Lookups(Gradients):
    """Gradients of an embedding (V, d): one row for each record and token that it holds.

    Args:
        rows: (r, d) float32, the sum over the token's positions.
        records: (r,) record of every row.
        tokens: (r,) token of every row.
        size: m.
        shape: (V, d).
    """

    def __init__(self, rows: Tensor, records: Tensor, tokens: Tensor, size: int, shape: torch.Size) -> None:
        self._rows, self._records, self._tokens, self._shape = rows, records, tokens, shape
        self.numbers, squares = rows.numel(), rows.double().square().sum(1)
        self.squares = squares.new_zeros(size).index_add(0, records, squares)

    def sum(self, weights: Tensor, counted: Tensor) -> Tensor:
        rows = self._rows.where(counted[self._records, None], 0) * weights[self._records, None]
        return weights.new_zeros(self._shape).index_add(0, self._tokens, rows)


#: Inputs of a layer and gradients at its outputs (slopes), for each of its calls.
Calls = Sequence[tuple[Tensor, Tensor]]
GradientsOfLayer = dict[Tensor, Gradients]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _shared(
    layer: nn.Linear | Convolution, calls: Calls, windows: Callable[[Tensor], Tensor] = lambda x: x
) -> GradientsOfLayer:
    """Return the gradients of a layer whose weight is shared by positions, of all calls together.

    Args:
        layer: has a weight of k p d numbers in k groups, and a bias or None.
        calls: inputs and slopes (m, k, d, T).
        windows: maps inputs to (m, k, p, T), which may have more numbers.
    """

    def positions(rows: slice) -> Tensor:
        return _joined([windows(x[rows]) for x, _ in calls])

    g = _joined([slopes for _, slopes in calls])
    (m, k, d, length), p = g.shape, layer.weight[0].numel()
    gradients: GradientsOfLayer = {}
    if layer.bias is not None:
        gradients[layer.bias] = _Rows(g.sum(3).flatten(1))
    if _products_are_cheaper(p, d, length):
        gradients[layer.weight] = _Products(positions(slice(None)), g, layer.weight.shape)
    else:
        rows, step = g.new_empty(m, k, d, p), max(1, _BLOCK // (k * p * length))
        for begin in range(0, m, step):
            block = slice(begin, begin + step)
            torch.matmul(g[block], positions(block).mT, out=rows[block])
        gradients[layer.weight] = _Rows(rows.reshape(m, *layer.weight.shape))
    return gradients


def _products_are_cheaper(p: int, d: int, length: int) -> bool:
    """Whether products are faster than materialised gradients of d × p numbers for T positions.

    Products take T² (p + d) multiplications for the norm and T p d for the sum, in float64. Materialised gradients take
    T p d in float32, at half of the time of each, and p d numbers are written, and converted and read twice, at the
    time of about 20 multiplications each; converting inputs and slopes takes that of 80. (CPU, one thread.)
    """
    return (2 * length**2 + 80 * length) * (p + d) + length * p * d < 20 * p * d


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=3) if len(parts) > 1 else parts[0]


def _linear(layer: nn.Linear, calls: Calls) -> GradientsOfLayer:
    """Vectors (m, p) or sequences (m, ..., p); all steps of a recurrent layer are positions too."""

    def as_positions(values: Tensor) -> Tensor:
        return values.reshape(len(values), 1, -1, values.shape[-1]).mT

    return _shared(layer, [(as_positions(x), as_positions(g)) for x, g in calls])


def _convolution(layer: Convolution, calls: Calls) -> GradientsOfLayer:
    """A linear layer on the windows of input that the positions of the output read, p numbers for each group."""
    k, d = layer.groups, layer.out_channels // layer.groups
    return _shared(layer, [(x, g.reshape(len(g), k, d, -1)) for x, g in calls], partial(_windows, layer))


def _windows(layer: Convolution, x: Tensor) -> Tensor:
    """Return the (m, groups, p, T) windows of inputs (m, C, *size), in the order of the weights."""
    dilation, stride, kernel = layer.dilation, layer.stride, layer.kernel_size
    spans = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if layer.padding_mode != "zeros":
        x = pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        around = [(0, 0)] * len(kernel)
    elif layer.padding == "same":
        around = [(span // 2, span - span // 2) for span in spans]
    else:
        around = [(0, 0) if layer.padding == "valid" else (int(size), int(size)) for size in layer.padding]
    if any(map(any, around)):
        x = pad(x, [size for pair in reversed(around) for size in pair])
    sizes = [(size - span - 1) // step + 1 for size, span, step in zip(x.shape[2:], spans, stride, strict=True)]
    inner = [step * by for step, by in zip(x.stride()[2:], dilation, strict=True)]
    outer = [step * by for step, by in zip(x.stride()[2:], stride, strict=True)]
    windows = x.as_strided((*x.shape[:2], *kernel, *sizes), (*x.stride()[:2], *inner, *outer))
    return windows.reshape(len(x), layer.groups, layer.weight[0].numel(), math.prod(sizes))


def _embedding(layer: nn.Embedding, calls: Calls) -> GradientsOfLayer:
    """The gradient of a token's row is the sum over its positions."""
    tokens = torch.cat([x.reshape(len(x), -1) for x, _ in calls], dim=1)
    slopes = torch.cat([g.reshape(len(g), -1, g.shape[-1]) for _, g in calls], dim=1)
    if layer.padding_idx is not None:
        slopes = slopes.where((tokens != layer.padding_idx)[..., None], 0)
    records = torch.arange(len(tokens), device=tokens.device)[:, None]
    keys, places = torch.unique(records * layer.num_embeddings + tokens, return_inverse=True)
    rows = slopes.new_zeros(len(keys), layer.embedding_dim).index_add(0, places.flatten(), slopes.flatten(0, 1))
    owners, tokens_of_rows = keys // layer.num_embeddings, keys % layer.num_embeddings
    return {layer.weight: _Lookups(rows, owners, tokens_of_rows, len(tokens), layer.weight.shape)}


def _group_norm(layer: nn.GroupNorm, calls: Calls) -> GradientsOfLayer:
    """A factor and a summand for each channel of (m, C, *size)."""
    pairs = [(group_norm(x, layer.num_groups, eps=layer.eps), g) for x, g in calls]
    return _affine(layer, [(x.reshape(*x.shape[:2], -1).mT, g.reshape(*g.shape[:2], -1).mT) for x, g in pairs])


def _layer_norm(layer: nn.LayerNorm, calls: Calls) -> GradientsOfLayer:
    """A factor and a summand for each entry of the last dimensions."""
    shape = tuple(layer.normalized_shape)
    pairs = [(layer_norm(x, shape, eps=layer.eps), g) for x, g in calls]
    return _affine(layer, [(x.reshape(len(x), -1, *shape), g.reshape(len(g), -1, *shape)) for x, g in pairs])


def _affine(layer: nn.GroupNorm | nn.LayerNorm, calls: Calls) -> GradientsOfLayer:
    """Return the gradients of factors and summands, given normalised inputs and slopes (m, T, *shape)."""
    x, g = (torch.cat(list(tensors), dim=1) for tensors in zip(*calls, strict=True))
    gradients: GradientsOfLayer = {layer.weight: _Rows((x * g).sum(1))}
    if layer.bias is not None:
        gradients[layer.bias] = _Rows(g.sum(1))
    return gradients


#: Layers with per-record gradients, by their ``forward``: subclasses may add no computation.
_LAYERS: dict[Any, Callable[[Any, Calls], GradientsOfLayer]] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
    nn.Embedding.forward: _embedding,
    nn.GroupNorm.forward: _group_norm,
    nn.LayerNorm.forward: _layer_norm,
}
# Options of these layers that have other gradients, and the values that do not.
_PLAIN = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def _layers(network: nn.Module) -> list[nn.Module]:
    return [
        layer
        for layer in network.modules()
        if type(layer).forward in _LAYERS and any(parameter.requires_grad for parameter in layer.parameters())
    ]


def supports(network: nn.Module) -> bool:
    """Whether each trainable parameter belongs to one supported layer.

    It does not show that records are treated apart, or that parameters are used by their layer alone: the trace does.
    """
    layers = _layers(network)
    owned = [id(value) for layer in layers for value in layer.parameters() if value.requires_grad]
    return (
        len(owned) == len(set(owned))
        and set(owned) == set(map(id, trainable(network).values()))
        and all({name for name, _ in layer.named_parameters()} <= {"weight", "bias"} for layer in layers)
        and all(getattr(layer, name, value) == value for layer in layers for name, value in _PLAIN.items())
    )


class GhostClipping(OneClient):
    """Clipped sums of per-record gradients of a network, layer by layer from its inputs and its outputs' gradients.

    Record i must be row i of every layer's inputs and outputs, and depend on record i alone, as in networks that are
    traced (:func:`coterie.client.records_apart.traced`). A layer may be called several times.

    Args:
        network: is changed: its parameters no longer require gradients, and its layers have hooks (:func:`supports`).
        loss: maps outputs and targets to (m,) losses.
        form: memory format of the network and its records.
    """

    def __init__(self, network: nn.Module, loss: Loss, form: torch.memory_format = torch.contiguous_format) -> None:
        self.named, layers, self._form = trainable(network), _layers(network), form
        self.numbers = 1
        self._trained = set(self.named.values())
        self._network, self._loss = network.requires_grad_(False), loss
        self._calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        for layer in layers:
            layer.register_forward_hook(self._record)

    def _record(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a first layer: its parameters do not require gradients
        self._calls.setdefault(layer, []).append((inputs[0].detach(), output))

    def set_values(self, values: Values) -> None:
        """See :class:`~coterie.client.clipper.OneClient`."""
        super().set_values({name: in_form(value, self._form) for name, value in values.items()})

    def gradients(self, x: Tensor, y: Tensor) -> GradientsOfLayer:
        """Return the gradients of m > 0 records, by parameter; those of a layer that is not called are left out.

        This also learns how many numbers a record needs.
        """
        self._calls = {}
        try:
            total = self._loss(self._network(x.contiguous(memory_format=self._form)), y).sum()
            calls = self._calls
        finally:
            self._calls = {}
        outputs = [output for pairs in calls.values() for _, output in pairs]
        slopes = iter(torch.autograd.grad(total, outputs, allow_unused=True, materialize_grads=True))
        gradients: GradientsOfLayer = {}
        for layer, pairs in calls.items():
            of_layer = _LAYERS[type(layer).forward](layer, [(given, next(slopes)) for given, _ in pairs])
            gradients |= {parameter: rows for parameter, rows in of_layer.items() if parameter in self._trained}
        captured = sum(given.numel() + output.numel() for pairs in calls.values() for given, output in pairs)
        self.numbers = (2 * captured + sum(gradient.numbers for gradient in gradients.values())) // len(x)
        return gradients

    def clipped_sum(self, x: Tensor, y: Tensor, clip_norm: float | Tensor) -> Sums:
        """Clip by norms that are computed layer by layer; see :class:`~coterie.client.clipper.OneClient`."""
        gradients = self.gradients(x, y)
        zero = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        squares = sum((gradient.squares for gradient in gradients.values()), zero)
        spread = sum((gradient.spread for gradient in gradients.values()), zero)
        norms = torch.maximum(squares, spread / _MAX_CANCELLATION**2).sqrt()
        weights, finite = clip_factors(norms, clip_norm)
        sums = {parameter: gradient.sum(weights, finite).flatten() for parameter, gradient in gradients.items()}
        parts = [sums[value] if value in sums else zero.new_zeros(value.numel()) for value in self.named.values()]
        return torch.cat(parts), norms
