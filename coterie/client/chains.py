"""Chains of common layers, trained for n clients at once with gradients by hand.

A linear layer of n clients is one batched matrix product; their convolutions are n groups of one convolution. Vectors
have the shape (n, b, F), images (b, n C, H, W) with channels last on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from coterie.client.sgd import LocalTrainingConfig
from coterie.models import is_plain

_ATEN = torch.ops.aten


def chain_kind(model: nn.Module, dimensions: int) -> str | None:
    """Return which chain a network is; None: neither, or one with shared layers, constants, or types but float32.

    - "linear": linear layers on vectors with ReLU between them;
    - "image": convolutions, ReLU and max-pooling, then a flattening, then linear layers and ReLU.

    Args:
        model: the network.
        dimensions: of one example.
    """
    layers = list(model) if type(model) is nn.Sequential and is_plain(model) else []
    if not layers or len(set(layers)) < len(layers):
        return None
    kinds = [type(layer) for layer in layers]
    if {nn.Flatten, nn.Linear, nn.ReLU}.issuperset(kinds):
        vectors = dimensions == 1 or kinds[0] is nn.Flatten
        return "linear" if vectors and not any(getattr(layer, "inplace", False) for layer in layers) else None
    images = dimensions == 3 and {nn.Conv2d, nn.MaxPool2d, nn.Flatten, nn.Linear, nn.ReLU}.issuperset(kinds)
    return "image" if images and _convolves_then_flattens(layers, kinds) else None


def _convolves_then_flattens(layers: list[nn.Module], kinds: list[type[nn.Module]]) -> bool:
    flat = kinds.index(nn.Flatten) if kinds.count(nn.Flatten) == 1 else 0
    return (
        flat > 0
        and kinds[0] is nn.Conv2d
        and kinds[-1] is nn.Linear
        and nn.Linear not in kinds[:flat]
        and not {nn.Conv2d, nn.MaxPool2d} & set(kinds[flat:])
        and all(
            getattr(layer, name, value) == value
            for layer in layers
            for name, value in {"padding_mode": "zeros", "return_indices": False, "start_dim": 1, "end_dim": -1}.items()
        )
        and not any(isinstance(layer.padding, str) for layer in layers if isinstance(layer, nn.Conv2d))
    )


@dataclass(frozen=True)
class _Call:
    """One layer in the forward pass, with what its backward pass needs."""

    name: str
    layer: nn.Module
    before: Tensor
    after: Tensor
    saved: Tensor | None = None


@torch.no_grad()
def step_of_chain(
    model: nn.Module,
    parameters: dict[str, Tensor],
    anchors: dict[str, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    config: LocalTrainingConfig,
) -> None:
    """Take one step of SGD with cross-entropy for every client, in place.

    Args:
        model: a chain (:func:`chain_kind`).
        parameters: of the n clients, (n, *shape) each.
        anchors: the same before the first step.
        batch: (n, b, *shape) examples, (n, b) labels, and (n, b) weights of the losses.
        config: step size and penalty.
    """
    x, y, weight = batch
    calls = _forward(model, parameters, x)
    slope = calls[-1].after.softmax(2)  # the gradient of the weighted loss with respect to each layer's output
    slope.scatter_add_(2, y[..., None], slope.new_full((*y.shape, 1), -1))
    slope *= weight[..., None]
    if config.penalty.weight:
        pulls = {name: config.penalty.gradient(value, anchors[name]) for name, value in parameters.items()}
    last = next(i for i, call in enumerate(calls) if isinstance(call.layer, nn.Conv2d | nn.Linear))
    for call in reversed(calls[last:]):
        slope = _backward(call, parameters, slope, config.lr, inner=call is not calls[last])
    if config.penalty.weight:
        for name, value in parameters.items():
            value.sub_(pulls[name], alpha=config.lr)


def _forward(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> list[_Call]:
    n = len(x)
    images = any(isinstance(layer, nn.Conv2d) for layer in model.children())
    hidden = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=_form(x)) if images else x.flatten(2)
    calls = []
    for name, layer in model.named_children():
        before, saved = hidden, None
        if isinstance(layer, nn.Linear):
            hidden = torch.bmm(before, parameters[f"{name}.weight"].mT)
            if layer.bias is not None:
                hidden += parameters[f"{name}.bias"][:, None]
        elif isinstance(layer, nn.Conv2d):
            saved = parameters[f"{name}.weight"].flatten(0, 1)
            bias = None if layer.bias is None else parameters[f"{name}.bias"].flatten()
            hidden = conv2d(before, saved, bias, layer.stride, layer.padding, layer.dilation, n * layer.groups)
        elif isinstance(layer, nn.MaxPool2d):
            hidden, saved = _ATEN.max_pool2d_with_indices(before, *_window(layer))
        elif isinstance(layer, nn.ReLU):
            hidden = before.relu()
        elif images:
            hidden = before.reshape(len(before), n, -1).transpose(0, 1).contiguous()
        calls.append(_Call(name, layer, before, hidden, saved))
    return calls


def _backward(call: _Call, parameters: dict[str, Tensor], slope: Tensor, lr: float, *, inner: bool) -> Tensor:
    """Take a layer's step, and return the gradient at its input; for the first layer, ``slope``."""
    layer, before, n = call.layer, call.before, len(next(iter(parameters.values())))
    if isinstance(layer, nn.Linear):
        matrix, gradient = parameters[f"{call.name}.weight"], slope
        slope = torch.bmm(slope, matrix) if inner else slope
        matrix.baddbmm_(gradient.mT, before, alpha=-lr)
        if layer.bias is not None:
            parameters[f"{call.name}.bias"].sub_(gradient.sum(1), alpha=lr)
    elif isinstance(layer, nn.Conv2d):
        assert call.saved is not None
        wanted, sizes = [inner, True, layer.bias is not None], [len(call.saved)]
        places = layer.stride, layer.padding, layer.dilation, False, [0, 0], n * layer.groups
        slope, weights, biases = _ATEN.convolution_backward(slope, before, call.saved, sizes, *places, wanted)
        matrix = parameters[f"{call.name}.weight"]
        matrix.sub_(weights.reshape(matrix.shape), alpha=lr)
        if layer.bias is not None:
            parameters[f"{call.name}.bias"].sub_(biases.reshape(n, -1), alpha=lr)
    elif isinstance(layer, nn.MaxPool2d):
        slope = _ATEN.max_pool2d_with_indices_backward(slope, before, *_window(layer), call.saved)
    elif isinstance(layer, nn.ReLU):
        slope = _ATEN.threshold_backward(slope, call.after, 0)
    elif before.dim() == 4:
        slope = slope.transpose(0, 1).reshape(before.shape).contiguous(memory_format=_form(before))
    return slope


def _form(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.device.type == "cpu" else torch.contiguous_format


def _window(layer: nn.MaxPool2d) -> tuple[list[int], list[int], list[int], list[int], bool]:
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    kernel, stride, padding, dilation = ([size, size] if isinstance(size, int) else list(size) for size in pairs)
    return kernel, stride, padding, dilation, layer.ceil_mode
